// edit_rows: how biases, penalties and bans change each row, packed by id.
//   edit_kernel   grid = [rows]; a block marks the ids that a source names, numbers them, and
//                 writes bias, repetition and minus of each
#include "../torch/edit_args.h"
#include "request.cuh"
#include "tree.cuh"

namespace specdec {
namespace {

// A row, its part of the results, and the ids before it, in shared memory.
struct Edited {
  bool exists;
  int64_t b, node;
  int64_t first;  // flat: index of its request's first id
  Global<int64_t> bits;
  Global<int32_t> start;
  Global<float> values;
  float repetition, frequency, presence;
  int64_t table;        // of its request's counts; -1: none
  int64_t count;        // of the path
  int path[kMaxNodes];  // ids of the drafts before the row; -1: none. Longer ones: `path_id`

  __device__ bool repeats() const { return repetition != 1.f; }
  __device__ bool counts() const { return frequency != 0.f || presence != 0.f; }
};

__device__ inline int narrow(int64_t id) {
  return id == -1 ? kNoId : id < 0 || id > 0x7fffffff ? kOutside : static_cast<int>(id);
}

__device__ inline int drafted_id(const EditRowsParams& p, const Edited& row, int64_t i) {
  return narrow(GlobalIds(p.draft_ids).load(row.b * p.draft_ids.batch_stride + row.first + i));
}

__device__ inline int path_id(const EditRowsParams& p, const Edited& row, int64_t i) {
  return i < kMaxNodes ? row.path[i] : drafted_id(p, row, i);
}

// The request of a flat row: the last one that claims it, whatever the offsets are; -1: none.
__device__ inline int flat_request(const EditRowsParams& p, int64_t row) {
  int found = -1;
  for (int64_t b = threadIdx.x; b < p.batch; b += kThreads) {
    Chain c{};
    open_flat(GlobalVector(p.cu_draft), p.total, p.width, b, &c);
    const int64_t node = row - c.first - b;
    if (!c.lost && node >= 0 && node <= c.length) found = static_cast<int>(b);
  }
  return block_reduce(found, Larger{});
}

// Whose row it is, for thread 0.
__device__ inline void find_row(const EditRowsParams& p, int64_t number, int request, Edited* row) {
  const int64_t width = p.width + 1;
  row->b = p.cu_draft ? request : p.only_last ? number : number / width;
  row->node = p.only_last ? p.width : number - row->b * width;
  row->first = 0;
  row->exists = row->b >= 0 && GlobalVector(p.active).get(row->b, true);
  row->bits = Global(p.bits + number * p.blocks);
  row->start = Global(p.start + number * (p.blocks + 1));
  row->values = Global(p.values + number * p.room);
  if (!row->exists) return;
  if (p.cu_draft) {
    row->first = GlobalVector(p.cu_draft).load(row->b);
    row->node = number - row->first - row->b;
  }
  row->repetition = GlobalVector(p.repetition).get(row->b, 1.f);
  row->frequency = GlobalVector(p.frequency).get(row->b, 0.f);
  row->presence = GlobalVector(p.presence).get(row->b, 0.f);
  const int64_t slot = GlobalVector(p.slots).get(row->b, static_cast<int>(row->b));
  row->table = slot >= 0 && slot < p.counts.slots ? slot * p.counts.capacity : -1;
  row->count = row->node;
}

// The ids before the row.
__device__ inline void load_path(const EditRowsParams& p, TreeTable& tree, Edited& row) {
  if (p.parents.data) {
    load_tree(GlobalIds(p.parents), row.b, static_cast<int>(p.width + 1), p.width, tree);
    const int node = static_cast<int>(row.node);
    if (threadIdx.x == 0) {
      row.exists = tree.present(node);
      row.count = row.exists ? tree.depth[node] : 0;
      for (int m = node; m > 0; m = tree.parent[m]) {
        if (row.exists) row.path[tree.depth[m] - 1] = m;
      }
    }
    __syncthreads();
  }
  for (int64_t i = threadIdx.x; i < row.count && i < kMaxNodes; i += kThreads) {
    row.path[i] = drafted_id(p, row, p.parents.data ? row.path[i] : i);
  }
  __syncthreads();
}

// How often an id stands among the first `end` of the path.
__device__ inline int times(const EditRowsParams& p, const Edited& row, int id, int64_t end) {
  int found = 0;
  for (int64_t i = 0; i < end; ++i) found += path_id(p, row, i) == id ? 1 : 0;
  return found;
}

// Whether the request's table has an id.
__device__ inline bool holds(const EditRowsParams& p, const Edited& row, int id) {
  if (row.table < 0) return false;
  const auto mask = static_cast<uint32_t>(p.counts.capacity - 1);
  const uint32_t first = first_place(id, __popc(mask));
  for (uint32_t step = 0; step <= mask; ++step) {
    const int there = Global(p.counts.ids).load(row.table + ((first + step) & mask));
    if (there == id || there == -1) return there == id;
  }
  return false;
}

// f(id, bias), of ids that differ.
template <class F>
__device__ void for_biased(const EditRowsParams& p, const Edited& row, const F& f) {
  for (int64_t i = threadIdx.x; i < p.bias_ids.size; i += kThreads) {
    f(Global(p.bias_ids.row(row.b)).load(i), Global(p.bias.row(row.b)).load(i));
  }
}

// f(id, times generated) of what a penalty changes, of ids that differ.
template <class F>
__device__ void for_penalised(const EditRowsParams& p, const Edited& row, const F& f) {
  if (!row.repeats() && !row.counts()) return;
  for (int64_t i = threadIdx.x; row.table >= 0 && i < p.counts.capacity; i += kThreads) {
    const int id = Global(p.counts.ids).load(row.table + i);
    if (id < 0) continue;
    const int count = Global(p.counts.counts).load(row.table + i);
    const int generated = (count > 0 ? count >> 1 : 0) + times(p, row, id, row.count);
    const bool is_text = generated > 0 || (count & 1) != 0;
    if ((is_text && row.repeats()) || (generated > 0 && row.counts())) f(id, generated);
  }
  for (int64_t i = threadIdx.x; i < row.count; i += kThreads) {
    const int id = path_id(p, row, i);
    if (id < 0 || times(p, row, id, i) > 0 || holds(p, row, id)) continue;
    f(id, times(p, row, id, row.count));
  }
}

// Whether the text before the row ends as a bad word does, but for its last id.
__device__ inline bool meets(const EditRowsParams& p, const Edited& row, int64_t word) {
  int64_t path = row.count, tail = p.tail.size;  // what is left of them
  for (int64_t i = p.length - 2; i >= 0; --i) {
    int id = kNoId;
    while (path > 0 && id == kNoId) id = path_id(p, row, --path);
    if (id == kNoId && tail > 0) id = Global(p.tail.row(row.b)).load(--tail);
    const int wanted = Global(p.bad_words.row(row.b)).load(word + i);
    if (wanted != -1 && wanted != id) return false;
  }
  return true;
}

// f(id) of what may not come, of some ids more than once.
template <class F>
__device__ void for_banned(const EditRowsParams& p, const Edited& row, bool is_early, const F& f) {
  for (int64_t i = threadIdx.x; is_early && i < p.stop_ids.size; i += kThreads) {
    f(Global(p.stop_ids.row(row.b)).load(i));
  }
  for (int64_t i = threadIdx.x * p.length; i < p.bad_words.size; i += kThreads * p.length) {
    if (meets(p, row, i)) f(Global(p.bad_words.row(row.b)).load(i + p.length - 1));
  }
}

// Whether one of the stop ids may not come yet.
__device__ inline bool is_too_early(const EditRowsParams& p, const Edited& row) {
  if (p.stop_ids.size == 0) return false;
  int own = 0;
  for (int64_t i = threadIdx.x; i < row.count; i += kThreads) {
    own += path_id(p, row, i) != kNoId ? 1 : 0;
  }
  return block_reduce(own, Plus{}) < GlobalVector(p.min_tokens).load(row.b);
}

// Numbers the marked ids; nothing changes them yet.
__device__ inline void number(const EditRowsParams& p, const Edited& row) {
  int listed = 0;
  for (int64_t first = 0; first < p.blocks; first += kThreads) {
    const int64_t block = first + threadIdx.x;
    const bool is_there = block < p.blocks;
    auto left = is_there ? static_cast<unsigned long long>(row.bits.load(block)) : 0;
    int total;
    int i = listed + block_exclusive_sum(__popcll(left), &total);
    if (is_there) row.start.store(block, i);
    for (; left != 0; left &= left - 1, ++i) {
      row.values.store(i, 0.f);
      row.values.store(p.plane + i, 1.f);
      row.values.store(2 * p.plane + i, 0.f);
      row.values.store(3 * p.plane + i, static_cast<float>(block * kEditBlock + __ffsll(left) - 1));
    }
    listed += total;
  }
  if (threadIdx.x == 0) row.start.store(p.blocks, listed);
  __syncthreads();
}

__device__ inline void edit(const EditRowsParams& p, const Edited& row) {
  const bool is_early = is_too_early(p, row);
  const auto column_of_id = [&](int id) {  // -1: another rank's, or no id
    const int64_t column = id - p.first_id;
    return id >= 0 && column >= 0 && column < p.vocab ? column : -1;
  };
  const auto mark = [&](int id) {
    const int64_t column = column_of_id(id);
    if (column < 0) return;
    set_bits(row.bits.as<int32_t>(), column >> 5, static_cast<int>(1u << (column & 31)));
  };
  for_biased(p, row, [&](int id, float) { mark(id); });
  for_penalised(p, row, [&](int id, int) { mark(id); });
  for_banned(p, row, is_early, mark);
  __syncthreads();
  number(p, row);
  const auto place_of = [&](int id) -> int64_t {  // of its edit; -1: it has none here
    const int64_t column = column_of_id(id), block = column >> 6;
    if (column < 0) return -1;
    const auto before = (1ull << (column & 63)) - 1;
    return row.start.load(block) + __popcll(row.bits.load(block) & before);
  };
  for_biased(p, row, [&](int id, float bias) {
    const int64_t at = place_of(id);
    if (at >= 0) row.values.store(at, bias);
  });
  for_penalised(p, row, [&](int id, int generated) {
    const int64_t at = place_of(id);
    if (at < 0) return;
    row.values.store(p.plane + at, row.repetition);
    if (generated == 0 || !row.counts()) return;
    const float minus = mul_rn(row.frequency, static_cast<float>(generated));
    row.values.store(2 * p.plane + at, add_rn(minus, row.presence));
  });
  __syncthreads();
  for_banned(p, row, is_early, [&](int id) {
    const int64_t at = place_of(id);
    if (at >= 0) store_whole(row.values, at, -INFINITY);
  });
}

// With the registers of four blocks it spills none.
__global__ void __launch_bounds__(kThreads, 4)
    edit_kernel(const __grid_constant__ EditRowsParams p) {
  SPECDEC_SHARED(Edited, row);
  SPECDEC_SHARED(TreeTable, tree);
  after_last_kernel();
  const int request = p.cu_draft ? flat_request(p, blockIdx.x) : 0;
  if (threadIdx.x == 0) find_row(p, blockIdx.x, request, &row);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < p.blocks; i += kThreads) row.bits.store(i, 0);
  if (row.exists) load_path(p, tree, row);
  __syncthreads();
  if (row.exists) return edit(p, row);
  for (int64_t i = threadIdx.x; i <= p.blocks; i += kThreads) row.start.store(i, 0);
}

}  // namespace

void edit_rows_out(const EditRowsParams& p, const Tensor& like) {
  const OnDevice on(like);
  STD_TORCH_CHECK(p.width < 0x7fffffff, "edit_rows: max_draft ", p.width);
  const int64_t rows = p.cu_draft    ? p.total + p.batch
                       : p.only_last ? p.batch
                                     : p.batch * (p.width + 1);
  launch_phase(edit_kernel, rows, on, p);
}

}  // namespace specdec

SPECDEC_REGISTER(edit_rows,
                 (specdec::Boxed<specdec::edit_rows_params, specdec::edit_rows_out>::call))
