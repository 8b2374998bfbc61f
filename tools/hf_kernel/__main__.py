"""Write the package as the Hugging Face library `kernels` (0.17) loads it: `python -m tools.hf_kernel`.

Into build/hf/specdec-kernels go build/<variant>/ with the Python files and the native libraries, CARD.md, benchmarks/,
and for kernel-builder build.toml with the sources it names. A process can hold several versions: each build has a
module name and a namespace of torch.ops of its own, by default one with a hash of what it is made of.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "specdec_kernels"
HERE = Path(__file__).parent
NAME, TORCH = "specdec-kernels", (2, 11)  # the torch that setup.py builds for
# Python code names it in one place, specdec_kernels/_ops.py.
NAMESPACE_LINE = 'NAMESPACE = "specdec_kernels"'


def files_of(folder: Path, *suffixes: str) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix in suffixes)


def python_files() -> list[Path]:
    return [*files_of(PACKAGE, ".py"), PACKAGE / "py.typed"]


def own_namespace(backend: str) -> str:
    """A namespace that no other state of the sources has."""
    hasher = hashlib.sha256()
    for path in [ROOT / "setup.py", *python_files(), *files_of(ROOT / "csrc", ".cpp", ".cu", ".h", ".cuh")]:
        hasher.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return f"_specdec_kernels_{backend}_{hasher.hexdigest()[:10]}"


def build_libraries(namespace: str, backend: str) -> list[Path]:
    """Compile for `namespace`; objects stay in build/hf, so a second build of it compiles only what changed."""
    folder = ROOT / "build" / "hf" / namespace
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", folder / "lib"]
    settings = {"SPECDEC_NAMESPACE": namespace, "SPECDEC_BUILD_CUDA": "1" if backend == "cuda" else "0"}
    subprocess.run([*command, "--build-temp", folder / "objects"], cwd=ROOT, env=os.environ | settings, check=True)
    return files_of(folder / "lib", ".so")


def variant_name(backend: str) -> str:
    """The stable-ABI form: it serves TORCH and every later torch."""
    arch = f"{platform.machine()}-{platform.system().lower()}"
    return f"torch-stable-abi{TORCH[0]}{TORCH[1]}-{cuda_release() if backend == 'cuda' else 'cpu'}-{arch}"


def nvcc() -> str:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin" if home else None) or sys.exit("hf_kernel: no nvcc")


def cuda_release() -> str:
    """Release of nvcc in the spelling of a variant: cu128."""
    told = subprocess.run([nvcc(), "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", told)
    return f"cu{found[1]}{found[2]}" if found else sys.exit(f"hf_kernel: nvcc names no release: {told}")


def cuda_archs() -> list[str]:
    """What setup.py compiles for, in the spelling of metadata.json: 9.0, 12.0+PTX."""
    from setup import gencode

    codes = [flag.rpartition("code=")[2] for flag in gencode(nvcc())]
    versions = {code: re.sub(r"(\d)([af]?)$", r".\1\2", code.partition("_")[2]) for code in codes}
    portable = {versions[code] for code in codes if code.startswith("compute_")}
    return [v + ("+PTX" if v in portable else "") for code, v in versions.items() if code.startswith("sm_")]


def write_variant(folder: Path, namespace: str, backend: str, libraries: list[Path]) -> None:
    """One build variant: the package itself, its operators in `namespace`, and metadata.json."""
    shutil.rmtree(folder, ignore_errors=True)
    copy_package(folder)
    ops = (PACKAGE / "_ops.py").read_text()
    if ops.count(NAMESPACE_LINE) != 1:
        sys.exit(f"hf_kernel: _ops.py must have one line {NAMESPACE_LINE}")
    (folder / "_ops.py").write_text(ops.replace(NAMESPACE_LINE, f'NAMESPACE = "{namespace}"'))
    for library in libraries:
        shutil.copy2(library, folder)
    contents = sorted(p for p in folder.rglob("*") if p.is_file())
    metadata = {
        "name": NAME,
        "id": namespace,
        "version": 0,  # by the convention of `kernels` that of an interface that may still change
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": backend} | ({"archs": cuda_archs()} if backend == "cuda" else {}),
        "digest": {"algorithm": "sha256", "files": {p.relative_to(folder).as_posix(): digest(p) for p in contents}},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def copy_package(folder: Path) -> None:
    for path in python_files():
        target = folder / path.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def digest(path: Path) -> str:
    return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()


def write_sources(folder: Path) -> None:
    """build.toml (edition 5) and what it names. kernel-builder generates _ops.py itself."""
    for name in ("csrc", "torch-ext"):
        shutil.rmtree(folder / name, ignore_errors=True)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    package = folder / "torch-ext" / NAME.replace("-", "_")
    copy_package(package)
    (package / "_ops.py").unlink()
    version = ".".join(map(str, TORCH))
    own = ["-std=c++20", "-ffp-contract=off", "-DSPECDEC_NAMESPACE=TORCH_EXTENSION_NAME"]
    nvidia = ["-std=c++20", "-Xcompiler", "-ffp-contract=off", own[-1]]
    lines = [
        "# For kernel-builder. The variants beside it were built by tools/hf_kernel, not from this file nor with Nix.",
        f'[general]\nname = "{NAME}"\nversion = 0\nedition = 5\nlicense = "apache-2.0"\nbackends = ["cpu", "cuda"]\n',
        f'[torch]\nsrc = []\n\n[torch.stable-abi]\ncpu = "{version}"\ncuda = "{version}"\n',
    ]
    for backend, suffixes, flags in (
        ("cpu", (".cpp", ".h"), f"cxx-flags = {json.dumps(own)}"),
        ("cuda", (".cu", ".cuh", ".h"), f"cuda-flags = {json.dumps(nvidia)}"),
    ):
        folders = [folder / "csrc" / name for name in ("common", "torch", backend)]
        sources = [p.relative_to(folder).as_posix() for f in folders for p in files_of(f, *suffixes)]
        listed = "".join(f'    "{source}",\n' for source in sources)
        lines.append(f'[kernel.{backend}]\nbackend = "{backend}"\ndepends = ["torch"]\ninclude = ["csrc"]\n{flags}')
        lines.append(f"src = [\n{listed}]\n")
    (folder / "build.toml").write_text("\n".join(lines))


def write_pages(folder: Path) -> None:
    """CARD.md, and the script that `kernels benchmark` runs."""
    init = (PACKAGE / "__init__.py").read_text()
    names = re.findall(r'^    "([a-z]\w*)",$', init, re.M)
    version = re.search(r'^__version__ = "(.+)"$', init, re.M)[1]  # type: ignore[index]
    card = (HERE / "card.md.in").read_text()
    (folder / "CARD.md").write_text(card.replace("{functions}", str(len(names))).replace("{version}", version))
    (folder / "benchmarks").mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "benchmark_ops.py", folder / "benchmarks")


def write(out: Path, namespace: str, backend: str, libraries: list[Path]) -> Path:
    """The whole layout with one variant, beside those of other backends; returns its folder."""
    variant = out / "build" / variant_name(backend)
    write_variant(variant, namespace, backend, libraries)
    write_sources(out)
    write_pages(out)
    return variant


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu", help="cuda needs nvcc and holds both")
    parser.add_argument("--namespace", help="of torch.ops, and module name; default: one with a hash of the sources")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "hf" / NAME, help="folder (default: %(default)s)")
    given = parser.parse_args()
    namespace = given.namespace or own_namespace(given.backend)
    if not re.fullmatch(r"[A-Za-z_]\w*", namespace, re.ASCII):
        parser.error(f"--namespace must be an identifier, got {namespace!r}")
    variant = write(given.out, namespace, given.backend, build_libraries(namespace, given.backend))
    print(f"{variant}: torch.ops.{namespace}")


if __name__ == "__main__":
    main()
