"""Installing from source: what is built where, what a failure says, and what an unbuilt clone says."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import specdec_kernels
from specdec_kernels import _native

ROOT = Path(__file__).resolve().parent.parent
INSTALL = ("pip install torch 'setuptools>=77' ninja", "pip install --no-build-isolation .")
HIDE_TORCH = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path('setup.py', run_name='__main__')"
# A compiler that writes its arguments down and makes what it is asked for.
COMPILER = """#!/bin/sh
echo "$*" >> {log}
while [ $# -gt 0 ]; do
  case $1 in
    -o) out=$2 ;;
    -MF) depfile=$2 ;;
  esac
  shift
done
: > "$out"
[ -z "$depfile" ] || echo "$out:" > "$depfile"
"""
# An nvcc that knows a GPU and compiles nothing for it, and one that does nothing at all.
NVCC = """#!/bin/sh
[ "$1" = --list-gpu-code ] && { echo sm_90; exit 0; }
echo "nvcc fatal: no kernel today" >&2
exit 1
"""
BROKEN_NVCC = """#!/bin/sh
echo "nvcc fatal: broken" >&2
exit 1
"""


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """setup.py as a module: its functions, without a build."""
    spec = importlib.util.spec_from_file_location("setup_of_specdec_kernels", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)


@pytest.mark.parametrize("command", ["dist_info", "bdist_wheel", "editable_wheel", "build_ext"])
def test_a_build_that_sees_no_torch_ends_at_once_with_the_two_lines_to_type(command: str) -> None:
    ended = run(sys.executable, "-c", HIDE_TORCH, command)
    assert ended.returncode == 1
    assert [line.strip() for line in ended.stderr.splitlines() if line.startswith("    ")] == list(INSTALL)
    assert "isolated" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_version_is_read_without_torch_and_is_that_of_the_package() -> None:
    assert run(sys.executable, "-c", HIDE_TORCH, "--version").stdout.strip() == specdec_kernels.__version__


def test_an_isolated_build_does_not_fetch_a_torch() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    requires = re.search(r"\[build-system\]\nrequires = (\[.*\])", text)
    assert requires is not None
    assert "torch" not in requires[1]


@pytest.mark.parametrize(
    ("asked", "torch_has_cuda", "has_nvcc", "is_built", "says"),
    [
        (None, False, True, False, "torch has no CUDA; SPECDEC_BUILD_CUDA=1"),  # nvcc on PATH alone is no reason
        (None, True, True, True, ""),
        (None, True, False, False, "no nvcc in CUDA_HOME="),
        ("", True, True, True, ""),
        ("0", True, True, False, "SPECDEC_BUILD_CUDA=0"),
        ("1", False, True, True, ""),
    ],
)
def test_cuda_is_built_where_torch_has_it_or_where_it_is_asked_for(
    build: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    asked: str | None,
    torch_has_cuda: bool,
    has_nvcc: bool,
    is_built: bool,
    says: str,
) -> None:
    nvcc = write_program(tmp_path / "bin/nvcc", NVCC) if has_nvcc else None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("SPECDEC_BUILD_CUDA", raising=False)
    if asked is not None:
        monkeypatch.setenv("SPECDEC_BUILD_CUDA", asked)
    found, reason = build.find_nvcc(torch_has_cuda)
    assert found == (str(nvcc) if is_built else None)
    assert says in reason


def test_nvcc_is_looked_for_in_path_too(build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = write_program(tmp_path / "nvcc", NVCC)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("SPECDEC_BUILD_CUDA", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.find_nvcc(True) == (str(nvcc), "")
    nvcc.unlink()
    found, reason = build.find_nvcc(True)
    assert found is None
    assert "no nvcc in PATH; CUDA_HOME" in reason


def test_cuda_that_is_asked_for_and_cannot_be_built_ends_the_build(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("SPECDEC_BUILD_CUDA", "1")
    with pytest.raises(SystemExit, match="asks for CUDA, but there is no nvcc in CUDA_HOME="):
        build.find_nvcc(True)
    monkeypatch.setenv("SPECDEC_BUILD_CUDA", "yes")
    with pytest.raises(SystemExit, match=r"must be 0 .*, 1 .* or unset .*, got 'yes'"):
        build.find_nvcc(True)


def test_a_missing_tool_is_named_with_the_command_that_installs_it(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.missing() is None
    with monkeypatch.context() as patch:
        patch.setattr(build.torch, "__version__", "2.9.1+cu128")
        assert "torch >= 2.11, got 2.9.1+cu128" in build.missing()
        assert "pip install 'torch>=2.11'" in build.missing()
    with monkeypatch.context() as patch:
        patch.setattr(build.setuptools, "__version__", "65.5.0")
        assert "setuptools >= 77, got 65.5.0" in build.missing()
        assert all(line in build.missing() for line in INSTALL)
    with monkeypatch.context() as patch:
        patch.setattr(build, "find_spec", lambda name: None)
        patch.setenv("PATH", "/nowhere")
        assert "needs ninja" in build.missing()
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "g++-of-tomorrow -O3")
        assert "g++-of-tomorrow: no such compiler" in build.missing()
        assert "C++20" in build.missing()


def test_a_cuda_failure_says_how_to_leave_cuda_out_and_keeps_the_cpu_library(tmp_path: Path) -> None:
    log = tmp_path / "log"
    compiler = write_program(tmp_path / "c++", COMPILER.format(log=log))
    env = {"CXX": str(compiler), "CUDA_HOME": str(tmp_path), "MAX_JOBS": "2"}
    command = (sys.executable, "setup.py", "build", "--build-base", tmp_path / "build")

    for nvcc, says in ((BROKEN_NVCC, "nvcc fatal: broken"), (NVCC, "nvcc fatal: no kernel today")):
        write_program(tmp_path / "bin/nvcc", nvcc)
        failed = run(*command, SPECDEC_BUILD_CUDA="1", **env)
        assert failed.returncode == 1
        assert says in failed.stdout + failed.stderr
        assert "    SPECDEC_BUILD_CUDA=0 pip install --no-build-isolation .\n" in failed.stderr
        assert "Traceback" not in failed.stderr
        (library,) = (tmp_path / "build").glob("lib*/specdec_kernels/_cpu*.so")
    compiled = log.read_text().count(" -c ")
    assert compiled == len(list((ROOT / "csrc/cpu").glob("*.cpp")))  # once, though two builds failed

    stale = library.with_name("_deleted.py")
    stale.touch()
    passed = run(*command, SPECDEC_BUILD_CUDA="0", **env)
    assert passed.returncode == 0, passed.stderr
    assert log.read_text().count(" -c ") == compiled
    assert library.exists()
    assert not stale.exists()  # it would have gone into the wheel


def test_a_cpu_failure_names_the_compiler_that_is_needed(tmp_path: Path) -> None:
    compiler = write_program(tmp_path / "c++", "#!/bin/sh\necho 'error: unrecognized -std=c++20' >&2\nexit 1\n")
    failed = run(
        *(sys.executable, "setup.py", "build_ext", "-b", tmp_path, "-t", tmp_path),
        **{"CXX": str(compiler), "SPECDEC_BUILD_CUDA": "0"},
    )
    assert failed.returncode == 1
    assert "unrecognized -std=c++20" in failed.stdout + failed.stderr
    assert "C++20 compiler" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_an_unbuilt_clone_says_that_it_is_one_and_what_to_do(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "specdec_kernels", tmp_path / "specdec_kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    shutil.copy(ROOT / "setup.py", tmp_path)
    code = """
