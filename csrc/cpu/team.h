// Threads, all of them libtorch's pool. A batch of at least as many requests as threads gives each
// thread whole requests; a smaller one splits each row over the threads at tile boundaries.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace specdec::cpu {

// Fewer tiles than this are not worth waking a thread: 8 tiles of 2048 ids take about 5 us. Nor is
// copying fewer bytes.
constexpr int64_t kSplitTiles = 8, kOneThreadBytes = 64 << 10;

class Team {
 public:
  explicit Team(int chunks) : chunks_(chunks) {}

  int chunks() const { return chunks_; }

  // f(chunk, begin, end) for consecutive ranges of [0, n), one a chunk. Chunks never wait for each
  // other, so a pool that runs them one after the other is as good.
  template <class F>
  void run(int64_t n, const F& f) const {
    if (chunks_ == 1) return f(0, 0, n);
    torch::stable::parallel_for(0, chunks_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        f(static_cast<int>(c), n * c / chunks_, n * (c + 1) / chunks_);
      }
    });
  }

  // The same for tiles, in the calling thread where there are few.
  template <class F>
  void run_tiles(int64_t n, const F& f) const {
    if (n >= kSplitTiles) return run(n, f);
    for (int c = 0; c < chunks_; ++c) f(c, n * c / chunks_, n * (c + 1) / chunks_);
  }

 private:
  int chunks_;
};

// f(take) in every thread: take() hands out 0 to n - 1, one by one, then -1.
template <class F>
void hand_out(int64_t n, const F& f) {
  const auto threads = std::min<int64_t>(torch::stable::get_num_threads(), n);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    f([&] {
      const int64_t i = next++;
      return i < n ? i : -1;
    });
  });
}

// f(request, team) for every request.
template <class F>
void for_requests(int64_t batch, const F& f) {
  const auto threads = static_cast<int>(torch::stable::get_num_threads());
  if (batch < threads) {
    for (int64_t b = 0; b < batch; ++b) f(b, Team(threads));
    return;
  }
  // Requests differ in length by the luck of acceptance, so they are handed out one by one.
  hand_out(batch, [&](const auto& take) {
    for (int64_t b = take(); b >= 0; b = take()) f(b, Team(1));
  });
}

}  // namespace specdec::cpu
