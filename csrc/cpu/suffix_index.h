// What followed the suffixes of a window of tokens, and how often: a trie of the sequences of up to
// `depth` tokens. A sequence that occurs once has no children: what followed it stands in the
// window. So n tokens make about n nodes, and more where they repeat themselves.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace specdec::cpu {

// Child of a node by token; an open-addressed table with linear probing.
class ChildTable {
 public:
  int32_t find(int32_t parent, int32_t token) const {
    for (size_t i = home(parent, token);; i = (i + 1) & mask()) {
      const Slot& slot = slots_[i];
      if (slot.child == 0 || (slot.parent == parent && slot.token == token)) return slot.child;
    }
  }
  void insert(int32_t parent, int32_t token, int32_t child) {
    if (2 * ++count_ > slots_.size()) grow();
    put({parent, token, child});
  }
  void erase(int32_t parent, int32_t token) {
    size_t hole = home(parent, token);
    while (slots_[hole].parent != parent || slots_[hole].token != token) hole = (hole + 1) & mask();
    // Later slots move up if their home is at or before the hole.
    for (size_t i = (hole + 1) & mask(); slots_[i].child != 0; i = (i + 1) & mask()) {
      const size_t distance = (i - home(slots_[i].parent, slots_[i].token)) & mask();
      if (distance < ((i - hole) & mask())) continue;
      slots_[hole] = slots_[i];
      hole = i;
    }
    slots_[hole] = {};
    --count_;
  }
  size_t bytes() const { return slots_.capacity() * sizeof(Slot); }

 private:
  struct Slot {
    int32_t parent = 0, token = 0, child = 0;  // child 0: free, the root is nobody's child
  };
  size_t mask() const { return slots_.size() - 1; }
  size_t home(int32_t parent, int32_t token) const {
    const uint64_t key = static_cast<uint64_t>(parent) << 32 | static_cast<uint32_t>(token);
    return (key * 0x9E3779B97F4A7C15u >> 32) & mask();
  }
  void put(const Slot& slot) {
    size_t i = home(slot.parent, slot.token);
    while (slots_[i].child != 0) i = (i + 1) & mask();
    slots_[i] = slot;
  }
  void grow() {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.child != 0) put(slot);
    }
  }
  std::vector<Slot> slots_ = std::vector<Slot>(64);
  size_t count_ = 0;
};

class SuffixIndex {
 public:
  struct Draft {
    double score = 0;  // expected accepted tokens
    std::vector<int32_t> tokens;
  };
  static constexpr int32_t kEnd = -1;  // stands behind a text

  // The last `capacity` tokens count, at least `depth`.
  SuffixIndex(int64_t depth, int64_t capacity) : depth_(depth), capacity_(capacity) {}

  // One more token of the text, or its end.
  void append(int32_t token) {
    if (size_ - begin_ == capacity_) forget();
    if (size_ - begin_ == static_cast<int64_t>(ring_.size())) grow();
    ring_[place(size_++)].token = token;
    if (token == kEnd) {
      suffixes_.assign(1, kRoot);
      return;
    }
    longer_.assign(1, kRoot);
    for (size_t length = 0; length < suffixes_.size(); ++length) {
      const int32_t child = count(suffixes_[length], token, static_cast<int64_t>(length) + 1);
      const bool is_shorter = static_cast<int64_t>(length) + 1 < depth_;
      if (nodes_[child].count > 1 && is_shorter) longer_.push_back(child);
    }
    suffixes_.swap(longer_);
  }

  // The best continuation, up to `length` tokens, of the last tokens of `text`: see draft_suffixes.
  Draft draft(const SuffixIndex& text, int64_t length, double factor, double offset, double least) {
    Draft best;
    for (int64_t m = longest(text); m > 0; --m) {
      const double most = factor * static_cast<double>(m) + offset;
      const int64_t budget =
          most < static_cast<double>(length) ? static_cast<int64_t>(std::max(most, 0.0)) : length;
      if (budget <= best.score) break;  // shorter suffixes cannot score higher
      find(text, m);
      Draft found = follow(m, budget, least);
      if (found.score > best.score) best = std::move(found);
    }
    return best;
  }

