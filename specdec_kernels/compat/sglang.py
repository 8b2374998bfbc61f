"""SGLang's verifiers and tree builder under its own names: results go into the tensors given.

Keywords are taken in both of SGLang's spellings, ``retrive_*`` and ``retrieve_*``. Siblings are tried in the order in
which they are linked. Four differences are deliberate (docs/engines.md): no token of probability 0 is accepted, neither
by a coin of 0 nor by ``threshold_single=0``; a drafted id with q = 0 is rejected; an empty residual is drawn from the
target; a malformed tree counts as its root alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import tree_layout, tree_links, tree_mask
from .._tree_links import followed
from . import _draws

FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING = 0, 1, 2
_Function = TypeVar("_Function", bound=Callable[..., None])


def _both_spellings(function: _Function) -> _Function:
    """Accept ``retrieve_*`` for each keyword ``retrive_*``: SGLang's kernels and their callers differ."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> None:
        for name in [name for name in named if name.startswith("retrieve_")]:
            theirs = name.replace("retrieve_", "retrive_")
            if theirs in named:
                raise TypeError(f"{function.__name__}: got both {theirs} and {name}")
            named[theirs] = named.pop(name)
        function(*args, **named)

    return call  # type: ignore[return-value]


@_both_spellings
def chain_speculative_sampling_triton(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    block_verification: bool = False,
) -> None:
    """Verify a chain with the coins given; `verify_chain` rule ``ratio`` or ``block`` in SGLang's layout.

    Args:
        predicts: int32 ``[batch * slots]``, written at the accepted slots: the token behind each.
        accept_index: int32 ``[batch, slots]``, prefilled with -1: global slot of the root and of each accepted draft.
        accept_token_num: int32 ``[batch]``: accepted drafts, the next token not counted.
        candidates: int64 ``[batch, slots]``, column 0 the last committed token.
        retrive_index: int64 ``[batch, slots]``: global slot.
        retrive_next_token: not read: a chain.
        retrive_next_sibling: not read.
        uniform_samples: float32 ``[batch, slots]`` in [0, 1): the coin of each draft.
        uniform_samples_for_final_sampling: float32 ``[batch]``.
        target_probs: float32 ``[batch, slots, vocab]``.
        draft_probs: float32 ``[batch, slots - 1, vocab]``.
        threshold_single: not read, as there.
        threshold_acc: not read, as there.
        deterministic: results always are.
        block_verification: rule ``block``.
    """
    batch, slots = candidates.shape
    ids, coins = candidates[:, 1:], uniform_samples[:, : slots - 1]
    arguments = (ids, target_probs, draft_probs[:, : slots - 1], coins, uniform_samples_for_final_sampling)
    count, token = _draws.block(*arguments) if block_verification else _draws.chain(*arguments)[:2]
    path = torch.arange(slots, device=ids.device).expand(batch, -1)
    _write(predicts, accept_index, accept_token_num, candidates, retrive_index, path, count, token)


