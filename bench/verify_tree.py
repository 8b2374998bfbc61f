"""verify_tree beside the loops of public EAGLE and Medusa code, and a walk in PyTorch that reads walked rows only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import TreeResult, verify_tree

from .minimum import DRAWN
from .rivals._sglang_tree import with_links
from .suite import CHECKED_REQUESTS, Run, rivals_for
from .trees import TreeCase, TreeInput, tree_input

LARGE = 64 * 16 * 128256 * 4  # bytes of target rows: larger batches come once, for memory's sake


SMALL = 200 << 20  # bytes that an H200 reads in less time than five levels of kernels take
OP, QUICK = "verify_tree", 2
CASES = [
    TreeCase(OP),
    TreeCase(OP, dtype="bf16"),
    TreeCase(OP, threads=1),
    *(TreeCase(OP, nodes, batch, "bf16") for nodes, batch in ((16, 8), (256, 8), (64, 1), (16, 64), (64, 64))),
    *(TreeCase(OP, rule=rule) for rule in ("greedy", "target_only", "typical", "recursive", "greedy_multi_draft")),
    TreeCase(OP, 32, 8, rule="traversal"),
]


def inputs(case: TreeCase) -> list[TreeInput]:
    """Two batches where memory allows."""
    size = case.batch * case.nodes * case.vocab * (4 if case.dtype == "fp32" else 2)
    return [tree_input(case, seed) for seed in range(1 if size > LARGE else 2)]


def ours(case: TreeCase, x: TreeInput, backend: str) -> TreeResult:
    """One call of the package."""
    return verify_tree(
        x.token_ids,
        x.parents,
        x.target,
        x.draft,
        max_depth=max(paths.shape[1] for paths in x.leaf_paths) - 1,
        sampling=x.sampling,
        draft_sampling=None if x.draft is None else x.sampling,
        rng=x.rng,
        rule=case.rule,
        backend=backend,
    )


def first_requests(x: TreeInput, count: int) -> TreeInput:
    """The first requests of a batch, as views."""
    sampling = type(x.sampling)(*(p if p is None else p[:count] for p in x.sampling))
    rng = type(x.rng)(*(n if n is None else n[:count] for n in x.rng))
    draft = None if x.draft is None else x.draft[:count]
    ids, parents, target = (t[:count] for t in x[:3])
    return TreeInput(ids, parents, target, draft, x.leaf_paths[:count], sampling, rng)


def minimum(case: TreeCase, x: TreeInput, result: TreeResult) -> int:
    """Bytes of the rows on the walk: that of every accepted node, the root's, once each."""
    rows = len(x.token_ids) + int(result.num_accepted.sum())
    return rows * x.target.shape[-1] * x.target.element_size()


def near(case: TreeCase, backend: str) -> int:
    """What a GPU may read beside them: blocks that draws look into, and all rows of a small batch, to save launches."""
    if backend == "cpu":
        return 0
    row = case.vocab * (4 if case.dtype == "fp32" else 2)
    everything = case.batch * case.nodes * row
    return case.batch * 6 * DRAWN + (everything if everything < SMALL else 0)


def check(case: TreeCase, run: Run, x: TreeInput) -> None:
    """Paths of the reference, and its tokens but for a draw within rounding."""
    part = first_requests(x, CHECKED_REQUESTS if case.rule == "match" else 1)
    got, want = run(part), ours(case, part, "reference")
    assert torch.equal(got.path, want.path), f"{got.path} != {want.path}"
    assert torch.equal(got.status, want.status)


