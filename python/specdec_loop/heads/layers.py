"""Layers of all heads: Llama's attention, with a cache or, in training, without, and its feed-forward."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from ..attention import grouped_attention

GROWING = ("dynamic", "longrope")  # rotary tables that change with the length of the text


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; its input may be wider than its output.

    Attributes:
        has_norms: of queries and keys, as Qwen3's layers; else the configuration's `qk_norm` says so.
    """

    has_norms: ClassVar[bool] = False

    def __init__(self, config: Any, inputs: int, layer: int = 0) -> None:
        """Take heads and sizes from a Llama configuration, the width of the input, and the layer of the cache."""
        super().__init__()
        self.layer = layer
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.heads = config.num_attention_heads
        queries, keys = self.heads * self.dim, config.num_key_value_heads * self.dim
        everywhere = bool(getattr(config, "attention_bias", False))
        bias = bool(getattr(config, "qkv_bias", everywhere))  # published heads of Qwen2 have none on the output
        self.q_proj = nn.Linear(inputs, queries, bias=bias)
        self.k_proj = nn.Linear(inputs, keys, bias=bias)
        self.v_proj = nn.Linear(inputs, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=everywhere)
        if self.has_norms or getattr(config, "qk_norm", False):
            self.q_norm, self.k_norm = (nn.RMSNorm(self.dim, eps=config.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, rotary: tuple[Tensor, ...], mask: Tensor | None, cache: Any) -> Tensor:
        """Attend, see `attend`."""
        return attend(self, self.heads, self.dim, x, rotary, mask, cache, self.layer)


def attend(
    network: Any,
    heads: int,
    dim: int,
    x: Tensor,
    rotary: tuple[Tensor, ...],
    mask: Tensor | None,
    cache: Any,
    layer: int = 0,
) -> Tensor:
    """Llama's attention; without a mask a lone node attends all keys, others, on an empty cache, those before them.

    Args:
        network: of q_proj, k_proj, v_proj and o_proj, perhaps of q_norm and k_norm.
        heads: of the queries.
        dim: of a head.
        x: ``[batch, nodes, width]``.
        rotary: see `rotate`.
        mask: as SDPA takes it.
        cache: of transformers' kind, or None.
        layer: of the cache.
    """
    shape = (*x.shape[:2], -1, dim)
    query, key = network.q_proj(x).view(shape), network.k_proj(x).view(shape)
    if hasattr(network, "q_norm"):
        query, key = network.q_norm(query), network.k_norm(key)
    turned = rotate(torch.cat([query, key], 2), rotary).transpose(1, 2)
    query, key = turned.split([heads, turned.shape[1] - heads], 1)
    value = network.v_proj(x).view(shape).transpose(1, 2)
    if cache is not None:
        key, value = cache.update(key, value, layer)
    if mask is None and x.shape[1] > 1:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)
    else:
        out = grouped_attention(query, key, value, mask)
    attended: Tensor = network.o_proj(out.flatten(2))
    return attended


class Turns:
    """Table of rotary angles, grown to the positions, dtype and device in use."""

    def __init__(self, config: Any) -> None:
        """Take the angles of a Llama configuration."""
        self._config = config
        self._table: Tensor | None = None
        self._cast: Tensor | None = None  # the same, where and as it was last needed

    def reach(self, positions: int) -> None:
        """Get ready for texts of so many positions; without it for as many as the configuration names."""
        if self._table is None or len(self._table) < positions:
            cosine, sine = LlamaRotaryEmbedding(self._config)(torch.empty(0), torch.arange(positions)[None])
            low, high = sine[0].chunk(2, -1)
            self._table, self._cast = torch.cat([cosine[0], -low, high], -1), None

    def table(self, like: Tensor) -> Tensor:
        """Cosines and sines side by side, ``[positions, 2 * dim]``."""
        if self._table is None:
            self.reach(self._config.max_position_embeddings)
        assert self._table is not None
        if self._cast is None or self._cast.dtype != like.dtype or self._cast.device != like.device:
            self._cast = self._table.to(like)
        return self._cast

    def of(self, x: Tensor, positions: Tensor | None, cache: Any) -> tuple[Tensor, ...]:
        """Rotary angles of nodes ``[batch, nodes, width]``; None: behind the cache's rows, as many in each."""
        table = self.table(x)
        angles = table.narrow(0, cache.get_seq_length(), x.shape[1])[None] if positions is None else table[positions]
        return angles[:, :, None].chunk(2, -1)


