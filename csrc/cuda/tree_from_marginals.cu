// tree_from_marginals: every node offers its best child that is none yet; the best offer becomes a
// node, ties to the first parent. grid = [batch]; a block owns a request and ranks its candidates,
// then its first warp builds the tree. Lane l owns nodes l, l + 32, ...: no barrier a node.
#include "../torch/tree_args.h"
#include "tree.cuh"

namespace specdec {
namespace {

constexpr int kMaxCandidates = 2048, kPerThread = kMaxCandidates / kThreads;

struct MarginalsParams {
  GlobalIds ids;                 // [batch, depth, width]
  Global<const float> logprobs;  // [batch, depth, width]
  int depth, width, num_nodes;
  GlobalIds root_ids;  // [batch], if has_root
  bool has_root;
  GlobalVector<int32_t> max_nodes;  // [batch] or absent
  GlobalIds out_ids;                // [batch, num_nodes]
  Global<int32_t> out_parents, source, status;
};

// As they are given, then best first at each position.
struct Candidates {
  float logprob[kMaxCandidates];  // -inf: none
  int index[kMaxCandidates];      // the id, then the index at its position
};

struct Nodes {
  float score[kMaxNodes];                    // sum of the path
  float offer[kMaxNodes];                    // score of the next child
  int place[kMaxNodes];                      // of the next child: position * width + rank
  int parent[kMaxNodes], chosen[kMaxNodes];  // chosen: a place
  int count;
};

__device__ bool is_token(int64_t id) { return id >= 0 && id <= 0x7fffffff; }

// Loads a request's candidates; returns the status bits to all threads.
__device__ int load_candidates(const MarginalsParams& p, int64_t b, int size, Candidates& c) {
  int bits = 0;
  for (int i = threadIdx.x; i < size; i += kThreads) {
    const int64_t id = p.ids.load(b * size + i);
    const float logprob = p.logprobs.load(b * size + i);
    const bool usable = is_token(id) && logprob == logprob;
    if (!is_token(id) && id != -1) bits |= kBadId;
    if (is_token(id) && !(logprob <= 1.f)) bits |= kBadDraft;
    c.index[i] = static_cast<int>(id);
    c.logprob[i] = usable ? fminf(logprob, 0.f) : -INFINITY;
  }
  return block_reduce(bits, Or{});  // a barrier, too
}

// Whether candidate j of a position comes before candidate i.
__device__ bool is_before(const Candidates& c, int j, int i) {
  return c.logprob[j] > c.logprob[i] || (c.logprob[j] == c.logprob[i] && j < i);
}

// Of equal ids at a position the best is left.
__device__ void drop_repeated(const MarginalsParams& p, int size, Candidates& c) {
  bool repeated[kPerThread];
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int i = k * kThreads + static_cast<int>(threadIdx.x);
    repeated[k] = false;
    if (i >= size) continue;
    const int first = i / p.width * p.width;
    for (int j = first; j < first + p.width; ++j) {
      repeated[k] |= c.index[j] == c.index[i] && is_before(c, j, i);
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    if (repeated[k]) c.logprob[k * kThreads + threadIdx.x] = -INFINITY;
  }
  __syncthreads();
}

// Moves each candidate to its rank, which is how many come before it.
__device__ void rank_candidates(const MarginalsParams& p, int size, Candidates& c) {
  float logprob[kPerThread];
  int place[kPerThread];
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int i = k * kThreads + static_cast<int>(threadIdx.x);
    if (i >= size) continue;
    const int first = i / p.width * p.width;
    logprob[k] = c.logprob[i];
    place[k] = first;
    for (int j = first; j < first + p.width; ++j) place[k] += is_before(c, j, i) ? 1 : 0;
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int i = k * kThreads + static_cast<int>(threadIdx.x);
    if (i >= size) continue;
    c.logprob[place[k]] = logprob[k];
    c.index[place[k]] = i % p.width;
  }
  __syncthreads();
}

// Ascends as the offer falls, then as the node's number rises. Offers are at most 0.
__device__ uint64_t offer_key(float offer, int node) {
  return static_cast<uint64_t>(float_bits(fabsf(offer))) << 32 | static_cast<uint32_t>(node);
}

// For one warp. Each lane reads and writes its own nodes alone.
__device__ void build_tree(int size, int width, int limit, const Candidates& c, Nodes& nodes) {
  const int lane = threadIdx.x;
  const uint64_t none = offer_key(-INFINITY, 0);
  uint64_t mine = none;  // best offer of the lane's nodes
  int count = 1;
  if (lane == 0) {
    nodes.score[0] = 0.f;
    nodes.offer[0] = size > 0 ? c.logprob[0] : -INFINITY;
    nodes.place[0] = 0;
    mine = offer_key(nodes.offer[0], 0);
  }
  while (count < limit) {
    const uint64_t best = warp_reduce(mine, Smaller{});
    if (best >= none) break;
    const int parent = static_cast<int>(best & 0xffffffffu);
    const float score = -bits_float(static_cast<uint32_t>(best >> 32));
    const bool owns_parent = parent % 32 == lane;
    const int at = __shfl_sync(0xffffffffu, owns_parent ? nodes.place[parent] : 0, parent % 32);
    if (owns_parent) {
      const bool has_next = (at + 1) % width != 0;
      nodes.place[parent] = at + 1;
      nodes.offer[parent] = has_next ? add_rn(nodes.score[parent], c.logprob[at + 1]) : -INFINITY;
      mine = none;
      for (int n = lane; n < count; n += 32) mine = Smaller{}(mine, offer_key(nodes.offer[n], n));
    }
    if (count % 32 == lane) {
      const int below = (at / width + 1) * width;
      nodes.score[count] = score;
      nodes.place[count] = below;
      nodes.offer[count] = below < size ? add_rn(score, c.logprob[below]) : -INFINITY;
      nodes.parent[count] = parent;
      nodes.chosen[count] = at;
      mine = Smaller{}(mine, offer_key(nodes.offer[count], count));
    }
    ++count;
  }
  if (lane == 0) nodes.count = count;
}

__global__ void __launch_bounds__(kThreads)
    tree_from_marginals_kernel(const __grid_constant__ MarginalsParams p) {
  SPECDEC_SHARED(Candidates, candidates);
  SPECDEC_SHARED(Nodes, nodes);
  const int64_t b = blockIdx.x, first = b * p.num_nodes;
  const int limit = Smaller{}(p.max_nodes.get(b, p.num_nodes), p.num_nodes);
  const int size = limit > 1 ? p.depth * p.width : 0;
  const int bits = load_candidates(p, b, size, candidates);
  drop_repeated(p, size, candidates);
  rank_candidates(p, size, candidates);
  if (threadIdx.x < 32) build_tree(size, p.width, limit, candidates, nodes);
  __syncthreads();
  for (int n = threadIdx.x; n < p.num_nodes; n += kThreads) {
    const bool is_node = n > 0 && n < nodes.count;
    const int place = is_node ? nodes.chosen[n] : 0;
    const int source = is_node ? place / p.width * p.width + candidates.index[place] : -1;
    int64_t id = is_node ? p.ids.load(b * size + source) : -1;
    if (n == 0 && p.has_root) id = p.root_ids.load(b);
    p.out_ids.store(first + n, id);
    p.out_parents.store(first + n, is_node ? nodes.parent[n] : -1);
    p.source.store(first + n, source);
  }
  if (threadIdx.x == 0) p.status.store(b, bits);
}

void tree_from_marginals(SPECDEC_TREE_FROM_MARGINALS_ARGS) {
  const OnDevice on(candidate_ids);
  MarginalsParams p{};
  p.ids = GlobalIds(ids_of(candidate_ids));
  p.logprobs = Global<const float>(input<float>(logprobs));
  p.depth = static_cast<int>(candidate_ids.size(1));
  p.width = static_cast<int>(candidate_ids.size(2));
  p.num_nodes = static_cast<int>(num_nodes);
  p.has_root = root_ids.has_value();
  if (root_ids) p.root_ids = GlobalIds(ids_of(*root_ids));
  p.max_nodes = GlobalVector<int32_t>(vector_of<int32_t>(max_nodes));
  p.out_ids = GlobalIds(ids_of(out_token_ids));
  p.out_parents = Global<int32_t>(output<int32_t>(out_parents));
  p.source = Global<int32_t>(output<int32_t>(out_source));
  p.status = Global<int32_t>(output<int32_t>(out_status));
  launch(tree_from_marginals_kernel, candidate_ids.size(0), on, p);
}

}  // namespace
}  // namespace specdec

SPECDEC_REGISTER(tree_from_marginals, specdec::tree_from_marginals)
