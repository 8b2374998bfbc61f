// tree_from_sequences: a node is a distinct prefix, kept for the first sequence that has it.
// A sequence shares its first `shared` tokens with one before it and adds a node for each of the
// others, one below the other; the first hangs on the last shared one, which sequence `first` owns.
//   share_kernel  grid = [ceil(batch * sequences / kWarps)]; a warp owns a sequence
//   number_kernel grid = [batch]; a block owns a request, a thread a sequence
#include "../torch/tree_args.h"
#include "tree.cuh"

namespace specdec {
namespace {

struct Sequence {
  int length, shared, first, is_bad;
};

struct SequenceParams {
  GlobalIds token_ids;  // [batch, sequences, length]
  int64_t batch, sequences, length, num_nodes;
  Global<Sequence> found;  // [batch, sequences]
  Global<int64_t> before;  // [batch, sequences]: nodes of the sequences before
  GlobalIds out_ids;       // [batch, num_nodes]
  Global<int32_t> parents, source, status;
};

// Number of tokens before the first that is none. For a warp.
__device__ int64_t length_of(const SequenceParams& p, int64_t row, int* is_bad) {
  int64_t end = p.length;
  for (int64_t i = threadIdx.x % 32; i < p.length; i += 32) {
    const int64_t id = p.token_ids.load(row * p.length + i);
    if (id < -1) *is_bad = 1;
    if (id < 0 && i < end) end = i;
  }
  *is_bad = warp_reduce(*is_bad, Or{});
  return -warp_reduce(-end, Larger{});
}

__global__ void __launch_bounds__(kThreads) share_kernel(const __grid_constant__ SequenceParams p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= p.batch * p.sequences) return;
  const int64_t b = row / p.sequences, mine = row - b * p.sequences;
  int is_bad = 0;
  const int64_t length = length_of(p, row, &is_bad);
  // The longest shared prefix, and the lowest sequence that has it, as one number.
  int64_t best = -1;
  for (int64_t s = threadIdx.x % 32; s < mine; s += 32) {
    const int64_t other = (b * p.sequences + s) * p.length;
    int64_t i = 0;
    while (i < length && p.token_ids.load(other + i) == p.token_ids.load(row * p.length + i)) ++i;
    const int64_t one = (i << 31) + (0x7fffffff - s);
    best = one > best ? one : best;
  }
  best = warp_reduce(best, Larger{});
  if (threadIdx.x % 32 != 0) return;
  Sequence s{static_cast<int>(length), 0, 0, is_bad};
  if (best >= 0) {
    s.shared = static_cast<int>(best >> 31);
    s.first = static_cast<int>(0x7fffffff - (best & 0x7fffffff));
  }
  p.found.store(row, s);
}

// The node of the last token that a sequence shares with an earlier one.
__device__ int64_t branch_of(const SequenceParams& p, int64_t b, const Sequence& s) {
  if (s.shared == 0) return 0;
  const int64_t owner = b * p.sequences + s.first;
  return p.before.load(owner) + s.shared - p.found.load(owner).shared;
}

__global__ void __launch_bounds__(kThreads)
    number_kernel(const __grid_constant__ SequenceParams p) {
  const int64_t b = blockIdx.x, out = b * p.num_nodes;
  int64_t filled = 0;
  int is_bad = 0;
  for (int64_t base = 0; base < p.sequences; base += kThreads) {
    const int64_t mine = base + threadIdx.x, row = b * p.sequences + mine;
    Sequence s{};
    if (mine < p.sequences) s = p.found.load(row);
    is_bad |= s.is_bad;
    int64_t total = 0;
    const int64_t before =
        filled + block_exclusive_sum(static_cast<int64_t>(s.length - s.shared), &total);
    if (mine < p.sequences) p.before.store(row, before);
    filled += total;
    __syncthreads();
    for (int i = s.shared; i < s.length; ++i) {
      const int64_t node = 1 + before + i - s.shared;
      if (node >= p.num_nodes) break;
      p.out_ids.store(out + node, p.token_ids.load(row * p.length + i));
      p.parents.store(out + node,
                      static_cast<int32_t>(i == s.shared ? branch_of(p, b, s) : node - 1));
      p.source.store(out + node, static_cast<int32_t>(mine * p.length + i));
    }
  }
  // The root, and what is left.
  for (int64_t n = threadIdx.x; n < p.num_nodes; n += kThreads) {
    if (n > 0 && n <= filled) continue;
    p.out_ids.store(out + n, -1);
    p.parents.store(out + n, -1);
    p.source.store(out + n, -1);
  }
  is_bad = block_reduce(is_bad, Or{});
  if (threadIdx.x == 0) p.status.store(b, is_bad != 0 ? kBadId : 0);
}

void tree_from_sequences(SPECDEC_TREE_FROM_SEQUENCES_ARGS) {
  const OnDevice on(token_ids);
  SequenceParams p{};
  p.token_ids = GlobalIds(ids_of(token_ids));
  p.batch = token_ids.size(0);
  p.sequences = token_ids.size(1);
  p.length = token_ids.size(2);
  p.num_nodes = num_nodes;
  const int64_t rows = p.batch * p.sequences;
  const auto bytes = static_cast<int64_t>(sizeof(Sequence) + sizeof(int64_t));
  const Tensor scratch =
      torch::stable::new_empty(token_ids, std::array<int64_t, 1>{rows * bytes}, ScalarType::Byte);
  auto* found = static_cast<Sequence*>(scratch.mutable_data_ptr());
  p.found = Global<Sequence>(found);
  p.before = Global<int64_t>(static_cast<int64_t*>(static_cast<void*>(found + rows)));
  p.out_ids = GlobalIds(ids_of(out_token_ids));
  p.parents = Global<int32_t>(output<int32_t>(out_parents));
  p.source = Global<int32_t>(output<int32_t>(out_source));
  p.status = Global<int32_t>(output<int32_t>(out_status));
  launch(share_kernel, (rows + kWarps - 1) / kWarps, on, p);
  launch(number_kernel, p.batch, on, p);
}

}  // namespace
}  // namespace specdec

SPECDEC_REGISTER(tree_from_sequences, specdec::tree_from_sequences)