def rotate(x: Tensor, rotary: tuple[Tensor, ...]) -> Tensor:
    """Turn heads ``[batch, nodes, heads, dim]`` by their nodes' angles: Llama's halves, not pairs.

    Args:
        x: heads; of fewer angles than dims the last dims stay as they are.
        rotary: cosines, and sines of which the first half is negated.
    """
    cosine, sine = rotary
    dims = cosine.shape[-1]
    if dims < x.shape[-1]:
        return torch.cat([rotate(x[..., :dims], rotary), x[..., dims:]], -1)
    low, high = x.chunk(2, -1)
    return torch.addcmul(x * cosine, torch.cat([high, low], -1), sine)


def lent(table: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A table of the target; a copy of it where another dtype is wanted."""
    own: torch.dtype = table.weight.dtype  # type: ignore[assignment]
    return table if dtype in (None, own) else deepcopy(table).to(dtype)


class Shared:
    """Embedding and output matrix of the target, which a head uses and does not own."""

    def __init__(self, target: Any, dtype: torch.dtype | None = None) -> None:
        """Look them up in a transformers causal LM.

        Args:
            target: the model.
            dtype: of the head; None: the target's.
        """
        self.embedding: nn.Module = target.get_input_embeddings()
        self.output: nn.Module = lent(target.get_output_embeddings(), dtype)
        self.layers: int = target.config.get_text_config(decoder=True).num_hidden_layers


class FeatureHead(nn.Module):
    """A network that continues the target's features: feature i and token i + 1 give feature i + 1.

    Attributes:
        levels: which of the target's hidden states a feature is made of, as transformers numbers them: 0 is the
            embedding, n what layer n returns, -1 the normed state behind the last layer.
        token_map: int32 ``[draft_vocab]``: target id of each column of the logits; None: the target's own.
    """

    final: ClassVar[tuple[int, ...]] = (-1,)

    def __init__(self, config: Any, shared: Shared, turns: Turns | None = None) -> None:
        """Take sizes from a Llama configuration; the target lends what the file of a head leaves out.

        Args:
            config: of the layers.
            shared: what the target lends.
            turns: rotary angles; None: those of the configuration.
        """
        super().__init__()
        self.config, self.levels = config, self.final
        self.token_map: Tensor | None = None
        self._shared = (shared,)  # in a tuple it is no part of this module: neither saved nor cast with it
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in GROWING:
            raise ValueError(f"{type(self).__name__}: rope_type must be one whose angles are fixed, got {rope!r}")
        self._turns = turns or Turns(_partial(config))

    @property
    def networks(self) -> tuple[nn.Module, nn.Module]:
        """The modules to run: the head, and an output matrix, which may be the target's."""
        return self, self._shared[0].output

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights; the target's may differ."""
        return next(self.parameters()).dtype

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of target ids; an id below 0 is shown as 0."""
        table: nn.Module = getattr(self, "embed_tokens", self._shared[0].embedding)
        out: Tensor = table(token_ids.clamp(min=0))
        return out

    def fuse(self, hidden: Tensor) -> Tensor:
        """A feature from the target's hidden states, side by side in the last dimension."""
        return hidden.to(self.dtype)

    def map_tokens(self, d2t: Tensor, source: str) -> None:
        """Draft other ids than the target's: column i of the logits is target id i + d2t[i].

        Raises:
            ValueError: the target has no such id.
        """
        ids = torch.arange(len(d2t), device=d2t.device) + d2t
        known = len(self._shared[0].embedding.weight)  # type: ignore[arg-type]
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < known:
            ends = f"{int(ids.min())} to {int(ids.max())}"
            raise ValueError(f"{source}: d2t must lead to ids in [0, {known}), got {ends}")
        self.token_map = ids.int()

    def logits(self, features: Tensor) -> Tensor:
        """Next-token logits of a feature, by the head's own output matrix or else the target's."""
        out: Tensor = getattr(self, "lm_head", self._shared[0].output)(features)
        return out

    def forward(
        self,
        token_ids: Tensor,
        features: Tensor,
        position_ids: Tensor | None,
        mask: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """The next features.

        Args:
            token_ids: ``[batch, nodes]``, each the token after its feature.
            features: ``[batch, nodes, hidden]``.
            position_ids: ``[batch or 1, nodes]``; None: behind the rows of the cache, as many in each request.
            mask: as SDPA takes it, ``[batch, 1, nodes, keys]``; None: see `Attention`.
            cache: of transformers' kind.
        """
        turns = self._turns.of(features, position_ids, cache)
        return self.step(self.embed(token_ids).to(features.dtype), features, turns, mask, cache)

    def reach(self, positions: int) -> None:
        """See `Turns.reach`."""
        self._turns.reach(positions)

    def step(
        self, embedded: Tensor, features: Tensor, rotary: tuple[Tensor, ...], mask: Tensor | None, cache: Any
    ) -> Tensor:
        """The network itself."""
        raise NotImplementedError  # every published head has its own


def _partial(config: Any) -> Any:
    """Of as many dims as are turned: the Llama of transformers heeds that factor only where angles are scaled."""
    rope = getattr(config, "rope_parameters", None) or {}
    factor = rope.get("partial_rotary_factor", 1.0)
    if factor == 1 or rope.get("rope_type", "default") != "default":
        return config
    config = copy(config)
    config.head_dim = int(factor * (config.head_dim or config.hidden_size // config.num_attention_heads))
    return config


def norm(config: Any, size: int | None = None) -> nn.RMSNorm:
    """Llama's norm, of hidden states or of another size."""
    return nn.RMSNorm(size or config.hidden_size, eps=config.rms_norm_eps)


class Residual(nn.Module):
    """The second half of a Llama layer and its attention; what comes before differs from head to head."""

    attention: ClassVar[type[Attention]] = Attention

    def __init__(self, config: Any, inputs: int, layer: int = 0) -> None:
        """Take the sizes from a Llama configuration, the width of what attention sees, and the layer of the cache."""
        super().__init__()
        self.self_attn = self.attention(config, inputs, layer)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = norm(config)

    def finish(
        self, residual: Tensor, attended: Tensor, rotary: tuple[Tensor, ...], mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Add attention over `attended` to the residual, then the feed-forward."""
        residual = residual + self.self_attn(attended, rotary, mask, cache)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


def load_exactly(network: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Load weights, all of them and no other, or say which are wrong.

    Raises:
        ValueError: a missing or an unexpected name, or a wrong shape.
    """
    own = network.state_dict()
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or unknown:
        raise ValueError(f"{source}: tensors missing: {missing or 'none'}; not expected: {unknown or 'none'}")
    wrong = [n for n in own if own[n].shape != weights[n].shape]
    if wrong:
        name = wrong[0]
        raise ValueError(f"{source}: {name} must be {list(own[name].shape)}, got {list(weights[name].shape)}")
    if quantised := [n for n in own if weights[n].dtype.itemsize < min(own[n].dtype.itemsize, 2)]:
        name = quantised[0]
        raise ValueError(f"{source}: {name} is {weights[name].dtype}: quantised weights are not served")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(weights[name])


def finish(
    network: nn.Module, weights: dict[str, Tensor], source: str, target: Any, dtype: torch.dtype | None
) -> nn.Module:
    """Load, see `load_exactly`, and go where the target is."""
    if isinstance(network, FeatureHead) and "embed_tokens.weight" in weights:
        rows, wide = weights["embed_tokens.weight"].shape
        ids = target.get_input_embeddings().weight.shape[0]
        if rows < ids or wide != network.config.hidden_size:
            expected = f"[{ids} or more, {network.config.hidden_size}]"
            raise ValueError(f"{source}: embed_tokens.weight must be {expected}, got [{rows}, {wide}]")
        network.embed_tokens = nn.Embedding(rows, wide)
    for weight in network.parameters():  # and no buffer: angles stay exact
        weight.data = weight.data.to(dtype or target.dtype)
    load_exactly(network, weights, source)
    return network.to(target.device).eval().requires_grad_(False)
