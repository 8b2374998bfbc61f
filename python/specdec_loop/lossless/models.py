"""Real rows: a target and a draft model from local transformers folders, and what they say after a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .laws import Table, flat_table

FOLDER = Path(__file__).parents[2] / "models"
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


def load(target: str | None = None, draft: str | None = None, prompts: tuple[str, ...] = PROMPTS) -> Pair:
    """Both models in float32, and the prompts as ids.

    Args:
        target: a local transformers folder with a tokenizer; None: the repository's.
        draft: likewise.
        prompts: texts.

    Raises:
        ValueError: a folder is not there, or the vocabularies differ.
    """
    from transformers import AutoTokenizer

    homes = [Path(target or FOLDER / "target"), Path(draft or FOLDER / "draft")]
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


BORROWED = ("embed_tokens.weight", "lm_head.weight")


def read(folder: Path, target: Any = None) -> Any:
    """One model; a draft model whose file leaves out its embedding and head has the target's."""
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").exists():
        raise ValueError(f"lossless: {folder.name}/ must be a transformers folder, but it holds no config.json")
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    missing = sorted(report["missing_keys"])
    if missing and (target is None or not all(name.endswith(BORROWED) for name in missing)):
        raise ValueError(f"lossless: {folder.name}/ must hold all weights, but it lacks {', '.join(missing[:3])}")
    if missing:
        model.set_input_embeddings(target.get_input_embeddings())
        model.set_output_embeddings(target.get_output_embeddings())
    return model.eval().requires_grad_(False)


@torch.no_grad()
def rows(model: Any, texts: list[list[int]]) -> Tensor:
    """Logits of the next token after each text, ``[texts, vocab]``."""
    found = [model(torch.tensor([text]), logits_to_keep=1).logits[0, -1] for text in texts]
    return torch.stack(found).float()


def first_tokens(pair: Pair, prompt: list[int], depth: int = 2) -> Table:
    """The rows after a prompt and after the target's likeliest tokens.

    The law of the first token does not depend on the rows behind it: those of the likeliest text stand for all.
    """
    texts = [list(prompt)]
    for _ in range(depth):
        texts.append([*texts[-1], int(rows(pair.target, texts[-1:]).argmax())])
    return flat_table(rows(pair.target, texts), rows(pair.draft, texts))


def next_tokens(pair: Pair, prompt: list[int], length: int = 3, keep: int = 4) -> Table:
    """All histories of `length` tokens that top-k `keep` leaves to one of the models.

    Ids that are never among the `keep` best of a row are dropped: under that filter, the laws stay as they are.
    """
    levels: list[list[tuple[int, ...]]] = [[()]]
    logits: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    for _ in range(length):
        texts = [[*prompt, *history] for history in levels[-1]]
        both = zip(rows(pair.target, texts), rows(pair.draft, texts), strict=True)
        logits |= dict(zip(levels[-1], both, strict=True))
        levels.append([(*history, x) for history in levels[-1] for x in _best(logits[history], keep)])
    ids = sorted({x for pair_of_rows in logits.values() for x in _best(pair_of_rows, keep)})
    place = {history: i for i, history in enumerate(logits)}
    after = torch.tensor([[place.get((*history, x), 0) for x in ids] for history in logits])
    columns = torch.tensor(ids)
    stacked = [torch.stack([found[which][columns] for found in logits.values()]) for which in (0, 1)]
    return Table(stacked[0], stacked[1], after)


def _best(pair_of_rows: tuple[Tensor, Tensor], keep: int) -> list[int]:
    return sorted({int(x) for row in pair_of_rows for x in row.topk(keep).indices})
