// Memory of a call: scratch from torch's allocator, so that captures and streams need no care.
#include <array>
#include <utility>

#include "kernels.h"
#include "rows.cuh"

namespace specdec {

namespace {

using torch::headeronly::ScalarType;

class Arrays {  // behind one another from an address on, each aligned to 16 bytes
 public:
  explicit Arrays(uint64_t begin) : begin_(begin), end_(begin) {}
  template <class T>
  Global<T> take(int64_t count) {  // absent where there is nothing in it
    const uint64_t at = count > 0 ? end_ : 0;
    end_ += (static_cast<uint64_t>(count) * sizeof(T) + 15) / 16 * 16;
    return Global<T>(reinterpret_cast<T*>(at));
  }
  int64_t size() const { return static_cast<int64_t>(end_ - begin_); }

 private:
  uint64_t begin_, end_;
};

// The workspace of a problem from an address on; returns its size.
int64_t place(const Problem& p, int64_t bytes_of_value, uint64_t begin, Workspace* w) {
  const int64_t rows = p.batch * p.rows(), tiles = rows * p.tiles, pairs = p.batch * p.pairs;
  const int64_t gathered = p.filters ? tiles : 0, nodes = p.batch * p.nodes;
  const bool maps = p.token_map && p.task != Task::kSample && p.draft;
  Arrays arrays(begin);
  w->partials = arrays.take<Partial>(tiles);
  w->maxima = arrays.take<uint8_t>(rows * p.maxima_bytes);
  w->gathered = arrays.take<Gathered>(gathered);
  w->lists = arrays.take<uint8_t>(gathered * kListed * bytes_of_value);
  w->rows = arrays.take<RowStats>(rows);
  w->open = arrays.take<int32_t>(p.filters ? rows : 0);
  w->tasks = arrays.take<PairTask>(pairs);
  w->pair_partials = arrays.take<PairPartial>(pairs * p.tiles);
  w->states = arrays.take<ChainState>(p.batch);
  w->weights = arrays.take<float>(p.batch * (p.max_draft + 1));
  w->columns = arrays.take<int32_t>(maps ? p.vocab : 0);
  w->candidates = arrays.take<Candidate>(nodes);
  w->marks = arrays.take<Mark>(nodes);
  w->queue = arrays.take<int32_t>(p.nodes > 0 ? nodes + p.batch : 0);
  w->listed = arrays.take<Listed>(nodes);
  w->walks = arrays.take<WalkState>(p.nodes > 0 ? p.batch : 0);
  return arrays.size();
}

}  // namespace

Reserved::Reserved(Problem* problem, const Tensor& like) {
  Problem& p = *problem;
  const bool is_wide = p.target.type() == LogitType::kFloat32 || p.edits || p.draft_edits ||
                       (p.draft && p.draft.type() == LogitType::kFloat32);
  const int64_t bytes = is_wide ? 4 : 2;  // of a value
  p.maxima_bytes = int64_t{p.tiles} * kTileBlocks * bytes;
  const std::array<int64_t, 1> size{place(p, bytes, 0, &p.work)};
  scratch_ = torch::stable::new_empty(like, size, ScalarType::Byte);
  place(p, bytes, reinterpret_cast<uint64_t>(scratch_.mutable_data_ptr()), &p.work);
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

Problem pair_problem(Task task, const PairParams& v, const Logits& draft, int64_t rows) {
  Problem p = base_problem(task, v.batch, v.target, draft, v.sampling, v.draft_sampling);
  set_vocabulary(&p, v.token_map, v.allowed, rows);
  set_edits(&p, v.edits, v.draft_edits);
  p.status = Global<int32_t>(v.status);
  return p;
}

void set_verify(Problem* p, const VerifyParams& v, const Ids& ids) {
  set_noise(p, v.noise);
  p->is_kept = v.kept && p->draft;
  p->kept_ids = GlobalIds(const_cast<void*>(v.kept.ids), v.kept.wide);
  p->kept_logsumexp = Global<const float>(v.kept.logsumexp);
  p->typical_epsilon = GlobalKnob(v.typical_epsilon);
  p->typical_delta = GlobalKnob(v.typical_delta);
  p->logprobs_mode = v.logprobs_mode;
  p->token_ids = GlobalIds(v.token_ids, ids.wide);
  p->num_accepted = Global<int32_t>(v.num_accepted);
  p->logprobs = Global<float>(v.logprobs);
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
