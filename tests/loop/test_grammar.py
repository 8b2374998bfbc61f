"""Grammars: masks of every position of a draft, and texts that obey them whatever was drafted."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from grammars import SCHEMA, Letters, obeys
from torch import Tensor

from specdec_kernels import Sampling
from specdec_loop import DraftModel, IndependentDrafts, Lookahead, PromptLookup, SuffixDecoding, generate
from specdec_loop.drafters import Draft, Drafter
from specdec_loop.grammar import (
    LIBRARIES,
    DraftGrammars,
    Grammar,
    GrammarCompiler,
    Masks,
    Matcher,
    Walk,
    advance,
    fill_masks,
)
from specdec_loop.sequences import Sequences

for library in LIBRARIES:
    pytest.importorskip(library, reason="the extra grammar is not installed")

END = 0

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def compiler(tokenizer: Any, library: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer), [END], library=library)


def allowed_ids(row: Tensor) -> list[int]:
    return [v for v in range(32 * len(row)) if int(row[v // 32]) >> (v % 32) & 1]


# --- masks


def test_a_node_has_the_mask_of_its_path() -> None:
    rng = random.Random(0)
    for _ in range(50):
        count = rng.randrange(1, 12)
        ids = [-1] + [rng.randrange(-1, 7) for _ in range(count - 1)]
        parents = [-1] + [rng.randrange(node) for node in range(1, count)]
        matcher, rows = Letters(), torch.full((count, 1), -1, dtype=torch.int32)
        advance(matcher, [2])
        fill_masks(matcher, ids, parents, rows)
        assert matcher.taken == [2]
        for node in range(count):
            path = [node]
            while path[0]:
                path.insert(0, parents[path[0]])
            alone, row = Letters(), torch.full((1,), -1, dtype=torch.int32)
            is_path = all(alone.accept(token) for token in [2, *(ids[n] for n in path[1:])])
            if is_path and min([0, *(ids[n] for n in path[1:])]) >= 0 and not alone.is_terminated():
                alone.fill(row)
            assert torch.equal(rows[node], row), (ids, parents, node)


def test_masks_of_chains_and_trees_lie_at_their_rows_and_others_allow_all() -> None:
    masks = Masks(10, torch.device("cpu"))
    assert masks.end() == (None, {})
    chain, tree = torch.tensor([3, 2]), torch.tensor([-1, 4, 5])
    links = torch.tensor([-1, 0, 0], dtype=torch.int32)
    masks.begin([Walk(Letters(), chain, None, 1), Walk(Letters(), tree, links, 4)], 8)
    filled, failed = masks.end()
    assert filled is not None and failed == {}
    over = [sum(1 << v for v in range(n, 10)) for n in range(1, 10)]
    assert filled.flatten().tolist() == [-1, over[0], over[3] | 1, -1, over[0], over[4] | 1, over[5] | 1, -1]


def test_a_matcher_that_fails_harms_no_other() -> None:
    class Broken(Letters):
        def fill(self, row: Tensor) -> None:
            raise RuntimeError("too complex")

    masks, nothing = Masks(10, torch.device("cpu")), torch.empty(0, dtype=torch.int64)
    masks.begin([Walk(Broken(), nothing, None, 0), Walk(Letters(), nothing, None, 1)], 2)
    filled, failed = masks.end()
    assert list(map(str, failed.values())) == ["too complex"] and list(failed) == [0]
    assert filled is not None and filled.flatten().tolist() == [-1, 1022]


def test_drafts_stay_inside_their_grammar_and_matchers_come_back() -> None:
    matcher, other = Letters(), Letters()
    advance(matcher, [3])
    drafts = DraftGrammars([matcher, None, other], 12)
    logits = torch.randn(3, 12)
    with drafts.chain():
        first = drafts.restrict(logits)
        drafts.follow(torch.tensor([[5], [1], [11]]))  # a toy knows no 11, but takes what is larger
        second = drafts.restrict(logits)
        drafts.follow(torch.tensor([[4], [1], [3]]))  # both leave their grammars
        third = drafts.restrict(logits)
    assert [first[0].isfinite().nonzero().flatten().tolist(), second[0].isfinite().nonzero().flatten().tolist()] == [
        [0, 4, 5, 6, 7, 8, 9], [0, 6, 7, 8, 9],
    ]  # fmt: skip
    assert torch.equal(first[1], logits[1]) and torch.equal(third, logits)
    assert (matcher.taken, other.taken) == ([3], [])
    columns = torch.tensor([9, 3, 4], dtype=torch.int32)
    with drafts.chain():
        mapped = drafts.restrict(logits[:, :3], columns)
    assert mapped[0].isfinite().tolist() == [True, False, True]


def test_no_matcher_is_asked_about_a_draft_that_is_not_there(capfd: pytest.CaptureFixture[str], tokenizer: Any) -> None:
    """Where a draft vocabulary has no id that is allowed, none is drawn; xgrammar warns of each id that it is not."""
    matcher = compiler(tokenizer, "xgrammar").choice(["yes"]).matcher()
    drafts = DraftGrammars([matcher], len(tokenizer))
    with drafts.chain():
        drafts.follow(torch.tensor([[-1]]))
        assert drafts.restrict(torch.zeros(1, len(tokenizer))).isfinite().all()  # it is outside
    assert matcher.accept(tokenizer("yes").input_ids[0]) and capfd.readouterr().err == ""


# --- the libraries


def test_both_libraries_allow_the_same_texts(tokenizer: Any) -> None:
    """Along random texts of a grammar, the ids that may follow are the same in both."""
    rng = random.Random(1)
    pairs = [
        [compiler(tokenizer, one).json_schema(SCHEMA) for one in LIBRARIES],
        [compiler(tokenizer, one).regex("(ab|abc)+[0-9]{2,4}") for one in LIBRARIES],
        [compiler(tokenizer, one).choice(["yes", "yes, but", 'no "\n']) for one in LIBRARIES],
    ]
    for grammars in pairs * 3:
        matchers = [grammar.matcher() for grammar in grammars]
        rows = torch.zeros(2, -(-len(tokenizer) // 32), dtype=torch.int32)
        for _ in range(100):
            for matcher, row in zip(matchers, rows, strict=True):
                matcher.fill(row)
            ids = allowed_ids(rows[0])
            ascii_ids = [[v for v in allowed_ids(row) if tokenizer.decode([v]).isascii()] for row in rows]
            assert ascii_ids[0] == ascii_ids[1] and (END in ids) == (END in allowed_ids(rows[1]))
            token = rng.choice([v for v in ids if v == END or v in ascii_ids[0]])
            assert [matcher.accept(token) for matcher in matchers] == [True, True]
            if token == END:
                break
        assert all(matcher.is_terminated() for matcher in matchers)
        for matcher in matchers:
            matcher.rollback(1)
            assert not matcher.is_terminated() and matcher.accept(END)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_choice_may_have_any_character(tokenizer: Any, library: Any) -> None:
    text = "".join(map(chr, range(1, 0x180))) + "\u2028\ufeff🙂"
    matcher = compiler(tokenizer, library).choice([text, "other"]).matcher()
    advance(matcher, [*tokenizer(text)["input_ids"], END])
    assert matcher.is_terminated()


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_no_grammar_is_refused(tokenizer: Any, library: Any) -> None:
    made = compiler(tokenizer, library)
    for wrong in ("{", "[]", '{"type": "animal"}', '{"type": "array", "uniqueItems": true}', '{"not": {}}'):
        with pytest.raises(ValueError, match="json_schema: "):
            made.json_schema(wrong)
    with pytest.raises(ValueError, match="regex: "):
        made.regex("(")
    with pytest.raises(ValueError, match="grammar: "):
        made.grammar("a b c")
    with pytest.raises(ValueError, match="choice must be of at least one text"):
        made.choice(["a", ""])
    with pytest.raises(ValueError, match="ends must have an end token"):
        GrammarCompiler(tokenizer, len(tokenizer), [], library=library)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_grammar_that_would_take_all_memory_is_refused(tokenizer: Any, library: Any) -> None:
    """A hundred bytes of schema took 23 GB; text that is nested too deeply for Python is refused as well."""
    made, array = compiler(tokenizer, library), {"type": "array", "items": {"type": "integer"}}
    made.json_schema({**array, "minItems": 3, "maxItems": 50})
    for bound in ("minItems", "maxItems"):
        with pytest.raises(ValueError, match="json_schema: minItems and maxItems must sum to at most 100000, got 3000"):
            made.json_schema({"anyOf": [{"type": "null"}, {**array, bound: 3 * 10**9}]})
    with pytest.raises(ValueError, match="json_schema: maximum recursion depth"):
        made.json_schema('{"not":' * 10000 + "{}" + "}" * 10000)
    if library == "llguidance":
        with pytest.raises(ValueError, match="grammar: %json is not served"):
            made.grammar('start: %json {"type": "array", "minItems": 1000000000}')


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_grammar_that_no_text_meets_is_refused(tokenizer: Any, library: Any) -> None:
    """llguidance compiles a schema that is itself and nothing more, and fails at its first mask."""
    made = compiler(tokenizer, library)
    with pytest.raises(ValueError, match="json_schema: "):
        made.json_schema({"anyOf": [{"$ref": "#"}]})
    made.json_schema({"anyOf": [{"$ref": "#"}, {"type": "integer"}]})


def test_a_property_may_have_the_name_of_a_keyword(tokenizer: Any) -> None:
    schema = {"type": "object", "properties": {"not": {"enum": ["if"]}}, "required": ["not"]}
    matcher = compiler(tokenizer, "xgrammar").json_schema(schema).matcher()
    advance(matcher, tokenizer('{"not": "if"}')["input_ids"])


def test_an_unknown_or_missing_library_is_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="library must be one of llguidance, xgrammar, got 'yacc'"):
        compiler(tokenizer, "yacc")
    monkeypatch.setattr("specdec_loop.grammar.compiler.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="xgrammar is not installed: pip install xgrammar"):
        compiler(tokenizer, "xgrammar")


# --- texts

PROMPTS = ['x: {"name": "ab", "kind": "cow", "tags": [true, true], "age": 12} y: ', "{", '"kind": "cow"']


class Wrong(Drafter):
    """Drafts one thing whatever the grammar says."""

    def draft(self, sequences: Sequences, length: int) -> Draft:
        return Draft(torch.full((sequences.batch, length), 40))


CHAINS = {
    "copies": PromptLookup,
    "suffixes": lambda: SuffixDecoding(factor=2.0),
    "what no grammar allows": Wrong,
    "a tree": lambda: Lookahead(3, 4, 2, pool=32),
}


def texts(tokenizer: Any, tokens: list[list[int]]) -> list[str]:
    assert all(one[-1] == END for one in tokens)
    return [tokenizer.decode(one[:-1]) for one in tokens]


def run(target: Any, tokenizer: Any, drafter: Any, grammar: Any, temperature: float, **how: Any) -> Any:
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    sampling = Sampling.full(len(prompts), temperature=temperature)
    return generate(target, drafter, prompts, sampling=sampling, seed=2, max_new_tokens=150, grammar=grammar, **how)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_texts_obey_their_schema_and_do_not_depend_on_drafts(
    target: Any, tokenizer: Any, library: Any, temperature: float
) -> None:
    grammar = compiler(tokenizer, library).json_schema(SCHEMA)
    plain = run(target, tokenizer, None, grammar, temperature)
    assert plain.status == [0, 0, 0] and all(map(obeys, texts(tokenizer, plain.tokens)))
    accepted = 0
    for name, drafter in {**CHAINS, "a model": lambda: DraftModel(target)}.items():
        drafted = run(target, tokenizer, drafter(), grammar, temperature)
        assert drafted.tokens == plain.tokens, name
        accepted += sum(sum(request.accepted) for request in drafted.statistics)
    assert accepted > 50


@pytest.mark.parametrize("rule", ["greedy", "ratio", "block", "typical", "distance", "recursive"])
def test_texts_obey_their_schema_under_every_rule(target: Any, tokenizer: Any, rule: Any) -> None:
    grammar = compiler(tokenizer, "llguidance").json_schema(SCHEMA)
    drafter = IndependentDrafts(target, 2) if rule == "recursive" else DraftModel(target)
    options = {"max_distance": 9} if rule == "distance" else {}
    done = run(target, tokenizer, drafter, grammar, 1.0, rule=rule, rule_options=options)
    assert all(map(obeys, texts(tokenizer, done.tokens)))
    if rule == "greedy":
        assert done.tokens == run(target, tokenizer, None, grammar, 0.0).tokens


def test_each_request_has_its_own_grammar_or_none(target: Any, tokenizer: Any) -> None:
    made = compiler(tokenizer, "xgrammar")
    grammars: list[Grammar | None] = [made.regex("[a-f]{30}"), None, made.choice(["one", "two"])]
    done = run(target, tokenizer, PromptLookup(), grammars, 1.0)
    free = run(target, tokenizer, None, None, 1.0)
    assert done.tokens[1] == free.tokens[1]
    first, last = texts(tokenizer, [done.tokens[0], done.tokens[2]])
    assert re.fullmatch("[a-f]{30}", first) and last in ("one", "two")
    with pytest.raises(ValueError, match="grammar must be one, or one of each of 3 requests, got 1"):
        run(target, tokenizer, None, grammars[:1], 1.0)


def test_a_grammar_that_fails_ends_the_call_with_its_reason(target: Any, tokenizer: Any) -> None:
    class Forgetful(Letters):
        def matcher(self) -> Matcher:
            return Forgetful()

        def accept(self, token: int) -> bool:
            return False

    with pytest.raises(RuntimeError, match=r"the grammar forbids token [1-9], which its own mask allowed"):
        run(target, tokenizer, None, Forgetful(), 1.0)
