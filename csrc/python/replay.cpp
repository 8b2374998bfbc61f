// Calls that were made before. The Python front of an op checks its arguments, lays them out flat
// and allocates the results; all of this follows from what is not numbers in a tensor: shapes,
// strides, types, scalars, names. A call whose arguments have the key of an earlier one is
// therefore run from the plan that the earlier one left, without Python and without dispatch.
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "plan.h"

namespace specdec::python {
namespace {

constexpr size_t kMostPlans = 8192, kMostOnce = 1 << 16;

// Never destroyed: at exit the interpreter that owns its objects is gone before it.
auto& plans = *new std::unordered_map<std::string, std::shared_ptr<const Plan>>;
// Hashes of keys that came once: a plan is made for the second call, so that keys that never come
// again, as with lengths that grow with a text, cost next to nothing.
std::unordered_set<size_t> once;
PyObject* new_tuple = nullptr;  // tuple.__new__

bool came_before(const std::string& key) {
  if (once.size() >= kMostOnce) once.clear();
  return !once.insert(std::hash<std::string>()(key)).second;
}

// The leaves of one call, in memory that the thread keeps. A call may come inside another one (a
// finalizer that runs while results are allocated): it then has its own.
class CallLeaves {
 public:
  CallLeaves() { std::swap(leaves_, kept()); }
  ~CallLeaves() {
    leaves_.clear();
    std::swap(leaves_, kept());
  }
  Leaves* get() { return &leaves_; }

