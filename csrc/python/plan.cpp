#include "plan.h"

#include <algorithm>

namespace specdec::python {
namespace {

// Index of the only entry that is `object`; false if there is none, or more than one: two
// arguments that are one tensor now may be two tensors next time.
bool find_only(const std::vector<PyObject*>& objects, PyObject* object, size_t* index) {
  size_t found = 0;
  for (size_t i = 0; i < objects.size(); ++i) {
    if (objects[i] == object) {
      ++found;
      *index = i;
    }
  }
  return found == 1;
}

bool plan_tensors(PyObject* list, const Leaves& leaves, Slot* slot) {
  slot->kind = Slot::Kind::kLeaves;
  for (Py_ssize_t i = 0, n = PySequence_Size(list); i < n; ++i) {
    const Ref item(PySequence_GetItem(list, i));
    size_t leaf = 0;
    if (!find_only(leaves.objects, item.get(), &leaf)) return false;
    slot->at.push_back(leaf);
  }
  return true;
}

bool plan_argument(PyObject* argument, const Leaves& leaves, Slot* slot) {
  if (argument == Py_None) return true;
  size_t leaf = 0;
  if (reinterpret_cast<PyObject*>(Py_TYPE(argument)) == world.tensor_type) {
    if (!find_only(leaves.objects, argument, &leaf)) return false;  // made by the front
    slot->kind = Slot::Kind::kLeaf;
    slot->at = {leaf};
    return true;
  }
  if (PyLong_Check(argument)) {
    slot->kind = Slot::Kind::kInteger;
    slot->integer = PyLong_AsLongLong(argument);
    return !PyErr_Occurred();
  }
  if (PyFloat_Check(argument)) {
    slot->kind = Slot::Kind::kReal;
    slot->real = PyFloat_AsDouble(argument);
    return true;
  }
  if (PyList_Check(argument) || PyTuple_Check(argument)) {
    return plan_tensors(argument, leaves, slot);
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(argument)) != world.dtype_type) return false;
  slot->kind = Slot::Kind::kInteger;  // kernels go by the type of the result
  return true;
}

bool plan_result(PyObject* result, const Leaves& leaves, Plan* plan) {
  Slot slot;
  size_t leaf = 0;
  if (find_only(leaves.objects, result, &leaf)) {  // out=
    slot.kind = Slot::Kind::kLeaf;
    slot.at = {leaf};
  } else {
    DLTensor place;
    if (!read_tensor(result, &place) || place.ndim > kMostAxes) return false;
    const View view = view_of(place);
    if (!view.is_contiguous()) return false;
    slot.kind = Slot::Kind::kResult;
    slot.at = {plan->results.size()};
    Result& wanted = plan->results.emplace_back();
    wanted.type = place.dtype;
    wanted.dim = place.ndim;
    std::copy_n(place.shape, place.ndim, wanted.sizes);
    std::copy_n(place.strides, place.ndim, wanted.strides);
    wanted.bytes = static_cast<size_t>(view.numel() * view.element_size());
  }
  plan->slots.push_back(std::move(slot));
  return true;
}

bool plan_returned(PyObject* value, const Leaves& leaves, const std::vector<PyObject*>& results,
                   Shape* shape) {
  if (value == Py_None) return true;
  const auto is = [shape](Shape::Kind kind) {
    shape->kind = kind;
    return true;
  };
  if (find_only(results, value, &shape->at)) return is(Shape::Kind::kResult);
  if (find_only(leaves.objects, value, &shape->at)) return is(Shape::Kind::kLeaf);
  if (find_only(leaves.tuples, value, &shape->at)) return is(Shape::Kind::kTuple);
  if (!PyTuple_Check(value)) return false;
  shape->type = Ref::to(reinterpret_cast<PyObject*>(Py_TYPE(value)));
  for (Py_ssize_t i = 0, n = PyTuple_Size(value); i < n; ++i) {
    PyObject* item = PyTuple_GetItem(value, i);
    if (!plan_returned(item, leaves, results, &shape->items.emplace_back())) return false;
  }
  return is(Shape::Kind::kMade);
}

}  // namespace

bool make_plan(PyObject* op, PyObject* flat, PyObject* results, PyObject* returned,
               const Leaves& leaves, Plan* plan) {
  const char* name = op == Py_None ? nullptr : PyUnicode_AsUTF8AndSize(op, nullptr);
  const cpu::Direct direct = name ? cpu::direct_of(name) : nullptr;
  if (!direct) return false;
  for (Py_ssize_t i = 0, n = PyTuple_Size(flat); i < n; ++i) {
    Slot slot;
    if (!plan_argument(PyTuple_GetItem(flat, i), leaves, &slot)) return false;
    plan->slots.push_back(std::move(slot));
  }
  std::vector<PyObject*> made;
  for (Py_ssize_t i = 0, n = PyTuple_Size(results); i < n; ++i) {
    PyObject* result = PyTuple_GetItem(results, i);
    const size_t before = plan->results.size();
    if (!plan_result(result, leaves, plan)) return false;
    if (plan->results.size() > before) made.push_back(result);
  }
  if (!plan_returned(returned, leaves, made, &plan->returned)) return false;
  plan->direct = direct;
  return true;
}

}  // namespace specdec::python
