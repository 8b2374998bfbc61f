"""verify_chain: examples by hand, the reference's decisions on every backend, calling conventions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import FILTERS, RULES, ChainCase, make_chain, make_rng
from chains import NAMES, compare, one, run
from check import assert_same
from torch import Tensor

from specdec_kernels import ChainResult, RngKey, Sampling, race_noise, random_words, use_backend, verify_chain
from specdec_kernels.ops.verify_chain import op

INF = float("inf")


# --- examples one can check by hand


def test_greedy_accepts_the_argmax_prefix_and_corrects(backend: str, device: str) -> None:
    rows = [[0.0, 5.0, 1.0], [2.0, 1.0, 9.0], [1.0, 0.0, 0.0], [0.0, 0.0, 3.0]]
    assert one([1, 2, 2], rows, rule="greedy", device=device) == ([1, 2, 0, -1], 2, 0)
    assert one([1, 2, 0], rows, rule="greedy", device=device) == ([1, 2, 0, 2], 3, 0)
    assert one([0, 2, 0], rows, rule="greedy", device=device) == ([1, -1, -1, -1], 0, 0)


def test_greedy_takes_the_lowest_id_of_a_tie(backend: str, device: str) -> None:
    assert one([], [[1.0, 4.0, 4.0, 4.0]], rule="greedy", device=device) == ([1], 0, 0)
    assert one([2], [[4.0, 1.0, 4.0], [0.0, 1.0, 1.0]], rule="greedy", device=device) == ([0, -1], 0, 0)


def test_equal_distributions_accept_everything(backend: str, device: str) -> None:
    rows = [[0.3, -1.0, 2.0, 0.5]] * 4
    tokens, accepted, status = one([0, 1, 3], rows, rows[:3], device=device)
    assert (tokens[:3], accepted, status) == ([0, 1, 3], 3, 0)


def test_disjoint_distributions_reject_and_draw_from_the_target(backend: str, device: str) -> None:
    target, draft = [[0.0, 0.0, -INF, -INF]] * 2, [[-INF, -INF, 0.0, 0.0]]
    tokens, accepted, status = one([2], target, draft, device=device)
    assert accepted == 0 and tokens[0] in (0, 1) and status == 0


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_filters_of_the_draft_alone(backend: str, device: str, rule: str) -> None:
    """The target has none: the draft row's distribution still has its own."""
    case = make_chain(40, 3, 50, rule=rule)
    assert case.draft_logits is not None
    case.draft_ids.copy_(case.draft_logits.argmax(-1))
    case.keywords |= {"sampling": Sampling(), "draft_sampling": Sampling.full(40, top_k=2)}
    filtered = compare(case, device)
    case.keywords |= {"draft_sampling": Sampling()}
    assert not torch.equal(filtered.num_accepted, compare(case, device).num_accepted)


COIN_HALF = (1, 44038657)  # seed, position of a coin that is exactly 1 / 2 (found by search)


@pytest.mark.parametrize("drafts", ["point", "model"])
@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_coin_on_the_edge_rejects(backend: str, device: str, rule: str, drafts: str) -> None:
    """u q(x) < p(x) is strict: with q = 1 and p = 1 / 2 a coin of 1 / 2 rejects."""
    seed, position = COIN_HALF
    key = RngKey(torch.tensor([seed]), torch.tensor([position]))
    word = random_words(key, purpose="coin", index=torch.zeros(1, dtype=torch.int64))
    assert float(word >> 8) * 2.0**-24 == 0.5
    rng = RngKey(*(torch.tensor([v], device=device) for v in (seed, position, 0)))
    draft = [[0.0, -INF]] if drafts == "model" else None
    common: dict[str, Any] = {"rule": rule, "rng": rng, "device": device}
    assert one([0], [[0.0, 0.0], [0.0, 0.0]], draft, **common) == ([1, -1], 0, 0)
    tokens, accepted, status = one([0], [[1e-6, 0.0], [0.0, 0.0]], draft, **common)  # p = 1 / 2 + 2.5e-7
    assert (tokens[0], accepted, status) == (0, 1, 0)


