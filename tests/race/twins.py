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
        "verify_chain typical none",
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
        "handshake: no fence before the ticket",
        "handshake.cuh",
        """
  __threadfence();
  __syncthreads();
  if (expected""",
        """
  if (!TWIN) __threadfence();
  __syncthreads();
  if (expected""",
        "sample plain 1",
    ),
    Twin(
        "handshake: no barrier before the ticket",
        "handshake.cuh",
        """
  __syncthreads();
  if (expected""",
        """
  if (!TWIN) __syncthreads();
  if (expected""",
        "sample listed 1",
    ),
    Twin(
        "handshake: no fence after the ticket",
        "handshake.cuh",
        """
    __threadfence();
  }""",
        """
    if (!TWIN) __threadfence();
  }""",
        "sample plain 1",
    ),
    Twin(
        "handshake: no barrier after the ticket",
        "handshake.cuh",
        """
  __syncthreads();
  return is_last""",
        """
  if (!TWIN) __syncthreads();
  return is_last""",
        "sample plain 1",
    ),
    Twin(
        "pairs: the ticket is taken before the tile's results are stored",
        "pair.cu",
        """
  if (threadIdx.x == 0) p.work.pair_partials.store(slot * p.tiles + tile, part);
  SPECDEC_SHARED(Meeting, meeting);
  if (threadIdx.x == 0) meeting = meeting_of(p, kPass, b, slot);
  __syncthreads();
  if (!is_last_block(meeting.ticket, meeting.expected)) return;""",
        """
  if (!TWIN && threadIdx.x == 0) p.work.pair_partials.store(slot * p.tiles + tile, part);
  SPECDEC_SHARED(Meeting, meeting);
  if (threadIdx.x == 0) meeting = meeting_of(p, kPass, b, slot);
  __syncthreads();
  const bool is_last = is_last_block(meeting.ticket, meeting.expected);
  if (TWIN && threadIdx.x == 0) p.work.pair_partials.store(slot * p.tiles + tile, part);
  if (!is_last) return;""",
        "residual_sample none",
    ),
    Twin(
        "samples: the best keys are read without a barrier",
        "race.cuh",
        """
    if (threadIdx.x == 0) out[i] = last;
  }
  __syncthreads();""",
        """
    if (threadIdx.x == 0) out[i] = last;
  }
  if (!TWIN) __syncthreads();""",
        "sample plain 5",
    ),
    Twin(
        "walk: facts are read without a barrier",
        "decide_op.cuh",
        """
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int j = 0; j < kThreads && base + j <=""",
        """
    if (!TWIN) __syncthreads();
    if (threadIdx.x == 0) {
      for (int j = 0; j < kThreads && base + j <=""",
        "verify_chain ratio none",
    ),
    Twin(
        "rule block: the length is read without a barrier",
        "decide_op.cuh",
        """
        p.work.weights.store(b * (p.max_draft + 1) + length, weight);
      }
    }
    __syncthreads();""",
        """
        p.work.weights.store(b * (p.max_draft + 1) + length, weight);
      }
    }
    if (!TWIN) __syncthreads();""",
        "verify_chain block none",
    ),
    Twin(
        "filters: the edge of the listed values is read without a barrier",
        "filter.cuh",
        """
  __syncthreads();
  const float floor =""",
        """
  if (!TWIN) __syncthreads();
  const float floor =""",
        "sample listed 1",
    ),
    Twin(
        "filters: gathered values are read without a barrier",
        "filter.cuh",
        """
  __syncthreads();
  return filled;""",
        """
  if (!TWIN) __syncthreads();
  return filled;""",
        "sample listed 1",
    ),
    Twin(
        "filters: the groups' masses are read without a barrier",
        "filter.cuh",
        """
    table->above[tile * kGroups] = top;
  }
  __syncthreads();""",
        """
    table->above[tile * kGroups] = top;
  }
  if (!TWIN) __syncthreads();""",
        "sample top_p 1",
    ),
    Twin(
        "filters: a bound has two writers (found here, and mended)",
        "filter.cuh",
        """
    if (g % kGroups != 0) table->above[g] = table->least[g - 1];""",
        """
    if (TWIN && g % kGroups == 0) table->above[g] = INFINITY;
    if (g % kGroups != 0) table->above[g] = table->least[g - 1];""",
        "sample gathered 1",
    ),
    Twin(
        "sort: the buffer is used again without a barrier",
        "sort.cuh",
        """
    for (int j = 0; j < kPerThread; ++j) other[j] = buffer[j * kThreads + (t ^ mask)];
    __syncthreads();""",
        """
    for (int j = 0; j < kPerThread; ++j) other[j] = buffer[j * kThreads + (t ^ mask)];
    if (!TWIN) __syncthreads();""",
        "sample listed 1",
    ),
    Twin(
        "refinement: the row's task is read without a barrier",
        "read_rows.cuh",
        """
    if (t.active) stats = p.work.rows.load(at.slot);
  }
  __syncthreads();""",
        """
    if (t.active) stats = p.work.rows.load(at.slot);
  }
  if (!TWIN) __syncthreads();""",
        "sample gathered 1",
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
        "verify_tree recursive far",
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
