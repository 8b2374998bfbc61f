// edit_rows: what biases, penalties and bans change of each row, by id.
#include <algorithm>
#include <optional>

#include "request_edits.h"
#include "team.h"
#include "tree.h"

namespace specdec::cpu {
namespace {

void write_none(const EditRowsParams& p, int64_t number) {
  std::fill_n(p.bits + number * p.blocks, p.blocks, 0);
  std::fill_n(p.start + number * (p.blocks + 1), p.blocks + 1, 0);
}

// Where the rows of a request lie, and which ids stand before each.
class Request {
 public:
  Request(const EditRowsParams& p, int64_t b) : p_(p), b_(b), last_(p.width) {
    lost_ = !p.active.get(b, true);
    if (lost_) return;
    if (p.parents.data) tree_.emplace(p.parents, b, p.width + 1, p.width);
    if (!p.cu_draft) return;
    first_ = p.cu_draft[b];
    const int64_t end = p.cu_draft[b + 1];
    lost_ = first_ < 0 || first_ > p.total;
    const bool bad =
        lost_ || end < first_ || end > p.total || end - first_ > p.width || (b == 0 && first_ != 0);
    last_ = bad ? 0 : end - first_;
  }

  int64_t nodes() const { return p_.width + 1; }
  // Number among all rows, or -1.
  int64_t row(int64_t node) const {
    if (lost_ || node > last_ || (tree_ && !tree_->has(node))) return -1;
    if (p_.only_last) return node == p_.width ? b_ : -1;
    return p_.cu_draft ? first_ + b_ + node : b_ * nodes() + node;
  }
  // Those behind which there is a row.
  Drafts drafts() const {
    Drafts drafts{{-1}, {-1}};
    for (int64_t n = 1; n <= last_ && !lost_ && p_.draft_ids.data; ++n) {
      drafts.ids.push_back(id(n));
      drafts.parent.push_back(tree_ ? tree_->parent[n] : static_cast<int32_t>(n) - 1);
    }
    return drafts;
  }

 private:
  int64_t id(int64_t node) const {
    const int64_t i = tree_ ? node : node - 1;
    return p_.cu_draft ? p_.draft_ids.at(0, first_ + i) : p_.draft_ids.at(b_, i);
  }

  const EditRowsParams& p_;
  int64_t b_, first_ = 0, last_;
  bool lost_;
  std::optional<Tree> tree_;
};

void write_row(const EditRowsParams& p, const RequestEdits& edits, int64_t node, int64_t number) {
  if (edits.is_empty()) return write_none(p, number);
  std::copy_n(edits.bits(), p.blocks, p.bits + number * p.blocks);
  std::copy_n(edits.start(), p.blocks + 1, p.start + number * (p.blocks + 1));
  edits.write_values(node, p.values + number * p.room, p.plane);
}

void edit_rows(const EditRowsParams& p, const Tensor& /*like*/) {
  const int64_t rows = p.cu_draft    ? p.total + p.batch
                       : p.only_last ? p.batch
                                     : p.batch * (p.width + 1);
  std::vector<Request> requests;
  std::vector<int64_t> owner(rows, -1);  // the last request that claims a row has it
  for (int64_t b = 0; b < p.batch; ++b) {
    const Request& request = requests.emplace_back(p, b);
    for (int64_t node = 0; node < request.nodes(); ++node) {
      if (const int64_t row = request.row(node); row >= 0) owner[row] = b;
    }
  }
  for_requests(p.batch, [&](int64_t b, const Team& team) {
    const Request& request = requests[b];
    team.run(request.nodes(), [&](int, int64_t begin, int64_t end) {
      RequestEdits edits(p, b, request.drafts());
      edits.list();
      for (int64_t node = begin; node < end; ++node) {
        const int64_t row = request.row(node);
        if (row >= 0 && owner[row] == b) write_row(p, edits, node, row);
      }
    });
  });
  for (int64_t row = 0; row < rows; ++row) {
    if (owner[row] < 0) write_none(p, row);
  }
}

}  // namespace

SPECDEC_CPU_KERNEL(edit_rows_out, Boxed<edit_rows_params, edit_rows>::call)
}  // namespace specdec::cpu
