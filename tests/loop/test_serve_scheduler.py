"""Many clients at once: a bounded queue, clients that go, requests that fail, an engine that fails, an end in order."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")
pytest.importorskip("prometheus_client", reason="the extra serve is not installed")

import httpx
from running_server import Running, running, wait_for

from specdec_loop import SuffixDecoding
from specdec_loop.serve.engine import Progress
from specdec_loop.serve.group import MOST_FAULTS
from specdec_loop.serve.request import Request
from specdec_loop.serve.scheduler import FullError, Scheduler

BROKEN = 64  # an id whose row of the embedding is NaN where a test says so: of "`", which no prompt here has

pytestmark = pytest.mark.usefixtures("one_thread")


def open_request(server: Running, body: Any, *, length: int | None = None) -> socket.socket:
    """A connection on which a request was sent; nothing of the answer is read."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    lines = ("POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json")
    head = "\r\n".join([*lines, f"content-length: {length or len(raw)}", "", ""])
    connection.sendall(head.encode() + raw)
    return connection


def is_refused(server: Running) -> bool:
    """Whether nobody listens any more."""
    try:
        socket.create_connection(("127.0.0.1", server.port)).close()
    except ConnectionRefusedError:
        return True
    return False


def is_idle(server: Running) -> bool:
    return not server.engine.running and not server.engine.waiting and server.engine.pages.used == 0


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_takes_its_requests_with_it(folder: Path, streams: bool) -> None:
    with running(folder, slots=2) as server:
        server.gate.clear()
        body = {"prompt": "abc", "max_tokens": 200, "n": 3, "stream": streams}
        connection = open_request(server, body)
        wait_for(lambda: len(server.api.scheduler.streams) == 3)
        if streams:
            assert connection.recv(12) == b"HTTP/1.1 200"
        connection.close()
        wait_for(lambda: not server.api.scheduler.streams)
        server.gate.set()
        wait_for(lambda: is_idle(server))
        assert server.metrics()['specdec_requests_total{reason="cancelled"}'] == 3
        assert server.complete("abc", max_tokens=3, temperature=0)["usage"]["completion_tokens"] == 3


def test_a_client_that_goes_amid_its_body_is_no_error(folder: Path) -> None:
    with running(folder) as server:
        for _ in range(5):
            open_request(server, b'{"prompt": "half of a bo', length=500).close()
        assert server.complete("abc", max_tokens=3, temperature=0)["choices"]
        assert not any(name.startswith("specdec_refused_total") for name in server.metrics())


def test_a_full_queue_says_when_to_come_again(folder: Path) -> None:
    with running(folder, slots=1, queue=2) as server, ThreadPoolExecutor(4) as clients:
        server.gate.clear()
        fields = {"max_tokens": 4, "temperature": 0}
        taken = [clients.submit(server.complete, "abc", **fields) for _ in range(3)]
        wait_for(lambda: len(server.api.scheduler.streams) == 3)
        refused = server.client.post("/v1/completions", json={"prompt": "abc", **fields})
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "queue_full"
        server.gate.set()
        texts = {future.result()["choices"][0]["text"] for future in taken}
        assert texts == {server.complete("abc", **fields)["choices"][0]["text"]}
        counted = server.metrics()
        assert counted['specdec_refused_total{status="429"}'] == 1
        assert counted['specdec_requests_total{reason="length"}'] == 4


def test_a_request_of_more_choices_than_there_is_room_for_is_refused_whole(folder: Path) -> None:
    with running(folder, slots=1, queue=2) as server, ThreadPoolExecutor(1) as clients:
        for prompt, n in (("abc", 4), (["abc", "def"], 2)):  # there will never be room
            answer = server.client.post("/v1/completions", json={"prompt": prompt, "n": n})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        server.gate.clear()
        taken = clients.submit(server.complete, "abc", max_tokens=4)
        wait_for(lambda: len(server.api.scheduler.streams) == 1)
        assert server.client.post("/v1/completions", json={"prompt": "abc", "n": 3}).status_code == 429
        assert len(server.api.scheduler.streams) == 1
        server.gate.set()
        assert taken.result()["choices"]


