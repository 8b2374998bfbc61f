"""Bodies of requests in OpenAI's form: every field is checked, and what is not served is refused."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_STOPS, LONGEST_STOP = 4, 256  # strings, and characters of one
MOST_TOP = 20  # log-probabilities a token
MOST_BIASES = 300
LEAST_REPETITION = 0.01  # logits are divided by it: near 0 they would have no finite maximum
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Fields that may only say what is done anyway.
ONLY: dict[str, tuple[Any, ...]] = {
    "echo": (None, False),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, False, True),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None,),
    "prediction": (None,),
    "audio": (None,),
}


@dataclass(frozen=True)
class Limits:
    """What a client may ask for.

    Attributes:
        body: bytes.
        choices: prompts times n.
        tokens: new ones of a choice.
    """

    body: int = 1 << 20
    choices: int = 16
    tokens: int = 4096


class ApiError(Exception):
    """A request that is refused.

    Attributes:
        status: of HTTP.
        message: says what to change.
        param: the field, if it is one's fault.
        code: a word for programs.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Say why."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """In OpenAI's form."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass
class Job:
    """A body that was checked.

    Attributes:
        model: its name, if it is given.
        prompts: texts or token ids of completions; one list of messages of a chat.
        is_chat: whether it is a chat.
        choices: of each prompt.
        limit: most new tokens; None: not given.
        seed: of the first choice.
        sampling: parameters of `Request` under its names.
        stops: strings.
        top_logprobs: see `Request`.
        streams: whether tokens are sent as they come.
        has_usage: whether a stream ends with the numbers of tokens.
        marks: whether pieces of text say if they were accepted drafts: an extension, for the page.
        grammar: a method of `GrammarCompiler` and its argument; None: any text.
    """

    model: str | None
    prompts: list[Any]
    is_chat: bool
    choices: int = 1
    limit: int | None = None
    seed: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    stops: list[str] = field(default_factory=list)
    top_logprobs: int | None = None
    streams: bool = False
    has_usage: bool = False
    marks: bool = False
    grammar: tuple[str, Any] | None = None


def parse_json(raw: bytes) -> dict[str, Any]:
    """An object of JSON.

    Raises:
        ApiError: it is none.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number of JSON")

    try:
        body = json.loads(raw, parse_constant=refuse)
        if not isinstance(body, dict):
            raise ValueError("an object is expected")
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is no character
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    return body


class Fields:
    """Takes fields out of a body; what is left in the end is unknown."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        """Begin with all of them."""
        self._left = dict(body)

    def take(self, name: str, default: Any, is_valid: Callable[[Any], bool], expected: str) -> Any:
        """The value of a field; null is its default."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not is_valid(value):
            raise ApiError(400, f"{name} must be {expected}, got {_short(value)}", param=name)
        return value

    def integer(self, name: str, default: int | None, least: int, most: int) -> Any:
        """A whole number."""
        return self.take(name, default, lambda v: _is_int(v) and least <= v <= most, f"an integer in [{least}, {most}]")

    def number(self, name: str, default: float, least: float, most: float, *, above: bool = False) -> float:
        """A number; `above`: greater than `least`."""

        def is_valid(value: Any) -> bool:
            is_number = _is_int(value) or (isinstance(value, float) and math.isfinite(value))
            return is_number and least <= value <= most and not (above and value == least)

        return float(self.take(name, default, is_valid, f"a number in {'(' if above else '['}{least:g}, {most:g}]"))

    def boolean(self, name: str) -> bool:
        """True or false."""
        return bool(self.take(name, False, lambda value: isinstance(value, bool), "true or false"))

    def end(self) -> None:
        """Nothing may be left but what is ignored, and what asks for nothing."""
        for name, allowed in ONLY.items():
            if self._left.pop(name, None) not in allowed:
                raise ApiError(400, f"{name} is not supported: leave it out", param=name, code="unsupported_parameter")
        unknown = sorted(set(self._left) - set(IGNORED))
        if unknown:
            raise ApiError(
                400, f"unknown fields: {', '.join(unknown)[:200]}", param=unknown[0], code="unknown_parameter"
            )


