"""The laboratory: its statistics, its distributions; it passes what is right and finds every known fault."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from cases import FILTERS
from exact_trees import rejection

from specdec_kernels import Sampling, edit_rows, residual_probs, use_backend
from specdec_lab.lossless import goodness, loop, report
from specdec_lab.lossless.acceptance import accepted_ids, expected_tokens, recursive_ids
from specdec_lab.lossless.edits import EDITS, GrowingEdits, edited_table
from specdec_lab.lossless.exact import (
    constant_table,
    flat_table,
    joint_counts,
    joint_distribution,
    processed,
    random_table,
)
from specdec_lab.lossless.experiments import Finding, agreement, decode, follow, judge
from specdec_lab.lossless.family import Job, edit_jobs, impossible, run_all, small_tables, stream_jobs
from specdec_lab.lossless.faults import FAULTS, coins_of_zero
from specdec_lab.lossless.models import Pair, first_tokens, next_tokens, read
from specdec_lab.lossless.others import judged, other_jobs
from specdec_lab.lossless.procedures import PROCEDURES, Procedure, Step, Verdict
from specdec_lab.lossless.rejections import as_table, observe, random_chain
from specdec_lab.lossless.samplers import Foreign, load, method_of
from specdec_lab.lossless.texts import compare, jobs, texts_of, written
from specdec_lab.lossless.tradeoff import Over, duels, front, measure, output_distribution, win_rates
from specdec_lab.theory import batch_rejections, residuals
from specdec_loop.drafters import DraftModel, NoDrafter
from specdec_loop.methods import METHODS as LOOP
from specdec_loop.tree_cache.states import States

BY_NAME = {method.name: method for method in PROCEDURES}
P, Q = torch.tensor([0.2, 0.3, 0.1, 0.4]).double(), torch.tensor([0.5, 0.3, 0.15, 0.05]).double()


# --- statistics


def test_tails_of_chi_square_are_those_of_the_tables() -> None:
    assert float(goodness.chi_square_tail(3.841459, 1)) == pytest.approx(0.05, rel=1e-6)
    assert float(goodness.chi_square_tail(124.342, 100)) == pytest.approx(0.05, rel=1e-4)
    assert goodness.critical(1, 0.05) == pytest.approx(3.841459, rel=1e-6)
    assert goodness.normal_tail(1.959964) == pytest.approx(0.05, rel=1e-6)


def test_fit_by_hand_and_what_is_impossible() -> None:
    found = goodness.fit(torch.tensor([60, 40]), torch.tensor([1.0, 1.0]))
    assert found.chi_square == pytest.approx(float(goodness.chi_square_tail(4.0, 1)))
    g = 2 * (60 * math.log(1.2) + 40 * math.log(0.8))
    assert found.g == pytest.approx(float(goodness.chi_square_tail(g, 1)))
    assert found.variation == pytest.approx(0.1)
    assert found.deviation == pytest.approx(0.1)
    assert found.expected_deviation == pytest.approx(0.05)
    assert goodness.fit(torch.tensor([9, 1]), torch.tensor([1.0, 0.0])).chi_square == 0


def test_p_values_of_a_fair_sampler_are_uniform_and_the_noise_is_the_predicted_one() -> None:
    distribution = torch.randn(50, generator=torch.Generator().manual_seed(0)).softmax(0).double()
    g = torch.Generator().manual_seed(1)
    found = [
        goodness.fit(torch.bincount(distribution.multinomial(4000, True, generator=g), minlength=50), distribution)
        for _ in range(200)
    ]
    for p_values in ([f.chi_square for f in found], [f.g for f in found]):
        counts = torch.histc(torch.tensor(p_values), 5, 0, 1)
        assert goodness.fit(counts, torch.full((5,), 0.2)).chi_square > 1e-6
    for seen, predicted in (("variation", "expected_variation"), ("deviation", "expected_deviation")):
        ratio = sum(getattr(f, seen) / getattr(f, predicted) for f in found) / len(found)
        assert ratio == pytest.approx(1, abs=0.03)


def test_what_hardly_ever_happens_raises_no_false_alarm() -> None:
    """An id, or a rejection, that is expected less than five times: the exact chance of a p-value below 0.0001."""
    for expected in (0.01, 0.5, 3.0):
        draws = 2000
        rare = expected / draws
        distribution = torch.tensor([0.6, 0.4 - rare, rare]).double()
        chances = {k: math.comb(draws, k) * rare**k * (1 - rare) ** (draws - k) for k in range(40)}
        alarms = {"fit": 0.0, "steps": 0.0}
        for k, chance in chances.items():
            counts = torch.tensor([1200.0, 800.0 - k, k]).double()
            alarms["fit"] += chance * (goodness.fit(counts, distribution).chi_square < 1e-4)
            mean, spread = 2 - k / draws, math.sqrt(k / draws * (1 - k / draws) / draws)
            alarms["steps"] += chance * (agreement(mean, 2 - rare, spread, draws) < 1e-4)
        assert alarms["fit"] < 1e-3 and alarms["steps"] < 1e-3


def test_mean_deviation_is_that_of_the_binomial() -> None:
    for p, n in ((0.3, 5), (0.001, 7), (0.5, 4), (1.0, 3), (0.0, 3)):
        exact = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) * abs(k / n - p) for k in range(n + 1))
        assert float(goodness.mean_deviation(torch.tensor([p]).double(), n)[0]) == pytest.approx(exact)


def test_holm_by_hand() -> None:
    assert goodness.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert goodness.holm([]) == []


def test_power_is_that_of_a_simulation() -> None:
    """The promised probability 0.99 of the least bias, over 1000 experiments: within five standard errors."""
    distribution, towards, draws = P, Q, 2000
    least = goodness.least_bias(distribution, towards, draws, 0.01)
    broken = distribution + (towards - distribution) * least / float((distribution - towards).abs().sum() / 2)
    g = torch.Generator().manual_seed(2)
    drawn = broken.multinomial(1000 * draws, True, generator=g).view(1000, draws)
    counts = torch.stack([torch.bincount(row, minlength=4) for row in drawn])
    found = sum(goodness.fit(row, distribution).chi_square < 0.01 for row in counts)
    assert found / 1000 == pytest.approx(0.99, abs=5 * math.sqrt(0.99 * 0.01 / 1000))
    assert goodness.power(0.0, 3, 0.01) == pytest.approx(0.01, rel=1e-6)


# --- distributions and theory


@pytest.mark.parametrize("filters", FILTERS)
def test_processed_is_the_distribution_of_the_kernels(filters: str) -> None:
    rows = 2 * torch.randn(16, 33, generator=torch.Generator().manual_seed(5))
    sampling = Sampling.full(16, **FILTERS[filters])  # type: ignore[arg-type]
    with use_backend("reference"):
        theirs = residual_probs(rows, b=0.0, sampling=sampling).probs
    exact = processed(rows, **FILTERS[filters]).float()  # type: ignore[arg-type]
    torch.testing.assert_close(exact, theirs, rtol=1e-5, atol=1e-7)


def test_joint_distribution_and_counts_by_hand() -> None:
    table = random_table(2, 3, seed=1)
    keys, distribution = joint_distribution(table, 3, {})
    p = processed(table.target)
    assert keys.tolist() == list(range(8))
    assert float(distribution.sum()) == pytest.approx(1)
    assert float(distribution[0b101]) == pytest.approx(float(p[0, 1] * p[2, 0] * p[5, 1]))  # contexts: root, "1", "10"
    counts = joint_counts(torch.tensor([[1, 0, 1], [0, 0, 0], [1, 0, 1]]), 2, keys[:5])
    assert counts.tolist() == [1, 0, 0, 0, 0, 2]
    outside = torch.tensor([[1, 0, -1], [0, 0, 2], [0, 1, 0]])  # as numbers they would be 3, 2 and 2
    assert joint_counts(outside, 2, keys).tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 2]


def test_acceptance_equals_theory_and_enumeration() -> None:
    for count in (1, 2, 3):
        ours = float(recursive_ids(P, Q, count, replacement=True).sum())
        assert ours == pytest.approx(1 - float(residuals(P[None], Q[None], count)[0]))
        distinct = 0.0
        for order in itertools.permutations(range(len(P)), count):
            drawn = math.prod(float(Q[x]) / (1 - sum(float(Q[y]) for y in order[:i])) for i, x in enumerate(order))
            distinct += drawn * sum(rejection(P, Q, list(order), False)[0])
        assert float(recursive_ids(P, Q, count, replacement=False).sum()) == pytest.approx(distinct)
    top = accepted_ids(BY_NAME["tree match"], P, Q, Q.log(), 2)
    assert top.tolist() == pytest.approx([0.2, 0.3, 0, 0])
    assert expected_tokens(BY_NAME["tree traversal"], constant_table(P, Q), {}) is None


# --- experiments


@pytest.mark.parametrize("method", PROCEDURES, ids=lambda m: m.name)
def test_every_method_passes_on_a_history_of_three_ids(method: Procedure) -> None:
    """False-alarm rate 0.01 for each method's family of three tests; seeds are fixed."""
    table, filters = random_table(3, 4, 12, 1.6), {"temperature": 0.9, "top_p": 0.95}
    found = follow(method, table, filters, experiment="streams", case="", texts=6000, length=4)
    assert judge([found]), found


