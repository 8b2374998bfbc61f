"""Recurrent layers of a `TreeCache`: one state a layer, which `commit` advances over the accepted tokens alone.

A forward leaves the committed states as they are. It keeps what its tokens put into the recurrence, keys, values and
gates, and into the short convolution; `commit` replays those of the accepted nodes (`advance_state`, `advance_window`).
What is rejected was never in the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from specdec_kernels import advance_state, advance_window, tree_mask

from .layer import Lengths, TreeLayer, fail
from .masks import MOST_NODES
from .recurrence import begin_scan, delta_along_paths, owned, select_along_paths, sums_along_paths


class Paths:
    """Who is whose parent among the nodes since the last commit; what follows from it is made once a forward."""

    def __init__(self) -> None:
        """Begin a step."""
        self.parents: Tensor | None = None  # int64 [batch, nodes], -1: the last committed token; None: a chain
        self._made: dict[Any, Tensor] = {}

    def become(self, parents: Tensor | None) -> None:
        """Take new nodes, in front of them those that there are."""
        if parents is not None:  # a malformed tree may say anything: it is flagged by who verifies it
            number = torch.arange(parents.shape[1], device=parents.device)
            parents = torch.minimum(parents.long().clamp(min=-1), number - 1)
        self.parents, self._made = parents, {}

    def seen(self) -> Tensor:
        """Bool ``[batch, nodes, nodes]``: a node's ancestors and itself."""
        if "seen" not in self._made:
            assert self.parents is not None
            below = pad(self.parents + 1, (1, 0), value=-1)  # one root more, the last committed token
            self._made["seen"] = tree_mask(below).mask[:, 0, 1:, 1:]
        return self._made["seen"]

    def windows(self, size: int) -> Tensor:
        """Int64 ``[batch, nodes, size]``: which columns of window and nodes a convolution reads for each node."""
        if size not in self._made:
            assert self.parents is not None
            first = torch.arange(-1, size - 2, device=self.parents.device).clamp(min=0)
            before = torch.cat([first.expand(len(self.parents), -1), self.parents + size - 1], 1)
            columns = [torch.arange(size - 1, before.shape[1], device=before.device).expand_as(self.parents)]
            for _ in range(size - 1):
                columns.append(before.gather(1, columns[-1]))
            self._made[size] = torch.stack(columns[::-1], -1)
        return self._made[size]


