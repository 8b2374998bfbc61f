"""Calls of tree_attention in poisoned memory, what they must give by Python loops in float64, and torch's attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from check import assert_same
from torch import Tensor
from tree_cases import random_parents

from specdec_kernels import TreeAttention, tree_attention, tree_layout, tree_mask

FORMATS = ("bhld", "blhd", "nhd", "hnd", "slots")
NAN = float("nan")


@dataclass
class Case:
    """One call; `keys` and `values` hold the same rows in order, float64 [batch, position, kv_head, dim]."""

    query: Tensor
    key: Tensor
    value: Tensor
    parents: Tensor
    lengths: Tensor
    keywords: dict[str, Any]
    keys: Tensor  # what they stand for, where they are 8-bit
    values: Tensor

    @property
    def scale(self) -> float:
        given = self.keywords["scale"]
        return self.query.shape[-1] ** -0.5 if given is None else float(given)

    def run(self, **change: Any) -> TreeAttention:
        ancestors = tree_layout(self.parents, max_depth=self.parents.shape[1] - 1, backend="reference").ancestors
        arguments = {"query": self.query, "key": self.key, "value": self.value, "lengths": self.lengths}
        return tree_attention(**{**arguments, "ancestors": ancestors, **self.keywords, **change})

    def alone(self, b: int) -> Case:
        """Request b in a call of its own, its tree padded to no more than its last node."""
        width = int((self.parents[b] >= 0).nonzero().max()) + 1 if bool((self.parents[b] >= 0).any()) else 1
        one, keywords = slice(b, b + 1), dict(self.keywords)
        key, value = self.key, self.value
        if "block_table" in keywords:
            keywords["block_table"] = keywords["block_table"][one]
        else:
            key, value = key[one], value[one]
        query, parents = self.query[one, :width], self.parents[one, :width].contiguous()
        return replace(
            self, query=query, key=key, value=value, parents=parents, lengths=self.lengths[one], keywords=keywords
        )


def attended(parents: list[int], length: int, window: int) -> list[list[int]]:
    """Positions that each node attends, by following parents; none for padding."""
    rows = []
    for n in range(len(parents)):
        path = [n]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        depth = len(path) - 1
        seen = {length + m: length + depth - i for i, m in enumerate(path)} | {x: x for x in range(length)}
        near = [x for x, position in seen.items() if not window or length + depth - position < window]
        rows.append([] if n > 0 and parents[n] < 0 else near)
    return rows


def dense_mask(case: Case) -> Tensor:
    """bool [batch, nodes, positions]."""
    mask = torch.zeros(*case.parents.shape, case.keys.shape[1], dtype=torch.bool)
    for b, (parents, length) in enumerate(zip(case.parents.tolist(), case.lengths.tolist(), strict=True)):
        for n, row in enumerate(attended(parents, length, case.keywords["window"])):
            mask[b, n, row] = True
    return mask


def make(
    format: str = "bhld", *, lengths: tuple[int, ...] = (37, 0, 5), nodes: int = 9, heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16), dtype: torch.dtype = torch.float32, page_size: int = 16, window: int = 0,
    capacity: int = 0, scale: float | None = None, device: str = "cpu", seed: int = 0, ragged: bool = True,
    is_latent: bool = False, float8: torch.dtype | None = None,
) -> Case:  # fmt: skip
    """Random rows where a node attends, NaN everywhere else: behind the tree, in padding, in pages of nobody.

    is_latent: values are the first columns of the keys. float8: of a cache whose keys and values have scales.
    """
    g = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    capacity = capacity or max(lengths, default=0) + nodes
    parents = random_parents(batch, nodes, 6, ragged=ragged, seed=seed).view(batch, nodes)
    query = torch.randn(batch, nodes, heads[0], dims[0], generator=g).to(dtype)
    rows = [torch.randn(batch, capacity, heads[1], dim, generator=g).to(dtype) for dim in dims]
    keywords: dict[str, Any] = {"format": format, "window": window, "scale": scale}
    if float8 is not None:
        rows = [r.to(float8).to(dtype) for r in rows]
        keywords |= {"key_scale": torch.rand(heads[1], generator=g) + 0.5, "value_scale": torch.tensor(0.7)}
    if is_latent:
        rows[1] = rows[0][..., : dims[1]].clone()
    stand_for = [
        r * keywords.get(name, torch.ones(1))[..., None].double()
        for r, name in zip(rows, ("key_scale", "value_scale"), strict=True)
    ]
    case = Case(query, *rows, parents, torch.tensor(lengths, dtype=torch.int64), keywords, *stand_for)
    unread = ~dense_mask(case).any(1)
    for r in rows:
        r[unread] = NAN
    if format in ("bhld", "blhd"):
        case.key, case.value = (r.transpose(1, 2).contiguous() if format == "bhld" else r for r in rows)
    else:
        page_size = 1 if format == "slots" else page_size
        blocks = -(-capacity // page_size)
        order = torch.randperm(batch * blocks + 3, generator=g)
        table = order[: batch * blocks].view(batch, blocks).to(torch.int32 if seed % 2 else torch.int64)
        padded = [torch.nn.functional.pad(r, (0, 0, 0, 0, 0, blocks * page_size - capacity), value=NAN) for r in rows]
        pools = [torch.full((len(order), page_size, *r.shape[2:]), NAN, dtype=dtype) for r in rows]
        for pool, r in zip(pools, padded, strict=True):
            pool[table.long()] = r.unflatten(1, (blocks, page_size))
        views = {"nhd": lambda p: p, "hnd": lambda p: p.transpose(1, 2).contiguous(), "slots": lambda p: p[:, 0]}
        case.key, case.value = (views[format](p) for p in pools)
        case.keywords["block_table"] = table.to(device)
    if float8 is not None:
        case.key, case.value = case.key.to(float8), case.value.to(float8)
        keywords |= {name: keywords[name].to(device) for name in ("key_scale", "value_scale")}
    if is_latent:
        case.value = case.key[..., : dims[1]]
    case.query, case.key, case.value, case.parents, case.lengths = (
        t.to(device) for t in (case.query, case.key, case.value, case.parents, case.lengths)
    )
    return case


def exact(case: Case) -> tuple[Tensor, Tensor]:
    """(output, logsumexp) in float64."""
    query = case.query.double().cpu()
    keys, values = (r.repeat_interleave(query.shape[2] // r.shape[2], 2) for r in (case.keys, case.values))
    scores = torch.einsum("bnhd,bxhd->bnhx", query, keys) * case.scale
    scores = scores.masked_fill(~dense_mask(case)[:, :, None], -float("inf"))
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp.clamp(min=-1e300)[..., None]).exp()
    return torch.einsum("bnhx,bxhd->bnhd", weights, values), logsumexp


def sdpa(case: Case) -> Tensor:
    """torch's attention in the case's dtype, under the mask of `tree_mask`; NaN or 0 in rows of padding."""
    dtype, group = case.query.dtype, case.query.shape[2] // case.keys.shape[2]
    mask = tree_mask(
        case.parents.cpu(), past=case.lengths.cpu(), window=case.keywords["window"], size=case.keys.shape[1],
        backend="reference",
    ).mask  # fmt: skip
    keys, values = (r.to(dtype).transpose(1, 2).repeat_interleave(group, 1) for r in (case.keys, case.values))
    query = case.query.cpu().transpose(1, 2)
    scale = case.keywords["scale"]
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, scale=scale).transpose(1, 2)


def compare(case: Case, found: TreeAttention | None = None) -> None:
    """No worse than SDPA by more than one rounding of the output and of the scores; padding gives 0 and -inf.

    A score s rounded in float32 moves its weight by a share of eps * abs(s), and the output by as much of a value; in
    small cases all of SDPA's roundings may happen to cancel, which nobody can promise.
    """
    found = TreeAttention(*(t.cpu() for t in (found or case.run())))
    want, logsumexp = exact(case)
    present = torch.isfinite(logsumexp[..., 0])
    assert found.status.tolist() == [0] * len(case.lengths)
    assert not found.output[~present].any() and bool((found.logsumexp[~present] == -float("inf")).all())
    want, logsumexp, theirs, ours = want[present], logsumexp[present], sdpa(case)[present], found.output[present]
    if want.numel() == 0:
        return
    error, theirs_error = (float((t.double() - want).abs().max()) for t in (ours, theirs))
    score = float(case.query.double().norm(dim=-1).max() * case.keys.norm(dim=-1).max()) * case.scale
    rounding = torch.finfo(ours.dtype).eps * float(want.abs().max())
    rounding += torch.finfo(torch.float32).eps * score * float(case.values.abs().max())
    allowed = 2 * (theirs_error + rounding)
    assert error <= allowed, f"error {error:.3g} exceeds {allowed:.3g}"
    torch.testing.assert_close(found.logsumexp[present].double(), logsumexp, rtol=2e-6, atol=2e-5)


def assert_bits(found: TreeAttention, want: TreeAttention) -> None:
    assert_same(found, want, TreeAttention._fields)
