// output[b, n, h] = sum over attended x of softmax(scale query . key[x]) value[x].
// A request's keys are cut by its own length alone: split 0 is the tree, the others are spans of
// the cache. A task is one split of one request and key head, for all nodes and all query heads of
// that key head; then the splits are merged in order. So the result has the same bits in any batch
// and with any number of threads.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cfloat>
#include <cmath>
#include <vector>

#include "../torch/dispatch.h"
#include "cache.h"
#include "team.h"
#include "tile.h"

namespace specdec {
namespace cpu {
namespace {

constexpr int64_t kSpan = 1024;  // least cached keys of a split
constexpr int64_t kSpans =
    16;  // most spans of a request: what is merged stays small beside the keys

struct RowsOf {  // keys or values [page, slot, head, dim]
  const char* data;
  int64_t page, slot, head;  // strides in bytes
  int dim;
};

struct Call {
  Tensor query;  // [batch, node, head, dim]
  LogitType type;
  const Attention& attention;  // of the type of the keys
  RowsOf keys, values;
  Vector<float> key_scale, value_scale;  // [kv_head], or none: 1
  int64_t kv_heads, group;
  const int32_t* ancestors;  // [batch, nodes, words]
  int64_t nodes, words;
  Ids lengths;
  BlockTable table;
  float scale;
  int64_t window;

  int32_t bits(int64_t b, int64_t n, int64_t word) const {
    return ancestors[(b * nodes + n) * words + word];
  }
  bool is_present(int64_t b, int64_t n) const { return bits(b, n, 0) & 1; }
};

// What of the cache a request needs.
struct Need {
  int64_t length, width;  // width: nodes up to the last that is present
  int64_t first, span;    // cached keys from first on, in spans
  int64_t splits;         // with the tree's
  bool bad;
};

Need need_of(const Call& c, int64_t b) {
  Need p{c.lengths.at(0, b), c.nodes, 0, 0, 0, false};
  while (p.width > 0 && !c.is_present(b, p.width - 1)) --p.width;
  p.bad = p.length < 0 || p.length > c.table.blocks * c.table.page_size - p.width;
  if (p.bad || p.width == 0) return p;
  if (c.window > 0) p.first = std::max<int64_t>(p.length - c.window + 1, 0);
  const int64_t last = p.length + p.width - 1, size = c.table.page_size;
  for (int64_t i = p.first / size; i <= last / size; ++i) {
    const int64_t page = page_of(c.table, b, static_cast<uint64_t>(i));
    p.bad |= page < 0 || page >= c.table.num_pages;
  }
  if (p.bad) return p;
  const int64_t cached = p.length - p.first;
  p.span = std::max(kSpan, padded((cached + kSpans - 1) / kSpans, kKeyBlock));
  p.splits = 1 + (cached + p.span - 1) / p.span;
  return p;
}

// One request and key head.
struct Unit {
  int64_t b, kv_head;
  const Need* need;
  bool few;
  int64_t rows;        // padded, see AttentionRows
  int64_t first_task;  // one a split
};

Unit make_unit(const Call& c, int64_t b, int64_t kv_head, const Need& need, int64_t first_task) {
  const int64_t rows = need.width * c.group;
  const bool few = rows <= c.attention.most_few;
  return {b, kv_head, &need, few, padded(rows, few ? kFewUnit : kRowUnit), first_task};
}

// The rows of a unit, and scratch for a block of keys; one a thread.
class Lanes {
 public:
  void load(const Call& c, const Unit& u) {
    rows_.rows = u.rows;
    rows_.dim = c.keys.dim;
    rows_.value_dim = c.values.dim;
    rows_.window = static_cast<int32_t>(std::min<int64_t>(c.window, 1 << 30));
    rows_.deepest = 0;
    query_.assign(u.rows * padded(c.keys.dim, kSumUnit), 0.f);
    depth_.assign(u.rows, 0);
    words_.assign(u.rows * c.words, 0);
    node_depth_.assign(c.nodes, 0);
    for (int64_t n = 0; n < u.need->width; ++n) {
      int32_t depth = -1;
      for (int64_t w = 0; w < c.words; ++w) {
        depth += std::popcount(static_cast<uint32_t>(c.bits(u.b, n, w)));
      }
      node_depth_[n] = depth;
      rows_.deepest = std::max(rows_.deepest, depth);
      for (int64_t row = n * c.group; row < (n + 1) * c.group; ++row) {
        depth_[row] = depth;
        for (int64_t w = 0; w < c.words; ++w) words_[w * u.rows + row] = c.bits(u.b, n, w);
      }
    }
    dispatch_logits(c.type, [&](auto tag) { load_query<typename decltype(tag)::type>(c, u); });
    keys_.resize(kKeyBlock * padded(c.keys.dim, kSumUnit));
    values_.resize(kKeyBlock * padded(c.values.dim, kDimUnit));
    scores_.resize(kKeyBlock * kPanel);
    rows_.query = query_.data();
    rows_.scale = c.scale * c.key_scale.get(u.kv_head, 1.f);
    rows_.depth = depth_.data();
    rows_.words = words_.data();
    rows_.node_depth = node_depth_.data();
    rows_.keys = keys_.data();
    rows_.values = values_.data();
    rows_.scores = scores_.data();
    if (!u.few) c.attention.prepare(rows_);
  }

