"""A step of a model with recurrent layers: memory beside snapshots and keys and values, time beside a recomputation.

    python -m bench.recurrent

Four layers of Qwen3-Next's sizes (three gated delta rules, one of attention) without its experts, random weights. A
step runs the last token and four drafts, two of which are accepted. The rival is what transformers' own cache leaves to
do: copy the states, run the step, put them back and run the accepted tokens once more.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import Tensor

CONTEXT, TEXT, NODES, ACCEPTED, REPEATS = 4096, 128, 5, 2, 9
MIB = 2**20


@functools.cache
def network() -> Any:
    """In float32, on the CPU."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=4096, hidden_size=2048, intermediate_size=5120, num_hidden_layers=4, num_experts=0,
        max_position_embeddings=2 * CONTEXT,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3NextForCausalLM(config).eval().requires_grad_(False)


def size(tensors: Any) -> int:
    """Bytes."""
    return sum(t.numel() * t.element_size() for t in tensors)


def our_step(cache: Any, ids: Tensor) -> None:
    """Run the nodes, then advance over the accepted ones."""
    network()(ids, **cache.chain_inputs(NODES))
    cache.commit(ACCEPTED)


def their_step(cache: Any, ids: Tensor) -> None:
    """The same by transformers' DynamicCache, which cannot take the rejected ones out."""
    states = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    saved = [(layer.conv_states[0].clone(), layer.recurrent_states[0].clone()) for layer in states]
    network()(ids, past_key_values=cache)
    for layer, (window, state) in zip(states, saved, strict=True):
        layer.conv_states[0].copy_(window)
        layer.recurrent_states[0].copy_(state)
    for layer in cache.layers:
        if layer not in states:
            layer.crop(-NODES)
    network()(ids[:, : ACCEPTED + 1], past_key_values=cache)


@torch.no_grad()
def main() -> None:
    """Print both."""
    from transformers import DynamicCache

    from specdec_loop import TreeCache

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    ids = torch.randint(4096, (1, TEXT))
    ours = TreeCache(network().config, batch=1, capacity=2 * TEXT, dtype=torch.float32, device="cpu")
    theirs = DynamicCache(config=network().config)
    network()(ids, **ours.chain_inputs(TEXT), logits_to_keep=1)
    ours.commit(TEXT - 1)
    network()(ids, past_key_values=theirs, logits_to_keep=1)
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for i in range(REPEATS + 1):
        drafts = ids[:, i * NODES : (i + 1) * NODES]
        for name, step, cache in (("ours", our_step, ours), ("theirs", their_step, theirs)):
            start = time.perf_counter()
            step(cache, drafts)
            times[name].append(time.perf_counter() - start)
    medians = {name: 1e3 * sorted(values[1:])[REPEATS // 2] for name, values in times.items()}
    print(f"{medians['ours']:.0f} ms a step, by recomputing {medians['theirs']:.0f} ms")
    states, layer = ours._states, ours._states.layers[0]
    network()(drafts, **ours.chain_inputs(NODES))
    state = size([states.states[0], states.windows[0]]) / MIB
    kept = size(layer.inputs.values()) / MIB
    rows = 2 * network().config.num_key_value_heads * network().config.head_dim * 4 * CONTEXT / MIB
    print(f"MiB a request and layer: state {state:.2f}, inputs of {NODES} nodes {kept:.2f}, {NODES} snapshots "
          f"{NODES * state:.2f}, keys and values of {CONTEXT} tokens {rows:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
