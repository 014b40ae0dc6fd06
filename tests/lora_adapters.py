"""Random PEFT adapters of the tiny checkpoints, and what PEFT itself computes with them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

# Importing PEFT takes seconds, so look for it without that.
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
# By name: the settings of PEFT, of several ranks and scales.
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj"]},
    "linears": {"r": 8, "target_modules": "all-linear"},
    "stabilised": {"r": 16, "target_modules": "all-linear", "use_rslora": True},
    "patterns": {
        "r": 4,
        "target_modules": r".*\.(q_proj|o_proj|up_proj|down_proj)",
        "rank_pattern": {"q_proj": 8, r"layers\.1\.mlp\..*": 2},
        "alpha_pattern": {"down_proj": 32},
    },
}

_STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

# The same of routed experts, whose weights are stacks.
EXPERT_ADAPTERS: dict[str, dict[str, Any]] = {
    "both": {"r": 8, "target_modules": ["k_proj", "o_proj"], "target_parameters": _STACKS},
    "down": {"r": 4, "target_modules": [], "target_parameters": _STACKS[1:]},
    "gate-up": {"r": 16, "target_modules": ["q_proj"], "target_parameters": _STACKS[:1], "use_rslora": True},
}


def make_adapter(folder: Path, checkpoint: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write an adapter of ``checkpoint`` with random A and B into ``folder`` and return it; ``config`` is PEFT's."""
    import peft
    import torch

    adapted = peft.get_peft_model(_base(checkpoint), peft.LoraConfig(**{"r": 8, "lora_alpha": 16, **config}))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, values in adapted.named_parameters():
            if ".lora_" in name:
                values.normal_(0.0, 0.1)
    adapted.save_pretrained(str(folder))
    return folder


def greedy_by_peft(
    checkpoint: Path, adapter: Path | None, prompt: list[int], num_tokens: int
) -> tuple[list[int], list[float]]:
    """The greedy tokens after ``prompt`` by PEFT's model in float32, or by the base, and their log-probabilities."""
    import peft
    import torch

    model: Any = _base(checkpoint)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
    tokens, logprobs = list(prompt), []
    with torch.inference_mode():
        for _ in range(num_tokens):
            scores = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
    return tokens[len(prompt) :], logprobs


def merge_adapter(folder: Path, checkpoint: Path, adapter: Path) -> Path:
    """Write the checkpoint with the adapter merged into its weights into ``folder`` and return it."""
    import peft

    merged: Any = peft.PeftModel.from_pretrained(_base(checkpoint), str(adapter)).merge_and_unload()
    merged.save_pretrained(folder)
    return folder


def _base(checkpoint: Path) -> torch.nn.Module:
    import torch
    import transformers

    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model
