"""The interface between the decoding loop and a drafter."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Sequence
from itertools import repeat
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from specdec_kernels import SampleResult, Sampling

from ..grammar import DraftGrammars
from ..sequences import Sequences, on_host
from ..statistics import Clock

CHAIN_RULES = ("ratio", "match", "block", "greedy", "typical", "topm", "distance")
ARGMAX_RULES = ("greedy", "typical", "topm", "distance")  # what they accept is likely: an argmax serves them best
MOST_NODES = 1024  # of a tree that the ops take
T = TypeVar("T")
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
        lengths: drafts of each request, where the host knows them: ids behind them are -1.
        is_free: of a deterministic chain of known lengths: it took no time to make. The loop may verify fewer columns.
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
    lengths: Sequence[int] | None = None
    is_free: bool = False


class Outcome(NamedTuple):
    """Outcome of a draft.

    Attributes:
        logits: the target's, ``[batch, draft + 1 or nodes, vocab]``: row 0 follows the last committed token.
        followers: int32 ``[batch]``: accepted tokens that the text took, -1 where it was finished. A stop among them is
            found later, when the host reads.
        path: of a tree: accepted nodes, see `verify_tree`; None: a chain.
        hidden: the target's states at the same nodes, those of `Drafter.features` side by side; None: none are wanted.
    """

    logits: Tensor
    followers: Tensor
    path: Tensor | None
    hidden: Tensor | None = None


class Drafter:
    """Proposes tokens. A drafter serves one `generate` at a time and may be used again after it.

    Nothing here may wait for the device, but for a `Confidence` and for grammars; what the host needs of the texts
    stands in `Sequences.rows`, which the loop reads once a step. How many tokens are drafted may depend on committed
    tokens and on logits, never on the token drawn from them: cutting off a token after looking at it biases the rules
    ``ratio`` and ``block``.
    """

    rules: ClassVar[Collection[str]] = CHAIN_RULES  # under which the drafts may be verified
    # Which of the target's hidden states it reads, as transformers numbers them: 0 the embedding, -1 the last, normed.
    features: Sequence[int] = ()
    networks: Sequence[nn.Module] = ()  # that it runs
    vocab: int | None = None  # how many of the target's ids they know; None: all
    is_whole: ClassVar[bool] = False  # whether a target forward has to run all that was drafted
    clock: Clock | None = None  # of the run: see `timed`
    grammars = DraftGrammars([], 0)  # of the texts; drafts of a drafter that does not heed them are only verified

    def nodes(self, length: int) -> int:
        """Most tokens of one target forward: the last committed one and `length` drafts, unless it is a tree."""
        return 1 + length

    def timed(self, network: Callable[..., Tensor], *args: Any) -> Tensor:
        """Run a network; its time is not that of drafting."""
        if self.clock is None:
            return network(*args)
        self.clock.mark("draft")
        out = network(*args)
        self.clock.mark("networks")
        return out

    def begin(self, sequences: Sequences, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Prepare for new texts: prompts, each with its first token, which the target said without a draft.

        Args:
            sequences: to be continued; of at least two tokens each, but where a prompt's first row was bad.
            rule: under which drafts will be verified.
            sampling: of the target.
            longest: no draft will be longer.
        """

    def prefill(self, sequences: Sequences, hidden: Tensor | None) -> None:
        """Read the prompts; called after `begin`.

        Args:
            sequences: the same as in `begin`.
            hidden: ``[batch, longest - 1, features]``: of all tokens but each text's last; None: none are wanted.
        """

    def join(self, sequences: Sequences, parts: Sequence[Part]) -> None:
        """Called after `begin` in place of `prefill`: go on with texts that drafters of the same kind have followed.

        A server's batch changes between steps. A drafter that keeps nothing of its texts has nothing to do.

        Args:
            sequences: the same as in `begin`.
            parts: of one drafter each; their texts, one after another, are the sequences.
        """

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """Propose up to `length` tokens a request; fewer, or none, where nothing promises well."""
        raise NotImplementedError  # every drafter has its own

    def skip(self, sequences: Sequences) -> None:
        """Called in place of `draft` where this step has no draft, or another drafter's."""

    def commit(self, sequences: Sequences, outcome: Outcome) -> None:
        """Follow the text, which has grown by what was kept."""

    def end(self, sequences: Sequences, numbers: Sequence[int]) -> None:
        """The texts of these numbers are complete, their `Sequences.rows` too."""

    def share(self, other: Drafter) -> None:
        """Learn from complete texts together with another drafter of the same kind, which serves other texts."""


