"""Benchmarks: rows as stated, rivals with the right distribution, meters that count, current tables."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import charts, filter_traffic, option_traffic, report, results, tables
from bench.cases import FILTERS, Case
from bench.machine import ROOT
from bench.meters import torch_only_meter, triton_meter
from bench.minimum import minimum
from bench.rivals import _sglang_tree, eager, hf, lazy, rivals, sglang_tree, topk
from bench.rows import Filters, chain, chains, coins, distribution, pool, rows
from bench.suite import contenders, module, sampling_for
from bench.timing import summary
from bench.tree_mask import MaskCase
from bench.trees import TreeCase
from specdec_kernels import gather_nodes, verify_chain
from specdec_kernels.compat import sglang as compat_sglang


def overlap(vocab: int, temperature: float) -> float:
    target, draft = pool(vocab)
    return float(torch.minimum((target / temperature).softmax(-1), (draft / temperature).softmax(-1)).sum(-1).mean())


@pytest.mark.parametrize("vocab", [32000, 128256])  # the smallest and the one that is promised
def test_half_of_five_drafts_is_accepted_by_distribution(vocab: int) -> None:
    rate = overlap(vocab, 0.8)
    assert 2.2 < sum(rate**k for k in range(1, 6)) < 2.8


def test_half_of_five_drafts_is_accepted_in_a_series_of_batches() -> None:
    for batch, count in ((1, 8), (4, 3)):
        made = chains(count, batch, 5, 32000, dtype=torch.bfloat16)
        accepted = torch.cat([x.num_accepted for x in made]).double().mean()
        assert 2.2 <= float(accepted) <= 2.8


def test_rows_have_the_stated_shape() -> None:
    target, _ = pool(128256)
    p = target.softmax(-1)
    entropy = -(p * p.clamp(min=1e-30).log()).sum(-1)
    assert 1.0 < float(entropy.mean()) < 3.0
    assert 0.5 < float(p.max(-1).values.mean()) < 0.8
    assert 10 < float((target.max(-1).values - target.mean(-1)).mean()) < 30
    same = rows(4, 32000, dtype=torch.float32, seed=3), rows(4, 32000, dtype=torch.float32, seed=3)
    assert torch.equal(same[0][0], same[1][0])
    assert len({int(row.argmax()) for row in same[0][0]}) == 4  # rolled: no two peaks at one id


@pytest.mark.parametrize("filters", ["none", "top-k 50 + top-p .95", "min-p .05"])
def test_inputs_say_what_the_reference_accepts(filters: str) -> None:
    x = chain(3, 4, 2048, filters=FILTERS[filters], seed=5)
    sampling = x.filters.sampling(3)
    result = verify_chain(
        x.draft_ids, x.target, x.draft, draft_stats=(x.logsumexp, x.threshold), sampling=sampling,
        draft_sampling=sampling, rng=x.rng, backend="reference",
    )  # fmt: skip
    assert torch.equal(result.num_accepted.long(), x.num_accepted)
    assert result.status.tolist() == [0, 0, 0]


@pytest.mark.parametrize("filters", ["none", "top-k 50 + top-p .95"])
def test_plain_rivals_decide_as_the_reference_does(filters: str) -> None:
    x = chain(8, 5, 2048, filters=FILTERS[filters], seed=1)
    parameters = x.sampling
    uniforms = coins(x.rng, 5).float()
    found = {
        "eager": eager.verify_chain(x.draft_ids, x.target, x.draft, parameters, uniforms),
        "lazy": lazy.verify_chain(x.draft_ids, x.target, x.draft, parameters, uniforms),
    }
    if parameters.top_k is not None:
        found["topk"] = topk.verify_chain(x.draft_ids, x.target, x.draft, sampling_for(topk, x), uniforms)
    for name, (tokens, count) in found.items():
        assert torch.equal(count, x.num_accepted), name
        kept = torch.arange(6) < count[:, None]
        assert torch.equal(tokens[:, :5][kept[:, :5]], x.draft_ids[kept[:, :5]]), name
        assert bool((tokens.gather(1, count[:, None]) >= 0).all()), name
        assert bool((tokens[torch.arange(6) > count[:, None]] == -1).all()), name


def first_tokens(rival: object, filters: Filters, draws: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(counts of the first token over `draws` requests with drafts from q, target distribution); 12 ids, one draft."""
    generator = torch.Generator().manual_seed(11)
    target, draft = torch.randn(2, 1, 2, 12, generator=generator)
    q, p = distribution(draft[:, 0], filters)[0], distribution(target[:, 0], filters)[0]
    ids = torch.multinomial(q.expand(draws, -1), 1, generator=generator)
    parameters = filters.sampling(draws)
    if rival is topk:
        parameters = parameters._replace(top_k=filters.top_k)  # type: ignore[arg-type]
    torch.manual_seed(7)
    tokens, _ = rival.verify_chain(  # type: ignore[attr-defined]
        ids, target.expand(draws, -1, -1), draft[:, :1].expand(draws, -1, -1), parameters
    )
    return tokens[:, 0].bincount(minlength=12).double(), p[0].double()


