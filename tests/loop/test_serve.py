"""The server over HTTP: its texts are those of the loop, its errors are OpenAI's, and nobody harms anybody else."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from grammars import SCHEMA, obeys

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")
pytest.importorskip("prometheus_client", reason="the extra serve is not installed")

import httpx
from model_folders import pieces, save_model
from running_server import TEMPLATE, Limits, Running, running

from specdec_kernels import Edits, Sampling
from specdec_loop import Lookahead, PromptLookup, generate

PROMPT = "def f(a, a): return a, a, a"

pytestmark = pytest.mark.usefixtures("one_thread")


def loop(folder: Path, prompts: list[str], tokens: int, temperature: float = 1.0, **more: Any) -> list[list[int]]:
    """Tokens of `generate`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    sampling = Sampling.full(len(ids), temperature=temperature, top_p=more.pop("top_p", None))
    how = {"sampling": sampling, "max_new_tokens": tokens, **more}
    return generate(model, PromptLookup(), ids, **how).tokens


def text(server: Running, tokens: list[int]) -> str:
    return str(server.tokenizer.decode(tokens, skip_special_tokens=True))


# --- texts


@pytest.mark.parametrize("drafter", [lambda: None, PromptLookup, lambda: Lookahead(3, 4, 2, pool=32)])
def test_a_seeded_text_is_that_of_the_loop_whatever_the_drafter(folder: Path, drafter: Any) -> None:
    with running(folder, drafter) as server:
        found = server.complete(PROMPT, max_tokens=40, seed=7, temperature=0.8, top_p=0.9)
    (tokens,) = loop(folder, [PROMPT], 40, 0.8, seed=7, top_p=0.9)
    assert found["choices"][0]["text"] == text(server, tokens)
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), len(tokens))


def test_prompts_and_choices_have_the_seeds_of_a_batch(folder: Path, server: Running) -> None:
    prompts = ["one", "two, two, two"]
    found = server.complete(prompts, n=2, max_tokens=12, seed=-3)
    expected = loop(folder, [prompts[0]] * 2 + [prompts[1]] * 2, 12, seed=-3)
    assert [choice["text"] for choice in found["choices"]] == [text(server, tokens) for tokens in expected]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    ids = [server.tokenizer(prompt)["input_ids"] for prompt in prompts]
    assert server.complete(ids, n=2, max_tokens=12, seed=-3)["choices"] == found["choices"]
    assert server.complete(ids[0], max_tokens=12, seed=-3)["choices"] == found["choices"][:1]


def test_without_a_seed_texts_differ(server: Running) -> None:
    endless = {"max_tokens": 24, "logit_bias": {"0": -100}}
    texts = {server.complete("x", **endless)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 3


@pytest.mark.parametrize("n", [1, 3])
def test_the_chunks_of_a_stream_join_to_the_whole_answer(server: Running, n: int) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 60, "seed": 4, "temperature": 1.3, "n": n, "logprobs": 1}
    whole = server.client.post("/v1/completions", json=fields).json()
    chunks = server.chunks("/v1/completions", **fields, stream_options={"include_usage": True})
    assert (
        chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    )
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in range(n):
        own = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        choice = whole["choices"][index]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        for column in ("tokens", "token_logprobs", "text_offset"):
            joined = [x for part in own for x in part["logprobs"][column]]
            assert joined == pytest.approx(choice["logprobs"][column]) if column == "token_logprobs" else joined


def test_a_stop_string_ends_a_text_and_no_part_of_it_is_shown(server: Running) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 80, "seed": 2}
    free = server.complete(**fields)["choices"][0]["text"]
    stop = next(free[i : i + 3] for i in range(30, 60) if "\ufffd" not in free[i : i + 3])
    end = free.index(stop)
    found = server.complete(**fields, stop=["never there", stop])["choices"][0]
    assert (found["text"], found["finish_reason"]) == (free[:end], "stop")
    shown = "".join(c["choices"][0]["text"] for c in server.chunks("/v1/completions", **fields, stop=stop))
    assert shown == free[:end]


