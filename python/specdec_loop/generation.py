"""The decoding loop: draft, target forward, verify, commit, repeat. `generate` is how an engine uses the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from specdec_kernels import (
    ChainResult,
    ChainRule,
    Edits,
    Logprobs,
    Sampling,
    TreeResult,
    TreeRule,
    verify_chain,
    verify_tree,
)

from .attention import forward
from .draft_length import FixedLength
from .drafters import Draft, Drafter, NoDrafter, Outcome
from .drafters.base import CHAIN_RULES, MOST_NODES, kept_rows
from .edits import TextEdits
from .grammar import Grammar, TextGrammars
from .heads.layers import GROWING
from .linear import small_batch_linear
from .prefix_cache import PrefixCache
from .sequences import Sequences
from .statistics import Clock, RequestStatistics
from .stops import Stops
from .tree_cache import TreeCache, check_model

Streamer = Callable[[int, list[int], int], None]


class Hooks:
    """Hooks inside `generate`; these do nothing."""

    def distribution(self, sequences: Sequences, draft: Draft, logits: Tensor) -> Tensor:
        """Change the target's logits, ``[batch, draft + 1 or nodes, vocab]``, before they are verified.

        Row i of a chain follows the text and i drafts; a tree's rows follow the paths to its nodes.
        """
        return logits

    def prompts(self) -> Tensor | None:
        """Ids ``[batch, columns]``, -1 padded, that penalties count as prompts; None: the prompts."""
        return None

    def grown(self, sequences: Sequences, path: Tensor | None) -> None:
        """Look at the sequences and a tree's accepted path after each step; `Sequences.finish` complete ones."""


PIECE = 256  # tokens of prompts in one forward where layers keep their inputs until a commit