@pytest.mark.parametrize("drafts", ["point", "model"])
@pytest.mark.parametrize("rule", ["ratio", "match", "greedy", "block"])
def test_raw_logprobs_are_the_softmax_of_all_logits(backend: str, device: str, rule: str, drafts: str) -> None:
    """At temperature 1, where raw and processed differ by `allowed` alone."""
    case = make_chain(6, 2, 50, rule=rule, drafts=drafts)
    case.keywords["sampling"] = Sampling()
    bits = torch.rand(18, 64, generator=torch.Generator().manual_seed(3)) < 0.6
    case.keywords["allowed"] = _packed(bits)
    result = run(case.to(device), logprobs="raw")
    assert result.logprobs is not None
    tokens = result.token_ids.cpu()
    want = case.target_logits.log_softmax(-1).gather(2, tokens.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(result.logprobs.cpu(), torch.where(tokens >= 0, want, 0.0), rtol=1e-5, atol=2e-5)


def _packed(bits: Tensor) -> Tensor:
    """int32 words of bits, lowest first."""
    words = (bits.unflatten(-1, (-1, 32)).long() << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def test_match_emits_exactly_the_plain_draw(backend: str, device: str) -> None:
    """The race of the documented noise decides, whatever was drafted."""
    rng = RngKey(*(torch.tensor([v]) for v in (31, 8, 0)))
    target = torch.tensor([0.1, 1.2, -0.4, 0.9])
    winner = []
    for i in range(2):
        noise = race_noise(rng._replace(position=rng.position + i), torch.arange(4))[0]
        winner.append(int((target - noise.log()).argmax()))
    moved = RngKey(*(n.to(device) for n in rng))
    rows = [target.tolist()] * 2
    assert one([winner[0]], rows, rule="match", rng=moved, device=device) == (winner, 1, 0)
    other = (winner[0] + 1) % 4
    assert one([other], rows, rule="match", rng=moved, device=device) == ([winner[0], -1], 0, 0)


def test_topm_counts_ranks_and_distance_counts_ids(backend: str, device: str) -> None:
    rows = [[3.0, 1.0, 2.0, 0.0], [0.0, 0.0, 0.0, 9.0]]
    for draft, m, accepted in ((2, 1, 0), (2, 2, 1), (1, 2, 0), (1, 3, 1), (3, 4, 1)):
        assert one([draft], rows, rule="topm", top_m=m, device=device)[1] == accepted
    for draft, distance, accepted in ((1, 0, 0), (1, 1, 1), (3, 2, 0), (3, 3, 1)):
        assert one([draft], rows, rule="distance", max_distance=distance, device=device)[1] == accepted
    assert one([3], rows, rule="topm", top_m=1, min_block=2, device=device) == ([3, 3], 1, 0)


def test_typical_accepts_above_the_entropy_threshold(backend: str, device: str) -> None:
    """Uniform over 100: threshold min(.09, .3 / 100) = .003 < .01; one-hot: .09."""
    flat = [[0.0] * 100] * 2
    assert one([42], flat, rule="typical", device=device)[1] == 1
    assert one([42], flat, rule="typical", typical_delta=1.0001, typical_epsilon=0.5, device=device)[1] == 0
    peaked = [[20.0] + [0.0] * 99] * 2
    assert one([0], peaked, rule="typical", device=device)[1] == 1
    assert one([7], peaked, rule="typical", device=device)[1] == 0
    greedy = Sampling.full(1, temperature=0.0, device=device)  # p = 1, no entropy: min(epsilon, delta) decides
    for delta, accepted in ((0.9, 1), (1.0, 0)):
        knobs = {"typical_epsilon": 1.0, "typical_delta": delta}
        assert one([0], peaked, rule="typical", sampling=greedy, device=device, **knobs)[1] == accepted


def test_rejected_from_target_may_repeat_the_rejected_id(backend: str, device: str, is_slow: bool) -> None:
    """Decoding-UNO draws from p; the residual never emits a token the draft over-weights."""
    batch = 64 if is_slow else 512
    target, draft = torch.zeros(1, 2, 2), torch.tensor([[[9.0, 0.0]]])
    rng = RngKey(*(n.to(device) for n in make_rng(batch)))
    args = (
        torch.zeros(batch, 1, dtype=torch.int64, device=device),
        target.expand(batch, -1, -1).to(device),
        draft.expand(batch, -1, -1).to(device),
    )
    common = {"sampling": Sampling(), "draft_sampling": Sampling(), "rng": rng}
    residual = verify_chain(*args, **common)
    uno = verify_chain(*args, **common, rejected_from="target")
    rejected = residual.num_accepted == 0
    assert torch.equal(residual.num_accepted, uno.num_accepted)
    assert 0 < int(rejected.sum()) < batch
    assert set(residual.token_ids[rejected, 0].tolist()) == {1}
    assert set(uno.token_ids[rejected, 0].tolist()) == {0, 1}


# --- the reference's decisions, bit by bit


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("rule", RULES)
def test_decisions_equal_the_reference(backend: str, device: str, is_slow: bool, rule: str, filters: str) -> None:
    batch = 8 if is_slow else 200
    compare(make_chain(batch, 3, 301, rule=rule, filters=filters, greedy_every=5), device, logprobs="processed")


@pytest.mark.parametrize("rule", ["ratio", "block", "match", "greedy"])
def test_a_thousand_seeds_decide_alike(backend: str, device: str, is_slow: bool, rule: str) -> None:
    vocab = 67 if is_slow else 1025
    theirs = compare(make_chain(1000, 2, vocab, rule=rule, filters="all" if rule == "match" else "temperature"), device)
    assert len(set(theirs.num_accepted.tolist())) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("drafts", ["model", "stats", "point"])
@pytest.mark.parametrize("flat", [False, True], ids=["dense", "flat"])
def test_layouts_dtypes_and_drafts(
    backend: str, device: str, is_slow: bool, dtype: torch.dtype, drafts: str, flat: bool
) -> None:
    batch = 7 if is_slow else 64  # lengths 0 to 4; two requests are greedy
    for rule in ("ratio", "match") if drafts == "stats" else ("ratio", "block", "match", "typical"):
        case = make_chain(
            batch, 4, 517, rule=rule, filters="all", dtype=dtype, drafts=drafts, ragged=True, flat=flat, greedy_every=6
        )
        compare(case, device, logprobs="raw")


@pytest.mark.parametrize("filters", ["none", "all", "top_p", "min_p"])
def test_several_tiles(backend: str, device: str, is_slow: bool, filters: str) -> None:
    """4096 + 4096 + 1807 ids: three tiles of every backend, the last one ragged."""
    batch = 2 if is_slow else 40
    for rule in ("ratio", "block", "match"):
        compare(make_chain(batch, 2, 9999, rule=rule, filters=filters), device)


@pytest.mark.parametrize("flat", [False, True], ids=["dense", "flat"])
def test_allowed_masks_come_before_filters(backend: str, device: str, is_slow: bool, flat: bool) -> None:
    vocab, batch, draft = 133, 4 if is_slow else 12, 3  # lengths 0 to 3
    case = make_chain(batch, draft, vocab, filters="all", ragged=True, flat=flat)
    rows = case.target_logits.shape[0] if flat else batch * (draft + 1)
    bits = torch.randint(-(2**31), 2**31, (rows, (vocab + 31) // 32)).int()
    theirs = compare(case, device, logprobs="processed")
    compare(replace(case, keywords={**case.keywords, "allowed": bits}), device, logprobs="raw")
    everything = torch.full_like(bits, -1)
    with use_backend("reference"):
        assert_same(tuple(run(case, logprobs="processed", allowed=everything)), tuple(theirs), NAMES)


def test_reduced_draft_vocabulary(backend: str, device: str) -> None:
    vocab, draft_vocab, batch, draft = 97, 31, 32, 3
    g = torch.Generator().manual_seed(3)
    token_map = torch.randperm(vocab, generator=g)[:draft_vocab].int()
    drafted = torch.randn(batch, draft, draft_vocab, generator=g)
    target = torch.randn(batch, draft + 1, vocab, generator=g)
    column = drafted.argmax(-1)
    ids = token_map[column].long()
    ids[5, 1] = int(next(v for v in range(vocab) if v not in token_map.tolist()))  # no column: q = 0
    target.scatter_add_(2, ids[..., None].expand(-1, -1, 1), torch.full((batch, draft, 1), 3.0))
    case = ChainCase(
        ids,
        target,
        drafted,
        {"sampling": Sampling(), "draft_sampling": Sampling(), "rng": make_rng(batch), "token_map": token_map},
    )
    theirs = compare(case, device)
    assert set(theirs.num_accepted.tolist()) >= {0, 1, 3}
    compare(replace(case, keywords={**case.keywords, "rule": "block"}), device)


def test_over_acceptance_accepts_more(backend: str, device: str, is_slow: bool) -> None:
    batch = 48 if is_slow else 400
    case = make_chain(batch, 3, 50, closeness=2.0)
    plain = compare(case, device)
    more = compare(case, device, over_acceptance=0.2)
    assert int(more.num_accepted.sum()) > int(plain.num_accepted.sum())


# --- the calling conventions


def test_ids_come_back_in_the_dtype_they_came(backend: str, device: str) -> None:
    case = make_chain(3, 2, 20).to(device)
    narrow = run(replace(case, draft_ids=case.draft_ids.int()))
    assert narrow.token_ids.dtype == torch.int32
    assert torch.equal(narrow.token_ids.long(), run(case).token_ids)


def test_out_receives_the_results(backend: str, device: str) -> None:
    case = make_chain(5, 3, 77, ragged=True).to(device)
    want = run(case, logprobs="raw")
    out = ChainResult(*(torch.full_like(t, 99) for t in want if t is not None))  # type: ignore[type-var]
    got = run(case, logprobs="raw", out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert_same(tuple(got), tuple(want), NAMES)
    with pytest.raises(ValueError, match=r"verify_chain: out.token_ids must be torch.int64 \[5, 4\], got torch.int32"):
        run(case, out=ChainResult(out.token_ids.int(), *out[1:]))


def test_opcheck_and_compile(backend: str, device: str) -> None:
    case = make_chain(3, 2, 33).to(device)
    want = run(case)

    def step(ids: Tensor, target: Tensor, draft: Tensor) -> ChainResult:
        return verify_chain(ids, target, draft, **case.keywords)

    assert case.draft_logits is not None
    if backend != "reference":
        captured: list[Any] = []
        real = op._calls[backend]
        op._calls[backend] = (real[0], lambda *a: (captured.append(a[: -len(op.results)]), real[1](*a))[1])
        try:
            run(case)
        finally:
            op._calls[backend] = real
        torch.library.opcheck(op.overload(backend), captured[0])
        outs = tuple(torch.empty_like(t) for t in (*want[:3], torch.empty(0, device=device)))
        torch.library.opcheck(op.overload(backend, out=True), (*captured[0], *outs))
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
        assert_same(tuple(compiled(case.draft_ids, case.target_logits, case.draft_logits)), tuple(want), NAMES)


def _wrong(**change: Any) -> dict[str, Any]:
    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_wrong(draft_ids=[[1]]), "draft_ids must be a tensor of int32 or int64, got list"),
        (_wrong(draft_ids=torch.zeros(3, 2)), "draft_ids must be int32 or int64, got float32"),
        (_wrong(draft_ids=torch.zeros(3, 2, 1).long()), r"draft_ids must be \[batch, draft\], got \[3, 2, 1\]"),
        (_wrong(target_logits=torch.zeros(3, 3)), r"target_logits must be \[3, 3, vocab\], got \[3, 3\]"),
        (
            _wrong(target_logits=torch.zeros(3, 2, 9)),
            r"target_logits must be \[batch, draft \+ 1, vocab\] = \[3, 3, 9\], got \[3, 2, 9\]: .* the bonus row",
        ),
        (_wrong(target_logits=torch.zeros(3, 3, 9).double()), "target_logits must be float32 or bfloat16 or float16"),
        (_wrong(target_logits=torch.zeros(3, 3, 0)), "target_logits must be of a vocabulary of 1 to 8388607 ids"),
        (
            _wrong(target_logits=torch.zeros(9, 3, 3).permute(1, 2, 0)),
            "target_logits must be dense in its last dimension",
        ),
        (_wrong(target_logits=torch.zeros(3, 3, 9, requires_grad=True)), "target_logits must be without gradient"),
        (
            _wrong(draft_logits=torch.zeros(3, 2, 11)),
            r"token_map must be given where draft_vocab \(11\) is not vocab \(9\)",
        ),
        (
            _wrong(draft_logits=torch.zeros(3, 2, 7)),
            r"token_map must be given where draft_vocab \(7\) is not vocab \(9\)",
        ),
        (_wrong(draft_sampling=None), "draft_sampling must be given with draft_logits"),
        (_wrong(sampling=0.8), "sampling must be a Sampling"),
        (
            _wrong(sampling=Sampling(0.7)),
            r"sampling.temperature must be a tensor of float32 \[3\] \(Sampling.full\(3, temperature=0.7\) makes it\)",
        ),
        (_wrong(draft_sampling=Sampling(top_k=4)), r"draft_sampling.top_k must be a tensor of int32 .*top_k=4\)"),
        (_wrong(sampling=Sampling(torch.ones(2))), r"sampling.temperature must be \[3\], got \[2\]"),
        (_wrong(sampling=Sampling(top_k=torch.ones(3).long())), "sampling.top_k must be int32, got int64"),
        (_wrong(rng=None), "rng must be an RngKey"),
        (_wrong(rng=RngKey(torch.zeros(3), torch.zeros(3).long())), "rng.seed must be int64, got float32"),
        (_wrong(rule="lossless"), "rule must be one of 'ratio', 'block', 'match'"),
        (_wrong(rule=["ratio"]), r"rule must be one of 'ratio', .* got \['ratio'\]"),
        (_wrong(rule="block", rng=RngKey(torch.zeros(3).long(), torch.zeros(3).long())), "rng.step must be given"),
        (_wrong(rule="match", over_acceptance=0.1), "over_acceptance must be None unless the rule is 'ratio'"),
        (_wrong(over_acceptance=-0.1), r"over_acceptance must be a number in \[0, 1\] or float32 \[batch\], got -0.1"),
        (_wrong(over_acceptance="a"), r"over_acceptance must be a number in \[0, 1\] or float32 \[batch\], got 'a'"),
        (
            _wrong(typical_epsilon=float("nan")),
            r"typical_epsilon must be a number in \[0, inf\] or float32 \[batch\], got nan",
        ),
        (_wrong(typical_delta=-1), r"typical_delta must be a number in \[0, inf\] or float32 \[batch\], got -1"),
        (_wrong(rejected_from="draft"), "rejected_from must be one of 'residual', 'target'"),
        (_wrong(rule="match", rejected_from="target"), "rejected_from must be 'residual' unless"),
        (_wrong(token_map=torch.zeros(4).int()), r"token_map must be \[9\], got \[4\]"),
        (_wrong(allowed=torch.zeros(9, 2).int()), r"allowed must be \[9, 1\], got \[9, 2\]"),
        (_wrong(max_draft=7), "max_draft must be 2"),
        (_wrong(top_m=0), "top_m must be a host int >= 1"),
        (_wrong(top_m=1.5), "top_m must be a host int >= 1, got 1.5"),
        (_wrong(top_m=2**63), r"top_m must be a host int < 2\^63, got 9223372036854775808"),
        (_wrong(draft_stats=5), r"draft_stats must be two tensors \(logsumexp, threshold\), .*, got int"),
        (_wrong(draft_stats=(torch.zeros(3, 2),)), "draft_stats must be two tensors .*, got tuple of 1"),
        (_wrong(max_distance=-1), "max_distance must be a host int >= 0"),
        (_wrong(min_block=None), "min_block must be a host int >= 1, got None"),
        (_wrong(out=5), "out must be a ChainResult, got int"),
        (_wrong(logprobs="all"), "logprobs must be one of None, 'processed', 'raw'"),
        (_wrong(backend="numpy"), "backend must be one of reference, cpu, triton, cuda"),
    ],
)
def test_wrong_arguments_say_what_to_do(change: dict[str, Any], message: str) -> None:
    case = make_chain(3, 2, 9)
    arguments: dict[str, Any] = {
        "draft_ids": case.draft_ids,
        "target_logits": case.target_logits,
        "draft_logits": case.draft_logits,
        **case.keywords,
        **change,
    }
    ids, target, draft = (arguments.pop(k) for k in ("draft_ids", "target_logits", "draft_logits"))
    with pytest.raises(ValueError, match="verify_chain: " + message):
        verify_chain(ids, target, draft, **arguments)


def test_a_flat_draft_without_its_bonus_rows_is_told_so() -> None:
    case = make_chain(3, 2, 9, flat=True)
    with pytest.raises(ValueError, match=r"must be \[total \+ batch, vocab\] = \[9, 9\], got \[6, 9\]: .* bonus row"):
        run(replace(case, target_logits=case.target_logits[:6]))


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        (None, "given with cu_draft, a host int >= 0"),
        (-1, "a host int >= 0"),
        (1.5, "a host int >= 0"),
        (2**40, r"a host int < 2\^40"),
        (2**62, r"a host int < 2\^40"),
        (2**63, r"a host int < 2\^40"),
    ],
)
def test_the_longest_length_of_flat_drafts_must_be_given(longest: Any, expected: str) -> None:
    case = make_chain(3, 2, 9, flat=True)
    with pytest.raises(ValueError, match=f"verify_chain: max_draft must be {expected}, got {longest}"):
        run(replace(case, keywords={**case.keywords, "max_draft": longest}))