@_both_spellings
def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Verify a tree of deterministic candidates: one coin a node against the cumulative probability of its children.

    `verify_tree` rule ``target_only`` in SGLang's layout; see `chain_speculative_sampling_triton` for what both take.

    Args:
        predicts: as there.
        accept_index: int32 ``[batch, longest path + 1]``.
        accept_token_num: as there.
        candidates: int64 ``[batch, nodes]``.
        retrive_index: int64 ``[batch, nodes]``.
        retrive_next_token: int64 ``[batch, nodes]``: first child, -1 for none.
        retrive_next_sibling: int64 ``[batch, nodes]``.
        uniform_samples: float32 ``[batch, nodes]``: the coin of each node's children.
        uniform_samples_for_final_sampling: float32 ``[batch]``.
        target_probs: float32 ``[batch, nodes, vocab]``.
        draft_probs: float32 like target_probs; rejected children are noted in it, as there.
        threshold_single: a child of at least this probability is accepted at once; below 1 is lossy.
        threshold_acc: divides the cumulative probability; below 1 is lossy.
        deterministic: results always are.
    """
    parents, rank = _siblings(retrive_next_token.long(), retrive_next_sibling.long())
    batch, nodes = candidates.shape
    node = torch.arange(nodes, device=parents.device)
    owner = parents.clamp(min=0)
    row = torch.arange(batch, device=parents.device)
    vocab = target_probs.shape[-1]
    token = candidates.clamp(0, vocab - 1)
    single = target_probs[row[:, None], owner, token]
    single = torch.where((parents >= 0) & (candidates == token), single, 0.0)
    # The sum over the siblings up to a node, in the order of the links.
    earlier = (parents[:, :, None] == parents[:, None, :]) & (rank[:, None, :] <= rank[:, :, None])
    reached = (earlier * single[:, None, :]).sum(-1) / threshold_acc
    coin = uniform_samples.gather(1, owner)
    passes = (parents >= 0) & (single > 0) & ((coin < reached) | (single >= threshold_single))
    path, count = _walk(parents, rank, passes, accept_index.shape[1])
    last_node = path.gather(1, count[:, None])[:, 0]

    # Rejected at a node: the children before the accepted one; all, where none was; none behind the last slot.
    accepted = torch.full_like(parents, nodes).scatter_(1, path[:, :-1], _next_rank(path, rank, count))
    accepted = torch.where((count == path.shape[1] - 1)[:, None] & (node == last_node[:, None]), -1, accepted)
    on_path = torch.zeros_like(parents, dtype=torch.bool).scatter_(1, path, True)
    tried = (parents >= 0) & on_path.gather(1, owner) & (rank < accepted.gather(1, owner))
    # Nodes that note nothing write what the first that does notes: whichever is last.
    notes = tried & (candidates == token)
    source = torch.where(notes, node, notes.byte().argmax(1, keepdim=True))
    place = row[:, None], owner.gather(1, source), token.gather(1, source)
    noted = single.gather(1, source).to(draft_probs.dtype)
    draft_probs[place] = torch.where(notes.any(1, keepdim=True), noted, draft_probs[place])
    last = target_probs[row, last_node].float()
    here = tried & (parents == last_node[:, None])
    mass = torch.zeros_like(last).scatter_add_(1, token, torch.where(here, single, 0.0).float())
    final = _draws.draw((last - mass).clamp(min=0), uniform_samples_for_final_sampling, last)
    _write(predicts, accept_index, accept_token_num, candidates, retrive_index, path, count, final)


@_both_spellings
def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow the target's argmax down the tree; `verify_tree` rule ``greedy`` where only the argmaxes are at hand.

    Args:
        predicts: see `tree_speculative_sampling_target_only`, as the next six.
        accept_index: see there.
        accept_token_num: see there.
        candidates: see there.
        retrive_index: see there.
        retrive_next_token: see there.
        retrive_next_sibling: see there.
        target_predict: int64 ``[batch, nodes]``, indexed by global slot: the target's token behind each node.
    """
    parents, rank = _siblings(retrive_next_token.long(), retrive_next_sibling.long())
    wanted = target_predict.flatten()[retrive_index.long()]
    passes = (parents >= 0) & (candidates == wanted.gather(1, parents.clamp(min=0)))
    path, count = _walk(parents, rank, passes, accept_index.shape[1])
    token = wanted.gather(1, path.gather(1, count[:, None]))[:, 0]
    _write(predicts, accept_index, accept_token_num, candidates, retrive_index, path, count, token)


@_both_spellings
def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int = FULL_MASK,
) -> None:
    """Mask, positions and links of the tree that EAGLE-2 selected.

    Args:
        parent_list: int64 ``[batch, topk * (depth - 1) + 1]``: for each expanded node its number among the candidates;
            entry 0 stands for the root.
        selected_index: int64 ``[batch, draft_token_num - 1]``: ascending numbers of the candidates chosen; candidate c
            hangs on entry ``c // topk`` of parent_list.
        verified_seq_len: int64 ``[batch]``.
        tree_mask: written: bool, flat (FULL_MASK, QLEN_ONLY), or packed uint8, uint16, uint32 (BITPACKING).
        positions: int64 ``[batch * draft_token_num]``, written: absolute.
        retrive_index: int64 ``[batch, draft_token_num]``, written, as the next two.
        retrive_next_token: see `tree_speculative_sampling_target_only`.
        retrive_next_sibling: see there.
        topk: children an expanded node has.
        depth: not read: a tree is as deep as its links say.
        draft_token_num: nodes, the root included.
        tree_mask_mode: 0 FULL_MASK, 1 QLEN_ONLY, 2 QLEN_ONLY_BITPACKING.
    """
    entry = selected_index.long() // topk
    wanted = parent_list.long().gather(1, entry.clamp(0, parent_list.shape[1] - 1))
    is_owner = wanted[:, :, None] == selected_index[:, None, :]
    owner = torch.where(is_owner.any(-1), is_owner.byte().argmax(-1) + 1, -1)
    parents = torch.nn.functional.pad(torch.where(entry == 0, 0, owner), (1, 0), value=-1)
    layout = tree_layout(parents, lengths=verified_seq_len.long())
    links = tree_links(parents, engine="sglang")
    positions.copy_(layout.positions.flatten())
    for to, values in zip((retrive_index, retrive_next_token, retrive_next_sibling), links, strict=True):
        to.copy_(values)
    _fill_mask(tree_mask, parents, verified_seq_len.long(), tree_mask_mode)


