"""What the engine knows of a model before it reads a weight: its config.json, parsed and checked.  No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base ``theta`` and the scaling rule with its numbers (``default``, ``linear``, ``llama3``)."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only model.  All sizes are those of the whole model; ``local_`` shares are worked out per rank."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    dtype: str
    eos_token_ids: tuple[int, ...]