class Part(NamedTuple):
    """Some texts of a drafter.

    Attributes:
        drafter: that has followed them; it drafts no more.
        sequences: its texts.
        numbers: which of them.
    """

    drafter: Any
    sequences: Sequences
    numbers: Sequence[int]

    def rows(self, state: Tensor) -> Tensor:
        """Their rows of ``[batch, ...]``."""
        return state.index_select(0, torch.tensor(self.numbers).to(state.device, non_blocking=True))

    def items(self, state: Sequence[T]) -> list[T]:
        """The same of what the host keeps."""
        return [state[b] for b in self.numbers]


class NoDrafter(Drafter):
    """Drafts nothing: plain decoding."""

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """An empty chain."""
        return Draft(torch.empty(sequences.batch, 0, dtype=torch.int64, device=sequences.tokens.device))


class Confidence:
    """Ends drafting early: where the likeliest paths of a batch have, in the mean, a chance below `least`.

    An extra draft column costs the same however many requests use it, so the batch stops together. It looks at the
    draft's rows, never at the tokens drawn from them, so no rule is biased; but under ``ratio`` and ``block``, where
    the text depends on the length of a draft, it then depends on the others of its batch. The chances are read from the
    device.
    """

    def __init__(self, least: float) -> None:
        """Set the bound; 0: drafts have their full length, and nothing waits.

        Raises:
            ValueError: not in [0, 1).
        """
        if not 0 <= least < 1:
            raise ValueError(f"confidence must be in [0, 1), got {least}")
        self.least = least

    def begin(self, temperature: Tensor | None) -> None:
        """Requests of these temperatures, None: 1."""
        if self.least > 0 and temperature is not None:
            self._warmth = [1 / t if t > COLD else 0.0 for t in temperature.tolist()]
        else:
            self._warmth = []
        self._has_warm, self._has_cold = not self._warmth or any(self._warmth), 0.0 in self._warmth

    def start(self, sequences: Sequences) -> None:
        """A new draft."""
        self._text, self._chances = sequences, [0.0] * sequences.batch

    def is_lost(self, logits: Tensor, drawn: SampleResult) -> bool:
        """Whether the chains end behind the tokens that were drawn from these logits ``[batch, vocab]``.

        `drawn` says the row's normalisation, and of a request without temperature the log-probability of its best
        token, at temperature 1: so the draws are with ``logprobs="raw"``.
        """
        if self.least == 0:
            return False
        high = (logits.amax(-1), drawn.logsumexp) if self._has_warm else ()
        low = (drawn.logprobs[:, 0],) if self._has_cold else ()
        columns = on_host(*high, *low)
        for b in range(len(self._chances)):
            warmth = self._warmth[b] if self._warmth else 1.0
            self._chances[b] += warmth * columns[0][b] - columns[1][b] if warmth else columns[-1][b]
        return self.is_below(self._chances)

    def is_below(self, chances: Sequence[float]) -> bool:
        """Whether the requests' likeliest paths, of these chances in logarithms, promise too little."""
        running = zip(chances, self._text.is_finished, strict=True)
        promised = [math.exp(min(c, 0.0)) for c, is_finished in running if not is_finished]  # above 0: a bad row
        return sum(promised) < self.least * len(promised)


def padded(drafts: Sequence[Sequence[int]], device: torch.device, length: int | None = None) -> Tensor:
    """Chains that the host made, int64 ``[batch, length]``, -1 behind their ends; nothing waits for the copy.

    Without a length they are as wide as the longest: what is not drafted need not be run.
    """
    length = max(map(len, drafts)) if length is None else length
    flat = array("q")
    for draft in drafts:
        flat.extend(draft)
        flat.extend(repeat(-1, length - len(draft)))
    # Half the time of torch.tensor, which looks at every number, but without any it is refused.
    ids = torch.frombuffer(flat, dtype=torch.int64) if flat else torch.empty(0, dtype=torch.int64)
    return ids.view(len(drafts), length).to(device, non_blocking=True)


def copies(drafts: Sequence[Sequence[int]], device: torch.device) -> Draft:
    """Chains that were looked up."""
    return Draft(padded(drafts, device), lengths=list(map(len, drafts)), is_free=True)


def kept_rows(rows: Tensor, keep: Tensor | Sequence[int] | int) -> Tensor:
    """Rows of ``[batch, count, size]``: so many last ones, 0: all; or by number, one or ``[batch, n]`` a request."""
    if isinstance(keep, int):
        return rows[:, -keep:]
    if not isinstance(keep, Tensor):
        keep = torch.tensor(keep).to(rows.device, non_blocking=True)
    return rows.gather(1, keep.reshape(len(keep), -1, 1).expand(-1, -1, rows.shape[2]))
