#include "request_edits.h"

#include <algorithm>
#include <bit>

#include "race.h"
#include "tile.h"

namespace specdec::cpu {
namespace {

// One of two numbers, without a branch: which ids were generated is chance.
float chosen(bool first, float a, float b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(first);
  return bits_float((float_bits(a) & mask) | (float_bits(b) & ~mask));
}

}  // namespace

std::vector<int64_t> Drafts::path(int64_t node) const {
  std::vector<int64_t> path;
  path.reserve(node);
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

RowEdits RequestEdits::row(int64_t node) {
  list();
  if (is_empty()) return {};
  if (rows_.empty()) rows_.resize(drafts_.ids.size());
  std::unique_ptr<float[]>& values = rows_[node];
  if (!values) {
    values = std::make_unique_for_overwrite<float[]>(4 * size_);
    write_values(node, values.get(), size_);
  }
  return {bits(), start(), values.get(), p_.blocks, size_, size_};
}

void RequestEdits::list() {
  if (is_listed_) return;
  is_listed_ = true;
  const std::vector<int64_t> listed = columns();
  if (listed.empty() && !penalties_.any()) return;
  const int64_t words = (p_.vocab + kTile - 1) / kTile * kTileBlocks;
  bits_ = std::make_unique<int64_t[]>(words);
  start_ = std::make_unique_for_overwrite<int32_t[]>(words + 1);
  const Counted text = counted();
  for (int i = 0; i < text.size; ++i) mark(text.columns[i]);
  for (const int64_t v : listed) mark(v);
  tiles().edit_list.number(bits(), words, start_.get());
  size_ = start_[words];
  counts_ = std::make_unique<int32_t[]>(size_);
  values_ = std::make_unique_for_overwrite<float[]>(4 * size_);
  float *bias = values_.get(), *ids = bias + 3 * size_;
  std::fill_n(bias, size_, 0.f);
  for (int64_t i = 0; i < p_.bias_ids.size; ++i) {
    const int64_t at = find(p_.bias_ids.row(b_)[i]);
    if (at >= 0) bias[at] = p_.bias.row(b_)[i];
  }
  tiles().edit_list.place(bits(), start(), text.columns.get(), text.counts.get(), text.size,
                          counts_.get(), ids);
  for (const int64_t v : listed) ids[place(v)] = static_cast<float>(v);
  for (int64_t i = 0; i < size_; ++i) counts_[i] = std::max(counts_[i], counts_[i] & 1);
  penalise(counts_.get(), size_, bias + size_, bias + 2 * size_);
}

void RequestEdits::write_values(int64_t node, float* values, int64_t plane) const {
  float *bias = values, *repetition = values + plane, *minus = values + 2 * plane;
  for (int i = 0; i < 4; ++i) std::copy_n(values_.get() + i * size_, size_, values + i * plane);
  const std::vector<int64_t> path = drafts_.path(node);
  for (const int64_t id : path) {
    const int64_t i = penalties_.any() ? find(id) : -1;
    if (i < 0) continue;
    const int32_t count =
        counts_[i] + 2 * static_cast<int32_t>(std::count(path.begin(), path.end(), id));
    penalise(&count, 1, repetition + i, minus + i);
  }
  const auto ban = [&](int64_t id) {
    const int64_t i = find(id);
    if (i >= 0) bias[i] = -kInf;
  };
  const bool is_early = static_cast<int64_t>(path.size()) < p_.min_tokens.get(b_, 0);
  for (int64_t i = 0; is_early && i < p_.stop_ids.size; ++i) ban(p_.stop_ids.row(b_)[i]);
  for (int64_t i = 0; i < p_.bad_words.size; i += p_.length) {
    const int32_t* word = p_.bad_words.row(b_) + i;
    if (meets(word, path)) ban(word[p_.length - 1]);
  }
}

// What the penalties make of n counts. Those that are off are 1, and 0 and 0.
void RequestEdits::penalise(const int32_t* counts, size_t n, float* __restrict repetition,
                            float* __restrict minus) const {
  const Penalties by = penalties_;
  for (size_t i = 0; i < n; ++i) {
    const int32_t generated = counts[i] >> 1;
    const float less = add_rn(mul_rn(by.frequency, static_cast<float>(generated)), by.presence);
    repetition[i] = chosen(counts[i] > 0, by.repetition, 1.f);
    minus[i] = chosen(generated > 0, less, 0.f);
  }
}

std::vector<int64_t> RequestEdits::columns() const {
  std::vector<int64_t> columns;
  columns.reserve(p_.bias_ids.size + p_.stop_ids.size + p_.bad_words.size + drafts_.ids.size());
  const auto add = [&](int64_t id) {
    if (const int64_t v = column(id); v >= 0) columns.push_back(v);
  };
  std::for_each_n(p_.bias_ids.row(b_), p_.bias_ids.size, add);
  std::for_each_n(p_.stop_ids.row(b_), p_.stop_ids.size, add);
  for (int64_t i = 0; i < p_.bad_words.size; i += p_.length) {
    add(p_.bad_words.row(b_)[i + p_.length - 1]);
  }
  if (penalties_.any()) std::for_each(drafts_.ids.begin() + 1, drafts_.ids.end(), add);
  return columns;
}

RequestEdits::Counted RequestEdits::counted() const {
  const int64_t slot = p_.slots.get(b_, static_cast<int32_t>(b_));
  if (!penalties_.any() || slot < 0 || slot >= p_.counts.slots) return {};
  Counted text;
  text.columns = std::make_unique_for_overwrite<int32_t[]>(p_.counts.capacity);
  text.counts = std::make_unique_for_overwrite<int32_t[]>(p_.counts.capacity);
  text.size = tiles().edit_list.take(p_.counts, slot, p_.first_id, p_.vocab, text.columns.get(),
                                     text.counts.get());
  return text;
}

int64_t RequestEdits::column(int64_t id) const {
  const int64_t v = id < 0 ? -1 : id - p_.first_id;
  return v >= 0 && v < p_.vocab ? v : -1;
}

int64_t RequestEdits::find(int64_t id) const {
  const int64_t v = column(id);
  return v >= 0 ? place(v) : -1;
}

int64_t RequestEdits::place(int64_t column) const {
  const auto v = static_cast<uint64_t>(column);
  const uint64_t mine = uint64_t{1} << (v % kEditBlock);
  const auto bits = static_cast<uint64_t>(bits_[v / kEditBlock]);
  return (bits & mine) != 0 ? start_[v / kEditBlock] + std::popcount(bits & (mine - 1)) : -1;
}

void RequestEdits::mark(int64_t column) {
  const auto v = static_cast<uint64_t>(column);
  bits_[v / kEditBlock] |= int64_t{1} << (v % kEditBlock);
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