 private:
  static Leaves& kept() {
    static thread_local Leaves leaves;
    return leaves;
  }
  Leaves leaves_;
};

// The leaves of front(*arguments, **options) under a chosen backend.
bool describe(PyObject* front, PyObject* arguments, PyObject* options, PyObject* backend,
              Leaves* leaves) {
  if (!leaves->add(front) || !leaves->add(backend) || !leaves->add(arguments)) return false;
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(options, &at, &name, &value);) {
    if (!leaves->add(name) || !leaves->add(value)) return false;
  }
  return true;
}

// Whether something listens to torch's dispatcher: a mode, a trace, a profiler.
bool is_watched() {
  for (Py_ssize_t i = 0, n = PyTuple_Size(world.listeners); i < n; ++i) {
    const Ref answer(PyObject_CallNoArgs(PyTuple_GetItem(world.listeners, i)));
    if (answer.get() == Py_None || answer.get() == Py_False) continue;
    if (!answer || PyObject_IsTrue(answer.get()) != 0) {
      PyErr_Clear();
      return true;
    }
  }
  return PyDict_GetItemWithError(world.profiler, world.is_profiling) != Py_False;
}

cpu::Value value_of(const Slot& slot, const Leaves& leaves, const std::vector<DLTensor>& results) {
  switch (slot.kind) {
    case Slot::Kind::kLeaf:
      return view_of(leaves.tensors[slot.at[0]]);
    case Slot::Kind::kResult:
      return view_of(results[slot.at[0]]);
    case Slot::Kind::kInteger:
      return slot.integer;
    case Slot::Kind::kReal:
      return slot.real;
    case Slot::Kind::kLeaves: {
      std::vector<View> views;
      views.reserve(slot.at.size());
      for (const size_t i : slot.at) views.push_back(view_of(leaves.tensors[i]));
      return views;
    }
    default:
      return {};
  }
}

Ref shaped(const Shape& shape, const Leaves& leaves, const std::vector<Ref>& results) {
  switch (shape.kind) {
    case Shape::Kind::kLeaf:
      return Ref::to(leaves.objects[shape.at]);
    case Shape::Kind::kTuple:
      return Ref::to(leaves.tuples[shape.at]);
    case Shape::Kind::kResult:
      return Ref::to(results[shape.at].get());
    case Shape::Kind::kNone:
      return Ref::to(Py_None);
    default:
      break;
  }
  const Ref pair(PyTuple_New(2)), items(PyTuple_New(static_cast<Py_ssize_t>(shape.items.size())));
  if (!pair || !items) return {};
  for (size_t i = 0; i < shape.items.size(); ++i) {
    Ref item = shaped(shape.items[i], leaves, results);
    if (!item) return {};
    PyTuple_SetItem(items.get(), static_cast<Py_ssize_t>(i), item.release());
  }
  PyTuple_SetItem(pair.get(), 0, Ref::to(shape.type.get()).release());
  PyTuple_SetItem(pair.get(), 1, Ref::to(items.get()).release());
  return Ref(PyObject_CallObject(new_tuple, pair.get()));
}

// A tensor's numbers, and before them what torch asks of whoever lends it memory.
struct Memory {
  DLManagedTensorVersioned managed;
  int64_t sizes[kMostAxes], strides[kMostAxes];
};

void release(DLManagedTensorVersioned* managed) { std::free(managed->manager_ctx); }

// A new tensor, and where it lies: 0.4 us, 2 on cold caches; torch.empty would take 1.5 and 9.
Ref allocate(const Result& wanted, DLTensor* place) {
  constexpr size_t kLine = 64, kHead = (sizeof(Memory) + kLine - 1) / kLine * kLine;
  const size_t bytes = (kHead + wanted.bytes + kLine - 1) / kLine * kLine;
  void* block = std::aligned_alloc(kLine, bytes);
  if (!block) return Ref(PyErr_NoMemory());
  auto* memory = new (block) Memory{};
  std::copy_n(wanted.sizes, wanted.dim, memory->sizes);
  std::copy_n(wanted.strides, wanted.dim, memory->strides);
  *place = {static_cast<char*>(block) + kHead,
            {kDLCPU, 0},
            wanted.dim,
            wanted.type,
            memory->sizes,
            memory->strides,
            0};
  memory->managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  memory->managed.manager_ctx = block;
  memory->managed.deleter = release;
  memory->managed.dl_tensor = *place;
  void* tensor = nullptr;  // torch owns the block from here on, whether it succeeds or not
  const auto lend = world.exchange->managed_tensor_to_py_object_no_sync;
  return Ref(lend(&memory->managed, &tensor) == 0 ? static_cast<PyObject*>(tensor) : nullptr);
}

PyObject* replay(const Plan& plan, const Leaves& leaves) {
  std::vector<Ref> results;
  std::vector<DLTensor> places(plan.results.size());
  results.reserve(plan.results.size());
  for (size_t i = 0; i < plan.results.size(); ++i) {
    results.push_back(allocate(plan.results[i], &places[i]));
    if (!results.back()) return nullptr;
  }
  std::vector<cpu::Value> values;
  values.reserve(plan.slots.size());
  for (const Slot& slot : plan.slots) values.push_back(value_of(slot, leaves, places));
  std::string error;
  Py_BEGIN_ALLOW_THREADS;
  try {
    plan.direct(values.data());
  } catch (const std::exception& e) {
    error = *e.what() ? e.what() : "unknown error";
  }
  Py_END_ALLOW_THREADS;
  if (!error.empty()) {
    PyErr_SetString(PyExc_RuntimeError, error.c_str());
    return nullptr;
  }
  return shaped(plan.returned, leaves, results).release();
}

// recall(front, arguments, options, backend): what the call returns, None if its key came once and
// should be recorded now, NotImplemented if the call is not for us.
PyObject* recall(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 4) {
    PyErr_SetString(PyExc_TypeError, "recall(front, arguments, options, backend)");
    return nullptr;
  }
  if (given[3] != Py_None && PyUnicode_CompareWithASCIIString(given[3], "cpu") != 0) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  CallLeaves call;
  Leaves& leaves = *call.get();
  if (is_watched() || !describe(given[0], given[1], given[2], given[3], &leaves)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  const auto found = plans.find(leaves.key);
  if (found == plans.end()) {
    return Py_NewRef(came_before(leaves.key) ? Py_None : Py_NotImplemented);
  }
  const std::shared_ptr<const Plan> plan = found->second;  // another thread may drop it
  if (!plan->direct) Py_RETURN_NOTIMPLEMENTED;
  return replay(*plan, leaves);
}

// record(front, arguments, options, backend, op, flat, results, returned): keeps how the call went;
// op None: it cannot be replayed. Returns whether it will be.
PyObject* record(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 8 || !PyTuple_Check(given[5]) || !PyTuple_Check(given[6])) {
    PyErr_SetString(PyExc_TypeError,
                    "record(front, arguments, options, backend, op, flat, results, returned)");
    return nullptr;
  }
  CallLeaves call;
  Leaves& leaves = *call.get();
  if (!describe(given[0], given[1], given[2], given[3], &leaves)) Py_RETURN_FALSE;
  auto plan = std::make_shared<Plan>();
  for (PyObject* type : leaves.types) plan->types.push_back(Ref::to(type));
  if (!make_plan(given[4], given[5], given[6], given[7], leaves, plan.get())) {
    PyErr_Clear();
    plan->direct = nullptr;
  }
  if (plans.size() >= kMostPlans) plans.clear();
  const bool is_replayed = plan->direct != nullptr;
  plans.insert_or_assign(leaves.key, std::move(plan));
  return PyBool_FromLong(is_replayed);
}

