"""The order that an assembler gives instructions: the simulator issues those of a warp in the order of its PTX.

nvcc and Triton write PTX in the order of the source: a value is used right behind the exponential that makes it, and
ptxas moves independent instructions between the two. This is its first step alone, a list schedule of each basic
block: among the instructions whose operands are there, the one with the longest path to the end goes first. Registers
are not counted.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from typing import NamedTuple

# Cycles until a result can be used, as the simulator's configurations of Ampere have them; 5 for the rest.
LATENCIES = {
    "ld.global": 500, "ld.shared": 30, "ld.param": 20, "ld": 300, "atom": 500, "shfl": 30, "ex2": 105, "lg2": 105,
    "rcp": 105, "sqrt": 105, "rsqrt": 105, "sin": 105, "cos": 105, "div": 150, "rem": 150,
}  # fmt: skip
INSTRUCTION = re.compile(r"(?:@!?(%?\w+)\s+)?([a-z][\w.:]*)\s+(.*);")
REGISTER = re.compile(r"%[\w$]+")
NO_RESULT = ("st", "red", "prefetch")
IN_ORDER = ("shfl", "vote", "activemask", "match", "nanosleep")  # a warp's lanes meet here
WRITES = ("st", "red", "atom", "membar")
END = ("bra", "brx", "ret", "exit", "call", "bar", "barrier", "trap")


class _Node(NamedTuple):
    latency: int
    followers: dict[int, int]  # cycles after which each may be issued


def scheduled(lines: list[str]) -> list[str]:
    """The lines, with the instructions of each basic block in a better order."""
    made, block = list[str](), list[tuple[str, re.Match[str]]]()
    for line in lines:
        found = INSTRUCTION.fullmatch(line.strip())
        if found is not None and found[2].split(".")[0] not in END:
            block.append((line, found))
            continue
        if line.startswith(".reg") and block:
            made.append(line)  # names are unique: they may be declared early
            continue
        made += _ordered(block)
        made.append(line)
        block = []
    return made + _ordered(block)


def halved(lines: list[str]) -> list[str]:
    """The lines, with `mul.lo` and `mul.hi` in place of products of 64 bits whose halves alone are used, each once.

    To an assembler a half of a product is a register; in PTX it is one more shift and two conversions.
    """
    text = "\n".join(lines)
    count = Counter(REGISTER.findall(text))
    high = {m[2]: m[1] for m in re.finditer(r"(?m)^\s*shr\.u64 (%\w+), (%\w+), 32;$", text)}
    low = {m[2]: m[1] for m in re.finditer(r"(?m)^\s*cvt\.u32\.u64 (%\w+), (%\w+);$", text)}
    made, gone = dict[str, str](), set[str]()
    for product, factors in re.findall(r"(?m)^\s*mul\.wide\.u32 (%\w+), (.*);$", text):
        half = high.get(product, "")
        halves = [name for name in (low.get(product), low.get(half)) if name is not None]
        ends = 1 + (product in low) + (half != "")  # places where the product may stand
        if count[product] != ends or (half and (count[half] != 2 or half not in low)) or not halves:
            continue
        names = {"lo": low.get(product), "hi": low.get(half)}
        made[product] = "\n".join(f"mul.{part}.u32 {name}, {factors};" for part, name in names.items() if name)
        gone |= {product, half}
    kept = []
    for line in lines:
        found = INSTRUCTION.fullmatch(line.strip())
        given = REGISTER.findall(found[3]) if found else []
        if found and found[2] == "mul.wide.u32" and given[0] in made:
            kept += made[given[0]].split("\n")
        elif not (found and found[2] in ("shr.u64", "cvt.u32.u64") and given[1] in gone):
            kept.append(line)
    return kept


def _latency(opcode: str) -> int:
    parts = opcode.split(".")
    return LATENCIES.get(".".join(parts[:2]), LATENCIES.get(parts[0], 5))


def _depends(found: re.Match[str]) -> tuple[set[str], set[str]]:
    """Registers that an instruction writes and reads."""
    guard, opcode, given = found.groups()
    first = re.match(r"\{[^}]*\}|[^,]*", given)
    assert first is not None
    has_result = opcode.split(".")[0] not in (*NO_RESULT, "membar")
    written = set(REGISTER.findall(first[0])) if has_result else set()
    read = set(REGISTER.findall(given[first.end() :] if has_result else given))
    if guard:  # else the result is what was there
        read |= {guard} | written
    return written, read


def _ordered(block: list[tuple[str, re.Match[str]]]) -> list[str]:
    if len(block) < 3:
        return [line for line, _ in block]
    nodes = [_Node(_latency(found[2]), {}) for _, found in block]
    waits = [0] * len(block)

    def after(i: int | None, j: int, cycles: int) -> None:
        if i is not None and i != j:
            if j not in nodes[i].followers:
                waits[j] += 1
            nodes[i].followers[j] = max(cycles, nodes[i].followers.get(j, 0))

    writer, readers = dict[str, int](), dict[str, list[int]]()
    store: int | None = None
    meeting: int | None = None
    loads = list[int]()
    for j, (_, found) in enumerate(block):
        written, read = _depends(found)
        kind = found[2].split(".")[0]
        for name in read:
            after(writer.get(name), j, nodes[writer[name]].latency if name in writer else 0)
            readers.setdefault(name, []).append(j)
        for name in written:
            after(writer.get(name), j, 1)
            for i in readers.pop(name, []):
                after(i, j, 1)
            writer[name] = j
        if kind in IN_ORDER:
            after(meeting, j, 1)
            meeting = j
        if kind in WRITES:
            after(store, j, 1)
            for i in loads:
                after(i, j, 1)
            store, loads = j, []
        elif kind == "ld" and not found[2].startswith(("ld.param", "ld.global.nc")):
            after(store, j, 1)
            loads.append(j)

    path = [0] * len(block)
    for i in reversed(range(len(block))):
        path[i] = max((cycles + path[j] for j, cycles in nodes[i].followers.items()), default=nodes[i].latency)
    ready = [(-path[i], i) for i, count in enumerate(waits) if count == 0]
    heapq.heapify(ready)
    soon: list[tuple[int, int]] = []
    begin, now, order = [0] * len(block), 0, list[str]()
    while ready or soon:
        while soon and (soon[0][0] <= now or not ready):
            now = max(now, soon[0][0])
            i = heapq.heappop(soon)[1]
            heapq.heappush(ready, (-path[i], i))
        i = heapq.heappop(ready)[1]
        order.append(block[i][0])
        for j, cycles in nodes[i].followers.items():
            begin[j] = max(begin[j], now + cycles)
            waits[j] -= 1
            if waits[j] == 0:
                heapq.heappush(soon, (begin[j], j))
        now += 1
    assert len(order) == len(block)
    return order
