"""Tiny random checkpoints in the Hugging Face layout; each takes seconds to make.

Weights are drawn wide (``initializer_range`` 0.2), so that the greedy choice is far from a tie.  Biases, norm weights
and saved buffers are random too, so that an engine that forgets one gives other tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.covers import made
from tests.families import FAMILIES

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


def make_checkpoint(
    folder: Path,
    architecture: str = "qwen3",
    *,
    seed: int | None = None,
    dtype: str = "float32",
    max_shard_size: str | None = None,
    **settings: Any,
) -> Path:
    """Write config.json and safetensors into ``folder`` (made if missing) and return it.

    ``max_shard_size`` such as ``"50KB"`` splits the weights over several files; ``settings`` are those of
    ``make_config``.
    """
    import torch
    import transformers

    family = FAMILIES[architecture]
    config = make_config(architecture, dtype=dtype, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(family.seed if seed is None else seed)
        model = getattr(transformers, family.model)(config)
        randomise_vectors(model)
    model = model.to(getattr(torch, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"max_shard_size": max_shard_size} if max_shard_size else {}
    model.save_pretrained(folder, save_original_format=not family.saves_own_names, **options)
    return folder


def make_config(
    architecture: str,
    *,
    num_layers: int | None = None,
    hidden_size: int = 64,
    num_heads: int = 8,
    num_kv_heads: int = 4,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    vocab_size: int = 203,
    tie: bool | None = None,
    max_position: int = 512,
    dtype: str = "float32",
    **config_overrides: Any,
) -> PretrainedConfig:
    """transformers' configuration of a tiny model.

    ``architecture`` is a key of ``FAMILIES``; ``num_layers`` None means the family's, or 2; ``intermediate_size`` None
    means the family's, or 96; ``head_dim`` None means ``hidden_size // num_heads``; ``tie`` None means the family's
    default; ``config_overrides`` reach the transformers configuration by its own names (``eos_token_id``,
    ``sliding_window``, ``rope_parameters``, ``attention_bias``, ...).
    """
    import transformers

    made.add(architecture)
    family = FAMILIES[architecture]
    settings: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim or hidden_size // num_heads,
        "intermediate_size": 96,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": dtype,
        **({} if tie is None else {"tie_word_embeddings": tie}),
        **family.changes,
        **({} if num_layers is None else {"num_hidden_layers": num_layers}),
        **({} if intermediate_size is None else {"intermediate_size": intermediate_size}),
        **config_overrides,
    }
    if family.config.startswith("Qwen2"):
        del settings["head_dim"]  # these configurations have no such option
    if "kv_lora_rank" in settings:  # transformers expands latents to as many heads as queries have
        settings["num_key_value_heads"] = settings["num_attention_heads"]
        del settings["head_dim"]
    make = getattr(transformers, family.config)
    if family.vision is None:
        config: PretrainedConfig = make(**settings)
        return config
    outer = {name: settings[name] for name in ("tie_word_embeddings", "dtype") if name in settings}
    wrapped: PretrainedConfig = make(text_config=settings, vision_config=family.vision, **outer)
    return wrapped


def randomise_vectors(model: torch.nn.Module) -> None:
    """Add noise to the values that transformers leaves constant: norm weights (1), biases (0), saved buffers and
    tables of experts.

    Recurrent states decay slowly, so that old tokens count.
    """
    import torch

    with torch.no_grad():
        for name, values in model.state_dict(keep_vars=True).items():
            if values.dim() <= 1 and values.is_floating_point():
                values.add_(torch.randn_like(values), alpha=0.2)
            if name.endswith("position_bias"):
                values.add_(torch.randn_like(values))
            if name.endswith("tid2eid"):  # the experts of each token id
                config: Any = model.config
                values.copy_(torch.rand(len(values), config.n_routed_experts).argsort(1)[:, : values.shape[1]])
            if name.endswith("A_log"):
                values.sub_(3.0)
