// What one request changes of its logits. The ids are listed once for all rows of the request,
// since those differ in a few; a row has its own counts and bans on top, and is made when it is
// read.
#pragma once
#include <memory>
#include <vector>

#include "../torch/edit_args.h"
#include "listing.h"

namespace specdec::cpu {

// The drafts of a request by node. Node 0 is the text so far, and its id is not looked at.
struct Drafts {
  std::vector<int64_t> ids;
  std::vector<int32_t> parent;  // -1 where there is none

  // The ids that stand between the text and the row of a node; -1 is no token.
  std::vector<int64_t> path(int64_t node) const;
};

class RequestEdits {
 public:
  RequestEdits(const EditRowsParams& p, int64_t b, Drafts drafts);

  // The edits of a node's row; they live as long as this does. One thread at a time.
  RowEdits row(int64_t node);
  // Writes bias, repetition, minus and id of what is listed, `plane` floats apart.
  void write_values(int64_t node, float* values, int64_t plane) const;

  // What every row lists: see RowEdits. Nothing where the request changes nothing.
  void list();
  bool is_empty() const { return !bits_; }
  const int64_t* bits() const { return bits_.get(); }
  const int32_t* start() const { return start_.get(); }

 private:
  struct Penalties {
    float repetition, frequency, presence;
    bool any() const { return repetition != 1.f || frequency != 0.f || presence != 0.f; }
  };
  struct Counted {  // of the text so far, of ids that are columns
    std::unique_ptr<int32_t[]> columns, counts;
    int size = 0;
  };

  void penalise(const int32_t* counts, size_t n, float* repetition, float* minus) const;
  // Every id that some row may change, but for those of the text so far.
  std::vector<int64_t> columns() const;
  Counted counted() const;
  int64_t column(int64_t id) const;  // -1 where the row has none
  int64_t find(int64_t id) const;    // its place in the list; -1: it is not listed
  int64_t place(int64_t column) const;
  void mark(int64_t column);
  bool meets(const int32_t* word, const std::vector<int64_t>& path) const;

  const EditRowsParams& p_;
  int64_t b_;
  Drafts drafts_;
  Penalties penalties_;
  bool is_listed_ = false;
  int64_t size_ = 0;                            // of the list
  std::unique_ptr<int64_t[]> bits_;             // of whole tiles
  std::unique_ptr<int32_t[]> start_, counts_;   // counts in the text: 2 * generated + in_prompt
  std::unique_ptr<float[]> values_;             // of the row behind the text
  std::vector<std::unique_ptr<float[]>> rows_;  // those of the rows that were made
};

// The edits of a call's requests, whose rows are made when they are read.
struct WantedEdits {
  EditRowsParams lists{};
  bool is_given = false;
  bool of_drafts = false;  // the draft rows have them too
};

#define SPECDEC_WANTED_ARGS SPECDEC_REQUEST_EDITS_ARGS, bool of_drafts
#define SPECDEC_WANTED_NAMES SPECDEC_REQUEST_EDITS_NAMES, of_drafts

WantedEdits wanted_edits(int64_t vocab, SPECDEC_WANTED_ARGS);

// Boxed of `<op>_edited`: kRun takes the listing and the wanted edits, too.
template <auto kParams, auto kRun>
struct BoxedEdited;

template <class Params, class... Args, Params (*kParams)(Args...), auto kRun>
struct BoxedEdited<kParams, kRun> {
  static void call(int64_t top, SPECDEC_WANTED_ARGS, Args... args, SPECDEC_LISTING_ARGS) {
    const Params p = kParams(args...);
    kRun(p, listing_of(top, SPECDEC_LISTING_NAMES),
         wanted_edits(p.target.vocab, SPECDEC_WANTED_NAMES));
  }
};

}  // namespace specdec::cpu
