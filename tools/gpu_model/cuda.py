"""Our CUDA kernels: compiled source by source, and the calls whose time is predicted.

A row of CALLS names the kernels of a call by regular expression, each with its grid and with code that the call does
not run: source lines that match are cold. Flags that a kernel reads at run time need that; template flags do not.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .count import Counts, Matcher, count
from .model import Kernel
from .sass import Graph, Instruction, functions
from .triton_run import TOOLS, output

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from compile_cuda import FLAGS, INCLUDE, Usage, parse, short_name  # noqa: E402

BUILD = ROOT / "build" / "gpu-model"
DRAFT = 5
# Paths for rows of another dtype, in code that picks its dtype at run time, for rows that are not aligned, for ends.
OTHER_DTYPES = (
    r"kFloat32|count_read\(4\)|count_read\(2\)|at\(i \+ j\)|scaled|rest\b|load_ragged|load_last|half_at|word_at|"
    r"left = size|out\[j\] = -INF|kAtOnce$|i < 8; \+\+i|out\[j \+ 1\]|out\[7\]"
)
# Flat rows, of which there is no call here; trees, whose rows are found in another way.
OTHER_LAYOUTS = r"open_flat|find_tree_row"
# What the tests' build for the host has in place of a GPU's code; group 1 is the GPU's.
HOST = re.compile(
    r"^#ifdef SPECDEC_HOST\n(?:(?!#else|#endif).*\n)*(?:#else\n((?:(?!#endif).*\n)*))?#endif", re.MULTILINE
)
# By one thread, or one warp of eight. A race scores about 64 ids a turn, a quarter of the threads; of its two places a
# thread has one then, and the count takes both.
ONE_THREAD = (
    r"if \(.*threadIdx\.x == 0|threadIdx\.x < 32|load_pair\(|make_row\(|find_share|load_request|merge_lanes<kWarps|"
    r"\.merged\(|partials\.store|plain_stats\(|exponential_of\(one|score_key\(weight"
)
# Here every warp has a row of its own.
EVERY_WARP = "stats_kernel<0>"
UNMASKED = r"allowed\.load|= bits\(first\)|kept >> j"
RARE = (
    r"apply_list|token_map|mapped_minimum|column|is_excluded|i < count|is_among_largest|race_for_samples|write_sample|"
    r"is_listed\(|num_listed|watch_draft|has_stats|active\.get|find_argmax|search_row|logprob|drafted_logit|edit|"
    rf"base > 0|i >= kThreads|load_kept|{UNMASKED}"
)


def _but(*run: str) -> str:
    """RARE without what a call does run."""
    return "|".join(word for word in RARE.split("|") if word not in run)


EDITED, SCORED, MAPPED = _but("edit"), _but("logprob"), _but("column", "load_kept")
WITH_BITS = _but(*UNMASKED.split("|"))
GIVEN = r"if \(!is_given\)"  # not a tree
# Where one kernel has rows of every dtype, masked or not, and sums of raw logits: float32, masks, raw sums. For some
# of the latter the disassembler has the right line of a wrong file, where a type ends.
OTHER_ROWS = r"data_ \+ first \* 4|low\.w|high\.w|kept >> j|= bits\(first\)|kWantsRaw|raw_|logits\.load8<8>|^};$"
# Loops that turn once: over the 131072 ids that a race has bounds of, over 256 positions, over 32 tiles or ids; over
# the parts of rows, or the tiles, that a block has, each of which counts as a block; and a draw that finds something at
# its first look.
ONE_TURN = (
    r"window \+= kWindow|base \+= (kThreads|32)|tile \+= 32|width; i \+= kThreads|\+\+look|"
    r"first \+= kWarps \* step|first \+ k \* step|tile \+= p\.parts|i \+= kListedWarps|i < count; i \+= kThreads"
)
OF_ROWS = 16  # bytes of a load of logits, or of their maxima; narrower ones are of lists and results
# A race looks for favourites first, and into the blocks that these have left then.
FIRST_TURN = r"mark_favourites\(race"


class Part(NamedTuple):
    """A kernel in a call."""

    kernel: str
    blocks: Callable[[int, int], int]  # of batch and vocabulary
    cold: tuple[str, ...] = ()
    is_idle: bool = False


class Call(NamedTuple):
    """A call of an op."""

    name: str
    rows: float  # of logits a request that it must read; 0: no prediction, as how many a tree has read depends on it
    parts: tuple[Part, ...]
    filters: bool = False


def tiles(vocab: int) -> int:
    """Of 4096 ids, in a row."""
    return -(-vocab // 4096)


MASS, ENTROPY, RAW, MASKED, IS_EDITED = 1, 2, 4, 8, 16  # DigestFlag


def _unwanted(flags: int) -> tuple[str, ...]:
    return (r"has_raw|raw\.", *(() if flags & ENTROPY else ("kWantsEntropy|has_entropy",)))


def _rows(rows: int, flags: int, *, filters: bool = False, races: bool = False, few: bool = False) -> tuple[Part, ...]:
    """Digest and settle, with the race of every row or none; a share of the digest has four tiles of bf16.

    few: the kernel behind the digest settles the rows.
    """
    grid = lambda batch, _: batch * rows  # noqa: E731
    digest = Part(f"digest_kernel<1,{flags}>", lambda batch, vocab: batch * rows * -(-tiles(vocab) // 4), (RARE,))
    unwanted = _unwanted(flags)
    if few:
        return (digest,)
    unrun = (GIVEN,) if races else (GIVEN, "race_row")
    if filters:  # top-k 50 and top-p .95 list few ids, which race alone
        unrun += (r"conclude<HeldList>|s\.top_k, all\)|run_row<kFilters>\(.*winner",)
    else:
        unrun += (r"if \(!is_open\)",)
    settle = Part(f"settle_kernel<{int(filters)}>", grid, (RARE, *unwanted, *unrun))
    if not filters and not races:
        # Of an argmax rule: the first id of the maximum is looked for.
        cold = RARE if flags & MASS else _but("find_argmax")
        return digest, Part("stats_kernel<0>", lambda batch, _: -(-batch * rows // 8), (cold, *unwanted))
    if not filters:
        return digest, settle
    # Four blocks a multiprocessor, of an H100 here, find no open row.
    few_blocks = lambda batch, _: min(batch * rows, 528)  # noqa: E731
    again = [Part(name, few_blocks, is_idle=True) for name in ("gather_kernel<0>", "settle_again_kernel")]
    return digest, settle, *again


def _edited_rows(rows: int, flags: int, *, races: bool = False) -> tuple[Part, ...]:
    """The same of rows with edits."""
    grid = lambda batch, _: batch * rows  # noqa: E731
    unwanted = (*_unwanted(flags), OTHER_ROWS)
    digest = _rows(rows, flags | IS_EDITED, few=True)[0]._replace(cold=(EDITED, r"allowed_\.load"))
    if races:
        no_filters = rf"{GIVEN}|settle_from_blocks|open_row\(f|FilteredRow f|race_list|p\.work\.open"
        return digest, Part("settle_kernel<1>", grid, (EDITED, *unwanted, no_filters))
    cold = EDITED if flags & MASS else _but("edit", "find_argmax")
    return digest, Part("stats_kernel<1>", lambda batch, _: -(-batch * rows // 8), (cold, *unwanted))


def _kept_rows(rows: int, kept: int) -> tuple[Part, ...]:
    """Whole target rows, and draft rows of candidates in a tile each."""
    digest, _ = _rows(rows, MASS)
    both = digest._replace(blocks=lambda batch, vocab: digest.blocks(batch, vocab) + batch * kept)
    _, stats = _rows(rows + kept, MASS)
    return both, stats, Part("kept_kernel", lambda batch, _: batch * (rows + kept), (MAPPED, *_unwanted(MASS)))


def _third(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Kernels for a third of a batch, of one request at least; the blocks of the others leave at once."""
    return tuple(
        one._replace(blocks=lambda batch, vocab, one=one: one.blocks(-(-batch // 3), vocab))  # type: ignore[misc]
        for one in parts
    )


def _pairs(name: str, pairs: int) -> Part:
    cold = RARE, r"weigh<kPass>\(r\.task"  # whole tiles of two rows
    return Part(f"pair_kernel<{name},0>", lambda batch, vocab: batch * pairs * tiles(vocab), cold)


def _walk(*cold: str) -> Part:
    return Part("chain_kernel", lambda batch, _: batch, cold)


def _once(name: str, *cold: str) -> Part:
    return Part(name, lambda batch, _: batch, (RARE, *cold))


_BOTH, _ONE = 2 * DRAFT + 1, DRAFT + 1
_SETTLED, _NO_DRAW = "settle_rows", r"draw\(|kind == kPair|has_draft|Rule::kRatio"  # every row has its token
_OWN = r"work\.rows\.load"  # a kernel that settles its rows has them at hand
_FEW = _walk(RARE, *_unwanted(MASS), _OWN)
_KNOWN = _walk(RARE, _SETTLED, _NO_DRAW)
_ARGMAX = _walk(_but("find_argmax"), *_unwanted(0), _NO_DRAW, _OWN)
_LOOK = Part("look_kernel<0>", lambda batch, _: batch, (SCORED, "shorten", "nth_key"))
_LISTING = (*_rows(_ONE, MASS), _LOOK._replace(blocks=lambda batch, _: batch * _ONE))  # of all rows: all are accepted
_GREEDY, _MATCH = (*_rows(_ONE, 0, few=True), _ARGMAX), (*_rows(_ONE, 0, races=True), _KNOWN)
_RATIO = (*_rows(_BOTH, MASS, few=True), _FEW)


def _level(*rows: Part) -> tuple[Part, ...]:
    """The first level of a tree: the kernels around its rows count with all that they may run."""
    return Part("open_kernel", lambda batch, _: batch), *rows, Part("tree_kernel", lambda batch, _: batch)


CALLS = [
    Call("verify_chain ratio bf16", _BOTH, _RATIO),
    Call(
        "verify_chain ratio bf16 mask",
        _BOTH,
        (*_rows(_BOTH, MASS | MASKED, few=True), _walk(WITH_BITS, *_unwanted(MASS), _OWN)),
    ),
    Call("verify_chain ratio bf16 filters", _BOTH, (*_rows(_BOTH, MASS, filters=True), _walk(RARE, _SETTLED)), True),
    Call(
        "verify_chain block bf16",
        _BOTH,
        (*_rows(_BOTH, MASS), _once("weights_kernel"), _pairs("0", DRAFT - 1), _once("block_kernel", "examine")),
    ),
    Call("verify_chain match bf16", _ONE, _MATCH),
    Call(
        "verify_chain match bf16 mask", _ONE, (*_rows(_ONE, MASKED, races=True), _walk(WITH_BITS, _SETTLED, _NO_DRAW))
    ),
    Call("verify_chain match bf16 filters", _ONE, (*_rows(_ONE, MASS, filters=True, races=True), _KNOWN), True),
    Call("verify_chain greedy bf16", _ONE, _GREEDY),
    Call("verify_chain typical bf16", _ONE, (*_rows(_ONE, MASS | ENTROPY, races=True), _KNOWN)),
    Call("verify_chain topm bf16", _ONE, (*_rows(_ONE, 0, races=True), _KNOWN)),
    Call("verify_chain distance bf16", _ONE, (*_rows(_ONE, 0, few=True), _ARGMAX)),
    Call("verify_chain ratio bf16 edits", _BOTH, (*_edited_rows(_BOTH, MASS), _walk(EDITED, _SETTLED))),
    Call(
        "verify_chain match bf16 edits", _ONE, (*_edited_rows(_ONE, 0, races=True), _walk(EDITED, _SETTLED, _NO_DRAW))
    ),
    Call("verify_chain greedy bf16 edits", _ONE, (*_edited_rows(_ONE, 0), _walk(EDITED, _SETTLED, _NO_DRAW))),
    Call("verify_chain ratio bf16 kept", _ONE, (*_kept_rows(_ONE, DRAFT), _walk(MAPPED, _SETTLED))),
    Call(
        "verify_chain match bf16 top",
        _ONE,
        (*_rows(_ONE, MASS, races=True), _walk(SCORED, _SETTLED, _NO_DRAW), *_LISTING),
    ),
    Call("verify_chain mixed bf16", (2 * _ONE + _BOTH) / 3, _third((*_GREEDY, *_MATCH, *_RATIO))),
    Call("sample bf16", 1, _rows(1, MASS, races=True)),
    Call("sample bf16 edits", 1, _edited_rows(1, MASS, races=True)),
    Call("sample bf16 top", 1, (*_rows(1, MASS, races=True), *_rows(1, MASS), _LOOK)),
    Call("sample bf16 filters", 1, _rows(1, MASS, filters=True, races=True), True),
    Call("token_logprobs bf16", 1, (*_rows(1, MASS), _LOOK)),
    Call("token_logprobs bf16 filters", 1, (*_rows(1, MASS, filters=True), _LOOK), True),
    Call("acceptance_ratios bf16", 2 * DRAFT, (*_rows(2 * DRAFT, MASS), _once("ratios_kernel"), _pairs("1", DRAFT))),
    Call("residual_probs bf16", 2, (*_rows(2, MASS), _pairs("0", 1), _pairs("2", 1))),
    Call("residual_sample bf16", 2, (*_rows(2, MASS), _pairs("0", 1), _once("draw_kernel"))),
    Call("verify_tree match bf16 edits", 0, _level(*_edited_rows(1, 0, races=True))),
    Call("verify_tree recursive bf16 edits", 0, _level(*_edited_rows(2, MASS))),
    Call("verify_tree recursive bf16 kept", 0, _level(*_kept_rows(1, 1))),
]


def nvcc() -> str | None:
    """The compiler, where there is one."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=str(Path(home, "bin")) if home else None)


def sources() -> list[Path]:
    """CUDA sources."""
    return sorted((ROOT / "csrc/cuda").glob("*.cu"))


def included(path: Path) -> list[Path]:
    """A source and the files of the repository that it includes, directly or not."""
    found, work = [], [path.resolve()]
    while work:
        one = work.pop()
        if one not in found and one.exists() and one.is_relative_to(ROOT) and "tests" not in one.parts:
            found.append(one)
            work += [(one.parent / name).resolve() for name in re.findall(r'#include "([^"]+)"', one.read_text())]
    return sorted(found)


def digest(paths: list[Path]) -> str:
    """Of the code in files; comments, docstrings and spaces do not count."""
    text = hashlib.sha256()
    for path in paths:
        text.update(f"{path.relative_to(ROOT)}\n{code_of(path)}\n".encode())
    return text.hexdigest()[:16]


def code_of(path: Path) -> str:
    """What a compiler sees of a file."""
    if path.suffix != ".py":
        return " ".join(HOST.sub(r"\1", re.sub(r"//[^\n]*", "", path.read_text())).split())
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            node.body = body[1:]  # type: ignore[attr-defined]
    return ast.dump(tree)


@functools.cache
def _line(file: str, number: int) -> str:
    found = list((ROOT / "csrc").rglob(file))
    text = found[0].read_text().splitlines() if found else []
    return text[number - 1] if 0 < number <= len(text) else ""


def source_matches(*patterns: str) -> Matcher:
    """Whether a source line of an instruction, or a line that it was inlined into, matches."""
    pattern = re.compile("|".join(patterns) or r"(?!)")

    @functools.cache
    def known(line: str) -> bool:
        file, _, number = line.rpartition(":")
        return pattern.search(_line(file, int(number))) is not None

    return lambda one: any(known(line) for line in one.lines)


class Compiled(NamedTuple):
    """A CUDA source for one architecture: what the assembler said of its kernels, and their code."""

    usage: dict[str, Usage]
    graphs: dict[str, Graph]


@functools.lru_cache(maxsize=4)
def compiled(source: Path, arch: int, extra: tuple[str, ...] = ()) -> Compiled:
    """Compile, or take what was compiled of the same text."""
    key = (
        digest(included(source))
        if source.is_relative_to(ROOT)
        else hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    )
    cubin = BUILD / "cuda" / f"{source.stem}-{arch}-{key}.cubin"
    log = cubin.with_suffix(".log")
    if not (cubin.exists() and log.exists()):
        cubin.parent.mkdir(parents=True, exist_ok=True)
        compiler = nvcc()
        assert compiler is not None
        code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        command = [compiler, *FLAGS, "-lineinfo", code, f"-I{ROOT / 'csrc'}", "-isystem", str(INCLUDE), *extra]
        done = subprocess.run([*command, "-cubin", str(source), "-o", str(cubin)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{source.name} for sm_{arch}:\n{done.stderr[-3000:]}")
        log.write_text(done.stdout + done.stderr)
    usage = {use.kernel: use for use in parse(log.read_text())}
    text = output(TOOLS / "nvdisasm", "-c", "-gi", cubin)
    return Compiled(usage, {n: Graph(code, labels) for n, code, labels in functions(text) if n in usage})


def threads() -> int:
    """A block, in our kernels."""
    found = re.search(r"kThreads = (\d+)", (ROOT / "csrc/cuda/platform.cuh").read_text())
    assert found is not None
    return int(found[1])


def kernel_of(use: Usage, graph: Graph, cold: tuple[str, ...], block: int, name: str = "") -> Kernel:
    """Counts of one kernel, without the code that a call does not run."""
    name = name or plain_name(use.kernel)
    skipped = source_matches(OTHER_DTYPES, *((OTHER_LAYOUTS, *cold) if cold else ()))
    one_thread = source_matches(*((r"(?!)",) if name == EVERY_WARP else (ONE_THREAD,)))
    turns = source_matches(ONE_TURN), source_matches(FIRST_TURN)
    counts: Counts = count(graph, skipped, one_thread, block // 32, *turns, OF_ROWS)
    return Kernel(name, use.arch, block, use.registers, use.shared, use.spills, counts)


def plain_name(mangled: str) -> str:
    """`rows_kernel<0,1>`: the name with its template arguments as numbers."""
    name = short_name(mangled).replace("(bool)", "").replace("false", "0").replace("true", "1").replace(" ", "")
    return re.sub(r"\([\w:]+\)(\d)", r"\1", name)


def is_cold_path(one: Instruction) -> bool:
    """Nothing is, where no source says so."""
    return False
