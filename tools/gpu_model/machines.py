"""GPUs of the model: rates, sizes, and how many blocks of a kernel one multiprocessor holds."""

from __future__ import annotations

from typing import NamedTuple


class Machine(NamedTuple):
    """A GPU as the model sees it. `copy` is the rate of a large copy, read and written bytes together."""

    name: str
    arch: int
    copy: float  # bytes a second
    processors: int
    clock: float  # Hz


A100 = Machine("A100", 80, 1.75e12, 108, 1.41e9)
H100 = Machine("H100", 90, 3.0e12, 132, 1.75e9)
H200 = Machine("H200", 90, 4.3e12, 132, 1.75e9)
B200 = Machine("B200", 100, 7.2e12, 148, 1.85e9)
MACHINES = (A100, H100, H200, B200)


class Limits(NamedTuple):
    """What one multiprocessor has."""

    registers: int
    shared: int  # bytes that blocks can have together
    threads: int
    blocks: int


PROCESSOR = {
    80: Limits(65536, 164 * 1024, 2048, 32),
    90: Limits(65536, 228 * 1024, 2048, 32),
    100: Limits(65536, 228 * 1024, 2048, 32),
    120: Limits(65536, 100 * 1024, 1536, 24),
}
RESERVED_SHARED = 1024  # bytes of shared memory that the system keeps for itself in every block


def resident_blocks(arch: int, registers: int, shared: int, threads: int) -> int:
    """Blocks of a kernel that one multiprocessor holds at once; 0 if one is too large."""
    have = PROCESSOR[arch]
    warps = -(-threads // 32)
    a_warp = -(-registers * 32 // 256) * 256  # registers are given to warps in units of 256
    by_registers = have.registers // a_warp // warps if a_warp else have.blocks
    by_shared = have.shared // (-(-(shared + RESERVED_SHARED) // 128) * 128)
    return min(by_registers, by_shared, have.threads // (warps * 32), have.blocks)


# Results a clock of one multiprocessor, from the throughput table of NVIDIA's CUDA C++ Programming Guide; what it does
# not list (LDG, LDS, SHFL by bytes; IMAD.WIDE) is half or a quarter of its neighbour's. The issue limit is 128.
ISSUE = 128
RATES = {
    "fp32": {80: 64, 90: 128, 100: 128, 120: 128},
    "imad": {80: 64, 90: 64, 100: 64, 120: 64},
    "wide": {80: 32, 90: 32, 100: 32, 120: 32},
    "alu": {80: 64, 90: 64, 100: 64, 120: 64},
    "half": {80: 64, 90: 64, 100: 64, 120: 64},
    "fp64": {80: 32, 90: 64, 100: 64, 120: 2},
    "special": {80: 16, 90: 16, 100: 16, 120: 16},
    "memory": {80: 32, 90: 32, 100: 32, 120: 32},
    "redux": {80: 16, 90: 16, 100: 16, 120: 16},
}
# Units that are one piece of hardware: their shares add up.
SHARED_UNITS = (("fp32", "imad", "wide", "half"), ("alu",), ("fp64",), ("special",), ("memory",), ("redux",))
_UNITS = {
    "fp32": "FADD FMUL FFMA FSWZADD",
    "imad": "IMAD IMUL VIMAD",
    "half": "HADD2 HFMA2 HMUL2 HMNMX2 HSETP2 HSET2 VHMNMX",
    "alu": "IADD IADD3 VIADD LOP LOP3 ISETP FSETP FMNMX FMNMX3 IMNMX IMNMX3 VIMNMX VIMNMX3 VIADDMNMX SEL FSEL PRMT SHF "
    "LEA MOV PLOP3 FCHK F2FP P2R R2P IABS ISCADD SGXT BMSK CS2R VABSDIFF R2UR",
    "special": "MUFU I2F I2FP F2I F2F FRND POPC FLO BREV I2I",
    "fp64": "DADD DMUL DFMA DSETP",
    "memory": "SHFL LDS STS LDSM STSM ATOMS LDG STG LD ST LDL STL LDC ATOM ATOMG RED MATCH LDGSTS S2R",
    "redux": "REDUX CREDUX",
}
UNIT_OF = {opcode: unit for unit, opcodes in _UNITS.items() for opcode in opcodes.split()}


def unit_of(opcode: str) -> str:
    """The unit whose rate an instruction is bound by; "" if only issuing it costs anything."""
    name, *modifiers = opcode.split(".")
    if name == "IMAD" and ("WIDE" in modifiers or "HI" in modifiers):
        return "wide"
    return UNIT_OF.get(name, "")


def issue_slots(arch: int, issued: float, units: dict[str, float]) -> float:
    """Slots of 128 a clock that the instructions take: issued ones, or those of the busiest unit if that is more."""
    busy = [sum(units.get(u, 0) * ISSUE / RATES[u][arch] for u in group) for group in SHARED_UNITS]
    return max(issued, *busy)
