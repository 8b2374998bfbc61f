"""Calls with a sharded vocabulary: one rank's answer, and those of forked processes that hold a part each."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cases import FILTERS, RULES, ChainCase, make_chain, make_rng, mixed_sampling
from edit_cases import make_edits
from sparse_cases import sparse_chain, sparse_tree
from torch import Tensor
from tree_cases import TREE_RULES, TreeCase, distinct_tokens, make_tree

from specdec_kernels import (
    ResidualProbs,
    Sampling,
    SparseRows,
    acceptance_ratios,
    batch_sd,
    edit_rows,
    residual_probs,
    residual_sample,
    sample,
    token_logprobs,
    use_backend,
    verify_chain,
    verify_tree,
)


class Call(NamedTuple):
    """One call of a public function; tensors named in `sharded` are cut along their last dimension."""

    name: str
    function: Callable[..., Any]
    sharded: dict[str, Tensor]
    keywords: dict[str, Any]
    vocab: int
    exchanges: int  # allowed
    parts: dict[str, Any] = {}  # noqa: RUF012 - keywords of the sharded call alone
    token_map: Tensor | None = None  # rising
    edited: Callable[[int, int], dict[str, Any]] | None = None  # keywords of the ids first .. end - 1

    @property
    def rows(self) -> int:
        """Rows of logits in the call."""
        return sum(rows[..., 0].numel() for rows in self.sharded.values())

    def one_rank(self) -> Any:
        with use_backend("reference"):
            mapped = {} if self.token_map is None else {"token_map": self.token_map}
            edited = self.edited(0, self.vocab) if self.edited else {}
            return self.function(**self.sharded, **self.keywords, **mapped, **edited)

    def of_rank(self, group: Any) -> Any:
        cuts = offsets(self.vocab, group.size())
        first, end = cuts[group.rank()], cuts[group.rank() + 1]
        mine = {name: rows[..., first:end].contiguous() for name, rows in self.sharded.items()}
        if self.token_map is not None:  # the last rank has the columns without a target id
            last = end if end < self.vocab else 2 * self.vocab
            columns = ((self.token_map >= first) & (self.token_map < last)).nonzero()[:, 0]
            mine["draft_logits"] = self.sharded["draft_logits"][..., columns].contiguous()
            mine["token_map"] = self.token_map[columns]
        edited = self.edited(first, end) if self.edited else {}
        return self.function(**mine, **self.keywords, **self.parts, **edited, group=group, vocab_offsets=cuts)


def offsets(vocab: int, ranks: int) -> list[int]:
    """Uneven shards: the first rank holds most, none is empty."""
    g = torch.Generator().manual_seed(vocab + ranks)
    inner = torch.randperm(vocab // 2 - 1, generator=g)[: ranks - 1] + vocab // 2
    return [0, *sorted(inner.tolist()), vocab]


def allowed_exchanges(filters: str) -> int:
    return 2 if filters in ("none", "temperature") else 4


def spoil(rows: Tensor) -> None:
    """A few bad and odd rows."""
    flat = rows.flatten(0, -2)
    flat[1, 3] = float("nan")
    flat[5] = -torch.inf
    flat[8, : rows.shape[-1] // 2 + 1] = -torch.inf
    flat[11] = flat[11].round()


def chain_calls(vocab: int, batch: int, filters: str, seed: int, logprobs: str | None = None) -> list[Call]:
    calls = []
    for rule in RULES:
        for drafts in ("model", "stats", "point") if rule in ("ratio", "block") else ("point",):
            if drafts == "stats" and rule != "ratio":
                continue
            case = make_chain(batch, 3, vocab, rule=rule, filters=filters, drafts=drafts, ragged=True, greedy_every=5,
                              seed=seed)  # fmt: skip
            spoil(case.target_logits)
            sharded = {"target_logits": case.target_logits}
            if case.draft_logits is not None:
                case.draft_logits[3, 1, 2] = float("nan")
                sharded["draft_logits"] = case.draft_logits
            ids = case.draft_ids.clone()
            ids[4, 0], ids[6, 0] = vocab, -2
            keywords = {**case.keywords, "draft_ids": ids, "logprobs": logprobs}
            if rule in ("topm", "distance"):
                keywords |= {"top_m": 3, "max_distance": 2, "min_block": 2}
            budget = allowed_exchanges(filters)
            calls.append(Call(f"{rule} {drafts} {filters}", verify_chain, sharded, keywords, vocab, budget))
    return calls


def tree_calls(vocab: int, batch: int, filters: str, seed: int, logprobs: str | None = None) -> list[Call]:
    calls = []
    nodes = 9
    for rule in TREE_RULES:
        for drafts in ("model", "point") if rule in ("recursive", "traversal", "greedy_multi_draft") else ("point",):
            case = make_tree(batch, nodes, vocab, max_depth=3, rule=rule, filters=filters, drafts=drafts, ragged=True,
                             greedy_every=5, seed=seed)  # fmt: skip
            spoil(case.target_logits)
            sharded = {"target_logits": case.target_logits}
            if case.draft_logits is not None:
                case.draft_logits[3, 0, 2] = float("nan")
                sharded["draft_logits"] = case.draft_logits
            ids = case.token_ids.clone()
            ids[4, 1], ids[6, 2] = vocab, -2
            keywords = {**case.keywords, "token_ids": ids, "parents": case.parents, "logprobs": logprobs}
            budget = allowed_exchanges(filters)
            parts: dict[str, Any] = {}
            if rule == "recursive":
                parts, budget = {"max_children": nodes - 1}, budget + nodes - 2
            if rule == "traversal":
                budget += nodes - 1
            calls.append(Call(f"{rule} {drafts} {filters}", verify_tree, sharded, keywords, vocab, budget, parts))
    return calls


def sample_calls(vocab: int, batch: int, filters: str, seed: int, logprobs: str = "processed") -> list[Call]:
    g = torch.Generator().manual_seed(seed)
    rows = 2.5 * torch.randn(batch, vocab, generator=g)
    spoil(rows)
    rows[2] *= 1e38  # differences of logits that float32 does not hold
    keywords = {
        "sampling": mixed_sampling(batch, FILTERS[filters], 5),
        "rng": make_rng(batch, seed),
        "purpose": "draft",
        "num_samples": 3,
        "exclude_ids": torch.randint(-1, vocab, (batch, 2), generator=g),
        "lane": 2,
        "logprobs": logprobs,
    }
    budget = allowed_exchanges(filters)
    return [Call(f"sample {filters}", sample, {"logits": rows}, keywords, vocab, budget)]


def logprob_calls(vocab: int, batch: int, filters: str) -> list[Call]:
    """Tokens of every rank, none, and bad ones; ties across ranks; more ids than some ranks hold."""
    drawn = sample_calls(vocab, batch, filters, 3)[0]
    g = torch.Generator().manual_seed(vocab)
    ids = torch.randint(0, vocab, (batch,), generator=g)
    ids[1::5], ids[2], ids[4] = -1, vocab, -2
    bits = torch.randint(-(2**31), 2**31, (batch, (vocab + 31) // 32), generator=g).int()
    edits = make_edits(batch, vocab, seed=vocab)

    def edited(first: int, end: int) -> dict[str, Any]:
        return {"edits": edit_rows(edits, vocab=end - first, first_id=first)}

    raw = {"token_ids": ids, "top": min(vocab + 3, 128)}
    processed = {**raw, "sampling": drawn.keywords["sampling"], "logprobs": "processed", "allowed": bits}
    budget = allowed_exchanges(filters)
    return [
        Call(f"token_logprobs raw {filters}", token_logprobs, drawn.sharded, raw, vocab, 2),
        Call(f"token_logprobs {filters}", token_logprobs, drawn.sharded, processed, vocab, budget, edited=edited),
        Call(f"token_logprobs rank {filters}", token_logprobs, drawn.sharded, {**raw, "top": 0}, vocab, 2),
    ]


def extreme_call(vocab: int, seed: int) -> Call:
    """Temperature 3e-38: log-weights overflow where a logit lies more than 10 below the row's maximum."""
    g = torch.Generator().manual_seed(seed)
    rows = 6 * torch.randn(12, vocab, generator=g)
    keywords = {
        "sampling": Sampling.full(12, temperature=3e-38),
        "rng": make_rng(12, seed),
        "purpose": "draft",
        "num_samples": 64,
        "exclude_ids": rows.argmax(1, keepdim=True),
    }
    return Call("temperature 3e-38", sample, {"logits": rows}, keywords, vocab, 2)


