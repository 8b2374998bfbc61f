// Host side of the shared kernels: an op fills in a Problem, reserves its workspace, and launches
// one phase after the other. Between two phases the boundary of their kernels is the only barrier.
#pragma once
#include "problem.cuh"

namespace specdec {

// The map of a reduced vocabulary, and the packed bits: `rows` of them a request when dense.
inline void set_vocabulary(Problem* p, const Vector<int32_t>& token_map, const Allowed& allowed,
                           int64_t rows) {
  p->token_map = GlobalVector(token_map);
  p->allowed = Global<const int32_t>(allowed.data);
  p->allowed_row_stride = allowed.row_stride;
  p->allowed_rows = rows;
}

// Edits of target and of draft rows, both numbered as the rows of the mask.
inline void set_edits(Problem* p, const RowEdits& edits, const RowEdits& draft_edits) {
  p->edits = EditTable(edits);
  if (p->draft) p->draft_edits = EditTable(draft_edits);
}

inline void set_noise(Problem* p, const Noise& noise) {
  p->seed = GlobalVector(noise.seed);
  p->position = GlobalVector(noise.position);
  p->step = GlobalVector(noise.step);
}

// Scratch of one call, from torch's allocator.
class Reserved {
 public:
  Reserved(Problem* problem, const Tensor& like);

 private:
  Tensor scratch_;
};

// Draft column of each target id, where there is a token map.
void launch_columns(const Problem& p, const OnDevice& on);
// Maxima and masses of all rows (digest.cu).
void launch_digest(const Problem& p, const OnDevice& on);
// What the digests say of each row: statistics, filters, races (settle.cu).
void launch_settle(const Problem& p, const OnDevice& on);

// Whether draft rows of candidates are distributions (settle.cu).
void launch_kept(const Problem& p, const OnDevice& on);

// All of them.
void launch_rows(const Problem& p, const OnDevice& on);

// A second pass over pairs of rows and what follows from it (pair.cu).
enum class Pass { kMass, kOverlap, kProbs };
void launch_pairs(const Problem& p, Pass pass, const OnDevice& on);

// What the problems of all ops have in common.
Problem base_problem(Task task, int64_t batch, const Logits& target, const Logits& draft,
                     const Sampling& sampling, const Sampling& draft_sampling);

// Those of the ops on target and draft rows, `rows` target rows a request when dense. `draft`: the
// draft rows, or none where the op does not read them.
Problem pair_problem(Task task, const PairParams& v, const Logits& draft, int64_t rows);

// Those of the ops on chains, from VerifyChainParams or AcceptanceRatiosParams.
template <class Params>
Problem chain_problem(Task task, const Params& v, const Logits& draft) {
  Problem p = pair_problem(task, v, draft, v.max_draft + 1);
  p.max_draft = static_cast<int>(v.max_draft);
  p.total = v.total;
  p.is_flat = static_cast<bool>(v.cu_draft);
  p.draft_ids = GlobalIds(v.draft_ids);
  p.drafts = v.max_draft;
  p.cu_draft = GlobalVector(v.cu_draft);
  return p;
}

// What the ops that verify have in common; `ids`: the drafts.
void set_verify(Problem* p, const VerifyParams& v, const Ids& ids);

}  // namespace specdec
