"""Prints, as JSON, what calls would compile for a GPU after `warmup`: in a process of its own, without the interpreter.

A stand-in for the driver poses as the GPU, and a kernel that would be compiled is written down in place of that.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import specdec_kernels as ops
from specdec_kernels import RngKey, Sampling, _backends, warmup
from tools.gpu_model.triton_run import TARGETS, _driver

BF16 = torch.bfloat16
BATCHES, DRAFTS, NODES = (1, 3, 16), (0, 1, 5, 15, 16, 20), (1, 7, 16, 33)


def sampling(batch: int, filters: str, is_full: bool) -> Sampling:
    """Parameters of which some are given."""
    some = {"top_k": {"top_k": 3}, "top_p": {"top_p": 0.5}, "min_p": {"min_p": 0.1}}.get(filters, {})
    made = Sampling.full(batch, temperature=0.5 if is_full else None, **some)  # type: ignore[arg-type]
    return made._replace(active=torch.ones(batch, dtype=torch.bool)) if is_full else made


def rng(batch: int, has_step: bool) -> RngKey:
    zero = torch.zeros(batch, dtype=torch.int64)
    return RngKey(zero, zero, zero if has_step else None)


def edits(rows: int, vocab: int) -> ops.RowEdits:
    """Edits of so many rows, with room for as many ids as there are rows."""
    blocks = (vocab + 63) // 64
    start = torch.zeros(rows, blocks + 1, dtype=torch.int32)
    return ops.RowEdits(torch.zeros(rows, blocks, dtype=torch.int64), start, torch.zeros(4, rows, rows))


def kept(*shape: int) -> ops.SparseRows:
    """Candidates of draft rows."""
    ids = torch.zeros(*shape, 20, dtype=torch.int64)
    return ops.SparseRows(ids, ids.bfloat16(), torch.zeros(shape))


def chains(rule: str, vocab: int, flat: bool, is_edited: bool = False, is_kept: bool = False) -> Iterator[Any]:
    has_rows = rule in ("ratio", "block")
    for batch, draft, filters, full in itertools.product(BATCHES, DRAFTS, ("", "top_k", "top_p"), (False, True)):
        at = (batch * draft,) if flat else (batch, draft)
        more: dict[str, Any] = {}
        if flat:
            more = {"cu_draft": torch.arange(batch + 1).int() * draft, "max_draft": draft}
        target = torch.zeros(*((batch * (draft + 1),) if flat else (batch, draft + 1)), vocab, dtype=BF16)
        if has_rows:
            more["draft_logits"] = torch.zeros(*at, vocab, dtype=BF16)
            more["draft_sampling"] = sampling(batch, "top_p" if batch == 3 else filters, full)
        if is_kept:
            more |= {"draft_logits": kept(*at), "draft_sampling": Sampling(more["draft_sampling"].temperature)}
        if is_edited:
            more["edits"] = edits(batch * (draft + 1), vocab)
            if has_rows:
                more["draft_edits"] = more["edits"]
        more |= {"sampling": sampling(batch, filters, full), "rng": rng(batch, full or rule == "block")}
        ids = torch.zeros(at, dtype=torch.int32 if batch == 3 else torch.int64)
        yield lambda ids=ids, target=target, more=more: ops.verify_chain(ids, target, rule=rule, **more)


def nobody_drafts(rule: str, vocab: int) -> Iterator[Any]:
    """Flat calls without a draft, in a configuration that has some."""
    for batch, filters in itertools.product(BATCHES, ("", "top_k")):
        target, none = torch.zeros(batch, vocab, dtype=BF16), torch.zeros(0, vocab, dtype=BF16)
        given = {"draft_logits": none, "cu_draft": torch.zeros(batch + 1).int(), "max_draft": max(DRAFTS)}
        given |= {"sampling": sampling(batch, filters, True), "draft_sampling": sampling(batch, filters, True)}
        if rule == "acceptance_ratios":
            yield lambda target=target, given=given: ops.acceptance_ratios(torch.zeros(0).long(), target, **given)
        else:
            given["rng"] = rng(batch, True)
            yield lambda target=target, given=given: ops.verify_chain(torch.zeros(0).long(), target, rule=rule, **given)


def knobs(rule: str, vocab: int) -> Iterator[Any]:
    """Values of what a rule takes: 1, multiples of 16, others."""
    for least, block in itertools.product((1, 2, 16, 17), repeat=2):
        given = {"top_m": least} if rule == "topm" else {"max_distance": least - 1}
        yield lambda given=given, block=block: ops.verify_chain(
            torch.zeros(3, 5).long(), torch.zeros(3, 6, vocab, dtype=BF16), rule=rule, min_block=block,
            sampling=Sampling(), rng=rng(3, True), **given,
        )  # fmt: skip


def trees(rule: str, vocab: int, is_edited: bool = False, is_kept: bool = False) -> Iterator[Any]:
    for batch, nodes, filters, full in itertools.product(BATCHES, NODES, ("", "min_p"), (False, True)):
        rows = torch.zeros(batch, nodes, vocab, dtype=BF16)
        dtypes = {1: (torch.int64, torch.int64), 3: (torch.int64, torch.int32), 16: (torch.int32, torch.int32)}[batch]
        ids = torch.zeros(batch, nodes, dtype=dtypes[0])
        parents = torch.arange(-1, nodes - 1, dtype=dtypes[1]).repeat(batch, 1)
        given = {"sampling": sampling(batch, filters, full), "rng": rng(batch, full or rule == "traversal")}
        if rule in ("recursive", "traversal"):
            given |= {"draft_logits": rows, "draft_sampling": sampling(batch, filters, full)}
        if is_kept:
            given |= {"draft_logits": kept(batch, nodes), "draft_sampling": Sampling()}
        if is_edited:
            given["edits"] = edits(batch * nodes, vocab)
        yield lambda ids=ids, parents=parents, rows=rows, given=given: ops.verify_tree(
            ids, parents, rows, max_depth=3, rule=rule, **given
        )


def samples(vocab: int, is_edited: bool = False, excluded: tuple[int, ...] = (0,)) -> Iterator[Any]:
    for batch, count, filters, full in itertools.product(BATCHES, excluded, ("", "top_k", "top_p"), (False, True)):
        rows = torch.zeros(batch, vocab, dtype=BF16)
        given: dict[str, Any] = {"sampling": sampling(batch, filters, full)}
        given |= {"lane": torch.zeros(batch).long() if full else 0, "rng": rng(batch, full)}
        if count:
            given["exclude_ids"] = torch.zeros(batch, count).long()
        if is_edited:
            given["edits"] = edits(batch, vocab)
        yield lambda rows=rows, given=given: ops.sample(rows, **given, purpose="target")


def scores(vocab: int, is_edited: bool = False) -> Iterator[Any]:
    for batch, top, filters, full in itertools.product(BATCHES, (3, 20), ("", "top_k", "top_p"), (False, True)):
        rows = torch.zeros(batch, vocab, dtype=BF16)
        given: dict[str, Any] = {"sampling": sampling(batch, filters, full), "logprobs": "processed", "top": top}
        if is_edited:
            given["edits"] = edits(batch, vocab)
        ids = torch.zeros(batch, dtype=torch.int32 if batch == 3 else torch.int64)
        yield lambda rows=rows, ids=ids, given=given: ops.token_logprobs(rows, ids, **given)


def pairs(op: str, vocab: int) -> Iterator[Any]:
    for batch, drafts, filters, full in itertools.product(BATCHES, (0, 5), ("", "min_p"), (False, True)):
        given: dict[str, Any] = {"sampling": sampling(batch, filters, full)}
        given["draft_sampling"] = sampling(batch, filters, full)
        if op == "acceptance_ratios":
            rows, draft = (torch.zeros(batch, drafts + n, vocab, dtype=BF16) for n in (1, 0))
            ids = torch.zeros(batch, drafts, dtype=torch.int32 if batch == 3 else torch.int64)
            yield lambda ids=ids, rows=rows, draft=draft, given=given: ops.acceptance_ratios(ids, rows, draft, **given)
            continue
        rows, given["draft_ids"] = torch.zeros(batch, vocab, dtype=BF16), torch.zeros(batch).long()
        if op == "residual_sample":
            given["rng"] = rng(batch, full)
        yield lambda rows=rows, given=given: getattr(ops, op)(rows, rows, **given)


CASES: dict[str, tuple[dict[str, Any], Callable[[int], Iterator[Any]]]] = {
    **{
        f"verify_chain {rule}{' flat' * flat}": (
            {"op": "verify_chain", "rules": (rule,), "max_draft": max(DRAFTS), "flat": flat},
            lambda vocab, rule=rule, flat=flat: chains(rule, vocab, flat),
        )
        for rule, flat in (("ratio", False), ("ratio", True), ("block", False), ("match", True), ("topm", False))
    },
    **{
        f"verify_tree {rule}": (
            {"op": "verify_tree", "rules": (rule,), "nodes": max(NODES)},
            lambda vocab, rule=rule: trees(rule, vocab),
        )
        for rule in ("match", "typical", "recursive", "traversal")
    },
    **{
        f"verify_chain {rule}{' flat' * flat} edits": (
            {
                "op": "verify_chain",
                "rules": (rule,),
                "max_draft": max(DRAFTS),
                "flat": flat,
                "edits": True,
                "draft_edits": True,
            },
            lambda vocab, rule=rule, flat=flat: chains(rule, vocab, flat, True),
        )
        for rule, flat in (("ratio", False), ("match", True))
    },
    **{
        f"{rule} flat, nobody drafts": (
            {"flat": True, "max_draft": max(DRAFTS)}
            | ({"op": rule} if rule == "acceptance_ratios" else {"op": "verify_chain", "rules": (rule,)}),
            lambda vocab, rule=rule: nobody_drafts(rule, vocab),
        )
        for rule in ("ratio", "block", "acceptance_ratios")
    },
    **{
        f"verify_chain {rule} values": (
            {"op": "verify_chain", "rules": (rule,), "max_draft": 5},
            lambda vocab, rule=rule: knobs(rule, vocab),
        )
        for rule in ("topm", "distance")
    },
    "sample without some": (
        {"op": "sample", "exclude_ids": torch.zeros(1, 3).long()},
        lambda vocab: samples(vocab, excluded=(1, 2, 16)),
    ),
    "verify_tree recursive edits": (
        {"op": "verify_tree", "rules": ("recursive",), "nodes": max(NODES), "edits": True},
        lambda vocab: trees("recursive", vocab, True),
    ),
    **{
        f"verify_chain {rule} kept": (
            {"op": "verify_chain", "rules": (rule,), "max_draft": max(DRAFTS), "kept": 20},
            lambda vocab, rule=rule: chains(rule, vocab, False, is_kept=True),
        )
        for rule in ("ratio", "block")
    },
    "verify_tree recursive kept": (
        {"op": "verify_tree", "rules": ("recursive",), "nodes": max(NODES), "kept": 20},
        lambda vocab: trees("recursive", vocab, is_kept=True),
    ),
    "sample": ({"op": "sample"}, samples),
    "sample edits": ({"op": "sample", "edits": True}, lambda vocab: samples(vocab, True)),
    "token_logprobs": ({"op": "token_logprobs", "top": 20}, scores),
    "token_logprobs edits": ({"op": "token_logprobs", "top": 20, "edits": True}, lambda vocab: scores(vocab, True)),
    "too little, sample": ({"op": "sample", "filters": (False,)}, samples),
    **{
        op: ({"op": op, "max_draft": 5}, lambda vocab, op=op: pairs(op, vocab))
        for op in ("acceptance_ratios", "residual_probs", "residual_sample")
    },
}  # type: ignore[misc]


def main() -> None:
    """For each case: the kernels that warmup compiled, how often, and those that calls compiled after it."""
    found: list[str] = []

    def note(kernel: Any, key: str, *_: object) -> None:
        if key not in seen.setdefault(kernel.__name__, set()):
            seen[kernel.__name__].add(key)
            found.append(kernel.__name__)

    seen: dict[str, set[str]] = {}
    driver.set_active(_driver(TARGETS["cuda:90"]))
    no_refusal = mock.patch.object(_backends, "_refusal", return_value=None)
    with mock.patch.object(JITFunction, "_do_compile", note), no_refusal, ops.use_backend("triton"):
        chosen = {name: case for name, case in CASES.items() if not sys.argv[1:] or sys.argv[1] in name}
        for (name, (given, calls)), vocab in itertools.product(chosen.items(), (512, 5003)):
            seen.clear()
            warmup(**given, vocab=vocab, device="cpu")
            warm = len(found)
            for call in calls(vocab):
                call()
            print(json.dumps([f"{name}, {vocab} ids", found[:warm], found[warm:]]), flush=True)
            found.clear()


if __name__ == "__main__":
    main()
