"""What the decoding loop asks of a drafter, and what a drafter answers."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from specdec_kernels import SampleResult, Sampling

from ..text import Text

CHAIN_RULES = ("ratio", "match", "block", "greedy", "typical", "topm", "distance")
ARGMAX_RULES = ("greedy", "typical", "topm", "distance")  # what they accept is likely: an argmax serves them best


COLD = 1e-4  # a temperature so low that a race is won by the largest logits, in their order


class Draft(NamedTuple):
    """Candidates for the next tokens of every request.

    Attributes:
        token_ids: int64. A chain: ``[batch, draft]``, -1 behind its end. A tree: ``[batch, nodes]``; node 0 stands for
            the last committed token, whatever its id; -1: the node is not there.
        logits: ``[batch, draft or nodes, draft_vocab]``: the rows they were drawn from; None: they are deterministic.
        stats: ``(logsumexp, threshold)`` of a chain's rows, as `sample` returned them.
        sampling: how they were drawn; needed with logits.
        token_map: int32 ``[draft_vocab]``: target id of each column of the logits.
        parents: of a tree, int32 ``[batch, nodes]``; None: a chain.
        max_depth: of a tree: longest path of the batch, a host int.
        candidates: of a tree: only its first nodes are candidates (None: all). The others ride in the target's forward,
            for their logits.
        replacement: of a tree: siblings are independent draws.
    """

    token_ids: Tensor
    logits: Tensor | None = None
    stats: tuple[Tensor, Tensor] | None = None
    sampling: Sampling | None = None
    token_map: Tensor | None = None
    parents: Tensor | None = None
    max_depth: int = 0
    candidates: int | None = None
    replacement: bool = False


class Outcome(NamedTuple):
    """What came of a draft.

    Attributes:
        logits: the target's, ``[batch, draft + 1 or nodes, vocab]``: row 0 follows the last committed token.
        kept: int32 ``[batch]``: tokens that the text took, accepted ones and the drawn one; 0 where it was finished.
            A stop among them is found later, when the host reads.
        path: of a tree: accepted nodes, see `verify_tree`; None: a chain.
        hidden: the target's states at the same nodes, those of `Drafter.features` side by side; None: none are wanted.
    """

    logits: Tensor
    kept: Tensor
    path: Tensor | None
    hidden: Tensor | None = None


class Drafter:
    """Proposes tokens. A drafter serves one `generate` at a time and may be used again after it.

    Nothing here may wait for the device; what the host needs of the texts stands in `Text.rows`, which the loop reads
    once a step. How many tokens are drafted may depend on committed tokens and on logits, never on the token drawn from
    them: cutting off a token after looking at it biases the rules ``ratio`` and ``block``.
    """

    rules: ClassVar[Collection[str]] = CHAIN_RULES  # under which the drafts may be verified
    # Which of the target's hidden states it reads, as transformers numbers them: 0 the embedding, -1 the last, normed.
    features: Sequence[int] = ()

    def nodes(self, length: int) -> int:
        """Most tokens of one target forward: the last committed one and `length` drafts, unless it is a tree."""
        return 1 + length

    def begin(self, text: Text, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Prepare for new texts: prompts, each with its first token, which the target said without a draft.

        Args:
            text: to be continued; of at least two tokens each.
            rule: under which drafts will be verified.
            sampling: of the target.
            longest: no draft will be longer.
        """

    def prefill(self, text: Text, hidden: Tensor) -> None:
        """Read the prompts' features; called after `begin` if any are wanted.

        Args:
            text: the same as in `begin`.
            hidden: ``[batch, longest - 1, features]``: of all tokens but each text's last.
        """

    def draft(self, text: Text, length: int) -> Draft:
        """Propose up to `length` tokens a request; fewer, or none, where nothing promises well."""
        raise NotImplementedError

    def commit(self, text: Text, outcome: Outcome) -> None:
        """Follow the text, which has grown by what was kept."""

    def end(self, text: Text) -> None:
        """The texts are complete, `Text.rows` too."""


class NoDrafter(Drafter):
    """Drafts nothing: plain decoding."""

    def draft(self, text: Text, length: int) -> Draft:
        """An empty chain."""
        return Draft(torch.empty(text.batch, 0, dtype=torch.int64, device=text.tokens.device))


class Confidence:
    """Ends a chain early: behind the token at which its likeliest path has a chance below `least`.

    It looks at the draft's rows, never at the tokens drawn from them, and at each request alone: no rule is biased and
    no text depends on the others of its batch. Whether all chains have ended is read from the device.
    """

    def __init__(self, least: float) -> None:
        """Set the bound; 0: chains have their full length, and nothing waits.

        Raises:
            ValueError: not in [0, 1).
        """
        if not 0 <= least < 1:
            raise ValueError(f"confidence must be in [0, 1), got {least}")
        self.least = least
        self._chances: list[Tensor] = []  # logarithms
        self._temperature: Tensor | None = None

    def begin(self, temperature: Tensor | None) -> None:
        """A new draft, of requests of these temperatures."""
        self._chances.clear()
        if temperature is not self._temperature:
            self._temperature = temperature
            if temperature is not None:
                self._is_warm, self._warmth = temperature > COLD, 1 / temperature.clamp(min=COLD)

    def is_lost(self, logits: Tensor, drawn: SampleResult) -> bool:
        """Whether all chains end behind the tokens that were drawn from these logits ``[batch, vocab]``.

        `drawn` says the row's normalisation, and of a request without temperature the log-probability of its best
        token, at temperature 1: so the draws are with ``logprobs="raw"``.
        """
        if self.least == 0:
            return False
        best = logits.amax(-1).float()
        if self._temperature is None:
            chance = best - drawn.logsumexp
        else:
            chance = torch.where(self._is_warm, best * self._warmth - drawn.logsumexp, drawn.logprobs[:, 0])
        self._chances.append(chance + self._chances[-1] if self._chances else chance)
        return bool((self._chances[-1] < math.log(self.least)).all())

    def cut(self, token_ids: Tensor) -> Tensor:
        """Chains ``[batch, draft]`` with -1 behind their ends."""
        if len(self._chances) < 2 or token_ids.shape[0] == 1:  # a lone chain ended where drafting did
            return token_ids
        is_behind = torch.stack(self._chances, 1)[:, : token_ids.shape[1] - 1] < math.log(self.least)
        return token_ids.masked_fill(torch.nn.functional.pad(is_behind, (1, 0)), -1)


def padded(drafts: Sequence[Sequence[int]], device: torch.device, length: int | None = None) -> Tensor:
    """Chains that the host made, int64 ``[batch, length]``, -1 behind their ends; nothing waits for the copy.

    Without a length they are as wide as the longest: what is not drafted need not be run.
    """
    length = max(map(len, drafts)) if length is None else length
    rows = [[*draft, *[-1] * (length - len(draft))] for draft in drafts]
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
