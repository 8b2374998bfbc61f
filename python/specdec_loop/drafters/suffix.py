"""Suffix decoding: continuations by how often they followed, in this text and in texts before it (Oliaro et al.)."""

from __future__ import annotations

from specdec_kernels import Sampling

from ..text import Text
from .base import Draft, Drafter, padded


class _Node:
    """A token sequence: how often it occurred, and how often something followed."""

    __slots__ = ("children", "continued", "count")

    def __init__(self) -> None:
        self.count = self.continued = 0
        self.children: dict[int, _Node] = {}


class _Suffixes:
    """Nodes of a text's last 0, 1, 2, .. tokens in a trie; a longer suffix is there only if the shorter ones are."""

    def __init__(self, root: _Node, depth: int) -> None:
        self.root, self.depth = root, depth
        self.nodes = [root]

    def learn(self, token: int) -> None:
        """One more token of the text, counted."""
        for node in self.nodes:
            node.continued += 1
            node.children.setdefault(token, _Node()).count += 1
        self.follow(token)

    def follow(self, token: int) -> None:
        """One more token of the text, not counted."""
        longer = [node.children[token] for node in self.nodes if token in node.children]
        self.nodes = [self.root, *longer][: self.depth]


class SuffixDecoding(Drafter):
    """Follows the likeliest continuation of each suffix of the text, and drafts the one that promises most tokens.

    A continuation's token is drafted while the product of the frequencies up to it is at least `least`; the sum of
    these products is the expected number of accepted tokens. Suffixes are looked up in the text itself and among the
    continuations of earlier `generate` calls; the text itself wins a tie, and the longer suffix.
    """

    def __init__(self, *, depth: int = 24, factor: float = 1.0, offset: float = 0.0, least: float = 0.1) -> None:
        """Remember sequences of up to `depth` tokens.

        Args:
            depth: of the tries; a suffix and what is drafted behind it together are no longer.
            factor: a suffix of m tokens is trusted for ``factor * m + offset`` drafts.
            offset: see factor.
            least: smallest product of frequencies of a draft.

        Raises:
            ValueError: depth below 2.
        """
        if depth < 2:
            raise ValueError(f"SuffixDecoding: depth must be at least 2, got {depth}")
        self.depth, self.factor, self.offset, self.least = depth, factor, offset, least
        self._past = _Node()

    def begin(self, text: Text, *, rule: str, sampling: Sampling, longest: int) -> None:
        """A trie for each text."""
        self._read = [0] * text.batch
        self._own = [_Suffixes(_Node(), self.depth) for _ in text.rows]
        self._others = [_Suffixes(self._past, self.depth) for _ in text.rows]

    def draft(self, text: Text, length: int) -> Draft:
        """Read what is new in each text, then follow its suffixes."""
        return Draft(padded([tokens for _, tokens in self.propose(text, length)], text.tokens.device))

    def propose(self, text: Text, length: int) -> list[tuple[float, list[int]]]:
        """Expected accepted tokens, and the draft, of each request."""
        found = []
        for b, row in enumerate(text.rows):
            for token in row[self._read[b] :]:
                self._own[b].learn(token)
                self._others[b].follow(token)
            self._read[b] = len(row)
            own, other = self._best(self._own[b], length), self._best(self._others[b], length)
            found.append(max(own, other, key=lambda draft: draft[0]))  # the first of equals
        return found

    def end(self, text: Text) -> None:
        """Remember the continuations for later texts."""
        for row, prompt in zip(text.rows, text.prompts, strict=True):
            suffixes = _Suffixes(self._past, self.depth)
            for token in row[prompt:]:
                suffixes.learn(token)

    def _best(self, suffixes: _Suffixes, length: int) -> tuple[float, list[int]]:
        """Expected accepted tokens, and the draft."""
        best: tuple[float, list[int]] = (0.0, [])
        for matched, node in enumerate(suffixes.nodes[1:], 1):
            found = self._continue(node, min(length, int(self.factor * matched + self.offset)))
            if found[0] >= best[0]:
                best = found
        return best

    def _continue(self, node: _Node, budget: int) -> tuple[float, list[int]]:
        tokens: list[int] = []
        score, product = 0.0, 1.0
        while len(tokens) < budget and node.children:
            token, child = max(node.children.items(), key=lambda item: item[1].count)
            product *= child.count / node.continued
            if product < self.least:
                break
            tokens.append(token)
            score += product
            node = child
        return score, tokens