def test_edited_rows_are_those_of_the_kernels() -> None:
    """Of every history of a text, at once: the drafts of each row are the whole history."""
    table = random_table(4, 3, seed=6)
    for edits in EDITS.values():
        exact = edited_table(table, edits, 3)
        histories = torch.tensor([[-1, -1], *([x, -1] for x in range(4)), *itertools.product(range(4), repeat=2)])
        every = GrowingEdits(edits, len(histories), 4, "cpu").now(histories, torch.zeros(len(histories)).long())
        rows = edit_rows(every, histories, vocab=4, only_last=True).apply(table.target)
        torch.testing.assert_close(exact.target.float(), rows)


def test_edits_are_exact_at_every_drafted_position() -> None:
    """False-alarm rate 0.01 for all methods together, with every edit at once; seeds are fixed."""
    jobs_ = [job for job in edit_jobs(PROCEDURES, 2000) if job.case == "history of 4 ids, all"]
    assert len(jobs_) > 10
    assert judge([job.run() for job in jobs_])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_every_known_fault_is_caught(fault) -> None:  # type: ignore[no-untyped-def]
    table = {"g3": "two ids", "g3-tree": "eight ids", "g2": "eight ids"}.get(fault.name, "history of 3 ids")
    if fault.impossible:
        assert not judge([impossible(fault.method)])
        assert judge([impossible(BY_NAME["ratio"])])
        return
    rows, length = small_tables()[table]
    texts = 40_000 if fault.name in ("g2", "g3-tree") else 8000
    found = follow(
        fault.method, rows, fault.filters, experiment="streams", case="", texts=texts, length=min(length, 4),
        edits=fault.edits,
    )  # fmt: skip
    assert min(found.fit.chi_square, found.fit.g) < 1e-3, found
    assert not judge([found])


