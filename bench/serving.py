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
from pathlib import Path
from typing import NamedTuple

import httpx

from specdec_loop import corpus

from .machine import ROOT, commit, machine, versions
from .tables import markdown

LINES = 8  # of a prompt


class Counted(NamedTuple):
    """Numbers of a server.

    Attributes:
        accepted: drafts a request and step.
        drafting: seconds of the drafter a step.
        processor: seconds of the process, on all cores.
    """

    accepted: float
    drafting: float
    processor: float


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
def served(options: list[str]) -> Iterator[tuple[str, int]]:
    """The address of a server with these options, and its process."""
    command = [sys.executable, "-m", "specdec_loop", "serve", "--port", "0", "--threads", "1", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")])}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as own:
        assert own.stderr is not None
        found = next(filter(None, (re.search(r"running on (http://\S+)", line) for line in own.stderr)))
        try:
            yield found[1], own.pid
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


def processor_seconds(process: int) -> float:
    """Of a process and its threads, so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


async def measure(address: str, process: int, args: argparse.Namespace) -> tuple[float, list[Told], Counted]:
    """Seconds of the whole, what each client was told, and what the server counted."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits, trust_env=False) as client:
        asked = [ask(client, prompt, i, args) for i, prompt in enumerate(prompts(args.clients))]
        begin, spent = time.perf_counter(), processor_seconds(process)
        told = await asyncio.gather(*asked)
        seconds, spent = time.perf_counter() - begin, processor_seconds(process) - spent
        samples = dict(line.rsplit(" ", 1) for line in (await client.get("/metrics")).text.splitlines())
    accepted = (float(samples[f"specdec_accepted_length_{part}"]) for part in ("sum", "count"))
    phases = (float(samples[f'specdec_phase_seconds_total{{phase="{phase}"}}']) for phase in ("draft", "networks"))
    drafting = sum(phases) / float(samples["specdec_steps_total"])
    return seconds, told, Counted(next(accepted) / max(next(accepted), 1.0), drafting, spent)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--slots", type=int, nargs="+", default=[16])
    parser.add_argument("--methods", nargs="+", default=["plain", "suffix", "draft-model", "mtp"])
    parser.add_argument("--draft-length", help="of the server; its default if left out")
    args = parser.parse_args()
    options = ["--pages", "4096", *(["--draft-length", args.draft_length] if args.draft_length else [])]
    rows = []
    for slots in args.slots:
        rates: list[float] = []  # tokens a CPU second
        for method in args.methods:
            with served(["--method", method, "--slots", str(slots), *options]) as (address, process):
                seconds, told, counted = asyncio.run(measure(address, process, args))
            tokens = sum(one.tokens for one in told)
            rates.append(tokens / counted.processor)
            rate = f"{rates[-1]:.0f} ({rates[-1] / rates[0]:.2f})"
            numbers = f"{tokens / seconds:.0f}", rate, f"{counted.accepted:.2f}"
            times = (statistics.quantiles(x, n=20) for x in ([t.first for t in told], [t.whole for t in told]))
            waits = (f"{most[9]:.1f} ({most[18]:.1f})" for most in times)
            rows.append([method, str(slots), *numbers, f"{1000 * counted.drafting:.1f}", *waits])
    head = [
        "method", "slots", "tokens/s", "tokens a CPU second (of the first method's)", "accepted a step",
        "drafter, ms a step", "first token, p50 (p95) s", "whole text, p50 (p95) s",
    ]  # fmt: skip
    print("\n".join(markdown(head, rows, right=range(1, len(head)))))
    about = machine()
    print(
        f"\n{args.clients} clients, {args.tokens} tokens at temperature {args.temperature:g}; {about['cpu']}, "
        f"{about['cores']} cores, torch {versions()['torch']}, commit {commit()}"
    )


if __name__ == "__main__":
    main()