def race(weights: Tensor) -> Tensor:
    """One index a row with probability proportional to its weight."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def eagle_loop(x: TreeInput) -> list[list[int]]:
    """Softmax of every node, then a request at a time: children in turn, each accepted with its probability.

    A rejected child's probability is set to 0 and the row normalised again.
    """
    probs = x.target.float().softmax(-1)
    emitted = []
    for b, paths in enumerate(x.leaf_paths):
        candidates = torch.where(paths >= 0, x.token_ids[b, paths], -1)
        alive = torch.ones(len(paths), dtype=torch.bool, device=paths.device)
        tokens: list[int] = []
        for depth in range(1, paths.shape[1] + 1):
            p = probs[b, int(paths[alive][0, depth - 1])]
            accepted = None
            tried = set()
            for token in candidates[alive, depth].tolist() if depth < paths.shape[1] else []:
                if token < 0 or token in tried:
                    continue
                tried.add(token)
                if float(torch.rand(())) < float(p[token]):
                    accepted = token
                    break
                p[token] = 0
                p /= p.sum()
            if accepted is None:
                break
            tokens.append(accepted)
            alive &= candidates[:, depth] == accepted
        emitted.append([*tokens, int(torch.multinomial(p, 1))])
    return emitted


def lazy_walk(x: TreeInput) -> list[list[int]]:
    """All requests a level at a time: softmax and race of the rows stood on, and a look for the token below."""
    batch = len(x.token_ids)
    last = torch.zeros(batch, dtype=torch.int64, device=x.parents.device)
    active = torch.arange(batch, device=x.parents.device)
    emitted: list[list[int]] = [[] for _ in range(batch)]
    while len(active):
        token = race(x.target[active, last[active]].float().softmax(-1))
        for b, drawn in zip(active.tolist(), token.tolist(), strict=True):
            emitted[b].append(drawn)
        hit = (x.parents[active] == last[active, None]) & (x.token_ids[active] == token[:, None])
        found = hit.any(1)
        active = active[found]
        last[active] = hit.int().argmax(1)[found]
    return emitted


def medusa_typical(x: TreeInput, epsilon: float = 0.09, delta: float = 0.3) -> list[list[int]]:
    """Rows gathered along every path, softmax and entropy of all of them, a request at a time; then the argmax."""
    emitted = []
    for b, paths in enumerate(x.leaf_paths):
        logits = x.target[b][paths].float()
        candidates = torch.where(paths >= 0, x.token_ids[b, paths], -1)[:, 1:]
        p = logits[:, :-1].softmax(-1)
        entropy = -(p * (p + 1e-5).log()).sum(-1)
        chosen = p.gather(-1, candidates.clamp(min=0)[..., None])[..., 0]
        passes = (candidates >= 0) & (chosen > torch.minimum(delta * (-entropy).exp(), chosen.new_tensor(epsilon)))
        kept = passes.int().cumprod(1)
        length = int(kept.sum(1).max())
        score = (chosen.clamp(min=1e-30).log() * kept).sum(1)
        best = int(torch.where(kept.sum(1) == length, score, -torch.inf).argmax())
        emitted.append([*candidates[best, :length].tolist(), int(logits[best, length].argmax())])
    return emitted


def emitted_tokens(found: Any) -> list[list[int]]:
    """Of each request, from lists or from SGLang's results."""
    if isinstance(found, list):
        return found
    predicts, path = found
    return [predicts[nodes[nodes >= 0].long()].tolist() for nodes in path]


def check_rival(case: TreeCase, run: Run, x: TreeInput) -> None:
    """All tokens but the last one go down from the root, and the last one has mass; greedy ones are the reference's."""
    emitted = emitted_tokens(run(x))
    for b, tokens in enumerate(emitted):
        node = 0
        for token in tokens[:-1]:
            node = int(((x.parents[b] == node) & (x.token_ids[b] == token)).int().argmax())
            assert node > 0, f"request {b}: {token} is no child"
        assert float(x.target[b, node].float().softmax(-1)[tokens[-1]]) > 0
    if case.rule == "greedy":
        want = ours(case, first_requests(x, 1), "reference").token_ids[0]
        assert emitted[0] == want[want >= 0].tolist()


def rivals(case: TreeCase, made: Sequence[TreeInput]) -> dict[str, Run]:
    """Those that have the rule."""
    plain: dict[str, dict[str, Run]] = {
        "match": {"EAGLE's loop": eagle_loop, "lazy walk": lazy_walk},
        "target_only": {"EAGLE's loop": eagle_loop},
        "typical": {"Medusa's PyTorch": medusa_typical},
    }
    others = {rival.NAME: with_links(rival, case.rule, made) for rival in rivals_for(case, "kernels")}
    return plain.get(case.rule, {}) | others
