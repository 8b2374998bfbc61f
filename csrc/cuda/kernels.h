// Host side of the shared kernels: an op fills in a Problem, reserves its workspace, and launches.
#pragma once
#include "problem.cuh"

namespace specdec {

// Workspace of one call. Tickets belong to the stream and are zero between launches; the rest is
// scratch.
class Reserved {
 public:
  Reserved(Problem* problem, const Tensor& like, Stream stream);

 private:
  Tensor scratch_, tickets_;
};

// Draft column of each target id, where there is a token map.
void launch_columns(const Problem& p, Stream stream);

// Statistics of all rows, the refinement of filters, the decision of every request.
void launch_rows(const Problem& p, Stream stream);

enum class Pass { kDraw, kMass, kOverlap, kProbs };
void launch_pairs(const Problem& p, Pass pass, Stream stream);

// What the checks of every op's problem have in common.
Problem base_problem(Task task, int64_t batch, const Logits& target, const Logits& draft,
                     const Sampling& sampling, const Sampling& draft_sampling);

}  // namespace specdec