  int64_t begin() const { return begin_; }
  int64_t size() const { return size_; }  // tokens so far, also those that are forgotten
  int32_t token(int64_t position) const { return ring_[place(position)].token; }
  int64_t bytes() const {
    return static_cast<int64_t>(nodes_.capacity() * sizeof(Node) + ring_.size() * sizeof(Entry) +
                                children_.bytes());
  }

 private:
  static constexpr int32_t kRoot = 0, kUnknown = -1;

  struct Node {
    int64_t first = 0, last = 0;       // positions behind the first and the last occurrence
    int32_t count = 0, continued = 0;  // occurrences, and those that a token followed
    int32_t best = 0;                  // the child that occurs most; kUnknown: look for it
    int32_t child = 0, next = 0, previous = 0;  // list of the children
  };
  struct Entry {
    int64_t again = 0;  // start of the next occurrence of the `depth` tokens from here on
    int32_t token = 0;
  };

  size_t place(int64_t position) const {
    return static_cast<size_t>(position) & (ring_.size() - 1);
  }

  void grow() {
    std::vector<Entry> old(2 * ring_.size());
    old.swap(ring_);
    for (int64_t p = begin_; p < size_; ++p) {
      ring_[place(p)] = old[static_cast<size_t>(p) & (old.size() - 1)];
    }
  }

  int32_t add(int32_t parent, int32_t token, int64_t end) {
    int32_t node = free_;
    if (node != 0) {
      free_ = nodes_[node].next;
    } else {
      node = static_cast<int32_t>(nodes_.size());
      nodes_.emplace_back();
    }
    const int32_t next = nodes_[parent].child;
    nodes_[node] = {.first = end, .last = end, .count = 1, .next = next};
    if (next != 0) nodes_[next].previous = node;
    nodes_[parent].child = node;
    children_.insert(parent, token, node);
    return node;
  }

  void remove(int32_t parent, int32_t token, int32_t node) {
    const Node& n = nodes_[node];
    (n.previous != 0 ? nodes_[n.previous].next : nodes_[parent].child) = n.next;
    if (n.next != 0) nodes_[n.next].previous = n.previous;
    children_.erase(parent, token);
    nodes_[node].next = free_;
    free_ = node;
  }

  // The newest token followed `parent`; returns the child of that `length`.
  int32_t count(int32_t parent, int32_t token, int64_t length) {
    int32_t child = children_.find(parent, token);
    if (child == 0) {
      child = add(parent, token, size_);
    } else {
      const Node before = nodes_[child];
      if (length == depth_) {
        ring_[place(before.last - depth_)].again = size_ - depth_;
      } else if (before.count == 1 && before.continued == 0 && this->token(before.last) != kEnd) {
        const int32_t only = add(child, this->token(before.last), before.last + 1);
        nodes_[child].best = only;
        nodes_[child].continued = 1;
      }
      ++nodes_[child].count;
      nodes_[child].last = size_;
    }
    Node& p = nodes_[parent];
    ++p.continued;
    if (p.best != kUnknown && (p.best == 0 || nodes_[child].count > nodes_[p.best].count)) {
      p.best = child;
    }
    return child;
  }

  // The oldest token leaves the window, and with it the sequences that begin there.
  void forget() {
    path_.assign(1, kRoot);
    while (static_cast<int64_t>(path_.size()) <= depth_ && begin_ + span() < size_) {
      const int32_t child = children_.find(path_.back(), token(begin_ + span()));
      if (child == 0) break;
      path_.push_back(child);
    }
    for (; path_.size() > 1; path_.pop_back()) {
      const int32_t child = path_.back(), parent = path_[path_.size() - 2];
      Node& n = nodes_[child];
      --nodes_[parent].continued;
      if (nodes_[parent].best == child) nodes_[parent].best = kUnknown;
      if (--n.count == 0) {
        remove(parent, token(begin_ + span() - 1), child);
      } else if (span() == depth_) {
        n.first = ring_[place(begin_)].again + depth_;
      }
    }
    ++begin_;
    // A suffix of the text that occurs once now has no children again.
    while (suffixes_.size() > 1 && nodes_[suffixes_.back()].count == 1) suffixes_.pop_back();
  }
  int64_t span() const { return static_cast<int64_t>(path_.size()) - 1; }

