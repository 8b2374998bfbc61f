"""Calls with options, for `python -m bench.traffic`: edits, likeliest ids, a rule for each request, kept candidates.

MIN is the bytes of the rows that the rules must read, once each: target rows, draft rows or the candidates in their
place, and with edits the lists of these rows (bits, counts before each word, four numbers a listed id). Where `Edits`
of requests are given, it has what `edit_rows` must move too: ids and numbers, tables of counts, the lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_kernels import (
    MixedRules,
    RngKey,
    RowEdits,
    Sampling,
    SparseRows,
    edit_rows,
    sample,
    verify_chain,
    verify_tree,
)

from . import edit_rows as of_requests
from . import sparse
from .cases import MODELS, OpCase
from .edits import EditCase, EditInput, edit_input
from .minimum import BUDGETS, DRAWN, moved
from .rows import DTYPES, chain
from .trees import MAX_DEPTH, TreeCase, tree_input

EDITS, OF_REQUESTS, TOP, MIXED, KEPT = "edits", "Edits", "top 20", "mixed rules", "SparseRows"
READ_DRAFTS = ("ratio", "block", "recursive", "traversal")


@dataclass(frozen=True)
class OptionCase(OpCase):
    """One call. `edits` are those of rows: edit_rows, which makes them, has cases of its own."""

    option: str = EDITS
    rules: tuple[str, ...] = ("match",)  # of mixed ones request b takes number b modulo how many there are
    dtype: str = "bf16"
    batch: int = 1
    draft: int = 2  # of a tree: nodes beside the root
    vocab: int = 128256

    @property
    def words(self) -> str:
        """Model, sizes, dtype, rule and option."""
        size = {"sample": "", "verify_tree": f"{self.draft + 1} nodes"}.get(self.op, f"K {self.draft}")
        rule = "" if self.op == "sample" else " + ".join(self.rules)
        parts = [f"{MODELS[self.vocab]} {self.vocab}", f"batch {self.batch}", size, self.dtype, rule, self.option]
        return ", ".join(filter(None, parts))


class Batch(NamedTuple):
    """What the call of a case is given."""

    ids: tuple[Tensor, ...]  # of drafts; of a tree: of nodes, and parents; none to sample
    target: Tensor  # [batch, rows, vocab]
    draft: Tensor | SparseRows | None
    sampling: Sampling
    rng: RngKey
    step: EditInput  # edits of its requests
    edits: RowEdits  # of all target rows


def cases() -> list[OptionCase]:
    """A text edits a small part of a full vocabulary alone; other options have a small one."""
    small: Any = {"vocab": 32000, "batch": 2, "draft": 3}
    chains, trees = ("greedy", "match", "ratio"), ("greedy", "match", "recursive")
    made = [OptionCase("sample", dtype=dtype) for dtype in ("bf16", "fp32")]
    made += [OptionCase("verify_chain", rules=(rule,)) for rule in chains]
    made += [OptionCase("verify_chain", dtype="fp32"), OptionCase("verify_chain", OF_REQUESTS)]
    made += [OptionCase("verify_tree", rules=(rule,), draft=3) for rule in ("match", "recursive")]
    made += [OptionCase(op, TOP, **small) for op in ("sample", "verify_chain", "verify_tree")]
    small["batch"] = 3
    made += [OptionCase("verify_chain", MIXED, chains, **small), OptionCase("verify_tree", MIXED, trees, **small)]
    of_kept = (("verify_chain", ("ratio", "block")), ("verify_tree", ("recursive", "traversal")))
    return made + [OptionCase(op, KEPT, (rule,), **small) for op, rules in of_kept for rule in rules]


def rules_of(case: OptionCase) -> list[str]:
    """The rule of each request."""
    return [case.rules[b % len(case.rules)] for b in range(case.batch)]


def _edit_case(case: OptionCase) -> EditCase:
    return EditCase("edit_rows", case.batch, case.draft, vocab=case.vocab)


def batch_of(case: OptionCase) -> Batch:
    """Rows and drafts as those of a language model; edits are all that there are."""
    if case.op == "verify_tree":
        rule = next((rule for rule in case.rules if rule in READ_DRAFTS), case.rules[0])
        x: Any = tree_input(TreeCase(case.op, case.draft + 1, case.batch, case.dtype, rule, case.vocab))
        ids, parents = (x.token_ids, x.parents), x.parents
        rng = x.rng
    else:
        x = chain(case.batch, case.draft, case.vocab, dtype=DTYPES[case.dtype])
        if case.op == "sample":
            x = x._replace(target=x.target[:, :1].contiguous(), draft_ids=x.draft_ids[:, :0])
        ids, parents = (x.draft_ids,), None
        rng = x.rng._replace(step=torch.zeros_like(x.rng.seed))
    torch.manual_seed(0)
    draft = x.draft if any(rule in READ_DRAFTS for rule in case.rules) else None
    if case.option == KEPT:
        draft, drawn = sparse.drawn(x.draft, case.draft)
        if parents is None:
            ids = (drawn[..., 0].contiguous(),)
        else:
            is_before = (parents[:, :, None] == parents[:, None]).tril(-1)  # earlier children of the same node
            at = parents.long().clamp(min=0)
            ids = (drawn[torch.arange(case.batch)[:, None], at, is_before.sum(2)], parents)
    step = edit_input(_edit_case(case))._replace(draft_ids=ids[0])
    edits = edit_rows(step.edits, ids[0], parents=parents, vocab=case.vocab)
    return Batch(ids, x.target, draft, x.sampling, rng, step, edits)


def run(case: OptionCase, x: Batch, backend: str) -> Any:
    """The call."""
    named: dict[str, Any] = {"sampling": x.sampling, "rng": x.rng, "backend": backend}
    if case.option in (EDITS, OF_REQUESTS):
        named["edits"] = x.edits if case.option == EDITS else x.step.edits
    if case.option == TOP:
        named |= {"logprobs": "processed", "top": int(TOP.split()[1])}
    if case.op == "sample":
        return sample(x.target[:, 0], **named, purpose="draft")
    choice = torch.tensor([case.rules.index(rule) for rule in rules_of(case)], dtype=torch.int32)
    named["rule"] = MixedRules(case.rules, choice) if case.option == MIXED else case.rules[0]
    if x.draft is not None:
        named |= {"draft_sampling": x.sampling, "draft_edits": None if case.option == KEPT else named.get("edits")}
    if case.op == "verify_chain":
        return verify_chain(*x.ids, x.target, x.draft, **named)
    return verify_tree(*x.ids, x.target, x.draft, **named, max_depth=MAX_DEPTH)


def walked(case: OptionCase, x: Batch, result: Any) -> Tensor:
    """Target rows that must be read, bool [batch, rows]: on a tree those on the walk; traversal may read all."""
    every = torch.ones(x.target.shape[:2], dtype=torch.bool)
    if case.op != "verify_tree" or "traversal" in case.rules:
        return every
    return torch.zeros_like(every).scatter_(1, pad(result.path.clamp(min=0), (1, 0)).long(), True)


def bytes_of(case: OptionCase, x: Batch, target: Tensor) -> tuple[int, int]:
    """(bytes of target rows and of the draft rows beside them, bytes of their edits' lists)."""
    has_draft = torch.ones_like(target)
    if case.op == "verify_tree":
        has_draft = torch.zeros_like(target).scatter_(1, x.ids[1].long().clamp(min=0), True)
    else:
        has_draft[:, -1] = False
    draft = target & has_draft & torch.tensor([rule in READ_DRAFTS for rule in rules_of(case)])[:, None]
    row = case.vocab * x.target.element_size()
    draft_row = moved(*(part[0, 0] for part in x.draft)) if isinstance(x.draft, SparseRows) else row
    of_rows = int(target.sum()) * row + int(draft.sum()) * draft_row
    if case.option not in (EDITS, OF_REQUESTS):
        return of_rows, 0
    assert x.edits.edit_bits is not None and x.edits.edit_start is not None
    read = (target.int() + draft.int()).flatten()
    listed = moved(x.edits.edit_bits[0], x.edits.edit_start[0]) + 4 * 4 * x.edits.edit_start[:, -1]
    return of_rows, int((read * listed).sum())


def minimum(case: OptionCase, x: Batch, result: Any) -> int:
    """Bytes that the call must read, and with `Edits` write."""
    return sum(bytes_of(case, x, walked(case, x, result))) + of_edit_rows(case, x)


def of_edit_rows(case: OptionCase, x: Batch) -> int:
    """Bytes that making the lists must move, where the call makes them."""
    return of_requests.minimum(_edit_case(case), x.step, x.edits) if case.option == OF_REQUESTS else 0


def budget(case: OptionCase, x: Batch, result: Any, backend: str) -> float:
    """Bytes that the call may move. CUDA reads all rows of a small tree.

    Block maxima of edited rows are float32: Triton, which stores them before it takes what is listed, needs 1.06.
    """
    is_tree, rows = case.op == "verify_tree", walked(case, x, result)
    of_rows, lists = bytes_of(case, x, torch.ones_like(rows) if backend == "cuda_host" else rows)
    limit = 1.05 if lists or not is_tree else BUDGETS["verify_tree"]
    limit += 0.01 * (lists > 0 and backend == "triton")
    drawn = {"greedy": 0, "match": rows.shape[1]}
    near = sum(drawn.get(rule, 1) for rule in rules_of(case)) * DRAWN
    if case.option == TOP:
        of_rows += read_again(x, result)
        near += int((result.token_ids >= 0).sum()) * DRAWN  # blocks with the likeliest ids
    if isinstance(x.draft, SparseRows):
        # Drafted ids are looked for among the candidates. In Triton each of 64 lanes reads all of them, from its cache.
        is_by_lane = backend == "triton" and case.rules == ("recursive",)
        lookups = 80 if is_by_lane else 16 if is_tree else 4
        near += lookups * int(rows.sum()) * moved(x.draft.ids[0, 0])
    return limit * (of_rows + lists) + near + BUDGETS["edit_rows"] * of_edit_rows(case, x)


def read_again(x: Batch, result: Any) -> int:
    """Bytes that token_logprobs reads of the rows of emitted tokens: a row, and the blocks with likelier ids."""
    total = 0
    for b, tokens in enumerate(result.token_ids.tolist()):
        nodes = [0, *result.path[b].tolist()] if hasattr(result, "path") else range(len(tokens))
        for node, token in zip(nodes, tokens, strict=False):
            if token >= 0:
                row = x.target[b, node]
                blocks = pad(row, (0, -len(row) % 64), value=-float("inf")).view(-1, 64).amax(1)
                total += (len(row) + 64 * int((blocks > row[token]).sum())) * row.element_size()
    return total