@dataclass(frozen=True)
class Generation:
    """Result of `generate`.

    Attributes:
        tokens: of each request, without the prompt; a stop is included.
        logprobs: of these tokens; None unless asked for.
        status: of each request, 0 or the bits of docs/design.md, section Bad input.
        statistics: of each request.
        seconds: of the whole batch, in phases draft, networks (the drafter's own forwards), target, verify and commit.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]] | None
    status: list[int]
    statistics: list[RequestStatistics]
    seconds: dict[str, float]


@torch.inference_mode()
def generate(
    target: Any,
    drafter: Drafter | None,
    input_ids: Tensor | Sequence[Sequence[int]],
    attention_mask: Tensor | None = None,
    *,
    sampling: Sampling,
    seed: int | Tensor = 0,
    rule: ChainRule | TreeRule = "match",
    rule_options: Mapping[str, Any] | None = None,
    max_new_tokens: int = 128,
    draft_length: int | FixedLength = 4,
    stop: Sequence[int | Sequence[int] | str] | None = None,
    tokenizer: Any = None,
    logprobs: Logprobs | None = None,
    past: PrefixCache | None = None,
    streamer: Streamer | None = None,
    edits: Edits | None = None,
    grammar: Grammar | Sequence[Grammar | None] | None = None,
    hooks: Hooks | None = None,
) -> Generation:
    """Continue a batch of prompts by speculative decoding.

    Under rule ``match`` the text is that of plain decoding with the same seed, whatever the drafter; under ``greedy``
    it is greedy decoding; under ``ratio``, ``block``, ``recursive`` and ``traversal`` it follows the target's
    distribution. Requests are independent: a text does not depend on the others of its batch, but through rounding in
    the model, and where drafts end by what is measured or promised of all of them: then its distribution does not.

    Args:
        target: a transformers causal LM that `TreeCache` serves.
        drafter: None: plain decoding.
        input_ids: ``[batch, length]``, or a list of prompts; each of at least one token.
        attention_mask: ``[batch, length]``: 1 at the tokens of a prompt, 0 at padding on either side.
        sampling: of each request; temperature 0 is greedy.
        seed: int64 ``[batch]``; or an int, to which each request adds its number.
        rule: of `verify_chain`, or of `verify_tree` where the drafter drafts trees.
        rule_options: thresholds of the rule under the verifier's names: typical_epsilon, top_m, min_block, ...
        max_new_tokens: most tokens of a continuation.
        draft_length: most drafts of a step, or an `AdaptiveLength`.
        stop: token ids, token sequences and strings that end a text, or one string; None: the model's eos.
        tokenizer: of the target, for stop strings.
        logprobs: ``"processed"`` (after temperature and filters) or ``"raw"``.
        past: rows of an earlier call's texts; what a prompt has in common with them is not run again, unless the
            drafter reads the target's features.
        streamer: called after each step with the number of a request, its new tokens, and how many of these, the first
            ones, were accepted drafts.
        edits: biases, penalties and bans of each request, exact at every drafted position; `min_tokens` counts new
            tokens, and `counts`, `slots` and `tail` are kept by the loop. Drafts are drawn without them.
        grammar: of all requests, or of each; a text that ends before its limit is complete. See `GrammarCompiler`.
        hooks: see `Hooks`.

    Returns:
        Generation.

    Raises:
        ValueError: a wrong argument.
        RuntimeError: the drafter failed; says in which step, and why. Or a grammar did.

    Example:
        >>> from specdec_kernels import Sampling
        >>> from specdec_loop import PromptLookup, generate
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes))
        >>> prompts, sampling = [[5, 6, 7], [8]], Sampling.full(2, temperature=0.8)
        >>> plain = generate(model, None, prompts, sampling=sampling, max_new_tokens=20, stop=())
        >>> fast = generate(model, PromptLookup(), prompts, sampling=sampling, max_new_tokens=20, stop=())
        >>> fast.tokens == plain.tokens
        True
    """
    drafter = NoDrafter() if drafter is None else drafter
    hooks = Hooks() if hooks is None else hooks
    lengths = FixedLength(draft_length) if isinstance(draft_length, int) else draft_length
    _check(target, drafter, lengths, rule, max_new_tokens)
    _check_options(past, edits, streamer)
    with small_batch_linear(target, *drafter.networks):
        columns = overhang(drafter, lengths)
        text = _begin_text(target, input_ids, attention_mask, seed, max_new_tokens, stop, tokenizer, columns)
        past = PrefixCache(text.tokens.shape[1]) if past is None else past
        cache, lacking = past.open(target, text, reuse=not drafter.features)
        grammars = TextGrammars(grammar, text, target.config.get_text_config(decoder=True).vocab_size)
        nothing = NoDrafter().draft(text, 0)
        grammars.begin(*_candidates(nothing))
        logits, hidden = _prefill(target, cache, text, lacking, drafter.features)
        # The first token is drawn as plain decoding draws it; only argmax decoding is argmax decoding from the start.
        plainly = "greedy" if rule in ("greedy", "topm", "distance") else "match"
        edited = None if edits is None else TextEdits(edits, text, hooks.prompts())
        verdict = _verify(
            nothing, hooks.distribution(text, nothing, logits), text, sampling, plainly, logprobs, {}, edited,
            grammars.allowed(),
        )  # fmt: skip
        followers = text.append(verdict.token_ids, verdict.num_accepted, verdict.logprobs)
        first, _ = text.read(verdict.token_ids, verdict.status, followers)
        grammars.grown(first)
        hooks.grown(text, None)
        statistics = [RequestStatistics() for _ in first]
        for b, tokens in enumerate(first if streamer is not None else []):
            streamer(b, tokens, 0)  # type: ignore[misc] # it is not None
        drafter.grammars, drafter.clock = grammars.drafts, (clock := Clock(target.device))
        with _naming(drafter, "begin"):
            drafter.begin(text, rule=rule, sampling=sampling, longest=lengths.longest)
            drafter.prefill(text, hidden)
        lengths.begin(drafter.nodes)
        clock.begin()
        while not all(text.is_finished):
            with _naming(drafter, "draft"):
                slowest, left = text.slowest, text.left
                draft = _draft(drafter, text, lengths, slowest)
            clock.mark("draft")
            grammars.begin(*_candidates(draft))
            logits, hidden = _forward(target, cache, text, draft, drafter.features)
            clock.mark("target")
            verdict = _verify(
                draft, hooks.distribution(text, draft, logits), text, sampling, rule, logprobs, rule_options or {},
                edited, grammars.allowed(),
            )  # fmt: skip
            clock.mark("verify")
            followers = text.append(verdict.token_ids, verdict.num_accepted, verdict.logprobs)
            path = verdict.path if isinstance(verdict, TreeResult) else None
            # Rows of the last token and of what was accepted; -1: a finished request. Nothing drafted: one row of each.
            is_plain = draft.token_ids.shape[1] == 0 and not any(text.is_finished)
            cache.commit(0 if is_plain else followers, path)
            with _naming(drafter, "commit"):
                drafter.commit(text, Outcome(logits, followers, path, hidden))
            running = text.running
            new, (_, accepted, *shape) = text.read(  # the one wait for the device
                verdict.token_ids, verdict.status, followers, verdict.num_accepted, *_shape(draft, path)
            )
            grammars.grown(new)
            hooks.grown(text, path)
            cache.know_lengths([end - 1 for end in text.ends])
            clock.mark("commit")
            elapsed = clock.settle()
            for b in running:
                statistics[b].add(accepted[b], *(column[b] for column in shape))
                statistics[b].seconds = elapsed
                if streamer is not None:
                    streamer(b, new[b], min(accepted[b], len(new[b])))
            width = max(statistics[b].drafted[-1] for b in running)
            last = [statistics[b] for b in slowest]
            drafted, said = [r.drafted[-1] for r in last], [r.accepted[-1] for r in last]
            nearer = min(left - text.left, 1 + max(said))  # a stop brings the end nearer, whatever was drafted
            lengths.update(drafted, said, clock.latest, width, nearer)
        past.close(text)
        drafter.clock = None
        with _naming(drafter, "end"):
            drafter.end(text, range(text.batch))
        return _collect(text, statistics, clock, has_logprobs=logprobs is not None)


def overhang(drafter: Drafter, lengths: FixedLength) -> int:
    """Columns that a step may write behind a text: a verifier's, whatever the tree.

    Raises:
        ValueError: a tree of more nodes than can be verified.
    """
    nodes, chain = drafter.nodes(lengths.longest), 1 + lengths.longest
    if nodes > max(MOST_NODES, chain):
        name = type(drafter).__name__
        raise ValueError(
            f"{name}: trees must have at most {MOST_NODES} nodes, got {nodes} with {chain - 1} drafts in a row"
        )
    return max(nodes, chain)


def _prefill(
    target: Any, cache: TreeCache, sequences: Sequences, lacking: int, features: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Run what the cache lacks of the prompts; logits ``[batch, 1, vocab]`` of their last tokens, and all features."""
    begun, piece, has_features = cache.lengths.clone(), PIECE if cache.has_states else lacking, bool(features)
    last, hidden, logits = sequences.lengths - 1 - begun, list[Tensor](), None
    for start in range(0, lacking, piece):
        count = min(piece, lacking - start)
        place = begun[:, None] + torch.arange(start, start + count, device=begun.device)
        prompts = sequences.tokens.gather(1, place.clamp(max=sequences.tokens.shape[1] - 1)).clamp(min=0)
        here = last - start
        rows, own = here.clamp(0, count - 1).unique(return_inverse=True)
        out = forward(
            target, prompts, cache.chain_inputs(count), logits_to_keep=rows, output_hidden_states=has_features
        )  # fmt: skip
        cache.commit(here.clamp(-1, count - 1).int())  # -1: a prompt that ended in a piece before
        found = kept_rows(out.logits, own)
        logits = found if logits is None else torch.where((here < 0)[:, None, None], logits, found)
        if (chosen := _chosen(out, features)) is not None:
            hidden.append(chosen)
    cache.know_lengths(sequences.ends)
    assert logits is not None
    return logits, (torch.cat(hidden, 1) if len(hidden) > 1 else hidden[0]) if has_features else None