def test_log_probabilities_are_those_of_the_model(folder: Path, server: Running) -> None:
    found = server.complete(PROMPT, max_tokens=10, seed=3, logprobs=3)["choices"][0]
    (tokens,) = loop(folder, [PROMPT], 10, seed=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = server.tokenizer(PROMPT)["input_ids"]
    with torch.no_grad():
        expected = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    own = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert found["logprobs"]["token_logprobs"] == pytest.approx(own.tolist(), abs=1e-3)
    assert found["logprobs"]["tokens"] == [server.tokenizer.decode([token]) for token in tokens]
    best = [max(top.values()) for top in found["logprobs"]["top_logprobs"]]
    assert best == pytest.approx(expected.amax(1).tolist(), abs=1e-3)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a tokenizer of sentence pieces; one end token is not special."""
    folder = tmp_path_factory.mktemp("pieces")
    tokenizer = pieces("Hello", "▁Hello", "▁world", "END")
    save_model(folder, vocab=len(tokenizer))
    tokenizer.save_pretrained(folder)
    with running(folder) as server:
        server.engine.ends = tokenizer.convert_tokens_to_ids(["</s>", "END"])
        server.tokenizer.chat_template = "Hello"
        yield server


def demanded(server: Running, *tokens: str) -> dict[str, Any]:
    """Fields of a text of these tokens alone."""
    bias = {str(id_): 100 for id_ in server.tokenizer.convert_tokens_to_ids(list(tokens))}
    return {"temperature": 0 if len(tokens) == 1 else 1, "logit_bias": bias}


def test_a_continuation_keeps_the_space_that_its_first_token_begins_with(sentences: Running) -> None:
    fields = {"max_tokens": 2, **demanded(sentences, "▁world")}
    choice = sentences.complete("Hello", logprobs=1, **fields)["choices"][0]
    assert choice["text"] == " world world"
    assert choice["logprobs"]["tokens"] == [" world", " world"] and choice["logprobs"]["text_offset"] == [0, 6]
    assert list(choice["logprobs"]["top_logprobs"][0]) != ["world"]
    stopped = sentences.complete("Hello", stop=" world", **fields)
    assert (stopped["choices"][0]["text"], stopped["choices"][0]["finish_reason"]) == ("", "stop")
    assert stopped["usage"]["completion_tokens"] == 1
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, **fields}
    said = sentences.client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert said["message"]["content"] == "world world"  # an answer of its own
    assert [one["token"] for one in said["logprobs"]["content"]] == ["world", " world"]


def test_a_stop_string_across_a_special_token_ends_the_request_too(sentences: Running) -> None:
    sentences.engine.ends, before = [], sentences.engine.ends
    fields = {"max_tokens": 24, **demanded(sentences, "▁world", "</s>", "Hello")}
    found = [sentences.complete("Hello", stop=" worldHello", seed=seed, **fields) for seed in range(8)]
    free = [sentences.complete("Hello", seed=seed, **fields)["choices"][0]["text"] for seed in range(8)]
    sentences.engine.ends = before
    for answer, text in zip(found, free, strict=True):
        choice = answer["choices"][0]
        assert choice["text"] == text.partition(" worldHello")[0]
        assert choice["finish_reason"] == ("stop" if " worldHello" in text else "length")
    assert all(" worldHello" in text for text in free)


def test_an_end_token_is_no_text_though_it_is_not_special(sentences: Running) -> None:
    fields = {"max_tokens": 2, "seed": 3, "logprobs": 0, "prompt": "Hello", **demanded(sentences, "END")}
    choice = sentences.complete(**fields)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == ("", "stop", ["END"])
    assert "".join(chunk["choices"][0]["text"] for chunk in sentences.chunks("/v1/completions", **fields)) == ""


def test_penalties_and_biases_are_those_of_the_loop(folder: Path, server: Running) -> None:
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    edits = Edits(
        repetition=torch.tensor([1.4]), presence=torch.tensor([0.5]), frequency=torch.tensor([-0.5]),
        bias_ids=torch.tensor([[100, 66]]).int(), bias=torch.tensor([[-float("inf"), 4.5]]),
    )  # fmt: skip
    found = server.complete(PROMPT, max_tokens=30, seed=3, logit_bias={"100": -100, "66": 4.5}, **penalties)
    (tokens,) = loop(folder, [PROMPT], 30, seed=3, edits=edits)
    assert found["choices"][0]["text"] == text(server, tokens) != text(server, loop(folder, [PROMPT], 30, seed=3)[0])


def test_a_chat_is_a_completion_of_the_template(server: Running) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]},
    ]
    fields = {"messages": messages, "seed": 5, "max_completion_tokens": 20, "logprobs": True, "top_logprobs": 2}
    refused = server.client.post("/v1/chat/completions", json=fields)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_chat_template")
    server.tokenizer.chat_template = TEMPLATE
    try:
        answer = server.client.post("/v1/chat/completions", json=fields).json()
        chunks = server.chunks("/v1/chat/completions", **fields)
    finally:
        server.tokenizer.chat_template = None
    prompt = "system: Be brief.\nuser: 1 + 1?\nassistant: "
    same = server.complete(prompt, seed=5, max_tokens=20)["choices"][0]["text"]
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": same}
    assert answer["object"] == "chat.completion" and chunks[0]["object"] == "chat.completion.chunk"
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == same
    listed = choice["logprobs"]["content"]
    assert len(listed) == answer["usage"]["completion_tokens"] and len(listed[0]["top_logprobs"]) == 2
    for one in listed:
        assert one["bytes"] == (None if "\ufffd" in one["token"] else list(one["token"].encode()))


def test_accepted_drafts_are_marked_for_whom_asks(server: Running) -> None:
    fields = {"max_tokens": 40, "temperature": 0, "mark_accepted": True}
    choice = server.complete("ab" * 20, **fields)["choices"][0]
    assert "".join(piece for piece, _ in choice["pieces"]) == choice["text"]
    again = server.complete("ab" * 20, **fields)["choices"][0]  # the drafter knows the text by now
    assert sum(is_accepted for _, is_accepted in again["pieces"]) > 10
    chunks = server.chunks("/v1/completions", prompt="ab" * 20, **fields)
    said = [piece for chunk in chunks for piece, _ in chunk["choices"][0]["pieces"]]
    assert said == [piece for piece, _ in choice["pieces"]]
    assert "pieces" not in server.complete("ab", max_tokens=1)["choices"][0]


# --- errors

REFUSED: dict[str, tuple[Any, int, str | None, str | None]] = {  # body, status, param, code
    "no JSON": ("{", 400, None, "invalid_json"),
    "not an object": ("[1]", 400, None, "invalid_json"),
    "deep": ("[" * 100000, 400, None, "invalid_json"),
    "a number that is none": ('{"prompt": "x", "temperature": NaN}', 400, None, "invalid_json"),
    "half a character": ('{"prompt": "\\ud800"}', 400, None, "invalid_json"),
    "no UTF-8": (b'{"prompt": "\xff"}', 400, None, "invalid_json"),
    "no prompt": ({}, 400, "prompt", None),
    "an empty prompt": ({"prompt": ""}, 400, "prompt", None),
    "a mixed prompt": ({"prompt": ["x", 1]}, 400, "prompt", None),
    "an id that is none": ({"prompt": [1, 257]}, 400, "prompt", None),
    "a negative id": ({"prompt": [-1]}, 400, "prompt", None),
    "another model": ({"prompt": "x", "model": "gpt"}, 404, "model", "model_not_found"),
    "too hot": ({"prompt": "x", "temperature": 1e9}, 400, "temperature", None),
    "below freezing": ({"prompt": "x", "temperature": -1}, 400, "temperature", None),
    "true is no number": ({"prompt": "x", "temperature": True}, 400, "temperature", None),
    "top_p of 0": ({"prompt": "x", "top_p": 0}, 400, "top_p", None),
    "a penalty near 0": ({"prompt": "x", "repetition_penalty": 1e-46}, 400, "repetition_penalty", None),
    "no choice": ({"prompt": "x", "n": 0}, 400, "n", None),
    "no token": ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens", None),
    "too many tokens": ({"prompt": "x", "max_tokens": 5000}, 400, "max_tokens", None),
    "far too many": ({"prompt": "x", "max_tokens": 10**30}, 400, "max_tokens", None),
    "too long": ({"prompt": "x" * 240, "max_tokens": 20}, 400, "max_tokens", "context_length_exceeded"),
    "too long a prompt": ({"prompt": "x" * 256, "max_tokens": 1}, 400, "prompt", "context_length_exceeded"),
    "too many choices": ({"prompt": ["x", "y"], "n": 9}, 400, "n", None),
    "too many stops": ({"prompt": "x", "stop": list("abcde")}, 400, "stop", None),
    "an empty stop": ({"prompt": "x", "stop": ""}, 400, "stop", None),
    "a bias of no id": ({"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias", None),
    "a bias of a negative id": ({"prompt": "x", "logit_bias": {"-1": 1}}, 400, "logit_bias", None),
    "a bias of a large id": ({"prompt": "x", "logit_bias": {"300": 1}}, 400, "logit_bias", None),
    "a huge seed": ({"prompt": "x", "seed": 2**63}, 400, "seed", None),
    "echo": ({"prompt": "x", "echo": True}, 400, "echo", "unsupported_parameter"),
    "best_of": ({"prompt": "x", "best_of": 2}, 400, "best_of", None),
    "unknown": ({"prompt": "x", "beams": 2}, 400, "beams", "unknown_parameter"),
    "options of no stream": ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options", None),
    "no schema": ({"prompt": "x", "response_format": {"type": "json_schema"}}, 400, "response_format", None),
    "another format": ({"prompt": "x", "response_format": {"type": "yaml"}}, 400, "response_format", None),
    "two grammars": (
        {"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["b"]}},
        400,
        "structured_outputs",
        None,
    ),
    "no grammar": ({"prompt": "x", "structured_outputs": {}}, 400, "structured_outputs", None),
    "an unknown kind of grammar": (
        {"prompt": "x", "structured_outputs": {"lark": "a"}},
        400,
        "lark",
        "unknown_parameter",
    ),
    "too many logprobs": ({"prompt": "x", "logprobs": 21}, 400, "logprobs", None),
}


@pytest.mark.parametrize(("body", "status", "param", "code"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_refused_in_openais_form(
    server: Running, body: Any, status: int, param: str | None, code: str | None
) -> None:
    raw = body if isinstance(body, str | bytes) else json.dumps(body)
    answer = server.client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
    assert error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": []},
        {"messages": ["hi"]},
        {"messages": [{"role": "user", "content": "x", "name": 5}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{}]},
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "xml"}},
        {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
    ],
)
def test_a_chat_that_is_not_served_is_refused(server: Running, fields: Any) -> None:
    assert server.client.post("/v1/chat/completions", json=fields).status_code == 400


@pytest.mark.parametrize("library", ["llguidance", "xgrammar"])
def test_answers_obey_the_grammar_of_their_request(folder: Path, library: Any) -> None:
    pytest.importorskip(library, reason="the extra grammar is not installed")
    schema = {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": SCHEMA}}
    asks = {"max_tokens": 150, "n": 2, "seed": 3}
    with running(folder, PromptLookup, library=library) as server:
        server.tokenizer.chat_template = TEMPLATE
        for choice in server.complete(PROMPT, response_format=schema, **asks)["choices"]:
            assert obeys(choice["text"]) and choice["finish_reason"] == "stop"
        body = {"messages": [{"role": "user", "content": "a pet"}], "response_format": schema, **asks}
        chunks = server.chunks("/v1/chat/completions", **body)
        said = ["".join(c["delta"]["content"] for k in chunks for c in k["choices"] if c["index"] == i) for i in (0, 1)]
        assert all(map(obeys, said))
        for grammar, matches in {
            "regex": ("[a-f]{4,6}", "[a-f]{4,6}"),
            "choice": (["one", "two (2)"], r"one|two \(2\)"),
            "json": ({"enum": [1, True]}, "1|true"),
            "grammar": ('start: "ab" | "cd"' if library == "llguidance" else 'root ::= "ab" | "cd"', "ab|cd"),
        }.items():
            choices = server.complete(PROMPT, structured_outputs={grammar: matches[0]}, **asks)["choices"]
            assert all(re.fullmatch(matches[1], choice["text"]) for choice in choices)
        start = server.complete(PROMPT, max_tokens=5, temperature=0, response_format={"type": "json_object"})
        assert start["choices"][0]["text"].startswith("{")
        assert len(server.complete(PROMPT, max_tokens=5, response_format={"type": "text"})["choices"]) == 1
        large, deep = {"type": "array", "minItems": 10**9}, '{"not":' * 10000 + "{}" + "}" * 10000
        for wrong in ({"type": "animal"}, {"type": "array", "uniqueItems": True}, large, deep):
            asked = {"prompt": "x", "structured_outputs": {"json": wrong}}
            answer = server.client.post("/v1/completions", json=asked)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_grammar")


def test_a_server_without_a_grammar_library_says_that_it_is_its_own_lack(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_loop.grammar.compiler.find_spec", lambda name: None)
    with running(folder) as server:
        asked = {"prompt": "x", "structured_outputs": {"regex": "a+"}}
        answer = server.client.post("/v1/completions", json=asked)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (501, "no_grammars", "server_error")
        assert "llguidance is not installed" in error["message"]


def test_the_name_of_a_message_reaches_the_template(server: Running) -> None:
    template = "{% for m in messages %}{{ m.role }}{{ ' ' + m.name if m.name }}: {{ m.content }}\n{% endfor %}"
    server.tokenizer.chat_template, before = template, server.tokenizer.chat_template
    messages = [{"role": "user", "name": "Ann", "content": "hi"}, {"role": "user", "name": None, "content": "ho"}]
    try:
        asked = {"messages": messages, "max_completion_tokens": 4, "seed": 5}
        answer = server.client.post("/v1/chat/completions", json=asked).json()
        want = server.complete("user Ann: hi\nuser: ho\n", max_tokens=4, seed=5)
        assert answer["choices"][0]["message"]["content"] == want["choices"][0]["text"]
        assert answer["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
    finally:
        server.tokenizer.chat_template = before


def test_other_methods_paths_and_types_are_errors_too(server: Running) -> None:
    assert server.client.get("/v1/completions").status_code == 405
    assert server.client.get("/nowhere").json()["error"]["message"] == "GET /nowhere: Not Found"
    plain = server.client.post("/v1/completions", content='{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert plain.status_code == 415


def test_a_large_body_is_refused_while_it_comes(folder: Path) -> None:
    with running(folder, limits=Limits(body=1000, tokens=8)) as server:
        assert server.client.post("/v1/completions", json={"prompt": "x" * 2000}).status_code == 413
        sent = (b"x" * 100 for _ in range(1000))  # chunks, without a length that says it
        headers = {"content-type": "application/json"}
        with contextlib.suppress(httpx.WriteError):
            assert server.client.post("/v1/completions", content=sent, headers=headers).status_code == 413
        assert server.complete("x", logit_bias={"0": -100})["usage"]["completion_tokens"] == 8  # 16 if more are served


def test_a_body_that_does_not_come_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_loop.serve.api.BODY_SECONDS", 0.2)
    with running(folder) as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = (
            "POST /v1/completions HTTP/1.1",
            "host: x",
            "content-type: application/json",
            "content-length: 9",
            "",
            "{",
        )
        connection.sendall("\r\n".join(head).encode())
        assert connection.recv(12) == b"HTTP/1.1 408"


def test_the_messages_of_a_chat_are_named_where_they_are_too_long(server: Running) -> None:
    server.tokenizer.chat_template = TEMPLATE
    try:
        for fields, param in (({}, "messages"), ({"max_completion_tokens": 1}, "messages")):
            body = {"messages": [{"role": "user", "content": "x" * 300}], **fields}
            error = server.client.post("/v1/chat/completions", json=body).json()["error"]
            assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    finally:
        server.tokenizer.chat_template = None


def test_models_and_health(server: Running) -> None:
    assert server.client.get("/health").json() == {"status": "ok"}
    (card,) = server.client.get("/v1/models").json()["data"]
    assert card == server.client.get("/v1/models/tiny").json() and card["id"] == "tiny"
    assert server.client.get("/v1/models/other").status_code == 404


def test_only_those_with_a_key_are_served(folder: Path) -> None:
    with running(folder, keys=["one", "two", "voilà"]) as server:
        for key in ("no", "three", "on", "ones"):
            answer = server.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        for key in ("one", "two"):
            assert server.client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        for encoding in ("utf-8", "latin-1"):
            key = {"authorization": "Bearer voilà".encode(encoding)}
            assert server.client.get("/v1/models", headers=key).status_code == 200  # type: ignore[arg-type] # bytes do
        for header in ({}, {"authorization": "one"}, {"authorization": "Basic one"}):
            assert server.client.get("/metrics", headers=header).status_code == 401
        assert server.client.get("/health").status_code == server.client.get("/").status_code == 200
        assert server.client.post("/v1/completions", json={"prompt": "x"}).status_code == 401


def test_a_loopback_server_answers_to_its_own_names(folder: Path) -> None:
    with running(folder, hosts=["127.0.0.1", "[::1]", "localhost"]) as server:
        for host, status in (("localhost:80", 200), ("[::1]:80", 200), ("[::1]", 200), ("evil.example:80", 403)):
            assert server.client.get("/v1/models", headers={"host": host}).status_code == status
