"""The corpus: sources of the Python standard library, a part of them held out, and a byte-level BPE tokenizer.

Everything follows from the interpreter's own files: which ones, their order and which are held out depends on their
relative paths alone. Licence of the text: PSF-2.0.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
TABLES = {"encodings", "pydoc_data", "site-packages", "__phello__"}  # folders of tables, or not of the library
HELD_OUT = 8  # of 256 files


def sources(root: Path | None = None) -> list[Path]:
    """All source files of the library that are text rather than tables, sorted by path."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    found = [p for p in sorted(root.rglob("*.py")) if not TABLES & set(p.relative_to(root).parts)]
    return [p for p in found if _is_text(p)]


def is_held_out(path: Path, root: Path | None = None) -> bool:
    """Whether a file is kept from training, by a hash of its path within the library."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    return hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()[0] < HELD_OUT


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; id 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a model's folder."""
    return PreTrainedTokenizerFast.from_pretrained(folder)


def read(paths: list[Path]) -> list[str]:
    """Their texts."""
    return [p.read_text(encoding="utf-8") for p in paths]


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """All texts in a row, each with an end; int16 as long as the vocabulary allows."""
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = [token for row in rows for token in (*row, tokenizer.eos_token_id)]
    return torch.tensor(ids, dtype=torch.int16 if len(tokenizer) < 2**15 else torch.int32)


def windows(tokens: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Random windows of the corpus, int64 ``[batch, length]``."""
    start = torch.randint(len(tokens) - length + 1, (batch, 1), generator=generator)
    return tokens[start + torch.arange(length)].long()


def even_windows(tokens: Tensor, count: int, length: int) -> Tensor:
    """The same windows every time, evenly spread: int64 ``[count, length]``."""
    start = torch.linspace(0, len(tokens) - length, count).long()[:, None]
    return tokens[start + torch.arange(length)].long()


def _is_text(path: Path) -> bool:
    """UTF-8, and not a bad-syntax sample or a lump of data in a few long lines."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return False
    return len(lines) > 5 and max(map(len, lines)) < 400
