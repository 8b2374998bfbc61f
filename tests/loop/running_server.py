"""A server on a loopback address with a tiny model, in a thread of this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
import uvicorn

from specdec_loop import PromptLookup
from specdec_loop.draft_length import FixedLength
from specdec_loop.drafters import Drafter
from specdec_loop.serve.api import Api
from specdec_loop.serve.engine import Engine
from specdec_loop.serve.schema import Limits

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


class Running:
    """A server, its engine, and a client.

    Attributes:
        gate: clear it and the engine stands still between steps.
    """

    def __init__(self, folder: Path, make_drafter: Callable[[], Drafter | None], **options: Any) -> None:
        self.folder = folder
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
        sizes = {"slots": options.pop("slots", 4), "pages": options.pop("pages", 256)}
        self.engine = Engine(model, make_drafter, draft_length=FixedLength(4), **sizes)
        self.gate = threading.Event()
        self.gate.set()
        step = self.engine.step

        def gated() -> Any:
            self.gate.wait()
            return step()

        vars(self.engine)["step"] = gated
        self.api = Api(self.engine, self.tokenizer, name="tiny", **options)
        config = uvicorn.Config(self.api.app(), port=0, log_level="error", timeout_graceful_shutdown=10)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        wait_for(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False)

    def _run(self) -> None:
        torch.set_num_threads(1)
        self.server.run()

    def complete(self, prompt: Any, **fields: Any) -> Any:
        """The answer of /v1/completions."""
        answer = self.client.post("/v1/completions", json={"prompt": prompt, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chunks(self, path: str, **fields: Any) -> list[Any]:
        """The events of a stream but for the last, which says that it is complete."""
        with self.client.stream("POST", path, json={"stream": True, **fields}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels."""
        lines = self.client.get("/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    def stop(self) -> None:
        self.gate.set()
        self.client.close()
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextmanager
def running(
    folder: Path, make_drafter: Callable[[], Drafter | None] = PromptLookup, **options: Any
) -> Iterator[Running]:
    """A server for as long as the context lasts."""
    server = Running(folder, make_drafter, **options)
    try:
        yield server
    finally:
        server.stop()


def wait_for(fact: Callable[[], bool], seconds: float = 30.0) -> None:
    """Until it is one."""
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


__all__ = ["TEMPLATE", "Limits", "Running", "running", "wait_for"]
