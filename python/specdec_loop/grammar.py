"""Grammars: the ids that may follow a text, as xgrammar or llguidance know them, at every position of a draft."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .sequences import Sequences

Library = Literal["llguidance", "xgrammar"]
LIBRARIES: tuple[Library, ...] = ("llguidance", "xgrammar")
CACHE_BYTES = 1 << 26  # of compiled grammars that xgrammar keeps
ORIGIN = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # time and source line before a message of xgrammar
# Keywords of JSON Schema that xgrammar 0.2 reads over without a word; llguidance refuses what it does not know. Strings
# of bounded length may have control characters there, which JSON forbids.
UNHEEDED = (
    "allOf", "oneOf", "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains",
    "dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "$anchor", "$dynamicRef",
    "minLength", "maxLength",
)  # fmt: skip


class Matcher(Protocol):
    """The place of a growing text in its grammar."""

    def fill(self, row: Tensor) -> None:
        """Write int32 ``[ceil(vocab / 32)]`` on the host: bit v % 32 of word v // 32 says that id v may come next."""

    def accept(self, token: int) -> bool:
        """Take a token; False: the grammar forbids it, and nothing has changed."""

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""

    def is_terminated(self) -> bool:
        """Whether an end token was taken. The grammar says nothing of what follows it."""


class Grammar(Protocol):
    """A grammar, compiled for a tokenizer."""

    def matcher(self) -> Matcher:
        """A matcher of a new text."""


# --- positions of drafts


def fill_masks(matcher: Matcher, ids: Sequence[int], parents: Sequence[int], rows: Tensor) -> None:
    """Masks of a tree's nodes, each after its path; the matcher ends where it began.

    Behind a draft that the grammar forbids, and behind an end token, rows stay as they are: such a draft has
    probability 0, so no rule accepts it, and the text ends with an end token.

    Args:
        matcher: after the committed text.
        ids: of the nodes; node 0 stands for the committed text, -1: the node is not there.
        parents: of the nodes, each before its children.
        rows: int32 ``[nodes, ceil(vocab / 32)]``, all ones.
    """
    children: list[list[int]] = [[] for _ in ids]
    for node in range(1, len(ids)):
        if ids[node] >= 0 and 0 <= parents[node] < node:
            children[parents[node]].append(node)
    taken, waiting = 0, [(0, 0)]
    while waiting:  # depth first
        node, depth = waiting.pop()
        if node > 0:
            matcher.rollback(taken - depth + 1)
            taken = depth - 1
            if not matcher.accept(ids[node]):
                continue
            taken = depth
        if not matcher.is_terminated():
            matcher.fill(rows[node])
            waiting += [(child, depth + 1) for child in children[node]]
    matcher.rollback(taken)


def advance(matcher: Matcher, tokens: Sequence[int]) -> None:
    """Take committed tokens up to the first end token.

    Raises:
        RuntimeError: the grammar forbids one.
    """
    for token in tokens:
        if matcher.is_terminated():
            return
        if not matcher.accept(token):
            raise RuntimeError(f"the grammar forbids token {token}, which its own mask allowed")


class Walk(NamedTuple):
    """The draft of a request.

    Attributes:
        matcher: after the committed text; no other thread may use it until the masks are there.
        ids: int64 ``[nodes]`` of a tree, ``[draft]`` of a chain.
        parents: int32 ``[nodes]``; None: a chain.
        row: of the mask of the next token; those of the draft lie behind it.
    """

    matcher: Matcher
    ids: Tensor
    parents: Tensor | None
    row: int