  // Attends positions [begin, end) of the unit's request. The result: output, sums, maxima.
  void attend(const Call& c, const Unit& u, int64_t begin, int64_t end,
              std::vector<float>* result) {
    const int64_t outputs = u.rows * padded(c.values.dim, kDimUnit);
    result->assign(outputs + 2 * u.rows, 0.f);
    rows_.output = result->data();
    rows_.sum = rows_.output + outputs;
    rows_.max = rows_.sum + u.rows;
    std::fill(rows_.max, rows_.max + u.rows, -FLT_MAX);
    const auto attend = u.few ? c.attention.attend_few : c.attention.attend;
    AttentionKeys blocks[2];
    keys_at(c, u, begin, end, &blocks[0]);
    for (int64_t x = begin, i = 0; x < end; x += kKeyBlock, i ^= 1) {
      AttentionKeys* next = x + kKeyBlock < end ? &blocks[i ^ 1] : nullptr;
      if (next) keys_at(c, u, x + kKeyBlock, end, next);
      blocks[i].next = next;
      attend(blocks[i], rows_);
    }
  }

 private:
  static const char* row_at(const RowsOf& r, const Place& at, int64_t head) {
    return r.data + at.page * r.page + at.slot * r.slot + head * r.head;
  }

  // The block of keys from position x on.
  static void keys_at(const Call& c, const Unit& u, int64_t x, int64_t end, AttentionKeys* block) {
    const int64_t node = x - u.need->length;
    block->count = static_cast<int>(std::min<int64_t>(end - x, kKeyBlock));
    block->first_node = node < 0 ? -1 : static_cast<int>(node);
    block->reach = c.window - 1 + std::min<int64_t>(node, 0);
    for (int i = 0; i < kKeyBlock; ++i) {
      block->key[i] = block->value[i] = nullptr;
      if (i >= block->count || (node >= 0 && !c.is_present(u.b, node + i))) continue;
      Place at;
      locate(c.table, u.b, static_cast<uint64_t>(x + i), &at);
      block->key[i] = row_at(c.keys, at, u.kv_head);
      block->value[i] = row_at(c.values, at, u.kv_head);
    }
  }

  template <class T>
  void load_query(const Call& c, const Unit& u) {
    const auto* data = static_cast<const T*>(c.query.const_data_ptr());
    const int64_t dims = padded(c.keys.dim, kSumUnit);
    for (int64_t row = 0; row < u.need->width * c.group; ++row) {
      const int64_t panel = row / kPanel * kPanel;
      const int64_t width = std::min<int64_t>(u.rows - panel, kPanel);
      const T* from = data + u.b * c.query.stride(0) + row / c.group * c.query.stride(1) +
                      (u.kv_head * c.group + row % c.group) * c.query.stride(2);
      float* to = query_.data() + (u.few ? row * dims : panel * dims + (row - panel));
      const int64_t step = u.few ? 1 : width;
      for (int d = 0; d < c.keys.dim; ++d) to[d * step] = static_cast<float>(from[d]);
    }
  }

