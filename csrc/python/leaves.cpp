#include "leaves.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace specdec::python {

World world{};

bool read_tensor(PyObject* tensor, DLTensor* out) {
  if (world.exchange->dltensor_from_py_object_no_sync(tensor, out) != 0) {
    PyErr_Clear();  // sparse, meta, a batch of vmap
    return false;
  }
  if (out->device.device_type != kDLCPU || out->dtype.code == kDLComplex) return false;
  if (out->data) return true;
  int64_t numel = 1;
  for (int32_t d = 0; d < out->ndim; ++d) numel *= out->shape[d];
  return numel == 0;  // functionalize shows a tensor without memory
}

namespace {

using torch::headeronly::ScalarType;

ScalarType type_of(const DLDataType& type) {
  if (type.lanes != 1) return ScalarType::Undefined;
  switch (type.code * 256 + type.bits) {
    case kDLFloat * 256 + 32:
      return ScalarType::Float;
    case kDLFloat * 256 + 16:
      return ScalarType::Half;
    case kDLBfloat * 256 + 16:
      return ScalarType::BFloat16;
    case kDLInt * 256 + 64:
      return ScalarType::Long;
    case kDLInt * 256 + 32:
      return ScalarType::Int;
    case kDLUInt * 256 + 8:
      return ScalarType::Byte;
    case kDLUInt * 256 + 16:
      return ScalarType::UInt16;
    case kDLUInt * 256 + 32:
      return ScalarType::UInt32;
    case kDLBool * 256 + 8:
      return ScalarType::Bool;
    default:
      return ScalarType::Undefined;  // moved as bytes, or refused by the checks
  }
}

bool is_a(PyObject* object, PyObject* type) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type;
}

}  // namespace

View view_of(const DLTensor& t) {
  return {static_cast<char*>(t.data) + t.byte_offset,
          t.ndim,
          t.shape,
          t.strides,
          type_of(t.dtype),
          t.dtype.bits / 8};
}

void Leaves::clear() {
  key.clear();
  tensors.clear();
  objects.clear();
  tuples.clear();
  types.clear();
  held.clear();
}

bool Leaves::add_tensor(PyObject* tensor) {
  DLTensor t;
  if (!read_tensor(tensor, &t)) return false;
  const bool is_float = t.dtype.code == kDLFloat || t.dtype.code == kDLBfloat;
  if (is_float && aoti_torch_grad_mode_is_enabled()) {  // who wants a gradient is refused
    const Ref wanted(PyObject_GetAttrString(tensor, "requires_grad"));
    if (wanted.get() != Py_False) {
      PyErr_Clear();
      return false;
    }
  }
  put('T', t.dtype);
  put(&t.ndim, sizeof(t.ndim));
  put(t.shape, t.ndim * sizeof(int64_t));
  put(t.strides, t.ndim * sizeof(int64_t));
  tensors.push_back(t);
  objects.push_back(tensor);
  return true;
}

bool Leaves::add_tuple(PyObject* tuple, char tag) {
  const Py_ssize_t size = PyTuple_Size(tuple);
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(tuple));
  put(tag, type);
  put(&size, sizeof(size));
  types.push_back(type);
  tuples.push_back(tuple);
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!add(PyTuple_GetItem(tuple, i))) return false;
  }
  return true;
}

bool Leaves::add_text(PyObject* text) {
  Py_ssize_t size = 0;
  const char* letters = PyUnicode_AsUTF8AndSize(text, &size);
  if (!letters) {
    PyErr_Clear();
    return false;
  }
  put('S', size);
  put(letters, size);
  return true;
}

bool Leaves::add(PyObject* argument) {
  if (argument == Py_None) {
    key.push_back('N');
    return true;
  }
  if (is_a(argument, world.tensor_type)) return add_tensor(argument);
  if (PyUnicode_Check(argument)) return add_text(argument);
  if (PyBool_Check(argument)) {
    key.push_back(argument == Py_True ? '1' : '0');
    return true;
  }
  if (PyTuple_Check(argument)) return add_tuple(argument, '(');
  if (PyLong_Check(argument)) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(argument, &overflow);
    put('I', value);
    return overflow == 0;
  }
  if (PyFloat_Check(argument)) {
    put('F', PyFloat_AsDouble(argument));
    return true;
  }
  if (is_a(argument, world.dtype_type)) {
    put('D', argument);  // torch keeps one object a dtype
    return true;
  }
  if (is_a(argument, world.layout_type)) {
    held.emplace_back(PyObject_GetAttrString(argument, "parts"));
    if (held.back() && PyTuple_Check(held.back().get())) {
      return add_tuple(held.back().get(), 'L');
    }
    PyErr_Clear();
  }
  return false;
}

}  // namespace specdec::python
