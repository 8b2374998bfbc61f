"""A tiny model in a folder, and a server of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from model_folders import save_model

if TYPE_CHECKING:
    from running_server import Running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model and its tokenizer."""
    return save_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    """With drafts; for tests that leave it as it is."""
    from running_server import running  # needs the extra serve

    from specdec_loop import SuffixDecoding

    with running(folder, lambda: SuffixDecoding(factor=2.0)) as made:
        yield made
