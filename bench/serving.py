"""python -m bench.serving: clients at once on one server of this machine, method by method; minutes on two cores.

Each client streams one completion of held-out code. The server runs on one thread, so that clients have the other core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import httpx

from specdec_loop import corpus

from .machine import ROOT, commit, machine, versions
from .tables import markdown

LINES = 8  # of a prompt


class Told(NamedTuple):
    """Seconds to the first piece of a text and to its end, and its tokens."""

    first: float
    whole: float
    tokens: int


def prompts(count: int) -> list[str]:
    """Pieces of code that no model of the repository was trained on."""
    found = []
    for text in corpus.read([path for path in corpus.sources() if corpus.is_held_out(path)]):
        lines = text.splitlines(keepends=True)
        found += ["".join(lines[i : i + LINES]) for i in range(0, len(lines) - LINES, 4 * LINES)]
    return [found[i * len(found) // count] for i in range(count)]


@contextmanager
def served(options: list[str]) -> Iterator[str]:
    """The address of a server with these options."""
    command = [sys.executable, "-m", "specdec_loop", "serve", "--port", "0", "--threads", "1", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")])}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as own:
        assert own.stderr is not None
        found = next(filter(None, (re.search(r"running on (http://\S+)", line) for line in own.stderr)))
        try:
            yield found[1]
        finally:
            own.send_signal(signal.SIGINT)
            own.wait()


async def ask(client: httpx.AsyncClient, prompt: str, seed: int, args: argparse.Namespace) -> Told:
    """Stream a text."""
    body = {"prompt": prompt, "seed": seed, "max_tokens": args.tokens, "temperature": args.temperature}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    begin, first, last = time.perf_counter(), 0.0, ""
    async with client.stream("POST", "/v1/completions", json={**body, **usage}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - begin
                last = line
    whole = time.perf_counter() - begin
    return Told(first, whole, json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"])


async def measure(address: str, args: argparse.Namespace) -> tuple[float, list[Told], float]:
    """Seconds of the whole, what each client was told, and accepted drafts a step."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits, trust_env=False) as client:
        asked = [ask(client, prompt, i, args) for i, prompt in enumerate(prompts(args.clients))]
        begin = time.perf_counter()
        told = await asyncio.gather(*asked)
        seconds = time.perf_counter() - begin
        samples = dict(line.rsplit(" ", 1) for line in (await client.get("/metrics")).text.splitlines())
    accepted = (float(samples[f"specdec_accepted_length_{part}"]) for part in ("sum", "count"))
    return seconds, told, next(accepted) / max(next(accepted), 1.0)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--slots", type=int, nargs="+", default=[16])
    parser.add_argument("--methods", nargs="+", default=["plain", "suffix", "draft-model", "mtp"])
    args = parser.parse_args()
    rows = []
    for slots in args.slots:
        for method in args.methods:
            with served(["--method", method, "--slots", str(slots), "--pages", "4096"]) as address:
                seconds, told, accepted = asyncio.run(measure(address, args))
            tokens = sum(one.tokens for one in told)
            first, whole = (statistics.quantiles(x, n=20) for x in ([t.first for t in told], [t.whole for t in told]))
            times = (first[9], first[18], whole[9], whole[18])
            rows.append(
                [method, str(slots), f"{tokens / seconds:.0f}", f"{accepted:.2f}", *(f"{t:.1f}" for t in times)]
            )
    head = ["method", "slots", "tokens/s", "accepted a step", "first, p50 s", "p95", "whole, p50 s", "p95"]
    print("\n".join(markdown(head, rows, right=range(1, len(head)))))
    about = machine()
    print(
        f"\n{args.clients} clients, {args.tokens} tokens at temperature {args.temperature:g}; {about['cpu']}, "
        f"{about['cores']} cores, torch {versions()['torch']}, commit {commit()}"
    )


if __name__ == "__main__":
    main()
