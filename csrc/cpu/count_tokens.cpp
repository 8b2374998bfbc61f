// count_tokens: tokens into the hash table of their slot.
#include <bit>

#include "../torch/edit_args.h"
#include "team.h"

namespace specdec::cpu {
namespace {

// The place of an id in a table, or -1 where it is full of others.
int64_t place_of(const int32_t* ids, int64_t capacity, int32_t id) {
  const auto mask = static_cast<uint32_t>(capacity - 1);
  uint32_t place = first_place(id, std::popcount(mask));
  for (int64_t i = 0; i < capacity; ++i, ++place) {
    if (ids[place & mask] == -1 || ids[place & mask] == id) return place & mask;
  }
  return -1;
}

int32_t count_request(const CountTokensParams& p, int64_t b) {
  const int64_t slot = p.slot.get(b, static_cast<int32_t>(b));
  if (slot == -1) return 0;
  if (slot < 0 || slot >= p.slots) return kBadLayout;
  int32_t *ids = p.ids + slot * p.capacity, *counts = p.counts + slot * p.capacity;
  int32_t status = 0;
  for (int64_t i = 0; i < p.width; ++i) {
    const int64_t id = p.tokens.at(b, i);
    if (id < 0 || id > INT32_MAX) continue;
    const int64_t place = place_of(ids, p.capacity, static_cast<int32_t>(id));
    if (place < 0) {
      status = kBadLayout;
      continue;
    }
    ids[place] = static_cast<int32_t>(id);
    counts[place] = p.amount == 1 ? counts[place] | 1 : counts[place] + p.amount;
  }
  return status;
}

void count_tokens(const CountTokensParams& p, const Tensor& /*like*/) {
  for_requests(p.batch, [&](int64_t b, const Team&) { p.status[b] = count_request(p, b); });
}

}  // namespace

SPECDEC_CPU_KERNEL(count_tokens_out, Boxed<count_tokens_params, count_tokens>::call)
}  // namespace specdec::cpu