def test_a_stream_tells_all_though_its_requests_have_left_before_it_is_read() -> None:
    nothing: Any = SimpleNamespace(slots=2, grew=lambda *_: None, left=lambda *_: None)
    scheduler = Scheduler(nothing, nothing, queue=0)
    scheduler.is_alive = True
    requests = [Request([1]), Request([1])]
    stream, found = scheduler.submit(requests), [Progress(request, [5], reason="length") for request in requests]
    scheduler._deliver(found)

    async def read() -> list[Progress]:
        return [progress async for progress in stream]

    assert asyncio.run(read()) == found


def test_the_time_to_wait_is_judged_by_requests_that_run_not_by_those_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("specdec_loop.serve.scheduler.time.monotonic", lambda: now[0])
    nothing: Any = SimpleNamespace(slots=1, grew=lambda *_: None, left=lambda *_: None)
    scheduler = Scheduler(nothing, nothing, queue=20)
    scheduler.is_alive = True
    requests = [Request([1]) for _ in range(21)]
    scheduler.submit(requests)
    for request in requests:  # each takes a second
        request.begun, now[0] = now[0], now[0] + 1
        scheduler._deliver([Progress(request, reason="length")])
    scheduler.submit([Request([1]) for _ in range(21)])
    with pytest.raises(FullError, match="try again in 21 s"):
        scheduler.submit([Request([1])])


