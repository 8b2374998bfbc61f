"""Models, prompts and drafters for the command line; what is wrong with them is said in one line."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from specdec_kernels import Sampling

from ..datastore import Datastore
from ..draft_length import AdaptiveLength, FixedLength
from ..drafters import Drafter
from ..heads import load_draft_model
from ..methods import METHODS, DrafterAssets

MODELS = Path(__file__).resolve().parents[2] / "models"  # python/models: in the repository, not in the wheel
LONGEST = 10  # draft that `--draft-length auto` may choose
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class UserError(Exception):
    """Something that the user can mend, and how."""


@contextmanager
def one_line() -> Iterator[None]:
    """Say in one line what a call could not use."""
    try:
        yield
    except UserError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise UserError("out of memory: give a smaller --batch, --max-new-tokens or model") from error
    except (ValueError, OSError, RuntimeError) as error:
        if "allocate memory" in str(error):
            raise UserError("out of memory: give a smaller --batch, --max-new-tokens or model") from error
        raise UserError(str(error).strip().splitlines()[0]) from error


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which models, where, and how they sample."""
    models = parser.add_argument_group("models")
    models.add_argument("--target", type=Path, default=MODELS / "target", help="folder of a transformers causal LM")
    models.add_argument("--draft", type=Path, default=MODELS / "draft", help="folder of the draft model")
    models.add_argument("--heads", type=Path, default=MODELS, help="folder of the folders medusa, eagle, eagle3, mtp")
    models.add_argument("--datastore", type=Path, default=Path("build/datastore.pt"), help="file for rest")
    models.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1")
    models.add_argument("--dtype", choices=DTYPES, default="float32", help="of the target's weights")
    about = "of drafters' weights, by default the target's; bfloat16 is faster for a single request on a CPU"
    models.add_argument("--draft-dtype", choices=DTYPES, help=about)
    models.add_argument("--threads", type=int, default=os.cpu_count(), help="of the CPU")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--top-k", type=int, default=0, help="0: off")
    sampling.add_argument("--top-p", type=float, default=1.0, help="1: off")
    sampling.add_argument("--min-p", type=float, default=0.0, help="0: off")
    sampling.add_argument("--seed", type=int, default=0, help="of the first request")


def add_draft_length(parser: argparse.ArgumentParser) -> None:
    """How many tokens to draft."""
    about = "most drafts of a step, or auto: by acceptance and cost as measured; by default the method's"
    parser.add_argument("--draft-length", type=lambda text: text if text == "auto" else int(text), help=about)


class Models:
    """The target, its tokenizer, and what drafters need."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Load the target and its tokenizer."""
        torch.set_num_threads(args.threads)
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        if args.device == "cpu":  # grouped keys are then not repeated where there is a mask: a tenth of a step
            os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
        self.args, self.draft_dtype = args, args.draft_dtype or args.dtype
        self.target = self._model("--target", args.target, args.dtype)
        with one_line():
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(args.target, local_files_only=True)
        if len(self.tokenizer) > self.target.config.vocab_size:
            raise UserError(
                f"--target: the tokenizer in {args.target} has {len(self.tokenizer)} tokens, the model only "
                f"{self.target.config.vocab_size}: give a folder in which both belong together"
            )
        self.assets = DrafterAssets(
            self.target,
            heads=args.heads,
            load_draft=self._draft,
            load_store=self._store,
            dtype=DTYPES[self.draft_dtype],
        )

    def drafter(self, name: str) -> Drafter | None:
        """A method's drafter."""
        try:
            with one_line():
                return METHODS[name].make(self.assets)
        except UserError as error:
            raise UserError(f"method {name}: {error}") from error

    def draft_length(self, name: str) -> FixedLength:
        """A method's draft length; one that adapts begins anew."""
        asked = self.args.draft_length
        if asked == "auto":
            return AdaptiveLength(LONGEST)
        return METHODS[name].length() if asked is None else FixedLength(int(asked))

    def sampling(self, batch: int, temperature: float) -> Sampling:
        """The same for every request."""
        args = self.args
        return Sampling.full(
            batch,
            temperature=temperature,
            top_k=args.top_k or None,
            top_p=args.top_p if args.top_p < 1 else None,
            min_p=args.min_p or None,
            device=self.target.device,
        )

    def encode(self, prompt: str, new_tokens: int) -> list[int]:
        """Tokens of a prompt that leaves room for the text."""
        ids: list[int] = self.tokenizer(prompt, add_special_tokens=True)["input_ids"]
        most = self.target.config.max_position_embeddings
        if not ids:
            raise UserError("the prompt is empty: give at least one character")
        if len(ids) + new_tokens > most:
            raise UserError(
                f"the prompt has {len(ids)} tokens and --max-new-tokens is {new_tokens}, but the model has {most} "
                f"positions: leave out {len(ids) + new_tokens - most} tokens of either"
            )
        return ids

    def _model(self, option: str, folder: Path, dtype: str) -> Any:
        _check_folder(option, folder)
        with one_line():
            load = transformers.AutoModelForCausalLM.from_pretrained
            model = load(folder, dtype=DTYPES[dtype], local_files_only=True, attn_implementation="sdpa")
            return model.to(self.args.device).eval().requires_grad_(False)

    def _draft(self) -> Any:
        folder = self.args.draft
        _check_folder("--draft", folder)
        if _borrows(folder):
            return load_draft_model(folder, self.target, dtype=DTYPES[self.draft_dtype])
        draft = self._model("--draft", folder, self.draft_dtype)
        if draft.config.vocab_size != self.target.config.vocab_size or not self._same_tokens(folder):
            raise UserError(
                f"--draft: {folder} has another vocabulary than --target: give a model with the target's tokenizer"
            )
        return draft

    def _same_tokens(self, folder: Path) -> bool:
        """Whether the tokenizer in a folder, if there is one, is the target's."""
        if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            return True
        own = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab()
        return bool(own == self.tokenizer.get_vocab())

    def _store(self) -> Datastore:
        path = self.args.datastore
        if not path.exists():
            raise UserError(f"no datastore at {path}: make it with python -m specdec_loop datastore build")
        return Datastore.load(path)


def _check_folder(option: str, folder: Path) -> None:
    if not (folder / "config.json").exists():
        hint = "give the folder of a transformers model"
        if folder.parent == MODELS:
            hint += ", or train the default one: python -m specdec_lab train --help"
        raise UserError(f"{option}: no config.json in {folder}: {hint}")


def _borrows(folder: Path) -> bool:
    """Whether a draft model leaves its embedding out, to use the target's: as the file's own index says."""
    path = folder / "model.safetensors"
    if not path.exists():
        return False
    with path.open("rb") as file:
        names = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return not any("embed_tokens" in name for name in names)
