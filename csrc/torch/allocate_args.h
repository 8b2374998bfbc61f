// Arguments of allocate_drafts.
#pragma once
#include <algorithm>

#include "../common/allocate_params.h"
#include "args.h"

namespace specdec {

inline AllocateParams allocate_params(Tensor draft_ids, Tensor confidence, OptTensor active,
                                      OptTensor cost, int64_t budget, bool compare_all,
                                      Tensor out_draft_ids, Tensor out_cu_draft, Tensor out_source,
                                      Tensor out_num_draft, Tensor out_status) {
  const int64_t batch = draft_ids.size(0), draft = draft_ids.size(1);
  return {batch,
          draft,
          std::min(budget, batch * draft),
          ids_of(draft_ids),
          input<float>(confidence),
          vector_of<bool>(active),
          vector_of<float>(cost),
          compare_all,
          output<void>(out_draft_ids),
          output<int32_t>(out_cu_draft),
          output<int32_t>(out_source),
          output<int32_t>(out_num_draft),
          output<int32_t>(out_status)};
}

}  // namespace specdec
