"""Builds the two native libraries of the wheel; everything else is in pyproject.toml.

Both use only the stable C interface of libtorch and hold no Python code (torch.ops.load_library opens them), so one
binary serves every Python >= 3.10 and every torch >= 2.11, and `_cuda` needs nvcc but neither a GPU nor a CUDA build
of torch. Ninja follows the headers: a second build compiles only what changed.
"""

import os
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

TORCH = Path(torch.__file__).parent
DEFINES = ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DPy_LIMITED_API=0x030a0000"]  # torch 2.11, Python 3.10
INCLUDES = ["-Icsrc", "-isystem", str(TORCH / "include"), "-isystem", str(TORCH / "include/torch/csrc/api/include")]
COMMON = ["-std=c++20", "-O3", *DEFINES, *INCLUDES]
# No contraction: the arithmetic that all backends share must round after every step (csrc/common/hd.h).
HOST = ["-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
ARCHITECTURES = (80, 90, 100, 120)
# libtorch.so depends on libtorch_cuda.so where torch has CUDA, so it alone serves both libraries.
LIBTORCH = ["-Wl,--no-as-needed", f"-L{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu"]


def sources(folder: str, suffix: str) -> list[str]:
    return sorted(map(str, Path("csrc", folder).glob(f"*.{suffix}")))


def find_nvcc() -> tuple[str | None, str]:
    """Path of nvcc, or None and why `_cuda` is not built."""
    if os.environ.get("SPECDEC_BUILD_CUDA", "1") == "0":
        return None, "SPECDEC_BUILD_CUDA=0"
    if not sources("cuda", "cu"):
        return None, "csrc/cuda holds no .cu file"
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=str(Path(home, "bin")) if home else None)
    return nvcc, "" if nvcc else f"no nvcc in {'CUDA_HOME=' + home if home else 'PATH (set CUDA_HOME to name one)'}"


def gencode(nvcc: str) -> list[str]:
    """Machine code for the GPUs we name (TORCH_CUDA_ARCH_LIST overrides), and PTX of the last for later ones."""
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if wanted:
        names = [(a.removesuffix("+PTX").replace(".", ""), a.endswith("+PTX")) for a in wanted]
    else:
        known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
        here = [str(a) for a in ARCHITECTURES if f"sm_{a}" in known]
        names = [(a, a == here[-1]) for a in here]
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a, _ in names]
    return flags + [f"-gencode=arch=compute_{a},code=compute_{a}" for a, ptx in names if ptx]


class BuildNative(build_ext):
    """Compile an extension's sources with ninja: C++ for `_cpu`, nvcc for `_cuda`."""

    def build_extension(self, ext: Extension) -> None:
        """Write build.ninja for `ext` and run it."""
        cxx = shlex.split(os.environ.get("CXX", "c++"))
        if ext.name.endswith("_cuda"):
            nvcc, _ = find_nvcc()
            host = [*HOST, "-Wno-unused-parameter"]
            compiler = [nvcc, "-ccbin", cxx[-1], "--cudart=static"]
            flags = [*COMMON, "-DUSE_CUDA", "-Xcompiler", ",".join(host), *gencode(nvcc)]
            link = [flag.replace("-Wl,", "-Xlinker=") for flag in LIBTORCH]
        else:
            compiler, flags, link = cxx, [*COMMON, *HOST], LIBTORCH
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(self.build_temp, ext.name)
        folder.mkdir(parents=True, exist_ok=True)
        self.write_ninja(folder, target, ext.sources, compiler, flags, link)
        ninja = [sys.executable, "-m", "ninja"] if find_spec("ninja") else ["ninja"]
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        subprocess.run([*ninja, "-f", folder / "build.ninja", *jobs], check=True)

    def write_ninja(self, folder, target, files, compiler, flags, link) -> None:
        """One edge a source file, one for the library; paths are relative to the repository."""
        command, options, libraries = (
            shlex.join(map(str, part)).replace("$", "$$") for part in (compiler, flags, link)
        )
        lines = [
            f"builddir = {folder}",
            f"rule compile\n  command = {command} {options} -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d\n  deps = gcc\n  description = compile $in",
            f"rule link\n  command = {command} -shared $in -o $out {libraries}\n  description = link {target.name}",
        ]
        objects = [str(folder / (Path(file).name + ".o")) for file in files]
        lines += [f"build {obj}: compile {file}" for obj, file in zip(objects, files, strict=True)]
        path = str(target).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
        lines += [f"build {path}: link {' '.join(objects)}", f"default {path}"]
        (folder / "build.ninja").write_text("\n".join(lines) + "\n")


extensions = [Extension("specdec_kernels._cpu", sources("cpu", "cpp"), py_limited_api=True)]
nvcc, reason = find_nvcc()
if nvcc:
    extensions.append(Extension("specdec_kernels._cuda", sources("cuda", "cu"), py_limited_api=True))
elif "build_ext" in sys.argv or "bdist_wheel" in sys.argv or "editable_wheel" in sys.argv:
    print(f"specdec_kernels: building for the CPU only ({reason})", file=sys.stderr)
setup(
    ext_modules=extensions,
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
