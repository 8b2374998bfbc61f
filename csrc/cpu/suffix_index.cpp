// The operators of specdec_kernels/_suffixes.py. A handle is the address of a SuffixIndex.
#include "suffix_index.h"

#include <memory>

#include "../torch/args.h"

namespace specdec::cpu {
namespace {

SuffixIndex& index_of(int64_t handle) { return *reinterpret_cast<SuffixIndex*>(handle); }

int64_t suffix_create(int64_t depth, int64_t capacity) {
  return reinterpret_cast<int64_t>(std::make_unique<SuffixIndex>(depth, capacity).release());
}

void suffix_destroy(int64_t handle) { const std::unique_ptr<SuffixIndex> owner(&index_of(handle)); }

int64_t suffix_size(int64_t handle) { return index_of(handle).size(); }

int64_t suffix_bytes(int64_t handle) { return index_of(handle).bytes(); }

void suffix_append(int64_t handle, Tensor token_ids) {
  const Ids ids = ids_of(token_ids);
  for (int64_t i = 0; i < token_ids.size(0); ++i) index_of(handle).append(ids.at(0, i));
}

void suffix_remember(int64_t handle, int64_t text, int64_t start) {
  SuffixIndex &memory = index_of(handle), &from = index_of(text);
  for (int64_t p = std::max(start, from.begin()); p < from.size(); ++p) {
    memory.append(from.token(p));
  }
  memory.append(SuffixIndex::kEnd);
}

void suffix_draft(Tensor texts, int64_t memory, Tensor token_ids, Tensor cu_tokens, int64_t length,
                  double factor, double offset, double least, Tensor out_token_ids,
                  Tensor out_lengths, Tensor out_scores) {
  const Ids handles = ids_of(texts), ids = ids_of(token_ids), cu = ids_of(cu_tokens);
  auto* drafts = output<int64_t>(out_token_ids);
  for (int64_t b = 0; b < texts.size(0); ++b) {
    SuffixIndex& text = index_of(handles.at(0, b));
    for (int64_t i = cu.at(0, b); i < cu.at(0, b + 1); ++i) text.append(ids.at(0, i));
    SuffixIndex::Draft best = text.draft(text, length, factor, offset, least);
    if (memory != 0) {
      SuffixIndex::Draft other = index_of(memory).draft(text, length, factor, offset, least);
      if (other.score > best.score) best = std::move(other);
    }
    int64_t* row = drafts + b * length;
    std::fill(std::copy(best.tokens.begin(), best.tokens.end(), row), row + length, -1);
    output<int64_t>(out_lengths)[b] = static_cast<int64_t>(best.tokens.size());
    output<double>(out_scores)[b] = best.score;
  }
}

}  // namespace
}  // namespace specdec::cpu

// Without tensors a call has no device to choose a kernel by.
STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("suffix_create", TORCH_BOX(&specdec::cpu::suffix_create));
  m.impl("suffix_destroy", TORCH_BOX(&specdec::cpu::suffix_destroy));
  m.impl("suffix_size", TORCH_BOX(&specdec::cpu::suffix_size));
  m.impl("suffix_bytes", TORCH_BOX(&specdec::cpu::suffix_bytes));
  m.impl("suffix_remember", TORCH_BOX(&specdec::cpu::suffix_remember));
}

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) {
  m.impl("suffix_append", TORCH_BOX(&specdec::cpu::suffix_append));
  m.impl("suffix_draft", TORCH_BOX(&specdec::cpu::suffix_draft));
}
