"""What the server measures, for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .engine import Engine, Progress
from .request import Reason, Request

COUNTS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters of one server; names begin with ``specdec_``."""

    def __init__(self, engine: Engine) -> None:
        """Begin at 0."""
        self._registry = registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"specdec_{name}", about, labels, registry=registry)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"specdec_{name}", about, buckets=buckets, registry=registry)

        self._requests = counter("requests", "Choices that ended, by how.", "reason")
        self._refused = counter("refused", "HTTP requests that were refused, by status.", "status")
        self._prompt = counter("prompt_tokens", "Tokens of prompts whose requests ended.")
        self._shared = counter("shared_tokens", "Of these, tokens whose keys and values were there already.")
        self._tokens = counter("generated_tokens", "New tokens.")
        self._phases = counter("phase_seconds", "Time of steps, by phase.", "phase")
        self._steps = counter("steps", "Forwards of the target.")
        self._faults = counter("drafter_faults", "Errors of the drafter, which cost drafts and no text.")
        self._accepted = histogram("accepted_length", "Accepted drafts of a request and step.", COUNTS)
        self._drafts = histogram("drafts_allotted", "Drafts verified for a request and step.", COUNTS)
        self._first = histogram("first_token_seconds", "Time to the first token, waiting included.", SECONDS)
        self._seconds = histogram("request_seconds", "Time of a request, waiting included.", SECONDS)
        for name, about, value in (
            ("running", "Requests that have a slot.", lambda: len(engine.running)),
            ("waiting", "Requests that wait for a slot.", lambda: len(engine.waiting)),
            ("pages_used", "Pages of running requests.", lambda: engine.pages.used),
            ("pages", "Pages of the cache.", lambda: engine.pages.count),
        ):
            Gauge(f"specdec_{name}", about, registry=registry).set_function(value)

    def refused(self, status: int) -> None:
        """An HTTP request was refused."""
        self._refused.labels(str(status)).inc()

    def stepped(self, seconds: Mapping[str, float], faults: int) -> None:
        """A step took so long in each phase, and the drafter failed so many times."""
        self._steps.inc()
        self._faults.inc(faults)
        for phase, spent in seconds.items():
            self._phases.labels(phase).inc(spent)

    def grew(self, progress: Progress, waited: float | None) -> None:
        """A step went so for a request; `waited` until its first token, None: it had some."""
        self._tokens.inc(len(progress.tokens))
        if progress.drafted is not None:
            self._accepted.observe(progress.accepted)
            self._drafts.observe(progress.drafted)
        if waited is not None and progress.tokens:
            self._first.observe(waited)

    def left(self, request: Request, reason: Reason, seconds: float) -> None:
        """A request has left."""
        self._requests.labels(reason).inc()
        self._prompt.inc(len(request.prompt))
        self._shared.inc(request.lease.shared)
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
