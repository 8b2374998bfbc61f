"""Lookahead decoding (Fu et al.): the target guesses its own n-grams by Jacobi iteration beside the text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels import Sampling, tree_from_lookahead, tree_from_sequences

from ..sequences import Sequences
from .base import Draft, Drafter, Outcome, Part


class Lookahead(Drafter):
    """A window of guesses rides in every target forward; its columns become n-grams, which are drafts later.

    The window has ``level - 1`` rows. Row 0 begins with the last token; token j of row r stands r + j places behind it.
    A forward gives the token that follows each column: with it the column is an n-gram of `level` tokens, which goes
    to the front of the pool; rows move up by one and the new tokens are the last row. Drafts are the `guesses` newest
    n-grams of the pool that begin with the last token, merged to a tree.
    """

    rules = ("match", "greedy", "typical", "target_only", "recursive")
    is_whole = True

    def __init__(self, level: int = 4, window: int = 8, guesses: int = 4, *, pool: int = 512) -> None:
        """Choose the sizes of the paper: N, W and G.

        Args:
            level: tokens of an n-gram, N, at least 2.
            window: columns, W, at least 1.
            guesses: most n-grams verified a step, G, at least 1.
            pool: n-grams kept of a request.

        Raises:
            ValueError: a size out of range.
        """
        for name, value, least in (("level", level, 2), ("window", window, 1), ("guesses", guesses, 1)):
            if value < least:
                raise ValueError(f"Lookahead: {name} must be at least {least}, got {value}")
        if pool < max(guesses, window):
            raise ValueError(f"Lookahead: pool must hold guesses and window, got {pool}")
        self.level, self.window, self.guesses, self.pool = level, window, guesses, pool

    def nodes(self, length: int) -> int:
        """The root, the guesses, and the window, whose first token is the root."""
        return self._trie_nodes(length) + (self.level - 1) * self.window - 1

    def begin(self, sequences: Sequences, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Fill the window from the prompts; any tokens do."""
        device = sequences.tokens.device
        some = torch.arange((self.level - 1) * self.window, device=device) % sequences.lengths[:, None]
        self._rows = sequences.tokens.gather(1, some).view(sequences.batch, self.level - 1, self.window)
        self._pool = torch.full((sequences.batch, self.pool, self.level), -1, dtype=torch.int64, device=device)
        self._links = tree_from_lookahead(self.level, self.window, 0, device=device)[1:]
        self._behind: dict[int, Tensor] = {}  # the same behind so many candidates, for each request
        self._age = torch.arange(self.pool, device=device)

    def join(self, sequences: Sequences, parts: Sequence[Part]) -> None:
        """Take windows and pools."""
        self._rows = torch.cat([part.rows(part.drafter._rows) for part in parts])
        self._pool = torch.cat([part.rows(part.drafter._pool) for part in parts])

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """The guesses as candidates, the window behind them."""
        root = sequences.last(1)
        fits = self._pool[:, :, 0] == root
        newest = torch.where(fits, self._age, self.pool).topk(self.guesses, 1, largest=False).values
        place = newest.clamp(max=self.pool - 1)[:, :, None].expand(-1, -1, self.level)
        grams = self._pool.gather(1, place)[:, :, 1 : 1 + length]
        guesses = torch.where(newest[:, :, None] < self.pool, grams, -1).contiguous()
        trie = tree_from_sequences(guesses, num_nodes=self._trie_nodes(length))
        first = trie.parents.shape[1] - 1  # the window's nodes come behind, but for its first, which is the root
        if first not in self._behind:
            self._behind[first] = torch.where(self._links > 0, self._links + first, 0).repeat(sequences.batch, 1)
        self._rows[:, :1, 0] = root
        return Draft(
            torch.cat([trie.token_ids, self._rows.flatten(1)[:, 1:]], 1),
            parents=torch.cat([trie.parents, self._behind[first]], 1),
            max_depth=guesses.shape[2],
            candidates=first + 1,
        )

    def commit(self, sequences: Sequences, outcome: Outcome) -> None:
        """Columns and the tokens behind them go to the pool; the window moves up."""
        if outcome.path is None:
            return  # a step without drafts: the window was not run
        last_row = outcome.logits[:, -self.window :]
        if self.level == 2:  # it is row 0, which begins with the root
            last_row = torch.cat([outcome.logits[:, :1], last_row[:, 1:]], 1)
        new = last_row.argmax(-1)[:, None]
        columns = torch.cat([self._rows, new], 1)
        self._remember(columns.mT)
        self._rows = columns[:, 1:].contiguous()

    def _remember(self, grams: Tensor) -> None:
        """Put n-grams ``[batch, window, level]`` to the front; an older copy of one is forgotten."""
        is_old = (self._pool[:, :, None] == grams[:, None]).all(-1).any(-1)
        kept = torch.where(is_old[:, :, None], -1, self._pool)
        self._pool = torch.cat([grams, kept], 1)[:, : self.pool]

    def _trie_nodes(self, length: int) -> int:
        return 1 + self.guesses * min(length, self.level - 1)
