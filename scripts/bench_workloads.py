"""Model shapes and seeded workloads of the offline benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

SHAPES = {
    "A": {
        "architecture": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "B": {
        "architecture": "llama", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 32000, "tie_word_embeddings": False,
    },
    "C": {
        "architecture": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 688, "vocab_size": 4096, "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Prompts (token ids) and the number of tokens to generate for each; greedy, EOS ignored."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def num_output_tokens(self) -> int:
        """Tokens that were asked for, which is what every engine is credited with."""
        return sum(self.max_tokens)


def latency(vocab_size: int, seed: int) -> Workload:
    """One request: 128 tokens in, 128 out."""
    rng = np.random.default_rng(seed)
    return Workload("latency", [rng.integers(3, vocab_size, 128).tolist()], [128])


def throughput(vocab_size: int, seed: int) -> Workload:
    """32 requests at once: 16 to 128 tokens in, 16 to 128 out."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, vocab_size, size).tolist() for size in rng.integers(16, 129, 32)]
    return Workload("throughput", prompts, rng.integers(16, 129, 32).tolist())


def shared_prefix(vocab_size: int, seed: int) -> Workload:
    """32 requests of 256 shared and 16 own tokens, 16 tokens out; every seed has a prefix of its own."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(3, vocab_size, 256).tolist()
    return Workload("shared prefix", [prefix + rng.integers(3, vocab_size, 16).tolist() for _ in range(32)], [16] * 32)


WORKLOADS = {"latency": latency, "throughput": throughput, "shared_prefix": shared_prefix}


def make_checkpoint(folder: Path, shape: str, dtype: str) -> Path:
    """Save a random checkpoint of ``shape`` with transformers, for every engine to load."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    options = dict(SHAPES[shape])
    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    make_config, make_model = kinds[str(options.pop("architecture"))]
    config = make_config(
        **options, max_position_embeddings=2048, initializer_range=0.02, eos_token_id=2, bos_token_id=1
    )
    torch.manual_seed(0)
    make_model(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder
