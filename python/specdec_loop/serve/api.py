"""The server's routes: OpenAI's completions and chats, models, health, metrics, and a page to try them."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..grammar import Grammar, GrammarCompiler, Library
from ..stops import Stops
from .answers import Answer
from .engine import Engine
from .metrics import Metrics
from .request import Request
from .scheduler import FullError, Scheduler, Stream
from .schema import ApiError, Job, Limits, chat, completion, parse_json

PAGE = Path(__file__).with_name("page.html")
POLICY = "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
BODY_SECONDS = 30  # for a client to send its body
T = TypeVar("T")
Handler = Callable[[HttpRequest], Awaitable[Response]]


class GoneError(Exception):
    """The client has closed its connection."""


class Api:
    """Answers HTTP requests for one model."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        name: str,
        queue: int = 256,
        keys: Sequence[str] = (),
        hosts: Sequence[str] = (),
        limits: Limits | None = None,
        library: Library = "llguidance",
    ) -> None:
        """Prepare.

        Args:
            engine: of the model.
            tokenizer: of the model.
            name: of the model, for clients.
            queue: requests that may wait.
            keys: of the API, any of which opens it; none: it is open.
            hosts: names by which clients may call the server; none: any. A page on the web could else call a server on
                a loopback address through a name of its own.
            limits: of what a client may ask for.
            library: of grammars, see `GrammarCompiler`.
        """
        self._engine, self._tokenizer, self._name = engine, tokenizer, name
        self._keys, self._hosts, self._begun = [key.encode() for key in keys], list(hosts), int(time.time())
        self._metrics = Metrics(engine)
        self.scheduler = Scheduler(engine, self._metrics, queue=queue)
        limits = limits or Limits()
        self._limits = replace(limits, choices=min(limits.choices, self.scheduler.room))
        self._encoding = ThreadPoolExecutor(1, "tokenizer")  # a long prompt does not stop the event loop
        self._compiling = ThreadPoolExecutor(1, "compiler")  # nor does a large grammar, nor prompts
        self._library: Library = library
        self._compiler: GrammarCompiler | None = None  # not before a request has a grammar

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/", self._guarded(self._page, is_open=True)),
            Route("/health", self._guarded(self._health, is_open=True)),
            Route("/metrics", self._guarded(self._counts)),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/models/{name:path}", self._guarded(self._model)),
            Route("/v1/completions", self._guarded(self._completion), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
        ]
        handlers = {HTTPException: self._unknown, Exception: self._broken}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.scheduler.start()
        yield
        await self.scheduler.stop()
        self._encoding.shutdown()
        self._compiling.shutdown()

    # --- host and key

    def _guarded(self, handler: Handler, *, is_open: bool = False) -> Handler:
        """A handler behind the checks of host and key, whose errors are answers."""

        async def guarded(request: HttpRequest) -> Response:
            try:
                self._check_host(request)
                if not is_open:
                    self._check_key(request)
                return await handler(request)
            except ApiError as error:
                return self._refusal(error)
            except (GoneError, ClientDisconnect):
                return Response(status_code=499)  # nobody reads it

        return guarded

    def _check_host(self, request: HttpRequest) -> None:
        host = request.headers.get("host", "").rsplit(":", 1)
        name = host[0] if len(host) == 1 or host[1].isdigit() else ":".join(host)
        if self._hosts and name.lower() not in self._hosts:
            message = f"this server is called {' or '.join(self._hosts)}, not {name[:100]!r}"
            raise ApiError(403, message, code="wrong_host")

    def _check_key(self, request: HttpRequest) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = ""
        given = given.strip(" \t")  # decoded as Latin-1, which most clients do not send: it may be UTF-8
        # All keys are compared, so that the time tells nothing.
        forms = given.encode("latin-1"), given.encode()
        matches = [hmac.compare_digest(form, key) for key in self._keys for form in forms]
        if self._keys and not any(matches):
            message, header = "a valid API key is needed: Authorization: Bearer KEY", {"www-authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_key", headers=header)

    def _refusal(self, error: ApiError) -> Response:
        self._metrics.refused(error.status)
        return JSONResponse(error.body(), error.status, error.headers)

    async def _unknown(self, request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return self._refusal(ApiError(error.status_code, message, headers=error.headers))

    async def _broken(self, request: HttpRequest, error: Exception) -> Response:
        return self._refusal(ApiError(500, "an error of the server: its log has more"))

    # --- small answers

    async def _page(self, request: HttpRequest) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"content-security-policy": POLICY})

    async def _health(self, request: HttpRequest) -> Response:
        is_alive = self.scheduler.is_alive
        return JSONResponse({"status": "ok" if is_alive else "stopped"}, 200 if is_alive else 503)

    async def _counts(self, request: HttpRequest) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: HttpRequest) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        about = {"id": self._name, "object": "model", "created": self._begun, "owned_by": "specdec_loop"}
        return {**about, "max_model_len": self._engine.longest}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._name):
            message = f"there is no model {name[:100]!r} here but {self._name!r}"  # type: ignore[index] # it is not None
            raise ApiError(404, message, param="model", code="model_not_found")

    # --- texts

    async def _completion(self, request: HttpRequest) -> Response:
        return await self._answer(request, completion(await self._body(request), self._limits))

    async def _chat(self, request: HttpRequest) -> Response:
        return await self._answer(request, chat(await self._body(request), self._limits))

    async def _body(self, request: HttpRequest) -> dict[str, Any]:
        """The JSON of a request of limited size; a page elsewhere cannot send this type without asking first."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"content-type must be application/json, got {kind[:100]!r}")

        async def read() -> bytes:
            parts, size = [], 0
            async for part in request.stream():
                size += len(part)
                if size > self._limits.body:
                    raise ApiError(413, f"the body must have at most {self._limits.body} bytes", code="body_too_large")
                parts.append(part)
            return b"".join(parts)

        try:
            return parse_json(await asyncio.wait_for(read(), BODY_SECONDS))
        except asyncio.TimeoutError as error:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS} s") from error

    async def _answer(self, request: HttpRequest, job: Job) -> Response:
        self._check_model(job.model)
        encode = asyncio.get_running_loop().run_in_executor
        prompts = [await encode(self._encoding, self._encoded, job, prompt) for prompt in job.prompts]
        grammar = None if job.grammar is None else await encode(self._compiling, self._compiled, *job.grammar)
        requests = self._requests(job, prompts, grammar)
        answer = Answer(job, requests, self._name, self._tokenizer, self._engine.ends)
        try:
            stream = self.scheduler.submit(requests)
        except FullError as error:
            wait = {"retry-after": str(error.seconds)}
            raise ApiError(429, str(error), code="queue_full", headers=wait) from error
        except RuntimeError as error:
            raise ApiError(503, str(error), code="stopped") from error
        if job.streams:
            return Events(request, stream, answer, has_usage=job.has_usage)
        try:
            await unless_gone(request.receive, _collect(stream, answer))
        finally:
            stream.close()
        return JSONResponse(answer.whole())

    def _encoded(self, job: Job, prompt: Any) -> list[int]:
        """Token ids of a prompt."""
        if job.is_chat:
            if not self._tokenizer.chat_template:
                raise ApiError(400, f"the tokenizer of {self._name} has no chat template: use /v1/completions",
                               code="no_chat_template")  # fmt: skip
            try:
                ids = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
            except Exception as error:  # a template raises what it likes
                raise ApiError(400, f"the chat template refuses these messages: {error}", param="messages") from error
        elif isinstance(prompt, str):
            ids = self._tokenizer(prompt)["input_ids"]
        else:
            ids = prompt
        vocab = self._engine.vocab
        if not ids or not 0 <= min(ids) <= max(ids) < vocab:
            raise ApiError(400, f"a prompt must be of at least one token, with ids in [0, {vocab})", param="prompt")
        return list(ids)

    def _compiled(self, kind: str, asked: Any) -> Grammar:
        """The grammar of a job."""
        if self._compiler is None:
            engine = self._engine
            try:
                self._compiler = GrammarCompiler(self._tokenizer, engine.vocab, engine.ends, library=self._library)
            except ValueError as error:
                raise ApiError(501, f"no grammars are served here: {error}", code="no_grammars") from error
        try:
            grammar: Grammar = getattr(self._compiler, kind)(asked)
        except ValueError as error:
            raise ApiError(400, f"the grammar is refused: {str(error)[:500]}", code="invalid_grammar") from error
        return grammar

    def _requests(self, job: Job, prompts: Sequence[list[int]], grammar: Grammar | None) -> list[Request]:
        """Choices of all prompts, the first of each as leader of the others."""
        vocab = self._engine.vocab
        if any(token >= vocab for token in job.sampling["bias"]):
            raise ApiError(400, f"logit_bias must be of ids below {vocab}", param="logit_bias")
        made: list[Request] = []
        for prompt in prompts:
            before = [] if job.is_chat else prompt
            stops = Stops([*self._engine.ends, *job.stops], self._tokenizer, before=before)
            limit = self._limit(job, len(prompt))
            first = len(made)
            for n in range(job.choices):
                seed = job.seed + len(made)  # as a batch of `generate` numbers them
                leader = made[first] if n else None
                made.append(
                    Request(prompt, limit, seed=seed, stops=stops, grammar=grammar, top_logprobs=job.top_logprobs,
                            leader=leader, **job.sampling)
                )  # fmt: skip
        return made

    def _limit(self, job: Job, prompt: int) -> int:
        """Most new tokens behind a prompt of so many."""
        longest = self._engine.longest
        if prompt >= longest:
            message = f"at most {longest} tokens are served, with one new token at least, but the prompt has {prompt}"
            raise ApiError(400, message, param="messages" if job.is_chat else "prompt", code="context_length_exceeded")
        name = "max_completion_tokens" if job.is_chat else "max_tokens"
        limit = min(self._limits.tokens, longest - prompt) if job.limit is None else job.limit
        if prompt + limit > longest:
            message = f"at most {longest} tokens are served, but the prompt has {prompt} and {name} is {limit}"
            raise ApiError(400, message, param=name, code="context_length_exceeded")
        return limit


class Events(Response):
    """Server-sent events: what each step said, as it comes."""

    def __init__(self, request: HttpRequest, stream: Stream, answer: Answer, *, has_usage: bool) -> None:
        """Send the chunks of a stream."""
        self._request, self._stream, self._answer, self._has_usage = request, stream, answer, has_usage
        self.status_code, self.background = 200, None
        self.init_headers({"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until all is said or the client has gone."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await unless_gone(self._request.receive, self._send(send))
        except GoneError:
            return
        finally:
            self._stream.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        try:
            async for progress in self._stream:
                _check(progress.request)
                await self._event(send, self._answer.grow(progress))
            if self._has_usage:
                await self._event(send, self._answer.last_chunk())
        except ApiError as error:
            await self._event(send, error.body())
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})

    async def _event(self, send: Send, said: dict[str, Any]) -> None:
        line = f"data: {json.dumps(said, ensure_ascii=False, separators=(',', ':'))}\n\n"
        await send({"type": "http.response.body", "body": line.encode(), "more_body": True})


async def _collect(stream: Stream, answer: Answer) -> None:
    """Wait until all is said."""
    async for progress in stream:
        _check(progress.request)
        answer.grow(progress)


def _check(request: Request) -> None:
    """Tell a client that its request has failed."""
    if request.reason == "failed" or request.error:
        raise ApiError(500, f"the text ended: {request.error}", code="generation_failed")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do some work unless the client closes its connection.

    Raises:
        GoneError: it has.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise GoneError
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
