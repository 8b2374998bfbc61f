"""The model of GPU kernels (tools/gpu_model): what it reads from machine code, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the model compiles Triton kernels")

from tools.gpu_model import collect, cuda, limits, page, triton_calls
from tools.gpu_model.__main__ import FIRST, RESULTS
from tools.gpu_model.count import Counts, Stream, Work, count, registers, width
from tools.gpu_model.machines import A100, H100, issue_slots, resident_blocks, unit_of
from tools.gpu_model.model import Kernel, Launch, call_time, kernel_time, share
from tools.gpu_model.sass import Graph, Instruction, functions

# A loop over rows: two loads in flight, then their use; a slow path; a shuffle; a ticket; the last block's merge.
LOOP = """
.text.stream:
	//## File "/src/a.cu", line 10
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   LDC.64 R2, c[0x0][0x210] ;
.L_x_0:
	//## File "/src/row.cuh", line 5 inlined at "/src/a.cu", line 12
	//## File "/src/a.cu", line 12
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.128 R8, desc[UR4][R2.64+0x10] ;
        /*0040*/                   IADD3 R2, R2, 0x20, RZ ;
        /*0050*/                   FMNMX R12, R4, R5, !PT ;
        /*0060*/                   MUFU.EX2 R13, R12 ;
        /*0070*/                   ISETP.NE.AND P1, PT, R9, RZ, PT ;
        /*0080*/              @!P1 BRA `(.L_x_1) ;
        /*0090*/                   FADD R14, R13, R14 ;
        /*00a0*/                   FADD R14, R13, R14 ;
.L_x_1:
        /*00b0*/                   ISETP.NE.AND P0, PT, R2, R15, PT ;
        /*00c0*/               @P0 BRA `(.L_x_0) ;
        /*00d0*/                   SHFL.BFLY PT, R16, R14, 0x1, 0x1f ;
        /*00e0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00f0*/                   MEMBAR.SC.GPU ;
        /*0100*/                   ATOMG.E.ADD.STRONG.GPU PT, R20, desc[UR4][R18.64], R17 ;
        /*0110*/                   ISETP.NE.AND P0, PT, R20, R21, PT ;
        /*0120*/               @P0 EXIT ;
        /*0130*/                   LDG.E R22, desc[UR4][R24.64] ;
        /*0140*/                   FADD R22, R22, R14 ;
        /*0150*/                   STG.E desc[UR4][R24.64], R22 ;
        /*0160*/                   EXIT ;
"""
# Straight code with a slow division: the block that calls is cold; a join through BSSY and BSYNC.
STRAIGHT = """
.text.tile:
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/                   BSSY B0, `(.L_x_9) ;
        /*0020*/                   FSETP.NEU.AND P0, PT, R4, RZ, PT ;
        /*0030*/               @P0 BRA `(.L_x_8) ;
        /*0040*/                   MOV R8, 0x60 ;
        /*0050*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm3x_div_rn) ;
        /*0060*/                   BSYNC B0 ;
.L_x_8:
        /*0070*/                   MUFU.RCP R9, R4 ;
        /*0080*/                   FMUL R9, R9, R5 ;
        /*0090*/                   BSYNC B0 ;
.L_x_9:
        /*00a0*/                   STG.E.128 desc[UR4][R2.64], R8 ;
        /*00b0*/                   EXIT ;
