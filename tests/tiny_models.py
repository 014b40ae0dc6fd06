"""Tiny random checkpoints in the Hugging Face layout: seconds to make, exact oracles to compare with.

Weights are drawn wide (``initializer_range`` 0.2) and biases and norm weights are random too, so that the greedy choice
is far from a tie and a forgotten bias or norm changes the tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}


def make_checkpoint(
    folder: Path,
    architecture: str = "qwen3",
    *,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_heads: int = 8,
    num_kv_heads: int = 4,
    head_dim: int | None = None,
    intermediate_size: int = 96,
    vocab_size: int = 203,
    tie: bool = False,
    max_position: int = 512,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str | None = None,
    **config_overrides: Any,
) -> Path:
    """Write config.json and safetensors into ``folder`` (made if missing) and return it.

    ``architecture`` is a key of ``CLASSES``; ``head_dim`` None means ``hidden_size // num_heads``; ``max_shard_size``
    such as ``"50KB"`` splits the weights over several files; ``config_overrides`` reach the transformers
    configuration by its own names (``eos_token_id``, ``sliding_window``, ``rope_parameters``, ``attention_bias``, ...).
    """
    import torch
    import transformers

    config_name, model_name = CLASSES[architecture]
    settings: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim or hidden_size // num_heads,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
        "tie_word_embeddings": tie,
        "max_position_embeddings": max_position,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": dtype,
        **config_overrides,
    }
    if architecture == "qwen2":
        del settings["head_dim"]  # that architecture has no such option
    config: PretrainedConfig = getattr(transformers, config_name)(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_name)(config)
        _randomise_vectors(model)
    model = model.to(getattr(torch, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
    return folder


def _randomise_vectors(model: torch.nn.Module) -> None:
    """Add noise to norm weights (initially 1) and biases (initially 0), which transformers leaves constant."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
