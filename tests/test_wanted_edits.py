"""`Edits` of requests given to a verifying op: the results are those with what `edit_rows` makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import RULES, make_chain, make_rng
from check import assert_same
from edit_cases import TOGETHER, alone, make_edits
from op_calls import moved
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tree_cases import TREE_RULES, make_tree

from specdec_kernels import (
    ChainResult,
    Edits,
    MixedRules,
    Sampling,
    TokenCounts,
    count_tokens,
    edit_rows,
    sample,
    verify_chain,
    verify_tree,
)
from specdec_kernels._op import OPS, Op

Given = dict[str, Any]


def chain_given(rule: str, vocab: int, *, flat: bool = False, **named: Any) -> tuple[Given, Given]:
    """Arguments of verify_chain, and those of edit_rows that say where its rows lie."""
    case = make_chain(5, 3, vocab, rule=rule, flat=flat, ragged=True, greedy_every=4, **named)
    given = {
        "draft_ids": case.draft_ids, "target_logits": case.target_logits, "draft_logits": case.draft_logits,
        **case.keywords,
    }  # fmt: skip
    layout = {name: given[name] for name in ("draft_ids", "cu_draft", "max_draft") if name in given}
    return given, {**layout, "vocab": vocab}


def tree_given(rule: str, vocab: int, **named: Any) -> tuple[Given, Given]:
    """The same of verify_tree."""
    case = make_tree(4, 7, vocab, rule=rule, **named)
    names = ("token_ids", "parents", "target_logits", "draft_logits")
    given = {**dict(zip(names, case.tensors, strict=True)), **case.keywords}
    return given, {"draft_ids": given["token_ids"], "parents": given["parents"], "vocab": vocab}


def compare(
    op: Callable[..., Any], given: Given, layout: Given, device: str, edits: Edits, drafted: Edits | None = None
) -> Any:
    """The same bits from edits of requests and from those of rows; `drafted`: of the draft rows."""
    given, layout, edits, drafted = moved((given, layout, edits, drafted), device)
    rows = edit_rows(edits, **layout)
    wanted: Given = {"edits": edits}
    made: Given = {"edits": rows}
    if drafted is not None:
        of_rows = rows if drafted is edits else edit_rows(drafted, **layout)
        wanted, made = {**wanted, "draft_edits": drafted}, {**made, "draft_edits": of_rows}
        mixed = op(**given, edits=edits, draft_edits=of_rows)
        other = op(**given, edits=rows, draft_edits=drafted)
        assert_same(mixed, other, type(mixed)._fields)
    ours, theirs = op(**given, **wanted), op(**given, **made)
    assert_same(ours, theirs, type(ours)._fields)
    return ours


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("flat", [False, True], ids=["dense", "flat"])
def test_chains(backend: str, device: str, is_slow: bool, rule: str, flat: bool) -> None:
    # Only the CPU has code of its own for the edits of requests: elsewhere `edit_rows` runs first.
    for vocab, dtype, filters in ((300, torch.float32, "all"), (4096 + 37, torch.bfloat16, "top_p"))[: 2 - is_slow]:
        given, layout = chain_given(rule, vocab, flat=flat, dtype=dtype, filters=filters)
        edits, other = make_edits(5, vocab, seed=1), make_edits(5, vocab, seed=2)
        compare(verify_chain, {**given, "logprobs": "processed"}, layout, device, edits)
        if not is_slow:
            compare(verify_chain, {**given, "logprobs": "raw", "top": 3}, layout, device, edits)
        if given["draft_logits"] is not None:
            compare(verify_chain, given, layout, device, edits, edits)
            compare(verify_chain, given, layout, device, edits, other)


@pytest.mark.parametrize("rule", TREE_RULES)
def test_trees(backend: str, device: str, is_slow: bool, rule: str) -> None:
    for vocab, filters in ((41, "none"), (300, "all"))[: 2 - is_slow]:
        given, layout = tree_given(rule, vocab, filters=filters)
        edits, other = make_edits(4, vocab, seed=3), make_edits(4, vocab, seed=4)
        compare(verify_tree, {**given, "logprobs": "processed"}, layout, device, edits)
        if not is_slow:
            compare(verify_tree, {**given, "logprobs": "raw", "top": 3}, layout, device, edits)
        if given["draft_logits"] is not None:
            compare(verify_tree, given, layout, device, edits, edits)
            compare(verify_tree, given, layout, device, edits, other)


@pytest.mark.parametrize("field", Edits._fields)
def test_each_edit_alone(backend: str, device: str, field: str) -> None:
    every = make_edits(5, 300, seed=5)
    edits = alone(every, field)
    given, layout = chain_given("match", 300)
    got = compare(verify_chain, given, {**layout, "draft_ids": given["draft_ids"]}, device, edits)
    if field not in TOGETHER:
        plain = verify_chain(**moved(given, device))
        assert_same(got, plain, ChainResult._fields)


def test_bad_layouts_ids_and_trees(backend: str, device: str) -> None:
    edits = make_edits(5, 300, seed=6)
    given, layout = chain_given("match", 300, flat=True)
    total = len(given["draft_ids"])
    for offsets in ([0, 9, 3, 5, 5, total], [1, 2, 3, 5, 6, total], [0, -1, 3, 5, 6, total]):
        bad = torch.tensor(offsets, dtype=torch.int32)
        compare(verify_chain, {**given, "cu_draft": bad}, {**layout, "cu_draft": bad}, device, edits)
    given, layout = chain_given("ratio", 300)
    ids = given["draft_ids"].clone()
    ids[0, 1], ids[1, 0], ids[2, 0] = 300, -7, 2**31 - 1
    compare(verify_chain, {**given, "draft_ids": ids}, {**layout, "draft_ids": ids}, device, edits)
    given, layout = tree_given("match", 300)
    parents = given["parents"].clone()
    parents[0, 2], parents[1, 0] = 5, 0
    trees = make_edits(4, 300, seed=6)
    compare(verify_tree, {**given, "parents": parents}, {**layout, "parents": parents}, device, trees)
    compare(verify_tree, {**given, "max_depth": 1}, layout, device, trees)  # some are deeper


def test_requests_that_are_not_active(backend: str, device: str) -> None:
    given, layout = chain_given("ratio", 300)
    active = torch.tensor([True, False, True, False, True])
    given = {**given, "sampling": given["sampling"]._replace(active=active)}
    edits = make_edits(5, 300, seed=7)
    got = compare(verify_chain, given, {**layout, "active": active}, device, edits, edits)
    assert bool((got.token_ids[1] == -1).all()) and bool((got.token_ids[0] >= 0).any())


def test_a_rule_for_each_request(backend: str, device: str) -> None:
    rule = MixedRules(("greedy", "match", "ratio", "block"), torch.tensor([3, 0, 1, 2, 0], dtype=torch.int32))
    given, layout = chain_given("block", 300)
    edits = make_edits(5, 300, seed=8)
    compare(verify_chain, {**given, "rule": rule, "logprobs": "raw", "top": 2}, layout, device, edits, edits)
    rule = MixedRules(("match", "recursive"), torch.tensor([1, 0, 1, 0], dtype=torch.int32))
    given, layout = tree_given("recursive", 300)
    edits = make_edits(4, 300, seed=8)
    compare(verify_tree, {**given, "rule": rule}, layout, device, edits, edits)


def test_a_grammar_comes_after_the_edits(backend: str, device: str) -> None:
    given, layout = chain_given("match", 300)
    bits = torch.randint(-(2**31), 2**31, (20, 10), generator=torch.Generator().manual_seed(9)).int()
    compare(verify_chain, {**given, "allowed": bits}, layout, device, make_edits(5, 300, seed=9))


@pytest.mark.parametrize("batch", [1, 3])
def test_results_do_not_depend_on_threads(isa: str, threads: None, batch: int) -> None:
    """A batch of one splits its rows over the threads: 20 tiles are enough for that."""
    vocab = 20 * 2048 + 70
    for rule in ("match", "block"):
        case = make_chain(batch, 2, vocab, rule=rule, dtype=torch.bfloat16, filters="top_k")
        given = {
            "draft_ids": case.draft_ids, "target_logits": case.target_logits, "draft_logits": case.draft_logits,
            **case.keywords, "logprobs": "processed", "edits": make_edits(batch, vocab, seed=10), "backend": "cpu",
        }  # fmt: skip
        rows = edit_rows(given["edits"], case.draft_ids, vocab=vocab, backend="cpu")
        torch.set_num_threads(1)
        alone = verify_chain(**{**given, "edits": rows})
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert_same(verify_chain(**given), alone, ChainResult._fields)


class Calls(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.rpartition("::")[2])
        return func(*args, **(kwargs or {}))


def names_of(call: Callable[[], Any]) -> list[str]:
    """Operators of this package in a call."""
    with Calls() as calls:
        call()
    return [name for name in calls.names if name.startswith(("edit_rows", "verify_"))]


def test_the_cpu_makes_no_lists_of_all_rows() -> None:
    given, _ = chain_given("ratio", 300)
    edits = make_edits(5, 300, seed=11)
    same, other = {"edits": edits, "draft_edits": Edits(*edits)}, {"edits": edits, "draft_edits": make_edits(5, 300)}
    assert names_of(lambda: verify_chain(**given, **same, backend="cpu")) == ["verify_chain_edited_out"]
    calls = ["edit_rows_out", "verify_chain_edited_out"]
    assert names_of(lambda: verify_chain(**given, **other, backend="cpu")) == calls
    assert names_of(lambda: verify_chain(**given, edits=Edits(), backend="cpu")) == ["verify_chain_out"]
    trees, _ = tree_given("match", 300)
    call = ["verify_tree_edited_out"]
    assert names_of(lambda: verify_tree(**trees, edits=make_edits(4, 300, seed=12), backend="cpu")) == call


class Recorder:
    """An op that keeps the arguments of its calls."""

    def __init__(self, op: Op) -> None:
        self.op, self.calls = op, list[tuple[Any, ...]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.op, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.calls.append(args)
        return self.op(*args, **named)


@pytest.mark.parametrize("name", ["verify_chain", "verify_tree"])
def test_the_reference_of_the_operator_is_the_op_with_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, made = (verify_chain, chain_given) if name == "verify_chain" else (verify_tree, tree_given)
    given, layout = made("ratio" if name == "verify_chain" else "recursive", 300)
    edits, op = make_edits(len(given["rng"].seed), 300, seed=12), Recorder(OPS[f"{name}_edited"])
    both, listing = {"edits": edits, "draft_edits": edits}, {"logprobs": "raw", "top": 2}
    monkeypatch.setattr(f"specdec_kernels.ops.{name}.edited", op)
    call(**given, **both, backend="cpu")
    call(**given, **both, **listing, backend="cpu")
    rows = edit_rows(edits, **layout, backend="reference")
    for args, more in zip(op.calls, ({}, listing), strict=True):
        results = op.op(*args, device=torch.device("cpu"), backend="reference")
        want = call(**given, edits=rows, draft_edits=rows, **more, backend="reference")
        told = [part for part in want if part is not None]
        assert all(torch.equal(*pair) for pair in zip([r for r in results if r.numel()], told, strict=True))


def test_results_that_are_given_are_filled(backend: str, device: str) -> None:
    given, _ = moved(chain_given("match", 70), device)
    edits = moved(make_edits(5, 70, seed=13), device)
    for more in ({}, {"logprobs": "raw"}, {"logprobs": "raw", "top": 2}):
        want = verify_chain(**given, edits=edits, **more)
        out = ChainResult(*(None if part is None else torch.full_like(part, 99) for part in want))
        got = verify_chain(**given, edits=edits, **more, out=out)
        assert all(a is b for a, b in zip(got, out, strict=True))
        assert_same(out, want, ChainResult._fields)


def test_a_compiled_step_makes_edits(backend: str, device: str) -> None:
    if backend not in ("reference", "cpu"):
        pytest.skip("the same Python")
    given, _ = chain_given("match", 70)
    edits = make_edits(5, 70, seed=14)

    def step(ids: Tensor, logits: Tensor, edits: Edits) -> Tensor:
        return verify_chain(
            ids, logits, sampling=Sampling(), rng=given["rng"], rule="match", edits=edits, backend=backend
        ).token_ids

    args = (given["draft_ids"], given["target_logits"], edits)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="eager")(*args), step(*args))


def test_wrong_edits_say_what_to_type() -> None:
    given, _ = chain_given("ratio", 70)
    edits = make_edits(5, 70, seed=15)
    assert edits.bias is not None
    with pytest.raises(ValueError, match=r"verify_chain: edits.bias must be float32, got float64"):
        verify_chain(**given, edits=edits._replace(bias=edits.bias.double()))
    with pytest.raises(ValueError, match=r"verify_chain: draft_edits.min_tokens must be given"):
        verify_chain(**given, edits=edits, draft_edits=edits._replace(min_tokens=None))
    mapped = {**given, "token_map": torch.arange(70, dtype=torch.int32)}
    with pytest.raises(ValueError, match=r"draft_edits must be None where token_map is given: .*, got Edits"):
        verify_chain(**mapped, edits=edits, draft_edits=edits)
    wide = {
        "draft_ids": given["draft_ids"][:, :1].clone(),
        "target_logits": torch.empty(5, 2, 2**23, dtype=torch.bfloat16),
    }
    with pytest.raises(ValueError, match=r"of a vocabulary of 1 to 8388607 ids, got \[5, 2, 8388608\]"):
        verify_chain(**{**given, **wide, "draft_logits": None, "draft_sampling": None}, edits=edits)
    with pytest.raises(ValueError, match="edit_rows returned, got Edits"):  # an op that reads every row
        sample(torch.zeros(5, 70), sampling=Sampling(), rng=make_rng(5), purpose="target", edits=edits)


def test_tables_of_every_size(isa: str) -> None:
    """Of fewer places than lanes, and of more; full ones too."""
    given, layout = chain_given("match", 4096 + 37)
    g = torch.Generator().manual_seed(16)
    for distinct in (1, 3, 40, 300):
        counts = TokenCounts.empty(5, distinct)
        count_tokens(counts, torch.randint(0, 4133, (5, distinct), generator=g), is_prompt=True)
        count_tokens(counts, torch.randint(0, 4133, (5, 3 * distinct), generator=g))
        count_tokens(counts, torch.randint(0, 4133, (5, 2), generator=g), undo=True)
        edits = make_edits(5, 4133, seed=17)._replace(counts=counts, slots=None)
        compare(verify_chain, {**given, "backend": "cpu"}, {**layout, "backend": "cpu"}, "cpu", edits)
        mine = edit_rows(edits, **layout, backend="cpu")
        assert torch.equal(
            mine.apply(given["target_logits"].flatten(0, 1)),
            edit_rows(edits, **layout, backend="reference").apply(given["target_logits"].flatten(0, 1)),
        )
