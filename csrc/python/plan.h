// How a call went, told so that it can be run again with other tensors.
#pragma once
#include "../cpu/entry.h"
#include "leaves.h"

namespace specdec::python {

struct Slot {  // a flat argument
  enum class Kind { kNone, kLeaf, kLeaves, kResult, kInteger, kReal } kind = Kind::kNone;
  std::vector<size_t> at;  // which leaves, or which result
  int64_t integer = 0;
  double real = 0;
};

constexpr int kMostAxes = 4;

struct Result {  // a dense tensor to allocate
  DLDataType type{};
  int32_t dim = 0;
  int64_t sizes[kMostAxes]{}, strides[kMostAxes]{};
  size_t bytes = 0;
};

struct Shape {  // what the front returned
  enum class Kind { kNone, kLeaf, kTuple, kResult, kMade } kind = Kind::kNone;
  size_t at = 0;
  Ref type;  // kMade: a tuple of this type, of these items
  std::vector<Shape> items;
};

struct Plan {
  cpu::Direct direct = nullptr;  // nullptr: this key is never replayed
  std::vector<Slot> slots;
  std::vector<Result> results;
  Shape returned;
  std::vector<Ref> types;  // kept, so that no other type gets their addresses
};

// Fills in the plan of a call of `op` (None: it cannot be replayed) on these flat arguments; false,
// perhaps with an error set, if the call cannot be replayed.
bool make_plan(PyObject* op, PyObject* flat, PyObject* results, PyObject* returned,
               const Leaves& leaves, Plan* plan);

}  // namespace specdec::python
