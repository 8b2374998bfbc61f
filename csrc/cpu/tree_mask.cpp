// tree_mask: node n attends cached columns, its ancestors and itself. A row is four ranges,
//   [0, low) unseen | [low, start) cached | [start, start + nodes) ancestor bits | unseen,
// each written in bulk: whole bytes of bits, or eight elements from a table.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "../torch/tree_args.h"
#include "team.h"
#include "tree.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kLongestCache = int64_t{1} << 40;  // products with it do not overflow
static_assert(std::endian::native == std::endian::little, "words are written as bytes");

struct Element {  // of a mask that is not packed, as bits
  int bytes;
  uint32_t seen, unseen;
};

Element element_of(ScalarType type) {  // 0 and the type's minimum; of bool 1 and 0
  switch (type) {
    case ScalarType::Float:
      return {4, 0, 0xff7fffffu};
    case ScalarType::BFloat16:
      return {2, 0, 0xff7fu};
    case ScalarType::Half:
      return {2, 0, 0xfbffu};
    default:
      return {1, 1, 0};
  }
}

struct Row {
  int64_t low, start;    // the cached columns that are seen; low <= start
  const uint32_t* bits;  // of the nodes
};

// One request: its tree and what its nodes see.
class Request {
 public:
  Request(const Ids& parents, int64_t b, int64_t nodes, int64_t past, int64_t left_padding,
          int64_t window)
      : tree_(parents, b, nodes, nodes - 1),
        start_(std::clamp(past, int64_t{0}, kLongestCache)),
        unused_(std::clamp(left_padding, int64_t{0}, start_)),
        window_(window),
        bits_(nodes * bit_words(nodes)) {
    ancestor_bits(tree_, window, bits_.data());
  }

  const Tree& tree() const { return tree_; }
  int64_t keys() const { return start_ + tree_.nodes; }
  Row row(int64_t n) const {
    const uint32_t* bits = bits_.data() + n * bit_words(tree_.nodes);
    if (!tree_.has(n)) return {start_, start_, bits};
    const int64_t reach = window_ == 0 ? 0 : start_ + tree_.depth[n] - window_ + 1;
    return {std::clamp(reach, unused_, start_), start_, bits};
  }

 private:
  Tree tree_;
  int64_t start_, unused_, window_;
  std::vector<uint32_t> bits_;
};

// The bits of a byte as eight bytes of 0 or 1.
constexpr auto kExpanded = [] {
  std::array<std::array<uint8_t, 8>, 256> table{};
  for (int value = 0; value < 256; ++value) {
    for (int bit = 0; bit < 8; ++bit) table[value][bit] = (value >> bit) & 1;
  }
  return table;
}();

template <class T>
void write_elements(const Row& row, int64_t nodes, int64_t columns, const Element& e, T* out) {
  const auto yes = static_cast<T>(e.seen), no = static_cast<T>(e.unseen);
  const int64_t low = std::min(row.low, columns), start = std::min(row.start, columns);
  const int64_t end = std::min(start + nodes, columns);
  std::fill(out, out + low, no);
  std::fill(out + low, out + start, yes);
  const auto write_eight = [&](int64_t first, T* to) {
    const auto& seen = kExpanded[(row.bits[first / 32] >> (first % 32)) & 255];
    for (int j = 0; j < 8; ++j) to[j] = seen[j] ? yes : no;
  };
  int64_t first = 0;
  for (; first + 8 <= end - start; first += 8) write_eight(first, out + start + first);
  if (first < end - start) {
    T eight[8];
    write_eight(first, eight);
    std::copy(eight, eight + (end - start - first), out + start + first);
  }
  std::fill(out + end, out + columns, no);
}

void write_row(const Row& row, int64_t nodes, int64_t columns, const Element& e, uint8_t* out) {
  switch (e.bytes) {
    case 1:
      return write_elements(row, nodes, columns, e, out);
    case 2:
      return write_elements(row, nodes, columns, e, reinterpret_cast<uint16_t*>(out));
    default:
      return write_elements(row, nodes, columns, e, reinterpret_cast<uint32_t*>(out));
  }
}

// Rows of `columns` elements one after the other from element `at` on; none behind `size`.
void write_rows(const Team& team, const Request& request, const Element& e, int64_t columns,
                int64_t at, int64_t size, uint8_t* mask) {
  const int64_t nodes = request.tree().nodes;
  const bool is_small = nodes * columns * e.bytes < kOneThreadBytes;
  (is_small ? Team(1) : team).run(nodes, [&](int, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int64_t first = at + n * columns;
      if (first >= size) return;
      write_row(request.row(n), nodes, std::min(columns, size - first), e, mask + first * e.bytes);
    }
  });
}

