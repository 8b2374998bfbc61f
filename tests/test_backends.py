"""Choosing a backend: explicit choices never fall back, refusals list every reason."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Literal, get_origin

import pytest
import torch
from cases import make_chain

import specdec_kernels
from specdec_kernels import _backends, available_backends, use_backend, verify_chain


def test_an_explicit_choice_that_cannot_run_lists_every_reason() -> None:
    case = make_chain(2, 1, 5)
    with pytest.raises(
        RuntimeError,
        match=r"verify_chain: backend 'cuda' cannot run: takes cuda tensors, got cpu\. Others: reference: available; ",
    ):
        verify_chain(case.draft_ids, case.target_logits, case.draft_logits, **case.keywords, backend="cuda")


def test_use_backend_nests_and_restores() -> None:
    case = make_chain(2, 1, 5)
    with use_backend("cuda"), use_backend("reference"):
        verify_chain(case.draft_ids, case.target_logits, case.draft_logits, **case.keywords)
    verify_chain(case.draft_ids, case.target_logits, case.draft_logits, **case.keywords)
    with (
        pytest.raises(ValueError, match="use_backend: backend must be one of reference, cpu, triton, cuda, got 'gpu'"),
        use_backend("gpu"),
    ):
        pass


def test_blocks_of_two_threads_may_end_in_any_order() -> None:
    """The last one in force counts, and behind all of them it is the choice from before."""
    before, first, second = _backends._choices[-1].backend, use_backend("reference"), use_backend("cuda")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert _backends._choices[-1].backend == "cuda"
    second.__exit__(None, None, None)
    assert _backends._choices[-1].backend == before


def test_available_backends_gives_reasons() -> None:
    found = available_backends("cpu")
    assert list(found) == ["reference", "cpu", "triton", "cuda"]
    assert found["reference"] is None and found["cpu"] is None
    assert found["cuda"] == "takes cuda tensors, got cpu"


def test_the_environment_chooses_too() -> None:
    """Read when the package is imported: a look at it in every call took 5 us of a step."""
    code = (
        "import torch\n"
        "from specdec_kernels import tree_layout, use_backend\n"
        "parents = torch.tensor([[-1, 0]])\n"
        "with use_backend('reference'):\n"
        "    tree_layout(parents, max_depth=1)\n"
        "try:\n"
        "    tree_layout(parents, max_depth=1)\n"
        "except RuntimeError as error:\n"
        "    print('cannot run' in str(error))\n"
    )
    environment = os.environ | {"SPECDEC_BACKEND": "cuda"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert out.stdout.strip() == "True"


def test_an_environment_without_such_a_backend_is_refused_at_import() -> None:
    environment = os.environ | {"SPECDEC_BACKEND": "cudda"}
    out = subprocess.run(
        [sys.executable, "-c", "import specdec_kernels"], capture_output=True, text=True, env=environment
    )
    assert "SPECDEC_BACKEND must be one of reference, cpu, triton, cuda, got 'cudda'" in out.stderr


def test_a_fresh_process_compiles_before_anything_ran() -> None:
    """The first choice of a backend is made while tracing, by functions that keep their answer."""
    code = (
        "import torch\n"
        "from specdec_kernels import tree_layout\n"
        "step = torch.compile(lambda parents: tree_layout(parents, max_depth=2), fullgraph=True, backend='eager')\n"
        "print(step(torch.tensor([[-1, 0, 1]])).depth.tolist())\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[[0, 1, 2]]"


def test_import_needs_torch_alone() -> None:
    """No triton, no numpy, no native library is touched by importing the package."""
    code = (
        "import sys\n"
        "import torch\n"  # from 2.14 on it looks for triton itself
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('triton', 'transformers', 'specdec_loop'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "before = set(sys.modules)\n"
        "import specdec_kernels\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(sorted(m for m in new if m not in sys.stdlib_module_names and m != 'torch'))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "['specdec_kernels']"


def test_all_is_the_api() -> None:
    assert specdec_kernels.__all__ == sorted(specdec_kernels.__all__)
    for name in specdec_kernels.__all__:
        value = getattr(specdec_kernels, name)
        is_choice = get_origin(value) is Literal  # the names are its documentation; it cannot hold a docstring
        assert is_choice or (value.__doc__ or "").strip(), name


def test_threads_do_not_change_a_bit() -> None:
    """One request split over threads, many requests over few: the same bits."""
    for batch in (1, 3, 9):
        for filters in ("temperature", "all", "top_p"):
            case = make_chain(batch, 3, 50_000, filters=filters)
            results = []
            before = torch.get_num_threads()
            try:
                for threads in (1, 2, 5):
                    torch.set_num_threads(threads)
                    results.append(
                        verify_chain(
                            case.draft_ids,
                            case.target_logits,
                            case.draft_logits,
                            **case.keywords,
                            logprobs="processed",
                            top=5,
                            backend="cpu",
                        )
                    )
            finally:
                torch.set_num_threads(before)
            for other in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))  # type: ignore[arg-type]
