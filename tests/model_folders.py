"""Tiny models with a byte tokenizer, saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def save_tokenizer(folder: Path, first: str = "<|end|>") -> None:
    """One token a byte, and one that ends a text."""
    vocab = {first: 0, **{letter: i for i, letter in enumerate(ALPHABET, 1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=first).save_pretrained(folder)


def pieces(*words: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of sentence pieces, with bytes: it drops a space in front of what it decodes."""
    vocab = {word: i for i, word in enumerate(["</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def save_model(folder: Path, *, layers: int = 2, vocab: int = len(ALPHABET) + 1, seed: int = 0) -> Path:
    """A random Llama and its tokenizer."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder
