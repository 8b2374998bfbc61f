"""Real rows: a target and a draft model from local transformers folders, and what they say after a prompt."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from specdec_loop.heads.files import borrows_tables, load_draft_model

from .exact import Table, flat_table

PROMPTS = (
    'def read(self, size=-1):\n    """Read',
    "import os\nimport sys\n\n",
    "class Node:\n    def __init__(self",
    "    for key, value in sorted(",
)


class Pair(NamedTuple):
    """Two models of one vocabulary.

    Attributes:
        target: a transformers causal LM.
        draft: another one.
        prompts: token ids.
        name: of both, shown.
    """

    target: Any
    draft: Any
    prompts: list[list[int]]
    name: str


@cache
def load(target: str, draft: str, prompts: tuple[str, ...] = PROMPTS) -> Pair:
    """Both models in float32, and the prompts as ids; read once by a process.

    Args:
        target: a local transformers folder with a tokenizer.
        draft: a local transformers folder.
        prompts: texts.

    Raises:
        ValueError: a folder is not there, or the vocabularies differ.
    """
    homes = [Path(target), Path(draft)]
    first = read(homes[0])
    models = [first, read(homes[1], first)]
    sizes = [m.config.get_text_config().vocab_size for m in models]
    if sizes[0] != sizes[1]:
        raise ValueError(f"lossless: --target and --draft must have one vocabulary, got {sizes[0]} and {sizes[1]} ids")
    tokenizer = AutoTokenizer.from_pretrained(homes[0], local_files_only=True)
    ids = [tokenizer(text)["input_ids"] for text in prompts]
    sizes = [sum(weight.numel() for weight in model.parameters()) / 1e6 for model in models]
    name = ", ".join(f"{home.name} ({size:.2g} M parameters)" for home, size in zip(homes, sizes, strict=True))
    return Pair(models[0], models[1], ids, name)


def quiet() -> None:
    """No progress bars and no reports of what a file lacks."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def read(folder: Path, target: Any = None) -> Any:
    """One model; a draft model whose file leaves out its embedding and head has the target's."""
    if not (folder / "config.json").exists():
        raise ValueError(f"lossless: {folder} must be a transformers folder, but it holds no config.json")
    if target is not None and borrows_tables(folder):
        return load_draft_model(folder, target, dtype=torch.float32)
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"lossless: {folder.name}/ must hold all weights, but it lacks {', '.join(missing[:3])}")
    return model.eval().requires_grad_(False)


@torch.no_grad()
def rows(model: Any, texts: list[list[int]]) -> Tensor:
    """Logits of the next token after each text, ``[texts, vocab]``."""
    found = [model(torch.tensor([text]), logits_to_keep=1).logits[0, -1] for text in texts]
    return torch.stack(found).float()


def first_tokens(pair: Pair, prompt: list[int], depth: int = 2) -> Table:
    """The rows after a prompt and after the target's likeliest tokens.

    The distribution of the first token does not depend on the rows behind it: those of the likeliest text stand for
    all.
    """
    texts = [list(prompt)]
    for _ in range(depth):
        texts.append([*texts[-1], int(rows(pair.target, texts[-1:]).argmax())])
    return flat_table(rows(pair.target, texts), rows(pair.draft, texts))


@torch.no_grad()
def next_tokens(pair: Pair, prompt: list[int], length: int = 3, keep: int = 4) -> Table:
    """All histories of fewer than `length` tokens that top-k `keep` leaves to the target, each run once.

    Every rule refuses what the target excludes, so no row behind such an id matters, nor does an id that is never among
    the `keep` best of a row: under that filter, the distributions stay as they are.
    """
    models = (pair.target, pair.draft)
    ids, pasts = torch.tensor([prompt]), [DynamicCache(config=model.config) for model in models]
    found: list[list[Tensor]] = [[], []]
    children = []
    for level in range(length):
        for model, past, logits in zip(models, pasts, found, strict=True):
            logits.append(model(ids, past_key_values=past, logits_to_keep=1).logits[:, -1].float())
        best = found[0][-1].topk(keep).indices
        children.append(best)
        if level + 1 < length:
            ids = best.reshape(-1, 1)
            for past in pasts:
                past.batch_repeat_interleave(keep)
    target, draft = (torch.cat(logits) for logits in found)
    columns = torch.cat([torch.cat(children).flatten(), draft.topk(keep).indices.flatten()]).unique()
    after = torch.zeros(len(target), len(columns), dtype=torch.int64)
    inner = torch.cat(children[:-1] or [ids[:0]])  # contexts that have others behind them, level by level
    behind = 1 + torch.arange(inner.numel()).view(inner.shape)
    after[: len(inner)].scatter_(1, torch.searchsorted(columns, inner), behind)
    return Table(target[:, columns], draft[:, columns], after)
