// The noise of a race: iid Exp(1) numbers E, one for each target id, made block by block. The
// smallest of 64 such numbers is Exp(1) / 64, its place is uniform, and what the others exceed it
// by is iid Exp(1) again. So a block has a minimum m and its place, and every other id m plus a
// number of its own: no id of a block can beat (largest log-weight of it) - log m.
#pragma once
#include "logmath.h"
#include "philox.h"

namespace specdec {

constexpr int kNoiseBlock = 64;
// Indices of the words of a block's minimum and of its place; token ids lie below.
constexpr int64_t kMinima = int64_t{1} << 31, kPlaces = int64_t{3} << 30;

SPECDEC_HD float block_minimum(uint32_t word) { return mul_rn(exponential(word), 1.f / 64); }

struct BlockNoise {
  float minimum;
  int place;  // in the block
};

// Given the word of the minimum.
SPECDEC_HD BlockNoise block_noise(const NoiseStream& s, int64_t block, uint32_t word) {
  return {block_minimum(word), static_cast<int>(noise_word(s, kPlaces + block) % kNoiseBlock)};
}

SPECDEC_HD BlockNoise block_noise(const NoiseStream& s, int64_t block) {
  return block_noise(s, block, noise_word(s, kMinima + block));
}

// E of an id, from its own word and the numbers of its block.
SPECDEC_HD float noise_in(const BlockNoise& block, int64_t id, uint32_t word) {
  return id % kNoiseBlock == block.place ? block.minimum : add_rn(block.minimum, exponential(word));
}

SPECDEC_HD float noise_of(const NoiseStream& s, int64_t id) {
  const auto block = static_cast<uint32_t>(id) / kNoiseBlock;
  PhiloxWords words[3];
  noise_words(s, {quad_of(kMinima) + block / 4, quad_of(kPlaces) + block / 4, quad_of(id)}, words);
  const uint32_t minimum = word_of(words[0], block), place = word_of(words[1], block);
  return noise_in({block_minimum(minimum), static_cast<int>(place % kNoiseBlock)}, id,
                  word_of(words[2], id));
}

// score = log-weight - log E; -log E lies in [-2.83, 27.04]. The largest score wins.
constexpr float kMaxRaceNoise = 27.05f;

SPECDEC_HD float race_score(float log_weight, float noise) {
  return sub_rn(log_weight, log_normal(noise));
}

}  // namespace specdec
