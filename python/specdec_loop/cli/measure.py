"""Methods side by side on the same prompts: they take turns, round after round, and each is given its median."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..draft_length import FixedLength
from ..drafters import Drafter
from ..generation import Generation
from ..generation import generate as decode
from ..methods import METHODS
from ..statistics import acceptance_by_child, acceptance_by_position, expected_tokens, shares_at_least
from .errors import UserError, one_line
from .loading import Models

Policy = tuple[Drafter | None, FixedLength] | None  # a drafter and the length of its drafts; None: a rival
RIVALS = ("transformers plain", "transformers assisted", "transformers prompt lookup")
NEAR = 4  # cases between two runs of plain decoding, which the speed-up looks at: a machine's speed drifts in seconds


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    method: str
    temperature: float
    batch: int


@dataclass
class Row:
    """Result of a case. Speeds are of whole calls, prefill included, all requests of a batch together.

    Attributes:
        tokens_per_second: the median round's.
        speedup: beside plain decoding just before and after, at the same temperature and batch, the median of rounds.
        tokens_per_step: of a request.
        acceptance: accepted candidates, of those that were looked at.
        acceptance_by_position: the same for the first, second, .. candidate of a step.
        acceptance_by_child: probability that the first, second, .. child of a node of a tree is the accepted one.
        accepted_at_least: share of the steps that accepted at least 1, 2, .. candidates.
        drafted_at_least: share of the steps that drafted at least so many, or a tree so deep.
        verified_per_step: tokens of a request that the target ran in a step: candidates and the token before them.
        predicted_tokens_per_second: by theory, from this acceptance and the measured time of a step.
        distinct: share of different 4-grams in the texts: low where a model repeats itself, which flatters copying.
        same_text: of the texts, how many are those of plain decoding; None where only the distribution is the same.
        seconds: of a step, by phase.
    """

    method: str
    temperature: float
    batch: int
    tokens_per_second: float
    speedup: float | None = None
    tokens_per_step: float | None = None
    acceptance: float | None = None
    acceptance_by_position: list[float] | None = None
    acceptance_by_child: list[float] | None = None
    accepted_at_least: list[float] | None = None
    drafted_at_least: list[float] | None = None
    verified_per_step: float | None = None
    predicted_tokens_per_second: float | None = None
    distinct: float = 1.0
    same_text: str | None = None
    seconds: dict[str, float] | None = None

    @property
    def rest(self) -> float | None:
        """Share of a step outside all forwards, the target's and the drafter's."""
        if not self.seconds:
            return None
        return sum(self.seconds[phase] for phase in ("draft", "verify", "commit")) / sum(self.seconds.values())


@dataclass
class Round:
    """All prompts once: their texts, details where it is ours, and the time of plain decoding beside it."""

    seconds: float = 0.0
    plain_seconds: float = 0.0
    texts: list[list[int]] = field(default_factory=list)
    results: list[Generation] = field(default_factory=list)

    def speedup(self, plain: Round) -> float:
        """Tokens a second beside plain decoding's."""
        own, theirs = (sum(map(len, run.texts)) for run in (self, plain))
        return own / self.seconds * self.plain_seconds / theirs