def completion(body: Mapping[str, Any], limits: Limits) -> Job:
    """A body of /v1/completions.

    Raises:
        ApiError: a wrong field.
    """
    fields = Fields(body)
    prompts = _prompts(fields)
    job = _common(fields, prompts, limits, is_chat=False)
    job.limit = fields.integer("max_tokens", min(16, limits.tokens), 1, limits.tokens)
    job.top_logprobs = fields.integer("logprobs", None, 0, MOST_TOP)
    best_of = fields.integer("best_of", job.choices, 1, limits.choices)
    if best_of != job.choices:
        raise ApiError(400, "best_of must be n: no choice is thrown away", param="best_of")
    fields.end()
    return job


def chat(body: Mapping[str, Any], limits: Limits) -> Job:
    """A body of /v1/chat/completions.

    Raises:
        ApiError: a wrong field.
    """
    fields = Fields(body)
    expected = "a list of at least one message"
    messages = fields.take("messages", None, lambda v: isinstance(v, list) and bool(v), expected)
    if messages is None:
        raise ApiError(400, f"messages must be {expected}, got none", param="messages")
    job = _common(fields, [[_message(i, m) for i, m in enumerate(messages)]], limits, is_chat=True)
    older = fields.integer("max_tokens", None, 1, limits.tokens)
    job.limit = fields.integer("max_completion_tokens", older, 1, limits.tokens)
    asks, top = fields.boolean("logprobs"), fields.integer("top_logprobs", 0, 0, MOST_TOP)
    if top and not asks:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    job.top_logprobs = top if asks else None
    fields.end()
    return job


def _common(fields: Fields, prompts: list[Any], limits: Limits, *, is_chat: bool) -> Job:
    """What completions and chats share."""
    model = fields.take("model", None, lambda v: isinstance(v, str), "a string")
    choices = fields.integer("n", 1, 1, limits.choices)
    if len(prompts) * choices > limits.choices:
        got = len(prompts) * choices
        raise ApiError(400, f"prompts times n must be at most {limits.choices}, got {got}", param="n")
    seed = fields.integer("seed", None, -(2**63), 2**63 - 1 - limits.choices)
    sampling = {
        "temperature": fields.number("temperature", 1.0, 0, 100),
        "top_p": fields.number("top_p", 1.0, 0, 1, above=True),
        "top_k": fields.integer("top_k", 0, 0, 2**31 - 1),
        "min_p": fields.number("min_p", 0.0, 0, 1),
        "presence": fields.number("presence_penalty", 0.0, -2, 2),
        "frequency": fields.number("frequency_penalty", 0.0, -2, 2),
        "repetition": fields.number("repetition_penalty", 1.0, LEAST_REPETITION, 10),
        "bias": _bias(fields),
    }
    streams = fields.boolean("stream")
    options = fields.take("stream_options", {}, lambda v: isinstance(v, dict), "an object")
    if options and not streams:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    inner = Fields(options)
    has_usage = inner.boolean("include_usage")
    inner.end()
    stops = fields.take(
        "stop", [], _is_stop, f"a string or up to {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters"
    )
    return Job(
        model=model,
        prompts=prompts,
        is_chat=is_chat,
        choices=choices,
        seed=secrets.randbits(62) if seed is None else seed,
        sampling=sampling,
        stops=[stops] if isinstance(stops, str) else stops,
        streams=streams,
        has_usage=has_usage,
        marks=fields.boolean("mark_accepted"),
        grammar=_grammar(fields),
    )


