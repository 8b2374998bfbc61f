// Exact scores and the standings of a race.
#include "race.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace specdec::cpu {

Race::Race(const NoiseStream& stream, int64_t wanted) : stream(stream), wanted_(wanted) {}
Race::Race(const Race&) = default;
Race::~Race() = default;

void Race::exclude(int64_t id) { excluded_.push_back(id); }

bool Race::is_excluded(int64_t id) const {
  return std::find(excluded_.begin(), excluded_.end(), id) != excluded_.end();
}

std::vector<int64_t> Race::ids() const {
  std::vector<int64_t> ids;
  for (const Entrant& e : best_) ids.push_back(e.id);
  return ids;
}

int64_t Race::winner() const { return best_.empty() ? -1 : best_.front().id; }
bool Race::full() const { return static_cast<int64_t>(best_.size()) >= wanted_; }

void Race::offer_logit(int64_t id, float logit) {
  if (!(logit >= threshold && logit > -kInf)) return;
  offer(id, mul_rn(sub_rn(logit, max), inv_t), block_noise(stream, id / kNoiseBlock));
}

// No id scores more than its log-weight - log of the block's minimum.
void Race::offer_logits(int64_t first, const float* logits, uint32_t word) {
  const BlockNoise block = block_noise(stream, first / kNoiseBlock, word);
  const float log_minimum = log_normal(block.minimum);
  for (int j = 0; j < kNoiseBlock; ++j) {
    if (!(logits[j] >= threshold && logits[j] > -kInf)) continue;
    const float log_weight = mul_rn(sub_rn(logits[j], max), inv_t);
    if (log_weight >= cut() + log_minimum) offer(first + j, log_weight, block);
  }
}

void Race::offer_weights(int64_t first, const float* weights, uint32_t word) {
  const BlockNoise block = block_noise(stream, first / kNoiseBlock, word);
  for (int j = 0; j < kNoiseBlock; ++j) {
    if (weights[j] >= FLT_MIN && weights[j] >= linear_cut() * block.minimum) {
      offer(first + j, log_normal(weights[j]), block);
    }
  }
}

void Race::offer(int64_t id, float log_weight, const BlockNoise& block) {
  const Entrant e{race_score(log_weight, noise_in(block, id, noise_word(stream, id))), id};
  if (!std::isfinite(e.score) || (full() && !e.beats(best_.back())) || is_excluded(id)) return;
  insert(e);
}

void Race::merge(const Race& other) {
  for (const Entrant& e : other.best_) {
    if (!full() || e.beats(best_.back())) insert(e);
  }
}

void Race::insert(const Entrant& e) {
  for (const Entrant& b : best_) {
    if (b.id == e.id) return;  // an id may be offered twice: as a start, and in its turn
  }
  const auto at = std::find_if(best_.begin(), best_.end(),
                               [&](const Entrant& standing) { return e.beats(standing); });
  best_.insert(at, e);
  if (static_cast<int64_t>(best_.size()) > wanted_) best_.pop_back();
  if (!full()) return;
  const float worst = best_.back().score;
  cut_ = worst - (1e-3f + 1e-6f * std::fabs(worst));
  const double linear = std::exp(static_cast<double>(worst)) * (1 - 2e-3);
  linear_cut_ = linear > FLT_MAX ? FLT_MAX : linear < FLT_MIN ? 0.f : static_cast<float>(linear);
}

}  // namespace specdec::cpu
