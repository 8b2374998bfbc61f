// sample: the best num_samples ids of one race a row, softmax(l / T) after the filters. Settle
// writes its results (sample.cuh).
#include "../torch/args.h"
#include "kernels.h"

namespace specdec {

void sample_out(const SampleParams& s, const Tensor& like) {
  const OnDevice on(like);
  Problem p = base_problem(Task::kSample, s.batch, s.logits, Logits{}, s.sampling, Sampling{});
  p.target = LogitTable(s.logits, s.logits.row_stride, 0);
  p.target_rows = 1;
  p.filters = p.sampling.filters();
  set_noise(&p, s.noise);
  p.lane = GlobalVector(s.lane);
  p.purpose = s.purpose;
  STD_TORCH_CHECK(s.num_samples >= 1 && s.num_samples <= kMaxSamples, "sample: num_samples ",
                  s.num_samples);
  p.num_samples = static_cast<int>(s.num_samples);
  p.exclude_ids = Global<const int64_t>(s.exclude_ids);
  p.num_exclude = s.num_exclude;
  set_vocabulary(&p, s.token_map, s.allowed, 1);
  set_edits(&p, s.edits, RowEdits{});
  p.logprobs_mode = s.logprobs_mode;
  p.token_ids = GlobalIds(s.token_ids, true);
  p.logprobs = Global<float>(s.logprobs);
  p.out_logsumexp = Global<float>(s.logsumexp);
  p.out_threshold = Global<float>(s.threshold);
  p.status = Global<int32_t>(s.status);
  p.flags = kWantsMass | (p.logprobs_mode == LogprobsMode::kRaw ? kWantsRaw : 0u);
  const Reserved reserved(&p, like);
  launch_rows(p, on);
}

}  // namespace specdec

SPECDEC_REGISTER(sample, (specdec::Boxed<specdec::sample_params, specdec::sample_out>::call))
