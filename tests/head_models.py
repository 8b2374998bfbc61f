"""Tiny random heads for the models of models.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from models import VOCAB, model
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from specdec_loop.drafters import (
    BlockDrafter,
    BlockTree,
    Blockwise,
    Drafter,
    DraftModel,
    EagleDynamicTree,
    EagleTree,
    HeadChain,
    Medusa,
    MedusaBestTree,
    ParallelChain,
    SuffixOr,
)
from specdec_loop.drafters.cached_drafter import CachedDrafter
from specdec_loop.heads import (
    DFlashHead,
    Eagle3Head,
    EagleHead,
    FeatureHead,
    MedusaHeads,
    MtpHead,
    MtpLayer,
    PEagleHead,
    Shared,
    load_dflash,
    load_draft_model,
    load_eagle,
    load_eagle3,
    load_medusa,
    load_mtp,
    load_peagle,
)
from specdec_loop.methods import DrafterAssets
from specdec_loop.sequences import Sequences

HEADS = 4


def config(target: Any, **more: Any) -> Any:
    """Of one layer, as wide as the target's."""
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = {name: getattr(target.config, name) for name in same}
    made = LlamaConfig(**sizes, num_hidden_layers=1, max_position_embeddings=512, **more)
    made._attn_implementation = "sdpa"
    return made


def shaken(network: torch.nn.Module, seed: int = 0) -> Any:
    """Weights so large that the head says something, and other than any other head."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.15 if p.dim() > 1 else 0.05) + (p.dim() == 1))
    return network.eval().requires_grad_(False)


@functools.cache
def medusa(*, own_output: bool = True) -> MedusaHeads:
    return shaken(MedusaHeads(Shared(model()), size=32, vocab=VOCAB, heads=HEADS, own_output=own_output))


def draft_model() -> Any:
    """Of one layer, with the target's tables."""
    made = LlamaForCausalLM(config(model()))
    made.set_input_embeddings(model().get_input_embeddings())
    made.set_output_embeddings(model().get_output_embeddings())
    return made


def feature_head(kind: str, target: Any, draft_ids: list[int] | None = None) -> FeatureHead:
    """An EAGLE, EAGLE-3, P-EAGLE or MTP head for a target; EAGLE-3 and P-EAGLE heads draft some ids alone."""
    shared = Shared(target)
    if kind == "eagle":
        return shaken(EagleHead(config(target), shared))
    if kind == "mtp":
        return shaken(MtpHead(config(target), shared))
    ids = draft_ids or [i for i in range(target.config.vocab_size) if i % 3]
    levels = {"eagle_aux_hidden_state_layer_ids": [0, target.config.num_hidden_layers // 2, -1]}
    network, mask = (PEagleHead, {"mask_token_id": 1}) if kind == "peagle" else (Eagle3Head, {})
    head = shaken(network(config(target, draft_vocab_size=len(ids), eagle_config=levels, **mask), shared))
    head.choose(torch.tensor(ids))
    return head


def block_head(target: Any, draft_ids: list[int] | None = None, **more: Any) -> DFlashHead:
    """A head of two layers that drafts blocks of four tokens behind a known one, perhaps of some ids alone."""
    sizes, vocab = config(target), target.config.vocab_size
    sizes.num_hidden_layers = 2
    settings: dict[str, Any] = {"levels": (0, -1), "block_size": 5, "mask_id": vocab - 1, **more}
    head = shaken(DFlashHead(sizes, Shared(target), **settings, own_output=len(draft_ids or ())))
    head.token_map = None if draft_ids is None else torch.tensor(draft_ids).int()
    return head


def run_block(head: DFlashHead, last: Tensor, hidden: Tensor, positions: Tensor, length: int | None = None) -> Tensor:
    """Rows of a block behind texts of these states and positions, of which the last tokens ``[batch, 1]`` are known."""
    cache = DynamicCache()
    head.remember(head.fuse(hidden), positions, cache)
    block = head.masked(last, length or head.longest)
    return head(block, positions[:, -1:] + 1 + torch.arange(block.shape[1]), None, cache)


def watch(drafter: CachedDrafter, whole: Callable[[Tensor], Tensor]) -> list[int]:
    """Compare what a drafter's drafts begin from with what `whole` says of each text ``[1, length]``; their lengths."""
    run_unseen, compared = drafter._run_unseen, []

    def checked(sequences: Sequences) -> Tensor:
        last = run_unseen(sequences)
        for b, n in enumerate(sequences.lengths.tolist()):
            if n > 1 and not sequences.is_finished[b]:
                want = whole(sequences.tokens[b : b + 1, :n])
                assert torch.allclose(last[b, 0], want, atol=1e-4), f"request {b} of {n} tokens"
                compared.append(n)
        return last

    drafter._run_unseen = checked  # type: ignore[method-assign]
    return compared


class TinyAssets(DrafterAssets):
    """Heads with random weights."""

    def head(self, kind: str) -> Any:
        if kind == "dflash":
            return block_head(self.target)
        if kind == "mtp-layers":
            return shaken(MtpLayer(self.target, Shared(self.target)))
        return medusa() if kind == "medusa" else feature_head(kind, self.target)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "Medusa": lambda: Medusa(medusa()),
    "Stern et al.": lambda: Blockwise(medusa(own_output=False)),
    "EAGLE-1": lambda: EagleTree(feature_head("eagle", model())),
    "EAGLE-2": lambda: EagleDynamicTree(feature_head("eagle", model())),
    "EAGLE-3": lambda: EagleDynamicTree(feature_head("eagle3", model()), width=3, total=9),
    "EAGLE-3, fixed tree": lambda: EagleTree(feature_head("eagle3", model())),
    "P-EAGLE": lambda: ParallelChain(feature_head("peagle", model())),
    "MTP": lambda: HeadChain(feature_head("mtp", model())),
    "Medusa, best tree": lambda: MedusaBestTree(medusa()),
    "DFlash": lambda: BlockDrafter(block_head(model())),
    "DFlash, some ids": lambda: BlockDrafter(
        block_head(model(), [i for i in range(VOCAB) if i % 3], starts_early=True)
    ),
    "DFlash, tree": lambda: BlockTree(block_head(model()), width=3, total=7),
    "MTP or suffix": lambda: SuffixOr(HeadChain(feature_head("mtp", model()))),
}

# What reads a folder, and a drafter that drafts with it.
LOADS: dict[str, tuple[Callable[..., Any], Any]] = {
    "dflash": (load_dflash, BlockDrafter),
    "draft": (load_draft_model, DraftModel),
    "eagle": (load_eagle, EagleTree),
    "eagle3": (load_eagle3, EagleDynamicTree),
    "medusa": (load_medusa, Medusa),
    "mtp": (load_mtp, HeadChain),
    "peagle": (load_peagle, ParallelChain),
}
