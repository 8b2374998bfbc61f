"""The plug-in in SGLang's own functions, from its wheel: batches, sampler, verifier and hooks are the real ones.

No model runs (test_sglang_engine.py runs some): logits are the tests' own.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_loader
import torch
from torch import Tensor

from specdec_kernels import RngKey, Sampling, sample, tree_links
from specdec_sglang import fallbacks, plugin, requests, verifier

if importlib.util.find_spec("sglang") is None:  # importing it would need the loader's stand-ins
    pytest.skip("make test-engines installs sglang in an environment of its own", allow_module_level=True)
sglang_loader.install()

from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject, GrammarMask  # noqa: E402
from sglang.srt.layers.logits_processor import LogitsProcessorOutput  # noqa: E402
from sglang.srt.layers.logprob_processor import compute_spec_logprobs  # noqa: E402
from sglang.srt.layers.sampler import Sampler  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode  # noqa: E402
from sglang.srt.plugins import hook_registry, load_plugins  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.speculative import eagle_utils, eagle_worker_common  # noqa: E402
from sglang.srt.speculative.eagle_info import EagleVerifyInput  # noqa: E402
from sglang.srt.speculative.ngram_info import NgramVerifyInput  # noqa: E402

VOCAB = 24
TREE = [-1, 0, 0, 1, 1, 2, 3]  # two children of the root, three levels
DEPTH = 3


class Batch:
    """What SGLang's functions read of a ScheduleBatch."""

    def __init__(self, reqs: list[Any], seq_lens: Tensor | None = None) -> None:
        self.reqs, self.device, self.forward_mode = reqs, "cpu", ForwardMode.TARGET_VERIFY
        self.seq_lens = torch.arange(10, 10 + len(reqs)) if seq_lens is None else seq_lens
        self.return_logprob, self.top_logprobs_nums, self.token_ids_logprobs = False, None, None
        self.sampling_info = SamplingBatchInfo.from_schedule_batch(self, VOCAB).copy_for_forward()


def request(rid: str = "r", **parameters: Any) -> SimpleNamespace:
    params = SamplingParams(**parameters)
    params.normalize(None)
    params.verify(VOCAB)
    return SimpleNamespace(
        rid=rid, sampling_params=params, custom_logit_processor=None, return_sampling_mask=False,
        sampling_logprobs_mode="full", origin_input_ids=[1, 2], output_ids=[3],
    )  # fmt: skip


def several() -> list[SimpleNamespace]:
    """Requests of every kind in one batch."""
    return [
        request("a", temperature=0.8, sampling_seed=11),
        request("b", temperature=0.0),
        request("c", temperature=1.3, top_k=4, sampling_seed=-5),
        request("d", temperature=1.0, top_p=0.7),
        request("e", temperature=0.9, min_p=0.2, top_k=9, top_p=0.9, sampling_seed=2**62),
        request("f"),
    ]


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[Any]:
    """Hooks by SGLang's own entry point, configuration by its own arguments, one rank."""
    load_plugins()
    rank = SimpleNamespace(world_size=1, device_group=None)
    with get_context().override_server_args(random_seed=5), get_parallel().override(tp_group=rank):
        yield


@pytest.fixture(autouse=True)
def no_fallbacks() -> Iterator[None]:
    fallbacks.clear()
    yield
    assert not fallbacks, "a batch was left to SGLang"


def links(parents: Tensor) -> dict[str, Tensor]:
    made = tree_links(parents, engine="sglang")
    return {
        "retrieve_index": made.row,
        "retrieve_next_token": made.next_token,
        "retrieve_next_sibling": made.next_sibling,
    }


def eagle_input(ids: Tensor, parents: list[int] = TREE, topk: int = 2, draft_probs: Tensor | None = None) -> Any:
    batch, nodes = ids.shape
    depth = [0] * nodes
    for node in range(1, nodes):
        depth[node] = depth[parents[node]] + 1
    return EagleVerifyInput(
        draft_token=ids.flatten(), custom_mask=torch.ones(0, dtype=torch.bool), positions=torch.zeros(0),
        retrieve_cum_len=None, spec_steps=max(depth), topk=topk, draft_token_num=nodes,
        capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=0, seq_lens_cpu=torch.zeros(0),
        draft_probs=draft_probs, **links(torch.tensor(parents).repeat(batch, 1)),
    )  # fmt: skip