@pytest.mark.parametrize(
    ("rival", "filters"),
    [
        (eager, Filters(0.8)),
        (lazy, Filters(0.8)),
        (eager, Filters(0.8, top_k=6, top_p=0.9)),
        (lazy, Filters(0.8, top_k=6, top_p=0.9)),
        (topk, Filters(0.8, top_k=6, top_p=0.9)),
        (eager, Filters(0.8, min_p=0.1)),
    ],
    ids=lambda v: getattr(v, "NAME", None),
)
def test_plain_rivals_draw_from_the_target_distribution(rival: object, filters: Filters) -> None:
    counts, p = first_tokens(rival, filters, 40000)
    kept = p > 0
    assert counts[~kept].sum() == 0
    expected = p[kept] * counts.sum()
    chi_square = float(((counts[kept] - expected) ** 2 / expected).sum())
    assert chi_square < 45.0  # at most 11 degrees of freedom: a right distribution fails once in 2e5; the seed is fixed


@pytest.mark.skipif(hf.available() is not None, reason="transformers is not installed")
def test_transformers_is_called_as_it_calls_itself() -> None:
    x = chain(1, 5, 2048, seed=2)
    ready = hf.prepare(x.target, x.draft, x.sampling)
    tokens, count = hf.verify_prepared(x.draft_ids, ready)
    n = int(count)
    assert tokens.shape == (1, n + 1)
    assert torch.equal(tokens[0, :n], x.draft_ids[0, :n])


