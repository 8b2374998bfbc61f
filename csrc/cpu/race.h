// The race of one row: the id with the largest log-weight - log E wins, ties to the lowest id.
// SIMD code offers the few ids that may win (tile_race.h); their scores are exact here.
#pragma once
#include <cstdint>
#include <limits>
#include <vector>

#include "../common/noise.h"

namespace specdec::cpu {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Entrant {
  float score;
  int64_t id;
  bool beats(const Entrant& other) const {
    return score > other.score || (score == other.score && id < other.id);
  }
};

// Weighs an id exactly where its logit only bounds the weight.
class Weigher {
 public:
  virtual ~Weigher() = default;
  virtual float weight(int64_t id) const = 0;
};

// What touches the vectors is defined in race.cpp: the files of one instruction set include this
// header, and a template instantiated there could be linked into the code of another machine.
class Race {
 public:
  Race();
  Race(const NoiseStream& stream, float inv_t, float threshold, int64_t wanted = 1);
  Race(const Race&);
  ~Race();

  void exclude(int64_t id);
  bool is_excluded(int64_t id) const;

  // A kept logit of a plain row: log-weight = l * inv_t.
  void offer_logit(int64_t id, float logit);
  // A residual weight: competes iff it is normal.
  void offer_weight(int64_t id, float weight);
  // The same for a block of noise, given the word of its minimum.
  void offer_logits(int64_t first, const float* logits, uint32_t word);
  void offer_weights(int64_t first, const float* weights, uint32_t word);
  void merge(const Race& other);

  // From now on the weight of an offered logit is the weigher's, at most
  // exp(logit * inv_t + log_bound), until `allowance` of them are weighed: then the race is
  // crowded, and no logit can win.
  void weigh_by(const Weigher* weigher, double log_bound);
  void allow(int allowance) { allowance_ = allowance; }
  bool crowded() const { return weigher_ && allowance_ <= 0; }

  // l * inv_t - log E below this cannot win; the margin covers the rounding of the SIMD bounds.
  float cut() const { return crowded() ? kInf : cut_ - log_bound_; }
  // The same for weights: weight / E below it cannot win; 0 where it would be denormal.
  float linear_cut() const { return linear_cut_; }

  const std::vector<Entrant>& best() const { return best_; }  // best first
  bool empty() const;
  int64_t winner() const;

  NoiseStream stream{};
  float inv_t = 1.f, threshold = -kInf;

 private:
  bool full() const;
  void offer_logit(int64_t id, float logit, const BlockNoise& block);
  void offer_weight(int64_t id, float weight, const BlockNoise& block);
  void offer(int64_t id, float log_weight, const BlockNoise& block);
  void insert(const Entrant& e);

  int64_t wanted_ = 1;
  float cut_ = -kInf, linear_cut_ = 0.f;
  const Weigher* weigher_ = nullptr;
  float log_bound_ = 0.f;
  int allowance_ = 0;
  std::vector<Entrant> best_;
  std::vector<int64_t> excluded_;
};

}  // namespace specdec::cpu
