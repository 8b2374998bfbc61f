// edit_rows: what biases, penalties and bans change of each row, by id. The ids are listed once for
// all rows of a request, since those differ in a few: a row is then a copy and its own counts and
// bans.
#include <bit>
#include <memory>
#include <numeric>
#include <vector>

#include "../torch/edit_args.h"
#include "race.h"
#include "team.h"
#include "tree.h"

namespace specdec::cpu {
namespace {

// The text before a row: the ids of the drafts on its path, behind the request's tail.
struct Text {
  std::vector<int64_t> path;
  const int32_t* tail;
  int64_t tail_size;

  int64_t last(int64_t back) const {  // -1 where the text is shorter
    const auto size = static_cast<int64_t>(path.size());
    if (back < size) return path[size - 1 - back];
    const int64_t i = tail_size - 1 - (back - size);
    return i < 0 ? -1 : tail[i];
  }
};

struct Penalties {
  float repetition, frequency, presence;
  bool any() const { return repetition != 1.f || frequency != 0.f || presence != 0.f; }
};

// One of two numbers, without a branch: which ids were generated is chance.
float chosen(bool first, float a, float b) {
  const uint32_t mask = first ? ~0u : 0u;
  return bits_float((float_bits(a) & mask) | (float_bits(b) & ~mask));
}

// An entry of the request's counts.
struct Counted {
  int32_t id, count;
};

// What one request edits: the ids that any of its rows may change, in order, and what is known of
// each. A row takes its own counts and bans on top; ids that it leaves alone are listed all the
// same.
class Listed {
 public:
  Listed(const EditRowsParams& p, int64_t b, const std::vector<int64_t>& drafts)
      : p_(p),
        b_(b),
        penalties_{p.repetition.get(b, 1.f), p.frequency.get(b, 0.f), p.presence.get(b, 0.f)},
        bits_(p.blocks, 0),
        start_(p.blocks + 1, 0) {
    const std::vector<Counted> text = counts();
    const auto mark = [&](int64_t id) { this->mark(id); };
    biases([&](int64_t id, float) { mark(id); });
    for (const Counted& one : text) mark(one.id);
    if (penalties_.any()) std::for_each(drafts.begin(), drafts.end(), mark);
    stops(mark);
    words([&](const int32_t* word) { mark(word[p_.length - 1]); });
    place();
    biases([&](int64_t id, float bias) {
      const int64_t i = find(id);
      if (i >= 0) bias_[i] = bias;
    });
    for (const Counted& one : text) {
      const int64_t i = find(one.id);
      if (i < 0) continue;
      generated_[i] = std::max(one.count >> 1, 0);
      in_prompt_[i] = one.count & 1;
    }
    penalise(0, generated_.size());
  }

  void write(const Text& text, int64_t number) {
    if (penalties_.any()) count(text, 1);
    std::copy(bits_.begin(), bits_.end(), p_.bits + number * p_.blocks);
    std::copy(start_.begin(), start_.end(), p_.start + number * (p_.blocks + 1));
    float* bias = p_.values + number * p_.room;
    std::copy(bias_.begin(), bias_.end(), bias);
    std::copy(repetition_.begin(), repetition_.end(), bias + p_.plane);
    std::copy(minus_.begin(), minus_.end(), bias + 2 * p_.plane);
    if (penalties_.any()) count(text, -1);
    const auto ban = [&](int64_t id) {
      const int64_t i = find(id);
      if (i >= 0) bias[i] = -kInf;
    };
    if (static_cast<int64_t>(text.path.size()) < p_.min_tokens.get(b_, 0)) stops(ban);
    words([&](const int32_t* word) {
      if (meets(word, text)) ban(word[p_.length - 1]);
    });
  }

 private:
  // Sets what the penalties make of entries [first, end). Those that are off are 1, and 0 and 0.
  void penalise(size_t first, size_t end) {
    const Penalties by = penalties_;
    const int32_t *generated = generated_.data(), *in_prompt = in_prompt_.data();
    float *repetition = repetition_.data(), *minus = minus_.data();
    for (size_t i = first; i < end; ++i) {
      const float less =
          add_rn(mul_rn(by.frequency, static_cast<float>(generated[i])), by.presence);
      repetition[i] = chosen((generated[i] | in_prompt[i]) > 0, by.repetition, 1.f);
      minus[i] = chosen(generated[i] > 0, less, 0.f);
    }
  }

  // f(id, bias)
  template <class F>
  void biases(const F& f) const {
    for (int64_t i = 0; i < p_.bias_ids.size; ++i) f(p_.bias_ids.row(b_)[i], p_.bias.row(b_)[i]);
  }
  // The text so far. Which places of the table are taken is chance, so that no branch asks for it.
  std::vector<Counted> counts() const {
    const int64_t slot = p_.slots.get(b_, static_cast<int32_t>(b_));
    if (!penalties_.any() || slot < 0 || slot >= p_.counts.slots) return {};
    const int32_t* ids = p_.counts.ids + slot * p_.counts.capacity;
    const int32_t* of = p_.counts.counts + slot * p_.counts.capacity;
    std::vector<Counted> found(p_.counts.capacity + 1);
    size_t size = 0;
    for (int64_t i = 0; i < p_.counts.capacity; ++i) {
      found[size] = {ids[i], of[i]};
      size += ids[i] >= 0;
    }
    found.resize(size);
    return found;
  }
  template <class F>
  void stops(const F& f) const {
    for (int64_t i = 0; i < p_.stop_ids.size; ++i) f(p_.stop_ids.row(b_)[i]);
  }
  template <class F>
  void words(const F& f) const {
    for (int64_t i = 0; i < p_.bad_words.size; i += p_.length) f(p_.bad_words.row(b_) + i);
  }

