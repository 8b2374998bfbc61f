// Which nodes of a step enter the state of each request.
#pragma once
#include <utility>
#include <vector>

#include "../torch/state_args.h"

namespace specdec::cpu {

struct Steps {  // what happens to a request
  int64_t slot;
  std::vector<int64_t> nodes;  // root first; empty: nothing
};

// The nodes of request b in order; false if its count, slot or path is bad.
inline bool plan_request(const AcceptedNodes& a, int64_t b, Steps* steps) {
  const int64_t count = a.num_accepted[b];
  steps->slot = a.slot.get(b, static_cast<int32_t>(b));
  if (count < 0 || steps->slot == -1) return count >= -1;
  if (count > a.columns || steps->slot < 0 || steps->slot >= a.slots) return false;
  std::vector<int64_t> nodes{0};
  for (int64_t d = 1; d <= count; ++d) {
    const int64_t node = a.path.data ? a.path.at(b, d - 1) : d;
    if (node <= nodes.back() || node >= a.nodes) return false;
    nodes.push_back(node);
  }
  steps->nodes = std::move(nodes);
  return true;
}

// That of every request, and its status.
inline std::vector<Steps> plan_steps(const AcceptedNodes& a) {
  std::vector<Steps> plan(a.batch);
  for (int64_t b = 0; b < a.batch; ++b) a.status[b] = plan_request(a, b, &plan[b]) ? 0 : kBadLayout;
  return plan;
}

}  // namespace specdec::cpu
