"""Random edits of requests, and the same spelled with dicts and loops, one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import Edits, TokenCounts, count_tokens

INF = float("inf")


def make_counts(batch: int, vocab: int, g: torch.Generator, *, tokens: int = 12) -> TokenCounts:
    """Texts of a prompt and what was generated, one a slot; two slots more than requests."""
    counts = TokenCounts.empty(batch + 2, 2 * tokens)
    texts = torch.randint(0, vocab, (2, batch + 2, tokens), generator=g)
    count_tokens(counts, texts[0], is_prompt=True, backend="reference")
    count_tokens(counts, texts[1], backend="reference")
    return counts


def make_edits(batch: int, vocab: int, *, seed: int = 0, text: bool = True) -> Edits:
    """All edits at once; every third request has its penalties off, ids reach beyond the vocabulary."""
    g = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> Tensor:
        return torch.randint(-1, vocab + 2, (batch, *shape), generator=g, dtype=torch.int32)

    def penalty(off: float, spread: float) -> Tensor:
        values = off + spread * torch.rand(batch, generator=g)
        values[::3] = off
        return values

    different = torch.stack([torch.randperm(vocab, generator=g)[:6] for _ in range(batch)]).int()
    bias = torch.randn(batch, different.shape[1], generator=g)
    bias[:, 1] = -INF
    words = ids(5, 3)
    words[:, :2, 0] = -1
    words[:, 0, 1] = -1
    return Edits(
        bias_ids=torch.where(bias > 1, -1, different), bias=bias,
        repetition=penalty(1.0, 0.5), frequency=penalty(0.0, 0.6), presence=penalty(0.0, 0.8),
        counts=make_counts(batch, vocab, g) if text else TokenCounts(),
        slots=torch.randperm(batch + 2, generator=g)[:batch].int() if text else None,
        stop_ids=ids(2), min_tokens=torch.arange(batch, dtype=torch.int32) % 4,
        bad_words=words, tail=ids(4),
    )  # fmt: skip


def edited(logits: Tensor, edits: Edits, b: int, drafts: list[int]) -> list[float]:
    """The logits of one row of request b behind some drafts, changed id by id in float32."""
    drafts = [x for x in drafts if x != -1]
    row = logits.float().clone()
    vocab = len(row)
    if edits.bias_ids is not None and edits.bias is not None:
        for x, bias in zip(edits.bias_ids[b].tolist(), edits.bias[b], strict=True):
            if 0 <= x < vocab:
                row[x] += bias
    slot = b if edits.slots is None else int(edits.slots[b])
    text = edits.counts.of(slot) if edits.counts.token_ids is not None else {}
    for x in drafts:
        times, in_prompt = text.get(x, (0, False))
        text[x] = (times + 1, in_prompt)
    for x, (times, in_prompt) in text.items():
        if not 0 <= x < vocab:
            continue
        if edits.repetition is not None and (times or in_prompt):
            row[x] = row[x] / edits.repetition[b] if row[x] > 0 else row[x] * edits.repetition[b]
        frequency, presence = (torch.zeros(()) if p is None else p[b] for p in (edits.frequency, edits.presence))
        if times:
            row[x] -= frequency * times + presence
    if edits.stop_ids is not None and edits.min_tokens is not None and len(drafts) < int(edits.min_tokens[b]):
        for x in edits.stop_ids[b].tolist():
            if 0 <= x < vocab:
                row[x] = -INF
    if edits.bad_words is not None:
        before = [] if edits.tail is None else edits.tail[b].tolist()
        for word in edits.bad_words[b].tolist():
            *rest, last = word
            while rest and rest[0] == -1:
                rest.pop(0)
            stands = (before + drafts)[len(before) + len(drafts) - len(rest) :]
            if 0 <= last < vocab and rest == stands:
                row[last] = -INF
    return row.tolist()


TOGETHER = {  # fields of Edits that are one edit, by the field that names it
    "bias": ("bias_ids", "bias"), "stop_ids": ("stop_ids", "min_tokens"), "bad_words": ("bad_words", "tail"),
    "repetition": ("repetition", "counts", "slots"), "frequency": ("frequency", "counts", "slots"),
    "presence": ("presence",),
}  # fmt: skip


def alone(every: Edits, field: str) -> Edits:
    """The edit that a field names and no other; nothing where it names none."""
    return Edits(**{name: getattr(every, name) for name in TOGETHER.get(field, ())})
