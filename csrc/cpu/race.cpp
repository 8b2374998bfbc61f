// Exact scores and the standings of a race.
#include "race.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace specdec::cpu {

Race::Race() = default;
Race::Race(const Race&) = default;
Race::~Race() = default;
Race::Race(const NoiseStream& stream, float inv_t, float threshold, int64_t wanted)
    : stream(stream), inv_t(inv_t), threshold(threshold), wanted_(wanted) {}

void Race::exclude(int64_t id) { excluded_.push_back(id); }

bool Race::is_excluded(int64_t id) const {
  return std::find(excluded_.begin(), excluded_.end(), id) != excluded_.end();
}

bool Race::empty() const { return best_.empty(); }
int64_t Race::winner() const { return best_.front().id; }
bool Race::full() const { return static_cast<int64_t>(best_.size()) >= wanted_; }

void Race::offer_logit(int64_t id, float logit, const BlockNoise& block) {
  if (!(logit >= threshold && logit > -kInf) || crowded()) return;
  if (!weigher_) return offer(id, mul_rn(logit, inv_t), block);
  --allowance_;
  offer_weight(id, weigher_->weight(id), block);
}

void Race::offer_logit(int64_t id, float logit) {
  offer_logit(id, logit, block_noise(stream, id / kNoiseBlock));
}

void Race::weigh_by(const Weigher* weigher, double log_bound) {
  weigher_ = weigher;
  log_bound_ = static_cast<float>(log_bound + 1e-3 + 1e-6 * std::fabs(log_bound));
}

void Race::offer_weight(int64_t id, float weight, const BlockNoise& block) {
  if (weight >= FLT_MIN) offer(id, log_normal(weight), block);
}

void Race::offer_weight(int64_t id, float weight) {
  offer_weight(id, weight, block_noise(stream, id / kNoiseBlock));
}

// No id scores more than its log-weight - log of the block's minimum.
void Race::offer_logits(int64_t first, const float* logits, uint32_t word) {
  const BlockNoise block = block_noise(stream, first / kNoiseBlock, word);
  const float log_minimum = log_normal(block.minimum);
  for (int j = 0; j < kNoiseBlock; ++j) {
    if (logits[j] * inv_t >= cut() + log_minimum) offer_logit(first + j, logits[j], block);
  }
}

void Race::offer_weights(int64_t first, const float* weights, uint32_t word) {
  const BlockNoise block = block_noise(stream, first / kNoiseBlock, word);
  for (int j = 0; j < kNoiseBlock; ++j) {
    if (weights[j] >= linear_cut() * block.minimum) offer_weight(first + j, weights[j], block);
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
