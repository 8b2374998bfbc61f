"""The compat against plain loops over their documented semantics, and their distributions."""

from __future__ import annotations

import pytest
import torch
from check import assert_distribution
from torch import Tensor

from bench.rivals import _sglang, sglang_tree
from bench.rivals import sglang as sglang_chain
from specdec_kernels import RngKey, Sampling, tree_layout, tree_links, verify_tree
from specdec_kernels.compat import flashinfer, sglang

VOCAB = 5


def distribution(generator: torch.Generator, *shape: int) -> Tensor:
    return (1.5 * torch.randn(*shape, VOCAB, generator=generator)).softmax(-1)


def results(batch: int, nodes: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    predicts = torch.full((batch * nodes,), -7, dtype=torch.int32)
    return predicts, torch.full((batch, slots), -1, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)


def chain_links(batch: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    return tree_links(torch.arange(-1, slots - 1).repeat(batch, 1), engine="sglang")


TREE = [-1, 0, 0, 1, 1, 2, 0, 3]
IDS = [0, 2, 0, 1, 3, 2, 4, 0]


def inverted(weights: Tensor, coin: float) -> int:
    target, mass = coin * float(weights.double().sum()), 0.0
    for token, weight in enumerate(weights.double().tolist()):
        mass += weight
        if mass > target and weight > 0:
            return token
    return int((weights > 0).nonzero()[-1])


def children(links: tuple[Tensor, Tensor, Tensor], b: int, node: int) -> list[int]:
    found, child = [], int(links[1][b, node])
    while child >= 0:
        found.append(child)
        child = int(links[2][b, child])
    return found


def shuffled_links(parents: list[int], batch: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The links of a tree in another order of siblings for each request."""
    nodes = len(parents)
    first, following = torch.full((batch, nodes), -1), torch.full((batch, nodes), -1)
    for b in range(batch):
        for child in (torch.randperm(nodes - 1, generator=g) + 1).tolist():
            following[b, child] = first[b, parents[child]]
            first[b, parents[child]] = child
    return torch.arange(batch * nodes).view(batch, nodes), first, following


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_tree_target_only_walks_as_documented(is_shuffled: bool) -> None:
    g = torch.Generator().manual_seed(0)
    batch, nodes, slots = 300, len(TREE), 3  # one slot fewer than the tree is deep
    ids = torch.tensor(IDS).repeat(batch, 1)
    links = tree_links(torch.tensor(TREE).repeat(batch, 1), engine="sglang")
    if is_shuffled:
        links = shuffled_links(TREE, batch, g)
    target, draft = distribution(g, batch, nodes), torch.zeros(batch, nodes, VOCAB)
    coins, last = torch.rand(batch, nodes, generator=g), torch.rand(batch, generator=g)
    predicts, index, count = results(batch, nodes, slots)
    sglang.tree_speculative_sampling_target_only(predicts, index, count, ids, *links, coins, last, target, draft)
    for b in range(batch):
        path, noted, expected = [0], torch.zeros(nodes, VOCAB), {}
        while len(path) < slots:
            mass, found = 0.0, None
            for child in children(links, b, path[-1]):
                mass += float(target[b, path[-1], IDS[child]])
                if float(coins[b, path[-1]]) < mass:
                    found = child
                    break
                noted[path[-1], IDS[child]] = target[b, path[-1], IDS[child]]
            if found is None:
                break
            expected[path[-1]] = IDS[found]
            path.append(found)
        expected[path[-1]] = inverted((target[b, path[-1]] - noted[path[-1]]).clamp(min=0), float(last[b]))
        assert count[b] == len(path) - 1
        assert index[b].tolist() == [b * nodes + n for n in path] + [-1] * (slots - len(path))
        assert torch.equal(draft[b], noted)
        assert {n: int(predicts[b * nodes + n]) for n in expected} == expected
        assert int((predicts[b * nodes : (b + 1) * nodes] != -7).sum()) == len(expected)


@pytest.mark.parametrize("is_block", [False, True])
def test_chains_follow_the_target(is_block: bool) -> None:
    """Joint distribution of the first two tokens; twin: drafts that were not drawn from the draft distribution."""
    g = torch.Generator().manual_seed(1)
    batch, slots = 60_000, 3
    p, q = distribution(g, slots), distribution(g, slots - 1)
    drafts = torch.stack([torch.multinomial(q[i], batch, True, generator=g) for i in range(slots - 1)], 1)
    ids = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), drafts], 1)
    coins, last = torch.rand(batch, slots, generator=g), torch.rand(batch, generator=g)
    predicts, index, count = results(batch, slots, slots)
    sglang.chain_speculative_sampling_triton(
        predicts, index, count, ids, *chain_links(batch, slots), coins, last, p.expand(batch, -1, -1),
        q.expand(batch, -1, -1), block_verification=is_block,
    )  # fmt: skip
    rows = predicts.view(batch, slots)
    more = torch.multinomial(
        p[1], batch, True, generator=g
    )  # a text that ended after one token goes on with the target
    second = torch.where(count > 0, rows[:, 1], more)
    seen = torch.bincount(rows[:, 0] * VOCAB + second, minlength=VOCAB**2)
    assert_distribution(seen, torch.outer(p[0].double(), p[1].double()).flatten(), "chain of SGLang's interface")
    assert torch.equal(index >= 0, torch.arange(slots) <= count[:, None])


def test_flashinfer_equals_sglang_for_the_same_coins_and_names_its_numbers() -> None:
    g = torch.Generator().manual_seed(2)
    batch, slots = 64, 4
    p, q = distribution(g, batch, slots), distribution(g, batch, slots - 1)
    ids = torch.randint(VOCAB, (batch, slots - 1), generator=g, dtype=torch.int32)
    seed, offset = torch.arange(batch), torch.full((batch,), 90)
    accepted, emitted = torch.ones(batch, dtype=torch.int64), torch.ones(batch, dtype=torch.int32)
    out, a, e = flashinfer.chain_speculative_sampling(q, ids, p, accepted, emitted, seed=seed, offset=offset)
    assert a is accepted and e is emitted and bool((emitted - 1 <= accepted - 1).all())
    assert torch.equal((out >= 0).sum(1), emitted)  # one more than accepted, one more to begin with
    back = torch.randperm(batch, generator=g)
    moved, _, _ = flashinfer.chain_speculative_sampling(q[back], ids[back], p[back], seed=seed[back], offset=90)
    assert torch.equal(moved, out[back])
    again, _, _ = flashinfer.chain_speculative_sampling(q, ids, p, generator=torch.Generator().manual_seed(5))
    coins = torch.rand(batch, slots, generator=torch.Generator().manual_seed(5))
    predicts, index, count = results(batch, slots, slots)
    candidates = torch.nn.functional.pad(ids.long(), (1, 0))
    sglang.chain_speculative_sampling_triton(
        predicts, index, count, candidates, *chain_links(batch, slots), coins, coins[:, -1].contiguous(), p, q
    )
    expected = torch.where(torch.arange(slots) <= count[:, None], predicts.view(batch, slots), -1)
    assert torch.equal(again, expected.int())


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_greedy_tree_is_verify_tree_from_argmaxes(is_shuffled: bool) -> None:
    g = torch.Generator().manual_seed(3)
    batch, nodes = 200, len(TREE)
    logits = torch.randn(batch, nodes, VOCAB, generator=g)
    ids, parents = torch.tensor(IDS).repeat(batch, 1), torch.tensor(TREE).repeat(batch, 1)
    predicts, index, count = results(batch, nodes, 4)
    links = shuffled_links(TREE, batch, g) if is_shuffled else tree_links(parents, engine="sglang")
    sglang.verify_tree_greedy(predicts, index, count, ids, *links, logits.argmax(-1))
    zeros = torch.zeros(batch, dtype=torch.int64)
    ours = verify_tree(ids, parents, logits, max_depth=3, sampling=Sampling(), rng=RngKey(zeros, zeros), rule="greedy")
    assert torch.equal(count, ours.num_accepted)
    path = torch.where(ours.path >= 0, ours.path + nodes * torch.arange(batch)[:, None], -1)
    assert torch.equal(index[:, 1:], path[:, :3].int())
    taken = predicts[index.clamp(min=0).long()]
    assert torch.equal(torch.where(index >= 0, taken, -1), ours.token_ids.int())


@pytest.mark.parametrize("mode", [sglang.FULL_MASK, sglang.QLEN_ONLY, sglang.QLEN_ONLY_BITPACKING])
def test_build_tree_gives_masks_positions_and_links(mode: int) -> None:
    """Top-k 2, depth 3, by hand: candidates 0, 1 under the root, 2, 3 under 0, 4, 5 under 1, 6, 7 under 2."""
    parent_list = torch.tensor([[-1, 0, 1, 2, 5]] * 2)
    selected = torch.tensor([[0, 1, 2, 5, 6], [0, 1, 2, 3, 4]])
    expected = torch.tensor([[-1, 0, 0, 1, 2, 3], [-1, 0, 0, 1, 1, 2]])
    lengths, nodes = torch.tensor([3, 5]), 6
    size = {0: int(((lengths + nodes) * nodes).sum()) + 4, 1: 2 * nodes * nodes, 2: 2 * nodes}[mode]
    mask = torch.ones(size, dtype=torch.uint8 if mode == 2 else torch.bool)
    positions, index = (
        torch.zeros(2 * nodes, dtype=torch.int64),
        [torch.zeros(2, nodes, dtype=torch.int64) for _ in range(3)],
    )
    sglang.build_tree_kernel_efficient(parent_list, selected, lengths, mask, positions, *index, 2, 3, nodes, mode)
    depth = tree_layout(expected).depth
    assert torch.equal(positions.view(2, nodes), lengths[:, None] + depth)
    assert all(torch.equal(a, b) for a, b in zip(index, tree_links(expected, engine="sglang"), strict=True))
    start = 0
    for b in range(2):
        for n in range(nodes):
            ancestors, at = {n}, n
            while at > 0:
                at = int(expected[b, at])
                ancestors.add(at)
            if mode == 2:
                assert int(mask[b * nodes + n]) == sum(1 << a for a in ancestors)
                continue
            past = int(lengths[b]) if mode == 0 else 0
            row = mask[start : start + past + nodes].tolist()
            assert row == [True] * past + [a in ancestors for a in range(nodes)]
            start += past + nodes
    assert mode != 0 or bool(mask[start:].all())  # what lies behind the last request is not ours


def test_a_coin_of_zero_accepts_no_impossible_token() -> None:
    target, draft = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]]), torch.zeros(1, 2, 2)
    links = chain_links(1, 2)
    ids, coins, last = torch.tensor([[0, 0]]), torch.zeros(1, 2), torch.zeros(1)
    predicts, index, count = results(1, 2, 2)
    sglang.tree_speculative_sampling_target_only(predicts, index, count, ids, *links, coins, last, target, draft)
    assert count.item() == 0 and predicts[0] == 1


def test_rejected_twins_leave_nothing_of_their_token() -> None:
    """Two siblings of one token, rejected: (p - 2 p(0))+ has nothing below 0. Both thresholds are 1 unless given."""
    target = torch.tensor([[[0.3, 0.3, 0.4]] * 3])
    links = tree_links(torch.tensor([[-1, 0, 0]]), engine="sglang")
    predicts, index, count = results(1, 3, 2)
    coins, last = torch.full((1, 3), 0.9), torch.tensor([0.2])
    ids = torch.tensor([[2, 0, 0]])
    sglang.tree_speculative_sampling_target_only(
        predicts, index, count, ids, *links, coins, last, target, torch.zeros_like(target)
    )
    assert count.item() == 0 and predicts[0] == 1


@pytest.mark.parametrize(
    ("parents", "ids", "noted"),
    [
        ([-1, 0, 0], [2, 0, 1], [0.25, 0.25, 7.0]),
        ([-1, 0, -1], [0, 0, 0], [0.25, 7.0, 7.0]),  # root and padding carry the token, too
        ([-1, 0, 0, 0], [2, 0, -1, 3], [0.25, 7.0, 7.0]),  # ids that are no token
        ([-1, 1, 2], [2, 0, 1], [7.0, 7.0, 7.0]),  # no tree: nothing is tried
    ],
)
def test_rejected_children_alone_are_noted(parents: list[int], ids: list[int], noted: list[float]) -> None:
    nodes = len(parents)
    target = torch.tensor([[[0.25, 0.25, 0.5]] * nodes])
    draft = torch.full_like(target, 7.0)
    links = tree_links(torch.tensor([parents]), engine="sglang")
    coins, last = torch.full((1, nodes), 0.9), torch.tensor([0.2])
    sglang.tree_speculative_sampling_target_only(
        *results(1, nodes, 2), torch.tensor([ids]), *links, coins, last, target, draft
    )
    assert draft[0].tolist() == [noted, *[[7.0] * 3] * (nodes - 1)]


def fixture_tree() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(candidates, the three links, argmax behind each node) of SGLang's own tests: siblings 4, 1 of the second."""
    candidates = torch.tensor([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]])
    index = torch.arange(12).view(2, 6)
    next_token = torch.tensor([[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]])
    next_sibling = torch.tensor([[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]])
    wanted = torch.tensor([[3, 18, 18, 4, 5, 18], [11, 18, 18, 18, 12, 18]])
    return candidates, index, next_token, next_sibling, wanted


def test_sglangs_own_fixtures_give_its_expected_results() -> None:
    candidates, *links, wanted = fixture_tree()
    greedy, sampled = results(2, 6, 4), results(2, 6, 4)
    sglang.verify_tree_greedy(*greedy, candidates, *links, wanted)
    target = torch.nn.functional.one_hot(wanted, 20).float()
    coins = torch.rand(2, 6, generator=torch.Generator().manual_seed(8))
    sglang.tree_speculative_sampling_target_only(
        *sampled, candidates, *links, coins, coins[:, 0].contiguous(), target, torch.zeros(2, 6, 20)
    )
    for predicts, index, count in (greedy, sampled):
        assert predicts.tolist() == [3, -7, -7, 4, 5, 18, 11, -7, -7, -7, 12, 18]
        assert index.tolist() == [[0, 3, 4, 5], [6, 10, 11, -1]] and count.tolist() == [3, 2]


def test_thresholds_of_zero_accept_no_impossible_token_where_sglang_does() -> None:
    """SGLang's rule is ``coin <= sum / threshold_acc or p >= threshold_single``; its fixture expects path 0, 1, 2."""
    candidates, *links, wanted = fixture_tree()
    target = torch.nn.functional.one_hot(wanted, 20).float()
    assert target[0, 0, candidates[0, 1]] == 0 and target[0, 0, candidates[0, 1]] >= 0.0  # theirs accepts node 1
    predicts, index, count = results(2, 6, 4)
    coins = torch.full((2, 6), 0.5)
    sglang.tree_speculative_sampling_target_only(
        predicts, index, count, candidates, *links, coins, coins[:, 0].contiguous(), target, torch.zeros(2, 6, 20), 0, 0
    )
    assert index.tolist() == [[0, 3, 4, 5], [6, 10, 11, -1]] and count.tolist() == [3, 2]


@pytest.mark.parametrize("is_block", [False, True])
def test_a_draft_that_its_distribution_cannot_draw_is_rejected(is_block: bool) -> None:
    """With q = 0 the bare test ``coin * q < p``, that of SGLang's releases without a check of q, always accepts."""
    p, q, coin = torch.tensor([[[0.2, 0.8], [0.5, 0.5]]]), torch.tensor([[[0.0, 1.0]]]), torch.tensor([[0.9, 0.9]])
    assert coin[0, 0] * q[0, 0, 0] < p[0, 0, 0]
    predicts, index, count = results(1, 2, 2)
    sglang.chain_speculative_sampling_triton(
        predicts, index, count, torch.tensor([[0, 0]]), *chain_links(1, 2), coin, coin[:, 0], p, q,
        block_verification=is_block,
    )  # fmt: skip
    assert count.item() == 0 and predicts[0] == 0  # all that (p - q)+ leaves
    assert flashinfer.chain_speculative_sampling(q, torch.tensor([[0]]), p, seed=1, offset=0)[2].item() == 0


@pytest.mark.parametrize("is_block", [False, True])
def test_no_drafts_leave_one_token_of_the_target(is_block: bool) -> None:
    g = torch.Generator().manual_seed(9)
    batch, p = 6, distribution(g, 6, 1)
    last, none = torch.rand(batch, generator=g), torch.zeros(batch, 0, VOCAB)
    ids = torch.zeros(batch, 1, dtype=torch.int64)
    expected = torch.tensor([inverted(p[b, 0], float(last[b])) for b in range(batch)], dtype=torch.int32)
    predicts, index, count = results(batch, 1, 1)
    sglang.chain_speculative_sampling_triton(
        predicts, index, count, ids, *chain_links(batch, 1), last[:, None], last, p, none, block_verification=is_block
    )
    assert torch.equal(predicts, expected) and not count.any() and torch.equal(index[:, 0], torch.arange(6).int())
    predicts, index, count = results(batch, 1, 1)
    sglang.tree_speculative_sampling_target_only(
        predicts, index, count, ids, *chain_links(batch, 1), last[:, None], last, p, torch.zeros_like(p)
    )
    assert torch.equal(predicts, expected) and not count.any()
    sglang.verify_tree_greedy(predicts, index, count, ids, *chain_links(batch, 1), p.argmax(-1))
    assert torch.equal(predicts, p.argmax(-1)[:, 0].int()) and not count.any()
    drawn, accepted, emitted = flashinfer.chain_speculative_sampling(
        none, ids[:, :0].int(), p, generator=torch.Generator().manual_seed(1)
    )
    coins = torch.rand(batch, 1, generator=torch.Generator().manual_seed(1))[:, 0]
    assert drawn[:, 0].tolist() == [inverted(p[b, 0], float(coins[b])) for b in range(batch)]
    assert not accepted.any() and not emitted.any()


def test_both_spellings_of_the_links_are_taken() -> None:
    candidates, index, next_token, next_sibling, wanted = fixture_tree()
    both = [results(2, 6, 4) for _ in range(2)]
    for out, spelling in zip(both, ("retrive", "retrieve"), strict=True):
        links = dict(zip(("_index", "_next_token", "_next_sibling"), (index, next_token, next_sibling), strict=True))
        named = {spelling + name: value for name, value in links.items()}
        sglang.verify_tree_greedy(*out, candidates, target_predict=wanted, **named)
    assert both[0][2].tolist() == [3, 2]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    with pytest.raises(TypeError, match="both retrive_index and retrieve_index"):
        sglang.verify_tree_greedy(*both[0], candidates, retrive_index=index, retrieve_index=index)


def test_links_that_are_no_tree_count_as_the_root_alone() -> None:
    for links in ([[0, -1, -1]], [[5, -1, -1]], [[1, 1, -1]], [[-3, -1, -1]]):
        predicts, index, count = results(1, 3, 3)
        none, ids = torch.full((1, 3), -1), torch.zeros(1, 3, dtype=torch.int64)
        sglang.verify_tree_greedy(
            predicts, index, count, ids, torch.arange(3)[None], torch.tensor(links), none, ids.clone()
        )
        assert count.item() == 0 and index.tolist() == [[0, -1, -1]]


# --- SGLang's own kernels, where its files are


def test_sglangs_tree_kernels_agree() -> None:
    if reason := sglang_tree.available():
        pytest.skip(reason)
    theirs = _sglang.load(sglang_tree.FILE)
    parent_list = torch.tensor([[-1, 0, 1, 2, 5]] * 2)
    selected = torch.tensor([[0, 1, 2, 5, 6], [0, 1, 2, 3, 4]])
    lengths, nodes = torch.tensor([3, 5]), 6
    for mode in (sglang.FULL_MASK, sglang.QLEN_ONLY):
        size = int(((lengths * (mode == 0) + nodes) * nodes).sum())
        outcomes = []
        for build in (theirs.sgl_build_tree_kernel_triton, sglang.build_tree_kernel_efficient):
            mask, positions = torch.ones(size, dtype=torch.bool), torch.zeros(2 * nodes, dtype=torch.int64)
            links = [torch.full((2, nodes), -1) for _ in range(3)]
            build(parent_list, selected, lengths, mask, positions, *links, 2, 3, nodes, theirs.TreeMaskMode(mode))
            outcomes.append((mask, positions, *links))
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    g = torch.Generator().manual_seed(4)
    batch, nodes = 40, len(TREE)
    ids, predict = torch.tensor(IDS).repeat(batch, 1), torch.randint(VOCAB, (batch, nodes), generator=g)
    for links in (tree_links(torch.tensor(TREE).repeat(batch, 1), engine="sglang"), shuffled_links(TREE, batch, g)):
        greedy = [results(batch, nodes, 4) for _ in range(2)]
        theirs.verify_tree_greedy_triton(*greedy[0], ids, *links, predict)
        sglang.verify_tree_greedy(*greedy[1], ids, *links, predict)
        assert all(torch.equal(a, b) for a, b in zip(*greedy, strict=True))


@pytest.mark.parametrize("is_block", [False, True])
def test_sglangs_chain_kernel_agrees(is_block: bool) -> None:
    if reason := sglang_chain.available():
        pytest.skip(reason)
    g = torch.Generator().manual_seed(5)
    batch, slots = 30, 4
    p, q = distribution(g, batch, slots), distribution(g, batch, slots - 1)
    ids = torch.randint(VOCAB, (batch, slots), generator=g)
    coins, last = torch.rand(batch, slots, generator=g), torch.rand(batch, generator=g)
    both = [results(batch, slots, slots) for _ in range(2)]
    links = chain_links(batch, slots)
    theirs = _sglang.load(sglang_chain.FILE).chain_speculative_sampling_triton
    for out, verify in zip(both, (theirs, sglang.chain_speculative_sampling_triton), strict=True):
        verify(*out, ids, *links, coins, last, p, q, 1.0, 1.0, True, block_verification=is_block)
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
