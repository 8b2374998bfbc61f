"""Counts of a kernel's hot path: instructions by unit, loads in flight, waits, barriers, and the loops that stream."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .machines import unit_of
from .sass import Graph, Instruction

Matcher = Callable[[Instruction], bool]
_REGISTER = re.compile(r"(?<![A-Z_])R(\d+)\b")
_WIDTH = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
TICKETS = ("ATOMG", "ATOM")


class Work(NamedTuple):
    """What a stretch of code costs a thread, on average over the threads of the block."""

    issued: float
    units: dict[str, float]
    serial: int = 0  # instructions that the longest thread runs
    exponentials: float = 0
    shuffles: float = 0
    barriers: int = 0
    fences: int = 0
    waits: int = 0  # times that code waits for loads issued before


class Stream(NamedTuple):
    """A loop, or a straight piece of code, that reads rows: one turn of it."""

    work: Work
    read: int  # bytes that a thread reads a turn
    written: int
    in_flight: int  # bytes that a thread has asked for before it needs the first
    loops: bool


class Counts(NamedTuple):
    """A kernel's hot path."""

    streams: list[Stream]  # without any: nothing is streamed, `once` is all
    once: Work  # set-up and merge of a block, outside the streams
    after: Work  # behind the ticket: what only the last block of a row or request does
    loops_counted_once: int
    tickets: int


def width(one: Instruction) -> int:
    """Bytes that a load or store moves a thread."""
    return next((_WIDTH[m] for m in one.opcode.split(".")[1:] if m in _WIDTH), 4)