def _forward(
    target: Any, cache: TreeCache, sequences: Sequences, draft: Draft, features: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Logits and features of the last committed token and of every draft, ``[batch, nodes, ...]``."""
    if draft.parents is None:
        nodes = torch.cat([sequences.last(1), draft.token_ids], 1) if draft.token_ids.shape[1] else sequences.last(1)
        inputs = cache.chain_inputs(nodes.shape[1])
    else:
        nodes = torch.cat([sequences.last(1), draft.token_ids[:, 1:]], 1)
        inputs = cache.tree_inputs(draft.parents)
    last = target.config.get_text_config(decoder=True).vocab_size - 1  # an id behind it is flagged where it is verified
    out = forward(target, nodes.clamp(0, last), inputs, output_hidden_states=bool(features))
    return out.logits, _chosen(out, features)


def _chosen(out: Any, features: Sequence[int]) -> Tensor | None:
    """The hidden states that a drafter wants, side by side."""
    return torch.cat([out.hidden_states[level] for level in features], -1) if features else None


def _verify(
    draft: Draft,
    logits: Tensor,
    sequences: Sequences,
    sampling: Sampling,
    rule: str,
    logprobs: Logprobs | None,
    options: Mapping[str, Any],
    edited: TextEdits | None,
    allowed: Tensor | None,
) -> ChainResult | TreeResult:
    """Accept a prefix or a path, and draw the token after it."""
    common: dict[str, Any] = {
        "sampling": sampling,
        "draft_sampling": draft.sampling,
        "rng": sequences.rng(),
        "token_map": draft.token_map,
        "allowed": allowed,
        "edits": None if edited is None else edited.now(sequences),
        "logprobs": logprobs,
    }
    ids, parents = _candidates(draft)
    verdict: ChainResult | TreeResult
    if parents is None:
        # Of trees: a step without one draws as plain decoding does.
        chain_rule = cast(ChainRule, rule if rule in CHAIN_RULES else "match")
        verdict = verify_chain(
            ids, logits, draft.logits, draft_stats=draft.stats, rule=chain_rule, **common, **options
        )  # fmt: skip
    else:
        logits = logits if draft.candidates is None else logits[:, : draft.candidates]
        verdict = verify_tree(
            ids, parents, logits, draft.logits, max_depth=draft.max_depth, rule=cast(TreeRule, rule),
            replacement=draft.replacement, **common, **options,
        )  # fmt: skip
    if edited is not None:
        edited.grown(verdict.token_ids)
    return verdict


def _candidates(draft: Draft) -> tuple[Tensor, Tensor | None]:
    """Ids and parents of the nodes of a tree that may be accepted; of a chain the ids and None."""
    if draft.parents is None or draft.candidates is None:
        return draft.token_ids, draft.parents
    return draft.token_ids[:, : draft.candidates].contiguous(), draft.parents[:, : draft.candidates].contiguous()


def _shape(draft: Draft, path: Tensor | None) -> Sequence[Tensor]:
    """Input of the statistics: a chain's ids, or a tree's ids, parents and accepted path."""
    ids, parents = _candidates(draft)
    return (ids,) if path is None or parents is None else (ids, parents, path)


def _collect(
    sequences: Sequences, statistics: list[RequestStatistics], clock: Clock, *, has_logprobs: bool
) -> Generation:
    starts = sequences.prompts
    for request, row, start in zip(statistics, sequences.rows, starts, strict=True):
        request.tokens = len(row) - start
    rows = sequences.logprobs.tolist() if has_logprobs else []
    return Generation(
        tokens=[row[start:] for row, start in zip(sequences.rows, starts, strict=True)],
        logprobs=[rows[b][starts[b] : len(row)] for b, row in enumerate(sequences.rows)] if has_logprobs else None,
        status=sequences.status,
        statistics=statistics,
        seconds=clock.seconds,
    )


# --- arguments


def _check(target: Any, drafter: Drafter, lengths: FixedLength, rule: str, max_new_tokens: int) -> None:
    if not callable(target) or not hasattr(target, "config"):
        _fail("target", "a transformers causal LM", type(target).__name__)
    check_model(target.config, target)
    if not isinstance(drafter, Drafter):
        _fail("drafter", "a Drafter or None", type(drafter).__name__)
    vocab = target.config.get_text_config(decoder=True).vocab_size
    if drafter.vocab not in (None, vocab):
        _fail("drafter", f"of the target's {vocab} ids, or with a token_map", f"{drafter.vocab} ids")
    if not isinstance(lengths, FixedLength):
        _fail("draft_length", "an int >= 1 or an AdaptiveLength", lengths)
    if rule not in drafter.rules:
        _fail("rule", "one of " + ", ".join(drafter.rules) + f" with {type(drafter).__name__}", repr(rule))
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        _fail("max_new_tokens", "an int >= 1", max_new_tokens)


def _check_options(past: Any, edits: Any, streamer: Any) -> None:
    if past is not None and not isinstance(past, PrefixCache):
        _fail("past", "a PrefixCache or None", type(past).__name__)
    if edits is not None and not isinstance(edits, Edits):
        _fail("edits", "an Edits or None", type(edits).__name__)
    if streamer is not None and not callable(streamer):
        _fail("streamer", "a function (request, tokens, accepted) or None", type(streamer).__name__)


def _begin_text(
    target: Any,
    input_ids: Tensor | Sequence[Sequence[int]],
    attention_mask: Tensor | None,
    seed: int | Tensor,
    limit: int,
    stop: Sequence[int | Sequence[int] | str] | None,
    tokenizer: Any,
    overhang: int,
) -> Sequences:
    prompts, lengths = _right_padded(input_ids, attention_mask, target.device)
    config = target.config.get_text_config(decoder=True)
    shortest, longest, least, most = (int(x) for x in (*lengths.aminmax(), *prompts.aminmax()))
    if shortest < 1:
        _fail("input_ids", "prompts of at least one token", "an empty one")
    if least < 0 or most >= config.vocab_size:
        _fail("input_ids", f"ids in [0, {config.vocab_size})", f"{least} to {most}")
    most_positions = getattr(config, "max_position_embeddings", None)  # None: no bound, as with plain rotary angles
    if most_positions is not None and longest + limit > most_positions:
        whole = f"{most_positions} positions for the longest prompt and max_new_tokens"
        _fail("target", f"a model of at least {longest + limit} positions", whole)
    check_rotary(config, shortest, longest + limit + overhang - 2)  # a draft follows all tokens but the last new one
    batch = len(lengths)
    if not (isinstance(seed, Tensor) or (isinstance(seed, int) and -(2**63) <= seed < 2**63)):
        _fail("seed", f"an int of 64 bits or int64 [{batch}]", repr(seed))
    seeds = seed + torch.arange(batch, device=target.device) if isinstance(seed, int) else seed
    if seeds.shape != (batch,) or seeds.dtype != torch.int64:
        _fail("seed", f"an int or int64 [{batch}]", f"{seeds.dtype} {list(seeds.shape)}")
    if stop is None:
        eos = target.generation_config.eos_token_id
        stop = [] if eos is None else [eos] if isinstance(eos, int) else eos
    texts = [[]] * batch if tokenizer is None else prompts.tolist()  # stop strings alone look at what they continue
    stops = [Stops(stop, tokenizer, before=t[:n]) for t, n in zip(texts, lengths.tolist(), strict=True)]
    return Sequences(prompts, lengths, seed=seeds, limits=[limit] * batch, stops=stops, overhang=overhang)


def check_rotary(config: Any, shortest: int, end: int) -> None:
    """Refuse texts within which the rotary angles change: cached keys would keep the old ones."""
    given = getattr(config, "rope_parameters", None) or {}
    tables = [given, *(table for table in given.values() if isinstance(table, dict))]  # of each kind of layer
    for table in tables:
        kind = table.get("rope_type")
        if kind not in GROWING:
            continue
        bound = table["original_max_position_embeddings"] if kind == "longrope" else config.max_position_embeddings
        if end > bound and (kind == "dynamic" or shortest <= bound):
            use = f"short enough for {bound} positions, where the angles of rope_type {kind!r} change"
            _fail("longest prompt, max_new_tokens and a draft", use, end)


def _right_padded(
    input_ids: Tensor | Sequence[Sequence[int]], attention_mask: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Prompts ``[batch, longest]`` padded on the right, and their lengths."""
    if not isinstance(input_ids, Tensor):
        expected = "token ids of each prompt, such as [[5, 6, 7], [8]]"
        given: Any = input_ids
        if not isinstance(given, Sequence) or isinstance(given, str):
            _fail("input_ids", expected, type(given).__name__)
        if not given:
            _fail("input_ids", "of at least one prompt", "none")
        for row in given:
            if isinstance(row, str) or not hasattr(row, "__len__"):
                _fail("input_ids", expected, f"{row!r} as a prompt")
        lengths = [len(row) for row in input_ids]
        if min(lengths) == 0:
            _fail("input_ids", "prompts of at least one token", "an empty one")
        rows = [list(row) + [0] * (max(lengths) - len(row)) for row in input_ids]
        try:
            ids = torch.tensor(rows, device="cpu")
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"generate: input_ids must be {expected}: {error}") from error
        if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
            _fail("input_ids", expected, f"{ids.dtype} {list(ids.shape)}")
        return ids.to(device, torch.int64), torch.tensor(lengths, device=device)
    if input_ids.dim() != 2 or input_ids.numel() == 0 or input_ids.dtype not in (torch.int32, torch.int64):
        _fail("input_ids", "int32 or int64 [batch, length]", f"{input_ids.dtype} {list(input_ids.shape)}")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        _fail("attention_mask", f"{list(input_ids.shape)}, as input_ids", list(attention_mask.shape))
    is_token = attention_mask.to(device) != 0
    order = is_token.byte().argsort(dim=1, descending=True, stable=True)
    kept, counts = torch.where(is_token, input_ids.to(device).long(), 0).gather(1, order), is_token.sum(1)
    return kept[:, : max(int(counts.max()), 1)], counts


