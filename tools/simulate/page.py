"""docs/simulator.md, from bench/results/simulated.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..gpu_model.page import table
from .timing import BATCH, CONFIGURATIONS, DRAFT, VOCAB

INTRODUCTION = """# The GPU kernels in a simulated GPU

`make simulate` runs the kernels' own PTX on a CPU. The public functions take CPU tensors, the package's launchers run
unchanged, Triton's compiler and nvcc make the PTX for sm_80, and [GPGPU-Sim](https://github.com/gpgpu-sim) executes
it. **No figure on this page comes from a GPU.** Results show whether the kernels are right; cycles are simulated.

## The simulator

GPGPU-Sim from [accel-sim's fork](https://github.com/accel-sim/gpgpu-sim_distribution), commit `667834cf`, BSD licence.
It is not part of this repository. `GPUSIM_LIB` names the built library (its configurations lie in `configs` beside it,
or where `GPUSIM_CONFIGS` says); `make` builds it in `build/gpusim` where its sources lie in `../shared/gpusim`, with
bison, flex and nvcc: two minutes on two free cores. A patch there mends these faults of that commit:

* Arithmetic is written anew from the PTX manual. `mad.wide`, `setp`, `cvt` and `fma` gave wrong results; integers
  had the wrong width or sign, NaN was not kept, rounding modes were ignored.
* `shfl` picked wrong lanes where some were inactive, and had no second result.
* Literals and address offsets had 32 bits; addresses were cut to 32 bits.
* Signed bytes were loaded without their sign. The address of a parameter could not be taken.
* Memory of the host is the GPU's global memory, so a tensor's pointer can be used as it is. Bounds, alignment and
  absent lanes of a shuffle are checked.
* Shared memory of a block may have 256 KiB (96), multiprocessors may be 144 (80). It builds with CUDA 13.

`tools/simulate/ptx.py` rewrites today's PTX into what the simulator reads: memory orders and cache hints go; `lop3`,
`redux`, conversions to and from bfloat16, `cp.async`, `ldmatrix` and `mma` (bfloat16) become other instructions. nvcc
is told to inline the functions of the CUDA sources: in the simulator a called one may get wrong structures, and rule
`traversal`, while it was one, returned a wrong status. For timed launches
`tools/simulate/schedule.py` orders the instructions of each basic block as an assembler would: the simulator issues
those of a warp as they stand, and PTX uses a value right behind the exponential that makes it. Halves of a product of
64 bits, which are registers to an assembler, are products of their own.

## What is checked

Each launch may touch the tensors that its call was given, the results, and the scratch that the launcher allocated,
which starts as bytes of 0xff. Anything else fails: a read or write outside them, a vector that is not aligned, a
shuffle that names a lane which is not there. `tests/test_simulate.py` injects each of these faults into a small kernel
and expects the report. Results are compared with the `cpu` backend: integers equal, float32 within 2e-5 and 1e-5.
"""
LIMITS = """## What the simulator cannot see

* Memory is sequentially consistent: a missing fence changes nothing. `make race` looks for those.
* Blocks of one launch run one after another where no cycle is counted; a missing barrier shows in timed runs only.
* PTX is executed, not machine code: the assembler's registers and what it fuses are not seen, and its schedule only
  within basic blocks. Arguments are read from memory. A packed maximum of bfloat16 costs eight instructions, not one.
* No tensor cores: `mma` is done by shuffles and `fma` (`tree_attention` in bfloat16), its rounding is not the GPU's.
  No copies of Hopper (`cp.async.bulk`, `mbarrier`, `wgmma`), no clusters, streams or graphs.
* `cp.async` and `ldmatrix` are replaced by loads that wait. Kernels that hold them (`tree_attention`, and with filters
  some of the others) are not timed.
* Only bounds of global memory are checked, not those of shared memory.
* Approximate functions (`ex2.approx`, `lg2.approx`, `rcp.approx`) are exact to float32.
* The configuration that is like an A100 is a V100's with the multiprocessors, clocks and L2 cache of an A100; nobody
  has compared it with one.
"""


def functional(content: dict[str, Any]) -> Iterator[str]:
    """The cases that ran, and those with another result."""
    yield "## Results\n"
    for backend, found in content["functional"].items():
        right = [name for name, one in found.items() if one["verdict"] == "equal"]
        days = sorted({one["date"] for one in found.values()})
        yield f"### {backend.capitalize()}: {len(right)} of {len(found)} cases equal ({', '.join(days)})\n"
        rows = (
            [name, one["launches"], f"{one['instructions'] / 1e6:.1f}", one["seconds"], one["commit"]]
            for name, one in found.items()
        )
        yield table(["case", "launches", "million instructions", "seconds", "commit"], rows)
        for name in found.keys() - set(right):
            yield f"* **{name}**: {found[name]['verdict']}\n"


def timed(content: dict[str, Any]) -> Iterator[str]:
    """Cycles by configuration."""
    yield "## Simulated cycles\n"
    yield (
        f"{VOCAB} ids, batch {BATCH}, draft {DRAFT}: so few rows leave most of a GPU idle; latency shows more than\n"
        "bandwidth. The first launch finds cold caches. `bytes a cycle` counts what the rule must read; for the copy,\n"
        "what it reads and writes. Rivals are given the float32 rows that they ask for; their PyTorch operations\n"
        "around the kernels are not counted. vLLM's filters are left out.\n\n"
        "**One row is where our draws are slow here.** They run half of the instructions of vLLM's, in one block a\n"
        "request, while the other multiprocessors wait: `ratio` takes 2.5 times vLLM's cycles in CUDA (two launches\n"
        "against five; the gaps between launches are not counted) and 3.3 times in Triton. vLLM draws noise for every\n"
        "id, in a block for each 1,024 of them. An H200 says otherwise: CUDA's `ratio` takes 20.0 us there at batch\n"
        "1, vLLM's 2.3 times as long ([On a GPU](gpu.md)). The simulator fetches instructions at no cost, where a GPU\n"
        "waits for those of code that runs once. So Philox is a loop in CUDA, of PTX that moves every word in each\n"
        "round: with its rounds written out `chain_kernel` of `ratio` takes 30,400 cycles (RTX 3070), not 60,400.\n"
    )
    for configuration, found in content["timed"].items():
        yield f"### {CONFIGURATIONS[configuration]} (simulated)\n"

        def rows(found: dict[str, Any] = found) -> Iterator[list[Any]]:
            for name, one in found.items():
                cycles = sum(launch[3] for launch in one["launches"])
                work = sum(launch[4] for launch in one["launches"])
                kernels = ", ".join(f"{launch[0]} {launch[3]}" for launch in one["launches"])
                yield [name, one["bytes"], cycles, f"{one['bytes'] / cycles:.1f}", f"{work / 1e6:.1f}", kernels]

        head = ["call", "bytes", "cycles", "bytes a cycle", "million instructions", "cycles of each launch"]
        yield table(head, rows())


def text(content: dict[str, Any]) -> str:
    """The page."""
    return "\n".join([INTRODUCTION, *functional(content), *timed(content), LIMITS])
