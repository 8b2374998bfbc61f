// Memory of a call: scratch from torch's allocator, so that captures and streams need no care.
#include <array>
#include <utility>

#include "kernels.h"
#include "rows.cuh"

namespace specdec {

namespace {

using torch::headeronly::ScalarType;

class Layout {  // arrays behind one another, each aligned to 16 bytes
 public:
  template <class T>
  int64_t add(int64_t count) {
    const int64_t at = size_;
    size_ += (count * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
    return at;
  }
  int64_t size() const { return size_; }

 private:
  int64_t size_ = 0;
};

template <class T>
Global<T> part(const Tensor& memory, int64_t at) {
  return Global<T>(reinterpret_cast<T*>(static_cast<char*>(memory.mutable_data_ptr()) + at));
}

}  // namespace

Reserved::Reserved(Problem* problem, const Tensor& like) {
  Problem& p = *problem;
  const int64_t rows = p.batch * (p.target_rows + p.draft_rows), tiles = rows * p.tiles;
  const int64_t pairs = p.batch * p.pairs, gathered = p.filters ? tiles : 0;
  const int64_t nodes = p.batch * p.nodes;
  const bool maps = p.token_map && p.task != Task::kSample && p.draft;
  const bool is_wide = p.target.type() == LogitType::kFloat32 || p.edits || p.draft_edits ||
                       (p.draft && p.draft.type() == LogitType::kFloat32);
  p.maxima_bytes = int64_t{p.tiles} * kTileBlocks * (is_wide ? 4 : 2);
  Layout layout;
  const int64_t partials = layout.add<Partial>(tiles);
  const int64_t maxima = layout.add<uint8_t>(rows * p.maxima_bytes);
  const int64_t gathered_at = layout.add<Gathered>(gathered);
  const int64_t lists = layout.add<uint8_t>(gathered * kListed * (is_wide ? 4 : 2));
  const int64_t stats = layout.add<RowStats>(rows);
  const int64_t open = layout.add<int32_t>(p.filters ? rows : 0);
  const int64_t tasks = layout.add<PairTask>(pairs);
  const int64_t pair_partials = layout.add<PairPartial>(pairs * p.tiles);
  const int64_t states = layout.add<ChainState>(p.batch);
  const int64_t weights = layout.add<float>(p.batch * (p.max_draft + 1));
  const int64_t columns = layout.add<int32_t>(maps ? p.vocab : 0);
  const int64_t candidates = layout.add<Candidate>(nodes);
  const int64_t marks = layout.add<Mark>(nodes);
  const int64_t queue = layout.add<int32_t>(p.nodes > 0 ? nodes + p.batch : 0);
  const int64_t listed = layout.add<Listed>(nodes);
  const int64_t walks = layout.add<WalkState>(p.nodes > 0 ? p.batch : 0);
  const std::array<int64_t, 1> size{layout.size()};
  scratch_ = torch::stable::new_empty(like, size, ScalarType::Byte);
  Workspace& w = p.work;
  w.partials = part<Partial>(scratch_, partials);
  w.maxima = part<uint8_t>(scratch_, maxima);
  w.gathered = part<Gathered>(scratch_, gathered_at);
  w.lists = part<uint8_t>(scratch_, lists);
  w.rows = part<RowStats>(scratch_, stats);
  w.open = part<int32_t>(scratch_, open);
  w.tasks = part<PairTask>(scratch_, tasks);
  w.pair_partials = part<PairPartial>(scratch_, pair_partials);
  w.states = part<ChainState>(scratch_, states);
  w.weights = part<float>(scratch_, weights);
  w.candidates = part<Candidate>(scratch_, candidates);
  w.marks = part<Mark>(scratch_, marks);
  w.queue = part<int32_t>(scratch_, queue);
  w.listed = part<Listed>(scratch_, listed);
  w.walks = part<WalkState>(scratch_, walks);
  if (maps) w.columns = part<int32_t>(scratch_, columns);
}

Problem base_problem(Task task, int64_t batch, const Logits& target, const Logits& draft,
                     const Sampling& sampling, const Sampling& draft_sampling) {
  Problem p{};
  p.task = task;
  p.batch = batch;
  p.target = LogitTable(target);
  if (draft) p.draft = LogitTable(draft);
  p.vocab = target.vocab;
  p.draft_vocab = draft.vocab;
  STD_TORCH_CHECK(p.vocab < 0x7fffffff, "vocabulary of ", p.vocab, " ids: at most 2^31 - 2");
  p.tiles = tiles_of(p.vocab > p.draft_vocab ? p.vocab : p.draft_vocab);
  p.sampling = SamplingView(sampling);
  p.draft_sampling = SamplingView(draft_sampling);
  p.num_samples = 1;
  p.logprobs_mode = LogprobsMode::kNone;
  return p;
}

}  // namespace specdec

#ifdef SPECDEC_HOST
// Bytes that kernels have read and written since the last call: the traffic meter of the tests.
namespace {
std::tuple<int64_t, int64_t> cuda_host_traffic() {
  return {std::exchange(specdec::bytes_read, 0), std::exchange(specdec::bytes_written, 0)};
}
// Sends launches to the function at this address, of a GPU with so many multiprocessors; 0 brings
// them back to the host.
void cuda_host_elsewhere(int64_t address, int64_t processors) {
  specdec::elsewhere = reinterpret_cast<specdec::Elsewhere>(address);
  specdec::simulated_multiprocessors = static_cast<int>(processors);
}
}  // namespace
STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_NAMESPACE, m) {
  m.def("cuda_host_traffic() -> (int, int)");
  m.def("cuda_host_elsewhere(int address, int processors) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("cuda_host_traffic", TORCH_BOX(&cuda_host_traffic));
  m.impl("cuda_host_elsewhere", TORCH_BOX(&cuda_host_elsewhere));
}
#endif
