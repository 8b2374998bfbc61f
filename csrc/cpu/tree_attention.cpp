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
#include <limits>
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
constexpr int kTasksPerThread = 4;
constexpr float kInf = std::numeric_limits<float>::infinity();

struct RowsOf {  // keys or values [page, slot, head, dim]
  const char* data;
  int64_t page, slot, head;  // strides in bytes
  int dim;
};

struct Call {
  Tensor query;  // [batch, node, head, dim]
  LogitType type;
  int64_t size;  // bytes of an element
  RowsOf keys, values;
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
  int64_t rows;        // padded
  int64_t first_task;  // of the wave; one a split
  int64_t result;      // where the results of its splits lie in the wave's memory
};

// Memory of one task's result: output, then sums, then maxima.
int64_t result_size(const Call& c, int64_t rows) {
  return rows * (padded(c.values.dim, kDimUnit) + 2);
}

// The rows of a unit as lanes, and scratch for a block of keys; one a thread.
class Lanes {
 public:
  void load(const Call& c, const Unit& u) {
    rows_.rows = u.rows;
    rows_.dim = c.keys.dim;
    rows_.value_dim = c.values.dim;
    rows_.window = static_cast<int32_t>(std::min<int64_t>(c.window, 1 << 30));
    rows_.deepest = 0;
    query_.assign(u.rows * c.keys.dim, 0.f);
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
    keys_.resize(kKeyBlock * padded(c.keys.dim, kDimUnit));
    values_.resize(kKeyBlock * padded(c.values.dim, kDimUnit));
    scores_.resize(kKeyBlock * kPanel);
    rows_.query = query_.data();
    rows_.depth = depth_.data();
    rows_.words = words_.data();
    rows_.node_depth = node_depth_.data();
    rows_.keys = keys_.data();
    rows_.values = values_.data();
    rows_.scores = scores_.data();
  }

  // Attends positions [begin, end) of the unit's request.
  void attend(const Call& c, const Unit& u, int64_t begin, int64_t end, float* result) {
    const int64_t outputs = u.rows * padded(c.values.dim, kDimUnit);
    rows_.output = result;
    rows_.sum = result + outputs;
    rows_.max = rows_.sum + u.rows;
    std::fill(rows_.output, rows_.max, 0.f);
    std::fill(rows_.max, rows_.max + u.rows, -FLT_MAX);
    AttentionKeys block;
    for (int64_t x = begin; x < end; x += kKeyBlock) {
      const int64_t node = x - u.need->length;
      block.count = static_cast<int>(std::min<int64_t>(end - x, kKeyBlock));
      block.first_node = node < 0 ? -1 : static_cast<int>(node);
      block.reach = node + c.window - 1;
      for (int i = 0; i < block.count; ++i) {
        block.key[i] = block.value[i] = nullptr;
        if (node >= 0 && !c.is_present(u.b, node + i)) continue;
        Place at;
        locate(c.table, u.b, static_cast<uint64_t>(x + i), &at);
        block.key[i] = row_at(c.keys, at, u.kv_head);
        block.value[i] = row_at(c.values, at, u.kv_head);
      }
      tiles().attend[static_cast<int>(c.type)](block, rows_);
    }
  }

 private:
  static const char* row_at(const RowsOf& r, const Place& at, int64_t head) {
    return r.data + at.page * r.page + at.slot * r.slot + head * r.head;
  }

  template <class T>
  void load_query(const Call& c, const Unit& u) {
    const auto* data = static_cast<const T*>(c.query.const_data_ptr());
    for (int64_t row = 0; row < u.need->width * c.group; ++row) {
      const int64_t panel = row / kPanel * kPanel,
                    width = std::min<int64_t>(u.rows - panel, kPanel);
      const T* from = data + u.b * c.query.stride(0) + row / c.group * c.query.stride(1) +
                      (u.kv_head * c.group + row % c.group) * c.query.stride(2);
      float* to = query_.data() + panel * c.keys.dim + (row - panel);
      for (int d = 0; d < c.keys.dim; ++d) to[d * width] = static_cast<float>(from[d]) * c.scale;
    }
  }

  AttentionRows rows_{};
  std::vector<float> query_, keys_, values_, scores_;
  std::vector<int32_t> depth_, words_, node_depth_;
};