def test_a_coin_of_zero_is_still_zero() -> None:
    assert coins_of_zero().position.tolist() == [1012415, 9427389]


def test_texts_do_not_depend_on_how_many_run_beside_them() -> None:
    table = random_table(3, 6, 12)
    many, _ = decode(BY_NAME["block"], table, {}, texts=50, length=6, seed=0)
    few, _ = decode(BY_NAME["block"], table, {}, texts=5, length=6, seed=0)
    assert torch.equal(many[:5], few)


@pytest.mark.slow  # two processes that import torch: ten seconds
def test_a_pool_finds_what_one_process_finds() -> None:
    jobs = list(stream_jobs([BY_NAME["match"]], 300))[:3]
    seen: list[int] = []
    alone = run_all(jobs, 1, lambda done, _: seen.append(done))
    together = run_all(jobs, 2, lambda *_: None)
    assert seen == [1, 2, 3]
    assert [f.fit for f in alone] == [f.fit for f in together]


def test_the_family_is_judged_as_one() -> None:
    good = goodness.Fit(1, 2, 0.5, 0.5, 0, 0, 0, 0)
    findings = [Finding("", "", "", good, 1, None, 1, 0, 0) for _ in range(9)]
    findings.append(Finding("", "", "", good._replace(chi_square=5e-4), 1, None, 1, 0, 0))
    assert judge(findings)  # 5e-4 times 30 tests is more than 0.01
    findings[-1].fit = good._replace(chi_square=3e-4)
    assert not judge(findings)