def _grammar(fields: Fields) -> tuple[str, Any] | None:
    """What `response_format`, as OpenAI has it, or `structured_outputs`, as vLLM has it, says of the text."""
    expected = "an object with type text, json_object or json_schema"
    form = fields.take("response_format", {"type": "text"}, lambda v: isinstance(v, dict), expected)
    wanted = fields.take("structured_outputs", None, lambda v: isinstance(v, dict), "an object")
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise ApiError(400, f"response_format must be {expected}, got {_short(form)}", param="response_format")
    if wanted is not None and kind != "text":
        raise ApiError(400, "response_format and structured_outputs exclude each other", param="structured_outputs")
    if kind == "json_object":
        return "json_schema", {"type": "object"}
    if kind == "json_schema":
        inner = form.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict):
            raise ApiError(400, "response_format.json_schema must be an object with a schema", param="response_format")
        return "json_schema", schema
    return None if wanted is None else _structured(Fields(wanted))


def _structured(inner: Fields) -> tuple[str, Any]:
    """The one thing that `structured_outputs` asks for."""
    found = {
        "json_schema": inner.take("json", None, lambda v: isinstance(v, dict | str), "a JSON schema"),
        "regex": inner.take("regex", None, lambda v: isinstance(v, str), "a string"),
        "choice": inner.take("choice", None, _is_texts, "a list of strings, none of them empty"),
        "grammar": inner.take("grammar", None, lambda v: isinstance(v, str), "a string"),
    }
    if inner.boolean("json_object"):
        found["json_object"] = {"type": "object"}
    inner.end()
    given = [(kind.replace("json_object", "json_schema"), asked) for kind, asked in found.items() if asked is not None]
    if len(given) != 1:
        expected = "one of json, json_object, regex, choice and grammar"
        raise ApiError(400, f"structured_outputs must have {expected}, got {len(given)}", param="structured_outputs")
    return given[0]


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) and text for text in value)


def _prompts(fields: Fields) -> list[Any]:
    """One text, texts, one list of ids, or lists of ids."""
    expected = "a string, a list of strings, a list of token ids, or a list of such lists, none of them empty"
    prompt = fields.take("prompt", None, lambda v: bool(v) and isinstance(v, str | list), expected)
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(map(_is_int, prompt))):
        return [prompt]
    if prompt is None or not all(_is_prompt(one) for one in prompt):
        raise ApiError(400, f"prompt must be {expected}", param="prompt")
    return list(prompt)


def _is_prompt(value: Any) -> bool:
    return bool(value) and (isinstance(value, str) or (isinstance(value, list) and all(map(_is_int, value))))


def _message(place: int, message: Any) -> dict[str, str]:
    """A message with its parts joined."""
    name = f"messages[{place}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"{name} must be an object with role and content", param="messages")
    unknown = set(message) - {"role", "content", "name"}
    if any(message[key] is not None for key in unknown):
        raise ApiError(
            400, f"{name} may have role, content and name, got {', '.join(sorted(unknown))}", param="messages"
        )
    content = message.get("content")
    if isinstance(content, list):
        is_text = [isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content]
        if not all(is_text):
            raise ApiError(400, f"{name}.content may have parts of type text alone", param="messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ApiError(400, f"{name}.content must be a string or a list of text parts", param="messages")
    who = message.get("name")
    if not isinstance(who, str | None):
        raise ApiError(400, f"{name}.name must be a string", param="messages")
    return {"role": message["role"], "content": content} | ({} if who is None else {"name": who})


def _bias(fields: Fields) -> dict[int, float]:
    """Biases by id; -100 bans an id and 100 demands it, as OpenAI says."""

    def is_valid(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and len(value) <= MOST_BIASES
            and all(key.isascii() and key.isdigit() and len(key) < 10 for key in value)
            and all((_is_int(b) or isinstance(b, float)) and -100 <= b <= 100 for b in value.values())
        )

    expected = f"an object of at most {MOST_BIASES} token ids with biases in [-100, 100]"
    given = fields.take("logit_bias", {}, is_valid, expected)
    return {int(key): -math.inf if bias == -100 else float(bias) for key, bias in given.items()}


def _is_stop(value: Any) -> bool:
    strings: Sequence[Any] = [value] if isinstance(value, str) else value if isinstance(value, list) else [None]
    return len(strings) <= MOST_STOPS and all(isinstance(s, str) and 1 <= len(s) <= LONGEST_STOP for s in strings)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
