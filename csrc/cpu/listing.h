// What is told of a token beside its log-probability: its rank, and the row's likeliest ids. All of
// it is found in the few blocks of 64 ids whose largest logit can matter.
#pragma once
#include "../torch/args.h"
#include "row.h"

namespace specdec::cpu {

// Where it is written, by place; ranks == nullptr: nowhere.
struct Listing {
  int64_t top = 0;
  int32_t* ranks = nullptr;   // [places]
  void* ids = nullptr;        // [places, top]
  bool wide = false;          // ids are int64
  float* logprobs = nullptr;  // [places, top]

  explicit operator bool() const { return ranks != nullptr; }
  // Of an examined row and its token; -1: none.
  void write(const Team& team, int64_t place, const RowLaw& law, int64_t id) const;
  // Where nothing is listed; the log-probabilities are `missing`.
  void clear(int64_t place, float missing) const;
};

// Writes an id, int64 if `wide`, else int32.
inline void store_id(void* ids, bool wide, int64_t at, int64_t id) {
  if (wide) {
    static_cast<int64_t*>(ids)[at] = id;
  } else {
    static_cast<int32_t*>(ids)[at] = static_cast<int32_t>(id);
  }
}

// What an op tells of the tokens that it emits: log-probabilities, and their listing.
struct Scores {
  LogprobsMode mode;
  float* logprobs;  // [places]
  const Listing& listing;

  explicit operator bool() const { return mode != LogprobsMode::kNone; }
  bool raw() const { return mode == LogprobsMode::kRaw; }
  // Whether they are of another law of a row, its twin, than the one that decides.
  bool of_twin(const RowParams& decides, const RowParams& processed) const {
    return raw() || (mode == LogprobsMode::kProcessed && processed.greedy != decides.greedy);
  }
  void write(const Team& team, int64_t place, const RowLaw& law, int64_t id) const {
    logprobs[place] = law.logprob(id);
    if (listing) listing.write(team, place, law, id);
  }
  void clear(int64_t place) const {
    logprobs[place] = 0.f;
    if (listing) listing.clear(place, 0.f);
  }
};

// The results of an op that lists its tokens beside its other results.
#define SPECDEC_LISTING_ARGS Tensor out_ranks, Tensor out_top_ids, Tensor out_top_logprobs
#define SPECDEC_LISTING_NAMES out_ranks, out_top_ids, out_top_logprobs

inline Listing listing_of(int64_t top, SPECDEC_LISTING_ARGS) {  // top: -1 for none
  if (top < 0) return {};
  return {top, output<int32_t>(out_ranks), output<void>(out_top_ids),
          out_top_ids.scalar_type() == ScalarType::Long, output<float>(out_top_logprobs)};
}

// Boxed of `<op>_listed`: kRun takes the listing, too.
template <auto kParams, auto kRun>
struct BoxedListed;

template <class Params, class... Args, Params (*kParams)(Args...), auto kRun>
struct BoxedListed<kParams, kRun> {
  static void call(int64_t top, Args... args, SPECDEC_LISTING_ARGS) {
    kRun(kParams(args...), listing_of(top, SPECDEC_LISTING_NAMES));
  }
};

}  // namespace specdec::cpu
