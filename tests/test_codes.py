"""Python, C++ and Triton number the same things alike, and every status bit is explained."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import specdec_kernels
from specdec_kernels import RngKey, Sampling, Status, _codes, explain_status, sample

HEADER = (Path(__file__).resolve().parents[1] / "csrc/common/codes.h").read_text()
ENUMS: dict[str, dict[Any, int]] = {
    "Rule": _codes.CHAIN_RULES,
    "TreeRule": _codes.TREE_RULES,
    "LogprobsMode": _codes.LOGPROBS,
    "MaskFormat": _codes.MASK_FORMATS,
}


def camel(name: str | None) -> str:
    """The name of a constant in C++, without case: "topm" is kTopM there."""
    return "k" + str(name).replace("_", "").lower()


def constants(text: str) -> dict[str, int]:
    return {name.lower(): int(code) for name, code in re.findall(r"\b(k\w+) = (\d+)", text)}


def test_the_header_has_the_status_bits_and_the_purposes() -> None:
    alone = constants("".join(re.findall(r"^constexpr int\d+_t k\w+ = \d+;", HEADER, re.MULTILINE)))
    want = {camel(bit.name): bit.value for bit in Status}
    want |= {camel(f"purpose_{name}"): code for name, code in _codes.PURPOSES.items()}
    assert alone == want


def test_the_header_has_the_enumerations() -> None:
    found = dict(re.findall(r"enum class (\w+) : int64_t \{(.*?)\};", HEADER, re.DOTALL))
    assert {name: constants(body) for name, body in found.items()} == {
        name: {camel(key): code for key, code in codes.items()} for name, codes in ENUMS.items()
    }
    assert all(sorted(codes.values()) == list(range(len(codes))) for codes in ENUMS.values())


def test_the_header_is_the_only_place_with_numbers() -> None:
    for path in (Path(__file__).resolve().parents[1] / "csrc").rglob("*.*"):
        if path.name != "codes.h":
            again = re.findall(r"enum class (\w+)|constexpr \w+ (k(?:Bad|Purpose)\w+)", path.read_text())
            assert not {name for names in again for name in names} & {*ENUMS, "kBadLayout", "kPurposeTarget"}, path


def test_triton_has_the_same_codes() -> None:
    pytest.importorskip("triton")
    codes, walk, tree_walk = (
        importlib.import_module(f"specdec_kernels._triton.{name}") for name in ("codes", "walk", "tree_walk")
    )
    for bit in Status:
        assert getattr(codes, "S_" + str(bit.name).removeprefix("BAD_").split("_")[0]).value == bit
    for name, code in _codes.PURPOSES.items():
        assert getattr(codes, f"{name.upper()}_PURPOSE").value == code
    for known, code in _codes.LOGPROBS.items():
        assert getattr(codes, f"{(known or 'no').upper()}_LOGPROBS").value == code
    for module, rules in ((walk, _codes.CHAIN_RULES), (tree_walk, _codes.TREE_RULES)):
        for name, code in rules.items():
            assert getattr(module, name.upper()).value == code


def test_the_choices_of_logprobs_are_its_codes() -> None:
    assert set(_codes.LOGPROBS) == {None, *get_args(specdec_kernels.Logprobs)}


def test_every_bit_is_explained() -> None:
    assert explain_status(0) == []
    for bit in Status:
        (sentence,) = explain_status(bit)
        assert sentence.startswith(f"{bit.name}: ")
    both = Status.BAD_TARGET | Status.BAD_SAMPLING
    assert explain_status(both) == explain_status(1) + explain_status(64)
    for unknown in (-1, 128):
        with pytest.raises(ValueError, match=r"explain_status: status must be in \[0, 127\], got "):
            explain_status(unknown)
    for wrong in ("2", 1.0, torch.tensor([1, 2])):
        with pytest.raises(ValueError, match="explain_status: status must be an int, that of one request, got "):
            explain_status(wrong)  # type: ignore[arg-type]


def test_a_status_tensor_can_be_explained(backend: str, device: str) -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0], [0.0, 1.0]], device=device)
    rng = RngKey(*(torch.zeros(3, dtype=torch.int64, device=device) for _ in range(2)))
    sampling = Sampling(temperature=torch.tensor([1.0, 1.0, -1.0], device=device))
    status = sample(logits, sampling=sampling, rng=rng, purpose="target").status
    assert [explain_status(s) for s in status] == [explain_status(1), [], explain_status(64)]