  bool meets(const int32_t* word, const Text& text) const {
    for (int64_t back = 0; back + 1 < p_.length; ++back) {
      const int32_t wanted = word[p_.length - 2 - back];
      if (wanted != -1 && wanted != text.last(back)) return false;
    }
    return true;
  }

  int64_t column(int64_t id) const {  // -1 where the row has none
    const int64_t v = id - p_.first_id;
    return id >= 0 && v >= 0 && v < p_.vocab ? v : -1;
  }

  void mark(int64_t id) {
    const int64_t v = column(id);
    if (v < 0) return;
    int64_t& bits = bits_[v / kEditBlock];
    const int64_t mine = int64_t{1} << (v % kEditBlock);
    start_[v / kEditBlock + 1] += (bits & mine) == 0;  // how many of this block, until place()
    bits |= mine;
  }

  void place() {
    std::partial_sum(start_.begin(), start_.end(), start_.begin());
    const int32_t size = start_.back();
    for (auto* of : {&generated_, &in_prompt_}) of->assign(size, 0);
    for (auto* of : {&bias_, &repetition_, &minus_}) of->assign(size, 0.f);
  }

  int64_t find(int64_t id) const {  // -1 where it is not listed
    const int64_t v = column(id);
    if (v < 0) return -1;
    const uint64_t mine = uint64_t{1} << (v % kEditBlock);
    const auto bits = static_cast<uint64_t>(bits_[v / kEditBlock]);
    return (bits & mine) != 0 ? start_[v / kEditBlock] + std::popcount(bits & (mine - 1)) : -1;
  }

  void count(const Text& text, int32_t by) {
    for (const int64_t id : text.path) {
      const int64_t i = find(id);
      if (i < 0) continue;
      generated_[i] += by;
      penalise(i, i + 1);
    }
  }

  const EditRowsParams& p_;
  int64_t b_;
  Penalties penalties_;
  std::vector<int64_t> bits_;
  std::vector<int32_t> start_;
  std::vector<int32_t> generated_, in_prompt_;
  std::vector<float> bias_, repetition_, minus_;  // as they are written
};

void write_none(const EditRowsParams& p, int64_t number) {
  std::fill_n(p.bits + number * p.blocks, p.blocks, 0);
  std::fill_n(p.start + number * (p.blocks + 1), p.blocks + 1, 0);
}

// Where the rows of a request lie, and which ids stand before each.
class Request {
 public:
  Request(const EditRowsParams& p, int64_t b) : p_(p), b_(b), last_(p.width) {
    lost_ = !p.active.get(b, true);
    if (lost_) return;
    if (p.parents.data) tree_ = std::make_unique<Tree>(p.parents, b, p.width + 1, p.width);
    if (!p.cu_draft) return;
    first_ = p.cu_draft[b];
    const int64_t end = p.cu_draft[b + 1];
    lost_ = first_ < 0 || first_ > p.total;
    const bool bad =
        lost_ || end < first_ || end > p.total || end - first_ > p.width || (b == 0 && first_ != 0);
    last_ = bad ? 0 : end - first_;
  }

  int64_t nodes() const { return p_.width + 1; }
  // Number among all rows, or -1.
  int64_t row(int64_t node) const {
    if (lost_ || node > last_ || (tree_ && !tree_->has(node))) return -1;
    if (p_.only_last) return node == p_.width ? b_ : -1;
    return p_.cu_draft ? first_ + b_ + node : b_ * nodes() + node;
  }
  Text text(int64_t node) const {
    Text text{{}, p_.tail.data ? p_.tail.row(b_) : nullptr, p_.tail.size};
    for (int64_t n = node; n > 0; n = tree_ ? tree_->parent[n] : n - 1) {
      if (id(n) != -1) text.path.push_back(id(n));
    }
    std::reverse(text.path.begin(), text.path.end());
    return text;
  }
  // The ids of all nodes behind which there is a row.
  std::vector<int64_t> drafts() const {
    std::vector<int64_t> ids;
    for (int64_t n = 1; n <= last_ && !lost_ && p_.draft_ids.data; ++n) ids.push_back(id(n));
    return ids;
  }

 private:
  int64_t id(int64_t node) const {
    const int64_t i = tree_ ? node : node - 1;
    return p_.cu_draft ? p_.draft_ids.at(0, first_ + i) : p_.draft_ids.at(b_, i);
  }

  const EditRowsParams& p_;
  int64_t b_, first_ = 0, last_;
  bool lost_;
  std::unique_ptr<Tree> tree_;
};

void edit_rows(const EditRowsParams& p, const Tensor& /*like*/) {
  const int64_t rows = p.cu_draft    ? p.total + p.batch
                       : p.only_last ? p.batch
                                     : p.batch * (p.width + 1);
  std::vector<char> is_written(rows, 0);
  for_requests(p.batch, [&](int64_t b, const Team& team) {
    const Request request(p, b);
    team.run(request.nodes(), [&](int, int64_t begin, int64_t end) {
      Listed listed(p, b, request.drafts());
      for (int64_t node = begin; node < end; ++node) {
        const int64_t row = request.row(node);
        if (row < 0) continue;
        listed.write(request.text(node), row);
        is_written[row] = 1;
      }
    });
  });
  for (int64_t row = 0; row < rows; ++row) {
    if (!is_written[row]) write_none(p, row);
  }
}

}  // namespace
}  // namespace specdec::cpu

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) {
  m.impl("edit_rows_out.cpu",
         TORCH_BOX((&specdec::Boxed<specdec::edit_rows_params, specdec::cpu::edit_rows>::call)));
}
