// tree_from_sequences: a trie. A node is a distinct prefix, numbered where it first occurs; the
// child of a node that carries an id is found by hashing both.
#include <bit>
#include <vector>

#include "../torch/tree_args.h"
#include "team.h"

namespace specdec::cpu {
namespace {

class Trie {
 public:
  explicit Trie(int64_t num_nodes)
      : num_nodes_(num_nodes), slots_(std::bit_ceil(static_cast<uint64_t>(2 * num_nodes))) {}

  struct Child {
    int32_t node;  // -1: the trie is full
    bool is_new;
  };
  Child child(int32_t parent, int64_t id) {
    const uint64_t mask = slots_.size() - 1;
    const uint64_t hash = (static_cast<uint64_t>(id) * 1024 + parent) * 0x9E3779B97F4A7C15u;
    for (uint64_t i = hash >> 32;; ++i) {  // at least half of the slots stay free
      Slot& slot = slots_[i & mask];
      if (slot.node == 0) {
        if (count_ == num_nodes_) return {-1, false};
        slot = {id, parent, static_cast<int32_t>(count_++)};
        return {slot.node, true};
      }
      if (slot.id == id && slot.parent == parent) return {slot.node, false};
    }
  }

 private:
  struct Slot {
    int64_t id;
    int32_t parent, node;  // node 0, the root, is nobody's child: free
  };
  int64_t num_nodes_, count_ = 1;
  std::vector<Slot> slots_;
};

void tree_from_sequences(SPECDEC_TREE_FROM_SEQUENCES_ARGS) {
  const int64_t sequences = token_ids.size(1), length = token_ids.size(2);
  const Ids ids{token_ids.const_data_ptr(), sequences * length, 1, ids_of(token_ids).wide};
  const TreeOutput out = tree_output(out_token_ids, out_parents, out_source, out_status);
  for_requests(token_ids.size(0), [&](int64_t b, const Team&) {
    Trie trie(num_nodes);
    bool has_bad_id = false;
    for (int64_t i = 0; i < sequences * length; ++i) has_bad_id |= ids.at(b, i) < -1;
    out.clear(b, has_bad_id ? kBadId : 0);
    for (int64_t first = 0; first < sequences * length; first += length) {
      int32_t node = 0;
      for (int64_t i = first; i < first + length && ids.at(b, i) >= 0; ++i) {
        const Trie::Child child = trie.child(node, ids.at(b, i));
        if (child.node < 0) break;
        if (child.is_new) out.write(b, child.node, ids.at(b, i), node, i);
        node = child.node;
      }
    }
  });
}

}  // namespace

SPECDEC_CPU_KERNEL(tree_from_sequences_out, tree_from_sequences)
}  // namespace specdec::cpu
