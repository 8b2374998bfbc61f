// tree_mask: a node attends what is cached, its ancestors and itself, in the format asked for.
// First the bits of every node, which are the mask themselves in the formats of words; then each
// other format is a reading of these bits.
//   bits_kernel    grid = [batch * groups + 1]; a warp owns a node, lane l its word l; the last
//                  block owns the offsets
//   expand_kernel  grid = [ceil(bytes / (16 kThreads))]; a thread owns 16 bytes of the mask, and
//                  reads what they share of their row once
#include "../torch/tree_args.h"
#include "tree.cuh"

namespace specdec {
namespace {

constexpr int kRows = 32, kBytes = 16;

using enum MaskFormat;

struct MaskParams {
  GlobalIds parents;                         // [batch, nodes]
  GlobalVector<int64_t> past, left_padding;  // absent: 0
  int64_t batch, window, size, bytes;        // bytes: of the whole mask
  MaskFormat format;
  int nodes, groups, words, element;  // words of a node; bytes of an element
  uint32_t hidden;                    // an element that is not attended
  Global<int32_t> bits;               // [batch, nodes, words]
  Global<int32_t> depth;              // [batch, nodes], unless the bits are the mask
  Global<uint8_t> packed;             // SGLang's bits, 1, 2 or 4 bytes a node
  Global<uint8_t> mask;
  Global<Words> chunks;     // the same, where it is aligned
  Global<int64_t> offsets;  // [batch + 1], of flat formats
  Global<int32_t> status;

  __device__ int64_t start(int64_t b) const {       // column of node 0
    constexpr int64_t kLongest = int64_t{1} << 40;  // products with it do not overflow
    const int64_t given = past.get(b, 0);
    return given < 0 ? 0 : given < kLongest ? given : kLongest;
  }
};

// offsets[b]: elements, or bytes, of the requests before b.
__device__ void write_offsets(const MaskParams& p) {
  int64_t filled = 0;
  for (int64_t base = 0; base < p.batch; base += kThreads) {
    const int64_t b = base + threadIdx.x;
    int64_t length = b < p.batch ? (p.start(b) + p.nodes) * p.nodes : 0, total = 0;
    if (p.format == kFlatPacked) length = (length + 7) / 8;
    const int64_t at = filled + block_exclusive_sum(length, &total);
    if (b < p.batch) p.offsets.store(b, at);
    filled += total;
  }
  if (threadIdx.x == 0) p.offsets.store(p.batch, filled);
}

__global__ void __launch_bounds__(kThreads) bits_kernel(const __grid_constant__ MaskParams p) {
  SPECDEC_SHARED(TreeTable, tree);
  const int64_t b = blockIdx.x / static_cast<unsigned>(p.groups);
  const int first = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.groups)) * kRows;
  if (b == p.batch) {
    if (p.offsets) write_offsets(p);
    return;
  }
  const bool bad = load_parents(p.parents, b, p.nodes, tree);
  if (first == 0 && threadIdx.x == 0) p.status.store(b, bad ? kBadLayout : 0);
  const int lane = threadIdx.x % 32;
  for (int i = static_cast<int>(threadIdx.x) / 32; i < kRows; i += kWarps) {
    if (first + i >= p.nodes) break;
    const int64_t at = b * p.nodes + first + i;
    int depth = 0;
    const int64_t reach = p.window > 0 ? p.window : kMaxNodes;
    const uint32_t word = ancestor_word(tree, first + i, reach, &depth);
    if (p.bits && lane < p.words) p.bits.store(at * p.words + lane, static_cast<int32_t>(word));
    if (p.depth && lane == 0) p.depth.store(at, depth);
    if (p.packed && lane == 0) {
      for (int byte = 0; byte < p.element; ++byte) {
        p.packed.store(at * p.element + byte, static_cast<uint8_t>(word >> 8 * byte));
      }
    }
  }
}

