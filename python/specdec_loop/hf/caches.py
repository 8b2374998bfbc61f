"""From a cache of transformers to the loop's and back: the rows of a text are the same, only their places differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..prefix_cache import PrefixCache


def adopt(past: PrefixCache, model: Any, cache: Any, input_ids: Tensor, mask: Tensor) -> None:
    """Give `past` the rows that a cache holds of the prompts.

    Args:
        past: unused.
        model: whose rows they are.
        cache: of transformers, every request of the same width, padding included.
        input_ids: ``[batch, width]``, which begin with the cache's tokens.
        mask: ``[batch, width]``, 0 at padding.

    Raises:
        ValueError: a cache that has let go of rows.
    """
    count = int(cache.get_seq_length())
    if not count:
        return
    if any(has_rows(layer) and layer.keys.shape[-2] < count for layer in cache.layers):
        raise ValueError(
            "specdec_loop.hf: past_key_values must hold the rows of all its tokens, got layers that keep a window: "
            "leave past_key_values out"
        )
    is_token = mask[:, :count] != 0
    order = is_token.byte().argsort(dim=1, descending=True, stable=True)
    rows = [row[kept].tolist() for row, kept in zip(input_ids[:, :count], is_token, strict=True)]
    layers = [(_picked(x.keys, order), _picked(x.values, order)) if has_rows(x) else None for x in cache.layers]
    past.load(model, rows, layers)


def fill(cache: Any, past: PrefixCache, mask: Tensor, columns: int) -> None:
    """Append to a cache the rows of the columns that it lacks.

    Args:
        cache: of transformers.
        past: of the texts, closed.
        mask: ``[batch, width]`` of the prompts, 0 at padding; rows there are not read by anyone and may hold anything.
        columns: up to which every request has rows.
    """
    assert past.cache is not None
    start, width = int(cache.get_seq_length()), mask.shape[1]
    if columns <= start:
        return
    behind = torch.ones(len(mask), max(columns - width, 0), dtype=torch.int64, device=mask.device)
    place = torch.cat([(mask != 0).long(), behind], 1).cumsum(1) - 1
    place = place[:, start:columns].clamp(min=0)
    for i, layer in enumerate(past.cache.layers):
        if not layer.is_initialized:  # the model shares it with another
            continue
        cache.update(_picked(layer.keys, place), _picked(layer.values, place), i)


def has_rows(layer: Any) -> bool:
    """Whether it is a layer of its own: some models share the keys and values of an earlier one."""
    return not layer.is_initialized or layer.keys is not None


def _picked(rows: Tensor, place: Tensor) -> Tensor:
    """Rows ``[batch, head, token, dim]`` at ``[batch, token]``."""
    return rows.gather(2, place[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3]))