  AttentionRows rows_{};
  std::vector<float> query_, keys_, values_, scores_;
  std::vector<int32_t> depth_, words_, node_depth_;
};

// Merges the splits of a unit, in order, and writes the output of its nodes.
template <class T>
void merge(const Call& c, const Unit& u, const std::vector<float>* results, T* output,
           float* logsumexp) {
  const int64_t splits = u.need->splits, dim = c.values.dim;
  const int64_t value_dim = padded(dim, kDimUnit), sums = u.rows * value_dim;
  const float scale = c.value_scale.get(u.kv_head, 1.f);
  std::vector<float> merged(dim * kPanel);  // [dim, row of the panel]
  for (int64_t panel = 0; panel < u.rows; panel += kPanel) {
    const int64_t width = std::min<int64_t>(u.rows - panel, kPanel);
    float best[kPanel], sum[kPanel] = {}, weight[kPanel];
    std::fill(best, best + width, -FLT_MAX);
    for (int64_t s = 0; s < splits; ++s) {
      const float* its_best = results[s].data() + sums + u.rows + panel;
      for (int64_t r = 0; r < width; ++r) best[r] = std::max(best[r], its_best[r]);
    }
    std::fill(merged.begin(), merged.end(), 0.f);
    for (int64_t s = 0; s < splits; ++s) {
      const float* its_sum = results[s].data() + sums + panel;
      const float* its_output = results[s].data() + panel * value_dim;
      for (int64_t r = 0; r < width; ++r) {
        weight[r] = std::exp(its_sum[u.rows + r] - best[r]);
        sum[r] += weight[r] * its_sum[r];
      }
      const auto add = [&](int64_t of_dim, int64_t of_row) {
        for (int64_t d = 0; d < dim; ++d) {
          for (int64_t r = 0; r < width; ++r) {
            merged[d * width + r] += weight[r] * its_output[d * of_dim + r * of_row];
          }
        }
      };
      if (u.few) {
        add(1, value_dim);
      } else {
        add(width, 1);
      }
    }
    for (int64_t r = 0; r < width && panel + r < u.need->width * c.group; ++r) {
      const int64_t n = (panel + r) / c.group, head = u.kv_head * c.group + (panel + r) % c.group;
      if (!c.is_present(u.b, n) || sum[r] == 0) continue;
      const int64_t to = (u.b * c.nodes + n) * c.kv_heads * c.group + head;
      for (int64_t d = 0; d < dim; ++d) {
        output[to * dim + d] = static_cast<T>(merged[d * width + r] / sum[r] * scale);
      }
      logsumexp[to] = best[r] + std::log(sum[r]);
    }
  }
}

// Threads take tasks in turn; who finishes the last one of a unit merges it. Nobody waits.
template <class T>
void run(const Call& c, const std::vector<Need>& needs, T* output, float* logsumexp) {
  std::vector<Unit> units;
  std::vector<int64_t> unit_of;  // of each task
  for (int64_t b = 0; b < static_cast<int64_t>(needs.size()); ++b) {
    for (int64_t h = 0; h < c.kv_heads && needs[b].splits > 0; ++h) {
      const auto first = static_cast<int64_t>(unit_of.size());
      unit_of.insert(unit_of.end(), needs[b].splits, static_cast<int64_t>(units.size()));
      units.push_back(make_unit(c, b, h, needs[b], first));
    }
  }
  const auto tasks = static_cast<int64_t>(unit_of.size());
  std::vector<std::vector<float>> results(tasks);
  std::vector<std::atomic<int64_t>> done(units.size());
  hand_out(tasks, [&](const auto& take) {
    Lanes lanes;
    int64_t loaded = -1;
    for (int64_t task = take(); task >= 0; task = take()) {
      const Unit& u = units[unit_of[task]];
      const Need& p = *u.need;
      if (loaded != unit_of[task]) lanes.load(c, u);
      loaded = unit_of[task];
      const int64_t split = task - u.first_task;
      const int64_t begin = split == 0 ? p.length : p.first + (split - 1) * p.span;
      const int64_t end = split == 0 ? begin + p.width : std::min(begin + p.span, p.length);
      lanes.attend(c, u, begin, end, &results[task]);
      if (++done[unit_of[task]] < p.splits) continue;
      merge(c, u, &results[u.first_task], output, logsumexp);
      for (int64_t i = 0; i < p.splits; ++i) std::vector<float>().swap(results[u.first_task + i]);
    }
  });
}

KeyType key_type(const Tensor& t) {
  const auto type = t.scalar_type();
  if (type == ScalarType::Float8_e4m3fn) return KeyType::kFloat8E4M3;
  if (type == ScalarType::Float8_e5m2) return KeyType::kFloat8E5M2;
  return static_cast<KeyType>(logit_type(t));
}

RowsOf rows_of_view(const Tensor& t) {
  const auto size = static_cast<int64_t>(t.element_size());
  return {static_cast<const char*>(t.const_data_ptr()), t.stride(0) * size, t.stride(1) * size,
          t.stride(2) * size, static_cast<int>(t.size(3))};
}

}  // namespace
}  // namespace cpu

void tree_attention_out(Tensor query, Tensor key, Tensor value, Tensor ancestors, Tensor lengths,
                        OptTensor block_table, double scale, int64_t window, OptTensor key_scale,
                        OptTensor value_scale, Tensor out_output, Tensor out_logsumexp,
                        Tensor out_status) {
  const LogitType type = logit_type(query);
  const int64_t kv_heads = key.size(2);
  const cpu::Call call{
      .query = query,
      .type = type,
      .attention = cpu::tiles().attention[static_cast<int>(cpu::key_type(key))],
      .keys = cpu::rows_of_view(key),
      .values = cpu::rows_of_view(value),
      .key_scale = vector_of<float>(key_scale),
      .value_scale = vector_of<float>(value_scale),
      .kv_heads = kv_heads,
      .group = query.size(2) / kv_heads,
      .ancestors = static_cast<const int32_t*>(ancestors.const_data_ptr()),
      .nodes = query.size(1),
      .words = ancestors.size(2),
      .lengths = ids_of(lengths),
      .table = block_table_of(block_table, key.size(1), key.size(0)),
      .scale = static_cast<float>(scale),
      .window = window,
  };
  std::vector<cpu::Need> needs;
  for (int64_t b = 0; b < query.size(0); ++b) {
    needs.push_back(cpu::need_of(call, b));
    output<int32_t>(out_status)[b] = needs.back().bad ? kBadLayout : 0;
  }
  auto* logsumexp = output<float>(out_logsumexp);
  std::fill(logsumexp, logsumexp + out_logsumexp.numel(), -cpu::kInf);
  std::memset(output<void>(out_output), 0, out_output.numel() * out_output.element_size());
  dispatch_logits(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    cpu::run<T>(call, needs, output<T>(out_output), logsumexp);
  });
}

SPECDEC_CPU_KERNEL(tree_attention_out, tree_attention_out)
}  // namespace specdec
