"""One forward of the target for all requests: their nodes lie behind each other, and attention reads the pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from specdec_kernels import tree_attention, tree_layout

from ..tree_cache import check_model, has_states
from .pages import Pages, block_table

NAME = "specdec_paged"
FOREIGN = ("softcap", "s_aux", "position_bias")  # what attention may be asked for and does not have
SAMPLE = 12  # tokens of the comparison in `check`
APART = 0.05  # of the largest logit: rounding in bfloat16, and far less than another attention


class Nodes(NamedTuple):
    """A request's share of a forward: a piece of its prompt, or its last token and what is drafted behind it.

    Attributes:
        ids: int64 ``[nodes]``.
        pages: of the request.
        length: rows that it has.
        kept: how many of its last nodes want logits.
        parents: int32 ``[1, nodes]`` of a tree; None: a chain.
    """

    ids: Tensor
    pages: Sequence[int]
    length: int
    kept: int
    parents: Tensor | None = None


class Step(NamedTuple):
    """Inputs of attention.

    Attributes:
        pages: the pool.
        table: int32 ``[batch, pages]``.
        lengths: int64 ``[batch]``.
        ancestors: of the nodes, see `tree_layout`.
        rows: place of each node among all rows of the pool.
        cells: place of each node in ``[batch, width]``, flat.
        width: most nodes of a request.
    """

    pages: Pages
    table: Tensor
    lengths: Tensor
    ancestors: Tensor
    rows: Tensor
    cells: Tensor
    width: int


def paged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, step: Step, **options: Any
) -> tuple[Tensor, None]:
    """Write the new rows to their pages, then attend them and what lies before them.

    Args:
        module: of the model; says which layer it is.
        query: ``[1, head, node, dim]``, nodes of all requests behind each other.
        key: ``[1, group, node, dim]``.
        value: ``[1, group, node, dim]``.
        attention_mask: None.
        step: where rows and nodes lie.
        options: of transformers' attention functions.

    Returns:
        ``[1, node, head, dim]``, and no weights.
    """
    if asked := [name for name in FOREIGN if options.get(name) is not None]:
        raise ValueError(f"attention over pages has no {', '.join(asked)}, which {type(module).__name__} asks for")
    pools = step.pages.keys[module.layer_idx], step.pages.values[module.layer_idx]
    for pool, new in zip(pools, (key, value), strict=True):
        pool.flatten(0, 1)[step.rows] = new[0].transpose(0, 1)
    batch, nodes = len(step.lengths), query[0].transpose(0, 1)
    is_ragged = len(nodes) < batch * step.width
    padded = nodes
    if is_ragged:
        padded = nodes.new_zeros(batch * step.width, *nodes.shape[1:])
        padded[step.cells] = nodes
    attended = tree_attention(
        padded.unflatten(0, (batch, step.width)),
        *pools,
        step.ancestors,
        step.lengths,
        format="nhd",
        block_table=step.table,
        scale=options.get("scaling"),
        window=options.get("sliding_window") or 0,
    )
    output = attended.output.flatten(0, 1)
    return (output[step.cells] if is_ragged else output)[None], None


AttentionInterface.register(NAME, paged_attention)


def forward(
    model: Any, pages: Pages, batch: Sequence[Nodes], features: Sequence[int] = ()
) -> tuple[Tensor, Tensor | None]:
    """Run nodes; their keys and values are written behind what each request has.

    Args:
        model: a transformers causal LM.
        pages: the pool.
        batch: one of each request.
        features: levels of hidden states that are wanted, as transformers numbers them.

    Returns:
        Logits ``[kept nodes, vocab]``, request after request; and the features ``[nodes, ...]`` of all nodes.
    """
    device = model.device
    config = model.config.get_text_config(decoder=True)
    step, positions = _step(pages, batch, device)
    most = getattr(config, "max_position_embeddings", None)
    positions = positions.clamp(max=most and most - 1)  # drafts behind the limit of a text are never accepted
    kept: list[int] = []
    end = 0
    for nodes in batch:
        end += len(nodes.ids)
        kept += range(end - nodes.kept, end)
    before, config._attn_implementation = config._attn_implementation, NAME
    try:
        out = model(
            torch.cat([nodes.ids for nodes in batch])[None].clamp(0, config.vocab_size - 1),
            position_ids=positions[None],
            use_cache=False,
            step=step,
            logits_to_keep=torch.tensor(kept, dtype=torch.int64, device=device),
            output_hidden_states=bool(features),
        )
    finally:
        config._attn_implementation = before
    hidden = torch.cat([out.hidden_states[level][0] for level in features], -1) if features else None
    return out.logits[0], hidden


def _step(pages: Pages, batch: Sequence[Nodes], device: torch.device) -> tuple[Step, Tensor]:
    """Inputs of attention, and the position of each node."""
    size, counts = pages.size, [len(nodes.ids) for nodes in batch]
    width = max(counts)
    cells: list[int] = []
    rows: list[int] = []
    for b, (nodes, count) in enumerate(zip(batch, counts, strict=True)):
        cells += range(b * width, b * width + count)
        rows += [nodes.pages[p // size] * size + p % size for p in range(nodes.length, nodes.length + count)]
    where = torch.tensor([cells, rows], device=device)
    table = block_table([nodes.pages for nodes in batch], device)
    lengths = torch.tensor([nodes.length for nodes in batch], device=device)
    offsets = torch.arange(width, dtype=torch.int32, device=device)
    parents = torch.where(offsets < torch.tensor(counts, device=device)[:, None], offsets - 1, -1)
    for b, nodes in enumerate(batch):
        if nodes.parents is not None:
            parents[b, : counts[b]] = nodes.parents[0]
    layout = tree_layout(parents, lengths=lengths)
    step = Step(pages, table, lengths, layout.ancestors, where[1], where[0], width)
    return step, layout.positions.flatten()[where[0]]


@torch.inference_mode()
def check(model: Any, features: Sequence[int] = ()) -> None:
    """Refuse a model whose logits over pages are not those of its own forward.

    Raises:
        ValueError: says why.
    """
    check_model(model.config, model)
    name = f"{type(model).__name__} cannot be served"
    if has_states(model.config):
        raise ValueError(f"{name}: pages hold rows of attention, and some of its layers are recurrent")
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{name}: it does not take its attention from transformers' table of attention functions")
    pages = Pages(model.config, 8, 4, dtype=model.dtype, device=model.device)
    ids = torch.arange(SAMPLE, device=model.device) % model.config.get_text_config(decoder=True).vocab_size
    requests = [[5, 2, 7], [1, 6, 3]]
    try:
        for first, end in ((0, SAMPLE // 2), (SAMPLE // 2, SAMPLE)):
            batch = [Nodes(ids[first:end], request, first, end - first) for request in requests]
            logits, _ = forward(model, pages, batch, features)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: its attention over pages failed: {error}") from error
    own = model(ids[None], use_cache=False).logits[0, SAMPLE // 2 :].float()
    apart = max(float((some - own).abs().max()) for some in logits.float().chunk(len(requests)))
    if not apart <= APART * float(own.abs().max()):
        raise ValueError(f"{name}: its logits over pages differ from those of its own forward by up to {apart:.3g}")
