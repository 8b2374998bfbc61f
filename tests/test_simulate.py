"""The simulated GPU: PTX is rewritten without changing what it computes, and a forbidden access is reported."""

from __future__ import annotations

import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from op_calls import gathered

from specdec_kernels import gather_nodes
from specdec_kernels._triton import launch as host
from tools.simulate import gpgpusim, page, ptx, results
from tools.simulate.gpgpusim import Fault, Simulator, absence
from tools.simulate.memory import Watch, extent
from tools.simulate.schedule import halved, scheduled

MASK = 2**32 - 1


def signed(x: int) -> int:
    return x - (x >> 31 << 32)


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b,
    "xor": lambda a, b: a ^ b,
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "min": min,
    "max": lambda a, b: max(signed(a), signed(b)),
}  # fmt: skip


def evaluate(text: str, **registers: int) -> dict[str, int]:
    """What straight PTX on 32-bit integers leaves in its registers."""
    for opcode, given in re.findall(r"^\s*([a-z]+)\.[\w.]+ ([^;]*);", text, re.MULTILINE):
        result, *operands = given.split(", ")
        if opcode == "reg":
            continue
        values = [registers[o] if o in registers else int(o) & MASK for o in operands]
        if opcode in ("mov", "cvt"):
            registers[result] = values[0]
        elif opcode == "not":
            registers[result] = ~values[0] & MASK
        else:
            registers[result] = OPERATIONS[opcode](*values) & MASK
    return registers


@pytest.mark.parametrize("result", ["d", "a"])
def test_any_function_of_three_bits_keeps_its_truth_table(result: str) -> None:
    a, b, c = 0b11110000, 0b11001100, 0b10101010  # bit i holds row i of the table
    for table in range(256):
        lowered = ptx.lower(f"lop3.b32 {result}, a, b, c, {table:#x};")
        assert evaluate(lowered, a=a, b=b, c=c)[result] & 0xFF == table


def test_common_functions_of_three_bits_take_two_instructions() -> None:
    for table in (0x96, 0xF8, 0xFE, 0x80, 0x6A):  # a ^ b ^ c, a | b & c, ...
        assert len(ptx.lower(f"lop3.b32 d, a, b, c, {table:#x};").splitlines()) == 4


def test_the_limits_of_a_kernel_are_those_that_the_simulator_reads() -> None:
    lowered = ptx.lower(".visible .entry f()\n.reqntid 512\n.maxnreg 128\n{\nret;\n}\n")
    assert ".maxntid 512, 1, 1" in lowered
    assert "maxnreg" not in lowered


def test_bfloat16_is_rounded_as_torch_does_and_keeps_nan() -> None:
    x = torch.cat([torch.randn(50) * 10.0 ** torch.randint(-30, 30, (50,)), torch.tensor([float("inf"), -0.0, 3.4e38])])
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00000001], dtype=torch.int32).view(torch.float32)
    x = torch.cat([x, ties])
    lowered = ptx.lower("cvt.rn.bf16x2.f32 d, a, b;")
    for value, wanted in zip(x.view(torch.int32).tolist(), x.bfloat16().view(torch.int16).tolist(), strict=True):
        assert evaluate(lowered, a=value & MASK, b=0)["d"] == (wanted & 0xFFFF) << 16
        assert evaluate(lowered, a=0, b=value & MASK)["d"] == wanted & 0xFFFF
    for nan in (0x7FC00000, 0xFFFFFFFF, 0x7F800001):
        assert evaluate(ptx.lower("cvt.rn.bf16.f32 d, a;"), a=nan)["d"] & 0x7FFF == 0x7FFF


def lines(text: str) -> list[str]:
    return ptx.lower(text).split("\n")[:-1]


def test_orders_and_hints_go_and_fences_stay() -> None:
    assert lines("ld.acquire.gpu.global.L1::evict_last.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1+16];") == [
        "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1+16];"
    ]
    assert lines("ld.global.L2::cache_hint.b32 %r1, [%rd1], %rd9;") == ["ld.global.b32 %r1, [%rd1];"]
    assert lines("@%p1 fence.acq_rel.gpu;") == ["@%p1 membar.gl;"]


def test_statements_share_lines_and_scopes_open_on_them() -> None:
    text = "$L1: { .reg .pred p; setp.eq.u32 p, %r1, 0; @p bra $L1; } // end\nmov.b64 {%r1, _}, %rd1;"
    assert lines(text) == [
        "$L1:", "{", ".reg .pred p;", "setp.eq.u32 p, %r1, 0;", "@p bra $L1;", "}", "mov.b64 {%r1, _}, %rd1;",
    ]  # fmt: skip