def registers(one: Instruction) -> tuple[set[int], set[int]]:
    """(registers written, registers read); the first operand is the target, except of stores and branches."""
    operands = one.operands.split(",")
    stores = one.name in ("STG", "STS", "STL", "ST", "RED", "BAR", "BRA", "EXIT", "ATOMS")
    found = [[int(r) for r in _REGISTER.findall(o)] for o in operands]
    reads = {r for part in (found if stores else found[1:]) for r in part}
    writes: set[int] = set()
    if not stores and found and found[0]:
        count = max(1, width(one) // 4) if one.name in ("LDG", "LDS", "LD", "LDL", "LDC") else 2
        writes = set(range(found[0][0], found[0][0] + count))
    return writes, reads


def work_of(code: Iterable[Instruction], share: Callable[[Instruction], float]) -> Work:
    """Sum over a path. `share` is the part of the block's warps that run an instruction."""
    units: Counter[str] = Counter()
    issued = exponentials = shuffles = 0.0
    serial = barriers = fences = waits = 0
    pending: set[int] = set()
    for one in code:
        part = share(one)
        issued, serial = issued + part, serial + 1
        if unit := unit_of(one.opcode):
            units[unit] += part
        exponentials += part * one.opcode.startswith("MUFU.EX2")
        shuffles += part * (one.name == "SHFL")
        barriers += one.name == "BAR" and "ARV" not in one.opcode
        fences += one.name == "MEMBAR"
        writes, reads = registers(one)
        if reads & pending:  # all that was issued before is there then
            waits, pending = waits + 1, set()
        if one.name in ("LDG", "ATOMG", "ATOM", "LD"):
            pending |= writes
    return Work(issued, dict(units), serial, exponentials, shuffles, barriers, fences, waits)


def in_flight(code: list[Instruction], streamed: Matcher) -> int:
    """Bytes of streaming loads that are issued before a register of the first of them is read."""
    total, pending = 0, set[int]()
    for one in code:
        writes, reads = registers(one)
        if reads & pending:
            break
        if streamed(one):
            total += width(one)
            pending |= writes
    return total


def asynchronous(code: list[Instruction]) -> int:
    """Bytes of copies into shared memory that may still be under way when code waits for the oldest."""
    copied = sum(width(one) for one in code if one.name == "LDGSTS")
    groups = [
        int(m[1], 16) for one in code if one.name == "DEPBAR" and (m := re.search(r",\s*(0x[0-9a-f]+)", one.operands))
    ]
    return copied * (1 + max(groups, default=0)) if copied else 0


def widest(code: Iterable[Instruction], one_thread: Matcher, least: int) -> Matcher:
    """Whether a load streams: all threads run it, of the width, `least` or more, that most bytes are read with."""
    by_width: Counter[int] = Counter()
    for one in code:
        if one.name in ("LDG", "LDGSTS") and not one_thread(one) and width(one) >= least:
            by_width[width(one)] += width(one)
    best = 16 if 16 in by_width else max(by_width, key=lambda w: (by_width[w], w), default=0)
    return lambda one: one.name in ("LDG", "LDGSTS") and width(one) == best and not one_thread(one)


def count(
    graph: Graph,
    skip: Matcher,
    one_thread: Matcher,
    warps: int,
    one_turn: Matcher = lambda _: False,
    first_turn: Matcher = lambda _: False,
    least: int = 1,
) -> Counts:
    """Counts of the hot path of a kernel with `warps` warps a block. Rows are read in loads of `least` bytes or more.

    A loop with a line that is `one_turn` is no loop. One with a piece that only its `first_turn` runs is two pieces of
    straight code: that turn, and one without the piece.
    """
    is_ticket = [any(one.name in TICKETS for one in block.code) for block in graph.blocks]

    def weight(block: int) -> float:
        code = graph.blocks[block].code
        cold = sum(map(skip, code)) * 2 > len(code) or any(
            one.name == "CALL" and one.target not in graph.labels for one in code
        )
        return -1 if cold else len(code)

    share = lambda one: 1 / warps if one_thread(one) else 1.0  # noqa: E731
    ends = (lambda b: is_ticket[b]) if any(is_ticket[b] for b in graph.order) else (lambda _: False)
    path = graph.path(weight, ends=ends)
    hot = [b for b in path if weight(b) >= 0]
    code_of = lambda blocks: [one for b in blocks for one in graph.blocks[b].code]  # noqa: E731
    inside = lambda loop: {b for other in graph.loops if other.blocks < loop.blocks for b in other.blocks}  # noqa: E731
    turns_once = lambda loop: any(one_turn(one) for one in code_of(loop.blocks - inside(loop)))  # noqa: E731
    loops = [loop for loop in graph.loops if any(b in loop.blocks for b in hot) and not turns_once(loop)]
    nothing: Matcher = lambda _: False  # noqa: E731
    streams, used = [], set[int]()
    for loop in loops:
        body = [b for b in hot if b in loop.blocks and b not in used]
        code = code_of(body)
        streamed = widest(code, one_thread, least)
        read = sum(width(one) for one in code if streamed(one))
        if read >= 8 and len(code) > 8 and sum(map(one_thread, code)) * 2 < len(code):
            later = code_of(
                b for b in body if sum(map(first_turn, graph.blocks[b].code)) * 2 <= len(graph.blocks[b].code)
            )
            if len(later) < len(code):
                streams += [_stream(code, streamed, share, False), _stream(later, nothing, share, False)]
            else:
                streams.append(_stream(code, streamed, share, True))
            used.update(body)
    rest = [b for b in hot if b not in used]
    if not streams:
        code = code_of(rest)
        streamed = widest(code, one_thread, least)
        if sum(width(one) for one in code if streamed(one)) >= 8:
            streams.append(_stream(code, streamed, share, False))
            rest = []
    after = Work(0, {})
    if ends(path[-1]):
        after = work_of(code_of(b for b in graph.path(weight, start=path[-1])[1:] if weight(b) >= 0), share)
    quiet = sum(1 for loop in loops if not any(b in used for b in loop.blocks))
    return Counts(streams, work_of(code_of(rest), share), after, quiet, sum(is_ticket[b] for b in path))


def _stream(code: list[Instruction], streamed: Matcher, share: Callable[[Instruction], float], loops: bool) -> Stream:
    read = sum(width(one) for one in code if streamed(one))
    # Outside loops, narrow stores are partial results of a few threads.
    written = sum(width(one) for one in code if one.name == "STG" and (loops or width(one) == 16))
    return Stream(work_of(code, share), read, written, max(in_flight(code, streamed), asynchronous(code)), loops)
