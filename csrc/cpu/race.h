// The race of one row: the id with the largest log-weight - log E wins, ties to the lowest id. SIMD
// code names the few blocks of 64 ids that may win (tile_race.h); the scores of theirs are exact
// here.
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
inline constexpr auto kBeats = [](const Entrant& x, const Entrant& y) { return x.beats(y); };

// What touches the vectors is defined in race.cpp: the files of one instruction set include this
// header, and a template instantiated there could be linked into the code of another machine.
class Race {
 public:
  explicit Race(const NoiseStream& stream, int64_t wanted = 1);
  Race(const Race&);
  ~Race();

  void exclude(int64_t id);
  bool is_excluded(int64_t id) const;

  // One kept logit of a plain row: log-weight = (l - max) * inv_t.
  void offer_logit(int64_t id, float logit);
  // The same for a block of noise, given the word of its minimum; residual weights compete iff they
  // are normal.
  void offer_logits(int64_t first, const float* logits, uint32_t word);
  void offer_weights(int64_t first, const float* weights, uint32_t word);
  void merge(const Race& other);

  // (l - max) * inv_t - log E below this cannot win; the margin covers the rounding of the SIMD
  // bounds.
  float cut() const { return cut_ - log_bound; }
  // The same for weights: weight / E below it cannot win; 0 where it would be denormal.
  float linear_cut() const { return linear_cut_; }

  const std::vector<Entrant>& best() const { return best_; }  // best first
  std::vector<int64_t> ids() const;
  int64_t winner() const;  // -1 where nobody competes

  NoiseStream stream{};
  float max = 0.f, inv_t = 1.f, threshold = -kInf;  // of a plain row
  // Where the ids whose logits are known weigh exp(log_bound + (l - max) * inv_t), at most.
  float log_bound = 0.f;

 private:
  bool full() const;
  void offer(int64_t id, float log_weight, const BlockNoise& block);
  void insert(const Entrant& e);

  int64_t wanted_;
  float cut_ = -kInf, linear_cut_ = 0.f;
  std::vector<Entrant> best_;
  std::vector<int64_t> excluded_;
};

}  // namespace specdec::cpu
