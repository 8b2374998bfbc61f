// GPU or host: the only header that knows. Kernels are written once; nvcc compiles them for GPUs,
// and the tests compile them with -DSPECDEC_HOST=<header> to run on the CPU: that header stands in
// for the CUDA runtime.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "../torch/check.h"
#ifdef SPECDEC_HOST
#include SPECDEC_HOST
#else
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#endif

#ifdef SPECDEC_HOST
#define SPECDEC_NOINLINE __attribute__((noinline))
#define SPECDEC_KEY CPU
#define SPECDEC_OVERLOAD ".cuda_host"
#define SPECDEC_SHARED(type, name) type& name = cuda_on_host::shared_memory<type>([] {})
#else
#define SPECDEC_NOINLINE __noinline__
#define SPECDEC_KEY CUDA
#define SPECDEC_OVERLOAD ".cuda"
#define SPECDEC_SHARED(type, name) __shared__ type name
#endif
// Registers f as the operator `<op>_out` of this backend.
#define SPECDEC_REGISTER(op, f)                                \
  STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, SPECDEC_KEY, m) { \
    m.impl(#op "_out" SPECDEC_OVERLOAD, TORCH_BOX(&f));        \
  }

namespace specdec {

using torch::stable::Tensor;

#ifdef SPECDEC_HOST

using Stream = void*;

class DeviceGuard {
 public:
  explicit DeviceGuard(const Tensor& /*like*/) {}
};

inline Stream current_stream(const Tensor& /*like*/) { return nullptr; }
inline bool is_capturing(Stream /*stream*/) { return false; }

// Takes launches in place of the host where it is set: a simulator of GPUs (tools/simulate).
using Elsewhere = void (*)(const void* kernel, int64_t blocks, int threads, int count,
                           const void* const* arguments, const unsigned* sizes);
inline Elsewhere elsewhere = nullptr;

template <class Kernel, class... Args>
void launch(Kernel kernel, int64_t blocks, int threads, Stream /*stream*/, const Args&... args) {
  if (blocks == 0) return;
  if (elsewhere) {
    const void* arguments[] = {static_cast<const void*>(&args)...};
    const unsigned sizes[] = {static_cast<unsigned>(sizeof(Args))...};
    return elsewhere(reinterpret_cast<const void*>(kernel), blocks, threads, sizeof...(Args),
                     arguments, sizes);
  }
  cuda_on_host::run(dim3(static_cast<unsigned>(blocks)), dim3(threads), [&] { kernel(args...); });
}

template <int kCount>
void exchange_lanes(float (&values)[kCount], int mask) {  // one meeting instead of kCount
  struct All {
    float v[kCount];
  } all;
  for (int i = 0; i < kCount; ++i) all.v[i] = values[i];
  all = __shfl_xor_sync(0xffffffffu, all, mask);
  for (int i = 0; i < kCount; ++i) values[i] = all.v[i];
}

inline float fast_log(float x) { return __builtin_logf(x); }

#else

using Stream = cudaStream_t;

class DeviceGuard {
 public:
  explicit DeviceGuard(const Tensor& like) : guard_(like.get_device_index()) {}

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

inline Stream current_stream(const Tensor& like) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(like.get_device_index(), &stream));
  return static_cast<Stream>(stream);
}

inline bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  STD_TORCH_CHECK(error == cudaSuccess, "cudaStreamIsCapturing: ", cudaGetErrorString(error));
  return status != cudaStreamCaptureStatusNone;
}

template <class Kernel, class... Args>
void launch(Kernel kernel, int64_t blocks, int threads, Stream stream, const Args&... args) {
  if (blocks == 0) return;
  STD_TORCH_CHECK(blocks <= 0x7fffffff, "grid of ", blocks, " blocks: split the batch");
  // clang-format off
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(args...);
  // clang-format on
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "launch: ", cudaGetErrorString(error));
}

template <int kCount>
__device__ __forceinline__ void exchange_lanes(float (&values)[kCount], int mask) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = __shfl_xor_sync(0xffffffffu, values[i], mask);
}

__device__ __forceinline__ float fast_log(float x) { return __logf(x); }

#endif

}  // namespace specdec
