"""tree_from_marginals: against all prefixes of every position's candidates, in the order that the rule says."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest
import torch
from check import assert_same, of_the_reference
from torch import Tensor

from specdec_kernels import CandidateTree, RngKey, Sampling, sample, tree_from_marginals, tree_layout, verify_tree

NAMES = CandidateTree._fields
INF, NAN = float("inf"), float("nan")
Node = tuple[int, int, int]  # token id, parent, source


def float32(x: float) -> float:
    """The nearest float32; of a sum of two of them, what adding in float32 gives."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


def ranked(ids: list[int], logprobs: list[float]) -> list[int]:
    """Indices of a position's candidates, best first, each id once."""
    usable = [w for w in range(len(ids)) if 0 <= ids[w] < 2**31 and logprobs[w] > -INF]  # NaN is not above
    order = sorted(usable, key=lambda w: (-min(logprobs[w], 0.0), w))
    return [w for i, w in enumerate(order) if ids[w] not in [ids[v] for v in order[:i]]]


def best_prefixes(ids: list[list[int]], logprobs: list[list[float]], num_nodes: int) -> list[Node]:
    """All prefixes, sorted: by score, then by their parent, then by rank."""
    width = len(ids[0])
    ranks = [ranked(i, p) for i, p in zip(ids, logprobs, strict=True)]
    keys: dict[tuple[int, ...], Any] = {(): (-INF,)}  # a key holds its parent's: tuples compare the rule
    scores = {(): 0.0}
    for depth in range(1, len(ids) + 1):
        for prefix in itertools.product(*(range(len(r)) for r in ranks[:depth])):
            above = prefix[:-1]
            logprob = min(logprobs[depth - 1][ranks[depth - 1][prefix[-1]]], 0.0)
            scores[prefix] = float32(scores[above] + logprob)
            keys[prefix] = (-scores[prefix], keys[above], prefix[-1])
    order = sorted((p for p in keys if scores[p] > -INF), key=lambda p: keys[p])[:num_nodes]
    number = {prefix: n for n, prefix in enumerate(order)}
    nodes = [(-1, -1, -1)]
    for prefix in order[1:]:
        position = len(prefix) - 1
        w = ranks[position][prefix[-1]]
        nodes.append((ids[position][w], number[prefix[:-1]], position * width + w))
    return nodes + [(-1, -1, -1)] * (num_nodes - len(nodes))


def rows_of(tree: CandidateTree) -> list[list[Node]]:
    """The nodes of each request."""
    parts = zip(tree.token_ids.tolist(), tree.parents.tolist(), tree.source.tolist(), strict=True)
    return [list(zip(*part, strict=True)) for part in parts]


