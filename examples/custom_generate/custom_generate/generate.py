"""Speculative decoding for `model.generate(..., custom_generate=<this folder>, trust_remote_code=True)`."""

from functools import partial

from transformers import StoppingCriteriaList, StopStringCriteria

from specdec_loop import hf


def generate(model, assistant_model=None, draft_model=None, streamer=None, tokenizer=None, **arguments):
    """Decode as `model.generate` does, `draft_model` (or `assistant_model`) ahead; without one, by prompt lookup.

    Greedy texts are those of plain decoding, sampled ones follow its distribution; batches, left padding and static
    caches work. Further arguments: drafter, draft_length, rule, seed, as `specdec_loop.hf.generate` describes them.
    """
    if tokenizer is not None and arguments.get("stop_strings"):
        stop = StopStringCriteria(tokenizer, arguments.pop("stop_strings"))
        arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), stop])
    method = partial(hf.generate, streamer=streamer)
    draft_model = assistant_model if draft_model is None else draft_model
    return model.generate(custom_generate=method, draft_model=draft_model, **arguments)
