"""Trees on the cpu backend where rows have several tiles: the reference's decisions, whatever threads and vectors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from check import assert_same
from tree_cases import TREE_RULES, TreeCase, make_tree

from specdec_kernels import TreeResult, _native, tree_mask, verify_tree

pytestmark = pytest.mark.skipif(_native.cpu_reason() is not None, reason=str(_native.cpu_reason()))
NAMES = TreeResult._fields
VOCAB = 20000  # ten tiles, the last one short: enough to be split over threads


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts back the number of threads and the instruction set."""
    count, isa = torch.get_num_threads(), torch.ops.specdec_kernels.cpu_isa()
    yield
    torch.set_num_threads(count)
    torch.ops.specdec_kernels.set_cpu_isa(isa)


def run(case: TreeCase, backend: str = "cpu") -> TreeResult:
    return verify_tree(*case.tensors, **case.keywords, logprobs="processed", backend=backend)


def large(rule: str, filters: str, dtype: torch.dtype = torch.float32) -> TreeCase:
    """Children that are likely: or few of so many ids were ever accepted."""
    case = make_tree(5, 12, VOCAB, rule=rule, filters=filters, closeness=0.3, dtype=dtype, seed=2)
    for b, n in case.parents.ge(0).nonzero().tolist():
        for rows in (case.target_logits, case.draft_logits):
            assert rows is not None
            rows[b, case.parents[b, n], case.token_ids[b, n]] = 16.0 + 0.1 * n
    return case


@pytest.mark.parametrize("filters", ["none", "all"])
@pytest.mark.parametrize("rule", TREE_RULES)
def test_rows_of_many_tiles_are_decided_as_the_reference_decides(rule: str, filters: str) -> None:
    case = large(rule, filters)
    ours, theirs = run(case), run(case, "reference")
    assert_same(tuple(ours[:4]), tuple(theirs[:4]), NAMES[:4])
    assert int(ours.num_accepted.max()) > 1
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("rule", TREE_RULES)
def test_threads_and_vectors_do_not_change_a_bit(rule: str, threads: None) -> None:
    case = large(rule, "none", torch.bfloat16)
    torch.set_num_threads(1)
    want = run(case)
    for isa in (1, 2, 3):
        if torch.ops.specdec_kernels.set_cpu_isa(isa) == isa:
            assert_same(tuple(run(case)), tuple(want), NAMES)
    alone = case.pick(torch.tensor([3]))  # then its rows are split over the threads
    for count in (2, 3):
        torch.set_num_threads(count)
        assert_same(tuple(run(case)), tuple(want), NAMES)
        assert_same(tuple(run(alone)), tuple(None if t is None else t[3:4] for t in want), NAMES)


def test_masks_split_over_threads_are_the_same(threads: None) -> None:
    parents = make_tree(1, 61, 2).parents
    for name in ("bool", "flat", "flat_packed"):
        torch.set_num_threads(1)
        want = tree_mask(parents, past=20003, format=name)
        torch.set_num_threads(3)
        assert torch.equal(tree_mask(parents, past=20003, format=name).mask, want.mask)
        assert torch.equal(want.mask, tree_mask(parents, past=20003, format=name, backend="reference").mask)