class Comparison:
    """Runs cases on prompts; `rows` when all rounds are done."""

    def __init__(self, models: Models, prompts: Sequence[list[int]], cases: Sequence[Case], new_tokens: int) -> None:
        """Check that each method has what it needs, and warm up."""
        self.models, self.prompts, self.cases, self.new_tokens = models, prompts, cases, new_tokens
        self.runs: dict[Case, list[Round]] = {case: [] for case in cases}
        self.lengths = {case: models.draft_length(case.method, case.batch) for case in cases if case.method in METHODS}
        for case in cases:
            self._run(case, self._policy(case), 0, 8, Round())

    def steps(self, count: int) -> int:
        """How often `rounds` yields."""
        return count * sum(-(-len(self.prompts) // case.batch) for case in self.cases)

    def rounds(self, count: int) -> Iterator[Case]:
        """Run every case `count` times; yields each after each group of prompts.

        The cases take turns on every prompt, so that a machine that slows down does so for all of them, and plain
        decoding runs again after every `NEAR`. A round has drafters of its own: they must not know these texts from the
        last one. Lengths that adapt go on, as in an engine: what they know is how many drafts were accepted, and how
        long steps take.
        """
        gc.collect()
        gc.freeze()  # all that is loaded: looking through it takes 0.2 s, in the midst of somebody's step
        columns = self._columns()
        for _ in range(count):
            policies = {case: self._policy(case) for case in self.cases}
            rounds = {case: Round() for case in self.cases}
            for start in range(len(self.prompts)):
                for cases in columns:
                    if start % cases[0].batch == 0:
                        yield from self._turn(cases, policies, start, rounds)
            for case in self.cases:
                self.runs[case].append(rounds[case])
        gc.unfreeze()

    def _columns(self) -> list[list[Case]]:
        """Cases of one temperature and batch, plain decoding first."""
        found: dict[tuple[float, int], list[Case]] = {}
        for case in sorted(self.cases, key=lambda case: case.method != "plain"):
            found.setdefault((case.temperature, case.batch), []).append(case)
        return list(found.values())

    def _turn(
        self, cases: list[Case], policies: Mapping[Case, Policy], start: int, rounds: Mapping[Case, Round]
    ) -> Iterator[Case]:
        """Run a column on a batch of prompts."""

        def run(case: Case, done: Round) -> float:
            return self._run(case, policies[case], start, self.new_tokens, done)

        plain = cases[0] if cases[0].method == "plain" else None
        others, before = cases, 0.0
        if plain is not None:
            others, before = cases[1:], run(plain, rounds[plain])
            yield plain
        for first in range(0, len(others), NEAR):
            near = others[first : first + NEAR]
            for case in near:
                run(case, rounds[case])
                yield case
            after = 0.0 if plain is None else run(plain, Round())
            for case in near:
                rounds[case].plain_seconds += (before + after) / 2
            before = after

    def rows(self) -> list[Row]:
        """A row for each case, in their order."""
        return [self._row(case) for case in self.cases]

    def _policy(self, case: Case) -> Policy:
        if case.method in RIVALS:
            return None
        return self.models.drafter(case.method), self.lengths[case]

    def _run(self, case: Case, policy: Policy, start: int, new_tokens: int, done: Round) -> float:
        """Run a batch of prompts, add it to what is `done`, and say how long it took."""
        group, seed = self.prompts[start : start + case.batch], self.models.args.seed + start
        started = time.perf_counter()
        if policy is None:
            done.texts += self._run_rival(case, group, seed, new_tokens)
        else:
            with one_line():
                result = decode(
                    self.models.target,
                    policy[0],
                    group,
                    sampling=self.models.sampling(len(group), case.temperature),
                    seed=seed,
                    rule=METHODS[case.method].rule,
                    max_new_tokens=new_tokens,
                    draft_length=policy[1],
                )
            done.texts += result.tokens
            done.results.append(result)
        seconds = time.perf_counter() - started
        done.seconds += seconds
        return seconds

    def _run_rival(self, case: Case, group: Sequence[list[int]], seed: int, new_tokens: int) -> list[list[int]]:
        """Transformers' own generate, which assists one request at a time."""
        if case.batch != 1:
            raise UserError(f"{case.method} is compared at batch 1 only")
        target = self.models.target
        more: dict[str, Any] = {"do_sample": case.temperature > 0}
        if case.temperature > 0:
            more |= {"temperature": case.temperature, "top_k": 0, "top_p": 1.0}
        if case.method == "transformers assisted":
            more["assistant_model"] = self.models.assets.draft
        elif case.method == "transformers prompt lookup":
            more["prompt_lookup_num_tokens"] = METHODS["prompt-lookup"].draft_length
        torch.manual_seed(seed)
        ids = torch.tensor(group, device=target.device)
        mask = torch.ones_like(ids)
        out = target.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, pad_token_id=0, **more)
        texts: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return texts

    def _row(self, case: Case) -> Row:
        seconds = statistics.median(run.seconds for run in self.runs[case])
        run = min(self.runs[case], key=lambda run: abs(run.seconds - seconds))
        count = sum(map(len, run.texts))
        row = Row(case.method, case.temperature, case.batch, count / seconds, distinct=distinct(run.texts))
        plain = self.runs.get(Case("plain", case.temperature, case.batch))
        if plain is not None:
            self._beside(case, row, plain)
        if run.results:
            self._describe(row, run.results, seconds, count)
        return row

    def _beside(self, case: Case, row: Row, plain: list[Round]) -> None:
        """What plain decoding's rounds say of a case."""
        own = self.runs[case]
        row.speedup = 1.0 if own is plain else statistics.median(map(Round.speedup, own, plain))
        method = METHODS.get(case.method)
        if case.temperature == 0 or (method is not None and method.keeps_the_text):
            same = sum(a == b for a, b in zip(own[-1].texts, plain[-1].texts, strict=True))
            row.same_text = f"{same}/{len(plain[-1].texts)}"

    def _describe(self, row: Row, results: list[Generation], seconds: float, count: int) -> None:
        requests = [request for result in results for request in result.statistics]
        steps = [step for r in requests for step in zip(r.drafted, r.accepted, strict=True)]
        looked_at = sum(min(d, a + 1) for d, a in steps)
        row.tokens_per_step = (count - len(requests)) / max(len(steps), 1)
        batch_steps = sum(max(r.steps for r in result.statistics) for result in results)
        phases = results[0].seconds
        row.seconds = {phase: sum(r.seconds[phase] for r in results) / batch_steps for phase in phases}
        if looked_at == 0:
            return
        row.acceptance = sum(a for _, a in steps) / looked_at
        row.acceptance_by_position = acceptance_by_position(steps)
        row.acceptance_by_child = acceptance_by_child([c for r in requests for c in r.children], looked_at)
        row.accepted_at_least = shares_at_least(a for _, a in steps)
        row.verified_per_step = sum(r.verified for r in requests) / len(steps)
        row.drafted_at_least = shares_at_least(d for d, _ in steps)
        decoding = sum(row.seconds.values()) * batch_steps
        promised = float(expected_tokens(row.acceptance, torch.tensor([d for d, _ in steps])).mean())
        row.predicted_tokens_per_second = count / (seconds - decoding + decoding * row.tokens_per_step / promised)


def distinct(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """Share of different n-grams, the mean over texts of n tokens or more."""
    grams = [[tuple(text[i : i + n]) for i in range(len(text) - n + 1)] for text in texts]
    shares = [len(set(g)) / len(g) for g in grams if g]
    return statistics.mean(shares) if shares else 1.0


def all_cases(
    methods: Sequence[str], temperatures: Sequence[float], batches: Sequence[int], rivals: Sequence[str]
) -> list[Case]:
    """Every combination; rivals at batch 1."""
    made = [Case(m, t, b) for b in batches for t in temperatures for m in methods]
    return made + [Case(m, t, 1) for t in temperatures if 1 in batches for m in rivals]
