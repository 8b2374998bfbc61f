"""Answers in OpenAI's form, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from ..continuation import UNFINISHED, tail, text_behind
from .engine import Progress
from .request import Logprob, Request
from .schema import Job
from .text import GrowingText, Piece

LEAST_LOGPROB = -9999.0  # JSON has no infinity


class Choice:
    """A continuation as it is told to a client."""

    def __init__(self, index: int, request: Request, job: Job, tokenizer: Any, ends: Sequence[int]) -> None:
        """Begin.

        Args:
            index: among the choices of a job.
            request: whose text it is.
            job: what was asked for.
            tokenizer: of the model.
            ends: tokens that end a text and are no part of it.
        """
        self.index, self.request, self._job, self._tokenizer = index, request, job, tokenizer
        self._ends, before = ends, [] if job.is_chat else request.prompt
        self._growing = GrowingText(tokenizer, job.stops, before=before)
        self._before = tail(tokenizer, before)  # whole characters, for what joins the next token to them
        self.pieces: list[Piece] = []
        self.logprobs: list[dict[str, Any]] = []
        self._shown = 0  # characters, for offsets

    def grow(self, progress: Progress) -> dict[str, Any]:
        """Take a step; returns what a chunk says of it."""
        has_end = bool(progress.tokens) and progress.tokens[-1] in self._ends
        pieces = self._growing.push(progress.tokens[: len(progress.tokens) - has_end], progress.accepted)
        if progress.reason:
            pieces += self._growing.finish()
        listed = [
            self._listed(token, logprob) for token, logprob in zip(progress.tokens, progress.logprobs, strict=False)
        ]
        said = self._said(pieces, listed, progress.reason, is_chunk=True)
        self.pieces += pieces
        self.logprobs += listed
        return said

    def whole(self) -> dict[str, Any]:
        """All that was said."""
        self._shown = 0
        return self._said(self.pieces, self.logprobs, self.request.reason, is_chunk=False)

    def _said(
        self, pieces: Sequence[Piece], listed: list[dict[str, Any]], reason: str, *, is_chunk: bool
    ) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        said: dict[str, Any] = {"index": self.index}
        if self._job.is_chat:
            said["delta" if is_chunk else "message"] = {"role": "assistant", "content": text}
        else:
            said["text"] = text
        said["logprobs"] = None
        if self._job.top_logprobs is not None:
            said["logprobs"] = {"content": listed} if self._job.is_chat else self._columns(listed)
        said["finish_reason"] = reason or None
        if self._job.marks:
            said["pieces"] = [[piece.text, piece.is_accepted] for piece in pieces]
        return said

    def _listed(self, token: int, logprob: Logprob) -> dict[str, Any]:
        best = [self._one(i, p) for i, p in logprob.top if i >= 0]
        own = self._one(token, logprob.logprob)
        self._before = [token] if own["bytes"] else self._before
        return {**own, "top_logprobs": best}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = text_behind(self._tokenizer, self._before, [token])
        is_whole = UNFINISHED not in text
        return {
            "token": text,
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(text.encode()) if is_whole else None,
        }

    def _columns(self, listed: list[dict[str, Any]]) -> dict[str, Any]:
        """The older form of completions."""
        offsets = []
        for one in listed:
            offsets.append(self._shown)
            self._shown += len(one["token"])
        return {
            "tokens": [one["token"] for one in listed],
            "token_logprobs": [one["logprob"] for one in listed],
            # Of tokens with the same text, such as parts of characters, the likeliest stays.
            "top_logprobs": [{best["token"]: best["logprob"] for best in one["top_logprobs"][::-1]} for one in listed],
            "text_offset": offsets,
        }


class Answer:
    """All choices of a job."""

    def __init__(self, job: Job, requests: Sequence[Request], model: str, tokenizer: Any, ends: Sequence[int]) -> None:
        """Begin.

        Args:
            job: what was asked for.
            requests: its choices, prompt after prompt.
            model: its name.
            tokenizer: of the model.
            ends: of the model.
        """
        kind = "chat.completion" if job.is_chat else "text_completion"
        prefix = "chatcmpl" if job.is_chat else "cmpl"
        self._job, self._requests = job, requests
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
        if job.streams and job.is_chat:
            self._head["object"] = "chat.completion.chunk"
        self.choices = {r: Choice(i, r, job, tokenizer, ends) for i, r in enumerate(requests)}

    def grow(self, progress: Progress) -> dict[str, Any]:
        """Take a step of a choice; returns the chunk."""
        return {**self._head, "choices": [self.choices[progress.request].grow(progress)]}

    def whole(self) -> dict[str, Any]:
        """The answer, when all choices are complete."""
        return {**self._head, "choices": [choice.whole() for choice in self.choices.values()], "usage": self._usage()}

    def last_chunk(self) -> dict[str, Any]:
        """The chunk of the numbers of tokens."""
        return {**self._head, "choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        prompts = sum(len(r.prompt) for r in self._requests[:: self._job.choices])
        shared = sum(r.lease.shared for r in self._requests[:: self._job.choices])
        new = sum(len(r.new) for r in self._requests)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": new,
            "total_tokens": prompts + new,
            "prompt_tokens_details": {"cached_tokens": shared},
        }
