"""Machine code of a kernel: instructions, basic blocks, loops, and the path that a streaming block takes.

The text is what `nvdisasm -c -gi` prints. A path is a list of blocks from the entry to the first ticket (a global
atomic that returns a value: behind it only the last block of a row or request goes on) or to the exit. Of two ways
the longer one is taken, unless one is cold: a slow path, or code that `skip` names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

_LABEL = re.compile(r"^(\.L\w+):")
_SECTION = re.compile(r"^\.text\.([\w$.]+):")
_LINE = re.compile(r'//## File "([^"]*)", line (\d+)(?: inlined at "([^"]*)", line (\d+))?')
_CODE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"`\((\.L\w+|\$?[\w$.]+)\)")
_BARRIER = re.compile(r"\b(B\d+)\b")


class Instruction(NamedTuple):
    """One line of machine code; `lines` are the source lines it comes from, the innermost first."""

    address: int
    guard: str
    opcode: str
    operands: str
    target: str
    lines: tuple[str, ...]

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]


class Block(NamedTuple):
    """Instructions that run one after the other, and the numbers of the blocks that can follow."""

    code: list[Instruction]
    next: list[int]


class Loop(NamedTuple):
    """Blocks of a natural loop; `head` is where it is entered."""

    head: int
    blocks: frozenset[int]


def functions(text: str) -> Iterator[tuple[str, list[Instruction], dict[str, int]]]:
    """(name, instructions, address of each label) of every function in a disassembly."""
    name, code, labels, lines, pending = "", [], {}, (), []
    for row in text.splitlines():
        if section := _SECTION.match(row):
            if code:
                yield name, code, labels
            name, code, labels, lines, pending = section[1], [], {}, (), []
        elif label := _LABEL.match(row):
            labels[label[1]] = code[-1].address + 16 if code else 0
        elif source := _LINE.search(row):
            pending.append(f"{source[1].rpartition('/')[2]}:{source[2]}")
        elif (found := _CODE.match(row)) and name:
            if pending:
                lines, pending = tuple(pending), []
            target = _TARGET.search(found[4])
            code.append(
                Instruction(
                    int(found[1], 16), found[2] or "", found[3], found[4].strip(), target[1] if target else "", lines
                )
            )
    if code:
        yield name, code, labels


class Graph:
    """Control flow of one function."""

    def __init__(self, code: list[Instruction], labels: dict[str, int]) -> None:
        self.code, self.labels = code, labels
        self._joins = _joins(code, labels)
        self.blocks = self._split()

    def _successors(self, one: Instruction) -> tuple[list[int], bool]:
        """(addresses that an instruction may jump to, whether it may also fall through)."""
        always = not one.guard and not re.match(r"^!?U?P\w+,", one.operands)
        target = self.labels.get(one.target)
        if one.name == "BRA" or (one.name == "CALL" and target is not None):  # Triton's loops may end in such a call
            if ".DIV" in one.opcode:  # taken by a warp that is not converged, which is a slow path
                return [], True
            return ([target] if target is not None else []), not always
        if one.name == "BSYNC":
            join = self._joins.get(one.address)
            return ([join], False) if join is not None and always else ([], True)
        return [], not (one.name in ("EXIT", "RET", "BRX", "JMP", "KILL", "BPT") and always)

    def _split(self) -> list[Block]:
        starts = {self.code[0].address} | set(self.labels.values())
        for one in self.code:
            jumps, _ = self._successors(one)
            if jumps or one.name in ("EXIT", "RET", "BRX", "JMP", "KILL", "BPT"):
                starts |= {one.address + 16, *jumps}
        made: list[list[Instruction]] = []
        for one in self.code:
            if one.address in starts or not made:
                made.append([])
            made[-1].append(one)
        at = {code[0].address: i for i, code in enumerate(made)}
        blocks = []
        for i, code in enumerate(made):
            jumps, falls = self._successors(code[-1])
            after = [at[a] for a in jumps if a in at] + ([i + 1] if falls and i + 1 < len(made) else [])
            blocks.append(Block(code, list(dict.fromkeys(after))))
        return blocks

    @cached_property
    def order(self) -> list[int]:
        """Reachable blocks, each before those that follow it, back edges aside."""
        seen, done, stack = {0}, [], [(0, iter(self.blocks[0].next))]
        while stack:
            block, rest = stack[-1]
            for after in rest:
                if after not in seen:
                    seen.add(after)
                    stack.append((after, iter(self.blocks[after].next)))
                    break
            else:
                done.append(block)
                stack.pop()
        return done[::-1]

    @cached_property
    def before(self) -> dict[int, list[int]]:
        """Predecessors of every reachable block."""
        found: dict[int, list[int]] = {b: [] for b in self.order}
        for b in self.order:
            for after in self.blocks[b].next:
                found[after].append(b)
        return found

    @cached_property
    def dominators(self) -> dict[int, int]:
        """Immediate dominator of every reachable block (Cooper, Harvey and Kennedy)."""
        rank = {b: i for i, b in enumerate(self.order)}
        idom = {0: 0}
        changed = True
        while changed:
            changed = False
            for b in self.order[1:]:
                known = [p for p in self.before[b] if p in idom]
                new = known[0]
                for other in known[1:]:
                    while new != other:
                        while rank[new] > rank[other]:
                            new = idom[new]
                        while rank[other] > rank[new]:
                            other = idom[other]
                if idom.get(b) != new:
                    idom[b], changed = new, True
        return idom

    def dominates(self, above: int, below: int) -> bool:
        """Whether every way to `below` leads through `above`."""
        while below not in (above, 0):
            below = self.dominators[below]
        return below == above

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops, inner ones before those around them."""
        bodies: dict[int, set[int]] = {}
        for b in self.order:
            for head in self.blocks[b].next:
                if self.dominates(head, b):
                    body, work = bodies.setdefault(head, {head}), [b]
                    while work:
                        one = work.pop()
                        if one not in body:
                            body.add(one)
                            work += self.before[one]
        return sorted((Loop(h, frozenset(b)) for h, b in bodies.items()), key=lambda loop: len(loop.blocks))

    def path(
        self,
        weight: Callable[[int], float],
        start: int = 0,
        within: frozenset[int] | None = None,
        ends: Callable[[int], bool] = lambda _: False,
    ) -> list[int]:
        """Heaviest way from `start` without back edges: to a block that `ends`, else to one without followers."""
        rank = {b: i for i, b in enumerate(self.order)}
        best: dict[int, tuple[float, int]] = {start: (weight(start), -1)}
        for b in self.order[rank[start] :]:
            if b not in best or ends(b):
                continue
            for after in self.blocks[b].next:
                if rank[after] <= rank[b] or (within is not None and after not in within):
                    continue
                total = best[b][0] + weight(after)
                if after not in best or total > best[after][0]:
                    best[after] = (total, b)
        last = [b for b in best if ends(b)] or list(best)
        b = max(last, key=lambda b: best[b][0])
        found = []
        while b != -1:
            found.append(b)
            b = best[b][1]
        return found[::-1]


def _joins(code: list[Instruction], labels: dict[str, int]) -> dict[int, int]:
    """Where each BSYNC goes on: the target of the last BSSY before it that names the same barrier."""
    opened: dict[str, list[int]] = {}
    found = {}
    for one in code:
        barrier = _BARRIER.search(one.operands)
        if barrier is None:
            continue
        if one.name == "BSSY" and one.target in labels:
            opened.setdefault(barrier[1], []).append(labels[one.target])
        elif one.name == "BSYNC" and opened.get(barrier[1]):
            targets = opened[barrier[1]]
            found[one.address] = next((t for t in targets if t == one.address + 16), targets[-1])
    return found
