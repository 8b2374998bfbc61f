"""Other samplers in the same laboratory, through one small protocol.

A sampler is a module with

* ``NAME`` and ``version() -> str``;
* ``available() -> str | None``: None, or why it cannot run here;
* ``verify_chain(draft_ids, target_logits, draft_logits, sampling) -> (ids, accepted)``, or the same in two parts,
  ``prepare(target_logits, draft_logits, sampling)`` and ``verify_prepared(draft_ids, prepared)``; `sampling` is a
  `specdec_kernels.Sampling` that has a temperature;
* optional ``supports(case)`` with `Case` below: None, or why not; a refused batch is handed over in requests of one;
* optional ``propose(draft_logits [batch, vocab]) -> ids [batch]``: how the drafter that belongs to it draws, where that
  is not a draw from the distribution it is verified with;
* optional ``filtered_logits(logits [batch, row, vocab], sampling)``: for the exact bias of its filter.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from specdec_kernels import Sampling

from .exact import Filters, sampling_of
from .procedures import Procedure, Step, Verdict


@dataclass(frozen=True)
class Case:
    """Protocol of a sampler.

    Attributes:
        batch: requests of a call.
        filters: "none", or names such as "top-k + top-p".
        vocab: width of a row.
        compiled: never; rivals of the benchmarks ask for it.
    """

    batch: int
    filters: str
    vocab: int
    compiled: bool = False


def described(filters: Filters) -> str:
    """Names of the filters that are on, in the words of the benchmarks."""
    names = [name.replace("_", "-") for name in filters if name != "temperature"]
    return " + ".join(names) or "none"


def load(name: str) -> ModuleType:
    """The module of a sampler by its dotted name.

    Raises:
        ValueError: it is not there, lacks a part of the protocol, or cannot run here.
    """
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"lossless: --sampler {name} must be a module that imports, got {error}") from error
    whole, parts = hasattr(module, "verify_chain"), hasattr(module, "prepare") and hasattr(module, "verify_prepared")
    if not (whole or parts) or not hasattr(module, "NAME"):
        raise ValueError(
            f"lossless: --sampler {name} must have NAME and verify_chain, see specdec_lab.lossless.samplers"
        )
    return module


def refusal(module: ModuleType, filters: Filters, vocab: int) -> str | None:
    """Why a sampler cannot be asked, or None."""
    reason: str | None = module.available()
    if reason is None and hasattr(module, "supports"):
        reason = module.supports(Case(1, described(filters), vocab))
    return reason


class Foreign:
    """A sampler as the `verify` of a method."""

    def __init__(self, name: str) -> None:
        """Name its module; it is imported where it runs, so that this travels between processes."""
        self.name = name

    def propose(self, row: Tensor, filters: Filters) -> Tensor:
        """Ids of its own drafter."""
        ids: Tensor = load(self.name).propose(row)
        return ids

    def __call__(self, method: Procedure, step: Step) -> Verdict:
        """Verify a batch."""
        module = load(self.name)
        batch = len(step.token_ids)
        sampling = sampling_of({"temperature": 1.0, **step.filters}, batch)
        target, draft = step.target.contiguous(), step.draft.contiguous()
        case = Case(batch, described(step.filters), target.shape[-1])
        together = getattr(module, "supports", lambda case: None)(case) is None
        ids, accepted = [], []
        for rows in (slice(0, batch),) if together else (slice(i, i + 1) for i in range(batch)):
            part = Sampling(*(None if x is None else x[rows] for x in sampling))
            given = target[rows], draft[rows], part
            if hasattr(module, "verify_chain"):
                emitted, count = module.verify_chain(step.token_ids[rows], *given)
            else:
                emitted, count = module.verify_prepared(step.token_ids[rows], module.prepare(*given))
            short = method.depth + 1 - emitted.shape[1]
            ids.append(torch.nn.functional.pad(emitted.long(), (0, short)))
            accepted.append(count.long())
        all_ids, all_accepted = torch.cat(ids), torch.cat(accepted)
        is_emitted = torch.arange(method.depth + 1) <= all_accepted[:, None]  # some leave the other slots as they were
        return torch.where(is_emitted, all_ids, -1), all_accepted


def method_of(name: str) -> Procedure:
    """The chain of two drafts that a sampler verifies."""
    module, sampler = load(name), Foreign(name)
    propose = sampler.propose if hasattr(module, "propose") else None
    return Procedure(f"{module.NAME} ({module.version()})", "ratio", verify=sampler, propose=propose)
