"""Continuous batching: requests come and go between steps, and none of them can tell from its text.

A step runs, in one forward, pieces of new prompts and the last token with its drafts of each other request. Then one
call verifies all drafts, each request with its own sampling and its own random numbers: rule ``match``, under which a
text is that of plain decoding with its seed. One of the loop's drafters drafts for all requests, see `Group`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from logging import getLogger
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec_kernels import CacheLayout, TreeResult, compact_cache

from ..draft_length import FixedLength
from ..drafters import Draft, Drafter, NoDrafter, Outcome
from ..generation import check_rotary, overhang
from ..linear import small_batch_linear
from ..sequences import Sequences, on_host
from ..statistics import Clock
from .allotment import Allotment
from .batch import Batch
from .forward import Nodes, check, forward
from .group import Group
from .pages import Lease, Pages, block_table
from .request import Logprob, Reason, Request
from .verification import Verifier, depth_of, listed, nodes_of

logger = getLogger(__name__)
PIECE = 256  # most tokens of prompts in one step, so that a long one does not hold up the texts that grow


class Progress(NamedTuple):
    """What a step did for a request.

    Attributes:
        request: whose text grew, or which has left.
        tokens: new ones.
        accepted: how many of them, the first ones, were drafts.
        drafted: drafts that were verified for it; None: it reads its prompt.
        logprobs: of the tokens; empty unless asked for.
        reason: why it has left; "": it goes on.
    """

    request: Request
    tokens: Sequence[int] = ()
    accepted: int = 0
    drafted: int | None = None
    logprobs: Sequence[Logprob] = ()
    reason: Reason = ""


class Turn(NamedTuple):
    """A request's part in a step.

    Attributes:
        request: in a slot.
        piece: tokens that it has and the pages lack.
        draft: behind them.
        speaks: whether the piece reaches the end, so that a token will follow.
        reads: whether it is a piece of the prompt.
    """

    request: Request
    piece: list[int]
    draft: Draft
    speaks: bool
    reads: bool


class Engine:
    """Serves requests with a transformers model. One thread calls it.

    Attributes:
        waiting: requests that have no slot yet, in order of arrival.
        running: requests that have.
        longest: most tokens of a prompt and its continuation.
        ends: the model's end tokens.
        vocab: ids of a row of logits.
        slots: requests that may run at once.
        clock: seconds of each phase.
        pages: keys and values.
    """

    def __init__(
        self,
        model: Any,
        make_drafter: Callable[[], Drafter | None] = lambda: None,
        *,
        draft_length: FixedLength | None = None,
        slots: int = 8,
        pages: int = 256,
        page_size: int = 16,
        budget: int | None = None,
    ) -> None:
        """Prepare for requests.

        Args:
            model: a transformers causal LM.
            make_drafter: gives a new drafter of a batch; None: plain decoding.
            draft_length: most drafts of a request and step, or an `AdaptiveLength`, with which no more drafts are
                verified than pay by the measured time of steps; None: 4.
            slots: requests that run at once.
            pages: of keys and values.
            page_size: tokens of a page.
            budget: most drafts of a step, which go to the requests that are likeliest to accept them; None: no bound.

        Raises:
            ValueError: a model or a drafter that cannot be served.
        """
        first = make_drafter() or NoDrafter()
        check(model, first.features)
        config = model.config.get_text_config(decoder=True)
        _check_drafter(first, budget, config.vocab_size)
        self.lengths = FixedLength(4) if draft_length is None else draft_length
        self.lengths.begin(first.nodes)
        self._overhang = overhang(first, self.lengths)
        self.slots, self.model, self._features = slots, model, first.features
        self._networks = first.networks
        self.longest = pages * page_size - self._overhang
        if (most := getattr(config, "max_position_embeddings", None)) is not None:
            self.longest = min(self.longest, most)
        if self.longest < 2:
            raise ValueError(f"{pages} pages of {page_size} tokens hold no text and {self._overhang} nodes of a draft")
        check_rotary(config, 1, self.longest + self._overhang - 2)
        self.pages = Pages(config, pages, page_size, dtype=model.dtype, device=model.device)
        self._layout = CacheLayout(
            [*self.pages.keys, *self.pages.values], "nhd", torch.zeros(1, 1, dtype=torch.int32, device=model.device)
        )
        self.vocab = config.vocab_size
        self._verifier = Verifier(slots, self.longest + self._overhang, self.vocab, model.device)
        eos = model.generation_config.eos_token_id
        self.ends = list(eos) if isinstance(eos, list) else [] if eos is None else [eos]
        self._free = list(range(slots))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.clock = Clock(model.device)
        self._allotment = Allotment(self.lengths, budget)
        batch = partial(
            Batch,
            longest=self.lengths.longest,
            vocab=self.vocab,
            overhang=self._overhang,
            device=model.device,
            clock=self.clock,
        )
        self._group = Group(batch(lambda: make_drafter() or NoDrafter()), batch(NoDrafter))

    @property
    def faults(self) -> int:
        """Of drafters, so far: they cost drafts, and no text."""
        return self._group.faults

    def submit(self, request: Request) -> Request:
        """Put a request behind those that wait.

        Raises:
            ValueError: it is too long.
        """
        most = len(request.prompt) + request.limit
        if not request.prompt or request.limit < 1 or most > self.longest:
            raise ValueError(f"a prompt and a limit of at least 1 and together at most {self.longest}, got {most}")
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Let a request leave now; nothing if it has left already."""
        if request in self.waiting:
            self.waiting.remove(request)
            request.reason = "cancelled"
        elif request in self.running:
            self._leave(request, "cancelled")

    def abort(self, error: str) -> list[Progress]:
        """Let all that run leave: a step has failed."""
        running = list(self.running)
        for request in running:
            request.error = error
            self._leave(request, "failed")
        return [Progress(request, reason="failed") for request in running]

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Steps are faster within: the networks multiply few rows by `small_batch_linear`."""
        with small_batch_linear(self.model, *self._networks):
            yield

    def run(self) -> None:
        """Until nothing is left to do."""
        with self.ready():
            while self.waiting or self.running:
                self.step()

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """Run all requests a step further; those that only read a piece of their prompts are not listed.

        If some cannot begin, these are told of first, and nothing runs.
        """
        failed = self._admit()
        if failed or not self.running:
            return failed
        self.clock.begin()
        turns = self._turns()
        drafted = len(self._group.drafted.requests)  # the first turns are theirs
        self.clock.mark("draft")
        nodes = [self._nodes(turn) for turn in turns]
        speakers = [turn for turn in turns if turn.speaks]
        self._verifier.begin_masks([turn.request for turn in speakers], [turn.draft for turn in speakers])
        logits, hidden = self._forward(turns, nodes)
        self.clock.mark("target")
        if hidden is not None:
            for turn, states in zip(turns, hidden.split([len(n.ids) for n in nodes]), strict=True):
                if turn.reads:
                    turn.request.features.append(states)
        found = self._decide(turns, logits, hidden) if speakers else []
        found += [Progress(turn.request) for turn in turns if turn.request.error and not turn.speaks]
        for turn in turns:
            if not turn.speaks:
                turn.request.cached += len(turn.piece)
            if not self._features:  # a drafter that reads them needs every prompt whole
                self.pages.learn(turn.request.lease, turn.request.tokens[: turn.request.cached])
        found = [self._settled(progress) for progress in found]
        self.clock.mark("commit")
        self.clock.settle()
        if drafted == len(turns):  # the time of other steps is not that of drafts alone
            depths = [depth_of(turn.draft) for turn in turns]
            accepted = [progress.accepted for progress in found]
            tokens = 1 + sum(accepted) / len(accepted)
            self.lengths.update(depths, accepted, self.clock.latest, max(depths), tokens)
            if self._allotment.times is not None:
                beside_drafting = (self.clock.latest[phase] for phase in ("target", "verify", "commit"))
                self._allotment.times.note(sum(len(n.ids) for n in nodes), sum(beside_drafting))
        return found

    # --- who runs

    def _admit(self) -> list[Progress]:
        """In order of arrival, while there are slots and pages for all that a request may come to; those that fail."""
        failed = []
        for request in list(self.waiting):
            if not self._free:
                break
            if (leader := request.leader) is not None and not leader.has_spoken:
                if not leader.reason:
                    continue  # its prompt is being read
                request.error = leader.error  # the same prompt and grammar would fail again
            if not request.error:
                most = len(request.prompt) + request.limit + self._overhang
                lease = self.pages.lease(request.prompt, most, share=not self._features)
                if lease is None:
                    break
                self._begin(request, lease)
            self.waiting.remove(request)
            if request.error:
                request.reason = "failed"
                failed.append(Progress(request, reason="failed"))
        return failed

    def _begin(self, request: Request, lease: Lease) -> None:
        """Let a request run; if that raises, its slot and pages are free again."""
        slot = self._free.pop()
        try:
            request.begin(slot, lease, ends=self.ends, overhang=self._overhang, device=self.model.device)
            self._verifier.begin(request)
        except Exception as error:  # out of memory, or its grammar's
            logger.exception("a request cannot begin")
            request.error, request.slot = f"{type(error).__name__}: {error}", -1
            self.pages.release(lease)
            self._free.append(slot)
        else:
            self.running.append(request)

    def _leave(self, request: Request, reason: Reason) -> None:
        self.running.remove(request)
        self.pages.release(request.lease, forget=reason == "failed")
        self._free.append(request.slot)
        self._group.leave(request, reason)
        request.reason, request.features = reason, []

    def _settled(self, progress: Progress) -> Progress:
        """Let a request leave whose text is complete, or failed."""
        reason = progress.request.state()
        if reason:
            self._leave(progress.request, reason)
        return progress._replace(reason=reason)

    # --- a step

    def _turns(self) -> list[Turn]:
        """Who takes part, with which drafts: the group's requests, then those that read their prompts."""
        drafts, room = self._group.draft(self.lengths.next()), PIECE
        turns = [
            Turn(request, request.tokens[request.cached :], draft, speaks=True, reads=False)
            for request, draft in zip(self._group.requests, drafts, strict=True)
        ]
        for request in self.running:
            lacking = request.tokens[request.cached :]
            piece = lacking[:room]
            if piece and not request.has_spoken:
                room -= len(piece)
                nothing = NoDrafter().draft(request.text, 0)
                turns.append(Turn(request, piece, nothing, len(piece) == len(lacking), reads=True))
        drafted = [turn.draft for turn in turns]
        cut = self._allotment.cut([turn.request for turn in turns], drafted, sum(len(turn.piece) for turn in turns))
        return [turn._replace(draft=draft) for turn, draft in zip(turns, cut, strict=True)]

    def _nodes(self, turn: Turn) -> Nodes:
        request, draft = turn.request, turn.draft
        own = torch.tensor(turn.piece, device=self.model.device)
        ids = torch.cat([own, draft.token_ids[0] if draft.parents is None else draft.token_ids[0, 1:]])
        kept = nodes_of(draft) if turn.speaks else 0
        return Nodes(ids, request.lease.pages, request.cached, kept, draft.parents)

    def _forward(self, turns: Sequence[Turn], nodes: Sequence[Nodes]) -> tuple[Tensor, Tensor | None]:
        """Logits and features; if the model raises, of each request alone, and those for which it raises again fail."""
        try:
            return forward(self.model, self.pages, nodes, self._features)
        except Exception:  # out of memory, perhaps
            logger.exception("a forward failed: it is repeated for each request alone")
        logits, hidden = zip(*map(self._forward_alone, turns, nodes), strict=True)
        return torch.cat(logits), torch.cat(hidden) if self._features else None

    def _forward_alone(self, turn: Turn, nodes: Nodes) -> tuple[Tensor, Tensor | None]:
        try:
            return forward(self.model, self.pages, [nodes], self._features)
        except Exception as error:
            turn.request.error = f"{type(error).__name__}: {error}"
        size = len(self._features) * self.model.config.get_text_config(decoder=True).hidden_size
        states = torch.zeros(len(nodes.ids), size, dtype=self.model.dtype, device=self.model.device)
        logits = states.new_full((nodes.kept, self.vocab), float("nan"))  # no token is drawn from them
        return logits, states

    def _decide(self, turns: list[Turn], logits: Tensor, hidden: Tensor | None) -> list[Progress]:
        """Verify the drafts, and append what was said to texts and caches."""
        said = [turn for turn in turns if turn.speaks]
        requests, drafts = [turn.request for turn in said], [turn.draft for turn in said]
        verdict = self._verifier.verify(requests, drafts, logits)
        self.clock.mark("verify")
        texts = _texts(requests)
        followers = torch.cat(
            [text.append(verdict.token_ids[rows], verdict.num_accepted[rows]) for text, rows in texts]
        )
        paths = verdict.path if isinstance(verdict, TreeResult) else None
        if paths is not None:
            self._compact(requests, paths, followers)
        if grown := len(self._group.drafted.requests):
            path = None if paths is None or drafts[0].parents is None else paths[:grown]
            counts = [nodes_of(draft) for draft in drafts[:grown]]
            states = None if hidden is None else _padded(hidden, counts)
            self._group.commit(Outcome(_padded(logits, counts), followers[:grown], path, states))
        wanted = () if paths is None else (paths,)
        ids, status, accepted, taken, *told = on_host(  # the one wait for the device
            verdict.token_ids, verdict.status, verdict.num_accepted, followers, *wanted
        )
        for nodes in told:
            self._allotment.learn(requests, nodes, accepted)
        new = [tokens for text, rows in texts for tokens in text.take(ids[rows], status[rows], taken[rows])]
        found = []
        for turn, tokens, most, logprobs in zip(said, new, accepted, listed(requests, verdict), strict=True):
            turn.request.cached += len(turn.piece) + max(len(tokens) - 1, 0)
            turn.request.obey(tokens)
            if turn.reads:
                turn.request.has_spoken = True
                if not turn.request.text.is_finished[0]:
                    self._group.welcome(turn.request)
                found.append(Progress(turn.request, tokens, logprobs=logprobs[: len(tokens)]))
                continue
            turn.request.learn(depth_of(turn.draft), most)
            kept = min(most, len(tokens))
            found.append(Progress(turn.request, tokens, kept, nodes_of(turn.draft) - 1, logprobs[: len(tokens)]))
        return found

    def _compact(self, requests: list[Request], path: Tensor, followers: Tensor) -> None:
        """Move the rows of accepted nodes together."""
        table = block_table([request.lease.pages for request in requests], path.device)
        lengths = torch.tensor([len(request.tokens) - 1 for request in requests], device=path.device)
        compact_cache(self._layout.with_block_table(table), path, followers, lengths)