"""


def nothing(_: Instruction) -> bool:
    return False


def graph_of(text: str) -> Graph:
    ((_, code, labels),) = functions(text)
    return Graph(code, labels)


def opcodes(graph: Graph, blocks: list[int]) -> list[str]:
    return [one.name for b in blocks for one in graph.blocks[b].code]


def test_a_disassembly_is_read_with_the_lines_it_comes_from() -> None:
    ((name, code, labels),) = functions(LOOP)
    assert (name, len(code), labels) == ("stream", 23, {".L_x_0": 0x20, ".L_x_1": 0xB0})
    assert code[0].lines == ("a.cu:10",) and code[2].lines == ("row.cuh:5", "a.cu:12")
    assert (code[8].guard, code[8].opcode, code[8].target) == ("@!P1", "BRA", ".L_x_1")


def test_a_loop_is_found_and_its_inner_branch_is_no_loop() -> None:
    graph = graph_of(LOOP)
    (loop,) = graph.loops
    assert graph.blocks[loop.head].code[0].address == 0x20
    assert sorted(opcodes(graph, sorted(loop.blocks))) == sorted(
        ["LDG", "LDG", "IADD3", "FMNMX", "MUFU", "ISETP", "BRA", "FADD", "FADD", "ISETP", "BRA"]
    )


def test_counts_of_a_stream_stop_at_the_ticket() -> None:
    found = count(graph_of(LOOP), nothing, nothing, warps=8)
    (stream,) = found.streams
    assert stream.loops and stream.read == 32 and stream.written == 0
    assert stream.work.issued == 11 and stream.work.exponentials == 1
    assert stream.work.units == {"memory": 2, "alu": 4, "special": 1, "fp32": 2}
    assert stream.work.waits == 1
    assert (found.once.issued, found.once.shuffles, found.once.barriers, found.once.fences) == (8, 1, 1, 1)
    assert found.tickets == 1


def test_a_loop_that_turns_once_is_straight_code() -> None:
    found = count(graph_of(LOOP), nothing, nothing, 8, lambda one: one.name == "MUFU")
    (stream,) = found.streams
    assert not stream.loops and stream.read == 32 and stream.work.issued == 11 + 8


def test_what_the_first_turn_alone_runs_counts_once() -> None:
    found = count(graph_of(LOOP), nothing, nothing, 8, first_turn=lambda one: one.name in ("LDG", "IADD3", "FMNMX"))
    assert [(s.loops, s.read) for s in found.streams] == [(False, 32), (False, 0)]
    assert found.streams[1].work.issued < found.streams[0].work.issued == 11


def test_only_the_last_block_of_a_row_merges() -> None:
    found = count(graph_of(LOOP), nothing, nothing, warps=8)
    # Behind the ticket's block: load, add, store, exit; the add waits for the load.
    assert found.after.serial == 4 and found.after.waits == 1


def test_both_loads_are_in_flight_before_the_first_is_used() -> None:
    assert count(graph_of(LOOP), nothing, nothing, 8).streams[0].in_flight == 32
    early = LOOP.replace("IADD3 R2, R2, 0x20, RZ", "NOP").replace(
        "        /*0030*/                   LDG.E.128 R8", "        /*0030*/                   FADD R6, R6, R4"
    )
    assert count(graph_of(early), nothing, nothing, 8).streams[0].in_flight == 16


def test_code_of_one_thread_costs_one_warp_its_slots() -> None:
    found = count(graph_of(LOOP), nothing, lambda one: one.lines == ("a.cu:10",), warps=8)
    assert found.once.issued == 2 / 8 + 6 and found.once.serial == 8


def test_cold_code_is_not_counted() -> None:
    found = count(graph_of(LOOP), lambda one: one.name == "FADD", nothing, warps=8)
    assert found.streams[0].work.issued == 9


def test_slow_paths_and_their_calls_are_left_out_and_joins_are_followed() -> None:
    graph = graph_of(STRAIGHT)
    found = count(graph, nothing, nothing, warps=4)
    (stream,) = found.streams
    assert not stream.loops and stream.read == 16
    assert stream.work.issued == 9 and stream.work.units == {"memory": 2, "alu": 1, "special": 1, "fp32": 1}


def test_a_call_within_the_function_is_a_jump() -> None:
    jumps = STRAIGHT.replace("CALL.REL.NOINC `($__internal_0_$__cuda_sm3x_div_rn)", "CALL.REL.NOINC `(.L_x_9)")
    # MOV and the call that jumps are shorter than the division: the way is the same, but it could be taken.
    assert [graph_of(text).blocks[1].code[-1].name for text in (STRAIGHT, jumps)] == ["BSYNC", "CALL"]


def test_registers_and_widths_of_instructions() -> None:
    load = Instruction(0, "", "LDG.E.128.CONSTANT", "R4, desc[UR8][R2.64]", "", ())
    assert registers(load) == ({4, 5, 6, 7}, {2}) and width(load) == 16
    store = Instruction(0, "", "STG.E.U16", "desc[UR8][R2.64], R9", "", ())
    assert registers(store) == (set(), {2, 9}) and width(store) == 2


def test_units_are_those_of_the_opcode() -> None:
    assert [unit_of(o) for o in ("IMAD.WIDE.U32", "IMAD.MOV.U32", "MUFU.EX2", "SHFL.IDX", "BRA", "FFMA")] == [
        "wide", "imad", "special", "memory", "", "fp32",
    ]  # fmt: skip


def test_the_busiest_unit_takes_more_slots_than_issuing() -> None:
    # 2 exponentials take 2 * 128 / 16 slots, more than the 10 that are issued.
    assert issue_slots(90, 10, {"special": 2, "fp32": 4}) == 16
    # Multiplications of integers and of floats share a unit: 2 * 128 / 64 + 4, and 2 * 128 / 64 + 4 * 2 on sm_80.
    assert issue_slots(90, 6, {"imad": 2, "fp32": 4}) == 8
    assert issue_slots(80, 6, {"imad": 2, "fp32": 4}) == 12


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "threads", "blocks"),
    [
        (90, 64, 0, 256, 4),  # 65536 / (64 * 256)
        (90, 65, 0, 256, 3),  # 65 registers are given as 72
        (90, 32, 60 * 1024, 256, 3),  # 228 KB / 61 KB
        (80, 32, 60 * 1024, 256, 2),  # 164 KB / 61 KB
        (90, 16, 0, 256, 8),  # 2048 threads
        (120, 16, 0, 256, 6),  # 1536 threads
        (90, 255, 0, 512, 0),  # too large
    ],
)
def test_occupancy_has_the_limits_of_the_architecture(
    arch: int, registers: int, shared: int, threads: int, blocks: int
) -> None:
    assert resident_blocks(arch, registers, shared, threads) == blocks


def kernel(issued: float, read: int, in_flight: int, serial: int = 0, loops: bool = False) -> Kernel:
    stream = Stream(Work(issued, {}, serial), read, 0, in_flight, loops)
    return Kernel("k", 90, 256, 64, 0, 0, Counts([stream], Work(0, {}), Work(0, {}), 0, 0))


def test_a_kernel_with_little_work_runs_at_the_copy_rate() -> None:
    # 100,000 blocks of 256 threads that read 64 bytes each: 1.6384 GB at 3 TB/s.
    time = kernel_time(H100, Launch(kernel(32, 64, 64), 100_000))
    assert time.bytes == pytest.approx(1.6384e9 / 3.0e12)
    assert time.bound == "bytes" and time.total == pytest.approx(time.bytes + 0.7e-6)


def test_instructions_bound_a_kernel_that_has_many() -> None:
    # 40 instructions an element of 2 bytes: 758 blocks on the fullest of 132 multiprocessors, 256 threads, 1280 slots.
    time = kernel_time(H100, Launch(kernel(1280, 64, 64), 100_000))
    assert time.issue == pytest.approx(758 * 256 * 1280 / (128 * 0.7 * 1.75e9))
    assert time.bound == "instructions"


def test_few_bytes_in_flight_bound_a_kernel_by_latency() -> None:
    # 4 blocks a multiprocessor: 190 waves, each of 64 / 8 rounds of 0.7 us.
    time = kernel_time(H100, Launch(kernel(32, 64, 8), 100_000))
    assert time.latency == pytest.approx(190 * 8 * 0.7e-6) and time.bound == "latency"


def test_a_loop_turns_until_its_bytes_are_read() -> None:
    # 132 blocks read 1 GB 32 bytes a turn and thread: 1e9 / (132 * 256 * 32) turns, each with its own round.
    time = kernel_time(H100, Launch(kernel(16, 32, 32, loops=True), 132, 1_000_000_000))
    turns = 1e9 / (132 * 256 * 32)
    assert time.bytes == pytest.approx(1e9 / 3.0e12)
    assert time.latency == pytest.approx(turns * 0.7e-6)
    assert time.issue == pytest.approx(256 * turns * 16 / (128 * 0.7 * 1.75e9))


def test_a_kernel_that_looks_into_blocks_takes_two_turns_of_its_loops_only() -> None:
    straight, loop = kernel(16, 32, 32), kernel(16, 32, 32, loops=True)
    assert kernel_time(H100, Launch(loop, 1, looks=True)).latency == pytest.approx(2 * 0.7e-6)
    assert kernel_time(H100, Launch(straight, 1, looks=True)).latency == pytest.approx(0.7e-6)


def test_launches_add_up_and_the_share_counts_needed_bytes_only() -> None:
    launch = Launch(kernel(32, 64, 64), 100_000)
    one = kernel_time(H100, launch).total
    assert call_time(H100, [launch, launch]) == pytest.approx(2e-6 + 1e-6 + 2 * one)
    assert share(H100, [launch], 1_638_400_000) == pytest.approx(1.6384e9 / 3.0e12 / (2e-6 + one))
    assert A100.copy < H100.copy


def test_every_launcher_of_the_package_has_a_case() -> None:
    ops = {path.parent.name for path in (cuda.ROOT / "specdec_kernels/ops").glob("*/triton_kernel.py")}
    cases = triton_calls.ROW_CASES + triton_calls.OTHER_CASES
    assert {case.op for case in cases} == ops
    assert len({case.name for case in cases}) == len(cases)


def result(spilled: int) -> dict[str, object]:
    made = ["k", 90, 256, 255, 0, spilled, [[], Work(0, {}), Work(0, {}), 0, 0]]
    return {"triton": {"cuda:90 128256": {"c": [{"kernel": made}]}}, "cuda": {}}


def test_a_spill_fails_and_a_listed_one_must_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STREAMS", {})
    monkeypatch.setattr(limits, "SPILLS", ())
    assert limits.faults(result(0)) == []
    assert limits.faults(result(8)) == ["k of c spills 8 bytes (cuda:90, 128256 ids)"]
    monkeypatch.setattr(limits, "SPILLS", (limits.Spill("triton", "cuda:90", 128256, "c", "k", 8),))
    assert limits.faults(result(8)) == []
    assert limits.faults(result(12)) != []


def test_results_are_stale_once_a_source_changed() -> None:
    content = json.loads(RESULTS.read_text())
    assert limits.stale(content) == []
    place, made_of = next((p, m) for p, m in content["made_of"].items() if "sample bf16" in m)
    made_of["sample bf16"] = "0" * 16
    assert limits.stale(content) == [
        f"bench/results/gpu-model.json is old: {place}: sample bf16 has changed (make gpu-model)"
    ]
    for made_of in content["made_of"].values():
        made_of.pop("sample bf16", None)
    assert "sample bf16" in limits.missing(content)


def test_a_case_is_made_of_what_its_launcher_imports() -> None:
    names = {op: {path.name for path in collect.triton_sources(op)} for op in ("tree_mask", "sample")}
    assert "launch.py" in names["tree_mask"]
    assert "gather.py" not in names["tree_mask"]
    assert {"look.py", "gather.py", "records.py"} <= names["sample"]  # look.py imports the others


def test_comments_are_no_change(tmp_path: Path) -> None:
    python, cpp = tmp_path / "a.py", tmp_path / "a.cu"
    python.write_text('"""Doc."""\ndef f(x):\n    """Doc."""\n    return x + 1\n')
    cpp.write_text("int a; // word\nint b;\n")
    before = [cuda.code_of(path) for path in (python, cpp)]
    python.write_text("# why\ndef f(x):\n    return x + 1\n")
    cpp.write_text("int  a;\nint b; // other\n")
    assert [cuda.code_of(path) for path in (python, cpp)] == before
    python.write_text("def f(x):\n    return x + 2\n")
    cpp.write_text("int a;\n")
    assert all(cuda.code_of(path) != old for path, old in zip((python, cpp), before, strict=True))


def test_the_page_shows_the_committed_results() -> None:
    text = page.text(json.loads(RESULTS.read_text()), json.loads(FIRST.read_text()))
    assert text == (cuda.ROOT / "docs/gpu-model.md").read_text()
    assert max(line.count(" | ") for line in text.splitlines()) <= 7