@pytest.mark.parametrize("streams", [True, False])
def test_a_request_that_cannot_begin_is_answered_and_others_go_on(
    folder: Path, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def matcher(self) -> None:
            raise MemoryError("no room")

    with running(folder, slots=1) as server:
        monkeypatch.setattr(server.api, "_compiled", lambda kind, asked: Broken())
        body = {"prompt": "abc", "n": 2, "structured_outputs": {"regex": "a"}, "stream": streams}
        answer = server.client.post("/v1/completions", json=body)
        error = json.loads(answer.text.splitlines()[0].removeprefix("data: "))["error"]
        assert (answer.status_code, error["code"]) == (200 if streams else 500, "generation_failed")
        assert "no room" in error["message"]
        assert server.complete("abc", max_tokens=3)["choices"]
        assert is_idle(server) and not server.api.scheduler.streams


@pytest.mark.parametrize("streams", [True, False])
def test_logits_that_are_nan_fail_one_request_and_no_other(folder: Path, streams: bool) -> None:
    with running(folder, slots=3) as server, ThreadPoolExecutor(2) as clients:
        expected = server.complete("abc", max_tokens=60, seed=1, logit_bias={str(BROKEN): -100})
        server.engine.model.model.embed_tokens.weight.data[BROKEN] = float("nan")
        server.gate.clear()
        same = clients.submit(server.complete, "abc", max_tokens=60, seed=1, logit_bias={str(BROKEN): -100})
        wait_for(lambda: len(server.api.scheduler.streams) == 1)
        body = {"prompt": [5, BROKEN, 6], "max_tokens": 9, "stream": streams}
        bad = clients.submit(server.client.post, "/v1/completions", json=body)
        wait_for(lambda: len(server.api.scheduler.streams) == 2)
        server.gate.set()
        answer = bad.result()
        assert same.result()["choices"] == expected["choices"]
        error = json.loads(answer.text.splitlines()[0].removeprefix("data: "))["error"]
        assert answer.status_code == (200 if streams else 500)
        assert error["code"] == "generation_failed" and "BAD_TARGET" in error["message"]
        assert server.metrics()['specdec_requests_total{reason="failed"}'] == 1
        wait_for(lambda: is_idle(server))


def test_a_forward_that_raises_is_repeated_and_costs_no_text(folder: Path) -> None:
    with running(folder, slots=2) as server, ThreadPoolExecutor(2) as clients:
        body = {"prompt": "abc", "max_tokens": 5, "temperature": 0}
        expected = server.client.post("/v1/completions", json=body).json()["choices"]
        forward, calls = server.engine.model.forward, []

        def fails_once(*args: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("out of memory")
            return forward(*args, **options)

        server.engine.model.forward = fails_once
        asked = [clients.submit(server.client.post, "/v1/completions", json=body) for _ in range(2)]
        assert all(answer.result().json()["choices"] == expected for answer in asked)


def test_a_step_that_raises_fails_what_runs_and_what_waits_goes_on(folder: Path) -> None:
    with running(folder, slots=1) as server, ThreadPoolExecutor(2) as clients:
        verify, calls = server.engine._verifier.verify, []

        def fails_once(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("out of memory")
            return verify(*args)

        vars(server.engine._verifier)["verify"] = fails_once
        server.gate.clear()
        body = {"prompt": "abc", "max_tokens": 5, "temperature": 0}
        first = clients.submit(server.client.post, "/v1/completions", json=body)
        wait_for(lambda: len(server.api.scheduler.streams) == 1)
        second = clients.submit(server.client.post, "/v1/completions", json=body)
        wait_for(lambda: len(server.api.scheduler.streams) == 2)
        server.gate.set()
        assert first.result().status_code == 500 and "out of memory" in first.result().text
        assert second.result().status_code == 200
        assert server.client.get("/health").status_code == 200
        wait_for(lambda: is_idle(server))


def test_faults_of_the_drafter_are_counted(folder: Path) -> None:
    class Broken(SuffixDecoding):
        def draft(self, sequences: Any, length: int) -> Any:
            raise RuntimeError("no idea")

    with running(folder, Broken) as server:
        texts = [server.complete("abc", max_tokens=9, seed=1)["choices"][0]["text"] for _ in range(5)]
        assert server.metrics()["specdec_drafter_faults_total"] == MOST_FAULTS
        assert server.metrics()['specdec_requests_total{reason="length"}'] == 5
    with running(folder, lambda: None) as server:
        assert texts == [server.complete("abc", max_tokens=9, seed=1)["choices"][0]["text"]] * 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_health_tells_that_the_engine_has_ended_and_nobody_waits_for_it(folder: Path) -> None:
    with running(folder) as server, ThreadPoolExecutor(1) as clients:
        server.gate.clear()
        waits = clients.submit(server.client.post, "/v1/completions", json={"prompt": "abc"})
        wait_for(lambda: len(server.api.scheduler.streams) == 1)

        def end() -> None:
            raise SystemExit

        vars(server.engine)["abort"] = lambda error: end()
        vars(server.engine._verifier)["verify"] = None
        server.gate.set()
        assert waits.result().status_code == 500
        wait_for(lambda: server.client.get("/health").status_code == 503)
        assert server.client.post("/v1/completions", json={"prompt": "abc"}).status_code == 503


def test_an_end_waits_for_requests_that_run(folder: Path) -> None:
    with running(folder) as server, ThreadPoolExecutor(1) as clients:
        server.gate.clear()
        waits = clients.submit(server.complete, "abc", max_tokens=20, temperature=0)
        wait_for(lambda: len(server.api.scheduler.streams) == 1)
        server.server.should_exit = True
        wait_for(lambda: is_refused(server))
        assert not waits.done()
        server.gate.set()
        assert waits.result()["usage"]["completion_tokens"] == 20


def test_metrics_count_what_was_said(folder: Path) -> None:
    with running(folder, lambda: SuffixDecoding(factor=2.0)) as server:
        for _ in range(2):
            server.complete("ab" * 30, max_tokens=40, temperature=0, n=2)
        counted = server.metrics()
    assert counted["specdec_generated_tokens_total"] == 160 and counted["specdec_prompt_tokens_total"] == 240
    assert counted['specdec_requests_total{reason="length"}'] == 4
    assert counted["specdec_shared_tokens_total"] == 3 * 48  # all but the first choice found its three full pages
    steps = counted["specdec_accepted_length_count"]
    drawn = 4 + steps  # the first token, and one behind the drafts of each step, if the limit does not cut it off
    assert 0 <= counted["specdec_accepted_length_sum"] - (160 - drawn) <= 4 < 160 - drawn
    assert counted["specdec_drafts_allotted_sum"] >= counted["specdec_accepted_length_sum"]
    assert counted["specdec_first_token_seconds_count"] == counted["specdec_request_seconds_count"] == 4
    spent = {
        phase: counted[f'specdec_phase_seconds_total{{phase="{phase}"}}'] for phase in ("draft", "target", "verify")
    }
    assert min(spent.values()) > 0 and spent["target"] > spent["draft"]
    assert counted["specdec_pages_used"] == counted["specdec_running"] == counted["specdec_waiting"] == 0


def test_two_hundred_clients_at_once_and_faults_between_them_lose_nothing(folder: Path) -> None:
    prompts = [f"def f{i % 20}(a): return a" for i in range(200)]
    fields = {"max_tokens": 12, "logit_bias": {str(BROKEN): -100}}
    with running(folder, lambda: SuffixDecoding(factor=2.0), slots=16, pages=512, queue=400) as server:
        expected = [server.complete(p, seed=i % 20, **fields)["choices"][0]["text"] for i, p in enumerate(prompts[:20])]
        server.engine.model.model.embed_tokens.weight.data[BROKEN] = float("nan")
        limits = httpx.Limits(max_connections=None)
        client = httpx.Client(base_url=server.client.base_url, timeout=100, limits=limits, trust_env=False)
        begin = threading.Barrier(200)

        def ask(i: int) -> str:
            begin.wait()
            body = {"prompt": prompts[i], "seed": i % 20, **fields}
            if i % 2:
                return str(client.post("/v1/completions", json=body).json()["choices"][0]["text"])
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
            assert lines[-1] == "[DONE]"
            return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])

        with ThreadPoolExecutor(200) as clients, client:
            asked = [clients.submit(ask, i) for i in range(200)]
            faults = [b"{", {"prompt": "x" * 300, "max_tokens": 9}, {"prompt": [5, BROKEN]}, {"prompt": "abc", "n": 2}]
            gone = [open_request(server, faults[i % 4]) for i in range(40)]
            gone += [open_request(server, b'{"prompt": "half of a bo', length=500) for _ in range(10)]
            for connection in gone:  # no one reads the answers
                connection.close()
            texts = [future.result() for future in asked]
        assert texts == [expected[i % 20] for i in range(200)]
        wait_for(lambda: is_idle(server) and not server.api.scheduler.streams)
        counted = server.metrics()
        complete = (counted.get(f'specdec_requests_total{{reason="{reason}"}}', 0) for reason in ("length", "stop"))
        assert sum(complete) >= 220
        assert counted.get('specdec_refused_total{status="500"}', 0) <= 10  # of the logits that are NaN


def mixed(number: int) -> dict[str, Any]:
    """A request whose parameters its number draws."""
    draw = random.Random(number)
    body: dict[str, Any] = {
        "prompt": draw.choice(["def main(", "abc", "class A:", "for i in"]), "max_tokens": draw.randint(1, 12),
        "temperature": draw.choice([0, 0.7, 1, 1.3]), "seed": draw.randrange(100), "n": draw.choice([1, 1, 1, 2]),
    }  # fmt: skip
    more: dict[str, Any] = {
        "logprobs": draw.randint(0, 5), "stop": draw.choice(["e", ["(", ")"]]), "top_k": draw.randint(1, 30),
        "top_p": draw.uniform(0.3, 1), "min_p": draw.uniform(0, 0.2), "presence_penalty": draw.uniform(-1, 1),
        "frequency_penalty": draw.uniform(-1, 1), "repetition_penalty": draw.uniform(0.8, 1.4),
        "logit_bias": {"65": draw.uniform(-5, 5)},
    }  # fmt: skip
    return body | {name: value for name, value in more.items() if draw.random() < 0.3}


def test_five_hundred_mixed_requests_all_complete(folder: Path) -> None:
    """Their texts are those that each gets alone."""
    with running(folder, lambda: SuffixDecoding(factor=2.0), slots=16, pages=512, queue=600) as server:

        def ask(number: int) -> list[str]:
            answer = server.client.post("/v1/completions", json=mixed(number))
            assert answer.status_code == 200, answer.text
            return [choice["text"] for choice in answer.json()["choices"]]

        with ThreadPoolExecutor(50) as clients:
            texts = list(clients.map(ask, range(500)))
        assert [ask(number) for number in range(0, 500, 25)] == texts[::25]
        assert not any("failed" in name for name in server.metrics())
