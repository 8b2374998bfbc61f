// Memory of a call: scratch from the caching allocator, tickets that live with the stream.
#include <map>
#include <mutex>
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

Tensor make(const Tensor& like, int64_t bytes, bool zero) {
  const std::array<int64_t, 1> size{bytes};
  return zero ? torch::stable::new_zeros(like, size, ScalarType::Byte)
              : torch::stable::new_empty(like, size, ScalarType::Byte);
}

// Tickets of a stream, grown when needed. A capture gets its own: its graph may replay beside the
// stream.
Tensor tickets_of(const Tensor& like, Stream stream, int64_t bytes) {
  if (is_capturing(stream)) return make(like, bytes, true);
  static auto& mutex = *new std::mutex;  // never destroyed: the device may be gone by then
  static auto& tickets = *new std::map<std::pair<int, Stream>, Tensor>;
  const std::lock_guard lock(mutex);
  const auto key = std::pair(static_cast<int>(like.get_device_index()), stream);
  auto found = tickets.find(key);
  if (found == tickets.end() || found->second.size(0) < bytes) {
    found = tickets.insert_or_assign(key, make(like, 2 * bytes, true)).first;
  }
  return found->second;
}

template <class T>
Global<T> part(const Tensor& memory, int64_t at) {
  return Global<T>(reinterpret_cast<T*>(static_cast<char*>(memory.mutable_data_ptr()) + at));
}

}  // namespace

Reserved::Reserved(Problem* problem, const Tensor& like, Stream stream) {
  Problem& p = *problem;
  const int64_t rows = p.batch * (p.target_rows + p.draft_rows), tiles = rows * p.tiles;
  const int64_t pairs = p.batch * p.pairs, listed = p.filters ? tiles : 0;
  const bool maps = p.token_map && p.task != Task::kSample && p.draft;
  Layout layout;
  const int64_t partials = layout.add<Partial>(tiles);
  const int64_t keys = layout.add<unsigned long long>(tiles * p.num_samples);
  const int64_t heads = layout.add<ListHead>(listed);
  const int64_t lists = layout.add<Listed>(listed * kListed);
  const int64_t groups = layout.add<Group>(listed * kGroups);
  const int64_t stats = layout.add<RowStats>(rows);
  const int64_t tasks = layout.add<PairTask>(pairs);
  const int64_t pair_partials = layout.add<PairPartial>(pairs * p.tiles);
  const int64_t states = layout.add<ChainState>(p.batch);
  const int64_t weights = layout.add<float>(p.batch * (p.max_draft + 1));
  const int64_t columns = layout.add<int32_t>(maps ? p.vocab : 0);
  const int64_t nodes = p.batch * p.nodes, walks = p.nodes > 0 ? 2 * p.batch : 0;
  const int64_t candidates = layout.add<Candidate>(nodes);
  const int64_t marks = layout.add<Mark>(nodes);
  const int64_t queue = layout.add<int32_t>(p.nodes > 0 ? nodes + p.batch : 0);
  const int64_t listed_ids = layout.add<Listed>(nodes);
  const int64_t walk_states = layout.add<WalkState>(walks);
  scratch_ = make(like, layout.size(), false);
  const int64_t ticket_bytes = (rows + p.batch) * static_cast<int64_t>(sizeof(unsigned));
  tickets_ = tickets_of(like, stream, ticket_bytes);
  Workspace& w = p.work;
  w.partials = part<Partial>(scratch_, partials);
  w.keys = part<unsigned long long>(scratch_, keys);
  w.heads = part<ListHead>(scratch_, heads);
  w.lists = part<Listed>(scratch_, lists);
  w.groups = part<Group>(scratch_, groups);
  w.rows = part<RowStats>(scratch_, stats);
  w.tasks = part<PairTask>(scratch_, tasks);
  w.pair_partials = part<PairPartial>(scratch_, pair_partials);
  w.states = part<ChainState>(scratch_, states);
  w.weights = part<float>(scratch_, weights);
  w.candidates = part<Candidate>(scratch_, candidates);
  w.marks = part<Mark>(scratch_, marks);
  w.queue = part<int32_t>(scratch_, queue);
  w.listed = part<Listed>(scratch_, listed_ids);
  w.walks = part<WalkState>(scratch_, walk_states);
  if (maps) w.columns = part<int32_t>(scratch_, columns);
  w.request_tickets = part<unsigned>(tickets_, 0);
  w.row_tickets = w.request_tickets + p.batch;
}

Problem base_problem(Task task, int64_t batch, const Logits& target, const Logits& draft,
                     const Sampling& sampling, const Sampling& draft_sampling) {
  Problem p{};
  p.task = task;
  p.batch = batch;
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
// Sends launches to the function at this address; 0 brings them back to the host.
void cuda_host_elsewhere(int64_t address) {
  specdec::elsewhere = reinterpret_cast<specdec::Elsewhere>(address);
}
}  // namespace
STABLE_TORCH_LIBRARY_FRAGMENT(specdec_kernels, m) {
  m.def("cuda_host_traffic() -> (int, int)");
  m.def("cuda_host_elsewhere(int address) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CompositeExplicitAutograd, m) {
  m.impl("cuda_host_traffic", TORCH_BOX(&cuda_host_traffic));
  m.impl("cuda_host_elsewhere", TORCH_BOX(&cuda_host_elsewhere));
}
#endif
