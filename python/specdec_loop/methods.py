"""Every decoding method that has a name, in one table: a new drafter is one more line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from specdec_kernels import ChainRule, TreeRule

from .datastore import Datastore
from .draft_length import AdaptiveLength, FixedLength
from .drafters import (
    BlockDrafter,
    BlockTree,
    Blockwise,
    Drafter,
    DraftModel,
    EagleDynamicTree,
    EagleTree,
    HeadChain,
    IndependentDrafts,
    Lookahead,
    Medusa,
    MedusaBestTree,
    ParallelChain,
    PromptLookup,
    Retrieval,
    SuffixDecoding,
    SuffixOr,
)
from .heads import (
    FeatureHead,
    load_dflash,
    load_eagle,
    load_eagle3,
    load_medusa,
    load_mtp,
    load_mtp_layers,
    load_peagle,
)

LOADERS: dict[str, Callable[..., Any]] = {  # by the kind of head; mtp-layers are in the target's own checkpoint
    "medusa": load_medusa, "eagle": load_eagle, "eagle3": load_eagle3, "peagle": load_peagle, "mtp": load_mtp,
    "mtp-layers": load_mtp_layers, "dflash": load_dflash,
}  # fmt: skip


class DrafterAssets:
    """Models and data of the drafters; each is loaded when a method first needs it."""

    def __init__(
        self,
        target: Any,
        *,
        heads: Callable[[str], Path],
        load_draft: Callable[[], Any],
        load_store: Callable[[], Datastore],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Name the parts.

        Args:
            target: the model that is decoded.
            heads: folder of a kind of head, a key of `LOADERS`; `folder.joinpath` where a folder has one of each name.
            load_draft: gives the draft model.
            load_store: gives the datastore.
            dtype: of heads; None: the target's.
        """
        self.target, self.heads, self.dtype = target, heads, dtype
        self._load_draft, self._load_store = load_draft, load_store
        self._heads: dict[str, Any] = {}

    @cached_property
    def draft(self) -> Any:
        """The draft model."""
        return self._load_draft()

    def draft_model(self, kind: type[DraftModel] = DraftModel, **options: Any) -> DraftModel:
        """A drafter of the draft model; one of fewer ids has the target's first ones, those of a shared tokenizer."""
        own, whole = (m.config.get_text_config(decoder=True).vocab_size for m in (self.draft, self.target))
        first = torch.arange(own, dtype=torch.int32, device=self.draft.device) if own < whole else None
        return kind(self.draft, token_map=first, **options)

    @cached_property
    def store(self) -> Datastore:
        """The datastore."""
        return self._load_store()

    def head(self, kind: str) -> Any:
        """The head of this kind, a key of `LOADERS`; eagle is that of EAGLE-2 too."""
        if kind not in self._heads:
            self._heads[kind] = LOADERS[kind](self.heads(kind), self.target, dtype=self.dtype)
        return self._heads[kind]


@dataclass(frozen=True)
class Method:
    """A drafter and how its drafts are verified.

    Attributes:
        about: in a few words.
        make: the drafter; None is plain decoding.
        rule: under which its drafts are verified.
        draft_length: of its chains, depth of its trees; the longest where it adapts.
        adapts: whether the length follows acceptance and cost at batch 1 too, see `AdaptiveLength`.
    """

    about: str
    make: Callable[[DrafterAssets], Drafter | None]
    rule: ChainRule | TreeRule = "match"
    draft_length: int = 4
    adapts: bool = False

    def length(self, batch: int = 1) -> FixedLength:
        """A new policy; at batch 2 and above it always adapts, for there a draft costs arithmetic."""
        return AdaptiveLength(self.draft_length) if self.adapts or batch > 1 else FixedLength(self.draft_length)

    @property
    def keeps_the_text(self) -> bool:
        """Whether a text equals seeded plain decoding at any temperature; else only its distribution does."""
        return self.rule == "match"


SMALL_TREE = ((0,), (1,), (0, 0), (1, 0), (0, 0, 0))  # of five drafts: each more costs a small model's forward time

