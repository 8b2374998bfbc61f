"""Faults that leave nearly every result right on the machine that runs them here: the race check must report each."""

from __future__ import annotations

from typing import NamedTuple


class Twin(NamedTuple):
    """One fault.

    Attributes:
        name: what is wrong.
        file: in csrc/cuda.
        old: stands once in the file.
        new: in its place; TWIN is true while this fault is at work.
        cases: the calls, by the beginning of their names, one of which must report a race.
    """

    name: str
    file: str
    old: str
    new: str
    cases: str


TWINS = (
    Twin(
        "reduction: no barrier before the warps' results are read",
        "block.cuh",
        """
  __syncthreads();
  T all = per_warp[0];""",
        """
  if (!TWIN) __syncthreads();
  T all = per_warp[0];""",
        "sample plain 1",
    ),
    Twin(
        "reduction: its shared memory is used again without a barrier",
        "block.cuh",
        """
  __syncthreads();
  return all;""",
        """
  if (!TWIN) __syncthreads();
  return all;""",
        "verify_chain topm",
    ),
    Twin(
        "scan: its shared memory is used again without a barrier",
        "block.cuh",
        """
  __syncthreads();
  *total = all;""",
        """
  if (!TWIN) __syncthreads();
  *total = all;""",
        "select_tree large",
    ),
    Twin(
        "samples: the best keys are read without a barrier",
        "race.cuh",
        """
      if (threadIdx.x == 0) keys[i] = last;
    }
    __syncthreads();""",
        """
      if (threadIdx.x == 0) keys[i] = last;
    }
    if (!TWIN) __syncthreads();""",
        "sample plain 5",
    ),
    Twin(
        "race: ids are scored before they are listed",
        "race.cuh",
        """ entrants);
      __syncthreads();""",
        """ entrants);
      if (!TWIN) __syncthreads();""",
        "sample plain 1",
    ),
    Twin(
        "walk: what a walk found is read without a barrier",
        "verify_chain.cu",
        """
  __syncthreads();
  write_prefix(""",
        """
  if (!TWIN) __syncthreads();
  write_prefix(""",
        "verify_chain ratio none",
    ),
    Twin(
        "rule block: facts are read without a barrier",
        "verify_chain.cu",
        """
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int j = 0; j < kThreads && goes_on""",
        """
    if (!TWIN) __syncthreads();
    if (threadIdx.x == 0) {
      for (int j = 0; j < kThreads && goes_on""",
        "verify_chain block none",
    ),
    Twin(
        "stats: a warp's row is read before it is written",
        "stats.cuh",
        """
    if (threadIdx.x % 32 == 0) row = row_of(p, *q, b, p.row_slot(b, r));
    __syncwarp();""",
        """
    if (threadIdx.x % 32 == 0) row = row_of(p, *q, b, p.row_slot(b, r));
    if (!TWIN) __syncwarp();""",
        "verify_chain ratio none",
    ),
    Twin(
        "stats: the walk reads them without a barrier",
        "stats.cuh",
        """
  if (threadIdx.x == 0) q->settled = settled;
  __syncthreads();""",
        """
  if (threadIdx.x == 0) q->settled = settled;
  if (!TWIN) __syncthreads();""",
        "verify_chain ratio none",
    ),
    Twin(
        "rule block: the length is read without a barrier",
        "verify_chain.cu",
        """
      walk = {goes_on, length};
    }
    __syncthreads();""",
        """
      walk = {goes_on, length};
    }
    if (!TWIN) __syncthreads();""",
        "verify_chain block none",
    ),
    Twin(
        "digest: the row is read without a barrier",
        "digest.cuh",
        """
  if (mine < count) find_share<kTiles, D::kEdited>(p, type, mine, &shares[threadIdx.x / 32]);
  __syncthreads();""",
        """
  if (mine < count) find_share<kTiles, D::kEdited>(p, type, mine, &shares[threadIdx.x / 32]);
  if (!TWIN) __syncthreads();""",
        "sample plain 1",
    ),
    Twin(
        "digest: a part is filled while the one before it is merged",
        "digest.cuh",
        """
    turn ^= 1;""",
        """
    if (!TWIN) turn ^= 1;""",
        "verify_chain ratio none",
    ),
    Twin(
        "digest: the warps' parts are merged without a barrier",
        "digest.cuh",
        """
  __syncthreads();
  if (threadIdx.x >= 32) return;""",
        """
  if (!TWIN) __syncthreads();
  if (threadIdx.x >= 32) return;""",
        "sample plain 1",
    ),
    Twin(
        "digest: two warps store the maxima of one share of a tile",
        "digest.cu",
        "const int first = static_cast<int>(threadIdx.x) / 32 *",
        "const int first = static_cast<int>(threadIdx.x) / (TWIN ? 64 : 32) *",
        "sample plain 1",
    ),
    Twin(
        "edited digest: listed ids are taken while no warp has begun",
        "edited_tiles.cuh",
        """
  __syncthreads();
  const int lane""",
        """
  if (!TWIN) __syncthreads();
  const int lane""",
        "verify_chain digest greedy torch.float32 None all edits",
    ),
    Twin(
        "settle: a row's statistics are read without a barrier",
        "settle.cu",
        """
      if (threadIdx.x == 0) r = mine;
    }
  }
  __syncthreads();""",
        """
      if (threadIdx.x == 0) r = mine;
    }
  }
  if (!TWIN) __syncthreads();""",
        "sample plain 1",
    ),
    Twin(
        "race: the row's race is read without a barrier",
        "settle.cu",
        """
  if (threadIdx.x == 0) *race = row_race(p, row);
  __syncthreads();""",
        """
  if (threadIdx.x == 0) *race = row_race(p, row);
  if (!TWIN) __syncthreads();""",
        "sample plain 1",
    ),
    Twin(
        "race: which row races is read without a barrier",
        "settle.cu",
        """
  __syncthreads();
  if (!may_race(p, row)) return;""",
        """
  if (!TWIN) __syncthreads();
  if (!may_race(p, row)) return;""",
        "sample plain 1",
    ),
    Twin(
        "filters: the list of open rows is read without a barrier",
        "settle.cu",
        """ * kThreads + threadIdx.x;
    }
    __syncthreads();""",
        """ * kThreads + threadIdx.x;
    }
    if (!TWIN) __syncthreads();""",
        "sample gathered 1",
    ),
    Twin(
        "filters: the blocks that are read again are read without a barrier",
        "filter.cuh",
        """
    if (most >= least) f.scratch.block[at++] = block;
  });
  __syncthreads();""",
        """
    if (most >= least) f.scratch.block[at++] = block;
  });
  if (!TWIN) __syncthreads();""",
        "sample listed 1",
    ),
    Twin(
        "filters: what a step of a search has measured is read without a barrier",
        "search.cuh",
        """
    __syncthreads();
    T all[kTried];""",
        """
    if (!TWIN) __syncthreads();
    T all[kTried];""",
        "sample listed 1",
    ),
    Twin(
        "filters: values of a list move while others count them",
        "filter.cuh",
        """
  __syncthreads();
  if (own < count) {
    list[place] = value;""",
        """
  if (!TWIN) __syncthreads();
  if (own < count) {
    list[place] = value;""",
        "sample listed 1",
    ),
    Twin(
        "filters: a list is sorted before it is whole",
        "filter.cuh",
        """
  if (own < 4 * kRun) list[count + own] = -INFINITY;
  __syncthreads();""",
        """
  if (own < 4 * kRun) list[count + own] = -INFINITY;
  if (!TWIN) __syncthreads();""",
        "sample listed 1",
    ),
    Twin(
        "filters: a search begins in the sums of the last one",
        "search.cuh",
        """
  __syncthreads();
  return from;""",
        """
  if (!TWIN) __syncthreads();
  return from;""",
        "sample",
    ),
    Twin(
        "filters: a sample is read without a barrier",
        "bracket.cuh",
        """
  __syncthreads();
  return taken * kBlock;""",
        """
  if (!TWIN) __syncthreads();
  return taken * kBlock;""",
        "sample gathered 1",
    ),
    Twin(
        "filters: places of lists are read without a barrier",
        "bracket.cuh",
        """
    count[mine] = g.listed;
    __syncthreads();""",
        """
    count[mine] = g.listed;
    if (!TWIN) __syncthreads();""",
        "sample gathered 1",
    ),
    Twin(
        "draw: the pair of rows is read without a barrier",
        "draw.cuh",
        """
  for (int look = is_empty ? 1 : 0; look < 2 && key == 0; ++look) {
    __syncthreads();""",
        """
  for (int look = is_empty ? 1 : 0; look < 2 && key == 0; ++look) {
    if (!TWIN) __syncthreads();""",
        "residual_sample none",
    ),
    Twin(
        "filters: gathered values are read without a barrier",
        "filter.cuh",
        """
    __syncthreads();
    values.load(""",
        """
    if (!TWIN) __syncthreads();
    values.load(""",
        "sample long 1",
    ),
    Twin(
        "log-probabilities: listed ids are ordered without a barrier",
        "token_logprobs.cu",
        """
  __syncthreads();
  const Key least = listed""",
        """
  if (!TWIN) __syncthreads();
  const Key least = listed""",
        "token_logprobs peaked",
    ),
    Twin(
        "tree: children are read without a barrier",
        "tree_walk.cuh",
        """
  if (threadIdx.x == 0) c.count = total;
  __syncthreads();""",
        """
  if (threadIdx.x == 0) c.count = total;
  if (!TWIN) __syncthreads();""",
        "verify_tree recursive none",
    ),
    Twin(
        "pairs: listed ids are read without a barrier",
        "pair.cuh",
        """
    if (mine < count) list[mine] = p.work.listed.load(b * p.nodes + first + mine);
    __syncthreads();""",
        """
    if (mine < count) list[mine] = p.work.listed.load(b * p.nodes + first + mine);
    if (!TWIN) __syncthreads();""",
        "verify_tree traversal",
    ),
    Twin(
        "tree: rule typical reads its node without a barrier",
        "tree_rules.cuh",
        """
      s.score = s.node == 0 ? 0. : p.work.marks.load(b * p.nodes + s.node).score;
    }
    __syncthreads();""",
        """
      s.score = s.node == 0 ? 0. : p.work.marks.load(b * p.nodes + s.node).score;
    }
    if (!TWIN) __syncthreads();""",
        "verify_tree typical none",
    ),
    Twin(
        "tree: rule traversal reads its leaf without a barrier",
        "traversal.cuh",
        """
    if (threadIdx.x == 0) find_leaf(p, q, b, t);
    __syncthreads();""",
        """
    if (threadIdx.x == 0) find_leaf(p, q, b, t);
    if (!TWIN) __syncthreads();""",
        "verify_tree traversal none",
    ),
    Twin(
        "tree layout: a node's jump is overwritten while others follow it",
        "tree.cuh",
        """
      jump[i] = t.jump[t.jump[n]];
    }
    __syncthreads();""",
        """
      jump[i] = t.jump[t.jump[n]];
    }
    if (!TWIN) __syncthreads();""",
        "tree_layout large",
    ),
    Twin(
        "tree layout: siblings mark their parent by plain stores (found here, and mended)",
        "tree.cuh",
        """
    if (t.parent[n] >= 0) atomicOr(has + t.parent[n], 1);""",
        """
    if (t.parent[n] >= 0 && TWIN) has[t.parent[n]] = 1;
    if (t.parent[n] >= 0 && !TWIN) atomicOr(has + t.parent[n], 1);""",
        "tree_layout large",
    ),
    Twin(
        "tree from sequences: numbers are read without a barrier",
        "tree_from_sequences.cu",
        """
    filled += total;
    __syncthreads();""",
        """
    filled += total;
    if (!TWIN) __syncthreads();""",
        "tree_from_sequences large",
    ),
    Twin(
        "caches: places are looked up again without a barrier",
        "compact_cache.cu",
        """
    move_rows<false>(p.views, item, table, moves, static_cast<int>(left < kMoves ? left : kMoves));
    __syncthreads();""",
        """
    move_rows<false>(p.views, item, table, moves, static_cast<int>(left < kMoves ? left : kMoves));
    if (!TWIN) __syncthreads();""",
        "compact_cache",
    ),
    Twin(
        "caches: two warps move the same tensor",
        "cache.cuh",
        """
  const int64_t tensor = item.group * kGroup + warp;""",
        """
  const int64_t tensor = item.group * kGroup + (TWIN ? warp / 2 : warp);""",
        "compact_cache",
    ),
)