def marginals(batch: int, depth: int, width: int, kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Candidates in no order, as a top-k, a tie, a merge of lists or a broken drafter gives them."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(batch, depth, 50, generator=g).argsort(2)[:, :, :width].contiguous()
    logprobs = torch.randn(batch, depth, width, generator=g).mul(2).log_softmax(2)
    if kind == "ties":
        logprobs = (logprobs * 2).round() / 2
    elif kind == "repeated":
        ids = torch.randint(0, 3, ids.shape, generator=g)
        logprobs = (logprobs * 4).round() / 4
    elif kind == "missing":
        chance = torch.rand(ids.shape, generator=g)
        ids[chance < 0.2] = -1
        logprobs[(chance > 0.1) & (chance < 0.3)] = -INF
        logprobs[chance > 0.9] = 0.0
    return ids, logprobs


@pytest.mark.parametrize("kind", ["distinct", "ties", "repeated", "missing"])
@pytest.mark.parametrize(("depth", "width", "num_nodes"), [(3, 4, 12), (2, 7, 30), (5, 2, 63), (4, 1, 4), (1, 5, 1)])
def test_the_likeliest_prefixes_are_kept(
    backend: str, device: str, kind: str, depth: int, width: int, num_nodes: int
) -> None:
    batch = {"triton": 8, "cuda_host": 40}.get(backend, 500)  # 10,000 in all; interpreted backends fewer
    ids, logprobs = marginals(batch, depth, width, kind, seed=depth)
    found = tree_from_marginals(ids.to(device), logprobs.to(device), num_nodes=num_nodes)
    want = [best_prefixes(i, p, num_nodes) for i, p in zip(ids.tolist(), logprobs.tolist(), strict=True)]
    assert rows_of(found) == want
    assert found.status.tolist() == [0] * batch
    assert tree_layout(found.parents).status.tolist() == [0] * batch


def test_an_example_by_hand(backend: str, device: str) -> None:
    ids = torch.tensor([[[5, 4], [6, 7]]], device=device)
    logprobs = torch.tensor([[[0.3, 0.6], [0.9, 0.1]]], device=device).log()
    found = tree_from_marginals(ids, logprobs, num_nodes=9, root_ids=torch.tensor([3], device=device))
    # .6, .54, .3, .27, .06, .03: seven nodes are all there are
    assert found.token_ids.tolist() == [[3, 4, 6, 5, 6, 7, 7, -1, -1]]
    assert found.parents.tolist() == [[-1, 0, 1, 0, 3, 1, 3, -1, -1]]
    assert found.source.tolist() == [[-1, 1, 2, 0, 2, 3, 3, -1, -1]]


def test_of_equal_nodes_the_one_with_the_first_parent_comes_first(backend: str, device: str) -> None:
    ids = torch.arange(6, device=device).view(1, 3, 2)
    found = tree_from_marginals(ids, torch.zeros(1, 3, 2, device=device), num_nodes=15)
    assert found.parents.tolist() == [[-1, *(n for n in range(7) for _ in range(2))]]  # level by level
    tiny = torch.tensor([[[-1.0, -1.5], [-1e-9, -2e-9], [-3.0, -4.0]]], device=device)  # vanish in float32 sums
    found = tree_from_marginals(ids, tiny, num_nodes=7)
    assert found.parents.tolist() == [[-1, 0, 1, 1, 0, 4, 4]]
    assert found.source.tolist() == [[-1, 0, 2, 3, 1, 2, 3]]


def test_bad_values_set_bits_and_are_no_candidates(backend: str, device: str) -> None:
    ids = torch.tensor([[[1, 2, 3]]] * 9)
    ids[1, 0, 0], ids[2, 0, 0], ids[3, 0, 1] = -1, -2, 2**31
    logprobs = torch.tensor([[[-1.0, -2.0, -3.0]]] * 9)
    logprobs[1, 0, 0] = NAN  # of no candidate: not looked at
    logprobs[4, 0, 1] = NAN
    logprobs[5, 0] = torch.tensor([-0.0, 1e-6, 0.0])  # rounding: equal
    logprobs[6, 0, 2] = INF  # a logit, it seems
    logprobs[7, 0] = -INF
    logprobs[8, 0, 1] = -3e38
    found = tree_from_marginals(ids.to(device), logprobs.to(device), num_nodes=4)
    kept = [[i for i in row if i >= 0] for row in found.token_ids.tolist()]
    assert kept == [[1, 2, 3], [2, 3], [2, 3], [1, 3], [1, 3], [1, 2, 3], [3, 1, 2], [], [1, 3, 2]]
    assert found.status.tolist() == [0, 0, 4, 4, 2, 0, 2, 0, 0]


def test_a_sum_below_all_floats_is_no_node(backend: str, device: str) -> None:
    ids, logprobs = torch.tensor([[[1], [2]]], device=device), torch.full((1, 2, 1), -3e38, device=device)
    assert tree_from_marginals(ids, logprobs, num_nodes=3).token_ids.tolist() == [[-1, 1, -1]]


def test_the_first_nodes_are_the_best_smaller_tree(backend: str, device: str) -> None:
    ids, logprobs = (t[:1].expand(6, -1, -1).contiguous() for t in marginals(1, 4, 5, "ties", 3))
    ids[0, 0, 0], logprobs[1, 0, 0] = -7, NAN  # of requests that keep their root alone
    limits = torch.tensor([-5, 1, 2, 9, 20, 99], dtype=torch.int32)
    root = torch.arange(6, dtype=torch.int32, device=device)
    found = tree_from_marginals(
        ids.to(device), logprobs.to(device), num_nodes=20, root_ids=root, max_nodes=limits.to(device)
    )
    assert found.status.tolist() == [0] * 6
    assert found.token_ids[:, 0].tolist() == list(range(6))
    whole = rows_of(found)[5][1:]
    for b, limit in enumerate([0, 0, 1, 8, 19, 19]):
        assert rows_of(found)[b][1:] == whole[:limit] + [(-1, -1, -1)] * (19 - limit)


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2), (2, 3, 0)])
def test_no_request_no_position_no_candidate(backend: str, device: str, shape: tuple[int, ...]) -> None:
    empty = torch.zeros(shape, dtype=torch.int64, device=device)
    found = tree_from_marginals(empty, empty.float(), num_nodes=3)
    assert found.token_ids.tolist() == found.parents.tolist() == [[-1] * 3] * shape[0]
    assert found.status.tolist() == [0] * shape[0]


