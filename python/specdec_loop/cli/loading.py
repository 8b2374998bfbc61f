"""Models, prompts and drafters for the command line."""

from __future__ import annotations

import argparse
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers

from specdec_kernels import Sampling

from .. import tree_cache
from ..datastore import Datastore
from ..draft_length import AdaptiveLength, FixedLength
from ..drafters import Drafter
from ..heads.files import borrows_tables, load_draft_model
from ..methods import METHODS, DrafterAssets
from .arguments import default_model, find_models
from .errors import UserError, one_line

LONGEST = 10  # draft that `--draft-length auto` may choose
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # owner/name
HEAD_FILES = ["*.json", "*.safetensors", "*.bin", "*.pt"]  # of a repository on the Hub
HUB_SECONDS = 10  # for the Hub to answer at all


class Models:
    """The target, its tokenizer, and what drafters need."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Load the target and its tokenizer; resolve defaults of `args`.

        Raises:
            UserError: they cannot be loaded.
        """
        args.device = device(args.device)
        args.target = args.target or str(default_model("--target", "target"))
        args.heads = args.heads or find_models() or Path("python/models")
        torch.set_num_threads(args.threads)
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        if args.device == "cpu":  # grouped keys are then not repeated where there is a mask: a tenth of a step
            os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
        self.args, self.draft_dtype = args, args.draft_dtype or args.dtype
        self.target = self._model("--target", args.target, args.dtype)
        with one_line():
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(args.target)
        self.vocab = _decoder(self.target).vocab_size
        if len(self.tokenizer) > self.vocab:
            raise UserError(
                f"--target: the tokenizer in {args.target} has {len(self.tokenizer)} tokens, the model only "
                f"{self.vocab}: give a folder in which both belong together"
            )
        self.assets = DrafterAssets(
            self.target,
            heads=self._head,
            load_draft=self._draft,
            load_store=self._store,
            dtype=getattr(torch, self.draft_dtype),
        )

    def drafter(self, name: str) -> Drafter | None:
        """A method's drafter."""
        try:
            with one_line():
                return METHODS[name].make(self.assets)
        except UserError as error:
            raise UserError(f"method {name}: {error}") from error

    def draft_length(self, name: str, batch: int) -> FixedLength:
        """A method's draft length; one that adapts begins anew."""
        asked = self.args.draft_length
        if asked == "auto":
            return AdaptiveLength(LONGEST)
        return METHODS[name].length(batch) if asked is None else FixedLength(int(asked))

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
        most = getattr(_decoder(self.target), "max_position_embeddings", None)  # None: no bound
        if not ids:
            raise UserError("the prompt is empty: give at least one character")
        if most is not None and len(ids) + new_tokens > most:
            raise UserError(
                f"the prompt has {len(ids)} tokens and --max-new-tokens is {new_tokens}, but the model has {most} "
                f"positions: leave out {len(ids) + new_tokens - most} tokens of either"
            )
        return ids

    def _model(self, option: str, name: str, dtype: str) -> Any:
        check_model(option, name)
        with one_line():
            tree_cache.check_model(transformers.AutoConfig.from_pretrained(name))
            model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
            return model.to(self.args.device).eval().requires_grad_(False)

    def _head(self, kind: str) -> Path:
        """Folder of a head: the one given, or the target's checkpoint, or the one in --heads."""
        name = dict(self.args.head).get(kind) or (self.args.target if kind == "mtp-layers" else None)
        folder = self.args.heads / kind if name is None else Path(name)
        if folder.is_dir():
            return folder
        if name is None:
            raise UserError(f"no folder {folder}: give --head {kind}=FOLDER, or its name on the Hugging Face Hub")
        check_model(f"--head {kind}", name)
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=HEAD_FILES))

    def _draft(self) -> Any:
        name = self.args.draft or str(default_model("--draft", "draft"))
        check_model("--draft", name)
        if borrows_tables(name):
            return load_draft_model(name, self.target, dtype=getattr(torch, self.draft_dtype))
        draft = self._model("--draft", name, self.draft_dtype)
        if not self._same_tokens(name):
            raise UserError(
                f"--draft: {name} has another vocabulary than --target: give a model with the target's tokenizer"
            )
        if _decoder(draft).vocab_size > self.vocab:  # rows of padding behind the same tokens
            draft.resize_token_embeddings(self.vocab)
        return draft

    def _same_tokens(self, name: str) -> bool:
        """Whether a model's tokenizer, if it has one, is the target's."""
        files = ("tokenizer.json", "tokenizer.model", "vocab.json")
        if Path(name).is_dir() and not any((Path(name) / file).exists() for file in files):
            return True
        own = transformers.AutoTokenizer.from_pretrained(name).get_vocab()
        return bool(own == self.tokenizer.get_vocab())

    def _store(self) -> Datastore:
        path = self.args.datastore
        if not path.exists():
            raise UserError(f"no datastore at {path}: make it with python -m specdec_loop datastore build")
        return Datastore.load(path)


def check_methods(option: str, names: Sequence[str]) -> None:
    """Check that every name is a method's.

    Raises:
        UserError: one is not.
    """
    unknown = sorted(set(names) - set(METHODS))
    if unknown:
        known = f"methods are, with blanks between them, {' '.join(METHODS)}"
        raise UserError(f"{option}: no method is called {' '.join(unknown)}; {known}")


def device(name: str | None) -> str:
    """A device that torch has; None: cuda, or else cpu.

    Raises:
        UserError: there is no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return "cuda" if count else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (":" in name and not index.isdecimal()):
        raise UserError(f"--device: must be cpu, cuda or cuda:N, got {name}")
    if kind == "cuda" and int(index or 0) >= count:
        raise UserError(f"--device: torch {torch.__version__} finds {count} CUDA devices here, got {name}: give cpu")
    return name


def check_model(option: str, name: str) -> None:
    """Check that a model is a folder, or a name on the Hugging Face Hub that is cached or can be loaded.

    Raises:
        UserError: it is neither.
    """
    folder = Path(name)
    if (folder / "config.json").is_file():
        return
    if folder.exists() or not HUB_NAME.fullmatch(name):
        raise UserError(
            f"{option}: no config.json in {name}: give the folder of a transformers model, or owner/name on the "
            "Hugging Face Hub"
        )
    if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        urllib.request.urlopen(huggingface_hub.constants.ENDPOINT, timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError:
        return  # it answers
    except OSError as error:
        raise UserError(
            f"{option}: {name} is neither a folder nor in the local cache, and the Hugging Face Hub "
            f"({huggingface_hub.constants.ENDPOINT}) cannot be reached: {getattr(error, 'reason', error)}"
        ) from error


def _decoder(model: Any) -> Any:
    """Configuration of what decodes: a model of images too has others beside it."""
    return model.config.get_text_config(decoder=True)
