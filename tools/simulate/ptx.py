"""PTX as nvcc and Triton write it today, rewritten into the dialect that GPGPU-Sim reads (PTX 6.5).

Memory orders, cache hints and `fence` lose their meaning: the simulator's memory is sequentially consistent.
Instructions that it does not know become several that it knows; for some (`APART`) that says nothing of their speed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from .schedule import halved, scheduled

HINTS = re.compile(
    r"\.(?:L1::\w+|L2::\w+|level::\w+|relaxed|acquire|release|acq_rel|weak|volatile|evict_\w+|noftz|gpu|sys|cta|cluster|"
    r"aligned|unified)(?=\.|$)"
)
INSTRUCTION = re.compile(r"(?:(@!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)


APART = re.compile(r"\b(?:mma|ldmatrix|cp\.async)\.[\w.:]+")
ABSENT = re.compile(r"\b(?:wgmma|stmatrix|cp\.async\.bulk|mbarrier|tcgen05)\.[\w.:]+")


class Unsupported(Exception):
    """The simulator cannot run this PTX; says which instruction."""


class Parameter(NamedTuple):
    """Where a kernel finds an argument."""

    size: int
    offset: int


def parameters(text: str) -> dict[str, list[Parameter]]:
    """Parameters of each kernel of a module."""
    found = {}
    for name, inside in re.findall(r"\.entry\s+([\w$]+)\s*\((.*?)\)", _plain(text), re.DOTALL):
        offset, listed = 0, []
        for one in re.findall(r"\.param[^,)]*", inside):
            array = re.search(r"\.align\s+(\d+)\s+\.b8\s+\w+\[(\d+)\]", one)
            scalar = re.search(r"\.[a-z](\d+)\b", one)
            assert array or scalar, one
            size = int(array[2]) if array else int(scalar[1]) // 8  # type: ignore[index]
            align = int(array[1]) if array else size
            offset = -(-offset // align) * align
            listed.append(Parameter(size, offset))
            offset += size
        found[name] = listed
    return found


def lower(text: str, timed: bool = False) -> str:
    """The module in the simulator's dialect."""
    text = _plain(text)
    unsupported = ABSENT.search(text) or (APART.search(text) if timed else None)
    if unsupported:
        raise Unsupported(unsupported[0])
    text = re.sub(r"\.section\s+\.\w+\s*\{[^}]*\}", "", text)
    text = re.sub(
        r"(?m)^\s*\.(?:loc|file|pragma|noreturn|explicitcluster|maxclusterrank|reqnctapercluster)\b.*$", "", text
    )
    text = re.sub(r"\.version\s+[\d.]+", ".version 6.5", text)
    text = re.sub(r"\.target\s+\w+(\s*,\s*\w+)*", ".target sm_70", text)
    text = re.sub(
        r"\.(?:req|max)ntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*\d+)?", lambda m: f".maxntid {m[1]}, {m[2] or 1}, 1", text
    )
    text = re.sub(r"\.maxnreg\s+\d+", "", text)
    text = re.sub(r"\.ptr(\s+\.\w+)?\s+\.align\s+\d+", "", text)
    text = re.sub(r"\{\s*(%\w+)\s*\}", r"\1", text)  # a vector of one
    parts = re.split(r"(?m)^(?=\s*(?:\.visible\s+|\.weak\s+)?\.(?:entry|func)\b)", text)
    bodies = [list(_Body(part, i, timed).lines()) for i, part in enumerate(parts)]
    return "\n".join(line for body in bodies for line in (scheduled(halved(body)) if timed else body)) + "\n"


def _plain(text: str) -> str:
    """Without comments."""
    return re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


def statements(text: str) -> Iterator[str]:
    """Statements, labels and the braces of scopes, one at a time; white space is collapsed."""
    now, depth = "", 0
    for piece in re.split(r"([;{}]|(?<![\w:]):(?=\s)|(?<=\w):(?![:\w]))", text):
        is_header = re.search(r"\.(?:entry|func)\b", now) is not None
        if piece == "{" and (not now.strip() or is_header):
            yield from filter(None, [" ".join(now.split()), "{"])
            now = ""
        elif piece == "}" and depth == 0:
            yield "}"
            now = ""
        elif piece in (";", ":") and depth == 0:
            yield " ".join((now + piece).split())
            now = ""
        else:
            depth += (piece == "{") - (piece == "}")
            now += piece
    if now.strip():
        yield from (line for line in now.split("\n") if line.strip())