class States:
    """The states of all recurrent layers, in one tensor, and what a commit does to them."""

    def __init__(self, lengths: Lengths, layers: int) -> None:
        """Begin with empty requests; the first forward tells the sizes."""
        self.lengths, self.paths = lengths, Paths()
        self.layers = [StateLayer(self, number) for number in range(layers)]
        self.windows: Tensor | None = None  # [layers, batch, channel, kernel_size - 1]: last inputs of the convolution
        self.states: Tensor | None = None  # float32 [layers, batch, heads, d_k, d_v]

    @torch.inference_mode(mode=False)  # they may outlive it
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor ``[layers, batch, ...]``."""
        return torch.zeros(len(self.layers), self.lengths.batch, *shape, dtype=dtype, device=self.lengths.device)

    def commit(self, num_accepted: Tensor, path: Tensor | None, *, is_whole: bool) -> Tensor | None:
        """Advance over the accepted nodes.

        Args:
            num_accepted: int32 ``[batch]``, -1: not at all.
            path: of a tree; None: a chain.
            is_whole: all requests accepted all nodes of a chain: the forward left the states after it.

        Returns:
            status, int32 ``[batch]``, of the ops that advance: nothing of a request that they flag is kept. None: none
            was called.
        """
        status = None
        if not self.layers:
            return None
        if is_whole and all(layer.running is not None for layer in self.layers):
            assert self.states is not None
            for state, layer in zip(self.states, self.layers, strict=True):
                state.copy_(layer.running)
        elif self.states is not None:
            status = self._replay(self.states, num_accepted, path)
        if self.windows is not None:
            inputs = torch.stack([layer.inputs["window"] for layer in self.layers]).transpose(2, 3)
            status = advance_window(self.windows, inputs, num_accepted, path=path)
        return status

    def _replay(self, states: Tensor, num_accepted: Tensor, path: Tensor | None) -> Tensor:
        def all_layers(name: str) -> Tensor:
            return torch.stack([layer.inputs[name] for layer in self.layers]).contiguous()  # an axis of 1 misleads it

        beta = all_layers("beta") if "beta" in self.layers[0].inputs else None
        keys, values, log_decay = map(all_layers, ("keys", "values", "log_decay"))
        rates = [layer.rates for layer in self.layers if layer.rates is not None]
        if rates:
            log_decay = log_decay[..., None] * torch.stack(rates)[:, None, None]
        return advance_state(states, keys, values, num_accepted, log_decay=log_decay, beta=beta, path=path)

    def begin_step(self) -> None:
        """Count nodes from here on."""
        self.paths.become(None)
        for layer in self.layers:
            layer.inputs, layer.running, layer.written = {}, None, 0

    def crop(self, written: int) -> None:
        """Keep the first nodes since the last commit; a forward then continues the last of a chain."""
        if not written:
            self.begin_step()
            return
        parents = self.paths.parents
        self.paths.become(None if parents is None else parents[:, :written])
        for layer in self.layers:
            layer.running, layer.written = None, min(layer.written, written)
            kept = layer.written
            layer.inputs = {
                name: x[..., :kept] if name == "window" else x[:, :kept].contiguous()
                for name, x in layer.inputs.items()
            }
        if self.states is not None and parents is None:
            self.run_chain(written)

    def run_chain(self, written: int) -> None:
        """Make the states after a chain that is not committed."""
        assert self.states is not None
        after = self.states.clone()
        self._replay(after, torch.full((self.lengths.batch,), written - 1, dtype=torch.int32).to(after.device), None)
        for layer in self.layers:
            layer.running = after[layer.number]

    def clear(self, is_cleared: Tensor) -> None:
        """Forget the states of some requests, bool ``[batch]``."""
        for x in (self.windows, self.states):
            if x is not None:
                x.masked_fill_(is_cleared.view(1, -1, *[1] * (x.dim() - 2)), 0)

    def take(self, parts: Sequence[tuple[States, Tensor]]) -> None:
        """Copy the states of requests of others, whose layers these are."""
        first = 0
        for other, numbers in parts:
            part = slice(first, first + len(numbers))
            if other.windows is not None:
                self.windows = self._taken(self.windows, other.windows, part, numbers)
            if other.states is not None:
                self.states = self._taken(self.states, other.states, part, numbers)
            for own, layer in zip(self.layers, other.layers, strict=True):
                own.is_initialized |= layer.is_initialized
            first = part.stop

    def _taken(self, own: Tensor | None, others: Tensor, part: slice, numbers: Tensor) -> Tensor:
        own = self.zeros(others.shape[2:], others.dtype) if own is None else own
        own[:, part] = others.index_select(1, numbers)
        return own

    def reorder(self, beam_idx: Tensor) -> None:
        """Give request b what request beam_idx[b] has."""
        for x in (self.windows, self.states):
            if x is not None:
                x.copy_(x[:, beam_idx])
        for layer in self.layers:
            layer.inputs = {name: x[beam_idx] for name, x in layer.inputs.items()}
            layer.running = None if layer.running is None else layer.running[beam_idx]


class StateLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc] # transformers has no types
    """One recurrent layer, or short convolution: what transformers' layers and the functions they call ask of it."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, states: States, number: int) -> None:
        """Share the states."""
        super().__init__()
        self.states, self.number = states, number
        self.batch_size, self.device = states.lengths.batch, states.lengths.device
        self.record_past = True  # one token a call goes by `update_conv_state` too
        self.is_initialized = False
        self.written = 0  # nodes since the last commit
        self.inputs: dict[str, Tensor] = {}  # [batch, nodes, ...]; of the convolution [batch, channel, nodes]
        self.running: Tensor | None = None  # state after a chain that is not committed
        self.rates: Tensor | None = None  # [channels, d_k], of Mamba: the decay is a step times these

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the states are made by `update_conv_state` and the recurrence."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Keep the inputs ``[batch, channel, nodes]`` of a convolution; what it has to read.

        That is, of a chain, the rows before it and its own. Of a tree it is what each node reads, ``[batch * nodes,
        channel, kernel size]``, and `convolve` puts the nodes together again.
        """
        batch, channels, nodes = conv_states.shape
        size = int(kwargs["conv_kernel_size"])
        shared = self.states
        if batch != self.batch_size:
            fail("batch", str(self.batch_size), batch)
        if conv_states.requires_grad:
            fail("inputs", "without gradient: the cache is inference only (use torch.no_grad())", "requires_grad")
        if shared.windows is None:
            shared.windows = shared.zeros((channels, size - 1), conv_states.dtype)
        self.is_initialized = True
        self.written += nodes
        begin_scan(self, conv_states)
        rows = self._kept("window", conv_states, 2)
        whole = torch.cat([shared.windows[self.number], rows], 2)
        paths = shared.paths
        if paths.parents is None:
            return whole[:, :, -(nodes + size - 1) :]
        if paths.parents.shape[1] != self.written:
            fail("nodes", f"the {paths.parents.shape[1]} that tree_inputs was given", self.written)
        columns = paths.windows(size)[:, -nodes:].flatten(1)
        read = whole.gather(2, columns[:, None].expand(-1, channels, -1)).unflatten(2, (nodes, size))
        return owned(read.transpose(1, 2).flatten(0, 1), self)

    def convolve(self, original: Callable[..., Tensor], hidden_states: Tensor, **arguments: Any) -> Tensor:
        """The convolution of a tree's nodes, ``[batch, channel, nodes]``."""
        last = original(hidden_states, **arguments)[:, :, -1]
        return last.view(self.batch_size, -1, last.shape[1]).transpose(1, 2)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Nothing to do: the recurrence was led here, see `delta_rule`."""
        if not self.inputs.keys() & {"keys"}:
            raise ValueError("TreeCache: a recurrent layer called a kernel that transformers does not name")
        return recurrent_states

    def state(self) -> Tensor:
        """The state that a forward continues, carrying this layer."""
        if self.running is not None:
            return owned(self.running, self)
        states = self.states.states
        return owned(torch.empty(0, device=self.device) if states is None else states[self.number], self)

    def delta_rule(
        self,
        original: Callable[..., tuple[Tensor, Tensor]],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor]:
        """The gated delta rule of transformers' functions, and Kimi's: outputs ``[batch, nodes, heads, d_v]``."""
        q, k = (x.float() for x in (query, key))
        if use_qk_l2norm_in_kernel:
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        heads = value.shape[2]
        before = self._before((heads, k.shape[3], value.shape[3]))
        kept = self._keep(keys=k, values=value.float(), log_decay=g.float(), beta=beta.float())
        if self.states.paths.parents is None:
            arguments |= {"initial_state": before, "output_final_state": True}
            norm = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            out, after = original(query, key, value, g=g, beta=beta, **norm, **arguments)
            return out, self._ran(after, query.shape[1])
        q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q * q.shape[-1] ** -0.5, kept["keys"]))
        seen = self.states.paths.seen()
        out = delta_along_paths(before, q, k, kept["values"], kept["log_decay"], kept["beta"], seen)
        return out.to(query.dtype), before  # the state of a tree's nodes is not one

    def scan(
        self,
        original: Callable[..., tuple[Tensor, Tensor]],
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **arguments: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Mamba2's scan of transformers' functions: outputs ``[batch, nodes, heads, head_dim]``."""
        heads, dim = hidden_states.shape[2:]
        before = self._before((heads, dim, B.shape[3]))
        step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        step = (softplus(step) if dt_softplus else step).clamp(*dt_limit).float()
        keys, decay = hidden_states.float() * step[..., None], A.float() * step
        kept = self._keep(keys=keys, values=B.float(), log_decay=decay)
        if self.states.paths.parents is None:
            arguments |= {"initial_states": before, "return_final_states": True}
            arguments |= {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
            out, after = original(hidden_states, dt, A, B, C, **arguments)
            return out, self._ran(after, hidden_states.shape[1])
        c, b = (x.repeat_interleave(heads // x.shape[2], 2) for x in (C.float(), kept["values"]))
        out = sums_along_paths(before, c, kept["keys"], b, kept["log_decay"], self.states.paths.seen())
        return out if D is None else out + D[:, None] * hidden_states.float(), None

    def scan_one(self, original: Callable[..., Tensor], state: Tensor, **given: Any) -> Tensor:
        """Mamba2's step of one token, which writes its state, so a copy: outputs ``[batch, heads, head_dim]``."""

        def stepped(*nodes: Tensor, initial_states: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
            after = initial_states.clone()
            return original(after, **given)[:, None], after

        x, dt, b, c = (given[name][:, None] for name in ("hidden_states", "dt", "B", "C"))
        heads = {name: given[name][:, 0] for name in ("D", "dt_bias") if given.get(name) is not None}
        soft = given.get("dt_softplus", False)
        out, _ = self.scan(stepped, x, dt[..., 0], given["A"][:, 0, 0], b, c, dt_softplus=soft, **heads)
        if given.get("z") is not None and self.states.paths.parents is not None:
            out = out * silu(given["z"])[:, None]
        return out[:, 0].to(x.dtype)

    def select(
        self,
        original: Callable[..., Tensor],
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor]:
        """Mamba's scan of transformers' functions, which begins with no state: outputs ``[batch, channels, nodes]``."""
        x, queries = hidden_states.transpose(1, 2).float(), C.transpose(1, 2).float()
        step = (dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]).transpose(1, 2)
        step = (softplus(step) if delta_softplus else step).float()
        self.rates = A.float()
        before, parents = self._before((*A.shape, 1)), self.states.paths.parents
        new = {"keys": B.transpose(1, 2)[:, :, None].float(), "values": (step * x)[..., None], "log_decay": step}
        kept = self._keep(**new)
        keys, values, log_decay = (new if parents is None else kept).values()
        decay = log_decay[..., None] * self.rates
        out, after = select_along_paths(before, queries, keys[:, :, 0], values[..., 0], decay, parents)
        if parents is None:
            self._ran(after, x.shape[1])
        out = (out if D is None else out + x * D).transpose(1, 2)
        return (out if z is None else out * silu(z)).to(hidden_states.dtype), after

    def select_one(self, original: Callable[..., Tensor], state: Tensor, **given: Any) -> Tensor:
        """Mamba's step of one token: outputs ``[batch, channels]``."""
        nodes = {n: given[n][..., None] for n in ("hidden_states", "dt", "B", "C", "z") if given.get(n) is not None}
        named = {"delta_bias": given.get("dt_bias"), "delta_softplus": given.get("dt_softplus", False)}
        return self.select(original, A=given["A"], D=given.get("D"), **nodes, **named)[0][..., 0]

    def _before(self, shape: tuple[int, int, int]) -> Tensor:
        """The state that a chain continues, or the committed one."""
        shared = self.states
        if shared.states is None:
            shared.states = shared.zeros(shape, torch.float32)
        if shared.paths.parents is not None:
            return shared.states[self.number]
        if self.running is None and "keys" in self.inputs:  # a chain goes on behind drafts
            shared.run_chain(self.inputs["keys"].shape[1])
        return shared.states[self.number] if self.running is None else self.running

    def _ran(self, after: Tensor, nodes: int) -> Tensor:
        """Keep the state after a chain, but not behind a step's drafts: `commit` replays those that are accepted."""
        are_drafts = 1 < nodes <= MOST_NODES and self.states.lengths.longest > 0
        is_part = after.untyped_storage().nbytes() > after.nbytes  # of the states of all chunks
        self.running = None if are_drafts else after.clone() if is_part else after
        return after

    def _keep(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Keep inputs of the recurrence; those of all nodes since the last commit."""
        return {name: self._kept(name, x, 1) for name, x in inputs.items()}

    def _kept(self, name: str, new: Tensor, axis: int) -> Tensor:
        old = self.inputs.get(name)
        self.inputs[name] = new.contiguous() if old is None else torch.cat([old, new], axis)
        return self.inputs[name]

    def reset(self) -> None:
        """Nothing to do: the cache clears the states of all layers at once."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Likewise."""


class HybridLayer(TreeLayer, LinearAttentionCacheLayerMixin):  # type: ignore[misc] # transformers has no types
    """A layer with rows and a state: attention and a recurrence side by side."""

    def __init__(self, recurrent: StateLayer, *row_arguments: Any) -> None:
        """Rows of its own, and this state."""
        super().__init__(*row_arguments)
        self.recurrent, self.record_past = recurrent, True

    def state(self) -> Tensor:
        """See `StateLayer`."""
        return self.recurrent.state()

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Likewise."""
        return self.recurrent.update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Likewise."""
        return self.recurrent.update_recurrent_state(recurrent_states, state_idx, **kwargs)