def _check_drafter(drafter: Drafter, budget: int | None, vocab: int) -> None:
    name = type(drafter).__name__
    if "match" not in drafter.rules:
        raise ValueError(
            f"{name} cannot be served: its drafts are verified under {', '.join(drafter.rules)}, and only under match "
            "is a seeded text the same whatever runs beside it"
        )
    if budget is not None and drafter.is_whole:
        raise ValueError(f"{name} cannot be served under a budget of drafts: it needs the whole of its trees verified")
    if drafter.vocab not in (None, vocab):
        raise ValueError(f"{name} drafts {drafter.vocab} ids, and the target has {vocab}: give it a token_map")


def _texts(requests: Sequence[Request]) -> list[tuple[Sequences, slice]]:
    """Their batches, each with the place of its requests among all: the group's, and those of one new request."""
    texts: list[tuple[Sequences, slice]] = []
    end = 0
    while end < len(requests):
        text = requests[end].text
        texts.append((text, slice(end, end + text.batch)))
        end += text.batch
    return texts


def _padded(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The first rows as ``[batch, most, size]``: so many of each request."""
    rows = rows[: sum(counts)]
    if min(counts) == max(counts):
        return rows.view(len(counts), counts[0], -1)
    return pad_sequence(list(rows.split(list(counts))), batch_first=True)
