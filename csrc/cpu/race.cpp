// Exact scores and the standings of a race.
#include "race.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "../common/logmath.h"

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

void Race::offer_logit(int64_t id, float logit, uint32_t word) {
  if (!(logit >= threshold && logit > -kInf) || crowded()) return;
  if (!weigher_) return offer(id, mul_rn(logit, inv_t), word);
  --allowance_;
  offer_weight(id, weigher_->weight(id), word);
}

void Race::offer_logit(int64_t id, float logit) { offer_logit(id, logit, noise_word(stream, id)); }

void Race::weigh_by(const Weigher* weigher, double log_bound) {
  weigher_ = weigher;
  log_bound_ = static_cast<float>(log_bound + 1e-3 + 1e-6 * std::fabs(log_bound));
}

void Race::offer_weight(int64_t id, float weight, uint32_t word) {
  if (weight >= FLT_MIN) offer(id, log_normal(weight), word);
}

void Race::offer_weight(int64_t id, float weight) {
  offer_weight(id, weight, noise_word(stream, id));
}

void Race::offer(int64_t id, float log_weight, uint32_t word) {
  const Entrant e{race_score(log_weight, word), id};
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