// Sets bits [low, high).
void set_bits(uint8_t* bytes, int64_t low, int64_t high) {
  if (low >= high) return;
  const int64_t first = low / 8, last = high / 8;
  const auto from = static_cast<uint8_t>(0xff << (low % 8));
  const auto below = static_cast<uint8_t>((1 << (high % 8)) - 1);
  if (first == last) {
    bytes[first] |= from & below;
    return;
  }
  bytes[first] |= from;
  std::memset(bytes + first + 1, 0xff, last - first - 1);
  if (below != 0) bytes[last] |= below;
}

// Sets the bits [at, at + count) that `bits` has; what lies behind count is 0 there.
void or_bits(uint8_t* bytes, int64_t at, const uint32_t* bits, int64_t count) {
  for (int64_t first = 0; first < count; first += 8) {
    const int64_t left = count - first;
    uint32_t byte = (bits[first / 32] >> (first % 32)) & 255;
    if (left < 8) byte &= (1u << left) - 1;
    const uint32_t shifted = byte << ((at + first) % 8);
    uint8_t* to = bytes + (at + first) / 8;
    to[0] |= static_cast<uint8_t>(shifted);
    if (shifted > 255) to[1] |= static_cast<uint8_t>(shifted >> 8);
  }
}

// Rows of keys() bits one after the other, from a whole byte on; none behind `size` bytes. Eight
// rows end with a whole byte too, so threads share none.
void write_packed(const Team& team, const Request& request, int64_t size, uint8_t* bytes) {
  const int64_t nodes = request.tree().nodes, keys = request.keys();
  const bool is_small = nodes * keys / 8 < kOneThreadBytes;
  (is_small ? Team(1) : team).run((nodes + 7) / 8, [&](int, int64_t begin, int64_t end) {
    const int64_t behind = std::min(8 * end, nodes);
    const int64_t from = std::min(begin * keys, size);
    std::memset(bytes + from, 0, std::min((behind * keys + 7) / 8, size) - from);
    for (int64_t n = 8 * begin; n < behind; ++n) {
      const Row row = request.row(n);
      const int64_t first = n * keys, left = 8 * size - first;
      if (left <= 0) return;
      set_bits(bytes, first + std::min(row.low, left), first + std::min(row.start, left));
      or_bits(bytes, first + row.start, row.bits, std::min(nodes, left - row.start));
    }
  });
}

void tree_mask(SPECDEC_TREE_MASK_ARGS) {
  const int64_t batch = parents.size(0), nodes = parents.size(1), words = bit_words(nodes);
  const Ids given = ids_of(parents);
  const auto start = vector_of<int64_t>(past), unused = vector_of<int64_t>(left_padding);
  const auto kind = static_cast<MaskFormat>(format);
  const bool is_packed = kind == MaskFormat::kFlatPacked;
  const bool is_flat = kind == MaskFormat::kFlat || is_packed;
  const Element element = element_of(out_mask.scalar_type());
  auto* mask = output<uint8_t>(out_mask);
  auto* status = output<int32_t>(out_status);
  auto* offsets = is_flat ? output<int64_t>(out_offsets) : nullptr;
  if (is_flat) {
    offsets[0] = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t cached = std::clamp(start.get(b, 0), int64_t{0}, kLongestCache);
      const int64_t elements = nodes * (cached + nodes);
      offsets[b + 1] = offsets[b] + (is_packed ? (elements + 7) / 8 : elements);
    }
    const int64_t end = std::min(offsets[batch], size);
    std::fill(mask + end, mask + size, uint8_t{0});
  }

  for_requests(batch, [&](int64_t b, const Team& team) {
    const Request request(given, b, nodes, start.get(b, 0), unused.get(b, 0), window);
    const auto* bits = request.row(0).bits;
    status[b] = request.tree().status();
    switch (kind) {
      case MaskFormat::kBool:
      case MaskFormat::kAdditive:
        return write_rows(team, request, element, size, b * nodes * size, batch * nodes * size,
                          mask);
      case MaskFormat::kFlat:
        return write_rows(team, request, element, request.keys(), offsets[b], size, mask);
      case MaskFormat::kFlatPacked:
        if (offsets[b] < size) write_packed(team, request, size - offsets[b], mask + offsets[b]);
        return;
      case MaskFormat::kSglangPacked: {
        const int bytes = nodes <= 8 ? 1 : nodes <= 16 ? 2 : 4;
        for (int64_t n = 0; n < nodes; ++n) {
          std::memcpy(mask + (b * nodes + n) * bytes, bits + n, bytes);
        }
        return;
      }
      default: {  // words of a row, to whole int64
        const int64_t wide = kind == MaskFormat::kInt64 ? (words + 1) / 2 * 2 : words;
        auto* rows = reinterpret_cast<uint32_t*>(mask) + b * nodes * wide;
        for (int64_t n = 0; n < nodes; ++n) {
          std::copy_n(bits + n * words, words, rows + n * wide);
          std::fill(rows + n * wide + words, rows + (n + 1) * wide, 0u);
        }
      }
    }
  });
}

}  // namespace

SPECDEC_CPU_KERNEL(tree_mask_out, tree_mask)
}  // namespace specdec::cpu
