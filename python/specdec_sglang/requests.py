"""A batch of SGLang's requests: seeds, which follow a SamplingBatchInfo for its life, and sampling parameters."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections import Counter
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import Sampling

logger = logging.getLogger("sglang.srt.specdec_kernels")
fallbacks: Counter[str] = Counter()  # batches left to SGLang, by reason
copies: ContextVar[tuple[Any, int]] = ContextVar("copies", default=(None, 0))  # parameters, and copies sent before

NO_SEEDS = "rows that no request made (a warm-up)"


def leave(reason: str) -> None:
    """Count a batch that is left to SGLang, and say so of the first for this reason."""
    if not fallbacks[reason]:
        logger.warning("specdec_kernels: batches with %s are left to SGLang's own code", reason)
    fallbacks[reason] += 1


def seed_of(request: Any) -> int:
    """A request's seed; without one it is made of its id, which all ranks know: their engines' seeds may differ."""
    given = request.sampling_params.sampling_seed
    if given is not None:
        return int(given)
    digest = hashlib.blake2b(str(request.rid).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def numbered(manager: Any, sent: Any) -> None:
    """Before `_send_one_request`: the n copies of a request share its parameters; copy i gets the seed + i."""
    params = sent.sampling_params
    if params.sampling_seed is None or params.n == 1:
        return
    last, number = copies.get()
    number = number + 1 if last is params else 0
    copies.set((params, number))
    sent.sampling_params = copy.copy(params)
    sent.sampling_params.sampling_seed = (params.sampling_seed + number + 2**63) % 2**64 - 2**63


def made(result: None, info: Any, batch: Any, vocab_size: int) -> None:
    """After `adjusted_from_schedule_batch`: note the seeds. Deterministic inference has its own for all requests."""
    for request in batch.reqs:
        request.specdec_step = None  # it starts, or starts again
    if info.sampling_seed is not None:
        info.specdec_seed = info.sampling_seed
        return
    seeds = torch.tensor([seed_of(request) for request in batch.reqs], dtype=torch.int64)
    info.specdec_seed = seeds.to(info.device, non_blocking=True)


def filtered(result: None, info: Any, keep_indices: list[int], keep_indices_device: Tensor) -> None:
    """After `adjusted_filter_batch`."""
    if (seed := seeds_of(info)) is not None:
        info.specdec_seed = seed[keep_indices_device]


def merged(result: None, info: Any, other: Any) -> None:
    """After `adjusted_merge_batch`."""
    first, second = seeds_of(info), seeds_of(other)
    info.specdec_seed = None if first is None or second is None else torch.cat([first, second])


def copied(result: Any, info: Any) -> None:
    """After `copy_for_forward`, which copies the declared fields alone."""
    result.specdec_seed = seeds_of(info)


def seeds_of(info: Any) -> Tensor | None:
    """Int64 ``[batch]``; None: the batch was made from no requests."""
    found: Tensor | None = getattr(info, "specdec_seed", None)
    return found


def parameters(info: Any) -> Sampling:
    """The batch's sampling parameters. In SGLang a greedy request has top-k 1 and temperature 1."""
    temperature = torch.where(info.top_ks <= 1, 0.0, info.temperatures.flatten())
    if info.is_all_greedy:
        return Sampling(temperature)
    top_k = torch.where(info.top_ks < info.vocab_size, info.top_ks, 0).int() if info.need_top_k_sampling else None
    top_p = info.top_ps if info.need_top_p_sampling else None
    min_p = info.min_ps if info.need_min_p_sampling else None
    return Sampling(temperature, top_k, top_p, min_p)