// Merges the splits of a unit, in order, and writes the output of its nodes.
template <class T>
void merge(const Call& c, const Unit& u, const float* results, T* output, float* logsumexp) {
  const int64_t splits = u.need->splits, size = result_size(c, u.rows), dim = c.values.dim;
  const int64_t value_dim = padded(dim, kDimUnit);
  std::vector<float> weight(splits), row_output(dim);
  for (int64_t row = 0; row < u.need->width * c.group; ++row) {
    const int64_t n = row / c.group, head = u.kv_head * c.group + row % c.group;
    const int64_t to = (u.b * c.nodes + n) * c.kv_heads * c.group + head;
    if (!c.is_present(u.b, n)) continue;
    float best = -FLT_MAX, sum = 0;
    const float* sums = results + u.rows * value_dim + row;
    for (int64_t s = 0; s < splits; ++s) best = std::max(best, sums[s * size + u.rows]);
    for (int64_t s = 0; s < splits; ++s) {
      weight[s] = std::exp(sums[s * size + u.rows] - best);
      sum += weight[s] * sums[s * size];
    }
    if (sum == 0) continue;
    std::fill(row_output.begin(), row_output.end(), 0.f);
    const int64_t panel = row / kPanel * kPanel, width = std::min<int64_t>(u.rows - panel, kPanel);
    for (int64_t s = 0; s < splits; ++s) {
      const float* from = results + s * size + panel * value_dim + (row - panel);
      for (int64_t d = 0; d < dim; ++d) row_output[d] += weight[s] * from[d * width];
    }
    for (int64_t d = 0; d < dim; ++d) output[to * dim + d] = static_cast<T>(row_output[d] / sum);
    logsumexp[to] = best + std::log(sum);
  }
}

template <class F>
void for_each_in_turn(int64_t n, const F& f) {  // f() makes a worker, which takes items
  const auto threads = std::min<int64_t>(torch::stable::get_num_threads(), n);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    auto work = f();
    for (int64_t i = next++; i < n; i = next++) work(i);
  });
}

// Units are worked on in waves of a few tasks a thread, so that memory for results stays small.
template <class T>
void run(const Call& c, const std::vector<Need>& needs, T* output, float* logsumexp) {
  const auto total = static_cast<int64_t>(needs.size()) * c.kv_heads;
  const int64_t enough = int64_t{kTasksPerThread} * torch::stable::get_num_threads();
  std::vector<float> memory;
  std::vector<Unit> wave;
  std::vector<int64_t> unit_of;
  for (int64_t next = 0; next < total;) {
    wave.clear();
    unit_of.clear();
    int64_t used = 0;
    for (; next < total && static_cast<int64_t>(unit_of.size()) < enough; ++next) {
      const Need& need = needs[next / c.kv_heads];
      if (need.splits == 0) continue;
      const int64_t rows = padded(need.width * c.group, kRowUnit);
      const auto first = static_cast<int64_t>(unit_of.size());
      wave.push_back({next / c.kv_heads, next % c.kv_heads, &need, rows, first, used});
      unit_of.insert(unit_of.end(), need.splits, static_cast<int64_t>(wave.size()) - 1);
      used += need.splits * result_size(c, rows);
    }
    if (static_cast<int64_t>(memory.size()) < used) memory.resize(used);
    for_each_in_turn(static_cast<int64_t>(unit_of.size()), [&] {
      return [&, lanes = Lanes{}, loaded = int64_t{-1}](int64_t task) mutable {
        const Unit& u = wave[unit_of[task]];
        const Need& p = *u.need;
        if (loaded != unit_of[task]) lanes.load(c, u);
        loaded = unit_of[task];
        const int64_t split = task - u.first_task;
        const int64_t begin = split == 0 ? p.length : p.first + (split - 1) * p.span;
        const int64_t end = split == 0 ? begin + p.width : std::min(begin + p.span, p.length);
        lanes.attend(c, u, begin, end, memory.data() + u.result + split * result_size(c, u.rows));
      };
    });
    for_each_in_turn(static_cast<int64_t>(wave.size()), [&] {
      return
          [&](int64_t i) { merge(c, wave[i], memory.data() + wave[i].result, output, logsumexp); };
    });
  }
}

RowsOf rows_of_view(const Tensor& t, int64_t size) {
  return {static_cast<const char*>(t.const_data_ptr()), t.stride(0) * size, t.stride(1) * size,
          t.stride(2) * size, static_cast<int>(t.size(3))};
}

}  // namespace
}  // namespace cpu

void tree_attention_out(Tensor query, Tensor key, Tensor value, Tensor ancestors, Tensor lengths,
                        OptTensor block_table, double scale, int64_t window, Tensor out_output,
                        Tensor out_logsumexp, Tensor out_status) {
  const LogitType type = logit_type(query);
  const int64_t size = type == LogitType::kFloat32 ? 4 : 2, kv_heads = key.size(2);
  const cpu::Call call{
      .query = query,
      .type = type,
      .size = size,
      .keys = cpu::rows_of_view(key, size),
      .values = cpu::rows_of_view(value, size),
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
    output<int32_t>(out_status)[b] = needs.back().bad ? kBadOffsets : 0;
  }
  auto* logsumexp = output<float>(out_logsumexp);
  std::fill(logsumexp, logsumexp + out_logsumexp.numel(), -cpu::kInf);
  std::memset(output<void>(out_output), 0, out_output.numel() * size);
  dispatch_logits(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    cpu::run<T>(call, needs, output<T>(out_output), logsumexp);
  });
}

}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CPU, m) {
  m.impl("tree_attention_out.cpu", TORCH_BOX(&specdec::tree_attention_out));
}
