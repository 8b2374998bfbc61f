// Philox4x32-10 (Salmon et al. 2011): the only source of random numbers, the same in every backend.
//   key = (seed low, seed high); counter = (index >> 2, position, step, purpose + 4 lane);
//   the word of an index is number index & 3 of its counter's four.
#pragma once
#include "codes.h"
#include "hd.h"

namespace specdec {

constexpr uint32_t kPhiloxMul0 = 0xD2511F53u, kPhiloxMul1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

struct PhiloxWords {
  uint32_t word[4];
};

// Several counters of one key at once: each of them alone waits for its own last round.
template <int kCount>
SPECDEC_HD void philox4x32_10(uint32_t k0, uint32_t k1, PhiloxWords (&counters)[kCount]) {
  SPECDEC_ROLLED
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (PhiloxWords& one : counters) {
      uint32_t* c = one.word;
      const uint64_t product0 = static_cast<uint64_t>(kPhiloxMul0) * c[0];
      const uint64_t product1 = static_cast<uint64_t>(kPhiloxMul1) * c[2];
      c[0] = static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ k0;
      c[1] = static_cast<uint32_t>(product1);
      c[2] = static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ k1;
      c[3] = static_cast<uint32_t>(product0);
    }
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
}

// One stream of words: what is left is the index.
struct NoiseStream {
  uint32_t key0, key1;            // seed low, high
  uint32_t position, step, lane;  // counter words 1, 2, 3
};

SPECDEC_HD NoiseStream noise_stream(int64_t seed, int64_t position, int64_t step, int64_t purpose,
                                    int64_t lane = 0) {
  const uint64_t key = static_cast<uint64_t>(seed);
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32),
          static_cast<uint32_t>(static_cast<uint64_t>(position)),
          static_cast<uint32_t>(static_cast<uint64_t>(step)),
          static_cast<uint32_t>(static_cast<uint64_t>(purpose) + 4u * static_cast<uint64_t>(lane))};
}

// The words of indices 4 * quad .. 4 * quad + 3.
template <int kCount>
SPECDEC_HD void noise_words(const NoiseStream& s, const uint32_t (&quads)[kCount],
                            PhiloxWords (&words)[kCount]) {
  for (int i = 0; i < kCount; ++i) words[i] = {{quads[i], s.position, s.step, s.lane}};
  philox4x32_10(s.key0, s.key1, words);
}

SPECDEC_HD PhiloxWords noise_words(const NoiseStream& s, uint32_t quad) {
  PhiloxWords words[1];
  noise_words(s, {quad}, words);
  return words[0];
}

SPECDEC_HD uint32_t word_of(const PhiloxWords& w, int64_t index) {
  const uint32_t even = (index & 2) != 0 ? w.word[2] : w.word[0];  // an array's place is memory
  const uint32_t odd = (index & 2) != 0 ? w.word[3] : w.word[1];
  return (index & 1) != 0 ? odd : even;
}

SPECDEC_HD uint32_t quad_of(int64_t index) { return static_cast<uint32_t>(index >> 2); }

SPECDEC_HD uint32_t noise_word(const NoiseStream& s, int64_t index) {
  return word_of(noise_words(s, quad_of(index)), index);
}

// u = (word >> 8) 2^-24 in [0, 1): an acceptance coin. A chain has one a position, index 0.
SPECDEC_HD float coin(int64_t seed, int64_t position, int64_t step, int64_t index = 0) {
  const uint32_t word = noise_word(noise_stream(seed, position, step, kPurposeCoin), index);
  return mul_rn(static_cast<float>(word >> 8), 0x1p-24f);
}

}  // namespace specdec
