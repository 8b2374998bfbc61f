// allocate_drafts: a heap holds the next draft of each request; the best is kept and gives its
// place to the one behind it. So nothing is known of a draft's own id when it is kept or not.
#include <algorithm>
#include <limits>
#include <vector>

#include "../torch/allocate_args.h"
#include "race.h"

namespace specdec::cpu {
namespace {

// How many drafts a request has, and what ended them.
int64_t length_of(const AllocateParams& p, int64_t b, int32_t* status) {
  *status = 0;
  if (!p.active.get(b, true)) return 0;
  for (int64_t i = 0; i < p.draft; ++i) {
    const int64_t id = p.draft_ids.at(b, i);
    if (id == -1) return i;
    *status = draft_fault(id, p.confidence[b * p.draft + i]);
    if (*status != 0) return i;
  }
  return p.draft;
}

class Heads {
 public:
  explicit Heads(const AllocateParams& p) : p_(p), length_(p.batch) {
    for (int64_t b = 0; b < p.batch; ++b) {
      length_[b] = length_of(p, b, p.status + b);
      push(1.0f, b, 0);
    }
    std::make_heap(heads_.begin(), heads_.end(), kIsWorse);
  }

  bool empty() const { return heads_.empty(); }
  const Entrant& best() const { return heads_.front(); }

  // The request of the best head, whose next draft takes its place.
  int64_t take() {
    const Entrant head = best();
    const int64_t depth = head.id / p_.batch, b = head.id % p_.batch;
    std::pop_heap(heads_.begin(), heads_.end(), kIsWorse);
    heads_.pop_back();
    if (push(head.score, b, depth + 1)) std::push_heap(heads_.begin(), heads_.end(), kIsWorse);
    return b;
  }

 private:
  static constexpr auto kIsWorse = [](const Entrant& x, const Entrant& y) { return y.beats(x); };

  // A draft that can be accepted; of equals the shallower beats, then the lower request.
  bool push(float product, int64_t b, int64_t depth) {
    if (depth >= length_[b]) return false;
    product = mul_rn(product, p_.confidence[b * p_.draft + depth]);
    if (product > 0.0f) heads_.push_back({product, depth * p_.batch + b});
    return product > 0.0f;
  }

  const AllocateParams& p_;
  std::vector<int64_t> length_;
  std::vector<Entrant> heads_;
};

// The request of each draft that is kept, the best draft first.
std::vector<int64_t> kept_drafts(const AllocateParams& p) {
  Heads heads(p);
  std::vector<int64_t> taken;
  int64_t tokens = 0, kept = 0;
  for (int64_t b = 0; b < p.batch; ++b) tokens += p.active.get(b, true) ? tokens_of(1.0f) : 0;
  double best = p.cost ? yield_of(tokens, p.cost[0]) : 0.0;
  while (static_cast<int64_t>(taken.size()) < p.capacity && !heads.empty()) {
    tokens += tokens_of(heads.best().score);
    taken.push_back(heads.take());
    const auto n = static_cast<int64_t>(taken.size());
    const double yield = p.cost ? yield_of(tokens, p.cost[n]) : std::numeric_limits<double>::max();
    if (!p.cost || yield > best) {
      best = yield;
      kept = n;
    } else if (!p.compare_all) {
      break;
    }
  }
  taken.resize(kept);
  return taken;
}

template <class Id>
void write(const AllocateParams& p) {
  Id* ids = static_cast<Id*>(p.out_ids);
  int32_t at = 0;
  p.cu_draft[0] = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int32_t i = 0; i < p.num_draft[b]; ++i, ++at) {
      ids[at] = static_cast<Id>(p.draft_ids.at(b, i));
      p.source[at] = static_cast<int32_t>(b * p.draft + i);
    }
    p.cu_draft[b + 1] = at;
  }
  std::fill(ids + at, ids + p.capacity, Id{-1});
  std::fill(p.source + at, p.source + p.capacity, -1);
}

void allocate_drafts(const AllocateParams& p, const Tensor& /*like*/) {
  std::fill_n(p.num_draft, p.batch, 0);
  for (const int64_t b : kept_drafts(p)) ++p.num_draft[b];
  p.draft_ids.wide ? write<int64_t>(p) : write<int32_t>(p);
}

}  // namespace

SPECDEC_CPU_KERNEL(allocate_drafts_out, Boxed<allocate_params, allocate_drafts>::call)
}  // namespace specdec::cpu
