"""The rules of CONTRIBUTING.md that a machine can check, executed on the files that git tracks or would track."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import specdec_kernels

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "specdec_kernels"
MAX_FUNCTION = 80  # lines; a signature and a docstring are not counted against a function
CODE = (".py", ".cpp", ".cu", ".h", ".cuh")
OPS = sorted(p.parent.name for p in PACKAGE.glob("ops/*/reference.py"))
BACKENDS = {"cpu": ("csrc/cpu", ".cpp"), "cuda": ("csrc/cuda", ".cu")}


def tracked(*suffixes: str) -> list[Path]:
    """Files of the repository with one of the suffixes; ignored ones (builds, environments) left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("the rules are checked in a git checkout")
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return [p for p in paths if p.suffix in suffixes and p.exists()]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def no_faults(faults: list[str]) -> None:
    assert not faults, "\n" + "\n".join(faults)


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, anywhere in it; relative ones resolved to their full name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            # `from . import reference` imports modules, `from .x import name` may.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_within(module: str, *packages: str) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def foreign(path: Path) -> list[str]:
    """Imports from outside the package and the standard library."""
    return [m for m in imports(path) if m.split(".")[0] not in (*sys.stdlib_module_names, "specdec_kernels")]


def layer_faults(path: Path) -> list[str]:
    """Imports of a file of specdec_kernels that point sideways or upwards."""
    relative = path.relative_to(PACKAGE)
    is_triton = relative.parts[0] == "_triton" or path.name == "triton_kernel.py"
    allowed = ("torch", "triton") if is_triton else ("torch",)
    faults = [m for m in foreign(path) if not is_within(m, *allowed)]
    own = [m for m in imports(path) if is_within(m, "specdec_kernels")]
    if relative.parts[0] == "ops" and len(relative.parts) > 2:
        folder = f"specdec_kernels.ops.{relative.parts[1]}"
        faults += [m for m in own if is_within(m, "specdec_kernels.ops") and not is_within(m, folder)]
        if path.name == "reference.py":
            faults += [m for m in own if "_op." in m or "triton" in m]
    elif relative not in (Path("__init__.py"), Path("_warmup.py")):
        faults += [m for m in own if is_within(m, "specdec_kernels.ops")]
    return [f"{name(path)} imports {m}" for m in faults]


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by their bare name: a second file of a name ends the collection."""
    names = [path.name for path in tracked(".py") if path.name.startswith("test_")]
    no_faults(sorted({n for n in names if names.count(n) > 1}))


def test_layers_import_downwards_only() -> None:
    no_faults([fault for path in sorted(PACKAGE.rglob("*.py")) for fault in layer_faults(path)])


# What transformers itself needs, and what the command line draws with.
LOOP_MAY_IMPORT = ("torch", "transformers", "huggingface_hub", "safetensors", "tokenizers", "rich", "matplotlib")
SERVER_MAY_IMPORT = ("starlette", "uvicorn", "prometheus_client")
GRAMMAR_MAY_IMPORT = ("xgrammar", "llguidance")


@pytest.mark.parametrize("package", ["specdec_loop", "specdec_lab"])
def test_loop_and_laboratory_use_only_public_names(package: str) -> None:
    public = {f"specdec_kernels.{public_name}" for public_name in specdec_kernels.__all__} | {"specdec_kernels"}
    below = ("specdec_loop",) if package == "specdec_lab" else ()
    faults = []
    for path in sorted((ROOT / "python" / package).rglob("*.py")):
        allowed = (
            *LOOP_MAY_IMPORT,
            *(SERVER_MAY_IMPORT if "serve" in (path.stem, path.parent.name) else ()),
            *(GRAMMAR_MAY_IMPORT if path.parent.name == "grammar" else ()),
        )
        outside = {m for m in foreign(path) if not is_within(m, *allowed, "python", *below)}
        private = {m for m in imports(path) if is_within(m, "specdec_kernels")} - public
        faults += [f"{name(path)} imports {m}" for m in sorted(outside | private)]
    no_faults(faults)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_plugins_use_only_public_names_and_import_their_engine_inside_functions(engine: str) -> None:
    package = f"specdec_{engine}"
    public = {f"specdec_kernels.{public_name}" for public_name in specdec_kernels.__all__} | {"specdec_kernels"}
    faults = []
    for path in sorted((ROOT / "python" / package).glob("*.py")):
        outside = {m for m in foreign(path) if not is_within(m, "torch", engine, "python")}
        private = {m for m in imports(path) if is_within(m, "specdec_kernels")} - public
        faults += [f"{name(path)} imports {m}" for m in sorted(outside | private)]
        top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        faults += [f"{name(path)}:{node.lineno} imports {engine} at its top" for node in top if engine in names(node)]
    no_faults(faults)


def names(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Packages that an import statement takes from outside its own."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    return {(node.module or "").split(".")[0]} if node.level == 0 else set()


def test_native_sources_include_downwards_and_only_the_stable_interface() -> None:
    stable = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/shim.h")
    faults = []
    for path in tracked(".cpp", ".cu", ".h", ".cuh"):
        layer = name(path).split("/")[1]
        for included in re.findall(r'^\s*#\s*include\s*[<"]([^">]+)', path.read_text(), re.MULTILINE):
            is_torch = included.startswith(("torch/csrc", "torch/headeronly", "torch/extension", "torch/torch"))
            if is_torch and (layer == "common" or not included.startswith(stable)):
                faults.append(f"{name(path)} includes {included}")
            if included.startswith(("ATen/", "c10/", "pybind11/", "Python.h")) or "tests/" in included:
                faults.append(f"{name(path)} includes {included}")
            sideways = {"cpu": "cuda/", "cuda": "cpu/", "common": "torch/", "torch": "cpu/"}.get(layer)
            if sideways and re.search(rf"(^|\.\./){sideways}", included) and not is_torch:
                faults.append(f"{name(path)} includes {included}")
    no_faults(faults)


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_one_stem(op: str) -> None:
    declared = specdec_kernels._op.OPS[op].backends
    wanted = [f"specdec_kernels/ops/{op}/__init__.py", f"tests/ops/test_{op}.py"]
    wanted += [f"bench/{op}.py"] if declared else []  # the definition alone is not timed
    if "triton" in declared:
        wanted.append(f"specdec_kernels/ops/{op}/triton_kernel.py")
    wanted += [f"{folder}/{op}{suffix}" for backend, (folder, suffix) in BACKENDS.items() if backend in declared]
    no_faults([f"{op}: no {path}" for path in wanted if not (ROOT / path).exists()])


def test_a_native_file_registers_its_own_op_only() -> None:
    faults = []
    for path in tracked(".cpp", ".cu", ".h", ".cuh"):
        text = re.sub(r"^#define .*(\\\n.*)*", "", path.read_text(), flags=re.MULTILINE)
        registered = {a or b for a, b in re.findall(r'"(\w+)_out\.|SPECDEC_REGISTER\((\w+)', text)}
        registered = {re.sub("_(listed|edited)$", "", op) for op in registered}  # a variant lives with its op
        faults += [f"{name(path)} registers {op}" for op in sorted(registered - {path.stem})]
        faults += [f"{name(path)} registers {op}, which no folder declares" for op in sorted(registered - set(OPS))]
    no_faults(faults)


def test_no_orphans_beside_the_ops() -> None:
    stems = [(p, p.stem.removeprefix("test_")) for p in (ROOT / "tests/ops").glob("test_*.py")]
    about_all_ops = {"distributions"}  # one table over every op
    no_faults([f"{name(p)} tests no op" for p, stem in stems if stem not in (*OPS, *about_all_ops)])


def test_every_module_of_the_loop_has_its_tests_and_no_test_is_an_orphan() -> None:
    package = ROOT / "python/specdec_loop"
    modules = {p.stem for p in package.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    modules = {stem for stem in modules if not stem.startswith("__")}
    inner = {f"{p.parent.name}_{p.stem}" for p in package.glob("*/*.py")}  # these may have tests of their own
    tested = {p.stem.removeprefix("test_") for p in (ROOT / "tests/loop").glob("test_*.py")} - inner
    no_faults(
        [f"python/specdec_loop/{stem}.py and tests/loop/test_{stem}.py: one is missing" for stem in modules ^ tested]
    )


def test_functions_fit_a_screen() -> None:
    faults = []
    for path in tracked(".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                if length > MAX_FUNCTION:
                    faults.append(f"{name(path)}: {node.name} has {length} lines, more than {MAX_FUNCTION}")
    no_faults(faults)


def test_all_is_the_sorted_api() -> None:
    listed = specdec_kernels.__all__
    # Constants, then classes, then functions, each in order: what ruff's RUF022 keeps too.
    assert listed == sorted(listed, key=lambda n: (n != n.upper(), n[0].islower(), n))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(listed) == imported


def test_public_docstrings_are_complete() -> None:
    faults = []
    for op in OPS:
        text = getattr(specdec_kernels, op).__doc__ or ""
        faults += [f"{op}: no {part}" for part in ("Args:", "Returns:", "Raises:", "Example:") if part not in text]
    no_faults(faults)


def test_version_is_the_same_everywhere() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert version[1] == specdec_kernels.__version__
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert version[1] in changes or "Unreleased" in changes


# Spelled in pieces, or this file would be its own first find.
FORBIDDEN = {
    r"(?<![\w.])/(work|tmp|home|root)/": "a path of one machine",
    r"pypi\." + r"org|files\.python" + r"hosted|download\.py" + r"torch|index" + r"-url": "an address of a registry",
    r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b": "an open end without an issue",
    r"except( \w+)?:\s*pa" + r"ss\b": "an error that nobody sees",
    r"^from \S+ import \*": "names from nowhere",
    r"\busing name" + r"space\b": "names from nowhere",
    r"fla" + r"ky|re" + r"runs=": "a test that may fail",
    r"#\s*type:\s*ignore\s*$": "an ignored error without its code",
}
TEXT = (*CODE, ".md", ".toml", ".yml", ".yaml", ".txt", ".sh", "")


@pytest.mark.parametrize("pattern", FORBIDDEN, ids=FORBIDDEN.values())
def test_no_file_holds(pattern: str) -> None:
    faults = []
    for path in tracked(*TEXT):
        if path.name == "LICENSE":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(pattern, line):
                faults.append(f"{name(path)}:{number}: {line.strip()[:100]}")
    no_faults(faults)


def test_no_file_is_called_utils() -> None:
    no_faults([name(p) for p in tracked(*CODE) if p.stem in ("utils", "helpers", "misc", "common")])


def test_only_documented_environment_variables_are_read() -> None:
    known = {"SPECDEC_BACKEND", "SPECDEC_BUILD_CUDA", "SPECDEC_NAMESPACE"}
    faults = []
    for path in [*PACKAGE.rglob("*.py"), ROOT / "setup.py"]:
        read = set(re.findall(r"environ[^\n]*?\b(SPECDEC_[A-Z_]+)", path.read_text()))
        faults += [f"{name(path)} reads {variable}" for variable in sorted(read - known)]
    no_faults(faults)


def test_links_of_the_documents_lead_somewhere() -> None:
    faults = []
    for path in tracked(".md"):
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", path.read_text()):
            if not (path.parent / target).exists():
                faults.append(f"{name(path)} links to {target}")
    no_faults(faults)


def test_the_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_every_fault_to_inject_finds_its_place() -> None:
    """`make mutants` runs for hours and is no part of this: its table would rot unseen."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads the table")
    table = tomllib.loads((ROOT / "tests/mutants/patches.toml").read_text())["patch"]
    counts = {entry["name"]: (ROOT / entry["path"]).read_text().count(entry["old"]) for entry in table}
    no_faults([f"{fault}: its old text stands {count} times" for fault, count in counts.items() if count != 1])


def test_no_modules_import_each_other() -> None:
    """Not even within functions: a circle of imports is a question of who needs whom that nobody answered."""
    files = {name(path.with_suffix("")).replace("/", ".").removeprefix("python."): path for path in tracked(".py")}
    files = {module.removesuffix(".__init__"): path for module, path in files.items() if not module.startswith("tests")}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        found = (m.removeprefix("python.").replace(".__init__", "") for m in imports(path))
        needed = {m if m in files else m.rpartition(".")[0] for m in found}
        # A package is loaded before its modules, whatever they import.
        graph[module] = {m for m in needed & files.keys() if not is_within(module, m)}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
