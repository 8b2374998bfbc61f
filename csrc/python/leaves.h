// The arguments of a Python call as a kernel sees them: a key of all that is not numbers in a
// tensor, and the tensors in order.
#pragma once
#include <Python.h>

#include <string>
#include <utility>
#include <vector>

#include "../torch/view.h"
// Plain C, no symbol of libtorch, but hidden from code that keeps to the stable interface.
#undef TORCH_TARGET_VERSION
#include <ATen/dlpack.h>

namespace specdec::python {

// A reference that is given back.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  static Ref to(PyObject* borrowed) { return Ref(Py_NewRef(borrowed)); }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// What the module was started with: objects of torch and of this package.
struct World {
  PyObject* tensor_type;  // torch.Tensor itself, no subclass
  PyObject* dtype_type;
  PyObject* layout_type;  // CacheLayout: read by its attribute `parts`
  PyObject* listeners;    // called without arguments; one that is true sends calls to torch
  PyObject *profiler, *is_profiling;  // names of a module, and the one that is False without one
  const DLPackExchangeAPI* exchange;
};
extern World world;

// Shape and place of a tensor; false, with no error set, where it has none (a wrapper of a
// transform) or is not on the host.
bool read_tensor(PyObject* tensor, DLTensor* out);

View view_of(const DLTensor& tensor);

struct Leaves {
  std::string key;
  std::vector<DLTensor> tensors;
  std::vector<PyObject*> objects;  // of the tensors
  std::vector<PyObject*> tuples;
  std::vector<PyObject*> types;  // of tuples: the key names them by address
  std::vector<Ref> held;         // parts of layouts

  void clear();

  // Adds what `argument` holds; false, with no error set, if a call with it is not for us.
  bool add(PyObject* argument);

 private:
  bool add_tensor(PyObject* tensor);
  bool add_tuple(PyObject* tuple, char tag);
  bool add_text(PyObject* text);
  void put(const void* bytes, size_t size) { key.append(static_cast<const char*>(bytes), size); }
  template <class T>
  void put(char tag, const T& value) {
    key.push_back(tag);
    put(&value, sizeof(value));
  }
};

}  // namespace specdec::python