// Request of an element (of packed bits: byte) of a flat mask: the last that begins at or before
// it.
__device__ int64_t request_of(const MaskParams& p, int64_t element) {
  int64_t low = 0, high = p.batch - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (p.offsets.load(middle) <= element) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Walks over the elements in their order, and reads what a row shares once a row. A row is
//   [0, low) unseen | [low, start) cached | [start, start + nodes) ancestor bits | unseen
class Walk {
 public:
  // From element i on; of packed bits from the first bit of byte i.
  __device__ Walk(const MaskParams& p, int64_t i) : p_(p), query_(p.nodes) {
    if (p.batch == 0) return;
    enter_request(p.offsets ? request_of(p, i) : i / (p.nodes * p.size));
    const int64_t begin = p.offsets ? p.offsets.load(request_) : request_ * p.nodes * p.size;
    const int64_t inside = (i - begin) * (p.format == kFlatPacked ? 8 : 1);
    const int64_t row = inside / width_;
    query_ = row < p.nodes ? static_cast<int>(row) : p.nodes;
    key_ = inside - row * width_;
    enter_row();
  }

  // Whether the next element of the request is attended; none behind its last.
  __device__ bool next() {
    if (query_ == p_.nodes) return false;
    const int64_t node = key_ - start_;
    bool seen = node < 0 && key_ >= low_;
    if (node >= 0 && node < p_.nodes) {
      if (const int at = static_cast<int>(node >> 5); at != held_) {
        word_ = static_cast<uint32_t>(p_.bits.load(row() * p_.words + at));
        held_ = at;
      }
      seen = (word_ >> (node & 31) & 1u) != 0;
    }
    if (++key_ == width_) {
      key_ = 0;
      ++query_;
      enter_row();
    }
    return seen;
  }

  // On to the next request where this one is complete.
  __device__ void leave_request() {
    if (query_ < p_.nodes || request_ + 1 >= p_.batch) return;
    enter_request(request_ + 1);
    query_ = 0;
    enter_row();
  }

 private:
  __device__ int64_t row() const { return request_ * p_.nodes + query_; }

  __device__ void enter_request(int64_t b) {
    request_ = b;
    start_ = p_.start(b);
    unused_ = p_.left_padding.get(b, 0);
    width_ = p_.offsets ? start_ + p_.nodes : p_.size;
  }

  __device__ void enter_row() {
    held_ = -1;
    if (query_ == p_.nodes) return;
    const int64_t depth = p_.depth.load(row());
    const int64_t reach = p_.window > 0 ? start_ + depth - p_.window + 1 : 0;
    const int64_t first = reach > unused_ ? reach : unused_;
    low_ = depth >= 0 && first < start_ ? first : start_;  // a padding node sees itself alone
  }

  const MaskParams& p_;
  int64_t request_ = 0, start_ = 0, unused_ = 0, width_ = 0, low_ = 0, key_ = 0;
  int query_, held_ = -1;  // held: place of the word at hand
  uint32_t word_ = 0;
};

__global__ void __launch_bounds__(kThreads, 4) expand_kernel(const __grid_constant__ MaskParams p) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kBytes;
  if (first >= p.bytes) return;
  Words chunk{};
  Walk walk(p, first / p.element);
  const int bits = p.format == kFlatPacked ? 8 : 1;  // of an element
#pragma unroll
  for (int byte = 0; byte < kBytes; ++byte) {
    if (byte % p.element != 0) continue;
    uint32_t value = 0;
    for (int bit = 0; bit < bits; ++bit) value |= (walk.next() ? 1u : 0u) << bit;
    walk.leave_request();
    if (p.format == kAdditive) value = value != 0 ? 0u : p.hidden;
    chunk.w[byte / 4] |= value << byte % 4 * 8;
  }
  if (p.chunks && first + kBytes <= p.bytes) return p.chunks.store(first / kBytes, chunk);
#pragma unroll
  for (int byte = 0; byte < kBytes; ++byte) {
    if (first + byte >= p.bytes) continue;
    p.mask.store(first + byte, static_cast<uint8_t>(chunk.w[byte / 4] >> byte % 4 * 8));
  }
}

uint32_t lowest(ScalarType type) {  // bits of the most negative finite value
  return type == ScalarType::Float ? 0xff7fffffu : type == ScalarType::BFloat16 ? 0xff7fu : 0xfbffu;
}

void tree_mask(SPECDEC_TREE_MASK_ARGS) {
  const OnDevice on(parents);
  MaskParams p{};
  p.parents = GlobalIds(ids_of(parents));
  p.past = GlobalVector(vector_of<int64_t>(past));
  p.left_padding = GlobalVector(vector_of<int64_t>(left_padding));
  p.batch = parents.size(0);
  p.nodes = static_cast<int>(parents.size(1));
  p.window = window;
  p.size = size;
  p.format = static_cast<MaskFormat>(format);
  p.groups = (p.nodes + kRows - 1) / kRows;
  p.words = (p.nodes + 31) / 32;
  p.element = static_cast<int>(out_mask.element_size());
  p.status = Global<int32_t>(output<int32_t>(out_status));
  const int64_t blocks = p.batch * p.groups + 1;
  const bool is_flat = p.format == kFlat || p.format == kFlatPacked;
  if (is_flat) p.offsets = Global<int64_t>(output<int64_t>(out_offsets));
  if (p.format == kSglangPacked) {
    p.packed = Global<uint8_t>(output<uint8_t>(out_mask));
    return launch(bits_kernel, blocks, on, p);
  }
  if (!is_flat && p.format != kBool && p.format != kAdditive) {
    if (p.format == kInt64) p.words += p.words % 2;
    p.bits = Global<int32_t>(output<int32_t>(out_mask));
    return launch(bits_kernel, blocks, on, p);
  }
  const int64_t rows = p.batch * p.nodes;
  const Tensor scratch = torch::stable::new_empty(
      parents, std::array<int64_t, 1>{rows * (p.words + 1)}, ScalarType::Int);
  p.depth = Global<int32_t>(static_cast<int32_t*>(scratch.mutable_data_ptr()));
  p.bits = p.depth + rows;
  p.mask = Global<uint8_t>(output<uint8_t>(out_mask));
  if (p.mask.is_aligned()) p.chunks = p.mask.as<Words>();
  p.bytes = out_mask.numel() * p.element;
  p.hidden = p.format == kAdditive ? lowest(dtype) : 0u;
  launch(bits_kernel, blocks, on, p);
  launch(expand_kernel, (p.bytes + kBytes * kThreads - 1) / (kBytes * kThreads), on, p);
}

}  // namespace
}  // namespace specdec

SPECDEC_REGISTER(tree_mask, specdec::tree_mask)
