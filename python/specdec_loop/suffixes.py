"""What followed each suffix of a text, and how often: a trie that counts sequences as they come again."""

from __future__ import annotations

from collections.abc import Sequence


class Node:
    """A token sequence: how often it occurred, how often something followed, and what did so most often.

    Most sequences occur once. What followed such a one stands in its text, and it has no children until it comes again:
    a text of n tokens has about n nodes, not one for each of the sequences in it.
    """

    __slots__ = ("at", "best", "children", "continued", "count", "row", "token")

    def __init__(self, token: int, row: Sequence[int], at: int) -> None:
        """A sequence that occurs for the first time; `token` is its last one, and stands before place `at` of `row`."""
        self.token, self.count, self.continued = token, 1, 0
        self.row, self.at = row, at
        self.children: dict[int, Node] | None = None
        self.best: Node | None = None  # child; of equals the one that came to it first

    def learn(self, token: int, row: Sequence[int], at: int) -> Node:
        """A token followed, which stands before `at`; returns the longer sequence."""
        children = self.known() if self.children is None else self.children
        child, best = children.get(token), self.best
        if child is None:
            child = children[token] = Node(token, row, at)
        else:
            child.count += 1
        self.continued += 1
        if best is None or child.count > best.count:
            self.best = child
        return child

    def known(self) -> dict[int, Node]:
        """Its children, made of the text of its first occurrence where it has none yet."""
        if self.children is None:
            self.children = {}
            if self.at < len(self.row):
                self.learn(self.row[self.at], self.row, self.at + 1)
        return self.children

    def follow(self, budget: int, least: float) -> tuple[float, list[int]]:
        """What follows most often, up to `budget` tokens of a product of frequencies of `least`; the products' sum."""
        tokens: list[int] = []
        node, score, product = self, 0.0, 1.0
        while len(tokens) < budget:
            if node.count == 1 and node.children is None:
                rest = node.row[node.at : node.at + budget - len(tokens)]
                return score + product * len(rest), [*tokens, *rest]
            node.known()
            if (child := node.best) is None:
                break
            product *= child.count / node.continued
            if product < least:
                break
            tokens.append(child.token)
            score += product
            node = child
        return score, tokens


class Suffixes:
    """Nodes of a text's last 0, 1, 2, .. tokens in a trie; a longer suffix is there only if the shorter ones are."""

    def __init__(self, root: Node, depth: int) -> None:
        """Begin a text; `depth` bounds the length of a suffix and what is counted behind it."""
        self.root, self.depth = root, depth
        self.nodes = [root]

    def learn(self, row: Sequence[int], i: int) -> None:
        """Token i of the text, counted."""
        came_again = [node for node in self.nodes if node.count > 1]  # what follows another stands in the text
        longer = [node.learn(row[i], row, i + 1) for node in came_again]
        self.nodes = [self.root, *longer][: self.depth]

    def find(self, token: int) -> None:
        """One more token of a text that the trie does not hold."""
        longer = [self.root]
        for node in self.nodes:
            children = node.children
            child = (node.known() if children is None else children).get(token)
            if child is not None:
                longer.append(child)
        self.nodes = longer[: self.depth]


def empty() -> Node:
    """The root of a trie: nothing, which occurs everywhere."""
    root = Node(-1, (), 0)
    root.count = 2
    return root