# a wide position; a long chain; all candidates there may be; more nodes than threads of a block
@pytest.mark.parametrize(
    ("depth", "width", "num_nodes"), [(1, 2048, 600), (1500, 1, 1024), (32, 64, 70), (9, 33, 1024)]
)
def test_large_trees(backend: str, device: str, depth: int, width: int, num_nodes: int) -> None:
    num_nodes = min(num_nodes, 300) if backend == "triton" else num_nodes  # interpreted
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, width if width > 1 else 9, (1, depth, width), generator=g)
    logprobs = torch.randn(1, depth, width, generator=g).log_softmax(2) - 1e-3

    def build() -> CandidateTree:
        return tree_from_marginals(ids.to(device), logprobs.to(device), num_nodes=num_nodes)

    found = build()
    assert_same(tuple(found), tuple(of_the_reference(found, build)), NAMES)
    tree = rows_of(found)[0]
    score, depths = [0.0], [0]
    for token, parent, source in tree[1:]:
        if parent < 0:
            continue
        position, w = divmod(source, width)
        assert position == depths[parent] and token == int(ids[0, position, w])
        score.append(float32(score[parent] + float(logprobs[0, position, w])))
        depths.append(position + 1)
    assert score == sorted(score, reverse=True) and len(score) > 1


def test_the_text_is_that_of_plain_sampling(backend: str, device: str) -> None:
    batch, vocab, depth = (3, 17, 3) if backend in ("triton", "cuda_host") else (64, 17, 3)
    g = torch.Generator().manual_seed(0)
    target = torch.randn(vocab, vocab, generator=g).mul(2).to(device)  # a row depends on the last token
    root = torch.arange(batch, device=device) % vocab
    draft = torch.randn(batch, depth, vocab, generator=g).to(device)
    draft[:, 0] = target[root]  # a good guess at first
    top = draft.log_softmax(2).topk(6)
    tree = tree_from_marginals(top.indices, top.values, num_nodes=30, root_ids=root)
    seeds = torch.arange(batch, device=device)
    rng = RngKey(seeds, seeds * 3 + 11, torch.zeros_like(seeds))
    sampling = Sampling.full(batch, temperature=1.0, device=device)
    rows = target[tree.token_ids.clamp(min=0)]
    result = verify_tree(tree.token_ids, tree.parents, rows, max_depth=depth, sampling=sampling, rng=rng, rule="match")
    assert result.status.tolist() == [0] * batch
    assert int(result.num_accepted.sum()) > 0
    last = root
    for i in range(depth + 1):
        step = RngKey(rng.seed, rng.position + i, rng.step)
        drawn = sample(target[last], sampling=sampling, rng=step, purpose="target").token_ids[:, 0]
        is_emitted = result.num_accepted >= i
        assert torch.equal(result.token_ids[:, i][is_emitted], drawn[is_emitted])
        last = drawn


def test_dtypes_and_out(backend: str, device: str) -> None:
    ids, logprobs = (t.to(device) for t in marginals(3, 2, 3, "distinct", 5))
    for dtype, roots in itertools.product((torch.int32, torch.int64), repeat=2):
        root = torch.tensor([7, 8, 9], dtype=roots, device=device)
        want = tree_from_marginals(ids.to(dtype), logprobs, num_nodes=5, root_ids=root)
        out = CandidateTree(*(torch.full_like(t, 99) for t in want))
        tree_from_marginals(ids.to(dtype), logprobs, num_nodes=5, root_ids=root, out=out)
        assert_same(tuple(out), tuple(want), NAMES)
        assert want.token_ids.dtype == dtype and want.token_ids[:, 0].tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidate_ids": torch.zeros(2, 3)}, "candidate_ids must be int32 or int64, got float"),
        ({"candidate_ids": [[1]]}, "candidate_ids must be a tensor of int32 or int64, got list"),
        ({"logprobs": torch.zeros(2, 3, 4).half()}, "logprobs must be float32, got float16"),
        ({"logprobs": torch.zeros(2, 3, 5)}, r"logprobs must be \[2, 3, 4\], got \[2, 3, 5\]"),
        ({"logprobs": torch.zeros(2, 4, 3).mT}, "logprobs must be contiguous"),
        ({"num_nodes": 0}, "num_nodes must be a host int >= 1, got 0"),
        ({"num_nodes": 1025}, "num_nodes must be at most 1024, got 1025"),
        ({"root_ids": torch.zeros(3).int()}, r"root_ids must be \[2\], got \[3\]"),
        ({"max_nodes": torch.zeros(2).long()}, "max_nodes must be int32, got int64"),
        ({"candidate_ids": torch.zeros(2, 33, 64).int()}, r"at most 2048 a request, got 33 \* 64"),
    ],
)
def test_wrong_arguments_say_what_to_pass(change: dict[str, Any], message: str) -> None:
    given = {"candidate_ids": torch.zeros(2, 3, 4).int(), "logprobs": torch.zeros(2, 3, 4), "num_nodes": 3, **change}
    with pytest.raises(ValueError, match=f"tree_from_marginals: .*{message}"):
        tree_from_marginals(given.pop("candidate_ids"), given.pop("logprobs"), **given)
