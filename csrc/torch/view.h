// A tensor as a kernel reads it: where its numbers lie. The names are those of
// torch::stable::Tensor.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace specdec {

// Owns nothing: valid while the tensor it shows is.
class View {
 public:
  View(void* data, int64_t dim, const int64_t* sizes, const int64_t* strides,
       torch::headeronly::ScalarType type, int64_t item_size)
      : data_(data), dim_(dim), sizes_(sizes), strides_(strides), type_(type), item_(item_size) {}

  explicit View(const torch::stable::Tensor& t)
      : View(t.mutable_data_ptr(), t.dim(), t.sizes().data(), t.strides().data(), t.scalar_type(),
             static_cast<int64_t>(t.element_size())) {}

  const void* const_data_ptr() const { return data_; }
  void* mutable_data_ptr() const { return data_; }
  int64_t dim() const { return dim_; }
  int64_t size(int64_t d) const { return sizes_[d]; }
  int64_t stride(int64_t d) const { return strides_[d]; }
  torch::headeronly::ScalarType scalar_type() const { return type_; }
  int64_t element_size() const { return item_; }

  int64_t numel() const {
    int64_t n = 1;
    for (int64_t d = 0; d < dim_; ++d) n *= sizes_[d];
    return n;
  }

  bool is_contiguous() const {
    if (numel() == 0) return true;
    int64_t dense = 1;
    for (int64_t d = dim_; d-- > 0; dense *= sizes_[d]) {
      if (sizes_[d] > 1 && strides_[d] != dense) return false;
    }
    return true;
  }

 private:
  void* data_;
  int64_t dim_;
  const int64_t *sizes_, *strides_;
  torch::headeronly::ScalarType type_;
  int64_t item_;
};

}  // namespace specdec
