"""Grammars by xgrammar and llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from .matching import Grammar, Matcher

Library = Literal["llguidance", "xgrammar"]
LIBRARIES: tuple[Library, ...] = ("llguidance", "xgrammar")
CACHE_BYTES = 1 << 26  # of compiled grammars that xgrammar keeps
MOST_ITEMS = 100_000  # of all arrays of a schema: llguidance keeps 130 bytes for each, whether or not it comes
CONTROLS = re.compile("[\x7f-\x9f]")  # JSON may hold them as they are, and a grammar of llguidance may not
ORIGIN = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # time and source line before a message of xgrammar
# Keywords of JSON Schema that xgrammar 0.2 reads over without a word; llguidance refuses what it does not know. Strings
# of bounded length may have control characters there, which JSON forbids.
UNHEEDED = (
    "allOf", "oneOf", "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains",
    "dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "$anchor", "$dynamicRef",
    "minLength", "maxLength",
)  # fmt: skip


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
            raise ValueError(f"GrammarCompiler: {library} is not installed: pip install {library}")
        if not ends:
            raise ValueError("GrammarCompiler: ends must have an end token, or no text could end, got none")
        compiles = _xgrammar if library == "xgrammar" else _llguidance
        self._compiled: Callable[[str, str], Grammar] = compiles(tokenizer, vocab, list(ends))
        self._words = -(-vocab // 32)

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
        quoted = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return self._compile("choice", CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted))

    def grammar(self, text: str) -> Grammar:
        """A context-free grammar: EBNF with a rule ``root`` for xgrammar, Lark with ``start`` for llguidance.

        Raises:
            ValueError: it is none.
        """
        return self._compile("grammar", text)

    def _compile(self, kind: str, text: str) -> Grammar:
        """A grammar whose first mask was made: one that no text meets is found there, not when it compiles."""
        found, row = self._compiled(kind, text), torch.zeros(self._words, dtype=torch.int32)
        try:
            found.matcher().fill(row)
        except RuntimeError as error:
            raise ValueError(f"{kind}: no text meets it ({str(error).splitlines()[0]})") from error
        if not row.any():
            raise ValueError(f"{kind}: no text meets it")
        return found


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
    matcher: Callable[[], Matcher]


def _xgrammar(tokenizer: Any, vocab: int, ends: list[int]) -> Callable[[str, str], Grammar]:
    """Compiles by xgrammar, a kind and a text."""
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab, stop_token_ids=ends)
    compiler = xgrammar.GrammarCompiler(info, cache_limit_bytes=CACHE_BYTES)

    def compiled(kind: str, text: str) -> Grammar:
        try:
            if kind == "json_schema":
                schema = json.loads(text)
                _refuse_many_items(schema)
                _refuse_unheeded(schema)
                found = compiler.compile_json_schema(text, any_whitespace=False, strict_mode=False)
            elif kind == "regex":
                found = compiler.compile_regex(text)
            else:
                found = compiler.compile_grammar(f"root ::= {text}" if kind == "choice" else text)
        except (RuntimeError, ValueError) as error:  # json's own is a ValueError, and one of depth a RuntimeError
            raise ValueError(f"{kind}: {ORIGIN.sub('', str(error)).strip()}") from error
        return _Compiled(lambda: _XGrammar(xgrammar.GrammarMatcher(found), ends))

    return compiled


def _refuse_many_items(schema: Any) -> None:
    """Refuse arrays that take too much memory."""
    items, waiting = 0, [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            bounds = (one.get("minItems"), one.get("maxItems"))
            items += sum(bound for bound in bounds if isinstance(bound, int) and bound > 0)
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    if items > MOST_ITEMS:
        raise ValueError(f"minItems and maxItems must sum to at most {MOST_ITEMS}, got {items}")


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
    matcher = llguidance.LLMatcher
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

    def compiled(kind: str, text: str) -> Grammar:
        try:
            if kind == "json_schema":
                schema = json.loads(text)
                _refuse_many_items(schema)
                grammar = matcher.grammar_from_json_schema(schema, overrides=spaces)
            elif kind == "regex":
                grammar = matcher.grammar_from_regex(text)
            else:
                if kind == "grammar" and "%json" in text:  # its arrays would have no bound
                    raise ValueError("%json is not served: give the schema itself as the grammar")
                grammar = matcher.grammar_from_lark(f"start: {text}" if kind == "choice" else text)
            if fault := matcher.validate_grammar(grammar, made):
                raise ValueError(fault.strip())
        except (RecursionError, ValueError) as error:
            raise ValueError(f"{kind}: {error}") from error
        first = matcher(made, grammar, log_level=0)
        return _Compiled(lambda: _LLGuidance(first.deep_copy(), ends))

    return compiled