def hard_rows_call(vocab: int, batch: int, seed: int) -> Call:
    """Every row its own filters, off, mild and absurd; ties, plateaus and wide ranges."""
    g = torch.Generator().manual_seed(seed)

    def pick(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (batch,), generator=g)]

    spread = pick([0.0, 0.01, 1.0, 5.0, 300.0], torch.float32)[:, None]
    rows = spread * torch.randn(batch, vocab, generator=g)
    rows[::3] = rows[::3].round()
    rows[1::5] = rows[1::5].sort(dim=1, descending=True).values  # one rank has all that counts
    rows[::7, vocab // 3 :] = rows[::7, :1]
    rows[::11] = rows[::11].where(torch.rand(rows[::11].shape, generator=g) < 0.1, -torch.inf)
    sampling = Sampling(
        pick([0.3, 1.0, 1.7], torch.float32),
        pick([0, 1, 2, 5, vocab // 3, vocab - 1, vocab, 10**6], torch.int32),
        pick([-1.0, 0.0, 0.1, 0.5, 0.9, 0.999, 1 - 2.0**-24, 1.0], torch.float32),
        pick([0.0, 0.0, 1e-6, 0.05, 0.9, 1.0, 2.0], torch.float32),
    )
    keywords = {"sampling": sampling, "rng": make_rng(batch, seed), "purpose": "residual", "num_samples": 2}
    return Call("hard rows", sample, {"logits": rows}, keywords, vocab, 4)


def mapped_call(vocab: int, batch: int, filters: str) -> Call:
    """A drafter of half the vocabulary, with columns that have no target id."""
    case = make_chain(batch, 3, vocab, filters=filters)
    token_map = torch.cat([torch.arange(0, vocab, 2), torch.tensor([vocab, vocab + 3])]).int()
    sharded = {"target_logits": case.target_logits, "draft_logits": case.draft_logits[..., : len(token_map)]}
    ids = token_map[case.draft_ids % (len(token_map) - 2)].long()
    keywords = {**case.keywords, "draft_ids": ids}
    return Call(f"token_map {filters}", verify_chain, sharded, keywords, vocab, 4, token_map=token_map)


def layout_calls(vocab: int, batch: int, rule: str) -> list[Call]:
    """Flat drafts, grammar bits, half precision."""
    calls = []
    for flat in (False, True):
        case = make_chain(batch, 3, vocab, rule=rule, filters="all", ragged=True, flat=flat, dtype=torch.bfloat16)
        rows = case.target_logits.flatten(0, -2).shape[0]
        bits = torch.randint(-(2**31), 2**31, (rows, (vocab + 31) // 32), generator=torch.Generator().manual_seed(3))
        keywords = {**case.keywords, "draft_ids": case.draft_ids, "allowed": bits.int(), "logprobs": "raw"}
        sharded = {"target_logits": case.target_logits, "draft_logits": case.draft_logits}
        calls.append(Call(f"{rule} flat {flat}", verify_chain, sharded, keywords, vocab, 4))
    keywords = {**keywords, "cu_draft": torch.tensor([0, 9, 3, *[3] * (batch - 2)], dtype=torch.int32)}
    return [*calls, calls[-1]._replace(name=f"{rule} bad cu_draft", keywords=keywords)]


def edited_calls(vocab: int, batch: int, filters: str) -> list[Call]:
    """Penalties, biases and bans; every rank lists those of its own ids."""
    edits = make_edits(batch, vocab, seed=vocab)
    chain, tree = chain_calls(vocab, batch, filters, 0)[0], tree_calls(vocab, batch, filters, 0)[-1]

    def rows(first: int, end: int, *args: Any, **named: Any) -> dict[str, Any]:
        return {"edits": edit_rows(edits, *args, vocab=end - first, first_id=first, **named)}

    def of_chain(first: int, end: int) -> dict[str, Any]:
        return rows(first, end, chain.keywords["draft_ids"])

    def of_tree(first: int, end: int) -> dict[str, Any]:
        return rows(first, end, tree.keywords["token_ids"], parents=tree.keywords["parents"])

    drawn = sample_calls(vocab, batch, filters, 0)[0]

    def of_requests(first: int, end: int) -> dict[str, Any]:
        return {"edits": edits}

    every = ((chain, of_chain), (tree, of_tree), (drawn, rows), (chain, of_requests), (tree, of_requests))
    return [call._replace(name=f"{edited.__name__} edits {call.name}", edited=edited) for call, edited in every]


def ratio_calls(vocab: int, batch: int, filters: str) -> list[Call]:
    """acceptance_ratios: draft rows, point masses, a smaller drafter; bad rows and ids among them."""
    calls = []
    for case in (chain_calls(vocab, batch, filters, 0)[i] for i in (0, 2)):
        keywords = {name: case.keywords[name] for name in ("draft_ids", "sampling")}
        if "draft_logits" in case.sharded:
            keywords["draft_sampling"] = case.keywords["draft_sampling"]
        calls.append(case._replace(name=f"ratios {case.name}", function=acceptance_ratios, keywords=keywords))
    mapped = mapped_call(vocab, batch, filters)
    keywords = {name: mapped.keywords[name] for name in ("draft_ids", "sampling", "draft_sampling")}
    return [*calls, mapped._replace(name="ratios token_map", function=acceptance_ratios, keywords=keywords)]


def whole_probs(*, group: Any = None, **keywords: Any) -> ResidualProbs:
    """residual_probs with the ranks' columns put together."""
    result = residual_probs(group=group, **keywords)
    if group is None:
        return result
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, result.probs, group=group)
    return result._replace(probs=torch.cat(parts, 1))


def residual_calls(vocab: int, batch: int, filters: str) -> list[Call]:
    """residual_sample and residual_probs: draft rows, point masses, a smaller drafter; empty and bad rows, too."""
    g = torch.Generator().manual_seed(vocab)
    target = 2.5 * torch.randn(batch, vocab, generator=g)
    draft = target + torch.randn(batch, vocab, generator=g)
    draft[7] = target[7]  # nothing is left
    spoil(target)
    draft[3, 2] = float("nan")
    ids = torch.randint(-2, vocab + 1, (batch,), generator=g)
    keywords: dict[str, Any] = {
        "a": torch.rand(batch, generator=g) + 0.5, "b": torch.rand(batch, generator=g), "draft_ids": ids,
        "sampling": mixed_sampling(batch, FILTERS[filters], 5),
    }  # fmt: skip
    keywords["a"][7] = keywords["b"][7] = keywords["b"][2] = 1.0
    drafted = keywords | {"draft_sampling": mixed_sampling(batch, FILTERS[filters], 3)}
    both = {"target_logits": target, "draft_logits": draft}
    budget = allowed_exchanges(filters)
    token_map = torch.tensor([v for v in range(vocab) if v % 7 != 3], dtype=torch.int32)
    smaller = both | {"draft_logits": draft[:, token_map.long()].contiguous()}
    calls = []
    for name, function, more in (
        ("residual_sample", residual_sample, {"rng": make_rng(batch, 5)}),
        ("residual_probs", whole_probs, {}),
    ):
        calls += [
            Call(f"{name} rows", function, both, drafted | more, vocab, budget),
            Call(f"{name} point", function, {"target_logits": target}, keywords | more, vocab, budget),
            Call(f"{name} token_map", function, smaller, drafted | more, vocab, budget, {}, token_map),
        ]
    return calls


def sparse_calls(vocab: int, batch: int) -> list[Call]:
    """Draft rows of candidates: every rank has all of them, by ids of the whole vocabulary; some rows are bad."""
    calls = []
    for rule in ("ratio", "block"):
        case = make_chain(batch, 3, vocab, rule=rule, filters="temperature", ragged=True, greedy_every=5)
        calls.append(_sparse_call(rule, verify_chain, case, {"draft_ids": case.draft_ids}, sparse_chain(case, 7)))
    for rule in ("recursive", "traversal", "greedy_multi_draft"):
        tree = make_tree(batch, 7, vocab, rule=rule, filters="temperature", greedy_every=5)
        ids = {"token_ids": tree.token_ids, "parents": tree.parents}
        calls.append(_sparse_call(rule, verify_tree, tree, ids, sparse_tree(tree, 12)))
    return calls


def _sparse_call(
    rule: str, op: Callable[..., Any], case: ChainCase | TreeCase, ids: dict[str, Tensor], rows: SparseRows
) -> Call:
    rows.ids[3, 0, 0] = case.target_logits.shape[-1]  # no id
    rows.logsumexp[6, 0] += 0.1
    keywords = {**case.keywords, **ids, "draft_logits": rows, "logprobs": "processed"}
    vocab, exchanges = case.target_logits.shape[-1], 2 + 2 * case.target_logits.shape[1]
    return Call(f"{rule} candidates", op, {"target_logits": case.target_logits}, keywords, vocab, exchanges)


def branch_call(vocab: int, batch: int, seed: int) -> Call:
    """batch_sd: three independent drafts of two tokens, drawn and verified with edits, and listed."""
    g = torch.Generator().manual_seed(seed)
    target = 2.5 * torch.randn(batch, 7, vocab, generator=g)
    draft = target + 0.7 * torch.randn(batch, 7, vocab, generator=g)
    keywords = {
        "draft_ids": draft[:, :6].softmax(-1).flatten(0, 1).multinomial(1, generator=g).view(batch, 3, 2),
        "sampling": Sampling(),
        "draft_sampling": Sampling(),
        "rng": make_rng(batch, seed),
        "logprobs": "raw",
        "top": 3,
    }
    edits = make_edits(batch, vocab, seed=vocab)
    sharded = {"target_logits": target, "draft_logits": draft}
    edited = lambda first, end: {"edits": edits, "draft_edits": edits}  # noqa: E731
    return Call("batch_sd", batch_sd, sharded, keywords, vocab, 6, edited=edited)


def wide_call(vocab: int, batch: int, seed: int) -> Call:
    """verify_tree, rule recursive: three nodes of two children each, whose second child needs a mass of its own."""
    g = torch.Generator().manual_seed(seed)
    target = torch.randn(batch, 7, vocab, generator=g)
    draft = target + torch.randn(batch, 7, vocab, generator=g)
    parents = torch.tensor([[-1, 0, 0, 1, 1, 3, 3]] * batch)
    keywords = {
        "token_ids": distinct_tokens(parents, draft, g),
        "parents": parents,
        "max_depth": 3,
        "rule": "recursive",
        "sampling": Sampling(),
        "draft_sampling": Sampling(),
        "rng": make_rng(batch, seed),
    }
    sharded = {"target_logits": target, "draft_logits": draft}
    return Call("three nodes of two children", verify_tree, sharded, keywords, vocab, 3, {"max_children": 2})


class Reply(NamedTuple):
    """Result of one call on a rank."""

    results: tuple[Tensor | None, ...]
    exchanges: int
    sent: int  # bytes


def _work(rank: int, ranks: int, store: str, calls: list[Call], replies: Any) -> None:
    torch.set_num_threads(1)
    counted = [0, 0]
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        collective = getattr(dist, name)

        def count(out: Tensor, message: Tensor, **more: Any) -> Any:
            counted[0] += 1
            counted[1] += message.nbytes
            return collective(out, message, **more)

        setattr(dist, name, count)
        done = []
        for call in calls:
            counted[:] = [0, 0]
            result = call.of_rank(dist.group.WORLD)
            arrays = tuple(None if part is None else part.numpy() for part in result)
            done.append((arrays, *counted))
        replies.put((rank, done, None))
        dist.destroy_process_group()
    except Exception:
        replies.put((rank, None, traceback.format_exc()))


def run_on_ranks(ranks: int, calls: list[Call]) -> list[list[Reply]]:
    """Replies to every call, [rank][call]; the calls travel by fork, so they are made once."""
    context = multiprocessing.get_context("fork")
    replies = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        workers = [context.Process(target=_work, args=(r, ranks, store, calls, replies)) for r in range(ranks)]
        for worker in workers:
            worker.start()
        got = {}
        for _ in workers:
            rank, done, error = replies.get()
            if error is not None:
                for worker in workers:
                    worker.terminate()
                raise AssertionError(f"rank {rank}: {error}")
            got[rank] = done
        for worker in workers:
            worker.join()
    return [
        [
            Reply(tuple(None if a is None else torch.from_numpy(a) for a in arrays), exchanges, sent)
            for arrays, exchanges, sent in got[rank]
        ]
        for rank in range(ranks)
    ]
