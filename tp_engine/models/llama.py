"""Llama 2, 3, 3.1 and later text models: the plain decoder."""

from __future__ import annotations

from tp_engine.models.causal_lm import CausalLM


class LlamaForCausalLM(CausalLM):
    """``attention_bias`` and ``mlp_bias`` are optional; ``llama3`` and ``linear`` position scaling."""
