// From the type of a logits tensor to a template argument.
#pragma once
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "../common/params.h"

namespace specdec {

template <class T>
struct TypeTag {
  using type = T;
};

// dispatch_logits(type, [&](auto tag) { using T = typename decltype(tag)::type; ... });
template <class F>
void dispatch_logits(LogitType type, F&& f) {
  switch (type) {
    case LogitType::kFloat32:
      return f(TypeTag<float>{});
    case LogitType::kBFloat16:
      return f(TypeTag<torch::headeronly::BFloat16>{});
    case LogitType::kFloat16:
      return f(TypeTag<torch::headeronly::Half>{});
  }
}

}  // namespace specdec