def test_a_guard_covers_all_that_replaces_an_instruction() -> None:
    assert lines("@!%p1 atom.global.acq_rel.gpu.add.u32 %r1, [%rd1], 1;") == [
        "@%p1 bra $skip_0_1;", "atom.global.add.u32 %r1, [%rd1], 1;", "$skip_0_1:",
    ]  # fmt: skip
    replaced = lines("@%p1 cvt.f32.bf16 %f1, %rs1;")
    assert all(line.startswith("@%p1 ") for line in replaced[2:]) and len(replaced) == 5
    copied = lines("@%p1 cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x4, %r2;")
    assert copied[0] == "@!%p1 bra $skip_0_2;" and copied[-1] == "$skip_0_2:"


def test_a_second_result_of_a_shuffle_stays_where_it_is_read() -> None:
    shuffle = "shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, -1;"
    assert lines(shuffle) == ["shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;"]
    assert lines(f"{shuffle} @%p1 ret;")[0] == shuffle


def test_a_half_that_nobody_has_written_is_not_moved() -> None:
    move = "mov.b64 %rd1, {%r1, %r2};"
    assert lines(move) == ["mov.b64 %rd1, {%r1, %r1};"]
    assert lines(f"mov.b32 %r2, 1; {move}")[1] == move


def chain(name: str, count: int = 1) -> list[str]:
    return [f"ex2.approx.f32 %{name}{i + 1}, %{name}{i};" for i in range(count)]


def test_what_does_not_wait_stands_between_a_value_and_its_use() -> None:
    text = [*chain("a", 2), *chain("b", 2), *chain("c", 2)]
    assert scheduled(text) == [text[i] for i in (0, 2, 4, 1, 3, 5)]


def test_a_schedule_keeps_what_instructions_depend_on() -> None:
    for kept in (
        ["ld.global.b32 %r1, [%rd1];", "st.global.b32 [%rd2], %r9;", "ld.global.b32 %r2, [%rd1];"],  # may be one place
        ["add.s32 %r1, %r2, 1;", "mov.b32 %r2, 5;", "mov.b32 %r1, %r2;"],  # registers that are used again
        ["setp.eq.s32 %p1, %r1, 0;", "@%p1 mov.b32 %r3, 1;", "add.s32 %r4, %r3, 1;"],  # a guard is read
        ["ex2.approx.f32 %f1, %f0;", "bar.sync 0;", "mov.b32 %r1, 1;"],
        ["mov.b32 %r1, 1;", "$L1:", "ex2.approx.f32 %f1, %f0;", "{", ".reg .pred p;", "mov.b32 %r2, 1;", "}"],
        ["shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;", "shfl.sync.bfly.b32 %r3, %r4, 1, 31, -1;", "mov.b32 %r9, %r1;"],
    ):
        assert scheduled(kept) == kept
    loads = ["mov.b32 %r7, 1;", "mov.b32 %r8, %r7;", "ld.global.nc.b32 %r1, [%rd1];", "st.global.b32 [%rd2], %r8;"]
    assert scheduled(loads)[0] == loads[2]  # memory that nobody writes


def test_halves_of_a_product_are_two_products() -> None:
    product = ["mul.wide.u32 %rd1, %r1, -766435501;", "shr.u64 %rd2, %rd1, 32;"]
    halves = ["cvt.u32.u64 %r2, %rd2;", "cvt.u32.u64 %r3, %rd1;"]
    low, high = "mul.lo.u32 %r3, %r1, -766435501;", "mul.hi.u32 %r2, %r1, -766435501;"
    assert halved([*product, *halves, "add.u32 %r4, %r2, %r3;"]) == [low, high, "add.u32 %r4, %r2, %r3;"]
    assert halved([*product, halves[0]]) == [high]
    assert halved([product[0], halves[1]]) == [low]
    for use in ("add.u64 %rd3, %rd1, 1;", "add.u64 %rd3, %rd2, 1;", "@%p1 cvt.u32.u64 %r5, %rd1;", halves[1]):
        kept = [*product, *halves, use]
        assert halved(kept) == kept


def test_only_timed_launches_are_scheduled() -> None:
    text = "\n".join([*chain("a", 2), *chain("b", 2)])
    assert lines(text) == text.split("\n")
    assert ptx.lower(text, timed=True).split("\n")[:-1] == scheduled(text.split("\n"))


def test_instructions_that_are_not_there_are_named() -> None:
    with pytest.raises(ptx.Unsupported, match=r"wgmma\.mma_async"):
        ptx.lower("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;")
    copy = "cp.async.ca.shared.global [%r1], [%rd1], 16;"
    ptx.lower(copy)
    with pytest.raises(ptx.Unsupported, match=r"cp\.async"):
        ptx.lower(copy, timed=True)


