"""Proves that a wheel depends on nothing but the stable ABIs: `python tools/audit_wheel.py dist/*.whl`.

A symbol that the native libraries leave undefined must come from the C library, the C++ runtime or the C interface of
libtorch that stays fixed between releases. One at::, c10:: or Py symbol would tie the wheel to one torch or one Python.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TAG = re.compile(r"-cp310-abi3-[a-z0-9_.]+\.whl$")
PACKAGES = {"specdec_kernels", "specdec_lab", "specdec_loop", "specdec_sglang", "specdec_vllm"}
RUNTIME = re.compile(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_[0-9.]+$")
STABLE_TORCH = re.compile(r"^(aoti_torch_|torch_)[a-z0-9_]+$")  # extern "C" names: never mangled, never _ZN2at...
TOOLCHAIN = {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable"}  # weak, may stay empty
LIBRARIES = re.compile(r"^(libtorch|libtorch_cpu|libstdc\+\+|libm|libgcc_s|libc|libdl|librt|libpthread|ld-linux.*)\.so")


def undefined_symbols(library: Path) -> list[str]:
    lines = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in lines.stdout.splitlines()]


def defined_symbols(library: Path) -> list[str]:
    lines = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in lines.stdout.splitlines()]


def needed_libraries(library: Path) -> list[str]:
    lines = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    return re.findall(r"\(NEEDED\).*\[(.+)\]", lines.stdout)


def is_allowed(symbol: str) -> bool:
    return bool(RUNTIME.search(symbol) or STABLE_TORCH.match(symbol)) or symbol in TOOLCHAIN


def newest(symbols: list[str], name: str) -> str:
    versions = {tuple(map(int, v.split("."))) for s in symbols for v in re.findall(rf"@{name}_([0-9.]+)$", s)}
    return ".".join(map(str, max(versions, default=(0,))))


def faults_of_library(library: Path) -> list[str]:
    undefined = undefined_symbols(library)
    faults = [f"undefined symbol outside the stable ABIs: {s}" for s in undefined if not is_allowed(s)]
    faults += [f"defines {s}: it must not be a Python module" for s in defined_symbols(library) if "PyInit" in s]
    faults += [f"needs {name}" for name in needed_libraries(library) if not LIBRARIES.match(name)]
    stable = [s for s in undefined if STABLE_TORCH.match(s)]
    print(
        f"  {library.name}: {library.stat().st_size / 1e6:.1f} MB, {len(undefined)} undefined symbols, of these"
        f" {len(stable)} stable libtorch; needs glibc {newest(undefined, 'GLIBC')},"
        f" libstdc++ {newest(undefined, 'GLIBCXX')}"
    )
    return [f"{library.name}: {fault}" for fault in faults]


def faults_of_wheel(wheel: Path) -> list[str]:
    print(wheel.name)
    faults = [] if TAG.search(wheel.name) else [f"{wheel.name}: the tag must be cp310-abi3"]
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
        if tops != PACKAGES:
            faults.append(f"{wheel.name}: must hold {sorted(PACKAGES)}, holds {sorted(tops)}")
        faults += [f"{wheel.name}: no {p}/py.typed" for p in sorted(PACKAGES) if f"{p}/py.typed" not in names]
        libraries = [name for name in names if name.endswith(".so")]
        if "specdec_kernels/_cpu.abi3.so" not in libraries:
            faults.append(f"{wheel.name}: no specdec_kernels/_cpu.abi3.so")
        for name in libraries:
            faults += faults_of_library(Path(archive.extract(name, folder)))
    return faults


def main() -> None:
    wheels = [Path(name) for name in sys.argv[1:]]
    if not wheels:
        sys.exit("usage: python tools/audit_wheel.py WHEEL...")
    faults = [fault for wheel in wheels for fault in faults_of_wheel(wheel)]
    if faults:
        sys.exit("\n".join(faults))
    print(f"  abi3, {len(PACKAGES)} packages, no symbol beyond the stable ABIs")


if __name__ == "__main__":
    main()
