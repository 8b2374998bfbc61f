"""The engine in a thread of its own, and the requests of an event loop: a bounded queue, streams of tokens, an end."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Sequence

from .engine import Engine, Progress
from .metrics import Metrics
from .request import Request

logger = logging.getLogger(__name__)
FADE = 0.9  # of the time that a request takes, by each further one
LONGEST_WAIT = 60  # seconds that a client is asked to wait at most


class FullError(Exception):
    """The queue is full.

    Attributes:
        seconds: when to try again.
    """

    def __init__(self, seconds: int) -> None:
        """Say when to try again."""
        super().__init__(f"the server is busy: try again in {seconds} s")
        self.seconds = seconds


class Stream:
    """What becomes of some requests of one client."""

    def __init__(self, scheduler: Scheduler, requests: Sequence[Request]) -> None:
        """Made by `Scheduler.submit`."""
        self.begun = time.monotonic()
        self.has_spoken: set[Request] = set()
        self.open, self._count = list(requests), len(requests)
        self.arrived: asyncio.Queue[Progress] = asyncio.Queue()  # at most the tokens that were asked for
        self._scheduler = scheduler

    async def __aiter__(self) -> AsyncIterator[Progress]:
        """What each step did for them, until all have left."""
        while self._count:
            progress = await self.arrived.get()
            self._count -= bool(progress.reason)
            yield progress

    def close(self) -> None:
        """Nobody listens any more: cancel what still runs."""
        self._scheduler.cancel(self)


class Scheduler:
    """Hands requests to the engine's thread, and what they become back to the event loop.

    All methods belong to the event loop's thread, but for `_work`.

    Attributes:
        engine: belongs to the thread.
        room: requests that may run and wait.
        streams: of the requests that have not left.
        is_alive: whether the thread works.
    """

    def __init__(self, engine: Engine, metrics: Metrics, *, queue: int) -> None:
        """Begin with `start`.

        Args:
            engine: belongs to the thread from then on.
            metrics: to be kept.
            queue: requests that may wait for a slot; with one more the queue is full.
        """
        self.engine, self._metrics, self.room = engine, metrics, engine.slots + queue
        self.is_alive = False
        self.streams: dict[Request, Stream] = {}
        self._seconds = 1.0  # that a request takes once it runs, of late
        self._wake, self._is_ending = threading.Condition(), False
        self._inbox: list[tuple[Request, bool]] = []  # and whether it comes or goes
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to work for the running event loop."""
        self._loop, self.is_alive = asyncio.get_running_loop(), True
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; what still runs is lost."""
        with self._wake:
            self._is_ending = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def submit(self, requests: Sequence[Request]) -> Stream:
        """Put the requests of a client behind those that wait.

        Raises:
            FullError: there is no room for all of them.
            RuntimeError: the engine's thread has ended.
        """
        if not self.is_alive:
            raise RuntimeError("the engine has stopped")
        if len(self.streams) + len(requests) > self.room:
            turns = max(len(self.streams), self.engine.slots) / self.engine.slots
            raise FullError(min(math.ceil(turns * self._seconds), LONGEST_WAIT))
        stream = Stream(self, requests)
        self.streams.update((request, stream) for request in requests)
        self._tell([(request, True) for request in requests])
        return stream

    def cancel(self, stream: Stream) -> None:
        """Let the requests of a stream leave, if any are left."""
        for request in stream.open:
            del self.streams[request]
            self._metrics.left(request, "cancelled", time.monotonic() - stream.begun)
        self._tell([(request, False) for request in stream.open])
        stream.open = []

    def _tell(self, orders: list[tuple[Request, bool]]) -> None:
        with self._wake:
            self._inbox += orders
            self._wake.notify()

    def _stepped(self, found: list[Progress], seconds: dict[str, float], faults: int) -> None:
        """A step is done."""
        self._metrics.stepped(seconds, faults)
        self._deliver(found)

    def _deliver(self, found: list[Progress]) -> None:
        for progress in found:
            request = progress.request
            stream = self.streams.get(request)
            if stream is None:
                continue  # cancelled meanwhile
            now = time.monotonic()
            elapsed = now - stream.begun
            self._metrics.grew(progress, elapsed if request not in stream.has_spoken else None)
            stream.has_spoken.add(request)
            if progress.reason:
                del self.streams[request]
                stream.open.remove(request)
                if progress.reason != "failed":
                    self._seconds = FADE * self._seconds + (1 - FADE) * (now - request.begun)
                self._metrics.left(request, progress.reason, elapsed)
            stream.arrived.put_nowait(progress)

    def _lose_all(self) -> None:
        """The thread has ended: nobody may wait for it."""
        self.is_alive = False
        lost = []
        for request in self.streams:
            request.error = request.error or "the server stops"
            lost.append(Progress(request, reason="failed"))
        self._deliver(lost)

    def _work(self) -> None:
        """The engine's thread."""
        try:
            with self.engine.ready():
                self._work_steps()
        finally:
            self._loop.call_soon_threadsafe(self._lose_all)

    def _work_steps(self) -> None:
        """Until it is told to end."""
        engine = self.engine
        while True:
            with self._wake:
                while not (self._inbox or engine.waiting or engine.running or self._is_ending):
                    self._wake.wait()
                orders, self._inbox = self._inbox, []
                if self._is_ending:
                    return
            for request, comes in orders:
                engine.submit(request) if comes else engine.cancel(request)
            if not (engine.waiting or engine.running):
                continue
            before = engine.faults
            try:
                found = engine.step()
            except Exception as error:  # not of a forward or a drafter: what ran is lost, what waits is not
                logger.exception("a step failed")
                found = engine.abort(f"{type(error).__name__}: {error}")
            seconds, faults = dict(engine.clock.latest), engine.faults - before
            self._loop.call_soon_threadsafe(self._stepped, found, seconds, faults)
