"""Qwen3 (dense): every query and key head is normalised before the rotation, and there is a free ``head_dim``."""

from __future__ import annotations

from tp_engine.models.causal_lm import CausalLM
from tp_engine.models.decoder import QKNormSelfAttention


class Qwen3ForCausalLM(CausalLM):
    """No biases unless ``attention_bias`` is set."""

    self_attention = QKNormSelfAttention
