// Which instruction set runs: the best of this machine, or what a test asked for.
//   cpu_isa() -> int; set_cpu_isa(int) -> int: 0 portable, 1 AVX2, 2 AVX-512, 3 with AMX; an
//   instruction set that this machine lacks is not taken. Both return the one in use.
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>

#include "../torch/args.h"
#include "tile.h"

namespace specdec::cpu {
namespace {

#if defined(__x86_64__)
// A process asks Linux for the tile registers before it touches them.
bool has_amx() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return has_amx() ? Isa::kAmx : Isa::kAvx512;
  }
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kPortable;
}

const TileTable* table_of(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAmx) return &amx_tiles();
  if (isa == Isa::kAvx512) return &avx512_tiles();
  if (isa == Isa::kAvx2) return &avx2_tiles();
#endif
  (void)isa;
  return &portable_tiles();
}

std::atomic<Isa> current_isa{best_isa()};
std::atomic<const TileTable*> current_table{table_of(current_isa)};

int64_t cpu_isa() { return static_cast<int64_t>(current_isa.load()); }

int64_t set_cpu_isa(int64_t wanted) {
  if (wanted >= 0 && wanted <= static_cast<int64_t>(best_isa())) {
    current_isa = static_cast<Isa>(wanted);
    current_table = table_of(current_isa);
  }
  return cpu_isa();
}

}  // namespace

const TileTable& tiles() { return *current_table.load(std::memory_order_relaxed); }

}  // namespace specdec::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_NAMESPACE, m) {
  m.def("cpu_isa() -> int");
  m.def("set_cpu_isa(int isa) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&specdec::cpu::cpu_isa));
  m.impl("set_cpu_isa", TORCH_BOX(&specdec::cpu::set_cpu_isa));
}
