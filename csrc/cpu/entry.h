// The two doors of a native op: torch's dispatcher, and the replay of a known call (csrc/python).
#pragma once
#include <torch/csrc/stable/library.h>

#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "../torch/args.h"

namespace specdec::cpu {

// An argument of a flat call: None, a tensor, a list of tensors, an int or bool, a float. A dtype
// is an int that says nothing: the results have it.
using Value = std::variant<std::monostate, View, std::vector<View>, int64_t, double>;

// Runs an op on flat arguments, results last.
using Direct = void (*)(const Value* values);

// The ops that have a direct door, by the name of their schema without `_out`.
void enter_directly(const char* op, Direct direct);
Direct direct_of(const char* op);  // nullptr: there is none

template <class T>
struct Argument {  // int64_t, bool and ScalarType travel as an int
  using Torch = T;
  static T of(const Torch& value) { return value; }
  static T of(const Value& value) { return static_cast<T>(std::get<int64_t>(value)); }
};

template <>
inline double Argument<double>::of(const Value& value) {
  const int64_t* whole = std::get_if<int64_t>(&value);
  return whole ? static_cast<double>(*whole) : std::get<double>(value);
}

template <>
struct Argument<View> {
  using Torch = torch::stable::Tensor;
  static View of(const Torch& value) { return View(value); }
  static View of(const Value& value) { return std::get<View>(value); }
};

template <>
struct Argument<std::optional<View>> {
  using Torch = std::optional<torch::stable::Tensor>;
  static std::optional<View> of(const Torch& value) {
    return value ? std::optional<View>(View(*value)) : std::nullopt;
  }
  static std::optional<View> of(const Value& value) {
    const View* view = std::get_if<View>(&value);
    return view ? std::optional<View>(*view) : std::nullopt;
  }
};

template <>
struct Argument<std::vector<View>> {
  using Torch = std::vector<torch::stable::Tensor>;
  static std::vector<View> of(const Torch& value) {
    return std::vector<View>(value.begin(), value.end());
  }
  static std::vector<View> of(const Value& value) { return std::get<std::vector<View>>(value); }
};

template <auto kOp>
struct Entry;

template <class... A, void (*kOp)(A...)>
struct Entry<kOp> {
  static void from_torch(typename Argument<A>::Torch... arguments) {
    kOp(Argument<A>::of(arguments)...);
  }
  static void direct(const Value* values) {
    [values]<size_t... i>(std::index_sequence<i...>) {
      kOp(Argument<A>::of(values[i])...);
    }(std::index_sequence_for<A...>{});
  }
};

}  // namespace specdec::cpu

// Registers f as the operator `<op>_out` of this backend, behind both doors.
#define SPECDEC_REGISTER(op, f)                                              \
  STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CPU, m) {                       \
    m.impl(#op "_out.cpu", TORCH_BOX(&specdec::cpu::Entry<&f>::from_torch)); \
    specdec::cpu::enter_directly(#op, &specdec::cpu::Entry<&f>::direct);     \
  }