# --- models


@pytest.fixture(scope="module")
def pair() -> Pair:
    from models import model

    prompts = [[5, 6, 7], [8, 9], [1, 2, 3, 4], [11]]
    return Pair(model("llama", seed=0), model("llama", seed=1), prompts, "tiny")


def test_real_rows_become_tables(pair: Pair) -> None:
    first = first_tokens(pair, pair.prompts[0])
    text = torch.tensor([pair.prompts[0]])
    torch.testing.assert_close(first.target[0], pair.target(text).logits[0, -1])
    joint = next_tokens(pair, pair.prompts[0])
    keys, distribution = joint_distribution(joint, 3, {"top_k": 4})
    assert len(keys) == 64
    exact = processed(pair.target(text).logits[0, -1], top_k=4)
    roots = torch.zeros(joint.vocab, dtype=torch.float64).index_add(0, keys // joint.vocab**2, distribution)
    assert sorted(roots[roots > 0].tolist()) == pytest.approx(sorted(exact[exact > 0].tolist()))


def test_first_tokens_and_joint_distributions_of_a_model_pass(pair: Pair) -> None:
    jobs = [
        Job(
            "first token", "", replace(BY_NAME["ratio"], widths=(1,)), first_tokens(pair, pair.prompts[0]), {}, 4000, 1
        ),
        Job("next three", "", BY_NAME["tree traversal"], next_tokens(pair, pair.prompts[1]), {"top_k": 4}, 2000, 3),
    ]
    assert judge([job.run() for job in jobs])


@pytest.mark.parametrize("mode", ["greedy", "seeded"])
def test_texts_of_the_loop_equal_plain_texts(pair: Pair, mode: str) -> None:
    prompts = written(pair, 3, 4)
    plain, _, drafts = texts_of(pair, None, prompts, 8, mode, "match")
    found = compare(pair, prompts, plain, DraftModel(pair.draft), "match", mode, "draft model")
    assert found.passed and (found.prompts, found.tokens) == (3, 24)
    assert found.drafts > 0 == drafts
    assert not compare(pair, prompts, plain, NoDrafter(), "match", mode, "").passed  # nothing was tested
    wrong = [[(x + 1) % 64 for x in text] for text in plain]
    assert compare(pair, prompts, wrong, DraftModel(pair.draft), "match", mode, "").different == 3


def test_every_method_of_the_loop_is_held_against_plain_decoding() -> None:
    listed = [(job.method, job.mode) for job in jobs(None, None, None, 1, 1)]
    assert {name for name, _ in listed} == set(LOOP) - {"plain"}
    assert {name for name, mode in listed if mode == "seeded"} == {
        name for name, method in LOOP.items() if method.keeps_the_text and name != "plain"
    }


def test_a_draft_model_without_an_embedding_borrows_the_targets(pair: Pair, tmp_path: Path) -> None:
    borrowed = ("embed_tokens.weight", "lm_head.weight")
    weights = {n: t for n, t in pair.draft.state_dict().items() if not n.endswith(borrowed)}
    pair.draft.save_pretrained(tmp_path / "draft", state_dict=weights)
    found = read(tmp_path / "draft", pair.target)
    assert found.get_input_embeddings() is pair.target.get_input_embeddings()
    text = torch.tensor([[3, 4]])
    assert not torch.equal(found(text).logits, pair.draft(text).logits)
    with pytest.raises(ValueError, match="must hold all weights, but it lacks"):
        read(tmp_path / "draft")


# --- texts of the loop on models whose distribution is enumerated

RECURRENT = [name for name in loop.TARGETS if "delta" in name or name == "Mamba 2"]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("target", loop.TARGETS)
def test_every_drafter_leaves_the_texts_of_the_loop_alone(target: str) -> None:
    """False-alarm rate 0.01 for all drafters together; seeds are fixed."""
    findings = [job.run() for job in loop.jobs(400) if job.target == target]
    assert judge(findings), findings
    assert all(1.1 < finding.tokens < 3.5 for finding in findings)  # or nothing would have been tested


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("drafter", ["draft model", "independent drafts, a tree"])
@pytest.mark.parametrize("target", RECURRENT)
def test_states_that_read_the_drafts_and_not_what_was_accepted_are_found(
    target: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: the state goes on over the first node that was tried, whether it was accepted or not."""
    honest = States.commit

    def careless(self: States, num_accepted: torch.Tensor, path: torch.Tensor | None, *, is_whole: bool) -> object:
        moved = num_accepted if is_whole else num_accepted.clamp(min=1)
        return honest(self, moved, None if path is None else path.clamp(min=1), is_whole=is_whole)

    monkeypatch.setattr(States, "commit", careless)
    assert not judge([loop.Job(target, drafter, 600).run()])


def test_a_drafter_that_drafts_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loop.DRAFTERS, "silent", ("ratio", lambda _: NoDrafter()))
    found = loop.Job("attention (Llama)", "silent", 400).run()
    assert min(found.fit.chi_square, found.fit.g) > 1e-3  # plain decoding
    assert not judge([found]) and found.method == "silent (ratio), which drafted nothing"


# --- samplers of others


def test_a_foreign_sampler_runs_through_the_protocol() -> None:
    torch.manual_seed(0)
    table = constant_table(P, Q)
    good = follow(method_of("bench.rivals.eager"), table, {}, experiment="", case="", texts=20_000, length=2)
    assert judge([good]), good
    with pytest.raises(ValueError, match="must have NAME"):
        load("math")
    with pytest.raises(ValueError, match="must be a module that imports"):
        load("no.such.module")
    sampler = Foreign("bench.rivals.hf")  # takes one request at a time
    one = follow(Procedure("hf", "ratio", verify=sampler), table, {}, experiment="", case="", texts=300, length=2)
    assert one.fit.draws == 300
    assert judge([one]), one


GEMMA4 = "bench.samplers.transformers_gemma4"
needs_gemma4 = pytest.mark.skipif(load(GEMMA4).available() is not None, reason=str(load(GEMMA4).available()))


@needs_gemma4
def test_transformers_gemma4_path_is_found_biased() -> None:
    torch.manual_seed(0)
    method = method_of(GEMMA4)
    found = follow(method, constant_table(P, Q), {}, experiment="", case="", texts=500, length=1)
    assert not judge([found])
    assert found.fit.variation > 0.2


@needs_gemma4
def test_rows_of_other_samplers_hold_their_verdict() -> None:
    rows, jobs_ = other_jobs(GEMMA4, 200, 5.0)
    found = [jobs_[0].run(), *(replace(jobs_[0], method=BY_NAME["ratio"]).run() for _ in rows[1:])]
    missing = {"name": "absent", "case": "", "verdict": "not run", "note": "it is not installed"}
    rows[-1]["bias"] = 0.05  # its filter keeps the wrong ids: no draws are needed to know
    verdicts = [row["verdict"] for row in judged([missing, *rows], found)]
    assert verdicts == ["not run", "biased", *["pass"] * (len(rows) - 2), "biased"]


# --- Yin et al.


def test_over_acceptance_lies_on_the_front() -> None:
    points = [
        measure("", P.log(), Q.log(), epsilon, residual, 40_000)
        for epsilon in (0.0, 0.1)
        for residual in ("OPT", "UNO")
    ]
    for point in points:
        assert point.rejected == pytest.approx(point.rejected_theory, abs=0.0125)  # five standard errors
        assert point.bias == pytest.approx(point.bias_theory, abs=0.0125)
        assert min(point.p_value, point.rejected_p) > 1e-6
        taken = torch.minimum(Q, P + point.epsilon)
        if point.residual == "OPT":
            wanted = (Q - P).clamp(min=0, max=point.epsilon).sum()  # Theorem 5
        else:
            wanted = (taken - taken.sum() * P).abs().sum() / 2
        assert point.bias_theory == pytest.approx(float(wanted), abs=1e-6)
    distribution, rejected = output_distribution(torch.tensor([0.0, 1.0]), torch.tensor([0.4, 0.6]), 0.9, "OPT")
    assert distribution.tolist() == [0, 1]  # what the target excludes is refused whatever epsilon
    assert rejected == pytest.approx(0.4)
    places = front({"a": (P.log(), Q.log())}, 100)
    assert len(places) == 12
    assert places[0].run()[0].draws == 100


def test_a_wrong_share_of_rejections_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: the right tokens, and every 20th accepted draft is counted as rejected."""
    right = measure("", P.log(), Q.log(), 0.1, "OPT", 40_000)
    honest = Over.__call__

    def miscounted(self: Over, method: Procedure, step: Step) -> Verdict:
        tokens, kept = honest(self, method, step)
        return tokens, kept * (torch.arange(len(kept)) % 20 > 0)

    monkeypatch.setattr(Over, "__call__", miscounted)
    wrong = measure("", P.log(), Q.log(), 0.1, "OPT", 40_000)
    assert right.p_value == wrong.p_value > 1e-6
    assert right.rejected_p > 1e-6 > wrong.rejected_p
    runs = [{"front": [asdict(point)], "win_rates": [], "batch": {}} for point in (right, wrong)]
    assert report.agreement(runs[0]) > 1e-6 > report.agreement(runs[1])


def test_win_rates_of_a_draft_that_is_the_target_are_even() -> None:
    table = random_table(3, 3, 4)
    same = table._replace(draft=table.target)
    found = [duels(same, {}, length=3, pairs=200, number=number) for number in range(4)]
    for row in win_rates(found, pairs=200, length=3):
        assert row.rejected_opt == row.rejected_uno == 0
        assert row.bias_opt == pytest.approx(0, abs=1e-6)
        assert row.exact == pytest.approx(0.5, abs=1e-6)
        assert row.opt == pytest.approx(0.5, abs=0.1)


def test_win_rates_are_those_of_the_exact_distributions() -> None:
    """False-alarm rate 1e-4 for each of eight numbers; OPT is nearer to the target, as the exact distribution says."""
    table = random_table(4, 3, 8, 2.0)
    found = [duels(table, {"top_k": 3}, length=3, pairs=2000, number=number) for number in range(2)]
    for row in win_rates(found, pairs=2000, length=3):
        assert row.p_value > 1e-4, row
        assert row.bias_opt < row.bias_uno
    by_hand = duels(constant_table(P, Q), {}, length=1, pairs=2, number=0)[0]  # one token, epsilon 0.1
    opt, uno = output_distribution(P, Q, 0.1, "OPT")[0], output_distribution(P, Q, 0.1, "UNO")[0]
    above = (P[:, None] > P).double() + 0.5 * (P[:, None] == P)
    assert by_hand.exact == pytest.approx(float(opt @ above @ uno))
    assert by_hand.bias[0] == pytest.approx(float((Q - P).clamp(min=0, max=0.1).sum()), abs=1e-6)


def test_batch_decoding_rejects_as_often_as_the_theorems_say() -> None:
    target, draft = random_chain()
    short = [type(m)(m.start, m.steps[:7]) for m in (target, draft)]
    table = as_table(*short)
    for branches in (1, 4):
        seen = observe(table, 8, branches, 2000, seed=branches).double()
        error = float(seen.std()) / math.sqrt(len(seen))
        assert abs(float(seen.mean()) - batch_rejections(*short, branches)) < 5 * error


def test_flat_tables_begin_anew() -> None:
    table = flat_table(torch.zeros(3, 2), torch.zeros(3, 2))
    assert table.after.tolist() == [[1, 1], [2, 2], [0, 0]]
