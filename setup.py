"""Builds the native libraries of the wheel; everything else is in pyproject.toml.

`_cpu` is always built, `_cuda` where the installed torch has CUDA or where SPECDEC_BUILD_CUDA=1 asks for it. Both use
only the stable C interface of libtorch and hold no Python code (torch.ops.load_library opens them), so one binary
serves every Python >= 3.10 and every torch >= 2.11, and `_cuda` needs nvcc but neither a GPU nor a CUDA build of torch.
Ninja follows the headers, and objects stay in build/: a second build compiles only what changed.
"""

import os
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

torch = import_module("torch") if find_spec("torch") else None
# Commands that end in a wheel or in a library. The others (sdist, egg_info, --version) need no torch.
BUILDS = {"dist_info", "build", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"}
TORCH = Path(torch.__file__).parent if torch else Path()
INCLUDES = ["-Icsrc", "-isystem", str(TORCH / "include"), "-isystem", str(TORCH / "include/torch/csrc/api/include")]
COMMON = ["-std=c++20", "-O3", "-DTORCH_TARGET_VERSION=0x020b000000000000", *INCLUDES]  # torch 2.11
# No contraction: the arithmetic that all backends share must round after every step (csrc/common/hd.h).
HOST = ["-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
# Of torch.ops, where it is not that of specdec_kernels/_ops.py: tools/hf_kernel, which writes that file too, sets it.
if namespace := os.environ.get("SPECDEC_NAMESPACE"):
    COMMON.append(f"-DSPECDEC_NAMESPACE={namespace}")
ARCHITECTURES = (80, 90, 100, 120)
# libtorch.so depends on libtorch_cuda.so where torch has CUDA, so it alone serves both libraries.
LIBTORCH = ["-Wl,--no-as-needed", f"-L{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu"]

INSTALL = """\
    pip install torch 'setuptools>=77' ninja
    pip install --no-build-isolation .
"""
NO_TORCH = f"""
specdec_kernels is built against the torch that is installed, and this build sees no torch: either none is installed,
or pip builds in an isolated environment. Type:

{INSTALL}"""
CPU_FAILED = """
specdec_kernels: the CPU library was not built; the reason is above. It needs a C++20 compiler, g++ 11 or later for
example; CXX names one that is not called c++: CXX=g++-12 pip install --no-build-isolation .
"""
CUDA_FAILED = """
specdec_kernels: the CUDA library was not built; the reason is above. The CPU library is finished. To install without
CUDA, type this in the repository; it compiles nothing again:

    SPECDEC_BUILD_CUDA=0 pip install --no-build-isolation .
"""


def cxx() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def missing() -> str | None:
    """What a build needs and does not find, with the command that mends it; None if nothing."""
    if torch is None:
        return NO_TORCH
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        return f"specdec_kernels needs torch >= 2.11, got {torch.__version__}. Type:\n\n    pip install 'torch>=2.11'\n"
    if int(setuptools.__version__.split(".")[0]) < 77:
        return f"specdec_kernels needs setuptools >= 77, got {setuptools.__version__}. Type:\n\n{INSTALL}"
    if not find_spec("ninja") and not shutil.which("ninja"):
        return f"specdec_kernels needs ninja to be built. Type:\n\n{INSTALL}"
    if not shutil.which(cxx()[0]):
        return f"{cxx()[0]}: no such compiler\n{CPU_FAILED}"
    return None


def find_nvcc(torch_has_cuda: bool) -> tuple[str | None, str]:
    """Path of nvcc, or None and why `_cuda` is not built. Ends the build if CUDA is asked for and nvcc is missing."""
    asked = os.environ.get("SPECDEC_BUILD_CUDA", "")
    if asked not in ("", "0", "1"):
        sys.exit(f"SPECDEC_BUILD_CUDA must be 0 (no), 1 (yes) or unset (if torch has CUDA), got {asked!r}")
    if asked == "0":
        return None, "SPECDEC_BUILD_CUDA=0"
    if not asked and not torch_has_cuda:
        return None, "the installed torch has no CUDA; SPECDEC_BUILD_CUDA=1 builds for CUDA all the same"
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=str(Path(home, "bin")) if home else None)
    if nvcc:
        return nvcc, ""
    reason = f"no nvcc in CUDA_HOME={home}" if home else "no nvcc in PATH; CUDA_HOME names the folder of a toolkit"
    if asked:
        sys.exit(f"specdec_kernels: SPECDEC_BUILD_CUDA=1 asks for CUDA, but there is {reason}")
    return None, reason


def gencode(nvcc: str) -> list[str]:
    """Machine code for the GPUs we name (TORCH_CUDA_ARCH_LIST overrides), and PTX of the last for later ones."""
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if wanted:
        names = [(a.removesuffix("+PTX").replace(".", ""), a.endswith("+PTX")) for a in wanted]
    else:
        known = subprocess.run([nvcc, "--list-gpu-code"], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        here = [str(a) for a in ARCHITECTURES if f"sm_{a}" in known]
        names = [(a, a == here[-1]) for a in here]
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a, _ in names]
    return flags + [f"-gencode=arch=compute_{a},code=compute_{a}" for a, ptx in names if ptx]


def sources(folder: str, suffix: str) -> list[str]:
    return sorted(map(str, Path("csrc", folder).glob(f"*.{suffix}")))


class Build(build):
    """Start from an empty build/lib: a file of an earlier build there would go into the wheel."""

    def run(self) -> None:
        """Objects are elsewhere (build/temp*) and stay."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildNative(build_ext):
    """Compile the sources of each library with ninja: C++ for `_cpu`, then nvcc for `_cuda`."""

    def run(self) -> None:
        """Decide whether to build `_cuda`, and say so where it is left out."""
        self.nvcc, reason = find_nvcc(torch.version.cuda is not None)
        if self.nvcc is None:
            self.extensions = [ext for ext in self.extensions if not ext.name.endswith("_cuda")]
            print(f"specdec_kernels: building for the CPU only ({reason})", file=sys.stderr)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Build `ext`, or end with the command that helps."""
        try:
            self.compile(ext)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"{error}\n{CUDA_FAILED if ext.name.endswith('_cuda') else CPU_FAILED}")

    def compile(self, ext: Extension) -> None:
        """Write build.ninja for `ext` and run it."""
        if ext.name.endswith("_cuda"):
            host = [*HOST, "-Wno-unused-parameter"]
            compiler = [self.nvcc, "-ccbin", cxx()[-1], "--cudart=static"]
            flags = [*COMMON, "-DUSE_CUDA", "-Xcompiler", ",".join(host), *gencode(self.nvcc)]
            link = [flag.replace("-Wl,", "-Xlinker=") for flag in LIBTORCH]
        else:
            compiler, flags, link = cxx(), [*COMMON, *HOST], LIBTORCH
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        # The folder of an editable install is deleted after it, so its objects go where those of other installs are.
        kept = f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}"
        folder = Path(kept if self.editable_mode else self.build_temp, ext.name)
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


if __name__ == "__main__":
    if BUILDS & set(sys.argv) and (fault := missing()):
        sys.exit(fault)
    setup(
        ext_modules=[  # in this order: a failure of CUDA leaves a finished CPU library
            Extension("specdec_kernels._cpu", sources("cpu", "cpp"), py_limited_api=True),
            Extension("specdec_kernels._cuda", sources("cuda", "cu"), py_limited_api=True),
        ],
        cmdclass={"build": Build, "build_ext": BuildNative},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )
