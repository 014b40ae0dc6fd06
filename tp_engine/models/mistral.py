"""Mistral 7B and its kin: the plain decoder, in the first version with a sliding window on every layer."""

from __future__ import annotations

from tp_engine.models.causal_lm import CausalLM


class MistralForCausalLM(CausalLM):
    """No biases; ``sliding_window`` may be null."""
