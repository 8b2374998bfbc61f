"""docs/models.md is what its command makes, and the check behind it sees a text that differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import model_families
import pytest
import transformers
from model_families import FAMILIES, as_table, build, row

from specdec_loop.tree_cache import support

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "models.md").read_text()

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_has_what_becomes_of_a_family(family: str) -> None:
    found = row(family, build(*FAMILIES[family]))
    assert not found.is_faulty, found
    assert as_table([found]).splitlines()[-1] in PAGE.splitlines()


def test_the_page_has_no_other_family() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == ["family", *FAMILIES]
    assert f"transformers {transformers.__version__}" in PAGE, "make models-page"


def test_a_text_that_differs_stands_in_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "MODEL_TYPES", {})
    monkeypatch.setattr(model_families, "FAMILIES", {})
    monkeypatch.setattr(model_families, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {"doge": "DogeForCausalLM"})
    text, is_sound = model_families.page()
    assert not is_sound
    assert "- **Another text, or an error**: DogeForCausalLM." in text


@pytest.mark.slow
def test_the_command_makes_the_page() -> None:
    text, is_sound = model_families.page()
    assert is_sound
    assert text == PAGE, "make models-page"


FULL = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 1], "floor_scale": 4}


@pytest.mark.parametrize(
    ("family", "special"),
    [("RoBERTa, decoder", {}), ("GPT-Neo", {}), ("BART, decoder", {}), ("PaliGemma", {}), ("Llama 4", FULL)],
)
def test_a_family_that_is_not_refused_is_seen(
    family: str, special: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: without the refusals the texts differ, so that the check would have found these families."""
    name, own = FAMILIES[family]
    model = build(name, {**own, **special})
    assert row(family, model).words == ("refused",) * 3
    monkeypatch.setattr(support, "MODEL_TYPES", {})
    monkeypatch.setattr(support, "_check_signature", lambda kind: None)
    assert "differs" in row(family, model).words
