// Host side of the shared kernels: an op fills in a Problem, reserves its workspace, and launches
// one phase after the other. Between two phases the boundary of their kernels is the only barrier.
#pragma once
#include "problem.cuh"

namespace specdec {

// Scratch of one call, from torch's allocator.
class Reserved {
 public:
  Reserved(Problem* problem, const Tensor& like);

 private:
  Tensor scratch_;
};

// Draft column of each target id, where there is a token map.
void launch_columns(const Problem& p, Stream stream);
// Maxima and masses of all rows (digest.cu).
void launch_digest(const Problem& p, Stream stream);
// What the digests say of each row: statistics, filters, races (settle.cu).
void launch_settle(const Problem& p, Stream stream);

// A second pass over pairs of rows and what follows from it (pair.cu).
enum class Pass { kMass, kOverlap, kProbs };
void launch_pairs(const Problem& p, Pass pass, Stream stream);

// What the checks of every op's problem have in common.
Problem base_problem(Task task, int64_t batch, const Logits& target, const Logits& draft,
                     const Sampling& sampling, const Sampling& draft_sampling);

}  // namespace specdec
