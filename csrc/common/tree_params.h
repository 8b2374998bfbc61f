// The arguments of verify_tree as a plain struct: what a kernel sees, on the host and on a device.
#pragma once
#include "params.h"

namespace specdec {

struct VerifyTreeParams : VerifyParams {  // row b * nodes + n is that of a node
  int64_t nodes, max_depth;
  Ids ids, parents;  // [batch, nodes]
  TreeRule rule;
  bool replacement;
  int32_t* path;  // [batch, max_depth + 1]
};

}  // namespace specdec