@pytest.mark.parametrize(
    "case",
    [
        TreeCase("tree_layout", 16, 3),
        MaskCase("tree_mask", 16, 3),
        MaskCase("tree_mask", 16, 2, format="flat, past 2048"),
        TreeCase("verify_tree", 16, 2, rule="greedy", vocab=32000),
        TreeCase("verify_tree", 16, 2, rule="target_only", vocab=32000),
    ],
    ids=lambda case: f"{case.op}, {case.name}",
)
def test_sglang_is_called_as_it_calls_itself(case: TreeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our interface in place of its kernels: the arguments are right where its files are not."""
    kernels = _sglang_tree.Kernels(
        compat_sglang.build_tree_kernel_efficient,
        compat_sglang.verify_tree_greedy,
        compat_sglang.tree_speculative_sampling_target_only,
    )
    monkeypatch.setattr(sglang_tree, "kernels", lambda: kernels)
    monkeypatch.setattr(sglang_tree, "available", lambda: None)
    monkeypatch.setattr(sglang_tree, "RULES", ("greedy", "target_only"))
    made = module(case.op).inputs(case)
    (rival,) = (c for c in contenders(case, made, []) if c.name == sglang_tree.NAME)
    for x in made:
        rival.check(x)


def test_every_rival_says_who_it_is_or_why_not() -> None:
    for rival in rivals():
        assert rival.NAME
        assert rival.WHY
        assert rival.available() is None or len(rival.available()) > 10
    assert len({rival.NAME for rival in rivals()}) == len(rivals())


def test_the_torch_meter_counts_a_copy_exactly() -> None:
    x = torch.zeros(1000)
    with torch_only_meter() as moved:
        y = x.clone()
        y.view(10, 100)[:5].t()  # views are free
        torch.empty(10**6)  # and so is memory that nobody writes
    assert (moved.read, moved.written) == (4000, 4000)
    with torch_only_meter() as moved:
        y.copy_(x)
        x.gather(0, torch.arange(10))  # what it picks; the indices, made and read
    assert (moved.read, moved.written) == (4000 + 40 + 80, 4000 + 40 + 80)
    with torch_only_meter() as moved:
        y[torch.tensor([3, 7])] = torch.ones(2)  # 2 indices read; 2 elements made, read and written
    assert (moved.read, moved.written) == (16 + 8, 8 + 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
def test_the_triton_meter_counts_a_copy_exactly() -> None:
    copying = pytest.importorskip("bench.copying")
    x, y = torch.arange(1000, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.bfloat16)
    with triton_meter() as moved:
        copying.copy(x, y)
    assert torch.equal(x, y)
    assert (moved.read, moved.written) == (2000, 2000)  # 24 masked lanes of the last program cost nothing


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
def test_the_triton_meter_sees_inside_an_op() -> None:
    values, path = torch.randn(2, 4, 1000).bfloat16(), torch.tensor([[2, 3, -1], [1, -1, -1]])
    with triton_meter() as moved:
        gathered = gather_nodes(values, path, backend="triton").values
    assert torch.equal(gathered[0], values[0, [0, 2, 3]])
    # Rows up to each path's end are read, all are written; six programs read two entries of a path.
    assert (moved.read, moved.written) == (5 * 2000 + 6 * 16, 6 * 2000 + 2 * 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
def test_bytes_of_filters_are_counted_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setitem(filter_traffic.ROWS, "triton", 2)
    for shape in filter_traffic.SHAPES:
        case = filter_traffic.FilterCase(600, "top-k 50 + top-p .95", 1.0, shape)
        row = filter_traffic.meter(case, "triton", triton_meter)
        assert 1 <= row["mean_times_min"] <= row["worst_times_min"]
        assert (row["min_bytes"], row["rows_metered"]) == (1200, 2)
        assert row["budget"] == round((1.5 if shape == "llm" else 2.4) + 6 * 1024 / 1200, 3)
    line = tables.filter_table({"rows": [row | {"vocab": 128256}]})[-1]
    assert line.count("not metered") == 3


@pytest.mark.parametrize("rules", [("match",), ("ratio",)])
def test_what_edited_rows_must_move_has_the_lists_of_each_row_that_is_read(rules: tuple[str, ...]) -> None:
    case = option_traffic.OptionCase("verify_chain", rules=rules, vocab=600)  # ten words of 64 bits a row
    x = option_traffic.batch_of(case)
    listed = [sum(word.bit_count() for word in row.tolist()) for row in x.edits.edit_bits.view(torch.uint64)]
    rows = listed + (listed[:2] if rules == ("ratio",) else [])  # draft rows have those of target rows
    want = sum(2 * 600 + 10 * 8 + 11 * 4 + 16 * count for count in rows)
    result = option_traffic.run(case, x, "reference")
    assert option_traffic.minimum(case, x, result) == want
    assert option_traffic.budget(case, x, result, "cuda_host") > want


def test_rows_of_each_shape() -> None:
    made = {shape: rows(3, 4096, dtype=torch.float32, shape=shape)[0] for shape in filter_traffic.SHAPES}
    assert not made["equal"].any()
    assert 0.9 < float(made["normal"].std()) < 1.1
    at_cap = (made["capped"] == made["capped"].max()).float().mean()
    assert 0.01 < float(at_cap) < 0.04  # N(0, 3) above 6


def test_minimum_is_rows_times_bytes() -> None:
    x = chain(2, 5, 1024, dtype=torch.bfloat16)
    rejected = int((x.num_accepted < 5).sum())
    case = Case("verify_chain", 32000, 2, dtype="bf16")
    assert minimum(case, x) == (2 * 6 + 2 * 5 + 2 * rejected) * 2048
    assert minimum(case, x, stats=True) == (2 * 6 + 2 * rejected) * 2048
    assert minimum(Case("verify_chain", 32000, 2, dtype="bf16", rule="greedy"), x) == 2 * 6 * 2048


def test_a_summary_is_in_microseconds() -> None:
    assert summary([1e-6 * i for i in range(1, 12)]) == (6.0, 3.0, 9.0, 11)


def test_results_carry_machine_versions_and_commit() -> None:
    for file in results.FOLDER.glob("*.json"):
        content = json.loads(file.read_text())
        if "rows" not in content:  # counted from machine code or in a simulator: those pages have their own tests
            continue
        assert content["machine"]["cpu"]
        for row in content["rows"]:
            told = content | row  # of a row, or of the whole file
            assert told["commit"]
            assert told["versions"]["torch"]
        assert str(ROOT) not in file.read_text()


def test_the_page_and_readme_are_generated_from_the_results() -> None:
    for path, text in report.generated().items():
        assert path.read_text() == text, f"{path.name} is out of date: run python -m bench.report"


def test_tables_have_at_most_eight_columns() -> None:
    for path, text in report.generated().items():
        for line in text.splitlines():
            if line.startswith("|---"):
                assert line.count("|") <= 9, f"{path.name}: {line}"


def test_every_timed_case_is_on_the_page() -> None:
    page = report.PAGE.read_text()
    faster = 0
    for content in report.result_contents():
        for entry in tables.entries(content):
            times = [f"{name} {tables.multiple(ratio)}" for name, ratio in entry.rivals]
            assert f"| {entry.case} | " in page
            assert ", ".join(times) in page
            faster += sum(ratio < 1 for _, ratio in entry.rivals)
    assert faster >= 5  # cases in which a rival is faster are listed too


def gpu_row(contender: str, timed: str, p50: float, launched: float) -> dict[str, object]:
    names = {"op": "sample", "case": "one", "contender": contender, "is_ours": contender == "cuda"}
    return names | {"timed": timed, "p50_us": p50, "launched_p50_us": launched, "commit": "0", "versions": {}}


def test_a_rival_that_no_graph_holds_is_compared_with_our_launches() -> None:
    """Its launches beside our replays would flatter us."""
    ours, replayed = gpu_row("cuda", "replay", 10.0, 30.0), gpu_row("eager", "replay", 20.0, 45.0)
    rows = [ours, replayed, gpu_row("lazy eager", "launches", 90.0, 90.0)]
    (entry,) = tables.entries({"rows": rows})
    assert entry.rivals == [("PyTorch", 2.0), ("lean PyTorch (launched)", 3.0)]
    machine = {"gpu": "Some GPU", "gpu_memory_gib": 80, "driver": "1.2"}
    content = {"machine": machine, "ceilings": {"copy_gb_per_s": 3000.0}, "rows": rows}
    assert "driver 1.2, copies 3000.0 GB/s" in tables.machine_table([content])[-1]


def test_charts_of_the_page_are_small_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    cut = []

    def save(figure: Any, path: Path) -> None:
        figure.canvas.draw()
        inside = figure.bbox.padded(1)
        for text in itertools.chain(figure.texts, *(axis.texts for axis in figure.axes)):
            box = text.get_window_extent()
            if not (inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1)):
                cut.append(f"{path.name}: {text.get_text()}")
        write(figure, path)

    write = charts.save
    monkeypatch.setattr(charts, "save", save)
    charts.draw(
        report.result_contents(),
        json.loads(results.LOOP.read_text()),
        json.loads(results.TRAFFIC.read_text()),
        tmp_path,
    )
    page = report.PAGE.read_text()
    for drawn in tmp_path.glob("*.png"):
        committed = report.PAGE.parent / "benchmarks" / drawn.name
        assert f"](benchmarks/{drawn.name})" in page
        assert drawn.stat().st_size < 150_000
        assert committed.stat().st_size < 150_000
    assert not cut


def test_readme_without_the_region_is_an_error() -> None:
    region = f"{report.BEGIN}\nx\n{report.END}"
    assert report.insert(f"# Title\n{report.BEGIN}\nold\n{report.END}\nend", region) == f"# Title\n{region}\nend"
    for readme in ("# Title\n", f"{report.BEGIN}\n", f"{report.END}\n{report.BEGIN}\n", region + region):
        with pytest.raises(SystemExit, match=r"must have one line <!-- bench:begin -->"):
            report.insert(readme, region)