METHODS = {
    "plain": Method("one token a step", lambda a: None),
    "prompt-lookup": Method("copies what followed the same words", lambda a: PromptLookup(), draft_length=8),
    "suffix": Method("frequent continuations, of this text and earlier ones", lambda a: SuffixDecoding(factor=2.0),
                     draft_length=8),
    "lookahead": Method("the target's own guesses, by Jacobi iteration", lambda a: Lookahead(3, 4, 2, pool=128)),
    "rest": Method("retrieval from a datastore, as a tree", lambda a: Retrieval(a.store, candidates=8)),
    "draft-model": Method("a small model, seeded as the target; ends where it is unsure",
                          lambda a: a.draft_model(confidence=0.5), draft_length=6),
    "draft-model-suffix": Method("... or a copy, where the text repeats itself",
                                 lambda a: SuffixOr(a.draft_model(confidence=0.5)), draft_length=8),
    "draft-model-ratio": Method("... speculative sampling", lambda a: a.draft_model(), "ratio", 4, True),
    "draft-model-block": Method("... block verification", lambda a: a.draft_model(), "block", 4, True),
    "independent": Method("... two independent drafts", lambda a: a.draft_model(IndependentDrafts, chains=2),
                          "recursive", 3),
    "blockwise": Method("parallel heads, a chain (Stern et al.)", lambda a: Blockwise(a.head("medusa")),
                        draft_length=2),
    "medusa": Method("parallel heads, a tree", lambda a: Medusa(a.head("medusa"), SMALL_TREE)),
    "medusa-best": Method("... the likeliest tree", lambda a: MedusaBestTree(a.head("medusa"), width=3, total=8)),
    "eagle": Method("features, a fixed tree", lambda a: EagleTree(a.head("eagle"), SMALL_TREE)),
    "eagle-sampled": Method("... drawn without replacement", lambda a: EagleTree(a.head("eagle"), SMALL_TREE),
                            "traversal"),
    "eagle2": Method("... a tree that grows where it promises", lambda a: dynamic_tree(a.head("eagle"))),
    "eagle3": Method("features of three depths", lambda a: dynamic_tree(a.head("eagle3"))),
    "peagle": Method("... a chain, all tokens at once (P-EAGLE)", lambda a: ParallelChain(a.head("peagle"))),
    "peagle-block": Method("... block verification", lambda a: ParallelChain(a.head("peagle")), "block"),
    "mtp": Method("features, a chain; ends where it is unsure", lambda a: HeadChain(a.head("mtp"), confidence=0.2),
                  draft_length=8, adapts=True),
    "mtp-suffix": Method("... or a copy, where the text repeats itself",
                         lambda a: SuffixOr(HeadChain(a.head("mtp"), confidence=0.3)), draft_length=8),
    "mtp-block": Method("... block verification", lambda a: HeadChain(a.head("mtp"), confidence=0.2), "block", 8),
    "mtp-block-auto": Method("... of a length that adapts to acceptance and cost, as batches need it",
                             lambda a: HeadChain(a.head("mtp"), confidence=0.2), "block", 8, True),
    "mtp-tree": Method("... a tree that grows where it promises", lambda a: dynamic_tree(a.head("mtp"))),
    "mtp-layers": Method("the layer for multi-token prediction in the target's checkpoint, a chain",
                         lambda a: HeadChain(a.head("mtp-layers"), confidence=0.2)),
    "dflash": Method("a block at once, a chain", lambda a: BlockDrafter(a.head("dflash"))),
    "dflash-block": Method("... block verification", lambda a: BlockDrafter(a.head("dflash")), "block"),
    "dflash-tree": Method("... the likeliest tree", lambda a: BlockTree(a.head("dflash"), width=3, total=8)),
}  # fmt: skip


def dynamic_tree(head: FeatureHead) -> EagleDynamicTree:
    """Of eight drafts: each more costs a small model's forward time."""
    return EagleDynamicTree(head, width=3, total=8, confidence=0.3)
