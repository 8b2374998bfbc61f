"""The layout of tools/hf_kernel, loaded by Hugging Face's `kernels`; the package and such a build side by side."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import specdec_kernels
from tools.hf_kernel import __main__ as hf

kernels = pytest.importorskip("kernels", reason="kernels is not installed (pip install -r requirements/hub.txt)")
ROOT = Path(__file__).resolve().parents[1]
BUILT = Path(specdec_kernels.__file__).parent / "_cpu.abi3.so"
OTHER = "_specdec_hf_abc"  # as long as specdec_kernels
RUNS = {"TRITON_INTERPRET": "0", "HF_HUB_OFFLINE": "1", "SPECDEC_BACKEND": ""}
SIDE_BY_SIDE = """
import sys, torch, specdec_kernels
from pathlib import Path
from kernels import get_local_kernel

kernel = get_local_kernel(Path(sys.argv[1]), backend="cpu")
assert kernel.__name__ == sys.argv[2] and kernel is not specdec_kernels
assert kernel.sample.__module__.startswith(kernel.__name__ + ".")
assert kernel.available_backends("cpu")["cpu"] is None, kernel.available_backends("cpu")
torch.manual_seed(0)
target = 3 * torch.randn(4, 4, 999)
draft = target[:, :3] + torch.randn(4, 3, 999)
ids = draft.argmax(-1)
nodes, parents = ids[:, [0, 0, 1]], torch.tensor([[-1, 0, 0]]).expand(4, -1).contiguous()
results = []
for package in (specdec_kernels, kernel):
    rng = package.RngKey(torch.arange(4), torch.full((4,), 7), torch.zeros(4, dtype=torch.int64))
    sampling = package.Sampling.full(4, temperature=0.8, top_k=50, top_p=0.95)
    for backend in ("reference", "cpu"):
        own = {"sampling": sampling, "rng": rng, "backend": backend}
        results.append([
            package.sample(target[:, 0], purpose="draft", num_samples=3, **own),
            package.verify_chain(ids, target, draft, draft_sampling=sampling, logprobs="raw", **own),
            package.verify_tree(nodes, parents, target[:, :3].contiguous(), max_depth=1, rule="match", **own),
        ])
tree_ref, tree_cpu, kernel_ref, kernel_cpu = results
for left, right in ((tree_ref, kernel_ref), (tree_cpu, kernel_cpu)):
    for a, b in zip(left, right, strict=True):
        assert all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True)), (a, b)
assert torch.equal(tree_ref[1].token_ids, kernel_cpu[1].token_ids)
call = getattr(torch.ops, sys.argv[2]).sample.cpu
assert call is not torch.ops.specdec_kernels.sample.cpu and call.namespace == sys.argv[2]
print("equal")
"""


def run(*command: str | Path) -> str:
    ran = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=os.environ | RUNS, capture_output=True, text=True, timeout=400
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layout of the built library, in the namespace it was built for."""
    out = tmp_path_factory.mktemp("own") / "specdec-kernels"
    hf.write(out, "specdec_kernels", "cpu", [BUILT])
    return out


def test_kernels_reads_what_it_is_given(own: Path) -> None:
    from kernels._rust import Build, Digest, DigestAlgorithm, Metadata
    from kernels.variants import parse_variant, resolve_variants

    (variant,) = (own / "build").iterdir()
    parsed = parse_variant(variant.name)
    assert parsed.variant_str == variant.name
    assert resolve_variants([parsed], "cpu")[0] == [parsed]
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert (metadata.id, str(metadata.name), metadata.version) == ("specdec_kernels", "specdec-kernels", 0)
    assert metadata.python_depends == []
    assert str(metadata.backend.backend_type).lower() == "cpu"
    digest = json.loads((variant / "metadata.json").read_text())["digest"]
    assert digest["files"] == Digest.hash_variant(DigestAlgorithm.SHA256, variant).files
    backends = Build.open(own).general.backends
    assert sorted(str(b).lower() for b in backends) == ["cpu", "cuda"]


def test_the_build_file_names_every_native_source(own: Path) -> None:
    text = (own / "build.toml").read_text()
    sources = [*hf.files_of(ROOT / "csrc", ".cpp", ".cu")]
    assert sources
    for source in sources:
        assert text.count(f'"{source.relative_to(ROOT)}"') == 1, source
        assert (own / source.relative_to(ROOT)).read_bytes() == source.read_bytes()
    assert "nor with Nix" in text
    assert "not built with Nix" in (own / "CARD.md").read_text()


def test_a_kernel_has_no_loop_and_imports_only_what_is_allowed(own: Path) -> None:
    """Its own modules by relative names; triton where a GPU runs it."""
    paths = sorted((own / "build").rglob("*.py"))
    assert len(paths) == len(sorted(hf.PACKAGE.rglob("*.py")))
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            named = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                named = [node.module or ""]
            for module in named:
                assert module.split(".")[0] in (*sys.stdlib_module_names, "torch", "triton"), f"{path}: {module}"


# Its command line takes the backend of the installed torch.
@pytest.mark.skipif(torch.version.cuda is not None, reason="kernels looks for a build for CUDA, as this torch is one")
def test_benchmarks_run_and_their_ids_equal_the_reference(own: Path, tmp_path: Path) -> None:
    pytest.importorskip("tabulate", reason="tabulate is not installed (pip install -r requirements/hub.txt)")
    options = ("--iterations", "2", "--warmup", "0", "--output", tmp_path / "out")
    told = run("-c", "from kernels.cli import main; main()", "benchmark", own, *options)
    payload = (tmp_path / "out").read_text()
    for name in ("sample", "verify_chain", "verify_tree"):
        assert f"OpsBenchmark.{name}" in payload, told + payload


def test_a_second_namespace_lives_beside_the_package(tmp_path: Path) -> None:
    """As compiled for another namespace: the library has it in one string, and here that string is changed."""
    compiled, was = BUILT.read_bytes(), b"\0specdec_kernels\0"
    assert compiled.count(was) == 1
    library = tmp_path / BUILT.name
    library.write_bytes(compiled.replace(was, f"\0{OTHER}\0".encode()))
    hf.write(tmp_path / "kernel", OTHER, "cpu", [library])
    assert run("-c", SIDE_BY_SIDE, tmp_path / "kernel", OTHER).strip() == "equal"


@pytest.mark.slow
def test_a_library_compiled_for_its_own_namespace(tmp_path: Path) -> None:
    namespace = hf.own_namespace("cpu")
    run("-m", "tools.hf_kernel", "--out", tmp_path / "kernel")
    assert run("-c", SIDE_BY_SIDE, tmp_path / "kernel", namespace).strip() == "equal"


def test_namespaces_follow_the_sources_and_must_be_identifiers() -> None:
    assert hf.own_namespace("cpu") == hf.own_namespace("cpu") != hf.own_namespace("cuda")
    assert hf.own_namespace("cpu").isidentifier()
    refused = subprocess.run(
        [sys.executable, "-m", "tools.hf_kernel", "--namespace", "a-b"], cwd=ROOT, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "must be an identifier, got 'a-b'" in refused.stderr