// counts(): keys that are replayed, keys that are not.
PyObject* counts(PyObject*, PyObject*) {
  Py_ssize_t replayed = 0;
  for (const auto& [key, plan] : plans) replayed += plan->direct != nullptr;
  return Py_BuildValue("(nn)", replayed, static_cast<Py_ssize_t>(plans.size()) - replayed);
}

PyObject* forget(PyObject*, PyObject*) {
  plans.clear();
  once.clear();
  Py_RETURN_NONE;
}

// start(Tensor, dtype, CacheLayout, listeners, profiler, is_profiling): once, before the rest.
// Returns whether this torch shows its tensors to C.
PyObject* start(PyObject*, PyObject* arguments) {
  World w{};
  if (!PyArg_ParseTuple(arguments, "OOOO!O!O", &w.tensor_type, &w.dtype_type, &w.layout_type,
                        &PyTuple_Type, &w.listeners, &PyDict_Type, &w.profiler, &w.is_profiling)) {
    return nullptr;
  }
  const Ref capsule(PyObject_GetAttrString(w.tensor_type, "__dlpack_c_exchange_api__"));
  if (!capsule) {
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  const void* table = PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api");
  if (!table) return nullptr;
  w.exchange = static_cast<const DLPackExchangeAPI*>(table);
  const bool is_known = w.exchange->header.version.major == DLPACK_MAJOR_VERSION;
  if (!is_known || !w.exchange->dltensor_from_py_object_no_sync) Py_RETURN_FALSE;
  new_tuple = PyObject_GetAttrString(reinterpret_cast<PyObject*>(&PyTuple_Type), "__new__");
  if (!new_tuple) return nullptr;
  Py_INCREF(arguments);  // and with it all that it holds
  world = w;
  Py_RETURN_TRUE;
}

PyCFunction fast(PyObject* (*f)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}

PyMethodDef methods[] = {
    {"start", start, METH_VARARGS, nullptr},
    {"recall", fast(recall), METH_FASTCALL, nullptr},
    {"record", fast(record), METH_FASTCALL, nullptr},
    {"counts", counts, METH_NOARGS, nullptr},
    {"forget", forget, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "_cpu",
                      "Native CPU ops, and the replay of known calls.",
                      -1,
                      methods,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace
}  // namespace specdec::python

PyMODINIT_FUNC PyInit__cpu() { return PyModule_Create(&specdec::python::module); }