class Masks:
    """Bitmasks of drafts, filled by a thread while the target runs."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        """Prepare for logits of so many ids on a device."""
        self._words, self._device = -(-vocab // 32), device
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._filled: Future[tuple[Tensor, dict[int, Exception]]] | None = None

    def begin(self, walks: Sequence[Walk], rows: int) -> None:
        """Begin to fill so many rows; those of no walk allow every id. The drafts are copied before this returns."""
        self._filled = None  # those of a step that failed
        if not walks:
            return
        drafts = [
            (w.ids.to("cpu", non_blocking=True), None if w.parents is None else w.parents.to("cpu", non_blocking=True))
            for w in walks
        ]
        copied = None
        if self._device.type != "cpu":
            copied = torch.Event(self._device)
            copied.record()
        self._filled = self._thread.submit(self._fill, walks, drafts, rows, copied)

    def end(self) -> tuple[Tensor | None, dict[int, Exception]]:
        """int32 ``[rows, ceil(vocab / 32)]``, None if there was no walk; and what matchers raised, by walk."""
        if self._filled is None:
            return None, {}
        masks, failed = self._filled.result()
        self._filled = None
        return masks.to(self._device, non_blocking=True), failed

    def _fill(
        self, walks: Sequence[Walk], drafts: Sequence[tuple[Tensor, Tensor | None]], rows: int, copied: Any
    ) -> tuple[Tensor, dict[int, Exception]]:
        if copied is not None:
            copied.synchronize()
        masks, failed = torch.full((rows, self._words), -1, dtype=torch.int32), {}
        for i, (walk, (drafted, links)) in enumerate(zip(walks, drafts, strict=True)):
            ids = drafted.tolist() if links is not None else [-1, *drafted.tolist()]
            parents = links.tolist() if links is not None else range(-1, len(ids) - 1)
            try:
                fill_masks(walk.matcher, ids, parents, masks[walk.row : walk.row + len(ids)])
            except Exception as error:  # a grammar too complex for its library: of one request
                failed[i] = error
        return masks, failed


class DraftGrammars:
    """Keeps chains inside their grammars while they are drafted: any other draft would be rejected.

    Each drafted token is read from the device.
    """

    def __init__(self, matchers: Sequence[Matcher | None], vocab: int) -> None:
        """Follow matchers of each request; a drafter may have them between two steps."""
        self._matchers, self._vocab, self._is_idle = matchers, vocab, not any(m is not None for m in matchers)
        self._taken: list[int] = []  # tokens of each chain
        self._is_inside: list[bool] = []

    @contextmanager
    def chain(self) -> Iterator[None]:
        """A chain of each request; the matchers end where they began."""
        self._taken, self._is_inside = [0] * len(self._matchers), [True] * len(self._matchers)
        try:
            yield
        finally:
            for matcher, count in zip(self._matchers, self._taken, strict=True):
                if matcher is not None:
                    matcher.rollback(count)

    def restrict(self, logits: Tensor, token_map: Tensor | None = None) -> Tensor:
        """Logits ``[batch, draft_vocab]`` with -inf where the grammar forbids an id; `token_map` as `Draft` has it."""
        if self._is_idle:
            return logits
        rows = torch.full((len(self._matchers), -(-self._vocab // 32)), -1, dtype=torch.int32)
        for matcher, row, is_inside in zip(self._matchers, rows, self._is_inside, strict=True):
            if matcher is not None and is_inside and not matcher.is_terminated():
                matcher.fill(row)
        bits = (rows.to(logits.device)[:, :, None] >> torch.arange(32, device=logits.device)) & 1
        is_allowed = bits.flatten(1)[:, : self._vocab] == 1
        return logits.masked_fill(~(is_allowed if token_map is None else is_allowed[:, token_map]), -math.inf)

    def follow(self, token_ids: Tensor) -> None:
        """Take the tokens ``[batch, 1]`` that were drafted."""
        if self._is_idle:
            return
        for b, (token,) in enumerate(token_ids.tolist()):
            matcher = self._matchers[b]
            if matcher is not None and self._is_inside[b]:
                self._is_inside[b] = matcher.accept(token)
                self._taken[b] += self._is_inside[b]


class TextGrammars:
    """The grammars of a batch of growing texts."""

    def __init__(self, grammars: Grammar | Sequence[Grammar | None] | None, sequences: Sequences, vocab: int) -> None:
        """Begin texts.

        Args:
            grammars: of all requests or of each; None: no grammar.
            sequences: the texts, of which nothing but prompts is there yet.
            vocab: ids of a row of logits.

        Raises:
            ValueError: another number of grammars than of requests.
        """
        if not isinstance(grammars, Sequence):
            grammars = [grammars] * sequences.batch
        if len(grammars) != sequences.batch:
            raise ValueError(
                f"generate: grammar must be one, or one of each of {sequences.batch} requests, got {len(grammars)}"
            )
        self.matchers = [None if grammar is None else grammar.matcher() for grammar in grammars]
        self._masks, self._sequences = Masks(vocab, sequences.tokens.device), sequences
        self.drafts = DraftGrammars(self.matchers, vocab)

    def begin(self, ids: Tensor, parents: Tensor | None) -> None:
        """Begin the masks of drafts, ``[batch, draft]`` or a tree's ``[batch, nodes]``."""
        nodes = ids.shape[1] + (parents is None)
        walks = [
            Walk(matcher, ids[b], None if parents is None else parents[b], b * nodes)
            for b, matcher in enumerate(self.matchers)
            if matcher is not None and not self._sequences.is_finished[b]
        ]
        self._masks.begin(walks, len(self.matchers) * nodes)

    def allowed(self) -> Tensor | None:
        """Masks of the rows that verify these drafts; None: no grammar restricts them.

        Raises:
            RuntimeError: a matcher failed.
        """
        masks, failed = self._masks.end()
        for error in failed.values():
            raise RuntimeError(f"generate: a grammar failed: {error}") from error
        return masks

    def grown(self, new: Sequence[Sequence[int]]) -> None:
        """Take the new tokens of each request."""
        for matcher, tokens in zip(self.matchers, new, strict=True):
            if matcher is not None:
                advance(matcher, tokens)