import torch, warnings
from specdec_kernels import RngKey, Sampling, available_backends, sample
print(available_backends("cpu")["cpu"])
zeros = torch.zeros(1, dtype=torch.int64)
arguments = dict(sampling=Sampling.full(1), rng=RngKey(zeros, zeros, zeros), purpose="draft")
try:
    sample(torch.zeros(1, 8), backend="cpu", **arguments)
except RuntimeError as error:
    print(error)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    sample(torch.zeros(1, 8), **arguments)
print([str(w.message) for w in caught if "reference" in str(w.message)])
"""
    ran = run(sys.executable, "-c", code, cwd=tmp_path, SPECDEC_BACKEND="")
    assert ran.returncode == 0, ran.stderr
    reason, asked, warned = ran.stdout.splitlines()
    assert f"{tmp_path / 'specdec_kernels'} is the source tree, where _cpu has not been built" in reason
    assert f"when it is started in {tmp_path}: start it in another folder" in reason
    assert "pip install --no-build-isolation -e ." in reason
    assert "backend 'cpu' cannot run" in asked
    assert reason in asked
    assert "slow PyTorch reference" in warned
    assert reason in warned


def test_an_installation_without_a_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_native, "_FOLDER", tmp_path)
    reason = _native._load("_cuda")
    assert reason is not None
    assert "built without _cuda" in reason
    assert "SPECDEC_BUILD_CUDA=1 pip install --no-build-isolation ." in reason


def test_the_changelog_dates_this_version_and_those_before_it() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\S+) - (\d{4}-\d{2}-\d{2})$", text, re.MULTILINE)
    assert [version for version, _ in versions] == [specdec_kernels.__version__, "0.1.0"]
    assert [date for _, date in versions] == sorted((date for _, date in versions), reverse=True)


def test_the_install_page_has_the_lines_of_the_message() -> None:
    page = (ROOT / "docs/install.md").read_text()
    assert all(line in page for line in INSTALL)


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_name_targets_and_files_that_exist(path: Path) -> None:
    text = path.read_text()
    phony = re.search(r"^\.PHONY:((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    targets = {t for line in re.findall(r"run: make ((?:[a-z][\w-]* ?)+)", text) for t in line.split()}
    assert targets <= set(phony[1].split())
    files = set(re.findall(r"\b(?:tools|requirements|\.ci)/[\w.-]+", text))
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []


def test_wheels_are_built_and_tried_for_both_machines_with_and_without_cuda() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())["jobs"]
    matrix = jobs["build"]["strategy"]["matrix"]
    assert {(machine, library) for machine in matrix["machine"] for library in matrix["library"]} == {
        (machine, library) for machine in ("x86_64", "aarch64") for library in ("cpu", "cuda")
    }
    assert "smoke.py" in jobs["build"]["env"]["CIBW_TEST_COMMAND"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "build" in jobs["publish"]["needs"]