def _draft(drafter: Drafter, text: Sequences, lengths: FixedLength, slowest: Sequence[int]) -> Draft:
    """As many drafts as the policy calls for, which looks at the slowest requests: the call ends with them."""
    length = lengths.next()
    if length == 0:
        drafter.skip(text)
        return NoDrafter().draft(text, 0)
    draft = _checked(drafter.draft(text, length), text, drafter.nodes(length))
    if draft.lengths is None or not draft.is_free:
        return draft
    columns = lengths.verified([draft.lengths[b] for b in slowest])
    return draft._replace(token_ids=draft.token_ids[:, :columns].contiguous())


def _checked(draft: Draft, sequences: Sequences, most: int) -> Draft:
    """A draft of the right shape; else the loop would fail far from the cause."""
    ids = draft.token_ids
    nodes = ids.shape[-1] + (draft.parents is None)
    if ids.dim() != 2 or ids.shape[0] != sequences.batch or ids.dtype != torch.int64 or nodes > most:
        got = f"{ids.dtype} {list(ids.shape)}"
        raise ValueError(f"token_ids must be int64 [{sequences.batch}, at most {most - 1} drafts], got {got}")
    return draft


@contextmanager
def _naming(drafter: Drafter, method: str) -> Iterator[None]:
    """Says whose failure it was."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"generate: {type(drafter).__name__}.{method} failed: {error}") from error


def _fail(name: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"generate: {name} must be {expected}, got {got}")
