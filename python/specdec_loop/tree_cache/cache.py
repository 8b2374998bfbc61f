"""The cache: inputs of a forward, commit, rollback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specdec_kernels import CacheLayout, Status, compact_cache, rollback, tree_mask

from ..attention import NAME
from .layer import Lengths, TreeLayer, fail, is_in_place
from .masks import MOST_NODES, KeptMasks
from .recurrence import lead, modeling_file
from .states import HybridLayer, StateLayer, States
from .support import LAYER_TYPES, RECURRENT_TYPES, cache_argument, check_model, last_place

MASKED = ("sdpa", "eager")  # attention implementations that take a 4-D mask


class TreeCache(Cache):  # type: ignore[misc] # transformers has no types
    """A preallocated cache for chains and trees: ``model(..., past_key_values=cache)``, then `commit`.

    Keys and values lie in static buffers ``[batch, head, capacity, dim]`` that never move. A forward writes its rows
    in place and attention reads views of them, so that a step copies nothing but the rows it adds and those that
    `commit` moves. Requests have lengths of their own.

    A decoding step: run the nodes of a tree (node 0 is the last committed token, which has no row yet) with
    `tree_inputs`, or those of a chain with `chain_inputs`; verify; `commit`. Several forwards may precede a commit,
    as when a draft model runs token by token or a tree grows level by level: nodes count from the last commit on.

    A prompt is a chain whose tokens are all accepted: pad prompts of different lengths **on the right** and commit
    ``prompt_lengths - 1``. While all requests have the same length, known to the host, the model needs neither mask
    nor positions from here; plain calls, left-padded 2-D masks, `generate` and its assisted decoding work as they do
    with any other cache. Where lengths differ, a call without them raises.

    Layers with a sliding window keep all their rows, and the masks do the windowing: a ring buffer would have
    overwritten what a rollback has to bring back. Recurrent layers have one state, which `commit` advances over what
    was accepted; so nothing committed can be taken back from them. Models that cannot be served are refused: see
    `check_model`.
    """

    def __init__(
        self, config: Any, *, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Describe the cache; a layer's buffers are made by the first forward, which tells its heads and dims.

        Args:
            config: of the model.
            batch: requests.
            capacity: slots of a request: the longest text, and the widest tree behind it.
            dtype: of keys and values, `model.dtype`.
            device: of all layers, `model.device`.

        Raises:
            ValueError: sizes below 1, or a model that is not served.

        Example:
            >>> import torch
            >>> from specdec_loop import TreeCache
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> sizes = dict(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
            >>> model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes))
            >>> cache = TreeCache(model.config, batch=2, capacity=32, dtype=model.dtype, device=model.device)
            >>> prompts, prompt_lengths = torch.tensor([[5, 6, 7], [8, 1, 0]]), torch.tensor([3, 2]).int()
            >>> nodes, parents = torch.tensor([[4, 2, 3, 1], [6, 2, 1, 5]]), torch.tensor([[-1, 0, 0, 2]] * 2)
            >>> with torch.no_grad():
            ...     prefill = model(prompts, past_key_values=cache)  # its last rows tell the first tokens, 4 and 6
            ...     prefill_status = cache.commit(prompt_lengths - 1)
            ...     logits = model(nodes, **cache.tree_inputs(parents)).logits
            >>> accepted, path = torch.tensor([2, 0]).int(), torch.tensor([[2, 3], [-1, -1]])  # as verify_tree says
            >>> cache.commit(accepted, path), cache.lengths
            (tensor([0, 0], dtype=torch.int32), tensor([6, 3]))
        """
        for name, value in (("batch", batch), ("capacity", capacity)):
            if not isinstance(value, int) or value < 1:
                fail(name, "a host int >= 1", value)
        check_model(config)
        self._argument = cache_argument(config)
        config = config.get_text_config(decoder=True)
        window = getattr(config, "sliding_window", None)
        usual = "sliding_attention" if window else "full_attention"
        types = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
        self._config, self._last_place = config, last_place(config, capacity)
        windows: dict[str, int] = {"full_attention": 0, "sliding_attention": window or 0}
        attending = {"full_attention" if kind == "hybrid" else kind for kind in types}
        self._windows = {kind: windows[kind] for kind in LAYER_TYPES if kind in attending}  # empty: no layer has rows
        self._lengths, self._dtype = Lengths(batch, capacity, device), dtype
        self._no_status = torch.zeros(batch, dtype=torch.int32, device=device)
        self._layout: CacheLayout | None = None
        self._kept = KeptMasks(capacity, device)
        self._states = States(self._lengths, sum(kind in RECURRENT_TYPES for kind in types))
        if self._states.layers:
            lead(modeling_file(config))
        recurrent = iter(self._states.layers)

        def layer(kind: str) -> Any:
            if kind in LAYER_TYPES:
                return TreeLayer(self._lengths, dtype)
            state = next(recurrent)
            return HybridLayer(state, self._lengths, dtype) if kind == "hybrid" else state

        super().__init__(layers=[layer(kind) for kind in types])

    @property
    def lengths(self) -> Tensor:
        """int64 ``[batch]``: committed tokens in the cache, and so the position of the next root."""
        return self._lengths.exact

    @property
    def has_states(self) -> bool:
        """Whether there are recurrent layers: of what is committed, nothing can be taken back."""
        return bool(self._states.layers)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: layers give their inputs to `update_conv_state` instead, also of one token."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """The state that layer `layer_idx` continues."""
        layer: StateLayer | HybridLayer = self.layers[layer_idx]
        return layer.state()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows in the cache, where that is one number."""
        return self._lengths.with_rows(self._written())

    @property
    def layout(self) -> CacheLayout:
        """Keys and values of every layer as the ops take them."""
        if self._layout is None or len(self._layout.tensors) != 2 * self._lengths.layers:
            used = [layer for layer in self._rows() if layer.is_initialized]
            self._layout = CacheLayout([t for layer in used for t in (layer.keys, layer.values)], "bhld")
        return self._layout

    def tree_inputs(self, parents: Tensor, *, is_root_committed: bool = False) -> dict[str, Any]:
        """Inputs of a forward of a tree besides its tokens.

        Args:
            parents: int32 or int64 ``[batch, nodes]``, see `specdec_kernels.tree_layout`: all nodes since the last
                commit. The first ones, whose rows earlier forwards wrote, are not run again: give the model the rest.
                A tensor that is given again is taken for the same trees: do not write it in between.
            is_root_committed: node 0 is the last committed row, not to be run: for trees of drafts behind a text that
                has all its rows.

        Returns:
            Keyword arguments: past_key_values (``cache`` from transformers 5.24 on), position_ids and attention_mask,
            4-D, one for each kind of layer where a model has both. A padding node attends itself alone; a malformed
            tree is its root alone.

        Raises:
            ValueError: wrong parents, no node left to run, no committed root, an attention implementation that takes
                no 4-D mask, or too small a capacity.
        """
        done = self._written() + is_root_committed
        if done == 0 and (kept := self._kept_trees(parents)) is not None:
            return kept
        depth = tree_mask(parents).mask[:, 0].sum(-1) - 1  # a node attends its ancestors and itself
        past = self.lengths - int(is_root_committed)
        if is_root_committed and not self._lengths.longest:
            fail("is_root_committed", "False where nothing is committed", True)
        if parents.shape[1] <= done:
            fail("parents", f"of more than the {done} nodes in the cache", list(parents.shape))
        size, dtype = self._reach(parents.shape[1] - done), self._mask_dtype()
        masks = {
            kind: tree_mask(parents, past=past, window=window, format="additive", dtype=dtype, size=size).mask[
                :, :, done:
            ]
            for kind, window in self._windows.items()
        }
        self._kept.remember(parents)
        if self.has_states:
            self._states.paths.become(parents[:, 1:] - 1 if is_root_committed else parents)
        return self._inputs(past[:, None] + depth[:, done:], masks)

    def sibling_inputs(self, tokens: int) -> dict[str, Any]:
        """Inputs of a forward of nodes that all follow the last committed token and do not see each other.

        Args:
            tokens: nodes a request, a host int.

        Returns:
            As `tree_inputs`.

        Raises:
            ValueError: a sliding window, which depth moves, rows that are not committed, or too small a capacity.
        """
        self._refuse_windows("sibling_inputs")
        if self._written():
            fail("sibling_inputs", "called right after a commit", f"{self._written()} rows since")
        size, lengths, dtype = self._reach(tokens), self._lengths, self._mask_dtype()
        if self.has_states:
            self._states.paths.become(torch.full((lengths.batch, tokens), -1, device=lengths.device))
        if self._has_kept(tokens):
            places = self._kept.positions(lengths.longest, 1).expand(lengths.batch, tokens)
            return self._inputs(places, {"full_attention": self._kept.mask("siblings", tokens, size - tokens, dtype)})
        key = torch.arange(size, device=lengths.device)
        shown = torch.zeros((), dtype=dtype, device=key.device)
        mask = torch.where(key < lengths.exact[:, None, None, None], shown, torch.finfo(shown.dtype).min)
        mask = mask.expand(-1, -1, tokens, -1).scatter(3, lengths.slots(0, tokens)[:, None, :, None], 0.0)
        return self._inputs(lengths.exact[:, None].expand(-1, tokens), {"full_attention": mask})

    def child_inputs(self, inputs: dict[str, Any], rows: Tensor) -> dict[str, Any]:
        """Inputs of a forward of nodes whose parents are all rows of the last forward: cheaper than `tree_inputs`.

        A node attends what its parent attends, and itself.

        Args:
            inputs: of the last forward, from `tree_inputs`, `sibling_inputs` or from here.
            rows: int64 ``[batch, nodes]``: which of its rows is each node's parent.

        Returns:
            As `tree_inputs`.

        Raises:
            ValueError: a sliding window, which parent and child do not share, or too small a capacity.
        """
        self._refuse_windows("child_inputs")
        batch, nodes = rows.shape
        done, size = self._written(), self._reach(nodes)
        if self.has_states:
            known = self._states.paths.parents
            assert known is not None
            self._states.paths.become(torch.cat([known, done - self._last_nodes + rows], 1))
        if not self._windows:
            return self._inputs(rows, {})
        before = inputs["attention_mask"]
        seen = before.expand(batch, -1, -1, -1).gather(2, rows[:, None, :, None].expand(-1, -1, -1, before.shape[3]))
        if self._has_kept(nodes):
            mask = torch.cat([seen, self._kept.mask("siblings", nodes, 0, before.dtype).expand(batch, -1, -1, -1)], 3)
        else:
            slots, hidden = self._lengths.slots(done, nodes)[:, None, :, None], torch.finfo(before.dtype).min
            mask = torch.nn.functional.pad(seen, (0, size - before.shape[3]), value=hidden).scatter_(3, slots, 0.0)
        return self._inputs(inputs["position_ids"].gather(1, rows) + 1, {"full_attention": mask})

    def chain_inputs(self, tokens: int) -> dict[str, Any]:
        """Inputs of a forward of `tokens` consecutive tokens a request besides the tokens.

        Args:
            tokens: how many, a host int.

        Returns:
            Keyword arguments as of `tree_inputs`, to be read only; no mask where the model needs none, for all requests
            have the same length and run one token, or are empty.

        Raises:
            ValueError: as `tree_inputs`.
        """
        size, lengths = self._reach(tokens), self._lengths
        done = self._written()
        if not self._windows:
            return self._inputs(lengths.slots(done, tokens), {})
        if lengths.is_even and (tokens == 1 or lengths.longest + done == 0):
            # Bamba and its kin count positions from 0 in every forward that is not given them.
            is_behind = self._last_place is not None and lengths.longest + done + tokens - 1 > self._last_place
            if not (self.has_states or is_behind):
                return {self._argument: self}
            return {self._argument: self, "position_ids": self._placed(lengths.slots(done, tokens))}
        dtype = self._mask_dtype()
        if self._has_kept(tokens) and not any(self._windows.values()):
            places = self._kept.positions(size - tokens, tokens).expand(lengths.batch, -1)
            return self._inputs(places, {"full_attention": self._kept.mask("stairs", tokens, size - tokens, dtype)})
        slots = lengths.slots(done, tokens)
        key, query = torch.arange(size, device=slots.device), slots[:, None, :, None]
        shown = torch.zeros((), dtype=dtype, device=slots.device)
        masks = {}
        for kind, window in self._windows.items():
            seen = (key <= query) & (key > query - window) if window else key <= query
            masks[kind] = torch.where(seen, shown, torch.finfo(shown.dtype).min)
        return self._inputs(slots, masks)

    def _kept_trees(self, parents: Tensor) -> dict[str, Any] | None:
        """The inputs of trees that came before."""
        windows = self._windows.values()
        if not isinstance(parents, Tensor) or not windows or any(windows) or not self._has_kept(parents.shape[-1]):
            return None
        lengths = self._lengths
        kept = self._kept.trees(parents, lengths.longest, self._mask_dtype())
        if kept is None:
            return None
        self._reach(parents.shape[1])
        if self.has_states:
            self._states.paths.become(parents)
        return self._inputs(kept[0] + lengths.longest, {"full_attention": kept[1]})

    def _has_kept(self, nodes: int) -> bool:
        """Whether the masks of so many nodes are views of kept ones, and nobody has to wait to know which."""
        return self._lengths.is_on_host and self._lengths.is_even and nodes <= MOST_NODES

    def commit(self, num_accepted: Tensor | int, path: Tensor | None = None, *, zero_tail: bool = False) -> Tensor:
        """Keep the root and the accepted nodes of what was written since the last commit, and take back the rest.

        Args:
            num_accepted: int32 ``[batch]``, as `verify_tree` and `verify_chain` return it; -1: the request took no
                part, nothing of it is kept. Of chains, an int that the host knows to be that of every request.
            path: of a tree, see `specdec_kernels.compact_cache`; None: the nodes are a chain and in place.
            zero_tail: overwrite what is taken back. Masked rows must be finite; where a model may overflow on a
                rejected token (float16), this keeps them so.

        Returns:
            status, int32 ``[batch]``, to be read only: 32 where num_accepted or the path is bad. Nothing of that
            request is kept.

        Raises:
            ValueError: nothing was written; wrong shapes, dtypes or devices.
        """
        done, lengths = self._written(), self._lengths
        if done == 0:
            fail("commit", "called after a forward", "nothing written")
        for layer in self.layers:
            if layer.written != done and layer.is_initialized:
                fail("layers", "equally long at commit", [layer.written for layer in self.layers])
        if isinstance(num_accepted, int):
            if path is not None or isinstance(num_accepted, bool) or not -1 <= num_accepted < done:
                fail("num_accepted", f"an int in [-1, {done}) of chains, or a tensor of int32", num_accepted)
            every = torch.full((lengths.batch,), num_accepted, dtype=torch.int32, device=lengths.device)
            if not zero_tail:
                self._states.commit(every, None, is_whole=num_accepted == done - 1)
                return self._keep(num_accepted + 1)
            num_accepted = every
        if not isinstance(num_accepted, Tensor):
            fail("num_accepted", "a tensor of int32 or an int", type(num_accepted).__name__)
        if num_accepted.dtype != torch.int32 or num_accepted.shape != (lengths.batch,):
            got = f"{num_accepted.dtype} {list(num_accepted.shape)}"
            fail("num_accepted", f"int32 [{lengths.batch}], or an int", got)
        if path is not None and not isinstance(path, Tensor):
            fail("path", "a tensor of int32 or int64", type(path).__name__)
        known = num_accepted.tolist() if lengths.is_on_host else []  # its host looks, where a device has to reckon
        if path is None:
            is_good = bool(known) and all(-1 <= n < done for n in known)
            is_bad = (num_accepted < -1) | (num_accepted >= done)
            status = self._no_status if is_good else is_bad.int() * Status.BAD_LAYOUT
        elif known and is_in_place(path, known, done):
            status = self._no_status
        else:  # a path no longer than what was written, and so nothing beyond is taken for accepted
            path = path if path.shape[-1] < done else path[..., : done - 1].contiguous()
            status = compact_cache(self.layout, path, num_accepted, lengths.exact) if self._windows else self._no_status
        is_whole = path is None and bool(known) and min(known) == max(known) == done - 1
        advanced = self._states.commit(num_accepted.masked_fill(status > 0, -1), path, is_whole=is_whole)
        if not self._windows and advanced is not None:  # nothing but the states has looked at the path
            status = status | advanced
        is_sound = bool(known) and (status is self._no_status or not any(status.tolist()))
        if is_sound and not zero_tail and known.count(known[0]) == len(known):
            return self._keep(known[0] + 1)
        rows = num_accepted + 1 if is_sound else (num_accepted + 1).masked_fill(status > 0, 0)
        if zero_tail and self._windows:  # else there is nothing to do: a dense cache has no pages to give back
            rollback(self.layout, lengths.exact, rows - 1, max_tail=done, zero_tail=True)
        lengths.exact = lengths.exact + rows
        most = done if path is None else min(done, path.shape[1] + 1)
        lengths.changed(lengths.longest + most, is_even=False)
        self._begin_step()
        return status

    def _keep(self, rows: int) -> Tensor:
        """Keep the first rows of every request, the same number of each."""
        self._lengths.grow(rows)
        self._begin_step()
        return self._no_status

    def know_lengths(self, lengths: Sequence[int]) -> None:
        """Be told what `lengths` holds by a host that knows it anyway: masks are then as narrow as they can be."""
        self._lengths.changed(max(lengths), is_even=min(lengths) == max(lengths), is_exact=True)

    def take(self, parts: Sequence[tuple[TreeCache, Sequence[int]]]) -> None:
        """Begin with the committed rows of requests of other caches of this model, in this order.

        Args:
            parts: caches, and which requests of each; all together as many as this cache has, which is empty.

        Raises:
            ValueError: this cache is not empty, or another number of requests.
        """
        count = sum(len(numbers) for _, numbers in parts)
        if count != self._lengths.batch or self._written() or self._lengths.longest:
            fail("take", f"called on an empty cache of {count} requests", f"{self._lengths.batch} requests")
        device = self._lengths.device
        chosen = [(cache, torch.tensor(numbers).to(device, non_blocking=True)) for cache, numbers in parts]
        for i, layer in enumerate(self.layers):
            if isinstance(layer, TreeLayer):
                layer.take([(cache.layers[i], numbers) for cache, numbers in chosen])
        self._states.take([(cache._states, numbers) for cache, numbers in chosen])
        self._lengths.exact = torch.cat([cache.lengths[numbers] for cache, numbers in chosen])
        longest = max(cache._lengths.longest for cache, _ in chosen)
        self._lengths.changed(min(longest, self._lengths.capacity), is_even=False)

    def truncate(self, lengths: Tensor) -> None:
        """Keep at most `lengths`, int64 ``[batch]``, rows of each request, and none since the last commit.

        Raises:
            ValueError: recurrent layers and a request that would keep some of its rows: its states know them all.
        """
        self._begin_step()
        before = self._lengths.exact
        self._lengths.exact = torch.minimum(before, lengths)
        self._lengths.read()
        if self.has_states:
            kept = self._lengths.exact
            if bool(((kept < before) & (kept > 0)).any()):
                self._lengths.exact = before
                self._lengths.read()
                fail("lengths", "0 or no fewer than there are: a recurrent state cannot be taken back", kept.tolist())
            self._states.clear(kept == 0)

    def read_lengths(self) -> Tensor:
        """The lengths, on the host. On a GPU this waits for it, and the next masks are as narrow as they can be.

        Without it the host's bound grows by the longest possible path a step; it is called where that bound would
        exceed the capacity.
        """
        self._lengths.read()
        return self._lengths.exact.cpu()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Take back the last rows of every request; transformers' assisted decoding calls this.

        Args:
            tokens_to_remove: minus their number, an int; transformers up to 5.17 hands over a tensor with one. (It
                also took a positive number then, the length to keep.)

        Raises:
            ValueError: a positive number.
        """
        lengths, count = self._lengths, -int(tokens_to_remove)
        if count < 0:
            fail("tokens_to_remove", "minus the number of tokens", -count)
        rest = max(count - self._written(), 0)
        if rest and self.has_states:
            fail("tokens_to_remove", "no more than the last commit left: a recurrent state cannot be taken back", count)
        lengths.announced = -1
        if self.has_states:
            self._states.crop(self._written() - count)
        for layer in self._rows():
            layer.written = max(layer.written - count, 0)
        if rest:
            lengths.exact = (lengths.exact - rest).clamp(min=0)
            lengths.changed(max(lengths.longest - rest, 0), is_even=lengths.is_even)

    def reset(self) -> None:
        """Forget every row; the buffers stay."""
        super().reset()
        if self.has_states:
            self._states.begin_step()
            self._states.clear(torch.ones_like(self._no_status, dtype=torch.bool))
        self._lengths.exact = torch.zeros_like(self._lengths.exact)
        self._lengths.changed(0, is_even=True)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give request b the rows of request beam_idx[b]."""
        super().reorder_cache(beam_idx)
        self._states.reorder(beam_idx)
        self._lengths.exact = self._lengths.exact[beam_idx]
        self._lengths.changed(self._lengths.longest, is_even=self._lengths.is_even)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: buffers are static."""
        fail("batch", "what the cache was made for, it cannot be repeated", f"{repeats} repeats")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refused: buffers are static."""
        fail("batch", "what the cache was made for, requests cannot be left out", indices)

    def _refuse_windows(self, call: str) -> None:
        if any(self._windows.values()):
            fail(call, "called for layers without a sliding window", self._windows)

    def _begin_step(self) -> None:
        """Count rows from here on."""
        self._lengths.announced = -1
        self._states.begin_step()
        for layer in self._rows():
            layer.written = 0

    def _rows(self) -> list[TreeLayer]:
        """The layers that have a row for each token."""
        return [layer for layer in self.layers if isinstance(layer, TreeLayer)]

    def _written(self) -> int:
        """Rows since the last commit, by one of the layers that the model uses."""
        layers = self._rows() or self._states.layers
        return int(next((layer for layer in layers if layer.is_initialized), layers[0]).written)

    def _reach(self, tokens: int) -> int:
        """Width of a mask for `tokens` more rows."""
        return self._lengths.reach(self._written() + tokens)

    def _mask_dtype(self) -> torch.dtype:
        """Of an additive mask, which SDPA takes as it is; a boolean one it would convert in every layer."""
        implementation = self._config._attn_implementation
        if self._windows and implementation not in (*MASKED, NAME):
            fail("attn_implementation", " or ".join(MASKED) + ": others take no 4-D mask", implementation)
        return self._dtype

    def _inputs(self, positions: Tensor, masks: dict[str, Tensor]) -> dict[str, Any]:
        """A model whose layers are all of one kind takes one mask, another one a mask for each kind, or none at all."""
        self._lengths.announced, self._last_nodes = self._written(), positions.shape[1]
        if not masks:
            return {self._argument: self}
        only = next(iter(masks.values()))
        return {
            self._argument: self,
            "position_ids": self._placed(positions),
            "attention_mask": masks if len(masks) > 1 else only,
        }

    def _placed(self, positions: Tensor) -> Tensor:
        """None behind the last that the model knows: only drafts lie there that no text has room for."""
        return positions if self._last_place is None else positions.clamp(max=self._last_place)
