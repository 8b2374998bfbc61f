"""Prefix cache over calls: a prompt that begins like an earlier text reuses its cache rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .sequences import Sequences, common
from .tree_cache import TreeCache


class PrefixCache:
    """A model's cache, kept from call to call of `generate`, as for the turns of a conversation.

    Request b of a call is compared with request b of the call before; rows of the tokens that both begin with are kept,
    whatever follows them. So the texts are those of a call without past, but for rounding in the model. Where a model
    has recurrent layers, a text is kept only if the new prompt begins with all that the cache holds of it.

    Example:
        >>> from specdec_kernels import Sampling
        >>> from specdec_loop import PrefixCache, generate
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
        >>> model, past = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)), PrefixCache(capacity=64)
        >>> turn = dict(sampling=Sampling.full(1, temperature=0.0), max_new_tokens=8, stop=(), past=past)
        >>> first = generate(model, None, [[5, 6, 7]], **turn)
        >>> second = generate(model, None, [[5, 6, 7, *first.tokens[0], 8]], **turn)  # runs two of its twelve tokens
    """

    def __init__(self, capacity: int) -> None:
        """Make room for texts of up to `capacity` tokens, the drafts of a step behind them included.

        Raises:
            ValueError: the capacity is no int of at least 1.
        """
        if not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"PrefixCache: capacity must be an int >= 1, got {capacity!r}")
        self.capacity = capacity
        self._model: Any = None
        self.cache: TreeCache | None = None
        self._rows: list[list[int]] = []

    def open(self, model: Any, sequences: Sequences, *, reuse: bool = True) -> tuple[TreeCache, int]:
        """The cache, with the rows that each prompt begins with; the last token of a prompt is never one of them.

        Args:
            model: always the same.
            sequences: whose prompts are to be run.
            reuse: False: forget everything.

        Returns:
            The cache, and how many tokens each request has to run: as many as the one that lacks most, at least one.

        Raises:
            ValueError: too small a capacity, another model, or another number of requests.
        """
        if sequences.tokens.shape[1] > self.capacity:
            need = sequences.tokens.shape[1]
            raise ValueError(f"generate: past must be of a capacity of at least {need}, got {self.capacity}")
        if self.cache is None:
            self.cache = self._begin(model, sequences.batch)
        if self._model is not model:
            raise ValueError("generate: past must be used with the model that it was first used with, got another")
        if len(self._rows) != sequences.batch:
            raise ValueError(f"generate: past must be used with {len(self._rows)} requests, got {sequences.batch}")
        rows = zip(self._rows, sequences.rows, strict=True)
        kept = [min(common(old, new), len(new) - 1) if reuse else 0 for old, new in rows]
        self._rows = [[] for _ in sequences.rows]  # what is in the cache is not known again until `close`
        kept = self._truncate(self.cache, kept)
        lacking = max(end - n for end, n in zip(sequences.ends, kept, strict=True))
        # Every request writes `lacking` rows behind those that it keeps.
        fitting = self._truncate(self.cache, [min(n, self.capacity - lacking) for n in kept])
        if self.cache.has_states and fitting != kept:  # some have lost all, and no longer lack as many
            self._truncate(self.cache, [0] * len(kept))
            lacking = max(sequences.ends)
        return self.cache, lacking

    def load(self, model: Any, rows: list[list[int]], layers: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        """Take rows of texts from elsewhere.

        Args:
            model: whose keys and values they are.
            rows: tokens of each text.
            layers: keys and values ``[batch, head, token, dim]`` of each layer; those behind a text's end are not kept.
                None: the layer shares those of another.
        """
        self.cache, self._rows = self._begin(model, len(rows)), rows
        for i, layer in enumerate(layers):
            if layer is not None:
                self.cache.update(*layer, i)
        self.cache.commit(torch.tensor([len(row) - 1 for row in rows], dtype=torch.int32, device=model.device))

    def close(self, sequences: Sequences) -> None:
        """Remember which texts the cache holds; rows of their last tokens, if any, were left by a forward gone bad."""
        assert self.cache is not None
        self._rows = [list(row) for row in sequences.rows]
        self._truncate(self.cache, [len(row) - 1 for row in self._rows])

    def _begin(self, model: Any, batch: int) -> TreeCache:
        """An empty cache."""
        self._model, self._rows = model, [[] for _ in range(batch)]
        return TreeCache(model.config, batch=batch, capacity=self.capacity, dtype=model.dtype, device=model.device)

    def _truncate(self, cache: TreeCache, kept: list[int]) -> list[int]:
        """Keep at most so many rows of each request; returns how many there are.

        Recurrent layers keep all that they have read, or nothing.
        """
        if cache.has_states:
            kept = [n if n >= held else 0 for n, held in zip(kept, cache.read_lengths().tolist(), strict=True)]
        cache.truncate(torch.tensor(kept, device=cache.lengths.device))
        return cache.read_lengths().tolist()
