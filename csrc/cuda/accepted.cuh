// Which nodes of a step enter the state of each request.
#pragma once
#include "../torch/state_args.h"
#include "block.cuh"
#include "global.cuh"

namespace specdec {

struct Steps {          // of a request
  int64_t slot, count;  // count: nodes behind the root; -1: nothing happens
};

class Accepted {
 public:
  explicit Accepted(const AcceptedNodes& a)
      : path_(a.path),
        counts_(a.num_accepted),
        slot_(a.slot),
        status_(a.status),
        nodes_(a.nodes),
        slots_(a.slots),
        columns_(a.columns),
        is_tree_(a.path.data != nullptr) {}

  // What happens to request b; all threads ask. One block of each request writes its status.
  __device__ Steps steps(int64_t b, bool is_writer) const {
    int32_t given[2] = {};
    if (threadIdx.x % 32 == 0) {
      given[0] = counts_.load(b);
      given[1] = slot_.get(b, static_cast<int32_t>(b));
    }
    const int64_t count = __shfl_sync(0xffffffffu, given[0], 0);
    const int64_t slot = __shfl_sync(0xffffffffu, given[1], 0);
    const bool acts = count >= 0 && slot != -1;
    bool good = count <= columns_ && slot >= 0 && slot < slots_;
    if (acts && good && is_tree_) good = is_path(b, count);
    if (is_writer && threadIdx.x == 0) {
      status_.store(b, count < -1 || (acts && !good) ? kBadLayout : 0);
    }
    return {slot, acts && good ? count : -1};
  }

  // The d-th node of a request's path; the root is the 0th.
  __device__ int64_t node(int64_t b, int64_t d) const {
    return d > 0 && is_tree_ ? path_.load(b * columns_ + d - 1) : d;
  }

 private:
  // Whether the path rises, and ends within the step.
  __device__ bool is_path(int64_t b, int64_t count) const {
    int strays = 0;
    for (int64_t d = threadIdx.x; d < count; d += kThreads) {
      const int64_t next = node(b, d + 1), before = d > 0 ? node(b, d) : 0;
      strays |= next <= before || next >= nodes_;
    }
    return block_reduce(strays, Or()) == 0;
  }

  GlobalIds path_;
  GlobalVector<int32_t> counts_, slot_;
  Global<int32_t> status_;
  int64_t nodes_, slots_, columns_;
  bool is_tree_;
};

}  // namespace specdec
