"""Ragged batches on a TreeCache, each request beside its own sequential decoding."""

from __future__ import annotations

import random
from typing import Any

import torch
from caches import counts, padded, random_tree
from models import VOCAB, Sequential
from torch import Tensor

from specdec_kernels import use_backend
from specdec_loop import TreeCache

CLOSE = 1e-5  # of float32 logits of order 1; a row in the wrong place moves them by 1e-2 or more
PROMPTS = [1, 7, 4]  # a prompt of one token; longer than the window; in between


def new_cache(network: Any, batch: int = 3, capacity: int = 128) -> TreeCache:
    return TreeCache(network.config, batch=batch, capacity=capacity, dtype=network.dtype, device=network.device)


def random_tokens(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(count)]


def right_padded(rows: list[list[int]]) -> Tensor:
    return torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])


def assert_close(got: Tensor, want: Tensor, what: str, close: float = CLOSE) -> None:
    error = float((got - want).abs().max())
    assert error <= close, f"{what}: logits differ by {error:.3g}"


class Requests:
    """A ragged batch on one TreeCache, each request beside its own sequential decoding."""

    def __init__(
        self, network: Any, prompts: list[int], rng: random.Random, capacity: int = 128, close: float = CLOSE
    ) -> None:
        self.network, self.rng, self.close = network, rng, close
        self.cache = new_cache(network, len(prompts), capacity)
        self.alone = [Sequential(network) for _ in prompts]
        self.texts = [random_tokens(n, rng) for n in prompts]
        logits = network(right_padded(self.texts), **self.cache.chain_inputs(max(prompts))).logits
        self.cache.commit(counts(prompts) - 1)
        for b, text in enumerate(self.texts):
            assert_close(logits[b, : len(text)], self.alone[b].feed(text), f"prompt of request {b}", close)

    def check(self, b: int, logits: Tensor, tokens: list[int]) -> None:
        """Logits [tokens, vocab] are those of sequential decoding, which then has these tokens."""
        assert_close(logits, self.alone[b].feed(tokens), f"request {b} after {len(self.texts[b])} tokens", self.close)
        self.texts[b] += tokens

    def tree_step(self, nodes: int, mover: str = "cpu", calls: int = 1) -> None:
        """Random trees, some padded, some requests idle; a random path of each is accepted."""
        rng, batch = self.rng, len(self.texts)
        parents, tokens, paths, accepted = [], [], [], []
        for _ in range(batch):
            tree = random_tree(rng.randint(1, nodes), rng)
            path, node = [], 0
            while (children := [n for n, p in enumerate(tree) if p == node]) and rng.random() < 0.8:
                path.append(node := rng.choice(children))
            parents.append(tree + [-1] * (nodes - len(tree)))
            tokens.append(random_tokens(nodes, rng))
            paths.append(path)
            accepted.append(-1 if rng.random() < 0.1 else len(path))
        logits = self.run_nodes(torch.tensor(tokens), torch.tensor(parents), calls)
        with use_backend(mover):
            status = self.cache.commit(counts(accepted), padded(paths, nodes))
        assert status.tolist() == [0] * batch
        for b in range(batch):
            if accepted[b] >= 0:
                kept = [0, *paths[b]]
                self.check(b, logits[b, kept], [tokens[b][n] for n in kept])
        assert self.cache.lengths.tolist() == [len(t) for t in self.texts]

    def run_nodes(self, tokens: Tensor, parents: Tensor, calls: int) -> Tensor:
        """The nodes in one forward, or in several that each add some."""
        nodes = tokens.shape[1]
        ends = [*sorted(self.rng.sample(range(1, nodes), min(calls, nodes) - 1)), nodes]
        rows = []
        for start, end in zip([0, *ends], ends, strict=False):
            inputs = self.cache.tree_inputs(parents[:, :end].contiguous())
            rows.append(self.network(tokens[:, start:end], **inputs).logits)
        return torch.cat(rows, 1)

    def chain_step(self, tokens: int) -> None:
        """Random drafts, of which each request accepts some."""
        drafts = [random_tokens(tokens, self.rng) for _ in self.texts]
        accepted = [self.rng.randrange(-1, tokens) for _ in self.texts]
        logits = self.network(torch.tensor(drafts), **self.cache.chain_inputs(tokens)).logits
        assert self.cache.commit(counts(accepted)).tolist() == [0] * len(drafts)
        for b, count in enumerate(accepted):
            if count >= 0:
                self.check(b, logits[b, : count + 1], drafts[b][: count + 1])
