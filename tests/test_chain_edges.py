"""verify_chain: invariances, bad rows, bad ids, bad layouts, extreme numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import RULES, ChainCase, make_chain, make_rng
from chains import NAMES, compare, one, run
from check import assert_same
from torch import Tensor

from specdec_kernels import ChainResult, RngKey, Sampling, SparseRows, random_words, verify_chain

INF, NAN = float("inf"), float("nan")
COIN_ZERO = (1, 1012415)  # seed, position whose coin is exactly 0 (found by search)


# --- invariances, bit for bit within a backend


@pytest.mark.parametrize("filters", ["none", "all"])
@pytest.mark.parametrize("rule", ["ratio", "block", "match"])
def test_result_does_not_depend_on_batch_slot_or_padding(backend: str, device: str, rule: str, filters: str) -> None:
    batch, draft, vocab = 6, 3, 1500
    case = make_chain(batch, draft, vocab, rule=rule, filters=filters, ragged=True).to(device)
    whole = run(case, logprobs="processed")
    assert whole.logprobs is not None and case.draft_logits is not None

    def pick(order: Tensor, extra: int) -> ChainResult:
        """The chosen requests in another order, with `extra` columns of padding."""
        pad = torch.nn.functional.pad
        chosen = {
            name: type(value)(*(None if t is None else t[order] for t in value))
            if isinstance(value, (Sampling, RngKey))
            else value
            for name, value in case.keywords.items()
        }
        return verify_chain(
            pad(case.draft_ids[order], (0, extra), value=-1),
            pad(case.target_logits[order], (0, 0, 0, extra), value=NAN),
            pad(case.draft_logits[order], (0, 0, 0, extra), value=NAN),
            **chosen,
            logprobs="processed",
        )

    for order in (torch.tensor([3]), torch.tensor([5, 0]), torch.arange(batch).flip(0)):
        for extra in (0, 2):
            part = pick(order.to(device), extra)
            wanted = [t[order.to(device)] for t in whole if t is not None]
            found = [t[:, : draft + 1] if t.dim() == 2 else t for t in part if t is not None]
            assert_same(tuple(found), tuple(wanted), NAMES[: len(found)])


def test_flat_and_dense_layouts_agree(backend: str, device: str) -> None:
    dense = run(make_chain(9, 4, 222, filters="all", ragged=True).to(device))
    flat = run(make_chain(9, 4, 222, filters="all", ragged=True, flat=True).to(device))
    assert_same(tuple(dense), tuple(flat), NAMES)


def test_flat_layouts_of_no_drafts_leave_one_token_each(backend: str, device: str) -> None:
    case = make_chain(3, 1, 50).to(device)
    none, cu = torch.empty(0, dtype=torch.int64, device=device), torch.zeros(4, dtype=torch.int32, device=device)
    rows, keywords = case.target_logits[:, 0].contiguous(), {k: case.keywords[k] for k in ("sampling", "rng")}
    found = verify_chain(none, rows, rule="match", cu_draft=cu, max_draft=0, **keywords)
    assert found.num_accepted.tolist() == [0, 0, 0]
    assert found.status.tolist() == [0, 0, 0]
    alone = verify_chain(none.view(1, 0).expand(3, 0), rows[:, None], rule="match", **keywords)
    assert found.token_ids.shape == (3, 1)
    assert torch.equal(found.token_ids, alone.token_ids)


@pytest.mark.parametrize("drafts", ["rows", "stats", "candidates"])
@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_flat_step_in_which_nobody_drafts_reads_no_draft_row(
    backend: str, device: str, rule: str, drafts: str
) -> None:
    batch, vocab = 3, 40
    rows, none = torch.randn(batch, vocab, device=device), torch.zeros(0, device=device)
    given: dict[str, Any] = {"draft_logits": torch.zeros(0, vocab, device=device)}
    if drafts == "stats":
        given["draft_stats"] = (none, none)
    if drafts == "candidates":
        ids = torch.zeros(0, 5, dtype=torch.int64, device=device)
        given["draft_logits"] = SparseRows(ids, ids.float(), none)
    sampling = Sampling(temperature=torch.ones(batch, device=device))
    given |= {"sampling": sampling, "draft_sampling": sampling}
    given["rng"] = RngKey(*(part.to(device) for part in make_rng(batch)))
    cu, ids = torch.zeros(batch + 1, dtype=torch.int32, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    found = [
        verify_chain(ids, rows, rule=rule, cu_draft=cu, max_draft=2, backend=name, **given)
        for name in (None, "reference")
    ]
    assert torch.equal(found[0].token_ids, found[1].token_ids)
    assert found[0].num_accepted.tolist() == found[0].status.tolist() == [0] * batch


def test_strided_rows_are_read_as_they_lie(backend: str, device: str) -> None:
    case = make_chain(4, 3, 260).to(device)
    assert case.draft_logits is not None
    wide = torch.full((4, 4, 300), NAN, device=device)
    wide[:, :, 7:267] = case.target_logits
    thin = torch.full((4, 6, 261), NAN, device=device)
    thin[:, ::2, 1:] = case.draft_logits
    moved = replace(case, target_logits=wide[:, :, 7:267], draft_logits=thin[:, ::2, 1:])
    assert_same(tuple(run(moved)), tuple(run(case)), NAMES)
    shared = case.target_logits[:1, :1].expand(4, 4, -1)
    assert shared.stride()[:2] == (0, 0)
    same = replace(case, target_logits=shared)
    assert_same(tuple(run(same)), tuple(run(replace(case, target_logits=shared.contiguous()))), NAMES)


def test_offsets_beyond_two_to_the_thirty_one(backend: str, device: str) -> None:
    """A batch stride of 2^29 elements over memory that is never touched between the rows."""
    stride, batch = 2**29, 5
    backing = torch.empty(stride * (batch - 1) + 64, dtype=torch.float16, device=device)
    rows = torch.as_strided(backing, (batch, 2, 32), (stride, 32, 1))
    small = torch.randn(batch, 2, 32).half().to(device)
    rows.copy_(small)
    ids = small[:, :1].argmax(-1)
    keywords = {"sampling": Sampling(), "rng": RngKey(*(n.to(device) for n in make_rng(batch)))}
    assert_same(tuple(verify_chain(ids, rows, **keywords)), tuple(verify_chain(ids, small, **keywords)), NAMES)


# --- edges


@pytest.mark.parametrize("rule", RULES)
def test_no_requests_and_no_drafts(backend: str, device: str, rule: str) -> None:
    empty = make_chain(0, 3, 7, rule=rule).to(device)
    assert run(empty).token_ids.shape == (0, 4)
    compare(make_chain(5, 0, 7, rule=rule), device)
    padding = make_chain(5, 2, 7, rule=rule)
    padding.draft_ids[:] = -1
    result = compare(padding, device)
    assert result.num_accepted.tolist() == [0] * 5 and bool((result.token_ids[:, 0] >= 0).all())


@pytest.mark.parametrize("vocab", [1, 2, 31, 33, 1000, 1025])
def test_odd_vocabularies(backend: str, device: str, vocab: int) -> None:
    for rule in ("ratio", "block", "match", "topm"):
        compare(make_chain(8, 2, vocab, rule=rule, filters="all"), device)


@pytest.mark.parametrize("bad", [NAN, INF], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_a_bad_target_row_ends_its_own_request_only(backend: str, device: str, rule: str, bad: float) -> None:
    case = make_chain(6, 3, 40, rule=rule, filters="all" if rule != "typical" else "none", closeness=0.05)
    clean = compare(case, device)
    case.target_logits[1, 0, 39] = bad
    case.target_logits[3, 2, 0] = bad
    case.target_logits[4, 3] = -INF
    result = compare(case, device)
    assert int(result.status[1]) == 1 and result.token_ids[1].tolist() == [-1] * 4
    others = [0, 2, 5]
    assert_same(tuple(t[others] for t in result[:3]), tuple(t[others] for t in clean[:3]), NAMES[:3])


@pytest.mark.parametrize("drafts", ["model", "stats"])
@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_bad_draft_row_ends_the_draft(backend: str, device: str, rule: str, drafts: str) -> None:
    case = make_chain(6, 3, 40, rule=rule, closeness=0.05, drafts=drafts if rule == "ratio" else "model")
    assert case.draft_logits is not None
    case.draft_logits[0, 0] = NAN
    case.draft_logits[2, 1] = -INF
    case.draft_logits[4, 2, 5] = INF
    result = compare(case, device)
    assert int(result.status[0]) == 2 and int(result.num_accepted[0]) == 0 and int(result.token_ids[0, 0]) >= 0


def test_a_bad_draft_row_found_late_is_drawn_from_the_target(backend: str, device: str) -> None:
    """With draft_stats the row is first read when its id was rejected."""
    case = make_chain(64, 1, 30, closeness=2.5, drafts="stats")
    assert case.draft_logits is not None
    away = case.draft_ids[:, 0] % 29
    away = torch.where(away == case.draft_ids[:, 0], 29, away)
    case.draft_logits[torch.arange(64), 0, away] = NAN
    result = compare(case, device)
    assert set(result.status.tolist()) == {0, 2}
    assert bool(((result.status == 2) == (result.num_accepted == 0)).all())


@pytest.mark.parametrize("rule", RULES)
def test_an_id_outside_the_vocabulary_ends_the_draft(backend: str, device: str, rule: str) -> None:
    case = make_chain(5, 3, 40, rule=rule, closeness=0.02)
    case.draft_ids[0, 0] = 40
    case.draft_ids[1, 1] = -2
    case.draft_ids[2, 2] = 2**40
    result = compare(case, device)
    assert int(result.status[0]) == 4 and int(result.num_accepted[0]) == 0


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_zero_draft_probability_is_rejected_and_flagged(backend: str, device: str, rule: str) -> None:
    target, draft = [[0.0, 0.0, 0.0]] * 2, [[0.0, -INF, 0.0]]
    tokens, accepted, status = one([1], target, draft, device=device, rule=rule)
    assert (accepted, status) == (0, 16) and tokens[0] == 1  # the residual is all on the id the draft never proposes


def test_zero_target_probability_is_never_accepted_not_even_with_coin_zero(backend: str, device: str) -> None:
    """Global rule G7: strict comparison. Seed and position were searched for a coin of exactly 0."""
    seed, position = COIN_ZERO
    rng = RngKey(torch.tensor([seed]), torch.tensor([position]))
    assert int(random_words(rng, purpose="coin", index=torch.zeros(1, dtype=torch.int64))) >> 8 == 0
    moved = RngKey(*(n.to(device) if n is not None else None for n in rng))
    for rule in ("ratio", "topm", "distance", "typical"):
        knobs = {"top_m": 3} if rule == "topm" else {"max_distance": 3} if rule == "distance" else {}
        result = one([1], [[0.0, -INF, 0.0]] * 2, [[0.0, 0.0, 0.0]], rng=moved, rule=rule, device=device, **knobs)
        assert result[1] == 0 and result[0][0] in (0, 2)


def test_a_coin_has_24_bits(backend: str, device: str) -> None:
    """Coins k / 2^24 with small odd k against p = (k -+ 1/2) / 2^24; with 23 bits the first would accept."""
    rng = RngKey(torch.arange(8192), torch.full((8192,), 5))
    k = random_words(rng, purpose="coin", index=torch.zeros(1, dtype=torch.int64))[:, 0] >> 8
    chosen = (k < 2**15) & (k % 2 == 1)
    k, seed = k[chosen].double(), rng.seed[chosen].to(device)
    assert len(k) > 5
    for accepts, edge in ((0, k - 0.5), (1, k + 0.5)):
        p = edge / 2**24
        target = torch.stack([p.log(), (1 - p).log()], 1).float()[:, None].expand(-1, 2, -1).contiguous().to(device)
        result = verify_chain(
            torch.zeros(len(k), 1, dtype=torch.int64, device=device), target, None, sampling=Sampling(),
            rng=RngKey(seed, torch.full_like(seed, 5), torch.zeros_like(seed)), rule="ratio",
        )  # fmt: skip
        assert result.num_accepted.tolist() == [accepts] * len(k)


def test_bad_layouts_are_flagged_and_harm_nobody(backend: str, device: str) -> None:
    good = make_chain(4, 2, 50, flat=True)
    for cu in ([1, 2, 4, 6, 8], [0, 2, 1, 6, 8], [0, 2, 4, 6, 9], [0, 2, 4, 8, 8], [0, -3, 4, 6, 8], [0, 2, 4, 99, 8]):
        case = replace(good, keywords={**good.keywords, "cu_draft": torch.tensor(cu).int()})
        result = compare(case, device)
        assert 32 in result.status.tolist() or 32 & int(result.status.max()) == 32
    clean = compare(good, device)
    broken = compare(replace(good, keywords={**good.keywords, "cu_draft": torch.tensor([0, 2, 4, 6, 9]).int()}), device)
    assert_same(tuple(t[:3] for t in broken[:3]), tuple(t[:3] for t in clean[:3]), NAMES[:3])


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", NAN), ("temperature", -1.0), ("top_p", NAN), ("min_p", NAN), ("top_k", -1)],
)
def test_bad_sampling_makes_that_request_greedy(backend: str, device: str, field: str, value: float) -> None:
    case = make_chain(6, 2, 60, filters="all")
    bad = getattr(case.keywords["sampling"], field).clone()
    bad[2] = value
    case.keywords["sampling"] = case.keywords["sampling"]._replace(**{field: bad})
    result = compare(case, device)
    assert result.status.tolist() == [0, 0, 64, 0, 0, 0]
    accepted = int(result.num_accepted[2])
    assert int(result.token_ids[2, accepted]) == int(case.target_logits[2, accepted].argmax())


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-39, 1e4, INF])
def test_extreme_temperatures(backend: str, device: str, temperature: float) -> None:
    case = make_chain(12, 2, 60)
    case.keywords["sampling"] = Sampling.full(12, temperature=temperature)
    compare(case, device)


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_draft_at_temperature_inf_gives_minus_infinity_no_mass_however_it_is_told(
    backend: str, device: str, is_slow: bool, rule: str
) -> None:
    """0 times -inf is no number; drafts without mass are rejected, and their ids may be drawn instead."""
    batch, draft, vocab = 8 if is_slow else 60, 2, 24
    case = make_chain(batch, draft, vocab, rule=rule)
    assert case.draft_logits is not None
    case.draft_logits[..., ::3] = -INF
    case.draft_ids[:] = torch.arange(batch * draft).view(batch, draft) % vocab
    case.keywords["draft_sampling"] = Sampling.full(batch, temperature=INF)
    compare(case, device)
    case = case.to(device)
    ids, target, rows = case.draft_ids, case.target_logits, case.draft_logits
    assert rows is not None
    even = torch.full((batch, draft), vocab - vocab // 3, device=device).float().log()
    column = torch.arange(vocab, device=device).expand(batch, draft, -1)
    kept = SparseRows(torch.where(rows == -INF, -1, column), rows, even)
    dense = run(case)
    assert dense.status.bitwise_and(16).any() and not dense.status.bitwise_and(~16).any()
    stats = (even, torch.full_like(even, -INF))
    for told in (
        verify_chain(ids, target, rows, draft_stats=stats, **case.keywords),
        verify_chain(ids, target, kept, **case.keywords),
    ):
        assert_same(tuple(told), tuple(dense), NAMES)


@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_extreme_logits(backend: str, device: str, scale: float) -> None:
    case = make_chain(12, 2, 60)
    assert case.draft_logits is not None
    for rule in ("ratio", "match"):
        keywords = {**case.keywords, "rule": rule}
        compare(ChainCase(case.draft_ids, case.target_logits * scale, case.draft_logits * scale, keywords), device)


@pytest.mark.parametrize("row", ["equal", "ties", "mostly -inf"])
@pytest.mark.parametrize("filters", ["none", "top_k", "top_p", "min_p", "all"])
def test_flat_and_tied_rows(backend: str, device: str, row: str, filters: str) -> None:
    batch, draft, vocab = 8, 2, 600
    case = make_chain(batch, draft, vocab, filters=filters)
    if row == "equal":
        case.target_logits[:] = 1.5
    elif row == "ties":
        case.target_logits = (case.target_logits * 2).round() / 2
    else:
        case.target_logits[..., 3:] = -INF
    for rule in ("ratio", "match"):
        compare(replace(case, keywords={**case.keywords, "rule": rule}), device, logprobs="processed")


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("rule", ["ratio", "match", "greedy", "block"])
def test_raw_logprobs_of_a_row_with_a_bad_logit_at_a_disallowed_id_are_nan(
    backend: str, device: str, rule: str, bad: float
) -> None:
    """The raw softmax is over all logits as given: a NaN in one of them is in all of it, whatever is allowed."""
    case = make_chain(3, 2, 64, rule=rule, drafts="point").to(device)
    case.target_logits[1, :, 9] = bad
    case.keywords["allowed"] = torch.full((9, 2), -1, dtype=torch.int32, device=device)
    case.keywords["allowed"][3:6, 0] = ~(1 << 9)  # the rows of request 1, without id 9
    raw, processed = run(case, logprobs="raw"), run(case, logprobs="processed")
    assert raw.logprobs is not None and processed.logprobs is not None and not raw.status.any()
    emitted = raw.token_ids >= 0
    assert torch.equal(raw.logprobs.isnan(), emitted & (torch.arange(3, device=device)[:, None] == 1))
    assert not processed.logprobs.isnan().any()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("rule", ["ratio", "block"])
@pytest.mark.parametrize("width", [0, 2])
def test_a_bad_draft_temperature_is_flagged_only_where_there_is_a_draft(
    backend: str, device: str, width: int, rule: str, flat: bool
) -> None:
    """Request 1 drafted nothing, requests 0 and 2 as much as the batch is wide: what its neighbours did is all one."""
    case = make_chain(3, width, 40, rule=rule)
    case.draft_ids[1] = -1
    if flat:
        rows = case.target_logits
        keep = torch.tensor([0, 2])
        assert case.draft_logits is not None
        case = replace(
            case,
            draft_ids=case.draft_ids[keep].flatten(),
            draft_logits=case.draft_logits[keep].flatten(0, 1),
            target_logits=torch.cat([rows[0], rows[1, :1], rows[2]]),
            keywords=case.keywords | {"cu_draft": torch.tensor([0, width, width, 2 * width]).int(), "max_draft": width},
        )
    case.keywords["draft_sampling"] = Sampling(temperature=torch.full((3,), NAN))
    result = compare(case, device)
    assert result.status.tolist() == ([64, 0, 64] if width else [0, 0, 0])


def test_ids_of_a_tiny_vocabulary_stay_inside_it() -> None:
    """Where nobody has been offered yet, one request of 100,000 looked at what lies behind the row."""
    batch = 200_000
    keys = torch.arange(batch)
    chosen = verify_chain(
        torch.zeros(batch, 1, dtype=torch.int64),
        torch.tensor([0.3, 0.7]).log().expand(batch, 2, 2).contiguous(),
        None,
        sampling=Sampling.full(batch),
        rng=RngKey(keys, torch.zeros_like(keys)),
        backend="cpu",
    )
    assert int(chosen.token_ids.max()) < 2
