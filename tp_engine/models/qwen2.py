"""Qwen2 and Qwen2.5: the plain decoder with biases on query, key and value."""

from __future__ import annotations

from tp_engine.models.causal_lm import CausalLM


class Qwen2ForCausalLM(CausalLM):
    """Layers from ``max_window_layers`` on may have a sliding window."""
