"""Gemma 4 assistants: what is read of them, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.assistants import make_assistant
from tests.unit.models.test_models import BACKENDS, CPU
from tp_engine import recommend
from tp_engine.config import EngineConfig
from tp_engine.distributed.collectives import SingleRank
from tp_engine.errors import ConfigError, WeightError
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.layers.context import LayerContext
from tp_engine.layers.quantization import choose_formats
from tp_engine.model_config import load_model_config
from tp_engine.model_config.assistant import AssistantSpec
from tp_engine.model_config.draft_head import load_draft_head
from tp_engine.models.assistant_head import AssistantHead
from tp_engine.models.causal_lm import CausalLM, build_model
from tp_engine.weights.loader import load_weights
from tp_engine.worker.effective_config import resolve

NAME = "model.safetensors"


def test_every_tensor_is_read(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """By hand: a tensor that is lost, or one too many, is an error that names it; centroids are not read."""
    target = checkpoint("gemma4")
    folder = make_assistant(tmp_path / "assistant", target)
    model_spec, _ = load_model_config(str(target))
    spec, _ = load_draft_head(str(folder), model_spec)
    assert isinstance(spec, AssistantSpec)
    options: dict[str, Any] = {"communicator": SingleRank(), "dtype": torch.float32, "device": CPU}
    places: dict[str, Any] = {"backends": BACKENDS, "max_model_len": 128}
    context = LayerContext(**options, format_of=choose_formats(None, spec.model))
    model = build_model(model_spec, **options, **places)
    assert isinstance(model, CausalLM)
    head = AssistantHead(spec, model, **places, context=context)
    parameters = dict(head.named_parameters())
    tensors = load_file(folder / NAME)
    names = [name for name in tensors if name != "lm_head.weight"]
    assert len(names) > 30

    def load(changed: dict[str, torch.Tensor]) -> None:
        save_file(changed, folder / NAME, metadata={"format": "pt"})
        load_weights(parameters, spec.model, folder, info=SingleRank().info)

    for lost in names:
        with pytest.raises(WeightError, match=f"missing: {lost}"):
            load({name: tensor for name, tensor in tensors.items() if name != lost})
    with pytest.raises(WeightError, match="unexpected: other"):
        load({**tensors, "other": torch.zeros(3)})
    load({**tensors, "masked_embedding.centroids.weight": torch.zeros(3)})


def test_options_and_refusals(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """By hand: the spellings of vLLM, and what does not fit, with its value and the remedy."""
    target = checkpoint("gemma4")
    folder = make_assistant(tmp_path / "assistant", target)

    def config(model: Path, options: dict[str, Any]) -> EngineConfig:
        return EngineConfig(model=str(model), device="cpu", speculative_config=SpeculativeConfig.of(options))

    for options in ({}, {"method": "mtp"}, {"method": "gemma4_mtp", "num_speculative_tokens": 4}):
        found = resolve(config(target, {"model": str(folder), **options}))
        assert found.draft_head is not None and isinstance(found.draft_head.spec, AssistantSpec)
        assert found.model.beside is None and found.model.kv_layout == load_model_config(str(target))[0].kv_layout
    with pytest.raises(ConfigError, match=r"no head for multi-token prediction .* or name the model's assistant as"):
        resolve(config(target, {"method": "mtp"}))
    for method in ("mtp", "eagle3"):
        with pytest.raises(ConfigError, match="draft head with files of its own"):
            recommend(str(target), device_memory="2GiB", speculative_config={"method": method, "model": str(folder)})
    with pytest.raises(ConfigError, match=r"a draft head is one of .* and for Gemma 4 Gemma4AssistantForCausalLM"):
        resolve(config(checkpoint("llama"), {"model": str(folder)}))
    with pytest.raises(ConfigError, match=r"\['Gemma4ForCausalLM'\]; a draft head is one of"):
        resolve(config(target, {"method": "mtp", "model": str(checkpoint("gemma4", seed=2))}))
    wrong = {
        "backbone_hidden_size is 64, but that of the model is 32": checkpoint("gemma4", hidden_size=32),
        "vocab_size is 203, but that of the model is 99": checkpoint("gemma4", vocab_size=99),
        "num_key_value_heads is 4, but that of the model is 2": checkpoint("gemma4", num_kv_heads=2),
        "sliding_window is 8, but that of the model is 12": checkpoint("gemma4", sliding_window=12),
    }
    for message, other in wrong.items():
        with pytest.raises(ConfigError, match=rf"assistant'.*{message}: use the assistant of this model"):
            resolve(config(other, {"model": str(folder)}))