  // How many of the last tokens of `text` occur here, in the text itself once more.
  int64_t longest(const SuffixIndex& text) {
    if (&text == this) return static_cast<int64_t>(suffixes_.size()) - 1;
    int64_t known = 0, most = std::min(depth_ - 1, text.size_ - text.begin_);
    while (known < most) {  // a shorter suffix occurs wherever a longer one does
      const int64_t middle = (known + most + 1) / 2;
      if (find(text, middle)) {
        known = middle;
      } else {
        most = middle - 1;
      }
    }
    return known;
  }

  // Whether the last `m` tokens of `text` occur here: found_, and behind_ if they do only once.
  bool find(const SuffixIndex& text, int64_t m) {
    found_ = kRoot, behind_ = -1;
    if (&text == this) {
      found_ = suffixes_[m];
      return true;
    }
    for (int64_t p = text.size_ - m; p < text.size_; ++p) {
      const int32_t token = text.token(p);
      if (behind_ >= 0) {
        if (behind_ == size_ || this->token(behind_++) != token) return false;
        continue;
      }
      found_ = children_.find(found_, token);
      if (found_ == 0) return false;
      if (nodes_[found_].count == 1) behind_ = nodes_[found_].last;
    }
    return true;
  }

  // The likeliest continuation of what was found, `length` tokens long.
  Draft follow(int64_t length, int64_t budget, double least) {
    Draft draft;
    double product = 1;
    int32_t node = found_;
    int64_t at = behind_;
    for (; at < 0 && static_cast<int64_t>(draft.tokens.size()) < budget; ++length) {
      if (length == depth_) {  // not counted any further: its first occurrence goes on
        at = nodes_[node].first;
        break;
      }
      const int32_t next = best(node);
      if (next == 0) return draft;
      product *= static_cast<double>(nodes_[next].count) / nodes_[node].continued;
      if (product < least) return draft;
      draft.tokens.push_back(token(nodes_[next].last - 1));
      draft.score += product;
      node = next;
      if (nodes_[node].count == 1) at = nodes_[node].last;
    }
    const auto counted = static_cast<int64_t>(draft.tokens.size());
    for (int64_t n = counted; n < budget && at < size_ && token(at) != kEnd; ++n) {
      draft.tokens.push_back(token(at++));
    }
    draft.score +=
        product * static_cast<double>(static_cast<int64_t>(draft.tokens.size()) - counted);
    return draft;
  }

  // The child with most occurrences; of equals the one that had as many first, whose last is
  // oldest.
  int32_t best(int32_t node) {
    Node& n = nodes_[node];
    if (n.best != kUnknown) return n.best;
    n.best = n.child;
    for (int32_t child = n.child; child != 0; child = nodes_[child].next) {
      const Node &a = nodes_[child], &b = nodes_[n.best];
      if (a.count > b.count || (a.count == b.count && a.last < b.last)) n.best = child;
    }
    return n.best;
  }

  int64_t depth_, capacity_;
  int64_t begin_ = 0, size_ = 0;                      // the window
  std::vector<Entry> ring_ = std::vector<Entry>(64);  // by position
  std::vector<Node> nodes_ = std::vector<Node>(1);
  int32_t free_ = 0;  // list of nodes that were removed
  ChildTable children_;
  std::vector<int32_t> suffixes_ = {kRoot};  // of the text, that occurred before, by their length
  std::vector<int32_t> longer_, path_;       // room for append and forget
  int32_t found_ = 0;
  int64_t behind_ = -1;
};

}  // namespace specdec::cpu