def operands(text: str) -> list[str]:
    """Operands of an instruction; vectors and addresses stay whole."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,{\[(])+", text)]


class _Body:
    """One function, or what stands before the first."""

    def __init__(self, text: str, number: int, timed: bool) -> None:
        self.text, self.number, self.timed, self.count = text, number, timed, 0
        # A second result of shfl that nobody reads stays away: the timing model stumbles over it.
        self.unread = self._once(r"\|\s*(%p\d+)")
        # nvcc moves a half that nobody has written, nor reads, along with the other one: the simulator refuses that.
        self.unwritten = self._once(r"mov\.b64\s+%\w+,\s*\{%\w+,\s*(%\w+)\}")

    def _once(self, pattern: str) -> set[str]:
        """Registers of these places that stand nowhere else."""
        return {r for r in re.findall(pattern, self.text) if len(re.findall(rf"{r}\b", self.text)) == 1}

    def lines(self) -> Iterator[str]:
        for statement in statements(self.text):
            found = INSTRUCTION.fullmatch(statement.removesuffix(";")) if statement.endswith(";") else None
            if found is None or found[3].startswith("."):
                yield statement
            else:
                yield from self.rewrite(found)

    def rewrite(self, found: re.Match[str]) -> Iterator[str]:
        """One instruction; what replaces it runs under its guard, with registers of its own."""
        guard, opcode = f"{found[1]}{found[2]} " if found[1] else "", HINTS.sub("", found[3])
        given = operands(found[4])
        kind = opcode.split(".")[0]
        if "cache_hint" in found[3]:
            given.pop()
        if kind in ("createpolicy", "discard", "prefetch") or opcode.startswith(
            ("bar.warp", "cp.async.commit", "cp.async.wait")
        ):
            return
        if opcode == "mov.b64" and given[1].startswith("{"):
            low, high = _listed(given[1])
            given[1] = f"{{{low}, {low if high in self.unwritten else high}}}"
        made = _replacement(opcode, given, self.timed)
        if kind == "fence":
            yield f"{guard}membar.gl;"
        elif kind in ("atom", "red") and guard:
            # The timing model never ends an atomic operation that no lane takes part in.
            yield from self.skipped(found, [*self.scope(made, "")] if made else [f"{opcode} {', '.join(given)};"])
        elif kind == "shfl" and "|" in given[0] and given[0].split("|")[1].strip() in self.unread:
            yield f"{guard}{opcode} {', '.join([given[0].split('|')[0].strip(), *given[1:]])};"
        elif made is None:
            yield f"{guard}{opcode} {', '.join(given)};"
        elif guard and any(line.startswith("@") for line in made):
            yield from self.skipped(found, list(self.scope(made, "")))
        else:
            yield from self.scope(made, guard)

    def skipped(self, found: re.Match[str], lines: list[str]) -> Iterator[str]:
        """A branch around lines, in place of a guard."""
        self.count += 1
        label, other = f"$skip_{self.number}_{self.count}", "@" if found[1] == "@!" else "@!"
        yield from (f"{other}{found[2]} bra {label};", *lines, f"{label}:")

    def scope(self, made: list[str], guard: str) -> Iterator[str]:
        """Instructions with registers of their own."""
        self.count += 1
        name = f"%own_{self.number}_{self.count}_"
        count = 1 + max((int(n) for line in made for n in re.findall(r"\$(\d+)", line)), default=0)
        yield from (f".reg .b32 {name}<{count}>;", f".reg .pred {name}p;")
        yield from (guard + line.replace("$", name) + ";" for line in made)


def _replacement(opcode: str, given: list[str], timed: bool) -> list[str] | None:
    """Known instructions that do what an unknown one does; $0, $1, ... are free registers and $p a predicate.

    Rows of timed calls hold no NaN: no time is spent on keeping it.
    """
    if opcode == "lop3.b32":
        return _lop3(*given)
    if opcode.startswith("redux.sync"):
        _, _, operation, kind = opcode.split(".")
        result, value, lanes = given
        steps = [f"mov.b32 $0, {value}"]
        for lane in (16, 8, 4, 2, 1):
            steps += [f"shfl.sync.bfly.b32 $1, $0, {lane}, 31, {lanes}", f"{operation}.{kind} $0, $0, $1"]
        return [*steps, f"mov.b32 {result}, $0"]
    if opcode == "max.NaN.f32":
        return _max_with_nan(*given, timed)
    if opcode == "max.NaN.bf16":
        result, a, b = given
        wide = [line for name, x in (("$0", a), ("$1", b)) for line in _wide_bf16(name, x)]
        return [*wide, *_max_with_nan("$0", "$0", "$1", timed), "shr.u32 $0, $0, 16", f"cvt.u16.u32 {result}, $0"]
    if opcode == "max.NaN.bf16x2":
        return _max_bf16(*given, timed)
    if opcode == "max.NaN.f16x2":
        return _max_fp16(*given)
    if opcode == "cvt.f32.bf16":
        return [*_wide_bf16("$0", given[1]), f"mov.b32 {given[0]}, $0"]
    if opcode == "cvt.rn.bf16.f32":
        return [*_to_bf16("$0", given[1]), f"cvt.u16.u32 {given[0]}, $0"]
    if opcode == "cvt.rn.bf16x2.f32":
        return [
            *_to_bf16("$0", given[1]),
            *_to_bf16("$3", given[2]),
            "shl.b32 $0, $0, 16",
            f"or.b32 {given[0]}, $0, $3",
        ]
    if opcode == "fma.rn.bf16x2":
        return _fma_bf16(*given)
    if opcode == "atom.global.or.b64":
        return _or_halves(*given)
    if opcode.startswith("cp.async"):
        return _copy(*given)
    if opcode.startswith("ldmatrix"):
        return _load_matrices(_listed(given[0]), given[1], ".trans" in opcode)
    if opcode.startswith("mma"):
        return _multiply(opcode, *map(_listed, given))
    return None


def _wide_bf16(result: str, value: str) -> list[str]:
    return [f"cvt.u32.u16 {result}, {value}", f"shl.b32 {result}, {result}, 16"]


def _max_with_nan(result: str, a: str, b: str, timed: bool) -> list[str]:
    if timed:
        return [f"max.f32 {result}, {a}, {b}"]
    return [f"max.f32 $9, {a}, {b}", f"setp.nan.f32 $p, {a}, {b}", f"selp.f32 {result}, 0f7FFFFFFF, $9, $p"]


def _max_bf16(result: str, a: str, b: str, timed: bool) -> list[str]:
    """The larger of each of two bfloat16, as float32."""
    return [
        f"shl.b32 $0, {a}, 16", f"shl.b32 $1, {b}, 16", *_max_with_nan("$0", "$0", "$1", timed), "shr.u32 $0, $0, 16",
        f"and.b32 $2, {a}, 0xffff0000", f"and.b32 $3, {b}, 0xffff0000", *_max_with_nan("$2", "$2", "$3", timed),
        "and.b32 $2, $2, 0xffff0000", f"or.b32 {result}, $0, $2",
    ]  # fmt: skip


def _fma_bf16(result: str, a: str, b: str, c: str) -> list[str]:
    """Rounded twice, to float32 first: the same where the product has few bits and nothing is added."""
    steps = []
    for part, kept in (("shl.b32 {}, {}, 16", "$6"), ("and.b32 {}, {}, 0xffff0000", "$7")):
        steps += [part.format(wide, value) for wide, value in (("$3", a), ("$4", b), ("$5", c))]
        steps += ["fma.rn.f32 $3, $3, $4, $5", *_to_bf16(kept, "$3")]
    return [*steps, "shl.b32 $7, $7, 16", f"or.b32 {result}, $6, $7"]


def _max_fp16(result: str, a: str, b: str) -> list[str]:
    """The larger of each of two float16 by the order of their bits, above all of which stands NaN."""
    steps = []
    for shift, kept in ((0, "$6"), (16, "$7")):
        for value, half, key in ((a, "$0", "$1"), (b, "$2", "$3")):
            steps += [
                f"shr.u32 {half}, {value}, {shift}", f"and.b32 {half}, {half}, 65535", f"and.b32 $4, {half}, 32767",
                f"add.u32 {key}, $4, 32768", "sub.u32 $5, 32767, $4",
                f"setp.gt.u32 $p, {half}, 32767", f"selp.b32 {key}, $5, {key}, $p",
                "setp.gt.u32 $p, $4, 0x7c00", f"selp.b32 {key}, 65536, {key}, $p",
            ]  # fmt: skip
        steps += ["setp.ge.u32 $p, $1, $3", f"selp.b32 {kept}, $0, $2, $p"]
    return [*steps, "shl.b32 $7, $7, 16", f"or.b32 {result}, $6, $7"]


def _listed(vector: str) -> list[str]:
    return [part.strip() for part in vector.strip("{}").split(",")]


def _address(text: str) -> tuple[str, int]:
    """Register and offset."""
    found = re.fullmatch(r"\[\s*(%\w+)\s*(?:\+\s*(\d+)\s*)?\]", text)
    assert found is not None, text
    return found[1], int(found[2] or 0)


def _or_halves(result: str, place: str, value: str) -> list[str]:
    """Bits of 64 that are set, in two words."""
    base, offset = _address(place)
    return [
        f"mov.b64 {{$0, $1}}, {value}",
        f"atom.global.or.b32 $2, [{base}+{offset}], $0",
        f"atom.global.or.b32 $3, [{base}+{offset + 4}], $1",
        f"mov.b64 {result}, {{$2, $3}}",
    ]


def _copy(to: str, source: str, size: str, given: str | None = None) -> list[str]:
    """cp.async, at once; Triton gives all bytes or, for zeros, none."""
    words = int(size, 0) // 4
    vector = "$0" if words == 1 else "{" + ", ".join(f"${i}" for i in range(words)) + "}"
    kind = "b32" if words == 1 else f"v{words}.b32"
    load = [f"ld.global.{kind} {vector}, {source}"]
    if given is not None:
        zeros = [f"mov.b32 ${i}, 0" for i in range(words)]
        load = [*zeros, f"setp.ne.u32 $p, {given}, 0", f"@$p {load[0]}"]
    return [*load, f"st.shared.{kind} {to}, {vector}"]


def _load_matrices(results: list[str], address: str, is_transposed: bool) -> list[str]:
    """ldmatrix: lane 8 i + j holds the address of row j of matrix i; a lane gets two neighbours of a row or column."""
    base, offset = _address(address)
    steps = ["mov.u32 $0, %laneid", "shr.u32 $1, $0, 2", "and.b32 $2, $0, 3"]
    for i, result in enumerate(results):
        if is_transposed:
            steps += ["shl.b32 $3, $2, 1", "shl.b32 $6, $1, 1"]
            for half in (4, 5):
                steps += [
                    f"add.u32 $7, $3, {8 * i + half - 4}", f"shfl.sync.idx.b32 ${half}, {base}, $7, 31, -1",
                    f"add.u32 ${half}, ${half}, $6", f"ld.shared.u16 ${half}, [${half}+{offset}]",
                ]  # fmt: skip
            steps += ["shl.b32 $5, $5, 16", f"or.b32 {result}, $4, $5"]
        else:
            steps += [
                f"add.u32 $3, $1, {8 * i}", f"shfl.sync.idx.b32 $4, {base}, $3, 31, -1", "shl.b32 $5, $2, 2",
                "add.u32 $4, $4, $5", f"ld.shared.b32 {result}, [$4+{offset}]",
            ]  # fmt: skip
    return steps


def _multiply(opcode: str, d: list[str], a: list[str], b: list[str], c: list[str]) -> list[str]:
    """mma m16n8k16 of bfloat16: shuffles fetch rows of A and columns of B, two elements a register."""
    if opcode != "mma.sync.m16n8k16.row.col.f32.bf16.bf16.f32":
        raise Unsupported(opcode)
    steps = ["mov.u32 $0, %laneid", "and.b32 $1, $0, 28", "and.b32 $2, $0, 3", "shl.b32 $2, $2, 3"]
    steps += [f"mov.b32 ${3 + i}, {c[i]}" for i in range(4)]
    for pair in range(8):
        lane, half = pair % 4, pair // 4
        sources = [("$1", 0, a[2 * half]), ("$1", 0, a[2 * half + 1]), ("$2", 0, b[half]), ("$2", 4, b[half])]
        for i, (first, more, register) in enumerate(sources):
            steps += [f"add.u32 $15, {first}, {lane + more}", f"shfl.sync.idx.b32 $15, {register}, $15, 31, -1"]
            steps += [f"shl.b32 ${7 + 2 * i}, $15, 16", f"and.b32 ${8 + 2 * i}, $15, -65536"]
        for i in range(4):
            for part in (0, 1):
                row, column = 7 + 2 * (i // 2) + part, 11 + 2 * (i % 2) + part
                steps.append(f"fma.rn.f32 ${3 + i}, ${row}, ${column}, ${3 + i}")
    return [*steps, *(f"mov.b32 {d[i]}, ${3 + i}" for i in range(4))]


def _to_bf16(result: str, value: str) -> list[str]:
    """The nearest, ties to even; NaN becomes 0x7fff."""
    return [
        f"mov.b32 {result}, {value}",
        f"shr.u32 $1, {result}, 16",
        "and.b32 $1, $1, 1",
        f"add.u32 $1, $1, {result}",
        "add.u32 $1, $1, 32767",
        "shr.u32 $1, $1, 16",
        f"and.b32 {result}, {result}, 2147483647",
        f"min.u32 {result}, {result}, 2139095041",  # one above infinity: a NaN
        f"sub.u32 {result}, {result}, 2139095040",
        f"max.s32 {result}, {result}, 0",  # 1 where NaN
        f"mul.lo.u32 $2, {result}, 32767",
        f"sub.u32 {result}, 1, {result}",
        f"mul.lo.u32 $1, $1, {result}",
        f"or.b32 {result}, $1, $2",
    ]


def _lop3(result: str, a: str, b: str, c: str, table: str) -> list[str]:
    """Any function of three bits, by the shortest formula of two-operand instructions."""
    names, steps = {0x00: "0", 0xFF: "-1", 0xAA: c, 0xCC: b, 0xF0: a}, list[str]()

    def value(wanted: int) -> str:
        if wanted in names:
            return names[wanted]
        _, operation, operands = _formulas()[wanted]
        given = [value(one) for one in operands]
        names[wanted] = f"${len(steps)}"
        steps.append(f"{operation}.b32 {names[wanted]}, {', '.join(given)}")
        return names[wanted]

    found = value(int(table, 0))
    if not steps:
        return [f"mov.b32 {result}, {found}"]
    steps[-1] = steps[-1].replace(found, result, 1)
    return steps


@cache
def _formulas() -> dict[int, tuple[int, str, tuple[int, ...]]]:
    """Of each truth table of three bits: how many instructions it takes, the last one, and the tables it reads."""
    found: dict[int, tuple[int, str, tuple[int, ...]]] = dict.fromkeys((0x00, 0xFF, 0xAA, 0xCC, 0xF0), (0, "", ()))
    operations = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}
    for cost in range(1, 8):
        known = list(found.items())
        made = [(0xFF ^ x, 1 + n, "not", (x,)) for x, (n, _, _) in known]
        made += [
            (how(x, y), 1 + n + m, name, (x, y)) for x, (n, _, _) in known for y, (m, _, _) in known
            for name, how in operations.items() if n + m < cost
        ]  # fmt: skip
        for table, count, name, operands in made:
            if count <= cost:
                found.setdefault(table, (count, name, operands))
    return found
