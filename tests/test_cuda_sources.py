"""Rules of the CUDA sources that no compiler checks: one way to global memory, no order of blocks, one platform."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "csrc/cuda"
SOURCES = sorted([*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh")])


def code(path: Path) -> str:
    """Source without comments and string literals."""
    text = re.sub(r"//[^\n]*", "", path.read_text())
    return re.sub(r'"(\\.|[^"\\])*"', '""', text)


def ids(path: Path) -> str:
    return path.name


def test_there_are_sources() -> None:
    assert len(SOURCES) > 10


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name != "global.cuh"], ids=ids)
def test_kernels_reach_global_memory_only_through_the_counted_accessor(path: Path) -> None:
    text = code(path)
    assert not re.search(r"__ldg|__ldcs|__stcs|__ldcg", text), "loads and stores belong to global.cuh"
    assert path.name == "platform.cuh" or not re.search(r"\basm\b", text), "assembly belongs to platform.cuh"
    # An address may become an accessor, or a number on the host; never a pointer that is read.
    text = re.sub(r"Global<[^;]*?>\s*\w*\(reinterpret_cast<", "Global(accessor<", text)
    text = text.replace("reinterpret_cast<uint64_t>", "")
    # The host's launches may name a kernel, and the function that takes them.
    text = text.replace("reinterpret_cast<const void*>(kernel)", "").replace("reinterpret_cast<specdec::Elsewhere>", "")
    casts = re.findall(r"reinterpret_cast<[^>]*>", text)
    assert not casts, f"only global.cuh turns addresses into values: {casts}"
    kernels = re.findall(r"__global__[^{;]*?(\w+_kernel)\(([^)]*)\)", text)
    for name, arguments in kernels:
        assert "*" not in arguments, f"{name} takes a raw pointer: {arguments}"
        assert re.fullmatch(r"const __grid_constant__ (Problem|\w+Params) p", arguments.strip()), arguments


def test_the_problem_holds_no_raw_pointer() -> None:
    """Arguments of a kernel: accessors only."""
    text = code(FOLDER / "problem.cuh")
    for struct in re.findall(r"struct \w+ \{.*?\n\};", text, flags=re.S):
        members = re.findall(r"^\s+(?:const )?[\w:<> ]+\*\s*\w+\s*[;=]", struct, flags=re.M)
        assert not members, members


def test_blocks_meet_at_the_end_of_a_kernel_alone() -> None:
    """No tickets or fences: nothing that a capture or a second stream could disturb; no order is asked of an atomic."""
    for path in SOURCES:
        in_shared_memory = r"atomic(?:Or\(has \+|Add\(&scratch\.count,|Max\(parts\.edited \+) "
        text = re.sub(in_shared_memory, "", code(path))
        text = re.sub(r"atomic\w+\(\w+\.data\(\) \+ i, ", "", text) if path.name == "global.cuh" else text
        assert not re.search(r"atomic\w*\(|__threadfence", text), path.name


# What a call was given, read by a kernel that is not the first of its call. Of a tree's rows the walk decides.
GIVEN = {"load_request", "load_row", "load_drafted", "open_race"}
HARMLESS = {"if", "static_cast", "__syncthreads", "SPECDEC_SHARED"}


def test_overlapping_kernels_wait_first() -> None:
    """A kernel that may start before the one in front of it has ended waits for it before it reads what that wrote."""
    sources = {path.name: code(path) for path in SOURCES}
    overlapping = set(re.findall(r"launch_phase\(\s*(\w+_kernel)", "".join(sources.values())))
    bodies = {
        name: body
        for text in sources.values()
        for name, body in re.findall(r"__global__[^{;]*?(\w+_kernel)\([^)]*\) \{(.*?)\n\}", text, flags=re.S)
    }
    assert overlapping
    for name in overlapping:
        before, waits, _ = bodies[name].partition("after_last_kernel();")
        assert waits and not re.search(r"\.load\(|\.store\(|return", before), name
        called = set(re.findall(r"(?<![.\w])(\w+)(?:<\w+>)?\(", before))
        assert called <= GIVEN | HARMLESS, (name, called)
        assert "load_row" not in called or "is_given" in before, name


def test_no_op_begins_with_a_kernel_that_reads_before_it_waits() -> None:
    """The first kernel of a call waits for what its inputs are made by: it is none of those that read them earlier."""
    early = {"chain_kernel", "weights_kernel", "block_kernel", "stats_kernel", "settle_kernel"}
    found = set()
    for path in SOURCES:
        for name, body in re.findall(r"__global__[^{;]*?(\w+_kernel)\([^)]*\) \{(.*?)\n\}", code(path), flags=re.S):
            if any(given in body.partition("after_last_kernel();")[0] for given in GIVEN):
                found.add(name)
    assert found == early  # each comes behind launch_digest, in launch_rows or in verify_tree_out


def test_only_the_platform_header_knows_where_it_runs() -> None:
    for path in SOURCES:
        if path.name in ("platform.cuh", "global.cuh", "workspace.cu"):  # the meter and its op
            continue
        assert "SPECDEC_HOST" not in path.read_text(), path.name
    for path in SOURCES:
        text = code(path)
        assert not re.search(r"\bat::|\bc10::|torch/extension|ATen/", path.read_text()), path.name
        if path.name != "platform.cuh":
            assert "<<<" not in text and "__shared__" not in text, path.name


def test_every_kernel_says_its_grid() -> None:
    for path in SOURCES:
        if "__global__" in code(path):
            assert re.search(r"grid = \[|Grid: ", path.read_text()), path.name


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_files_are_pages(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if "SPECDEC_REGISTER" in p.read_text() and p.suffix == ".cu"], ids=ids
)
def test_an_entry_makes_the_device_of_its_tensors_current(path: Path) -> None:
    """Before anything else: the current device may be another one."""
    text = code(path)
    for entry in re.findall(r"SPECDEC_REGISTER\(\w+, (?:\w+::)*(\w+)\)", text):
        body = re.search(rf"void {entry}\([^{{;]*\) \{{\s*(.*?)\n\}}", text, flags=re.S)
        assert body, f"{entry} is not where it is registered"
        assert re.match(r"const OnDevice on\(\w+\);", body[1]), f"{entry} starts on another device"
