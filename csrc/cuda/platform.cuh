// GPU or host: the only header that knows. Kernels are written once; nvcc compiles them for GPUs,
// and the tests compile them with -DSPECDEC_HOST=<header> to run on the CPU: that header stands in
// for the CUDA runtime.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "../torch/namespace.h"
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
#define SPECDEC_REGISTER(op, f)                                  \
  STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, SPECDEC_KEY, m) { \
    m.impl(#op "_out" SPECDEC_OVERLOAD, TORCH_BOX(&f));          \
  }

namespace specdec {

using torch::stable::Tensor;

constexpr int kThreads = 256;  // of every block

#ifdef SPECDEC_HOST

struct OnDevice {
  explicit OnDevice(const Tensor& /*like*/) {}
};

// Takes launches in place of the host where it is set: a simulator of GPUs (tools/simulate).
using Elsewhere = void (*)(const void* kernel, int64_t blocks, int threads, int count,
                           const void* const* arguments, const unsigned* sizes);
inline Elsewhere elsewhere = nullptr;

template <class Kernel, class... Args>
void launch(Kernel kernel, int64_t blocks, const OnDevice& /*on*/, const Args&... args) {
  if (blocks == 0) return;
  if (elsewhere) {
    const void* arguments[] = {static_cast<const void*>(&args)...};
    const unsigned sizes[] = {static_cast<unsigned>(sizeof(Args))...};
    return elsewhere(reinterpret_cast<const void*>(kernel), blocks, kThreads, sizeof...(Args),
                     arguments, sizes);
  }
  cuda_on_host::run(dim3(static_cast<unsigned>(blocks)), dim3(kThreads), [&] { kernel(args...); });
}

template <class Kernel, class... Args>
void launch_phase(Kernel kernel, int64_t blocks, const OnDevice& on, const Args&... args) {
  launch(kernel, blocks, on, args...);
}

inline int simulated_multiprocessors = 2;  // few: blocks take several turns
inline int multiprocessors() { return simulated_multiprocessors; }

inline float fast_log(float x) { return __builtin_logf(x); }
inline float fast_exp2(float x) { return __builtin_exp2f(x); }

inline float max_nan(float a, float b) { return a != a || a > b ? a : b; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }

inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return out;
}

inline float half_value(uint16_t bits) {
  _Float16 x;
  std::memcpy(&x, &bits, sizeof x);
  return static_cast<float>(x);
}

inline uint16_t half_bits(float value) {
  const auto x = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Larger of each of two bfloat16 (or half) numbers; NaN stays.
template <bool kIsBFloat16>
uint32_t max_halves(uint32_t a, uint32_t b) {
  uint32_t out = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto x = static_cast<uint16_t>(a >> shift), y = static_cast<uint16_t>(b >> shift);
    float values[2];
    for (int i = 0; i < 2; ++i) {
      const uint16_t bits = i == 0 ? x : y;
      const uint32_t wide = static_cast<uint32_t>(bits) << 16;
      if (kIsBFloat16)
        std::memcpy(values + i, &wide, sizeof wide);
      else
        values[i] = half_value(bits);
    }
    const bool first = values[0] != values[0] || values[0] > values[1];
    out |= static_cast<uint32_t>(first ? x : y) << shift;
  }
  return out;
}

// 0xffff in the low half where bit 7 is set, in the high half where bit 15 is.
inline uint32_t spread_signs(uint32_t x) {
  return ((x & 0x80u) != 0 ? 0x0000ffffu : 0u) | ((x & 0x8000u) != 0 ? 0xffff0000u : 0u);
}

inline void after_last_kernel() {}

#else

class OnDevice {  // the device of a tensor is the current one; its stream
 public:
  explicit OnDevice(const Tensor& like) : guard_(like.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(like.get_device_index(), &stream_));
  }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_); }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

inline int multiprocessors() {  // of the current device
  int device = 0, count = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  }
  STD_TORCH_CHECK(error == cudaSuccess, "device: ", cudaGetErrorString(error));
  return count;
}

// Whether after_last_kernel waits on the current device. A driver may have made what runs there
// from the PTX of an older architecture, whose kernels do not. All kernels are compiled alike: the
// first that is launched on a device is asked.
inline bool kernels_wait(const void* kernel) {
  constexpr int kDevices = 128;
  static std::atomic<int> versions[kDevices];  // 10 times the architecture; 0: not asked yet
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  int version = device < kDevices ? versions[device].load(std::memory_order_relaxed) : 0;
  if (error == cudaSuccess && version == 0) {
    cudaFuncAttributes attributes{};
    error = cudaFuncGetAttributes(&attributes, kernel);
    version = attributes.ptxVersion;
    if (device < kDevices) versions[device].store(version, std::memory_order_relaxed);
  }
  STD_TORCH_CHECK(error == cudaSuccess, "kernel: ", cudaGetErrorString(error));
  return version >= 90;
}

template <class Kernel, class... Args>
void launch_as(bool overlaps, Kernel kernel, int64_t blocks, const OnDevice& on,
               const Args&... args) {
  if (blocks == 0) return;
  STD_TORCH_CHECK(blocks <= 0x7fffffff, "grid of ", blocks, " blocks: split the batch");
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = on.stream();
  config.attrs = &overlap;
  config.numAttrs = overlaps ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  STD_TORCH_CHECK(error == cudaSuccess, "launch: ", cudaGetErrorString(error));
}

template <class Kernel, class... Args>
void launch(Kernel kernel, int64_t blocks, const OnDevice& on, const Args&... args) {
  launch_as(false, kernel, blocks, on, args...);
}

// The same for a kernel that begins with after_last_kernel: where kernels wait there, it is set up
// while the one before it ends.
template <class Kernel, class... Args>
void launch_phase(Kernel kernel, int64_t blocks, const OnDevice& on, const Args&... args) {
  const bool overlaps = kernels_wait(reinterpret_cast<const void*>(kernel));
  launch_as(overlaps, kernel, blocks, on, args...);
}

__device__ __forceinline__ float fast_log(float x) {  // of a normal number, or 0
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y * 0.693147181f;
}

__device__ __forceinline__ float fast_exp2(float x) {  // within 2 units of the last place
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ __forceinline__ float half_value(uint16_t bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

__device__ __forceinline__ uint16_t half_bits(float value) {
  uint16_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(value));
  return y;
}

// Larger of each of two bfloat16 (or half) numbers; NaN stays.
template <bool kIsBFloat16>
__device__ __forceinline__ uint32_t max_halves(uint32_t a, uint32_t b) {
  uint32_t y;
  if constexpr (kIsBFloat16) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  }
  return y;
}

// 0xffff in the low half where bit 7 is set, in the high half where bit 15 is.
__device__ __forceinline__ uint32_t spread_signs(uint32_t x) {
  uint32_t y;
  asm("prmt.b32 %0, %1, %1, 0x9988;" : "=r"(y) : "r"(x));
  return y;
}

// The barrier between two kernels of a call. Every thread of every kernel meets it before it reads
// what an earlier one wrote, and before it writes; the kernel behind may be set up from here on. So
// a kernel that is not the first of its call may read before it what the call was given: it began
// when the kernel in front had met the barrier, and all in front of that one had ended.
__device__ __forceinline__ void after_last_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif

}  // namespace specdec
