"""Sampling in tensor-parallel workers from each rank's own logits, which vLLM would gather (SPECDEC_VLLM_SHARDED=1).

In the V1 runner, where the target's rows are wanted for the next tokens alone: a step whose requests are not all served
here, or that a grammar masks, gathers its rows as vLLM does. So do drafters and log-probabilities of prompts. Every
rank decides the same, by the requests.

The first step gathers too. It shows whether the model hands out the rows of its output layer as they are; one that
changes them, by ids of the whole vocabulary, keeps whole rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .patch import replace
from .requests import are_served, logger


class Shards(NamedTuple):
    """How the vocabulary is split.

    Attributes:
        group: of the ranks.
        offsets: first id of each rank, then the size of the vocabulary.
        mine: columns of this rank, in rows of the whole vocabulary.
        processor: the output layer's LogitsProcessor.
    """

    group: Any
    offsets: tuple[int, ...]
    mine: slice
    processor: Any

    @classmethod
    def of(cls, processor: Any, head: Any) -> Shards | None:
        """Of a model's output layer; None: it is not split, or holds more than the vocabulary."""
        from vllm.distributed import get_tp_group

        vocab, ranks = head.org_vocab_size, head.tp_size
        width = head.org_vocab_size_padded // ranks
        has_more = vocab != processor.org_vocab_size or vocab != head.num_embeddings
        if ranks == 1 or has_more or width * (ranks - 1) >= vocab:
            return None
        coordinator = get_tp_group()
        offsets = tuple(min(rank * width, vocab) for rank in range(ranks + 1))
        first = coordinator.rank_in_group
        return cls(coordinator.device_group, offsets, slice(offsets[first], offsets[first + 1]), processor)

    def own(self, logits: Tensor) -> Tensor:
        """This rank's columns without those that pad it."""
        return logits[:, : self.mine.stop - self.mine.start].contiguous()

    def whole(self, logits: Tensor) -> Tensor:
        """The rows as vLLM gathers them."""
        gathered: Tensor = self.processor._gather_logits(logits)
        return gathered[..., : self.offsets[-1]]


def exchange(shards: Shards | None) -> dict[str, Any]:
    """Arguments of the ops whose rows are split."""
    return {} if shards is None else {"group": shards.group, "vocab_offsets": shards.offsets}


def first_id(shards: Shards | None) -> int:
    """Id of a row's first column."""
    found: int = 0 if shards is None else shards.mine.start
    return found


class Step:
    """A running `execute_model`, and the rows that output layers compute in it."""

    def __init__(self, is_first: bool) -> None:
        """`is_first`: the rows are gathered and kept twice, to see what the model does to them."""
        self.is_first = is_first
        self.rows: list[tuple[Shards, Tensor]] = []
        self.copies: list[Tensor] = []

    def compute(self, theirs: Callable[..., Any], processor: Any, head: Any, hidden: Tensor, bias: Any) -> Any:
        """Rows of an output layer: this rank's part, but whole in the first step."""
        shards = Shards.of(processor, head)
        if shards is None:
            return theirs(processor, head, hidden, bias)
        logits = theirs(processor, head, hidden, bias, skip_gather=not self.is_first)
        self.rows.append((shards, logits))
        if self.is_first:
            self.copies.append(logits.clone())
        return logits

    def leaves(self, logits: Tensor) -> bool:
        """Whether a model's logits are the rows of one output layer, unchanged."""
        if len(self.rows) != 1 or self.rows[0][1] is not logits:
            return False
        return torch.allclose(logits, self.copies[0], rtol=0, atol=0, equal_nan=True)


_step: Step | None = None


def install() -> None:
    """Patch the classes, once."""
    import vllm.v1.worker.gpu.model_runner
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    replace(LogitsProcessor, "forward", computed)
    replace(GPUModelRunner, "execute_model", executed)
    replace(GPUModelRunner, "sample_tokens", sampling)
    replace(vllm.v1.worker.gpu.model_runner.GPUModelRunner, "load_model", refused)


def refused(theirs: Callable[..., Any], runner: Any, *args: Any, **keywords: Any) -> Any:
    """`load_model` of Model Runner V2."""
    raise ValueError("SPECDEC_VLLM_SHARDED=1 needs vLLM's V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0")


def computed(
    theirs: Callable[..., Any], processor: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Any = None,
    skip_gather: bool = False,
) -> Any:  # fmt: skip
    """`LogitsProcessor.forward`."""
    if _step is None or skip_gather or processor.logits_as_input:
        return theirs(processor, lm_head, hidden_states, embedding_bias, skip_gather)
    return _step.compute(theirs, processor, lm_head, hidden_states, embedding_bias)


def executed(theirs: Callable[..., Any], runner: Any, *args: Any, **keywords: Any) -> Any:
    """`execute_model`: its logits stay where they are, `runner.specdec_shards` says how they are split."""
    global _step
    runner.specdec_shards = None
    is_split: bool | None = getattr(runner, "specdec_is_split", None)  # None: not known yet
    if is_split is None and (runner.parallel_config.pipeline_parallel_size > 1 or runner.is_pooling_model):
        is_split = decide(runner, False)
    if is_split is False:
        return theirs(runner, *args, **keywords)
    _step = step = Step(is_split is None)
    try:
        result = theirs(runner, *args, **keywords)
    finally:
        _step = None
    logits = None if runner.execute_model_state is None else runner.execute_model_state.logits
    if logits is not None and is_split:
        runner.specdec_shards = step.rows[-1][0]
    elif logits is not None:
        decide(runner, step.leaves(logits))
    return result


def decide(runner: Any, is_split: bool) -> bool:
    """Whether the ranks of this engine keep their logits, from now on."""
    runner.specdec_is_split = is_split
    if not is_split:
        logger.warning("specdec_kernels: ranks gather their logits: one rank, pipeline parallelism, or a model that "
                       "adds ids to its vocabulary or changes the rows of its output layer")  # fmt: skip
    return is_split


def sampling(theirs: Callable[..., Any], runner: Any, grammar_output: Any) -> Any:
    """`sample_tokens`, with whole rows for what is vLLM's."""
    state, shards = runner.execute_model_state, runner.specdec_shards
    if state is not None and shards is not None and (grammar_output is not None or not are_served(runner)):
        runner.execute_model_state = state._replace(logits=shards.whole(state.logits))
        runner.specdec_shards = None
    return theirs(runner, grammar_output)
