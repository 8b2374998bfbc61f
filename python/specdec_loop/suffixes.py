"""Continuations of each suffix of a text with their counts: a trie of repeated sequences."""

from __future__ import annotations

from collections.abc import Sequence

TOKEN_BITS = 32  # of a key of children


class Trie:
    """Token sequences, numbered from the empty one, 0: how often each occurred, and what followed it most often.

    Most sequences occur once. What followed such a one stands in its text, and it has no children until it comes again:
    a text of n tokens has about n sequences here, not one for each of those in it.

    Columns of numbers, no objects: Python's garbage collector would count these, and look through all that torch and
    transformers have loaded whenever a quarter more of them has been made: 50 us a token were seen in place of 6.
    """

    def __init__(self) -> None:
        """The empty sequence, which occurs everywhere."""
        self.counts = [2]
        self.continued = [0]  # times that something followed; 0: the children are not made yet
        self.best = [0]  # child; of equals the one that came to it first; 0: none
        self.rows: list[Sequence[int]] = [()]  # text of the first occurrence
        self.ends = [0]  # place behind it
        self.children: dict[int, int] = {}  # by sequence << TOKEN_BITS | token

    def learn(self, sequences: Sequence[int], token: int, row: Sequence[int], end: int) -> list[int]:
        """A token, which stands before `end`, followed those sequences that came again; returns the longer ones."""
        counts, continued, best, children = self.counts, self.continued, self.best, self.children
        came_again = [n for n in sequences if counts[n] > 1]  # what follows another stands in the text
        longer = []
        for sequence in came_again:
            key = sequence << TOKEN_BITS | token
            child = children.get(key)
            if child is None and not continued[sequence]:
                child = self._first(sequence, token)
            if child is None:
                child = self._add(key, row, end)
            else:
                counts[child] += 1
            continued[sequence] += 1
            if not (most := best[sequence]) or counts[child] > counts[most]:
                best[sequence] = child
            longer.append(child)
        return longer

    def find(self, sequences: Sequence[int], token: int) -> list[int]:
        """Those that are known with a token behind them, longer by it."""
        children, continued, longer = self.children, self.continued, []
        for sequence in sequences:
            child = children.get(sequence << TOKEN_BITS | token)
            if child is None and not continued[sequence]:
                child = self._first(sequence, token)
            if child is not None:
                longer.append(child)
        return longer

    def follow(self, sequence: int, budget: int, least: float) -> tuple[float, list[int]]:
        """Likeliest continuation, up to `budget` tokens of a product of frequencies of `least`; the products' sum."""
        tokens: list[int] = []
        score, product = 0.0, 1.0
        while len(tokens) < budget:
            row, end = self.rows[sequence], self.ends[sequence]
            if self.counts[sequence] == 1:
                rest = row[end : end + budget - len(tokens)]
                return score + product * len(rest), [*tokens, *rest]
            if not self.continued[sequence]:
                self._first(sequence)
            if not (child := self.best[sequence]):
                break
            product *= self.counts[child] / self.continued[sequence]
            if product < least:
                break
            tokens.append(self.rows[child][self.ends[child] - 1])
            score += product
            sequence = child
        return score, tokens

    def _first(self, sequence: int, token: int = -1) -> int | None:
        """Make the first child, of the text of the first occurrence; None: it is not by that token."""
        row, end = self.rows[sequence], self.ends[sequence]
        if end == len(row):
            return None
        self.continued[sequence] = 1
        child = self.best[sequence] = self._add(sequence << TOKEN_BITS | row[end], row, end + 1)
        return child if row[end] == token else None

    def _add(self, key: int, row: Sequence[int], end: int) -> int:
        """A sequence that occurs for the first time."""
        new = self.children[key] = len(self.counts)
        self.counts.append(1)
        self.continued.append(0)
        self.best.append(0)
        self.rows.append(row)
        self.ends.append(end)
        return new


class Suffixes:
    """A text's last 0, 1, 2, .. tokens in a trie; a longer suffix is there only if the shorter ones are."""

    def __init__(self, trie: Trie, depth: int) -> None:
        """Begin a text; `depth` bounds the length of a suffix and what is counted behind it."""
        self.trie, self.depth = trie, depth
        self.found = [0]

    def learn(self, row: Sequence[int], i: int) -> None:
        """Token i of the text, counted."""
        self.found = [0, *self.trie.learn(self.found, row[i], row, i + 1)][: self.depth]

    def find(self, token: int) -> None:
        """One more token of a text that the trie does not hold."""
        self.found = [0, *self.trie.find(self.found, token)][: self.depth]

    def follow(self, matched: int, budget: int, least: float) -> tuple[float, list[int]]:
        """Continuation of the last `matched` tokens, see `Trie.follow`."""
        return self.trie.follow(self.found[matched], budget, least)
