#include "request_edits.h"

#include <algorithm>
#include <bit>

#include "race.h"
#include "tile.h"

namespace specdec::cpu {
namespace {

// One of two numbers, without a branch: which ids were generated is chance.
float chosen(bool first, float a, float b) {
  const uint32_t mask = first ? ~0u : 0u;
  return bits_float((float_bits(a) & mask) | (float_bits(b) & ~mask));
}

}  // namespace

std::vector<int64_t> Drafts::path(int64_t node) const {
  std::vector<int64_t> path;
  for (int64_t n = node; n > 0; n = parent[n]) {
    if (ids[n] != -1) path.push_back(ids[n]);
  }
  std::reverse(path.begin(), path.end());
  return path;
}

RequestEdits::RequestEdits(const EditRowsParams& p, int64_t b, Drafts drafts)
    : p_(p),
      b_(b),
      drafts_(std::move(drafts)),
      penalties_{p.repetition.get(b, 1.f), p.frequency.get(b, 0.f), p.presence.get(b, 0.f)} {}

RequestEdits::~RequestEdits() {
  if (memory_ && spare().size() < 2) spare().push_back(std::move(memory_));
}

std::vector<std::unique_ptr<RequestEdits::Memory>>& RequestEdits::spare() {
  thread_local std::vector<std::unique_ptr<Memory>> spare;
  return spare;
}

OneRowEdits RequestEdits::row(int64_t node) {
  list();
  if (is_empty()) return {};
  Memory& m = *memory_;
  if (is_made_.empty()) {
    m.offsets.resize(size_ + kPad);
    tiles().edit_list.offsets(bits(), start(), m.bits.size() / kTileBlocks, m.offsets.data());
    is_made_.assign(drafts_.ids.size(), 0);
    if (m.values.size() < is_made_.size()) m.values.resize(is_made_.size());
  }
  std::vector<float>& values = m.values[node];
  if (!is_made_[node]) {
    values.resize(3 * size_);
    write_values(node, values.data(), size_);
    is_made_[node] = 1;
  }
  return {{bits(), start(), values.data(), p_.blocks, size_, size_}, m.offsets.data()};
}

void RequestEdits::list() {
  if (is_listed_) return;
  is_listed_ = true;
  if (!has_any()) return;
  if (!spare().empty()) {
    memory_ = std::move(spare().back());
    spare().pop_back();
  } else {
    memory_ = std::make_unique<Memory>();
  }
  Memory& m = *memory_;
  m.bits.assign((p_.vocab + kTile - 1) / kTile * kTileBlocks, 0);
  const int text = take_text();
  for (int i = 0; i < text; ++i) mark(m.text_columns[i]);
  for_ids([&](int64_t id) {
    const int64_t v = column(id);
    if (v >= 0) mark(v);
  });
  m.start.resize(m.bits.size() + 1);
  tiles().edit_list.number(bits(), m.bits.size(), m.start.data());
  size_ = m.start.back();
  m.counts.assign(size_, 0);
  m.bias.assign(size_, 0.f);
  m.repetition.resize(size_);
  m.minus.resize(size_);
  biases([&](int64_t id, float bias) {
    const int64_t i = find(id);
    if (i >= 0) m.bias[i] = bias;
  });
  tiles().edit_list.place(bits(), start(), m.text_columns.data(), m.text_counts.data(), text,
                          m.counts.data());
  for (int32_t& count : m.counts) count = std::max(count, count & 1);
  penalise(m.counts.data(), size_, m.repetition.data(), m.minus.data());
}

void RequestEdits::write_ids(float* ids) const {
  for (size_t k = 0; k < memory_->bits.size(); ++k) {
    for (auto left = static_cast<uint64_t>(bits()[k]); left != 0; left &= left - 1) {
      *ids++ = static_cast<float>(k * kEditBlock + std::countr_zero(left));
    }
  }
}

void RequestEdits::write_values(int64_t node, float* values, int64_t plane) const {
  float *bias = values, *repetition = values + plane, *minus = values + 2 * plane;
  const Memory& m = *memory_;
  std::copy_n(m.bias.begin(), size_, bias);
  std::copy_n(m.repetition.begin(), size_, repetition);
  std::copy_n(m.minus.begin(), size_, minus);
  const std::vector<int64_t> path = drafts_.path(node);
  for (const int64_t id : path) {
    const int64_t i = penalties_.any() ? find(id) : -1;
    if (i < 0) continue;
    const int32_t count =
        m.counts[i] + 2 * static_cast<int32_t>(std::count(path.begin(), path.end(), id));
    penalise(&count, 1, repetition + i, minus + i);
  }
  const auto ban = [&](int64_t id) {
    const int64_t i = find(id);
    if (i >= 0) bias[i] = -kInf;
  };
  if (static_cast<int64_t>(path.size()) < p_.min_tokens.get(b_, 0)) stops(ban);
  words([&](const int32_t* word) {
    if (meets(word, path)) ban(word[p_.length - 1]);
  });
}

// What the penalties make of n counts. Those that are off are 1, and 0 and 0.
void RequestEdits::penalise(const int32_t* counts, size_t n, float* repetition,
                            float* minus) const {
  const Penalties by = penalties_;
  for (size_t i = 0; i < n; ++i) {
    const int32_t generated = counts[i] >> 1;
    const float less = add_rn(mul_rn(by.frequency, static_cast<float>(generated)), by.presence);
    repetition[i] = chosen(counts[i] > 0, by.repetition, 1.f);
    minus[i] = chosen(generated > 0, less, 0.f);
  }
}

template <class F>
void RequestEdits::biases(const F& f) const {
  for (int64_t i = 0; i < p_.bias_ids.size; ++i) f(p_.bias_ids.row(b_)[i], p_.bias.row(b_)[i]);
}

template <class F>
void RequestEdits::stops(const F& f) const {
  for (int64_t i = 0; i < p_.stop_ids.size; ++i) f(p_.stop_ids.row(b_)[i]);
}

template <class F>
void RequestEdits::words(const F& f) const {
  for (int64_t i = 0; i < p_.bad_words.size; i += p_.length) f(p_.bad_words.row(b_) + i);
}

// Every id that some row may change, but for those of the text so far.
template <class F>
void RequestEdits::for_ids(const F& f) const {
  biases([&](int64_t id, float) { f(id); });
  stops(f);
  words([&](const int32_t* word) { f(word[p_.length - 1]); });
  if (penalties_.any()) std::for_each(drafts_.ids.begin() + 1, drafts_.ids.end(), f);
}

bool RequestEdits::has_any() const {
  bool any = penalties_.any();
  for_ids([&](int64_t id) { any |= column(id) >= 0; });
  return any;
}

int RequestEdits::take_text() {
  const int64_t slot = p_.slots.get(b_, static_cast<int32_t>(b_));
  if (!penalties_.any() || slot < 0 || slot >= p_.counts.slots) return 0;
  Memory& m = *memory_;
  for (std::vector<int32_t>* part : {&m.text_columns, &m.text_counts}) {
    if (part->size() < static_cast<size_t>(p_.counts.capacity)) part->resize(p_.counts.capacity);
  }
  return tiles().edit_list.take(p_.counts, slot, p_.first_id, p_.vocab, m.text_columns.data(),
                                m.text_counts.data());
}

int64_t RequestEdits::column(int64_t id) const {
  const int64_t v = id - p_.first_id;
  return id >= 0 && v >= 0 && v < p_.vocab ? v : -1;
}

int64_t RequestEdits::find(int64_t id) const {
  const int64_t v = column(id);
  if (v < 0) return -1;
  const uint64_t mine = uint64_t{1} << (v % kEditBlock);
  const auto word = static_cast<uint64_t>(bits()[v / kEditBlock]);
  return (word & mine) != 0 ? start()[v / kEditBlock] + std::popcount(word & (mine - 1)) : -1;
}

void RequestEdits::mark(int64_t column) {
  memory_->bits[column / kEditBlock] |= int64_t{1} << (column % kEditBlock);
}

bool RequestEdits::meets(const int32_t* word, const std::vector<int64_t>& path) const {
  const auto size = static_cast<int64_t>(path.size());
  for (int64_t back = 0; back + 1 < p_.length; ++back) {
    const int32_t wanted = word[p_.length - 2 - back];
    const int64_t i = p_.tail.size - 1 - (back - size);  // before the drafts
    const int64_t last = back < size ? path[size - 1 - back] : i < 0 ? -1 : p_.tail.row(b_)[i];
    if (wanted != -1 && wanted != last) return false;
  }
  return true;
}

WantedEdits wanted_edits(int64_t vocab, SPECDEC_WANTED_ARGS) {
  EditRowsParams lists = edits_params(vocab, SPECDEC_REQUEST_EDITS_NAMES);
  lists.blocks = (vocab + kEditBlock - 1) / kEditBlock;
  const bool is_given = bias_ids || repetition || frequency || presence || stop_ids || bad_words;
  return {lists, is_given, of_drafts};
}

}  // namespace specdec::cpu