# --- the two libraries


class GrammarCompiler:
    """Compiles grammars for a tokenizer.

    JSON is written on one line, as ``json.dumps`` writes it: a model that may write spaces anywhere may write nothing
    else until its limit.
    """

    def __init__(self, tokenizer: Any, vocab: int, ends: Sequence[int], *, library: Library = "llguidance") -> None:
        """Read a tokenizer.

        Args:
            tokenizer: a fast one of transformers.
            vocab: ids of a row of logits.
            ends: end tokens, with which a text may end where its grammar is complete, and nowhere else.
            library: ``"llguidance"``, which refuses a schema of which it does not know a part; or ``"xgrammar"``.

        Raises:
            ValueError: no end token, or a library that is not known or not installed.
        """
        if library not in LIBRARIES:
            raise ValueError(f"GrammarCompiler: library must be one of {', '.join(LIBRARIES)}, got {library!r}")
        if find_spec(library) is None:
            raise ValueError(f"GrammarCompiler: {library} is not installed: pip install 'specdec_kernels[grammar]'")
        if not ends:
            raise ValueError("GrammarCompiler: ends must have an end token, or no text could end, got none")
        compiles = _xgrammar if library == "xgrammar" else _llguidance
        self._compile: Callable[[str, str], Grammar] = compiles(tokenizer, vocab, list(ends))

    def json_schema(self, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that a schema describes, given as an object or as its text. ``{"type": "object"}``: any object.

        Raises:
            ValueError: it is no schema, or asks for more than the library can do.
        """
        return self._compile("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    def regex(self, pattern: str) -> Grammar:
        """Texts that match a regular expression from their first to their last character.

        Raises:
            ValueError: it is none.
        """
        return self._compile("regex", pattern)

    def choice(self, texts: Sequence[str]) -> Grammar:
        """One of some texts.

        Raises:
            ValueError: there is none, or an empty one.
        """
        if not texts or not all(texts):
            raise ValueError(f"choice must be of at least one text, none of them empty, got {list(texts)}")
        return self._compile("choice", " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))

    def grammar(self, text: str) -> Grammar:
        """A context-free grammar: EBNF with a rule ``root`` for xgrammar, Lark with ``start`` for llguidance.

        Raises:
            ValueError: it is none.
        """
        return self._compile("grammar", text)


class _Ending:
    """A matcher whose library is told of no end token: the libraries differ in how they take one back."""

    def __init__(self, inner: Any, ends: Sequence[int]) -> None:
        self._inner, self._ends, self._is_ended = inner, ends, False

    def fill(self, row: Tensor) -> None:
        if self._is_ended:
            row.fill_(-1)
        else:
            self._fill(row)

    def accept(self, token: int) -> bool:
        if self._is_ended:
            return False
        if token in self._ends:
            self._is_ended = self._is_complete()
            return self._is_ended
        return self._accept(token)

    def rollback(self, count: int) -> None:
        if self._is_ended and count > 0:
            self._is_ended, count = False, count - 1
        if count > 0:
            self._inner.rollback(count)

    def is_terminated(self) -> bool:
        return self._is_ended

    def _fill(self, row: Tensor) -> None:
        raise NotImplementedError  # each library has its own

    def _accept(self, token: int) -> bool:
        raise NotImplementedError  # each library has its own

    def _is_complete(self) -> bool:
        raise NotImplementedError  # each library has its own


class _XGrammar(_Ending):
    def _fill(self, row: Tensor) -> None:
        self._inner.fill_next_token_bitmask(row)

    def _accept(self, token: int) -> bool:
        return bool(self._inner.accept_token(token))

    def _is_complete(self) -> bool:
        return bool(self._inner.is_completed())


class _LLGuidance(_Ending):
    def _fill(self, row: Tensor) -> None:
        self._inner.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
        if self._inner.is_error():
            raise RuntimeError(self._inner.get_error())

    def _accept(self, token: int) -> bool:
        is_accepted = bool(self._inner.try_consume_tokens([token]) == 1)
        if self._inner.is_error():
            raise RuntimeError(self._inner.get_error())
        return is_accepted

    def _is_complete(self) -> bool:
        return bool(self._inner.is_accepting())


@dataclass(frozen=True)
class _Compiled:
    make: Callable[[], Matcher]

    def matcher(self) -> Matcher:
        return self.make()


def _xgrammar(tokenizer: Any, vocab: int, ends: list[int]) -> Callable[[str, str], Grammar]:
    """Compiles by xgrammar, a kind and a text."""
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab, stop_token_ids=ends)
    compiler = xgrammar.GrammarCompiler(info, cache_limit_bytes=CACHE_BYTES)

    def compiled(kind: str, text: str) -> Grammar:
        try:
            if kind == "json_schema":
                _refuse_unheeded(json.loads(text))
                found = compiler.compile_json_schema(text, any_whitespace=False, strict_mode=False)
            elif kind == "regex":
                found = compiler.compile_regex(text)
            else:
                found = compiler.compile_grammar(f"root ::= {text}" if kind == "choice" else text)
        except (RuntimeError, ValueError) as error:  # json's own is a ValueError
            raise ValueError(f"{kind}: {ORIGIN.sub('', str(error)).strip()}") from error
        return _Compiled(lambda: _XGrammar(xgrammar.GrammarMatcher(found), ends))

    return compiled


def _refuse_unheeded(schema: Any) -> None:
    """Refuse keywords that xgrammar would not heed; properties may have any name."""
    if isinstance(schema, dict):
        if found := [key for key in UNHEEDED if key in schema]:
            raise ValueError(f"xgrammar does not heed {', '.join(found)}: leave it out, or use llguidance")
        for key, value in schema.items():
            if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
                _refuse_unheeded(list(value.values()))
            elif key not in ("const", "enum", "default", "examples"):
                _refuse_unheeded(value)
    elif isinstance(schema, list):
        for one in schema:
            _refuse_unheeded(one)


def _llguidance(tokenizer: Any, vocab: int, ends: list[int]) -> Callable[[str, str], Grammar]:
    """Compiles by llguidance, a kind and a text."""
    import llguidance.hf

    made = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab, eos_token=ends)
    matcher, spaces = (
        llguidance.LLMatcher,
        {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    )

    def compiled(kind: str, text: str) -> Grammar:
        try:
            if kind == "json_schema":
                grammar = matcher.grammar_from_json_schema(json.loads(text), overrides=spaces)
            elif kind == "regex":
                grammar = matcher.grammar_from_regex(text)
            else:
                grammar = matcher.grammar_from_lark(f"start: {text}" if kind == "choice" else text)
            if fault := matcher.validate_grammar(grammar, made):
                raise ValueError(fault.strip())
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from error
        first = matcher(made, grammar, log_level=0)
        return _Compiled(lambda: _LLGuidance(first.deep_copy(), ends))

    return compiled