def test_arguments_are_found_where_the_kernel_reads_them() -> None:
    text = (
        ".visible .entry k(.param .u32 a, .param .u64 .ptr .global .align 1 b, .param .align 8 .b8 c[20], .param .u8 d)"
    )
    assert ptx.parameters(text) == {"k": [(4, 0), (8, 8), (20, 16), (1, 36)]}


def test_a_launch_may_touch_what_the_op_was_given_and_its_scratch() -> None:
    seen = []
    args, kwargs = gathered(0)

    def look(*_: object, **__: object) -> None:
        torch.empty(7)
        seen.append(watch.ranges())

    with mock.patch.object(host, "launch", look), Watch() as watch:
        result = gather_nodes(*args, **kwargs, backend="triton")
    (ranges,) = seen
    for tensor in (*args, result.values, result.status):
        assert extent(tensor) in ranges
    assert 7 * 4 in [length for _, length in ranges]
    assert watch.ranges() == []
    assert extent(torch.zeros(4, 6)[::2, 1:3].transpose(0, 1))[1] == (2 * 6 + 1 + 1) * 4


def test_the_page_shows_the_committed_results() -> None:
    shown = page.text(results.load())
    assert shown == (gpgpusim.ROOT / "docs/simulator.md").read_text()
    assert max(line.count(" | ") for line in shown.splitlines()) <= 7


def test_without_a_library_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSIM_LIB", "/nowhere/libgpusim.so")
    assert "GPUSIM_LIB" in str(absence())


# Pairs of 8 bytes are read, neighbours add theirs. Faults: another offset; half a warp that leaves before it shuffles.
NEIGHBOURS = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry {name}(.param .u64 source, .param .u64 result)
{{
.reg .pred %p<2>;
.reg .b32 %r<8>;
.reg .b64 %rd<7>;
ld.param.u64 %rd1, [source];
ld.param.u64 %rd2, [result];
mov.u32 %r1, %tid.x;
setp.ge.u32 %p1, %r1, {lanes};
@%p1 bra $done;
mul.wide.u32 %rd3, %r1, 8;
add.s64 %rd4, %rd1, %rd3;
ld.global.v2.u32 {{%r2, %r3}}, [%rd4+{offset}];
add.u32 %r4, %r2, %r3;
shfl.sync.bfly.b32 %r5|%p1, %r4, 1, 31, -1;
add.u32 %r6, %r4, %r5;
mul.wide.u32 %rd5, %r1, 4;
add.s64 %rd6, %rd2, %rd5;
st.global.u32 [%rd6+{shift}], %r6;
$done:
ret;
}}
"""


@pytest.fixture(scope="module")
def gpu() -> Simulator:
    if reason := absence():
        pytest.skip(reason)
    return Simulator()


def add_neighbours(gpu: Simulator, name: str, lanes: int = 32, offset: int = 0, shift: int = 0) -> torch.Tensor:
    """32 lanes; behind the tensors lies memory that is not theirs."""
    source = torch.arange(80, dtype=torch.int32)[:64]
    result = torch.zeros(40, dtype=torch.int32)[:32]
    gpu.load(NEIGHBOURS.format(name=name, lanes=lanes, offset=offset, shift=shift), {})
    gpu.memory([extent(source), extent(result)])
    pointers = [t.data_ptr().to_bytes(8, "little") for t in (source, result)]
    run = gpu.launch(name, (1,), 32, pointers, 0, timed=False)
    assert run.count > 32 * 10
    return result


@pytest.mark.slow
def test_a_sound_kernel_runs(gpu: Simulator) -> None:
    lane = torch.arange(32)
    assert torch.equal(add_neighbours(gpu, "sound"), (4 * lane + 1 + 4 * (lane ^ 1) + 1).int())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("reads_past_the_end", {"offset": 8}, "read of [48] bytes .* outside all allocations"),
        ("reads_before_the_start", {"offset": -8}, "read of [48] bytes .* outside all allocations"),
        ("writes_past_the_end", {"shift": 4}, "write of 4 bytes .* outside all allocations"),
        ("reads_a_misaligned_vector", {"offset": 4}, "misaligned address .* of 8 bytes"),
        ("shuffles_with_an_absent_lane", {"lanes": 16}, "names lane 16, which does not take part"),
    ],
)  # fmt: skip
def test_an_injected_fault_is_reported(gpu: Simulator, name: str, fault: dict[str, int], message: str) -> None:
    with pytest.raises(Fault, match=f"{name}.*{message}"):
        add_neighbours(gpu, name, **fault)


def test_a_library_that_is_named_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSIM_LIB", __file__)
    assert str(gpgpusim.library()) == __file__
    assert "GPUSIM_CONFIGS" in str(absence())