def _fill_mask(mask: Tensor, parents: Tensor, lengths: Tensor, mode: int) -> None:
    if mode == QLEN_ONLY_BITPACKING:
        mask.copy_(tree_mask(parents, format="sglang_packed").mask.view(mask.shape))
        return
    if mode not in (FULL_MASK, QLEN_ONLY):
        raise ValueError(f"build_tree_kernel_efficient: tree_mask_mode must be 0, 1 or 2, got {mode}")
    past = lengths if mode == FULL_MASK else None
    made = tree_mask(parents, past=past, format="flat", size=mask.numel())
    flat = mask.view(-1)
    place = torch.arange(mask.numel(), device=mask.device)
    torch.where(place < made.offsets[-1], made.mask.to(flat.dtype), flat, out=flat)  # type: ignore[index]


def _siblings(next_token: Tensor, next_sibling: Tensor) -> tuple[Tensor, Tensor]:
    """(parent of each node or -1, its rank among its siblings): links are followed as they are, in any order.

    A link outside the slots, two links to one node or a link to the root are no tree: the root alone is left.
    """
    nodes = next_token.shape[1]
    node = torch.arange(nodes, device=next_token.device)
    owner, children = followed(next_token)
    elder, siblings = followed(next_sibling)
    outside = ((next_token < -1) | (next_token >= nodes) | (next_sibling < -1) | (next_sibling >= nodes)).any(1)
    bad = (outside | (children + siblings > (node > 0)).any(1))[:, None]
    owner, elder = torch.where(bad, -1, owner), torch.where(bad, -1, elder)
    eldest, rank = torch.where(elder >= 0, elder, node), (elder >= 0).long()
    for _ in range((nodes - 1).bit_length()):
        rank, eldest = rank + rank.gather(1, eldest), eldest.gather(1, eldest)
    return owner.gather(1, eldest), rank


def _walk(parents: Tensor, rank: Tensor, passes: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """(path, the root first ``[batch, slots]``; accepted nodes): at each node the first child that passes."""
    current = parents.new_zeros(len(parents))
    goes = torch.ones_like(current, dtype=torch.bool)
    path, count = [current], torch.zeros_like(current)
    for _ in range(1, slots):
        children = (parents == current[:, None]) & passes
        goes = children.any(1) & goes
        current = torch.where(goes, torch.where(children, rank, parents.shape[1]).argmin(1), current)
        count = count + goes
        path.append(current)
    return torch.stack(path, 1), count


def _next_rank(path: Tensor, rank: Tensor, count: Tensor) -> Tensor:
    """Rank of the accepted child of each node of the path but its last slot; where there is none, above all ranks."""
    place = torch.arange(path.shape[1] - 1, device=path.device)
    return torch.where(place < count[:, None], rank.gather(1, path[:, 1:]), rank.shape[1])


def _write(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    path: Tensor,
    count: Tensor,
    token: Tensor,
) -> None:
    """Results in place: slots behind the accepted path keep what they hold."""
    place = torch.arange(path.shape[1], device=path.device)
    is_kept = place <= count[:, None]
    slot = retrive_index.gather(1, path)
    accept_index[:, : path.shape[1]] = torch.where(is_kept, slot, accept_index[:, : path.shape[1]].long()).to(
        accept_index.dtype
    )
    accept_token_num.copy_(count)
    following = candidates.gather(1, torch.nn.functional.pad(path[:, 1:], (0, 1)))
    behind = torch.where(place == count[:, None], token[:, None], following)
    # Slots of the rest are written with the root's, which is always kept: one value, whichever is last.
    slot = torch.where(is_kept, slot, slot[:, :1])
    behind = torch.where(is_kept, behind, behind[:, :1])
    predicts.scatter_(0, slot.flatten(), behind.flatten().to(predicts.dtype))
