"""Requests with every edit at once, PyTorch's dense way to apply them, and what they cost a step.

Half of a text is the prompt. `python -m bench.edits` prints CPU times of one thread, medians of interleaved calls: of
verification without edits, with `Edits` of all requests and of one of them, with what `edit_rows` makes before, and of
PyTorch's edits: float32 copies of all rows, changed in place as engines do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import Edits, MixedRules, RowEdits, TokenCounts, count_tokens, edit_rows, verify_chain, verify_tree

from .cases import DEVICE, MODELS, OpCase
from .rows import DTYPES, Filters, chain
from .trees import MAX_DEPTH, TreeCase, tree_input

WORD = 3  # tokens of a bad word
CALLS = 60


@dataclass(frozen=True)
class EditCase(OpCase):
    """One shape of the ops on edits."""

    batch: int = 16
    draft: int = 5
    text: int = 1000
    vocab: int = 128256

    @property
    def words(self) -> str:
        """Model and sizes."""
        return f"{MODELS[self.vocab]} {self.vocab}, batch {self.batch}, K {self.draft}, {self.text} tokens"


class EditInput(NamedTuple):
    """One step of a batch."""

    edits: Edits
    draft_ids: Tensor  # int64 [batch, draft]
    prompt: Tensor  # int64 [batch, text / 2]
    output: Tensor  # int64 [batch, text / 2]


def cases(op: str) -> list[EditCase]:
    """Shapes of both ops, the main one first."""
    return [EditCase(op), EditCase(op, batch=1), EditCase(op, text=100), EditCase(op, vocab=151936)]


def edit_input(case: EditCase) -> EditInput:
    """Ids drawn evenly; every parameter is set."""
    g = torch.Generator().manual_seed(case.text)

    def ids(*shape: int) -> Tensor:
        return torch.randint(0, case.vocab, (case.batch, *shape), generator=g).to(DEVICE)

    def every(value: float) -> Tensor:
        return torch.full((case.batch,), value, device=DEVICE)

    prompt, output = ids(case.text // 2), ids(case.text // 2)
    counts = TokenCounts.empty(case.batch, case.text + 100, device=DEVICE)
    count_tokens(counts, prompt, is_prompt=True)
    count_tokens(counts, output)
    different = torch.stack([torch.randperm(case.vocab, generator=g)[:20] for _ in range(case.batch)]).int().to(DEVICE)
    edits = Edits(
        different, torch.randn(different.shape, generator=g).to(DEVICE), every(1.1), every(0.2), every(0.3), counts,
        None, ids(2).int(), every(3).int(), ids(10, WORD).int(), output[:, 1 - WORD :].int().contiguous(),
    )  # fmt: skip
    return EditInput(edits, ids(case.draft), prompt, output)


def dense(x: EditInput, logits: Tensor) -> Tensor:
    """Float32 copies of rows [batch, draft + 1, vocab], changed in place: penalties as engines write them."""
    rows = logits.float().clone()
    batch, count, vocab = rows.shape
    edits, (repetition, frequency, presence) = x.edits, (p[:, None] for p in x.edits[2:5] if isinstance(p, Tensor))
    assert edits.bias_ids is not None and edits.bias is not None and edits.bad_words is not None
    assert edits.stop_ids is not None and edits.min_tokens is not None
    in_prompt = torch.zeros(batch, vocab, dtype=torch.bool, device=rows.device).scatter_(1, x.prompt, True)
    times = torch.zeros(batch, vocab, device=rows.device)
    times.scatter_add_(1, x.output, torch.ones_like(x.output, dtype=torch.float32))
    for i in range(count):
        row = rows[:, i]
        if i:
            times.scatter_add_(1, x.draft_ids[:, i - 1 : i], torch.ones(batch, 1, device=rows.device))
        row.scatter_add_(1, edits.bias_ids.long(), edits.bias)
        penalty = torch.where(in_prompt | (times > 0), repetition, 1.0)
        row.copy_(torch.where(row > 0, row / penalty, row * penalty))
        row -= frequency * times
        row -= presence * (times > 0)
        early = i < edits.min_tokens
        row.scatter_(
            1, edits.stop_ids.long(), row.gather(1, edits.stop_ids.long()).masked_fill(early[:, None], -torch.inf)
        )
        text = torch.cat([x.output, x.draft_ids[:, :i]], 1)[:, 1 - WORD :]
        meets = (edits.bad_words[:, :, :-1] == text[:, None]).all(2)
        last = edits.bad_words[:, :, -1].long()
        row.scatter_(1, last, row.gather(1, last).masked_fill(meets, -torch.inf))
    return rows


def main() -> None:
    """Print the table, one thread."""
    torch.set_num_threads(1)
    print("| case | plain, ms | edits | / plain | of one request | / plain | edit_rows, then | / plain | PyTorch's |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for dtype in ("fp32", "bf16"):
        for rule in ("greedy", "match", "ratio", "block", "mixed"):
            _chains(EditCase("edit_rows"), dtype, rule)
        _trees(EditCase("edit_rows", batch=8), dtype)


def of_one(edits: Edits) -> Edits:
    """The same where nobody but the first request asks for anything."""
    assert edits.repetition is not None and edits.frequency is not None and edits.presence is not None
    is_first = torch.arange(len(edits.repetition), device=edits.repetition.device) == 0
    off = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0, "bias_ids": -1, "stop_ids": -1, "bad_words": -1}
    kept = {}
    for name, value in off.items():
        part: Tensor = getattr(edits, name)
        kept[name] = torch.where(is_first.view(-1, *[1] * (part.dim() - 1)), part, torch.full_like(part, value))
    return edits._replace(**kept)


def _chains(case: EditCase, dtype: str, rule: str) -> None:
    rows = chain(
        case.batch, case.draft, case.vocab, dtype=DTYPES[dtype], filters=Filters(0.8, top_k=50, top_p=0.95), shape="llm"
    )
    x = edit_input(case)._replace(draft_ids=rows.draft_ids)
    draft = None if rule in ("greedy", "match") else rows.draft
    choice = torch.arange(case.batch, dtype=torch.int32, device=DEVICE) % 3
    named = {
        "sampling": rows.sampling, "draft_sampling": None if draft is None else rows.sampling,
        "rng": rows.rng._replace(step=rows.rng.position),
        "rule": MixedRules(("greedy", "match", "ratio"), choice) if rule == "mixed" else rule,
    }  # fmt: skip
    _print(
        f"{case.words}, {dtype}, {rule}",
        x.edits,
        lambda: edit_rows(x.edits, x.draft_ids, vocab=case.vocab),
        lambda edits: verify_chain(x.draft_ids, rows.target, draft, edits=edits, **named),
        lambda: dense(x, rows.target),
    )


def _trees(case: EditCase, dtype: str) -> None:
    """PyTorch's edits know no trees."""
    tree = TreeCase("verify_tree", batch=case.batch, nodes=16, dtype=dtype)
    made, edits = tree_input(tree), edit_input(case).edits
    named = {"max_depth": MAX_DEPTH, "sampling": made.sampling, "rng": made.rng, "rule": "match"}
    _print(
        f"{tree.words}, {case.text} tokens",
        edits,
        lambda: edit_rows(edits, made.token_ids, parents=made.parents, vocab=case.vocab),
        lambda edits: verify_tree(made.token_ids, made.parents, made.target, edits=edits, **named),
        None,
    )


def _print(
    words: str, edits: Edits, rows: Callable[[], RowEdits], verify: Callable[[Edits | RowEdits | None], object],
    dense: Callable[[], object] | None,
) -> None:  # fmt: skip
    one = of_one(edits)
    calls: dict[str, Callable[[], object]] = {
        "plain": lambda: verify(None), "edits": lambda: verify(edits), "one": lambda: verify(one),
        "rows": lambda: verify(rows()),
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(CALLS):
        for name, call in calls.items():
            times[name].append(_cpu_time(call))
    plain, *others = (statistics.median(part) for part in times.values())
    cells = [f"{part:.2f} | {part / plain:.2f}" for part in others]
    theirs = "" if dense is None else f"{min(_cpu_time(dense) for _ in range(3)):.0f}"
    print(f"| {words} | {plain:.2f} | {' | '.join(cells)} | {theirs} |", flush=True)


def _cpu_time(call: Callable[[], object]) -> float:
    """Milliseconds of this thread."""
    begin = time.thread_time()
    call()
    return 1000 * (time.thread_time() - begin)


if __name__ == "__main__":
    main()