def output(logits: Tensor) -> Any:
    return LogitsProcessorOutput(next_token_logits=logits.reshape(-1, logits.shape[-1]))


def verify(verify_input: Any, batch: Batch, logits: Tensor, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As the workers call it: by the name that they imported."""
    found: tuple[Tensor, Tensor, Tensor] = eagle_worker_common.eagle_sample(verify_input, batch, output(logits), **more)
    return found


def plain(batch: Batch, logits: Tensor, positions: Tensor) -> Tensor:
    """SGLang's sampler, hooked, as a step without drafts calls it with the position of the last token."""
    ids: Tensor = Sampler()(output(logits.clone()), batch.sampling_info, False, [], [], positions)
    return ids


def expected_walk(batch: Batch, ids: Tensor, logits: Tensor) -> list[tuple[list[int], list[int]]]:
    """(nodes, tokens) of each request: plain sampling, node by node, as long as a child has the token."""
    steps = [plain(batch, logits[:, n], batch.seq_lens + d) for n, d in enumerate([0, 1, 1, 2, 2, 2, 3])]
    walks = []
    for b in range(len(ids)):
        nodes, tokens = [0], [int(steps[0][b])]
        while True:
            found = [n for n in range(1, len(TREE)) if TREE[n] == nodes[-1] and int(ids[b, n]) == tokens[-1]]
            if not found:
                break
            nodes.append(found[0])
            tokens.append(int(steps[found[0]][b]))
        walks.append((nodes, tokens))
    return walks


def check_walks(results: tuple[Tensor, Tensor, Tensor], walks: list[tuple[list[int], list[int]]], nodes: int) -> None:
    predict, lens, index = results
    assert predict.dtype == lens.dtype == index.dtype == torch.int32
    wanted = torch.zeros_like(predict)
    for b, (path, tokens) in enumerate(walks):
        rows = [b * nodes + n for n in path]
        assert int(lens[b]) == len(path)
        assert index[b].tolist() == rows + [-1] * (index.shape[1] - len(rows))
        wanted[rows] = torch.tensor(tokens, dtype=torch.int32)
    assert torch.equal(predict, wanted)


def plausible_tree(batch: Batch, logits: Tensor, g: torch.Generator) -> Tensor:
    """Drafts, of which about half are what the target will draw."""
    count = len(logits)
    ids = torch.stack([torch.randperm(VOCAB, generator=g)[: len(TREE)] for _ in range(count)])
    draws = [plain(batch, logits[:, n], batch.seq_lens + d).long() for n, d in enumerate([0, 1, 1, 2, 2, 2, 3])]
    for node in range(1, len(TREE)):
        siblings = [n for n in range(1, node) if TREE[n] == TREE[node]]
        is_free = torch.stack([ids[:, s] != draws[TREE[node]] for s in siblings] or [torch.ones(count) > 0]).all(0)
        is_right = is_free & (torch.rand(count, generator=g) < 0.6)
        ids[:, node] = torch.where(is_right, draws[TREE[node]], ids[:, node])
    return ids


def test_sglang_loads_the_plugin_and_its_workers_call_the_hooks() -> None:
    assert eagle_worker_common.eagle_sample is eagle_utils.eagle_sample
    assert eagle_utils.eagle_sample.__wrapped__.__module__ == "sglang.srt.speculative.eagle_utils"
    hooks = hook_registry.HookRegistry._hooks
    ours = {t for t, found in hooks.items() if any(s is not None and s.plugin_name == "specdec" for _, _, s in found)}
    assert {t.rsplit(".", 1)[-1] for t in ours} == {
        "adjusted_from_schedule_batch", "adjusted_filter_batch", "adjusted_merge_batch", "copy_for_forward", "forward",
        "eagle_sample", "_send_one_request",
    }  # fmt: skip
    assert ours <= hook_registry.HookRegistry._patched
    plugin.register()  # once is enough
    assert all(len(found) == 1 for target, found in hooks.items() if target in ours)


def test_seeds_follow_their_requests_through_filters_and_merges() -> None:
    first, second = Batch(several()), Batch([request("g", sampling_seed=7), request("a")])
    seeds = requests.seeds_of(first.sampling_info)
    assert seeds is not None and seeds[[0, 2, 4]].tolist() == [11, -5, 2**62]
    made = [requests.seed_of(request(rid)) for rid in "bdf"]
    assert seeds[[1, 3, 5]].tolist() == made and len(set(made)) == 3
    full = SamplingBatchInfo.from_schedule_batch(first, VOCAB)
    full.filter_batch([1, 4], torch.tensor([1, 4]))
    full.merge_batch(SamplingBatchInfo.from_schedule_batch(second, VOCAB))
    found = requests.seeds_of(full.copy_for_forward())
    assert found is not None and found.tolist() == [made[0], 2**62, 7, requests.seed_of(request("a"))]


def test_plain_sampling_is_the_seeded_draw_of_the_next_position() -> None:
    g = torch.Generator().manual_seed(0)
    batch, logits = Batch(several()), torch.randn(6, VOCAB, generator=g).bfloat16()
    positions = torch.tensor([3, 0, 8, 100, 5, 6])
    sampling = Sampling(
        torch.tensor([0.8, 0, 1.3, 1, 0.9, 1]), torch.tensor([0, 0, 4, 0, 9, 0]).int(),
        torch.tensor([1, 1, 1, 0.7, 0.9, 1]), torch.tensor([0, 0, 0, 0, 0.2, 0]),
    )  # fmt: skip
    seeds = requests.seeds_of(batch.sampling_info)
    assert seeds is not None
    wanted = sample(logits, sampling=sampling, rng=RngKey(seeds, positions + 1), purpose="target").token_ids[:, 0]
    found = plain(batch, logits, positions)
    assert found.dtype == torch.int32 and torch.equal(found.long(), wanted)
    assert int(found[1]) == int(logits[1].argmax())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_match_accepts_what_plain_sampling_would_have_drawn(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    depths = []
    for _ in range(8):
        batch = Batch(several(), torch.randint(5, 90, (6,), generator=g))
        logits = (2 * torch.randn(6, len(TREE), VOCAB, generator=g)).to(dtype)
        ids = plausible_tree(batch, logits, g)
        walks = expected_walk(batch, ids, logits)
        check_walks(verify(eagle_input(ids), batch, logits.clone()), walks, len(TREE))
        depths += [len(path) for path, _ in walks]
    assert set(depths) == {1, 2, 3, 4}


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    g = torch.Generator().manual_seed(2)
    batch, logits = Batch(several()), torch.randn(6, len(TREE), VOCAB, generator=g)
    ids = plausible_tree(batch, logits, g)
    predict, lens, index = verify(eagle_input(ids), batch, logits.clone())
    for b, alone in enumerate(several()):
        one = verify(eagle_input(ids[b : b + 1]), Batch([alone], batch.seq_lens[b : b + 1]), logits[b : b + 1].clone())
        rows = slice(b * len(TREE), (b + 1) * len(TREE))
        assert torch.equal(one[0], predict[rows]) and int(one[1]) == int(lens[b])
        assert torch.equal(one[2][0], torch.where(index[b] < 0, index[b], index[b] - rows.start))


@pytest.fixture
def on_xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang as on an XPU, its Triton kernel interpreted: there and on a CPU it verifies every request greedily."""
    from sglang.kernels.ops.speculative import spec_tree
    from triton.runtime.interpreter import InterpretedFunction

    kernel = spec_tree.verify_tree_greedy_kernel_triton
    monkeypatch.setattr(spec_tree, "verify_tree_greedy_kernel_triton", InterpretedFunction(kernel.fn))
    monkeypatch.setattr(spec_tree, "_is_xpu", True)
    monkeypatch.setattr(eagle_utils, "_is_xpu", True)


@pytest.mark.usefixtures("on_xpu")
def test_greedy_requests_get_exactly_what_sglang_returns() -> None:
    g = torch.Generator().manual_seed(3)
    theirs, depths = eagle_utils.eagle_sample.__wrapped__, set()
    for _ in range(12):
        batch = Batch([request(rid, temperature=0.0) for rid in "abcd"])
        logits = torch.randn(4, len(TREE), VOCAB, generator=g)
        ids = plausible_tree(batch, logits, g)
        ours = verify(eagle_input(ids), batch, logits.clone())
        own = theirs(eagle_input(ids), batch, output(logits.clone()))
        for mine, their in zip(ours, own, strict=True):
            assert mine.dtype == their.dtype and torch.equal(mine, their)
        depths |= set(own[1].tolist())
    assert depths == {1, 2, 3, 4}


def check_distribution(tokens: Tensor, probs: Tensor) -> float:
    """Chi-square of counts against probabilities, as a z-score; ids of probability 0 must not occur."""
    counts = torch.bincount(tokens.long(), minlength=len(probs)).double()
    assert not counts[probs == 0].any()
    kept, total = probs > 0, counts.sum()
    chi2 = (((counts - total * probs) ** 2)[kept] / (total * probs[kept])).sum()
    free = int(kept.sum()) - 1
    return float((chi2 - free) / math.sqrt(2 * free))


MANY = 6000
LIMIT = 5.0  # of a z-score of about 10 degrees of freedom: one run in 10,000 is a false alarm; the seeds are fixed


def many_requests(**parameters: Any) -> Batch:
    return Batch([request(f"r{i}", **parameters) for i in range(MANY)], torch.full((MANY,), 30))


def filtered_probs(logits: Tensor, temperature: float, top_k: int) -> Tensor:
    scaled = logits.double() / temperature
    return scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], -math.inf).softmax(-1)


@pytest.mark.usefixtures("on_xpu")
@pytest.mark.parametrize("rule", ["match", "target_only"])
def test_trees_follow_the_distribution_where_sglang_gives_the_argmax(
    rule: plugin.Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(4)
    row = torch.randn(len(TREE), VOCAB, generator=g)
    batch, logits = many_requests(temperature=0.7, top_k=10), row.expand(MANY, -1, -1)
    p = [filtered_probs(r, 0.7, 10) for r in row]
    best = p[0].argsort(descending=True)
    ids = torch.tensor([0, int(best[0]), int(best[3]), *p[1].topk(2).indices, 5, 6]).expand(MANY, -1).contiguous()

    def ours(*arguments: Any) -> Any:
        return verifier.verified(rule, eagle_utils.eagle_sample.__wrapped__, *arguments)

    predict, lens, index = ours(eagle_input(ids), batch, output(logits.clone()))
    first = predict[index[:, 0].long()]
    assert check_distribution(first, p[0]) < LIMIT
    children = p[0][ids[0, 1:3]].sum()
    rate, spread = (lens > 1).double().mean(), math.sqrt(children * (1 - children) / MANY)
    assert abs(rate - children) < LIMIT * spread  # both rules accept with the mass of the children
    is_left = index[:, 1] % len(TREE) == 1
    assert check_distribution(predict[index[is_left, 1].long()], p[1]) < LIMIT

    few = 100  # an interpreted kernel takes its time
    batch = Batch(batch.reqs[:few], batch.seq_lens[:few])
    own, _, _ = eagle_utils.eagle_sample.__wrapped__(eagle_input(ids[:few]), batch, output(logits[:few].clone()))
    assert check_distribution(own[:: len(TREE)], p[0]) > 4 * LIMIT  # the argmax, whatever the temperature


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_drawn_chains_follow_the_distribution_and_keep_the_overlap(rule: plugin.Rule) -> None:
    g = torch.Generator().manual_seed(5)
    target, draft = torch.randn(3, VOCAB, generator=g), torch.randn(2, VOCAB, generator=g).softmax(-1)
    batch, p = many_requests(temperature=1.2, top_k=12), [filtered_probs(r, 1.2, 12) for r in target]
    drafts = torch.stack([torch.multinomial(q, MANY, replacement=True, generator=g) for q in draft], 1)
    ids = torch.nn.functional.pad(drafts, (1, 0))
    chain = eagle_input(ids, [-1, 0, 1], topk=1, draft_probs=draft.expand(MANY, -1, -1).contiguous())
    with (
        get_context().override_server_args(
            random_seed=5, speculative_use_rejection_sampling=True, speculative_use_block_verification=rule == "block"
        ),
        get_parallel().override(tp_group=SimpleNamespace(world_size=1, device_group=None)),
    ):
        arguments = (chain, batch, output(target.expand(MANY, -1, -1).clone()))
        predict, lens, index = verifier.verified(rule, lambda *a, **k: pytest.fail("left"), *arguments)
    assert check_distribution(predict[index[:, 0].long()], p[0]) < LIMIT
    overlap = torch.minimum(p[0], draft[0].double()).sum()
    if rule == "ratio":  # block accepts the first draft by what it knows of the second
        assert check_distribution(predict[index[index[:, 1] >= 0, 1].long()], p[1]) < LIMIT
        assert abs((lens > 1).double().mean() - overlap) < LIMIT * math.sqrt(overlap * (1 - overlap) / MANY)
    else:  # block keeps at least as much
        assert (lens > 1).double().mean() > overlap - LIMIT * math.sqrt(overlap * (1 - overlap) / MANY)


def test_ranks_take_the_results_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    rank = SimpleNamespace(world_size=2, broadcast=lambda x, src: x.fill_(src + 40))
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(tp_group=rank))
    results = verify(eagle_input(torch.arange(7).repeat(6, 1)), Batch(several()), torch.zeros(6, 7, VOCAB))
    assert all((result == 40).all() for result in results)


class Forbid(BaseGrammarObject):
    """A grammar that allows even ids."""

    def apply_vocab_mask(self, logits: Tensor, vocab_mask: Tensor) -> None:
        logits.masked_fill_(vocab_mask, -math.inf)


@pytest.mark.usefixtures("on_xpu")
def test_biases_and_grammars_reach_the_logits_as_in_sglang() -> None:
    g = torch.Generator().manual_seed(6)
    reqs = [request("a", temperature=0.0, logit_bias={"3": 4.0, "5": -2.0}), request("b"), request("c")]
    batch = Batch(reqs)
    logits = torch.randn(3, len(TREE), VOCAB, generator=g)
    ids = torch.stack([torch.randperm(VOCAB, generator=g)[: len(TREE)] for _ in range(3)])
    grammar = GrammarMask(Forbid(), (torch.arange(VOCAB) % 2 == 1).expand(3 * len(TREE), -1))
    mine, their = output(logits.clone()), output(logits.clone())
    predict, _, index = eagle_utils.eagle_sample(eagle_input(ids), batch, mine, grammar)
    eagle_utils.eagle_sample.__wrapped__(eagle_input(ids), batch, their, grammar)
    assert torch.equal(mine.next_token_logits, their.next_token_logits)
    assert not (predict % 2).any() and (predict[index[:, 0].long()] % 2 == 0).all()


def penalized() -> list[SimpleNamespace]:
    """Requests with every penalty, alone and together, of several lengths, and one without."""
    reqs = [
        request("a", frequency_penalty=0.5),
        request("b", presence_penalty=-0.3, repetition_penalty=1.4),
        request("c", frequency_penalty=0.7, presence_penalty=0.9, repetition_penalty=0.8),
        request("d", stop_token_ids=[4, 9]),
        request("e"),
    ]
    reqs[3].sampling_params.min_new_tokens = 4  # normalizing it would need a tokenizer
    for i, one in enumerate(reqs):
        one.output_ids = [3, 3, 7, 11, 3][i:]
        one.eos_token_ids, one.tokenizer = {2}, SimpleNamespace(additional_stop_token_ids={5}, eos_token_id=2)
    return reqs


def decoded(one: SimpleNamespace, ids: list[int], row: Tensor) -> Tensor:
    """Logits of plain decoding behind these tokens: SGLang's own penalizers, fed token by token."""
    batch = Batch([SimpleNamespace(**vars(one))])  # it starts again, the request does not
    info = SamplingBatchInfo.from_schedule_batch(batch, VOCAB)
    for token in ids:
        info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor([token]))
    row = row.clone()[None]
    info.copy_for_forward().apply_logits_bias(row)
    return row[0]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_penalties_at_a_node_are_those_of_plain_decoding(is_late: bool, again: bool) -> None:
    """Also where the host does not have the last step's tokens yet, and in the second step."""
    g = torch.Generator().manual_seed(10)
    reqs = penalized()
    batch = Batch(reqs, torch.tensor([1 + len(one.output_ids) for one in reqs]))
    late = [1] * len(reqs)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(1 + again):
            logits, texts = torch.randn(len(reqs), len(TREE), VOCAB, generator=g), [one.output_ids for one in reqs]
            ids = plausible_tree(batch, logits, g)
            ids[:, 6] = ids[:, 0] = torch.tensor([text[-1] for text in texts])  # drafts repeat the text
            if is_late:
                for one, missing in zip(reqs, late, strict=True):
                    one.output_ids = one.output_ids[:-missing]
            made = output(logits.clone())
            predict, lens, index = eagle_utils.eagle_sample(eagle_input(ids), batch, made)
            edited = made.next_token_logits.view_as(logits)
            for b, one in enumerate(reqs):
                for node in range(len(TREE)):
                    path, at = [], node
                    while at:
                        path.insert(0, int(ids[b, at]))
                        at = TREE[at]
                    wanted = decoded(one, texts[b] + path, logits[b, node])
                    torch.testing.assert_close(edited[b, node], wanted, rtol=0, atol=1e-6)
                one.output_ids = texts[b] + [int(predict[row]) for row in index[b] if row >= 0]
            batch.seq_lens, late = batch.seq_lens + lens, lens.tolist()
            assert max(late) > 1


def test_a_request_that_starts_again_has_no_step() -> None:
    reqs = penalized()
    for one in reqs:
        one.specdec_step = torch.tensor([1, 2])
    Batch(reqs)
    assert all(one.specdec_step is None for one in reqs)


def test_log_probabilities_are_those_of_the_emitted_tokens() -> None:
    g = torch.Generator().manual_seed(7)
    batch, logits = Batch(several()), torch.randn(6, len(TREE), VOCAB, generator=g)
    ids = plausible_tree(batch, logits, g)
    made = output(logits.clone())
    predict, lens, index = eagle_utils.eagle_sample(eagle_input(ids), batch, made)
    compute_spec_logprobs(batch, made, predict, accept_index=index)
    temperature = torch.tensor([0.8, 1.0, 1.3, 1.0, 0.9, 1.0])  # of a greedy request 1, as SGLang has it
    exact = (logits.double() / temperature[:, None, None]).log_softmax(-1).view(-1, VOCAB)
    for b in range(6):
        for slot in range(int(lens[b])):
            row = int(index[b, slot])
            assert made.next_token_logprobs[b, slot] == pytest.approx(float(exact[row, int(predict[row])]), abs=1e-5)

    made = output(logits[:, 0].clone())
    ids = Sampler()(made, batch.sampling_info, True, [2] * 6, [None] * 6, batch.seq_lens)
    wanted = exact.view(6, -1, VOCAB)[:, 0].gather(1, ids.long()[:, None])[:, 0]
    torch.testing.assert_close(made.next_token_logprobs.double(), wanted, rtol=0, atol=1e-5)
    assert len(made.next_token_top_logprobs_val) == 6


def test_ngram_trees_are_filled_up_with_equal_nodes() -> None:
    """Such a node is its elder twin's, as in SGLang, which looks for the first child of an id."""
    g = torch.Generator().manual_seed(8)
    batch, logits = Batch(several()), torch.randn(6, 6, VOCAB, generator=g)
    first = plain(batch, logits[:, 0], batch.seq_lens).long()
    second = plain(batch, logits[:, 1], batch.seq_lens + 1).long()
    parents = torch.tensor([-1, 0, 1, 0, 0, 0]).repeat(6, 1)
    other = (first + 1) % VOCAB
    ids = torch.stack([torch.zeros_like(first), first, second, other, other, first], 1)
    tree = NgramVerifyInput(
        draft_token=ids.flatten(), custom_mask=torch.ones(1), positions=None, draft_token_num=6, **links(parents)
    )
    third = plain(batch, logits[:, 2], batch.seq_lens + 2).long()
    walks = [([0, 1, 2], [int(a), int(b), int(c)]) for a, b, c in zip(first, second, third, strict=True)]
    check_walks(verify(tree, batch, logits.clone()), walks, 6)


def test_copies_of_a_seeded_request_have_seeds_of_their_own() -> None:
    """As SGLang makes them: one that fills the cache, then n with shared parameters; each manager's call is a task."""

    def seeds(n: int, seed: int | None, times: int) -> list[int | None]:
        shared, found = SamplingParams(n=n, sampling_seed=seed), []
        for params in [copy.copy(shared)] + [shared] * times:
            sent = SimpleNamespace(sampling_params=params)
            requests.numbered(None, sent)
            found.append(sent.sampling_params.sampling_seed)
        assert shared.sampling_seed == seed
        return found

    assert seeds(3, 7, 3) == [7, 7, 8, 9]
    assert seeds(2, 2**63 - 1, 2) == [2**63 - 1, 2**63 - 1, -(2**63)]
    assert seeds(1, 7, 1) == [7, 7] and seeds(2, None, 2) == [None] * 3


def test_a_row_of_nan_gives_an_id_and_harms_nobody() -> None:
    g = torch.Generator().manual_seed(9)
    batch, logits = Batch(several()), torch.randn(6, len(TREE), VOCAB, generator=g)
    ids = plausible_tree(batch, logits, g)
    whole = verify(eagle_input(ids), batch, logits.clone())
    logits[2] = math.nan
    predict, lens, index = verify(eagle_input(ids), batch, logits.clone())
    others = [0, 1, 3, 4, 5]
    assert int(lens[2]) == 1 and int(predict[2 * len(TREE)]) == 0
    assert torch.equal(lens[others], whole[1][others]) and torch.equal(index[others], whole[2][others])
    assert plain(batch, logits[:, 0], batch.seq_lens)[2] == 0


def left(reason: str, caplog: pytest.LogCaptureFixture, call: Any) -> None:
    """The call is SGLang's, twice, with what it was given; the reason is counted twice and logged once."""
    with caplog.at_level(logging.WARNING, logger="sglang.srt.specdec_kernels"):
        assert call() == call() == "SGLang's"
    assert dict(fallbacks) == {reason: 2}
    assert [r.getMessage() for r in caplog.records if "left to SGLang" in r.getMessage()] == [
        f"specdec_kernels: batches with {reason} are left to SGLang's own code"
    ]
    fallbacks.clear()


@pytest.mark.parametrize(
    ("rule", "server", "change", "more", "reason"),
    [
        ("match", {}, {"specdec_seed": None}, {}, requests.NO_SEEDS),
        ("match", {}, {"has_watermark_candidates": True}, {"watermark_state": object()}, "watermarks"),
        ("match", {}, {"has_custom_logit_processor": True}, {}, "custom logits processors and drafts"),
        ("match", {"speculative_accept_threshold_single": 0.5}, {}, {}, "acceptance thresholds below 1"),
        ("target_only", {"speculative_use_rejection_sampling": True}, {}, {},
         "drafts drawn at random, under target_only"),
        ("ratio", {}, {}, {}, "trees, under ratio"),
    ],
)  # fmt: skip
def test_what_is_not_served_stays_with_sglang(
    rule: plugin.Rule, server: dict[str, Any], change: dict[str, Any], more: dict[str, Any], reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    batch, tree, made = Batch(several()), eagle_input(torch.zeros(6, 7).long()), output(torch.zeros(6, 7, VOCAB))
    for name, value in change.items():
        setattr(batch.sampling_info, name, value)

    def theirs(*arguments: Any, **keywords: Any) -> str:
        assert arguments == (tree, batch, made, None) and keywords == more
        return "SGLang's"

    with get_context().override_server_args(random_seed=5, **server):
        left(reason, caplog, lambda: verifier.verified(rule, theirs, tree, batch, made, None, **more))


def test_simulated_acceptance_stays_with_sglang(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.speculative import spec_utils

    monkeypatch.setattr(spec_utils, "SIMULATE_ACC_LEN", 2.0)
    batch, tree = Batch(several()), eagle_input(torch.zeros(6, 7).long())
    call = (tree, batch, output(torch.zeros(6, 7, VOCAB)))
    left("simulated acceptance", caplog, lambda: verifier.verified("match", lambda *a: "SGLang's", *call))


@pytest.mark.parametrize(
    ("change", "named", "reason"),
    [
        ({"sampling_mask_batch_indices": torch.tensor([0])}, {}, "sampling masks"),
        ({}, {"logprob_logits": torch.zeros(6, VOCAB)}, "watermarks"),
        ({"specdec_seed": None}, {}, requests.NO_SEEDS),
    ],
)
def test_sampling_that_is_not_served_stays_with_sglang(
    change: dict[str, Any], named: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    from specdec_sglang import sampler

    batch, own = Batch(several()), Sampler()
    for name, value in change.items():
        setattr(batch.sampling_info, name, value)
    call = (own, output(torch.zeros(6, VOCAB)), batch.sampling_info, False, [], [], batch.seq_lens)

    def theirs(*arguments: Any, **keywords: Any) -> str:
        assert all(a is b for a, b in zip(arguments, call, strict=True)) and keywords == named
        return "SGLang's"

    left(reason, caplog, lambda: sampler.sampled(theirs, *call, **named))


def test_the_rule_is_one_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_SGLANG_RULE", "target_only")
    assert plugin.rule() == "target_only"
    monkeypatch.setenv("SPECDEC_SGLANG_RULE", "typical")
    with pytest.raises(SystemExit, match="SPECDEC_SGLANG_RULE must be one of match, target_only, ratio, block"):
        plugin.rule()
