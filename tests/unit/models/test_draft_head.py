"""EAGLE-3 heads: their configuration, and their logits on one rank and on several simulated ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.draft_heads import ReferenceHead, make_draft_head
from tests.simulated_ranks import run_ranks
from tests.unit.models.test_models import BACKENDS, CPU, LENGTHS, bind_caches, prefill_metadata
from tp_engine.distributed.collectives import Communicator, SingleRank
from tp_engine.errors import ConfigError, WeightError
from tp_engine.layers.attention import forward_context
from tp_engine.layers.context import LayerContext
from tp_engine.layers.quantization import choose_formats
from tp_engine.model_config import load_model_config
from tp_engine.model_config.draft_head import DraftHeadSpec, load_draft_head
from tp_engine.model_config.kv_layout import MAX_GROUPS, KvKind, lay_out
from tp_engine.models.causal_lm import CausalLM, build_model
from tp_engine.models.eagle3_head import Eagle3Head
from tp_engine.weights.loader import load_weights

VOCABULARY = 203
LAYERS = (0, 1, 2)
CASES: dict[str, dict[str, Any]] = {
    "authors": {"target": "llama"},
    "fewer-drafts": {"target": "llama", "draft_vocab_size": 61, "has_embedding": True},
    "speculators": {"target": "qwen3", "spelling": "speculators", "layer": "qwen3", "draft_vocab_size": 61},
    "all-norms": {"target": "qwen3", "norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "norm-before-fc": {"target": "llama", "spelling": "speculators", "norm_before_fc": True, "num_kv_heads": 1},
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> dict[str, tuple[Path, Path]]:
    """For each case the folders of the head and of its model."""
    folder = tmp_path_factory.mktemp("heads")
    found = {}
    for name, case in CASES.items():
        options = {"state_layers": LAYERS, "vocab_size": VOCABULARY, **case}
        target = checkpoint(options.pop("target"), num_layers=4, tie=False)
        found[name] = make_draft_head(folder / name, **options), target
    return found


def build(folder: Path, target_folder: Path, communicator: Communicator) -> tuple[Any, Eagle3Head]:
    """The model and the head, loaded."""
    model_spec, _ = load_model_config(str(target_folder))
    spec, _ = load_draft_head(str(folder), model_spec)
    assert isinstance(spec, DraftHeadSpec)
    options: dict[str, Any] = {"communicator": communicator, "dtype": torch.float32, "device": CPU}
    places: dict[str, Any] = {"backends": BACKENDS, "max_model_len": 128}
    model = build_model(model_spec, state_layers=spec.state_layers, **options, **places)
    assert isinstance(model, CausalLM)
    context = LayerContext(**options, format_of=choose_formats(None, spec.model))
    head = Eagle3Head(spec, model, group=0, context=context, **places).eval()
    load_weights(dict(model.named_parameters()), model_spec, target_folder, info=communicator.info)
    load_weights(dict(head.named_parameters()), spec.model, folder, info=communicator.info)
    model.finish_loading()
    head.finish_loading()
    bind_caches([*model.attention_layers, *head.own_attention])
    return model, head


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_logits(case: str, world_size: int, heads: dict[str, tuple[Path, Path]]) -> None:
    """Oracle: the head in plain PyTorch over the states of transformers, within 1e-4."""
    folder, target_folder = heads[case]
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(VOCABULARY, (length + 1,), generator=generator).tolist() for length in LENGTHS]

    def run(communicator: Communicator) -> torch.Tensor | None:
        model, head = build(folder, target_folder, communicator)
        ids, following = (
            torch.tensor([token for text in texts for token in text[part]]) for part in (slice(-1), slice(1, None))
        )
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        states = torch.empty(len(ids), len(LAYERS) * 64)
        with torch.inference_mode(), forward_context([prefill_metadata(LENGTHS)] * MAX_GROUPS):
            model(ids.int(), positions, None, states)
            out, _ = head(following.int(), head.combine(states), positions)
            return head.lm_head.gather(head.lm_head(out))

    found = run_ranks(world_size, run)[0]
    reference = ReferenceHead(folder, target_folder)
    expected = torch.cat([reference.logits(text) for text in texts])
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_refusals(tmp_path: Path, heads: dict[str, tuple[Path, Path]]) -> None:
    """By hand: what a head cannot be, with its value."""
    target, _ = load_model_config(str(heads["authors"][1]))
    wrong: dict[str, dict[str, Any]] = {
        "num_hidden_layers is 2": {"num_hidden_layers": 2},
        "eagle_aux_hidden_state_layer_ids must be different layers": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
        "it is absent, which means": {"eagle_aux_hidden_state_layer_ids": None},
        "target_hidden_size is 32, but that of the model is 64": {"target_hidden_size": 32},
        "draft_vocab_size is 204; the model has": {"draft_vocab_size": 204},
        "parallel_drafting is True": {"parallel_drafting": True},
        "use_aux_hidden_state is False": {"eagle_config": {"use_aux_hidden_state": False}},
        "use_sliding_window is True": {"use_sliding_window": True},
        "options that this engine does not support for this architecture: mystery=3": {"mystery": 3},
        "quantization_config": {
            "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
        },
        "decoder_sparse_step is 2": {"decoder_sparse_step": 2},
        r"mrope_section is \[1, 1, 1\]; 4 pairs turn": {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}},
        r"head': .*\['LlamaForCausalLM'\]; .* set the method ngram or": {"architectures": ["LlamaForCausalLM"]},
        r"and for Gemma 4 Gemma4AssistantForCausalLM: .* leave speculative_config out": {
            "architectures": ["Gemma4AssistantForCausalLM"]
        },
    }
    folder = make_draft_head(tmp_path / "head", vocab_size=VOCABULARY, state_layers=LAYERS)
    config = json.loads((folder / "config.json").read_text())
    for message, changes in wrong.items():
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ConfigError, match=message) as caught:
            load_draft_head(str(folder), target)
        assert "hf-overrides" not in str(caught.value)  # which are for the model
    harmless = {"target_model_type": "qwen3", "decoder_sparse_step": 1, "attention_dropout": 0.1}
    (folder / "config.json").write_text(json.dumps({**config, **harmless}))
    spec = load_draft_head(str(folder), target)[0]
    assert "attention_dropout" in spec.model.ignored_keys
    # Heads of Qwen2.5-VL and Qwen3-VL: by which position each pair turns.
    for more, axes in (({}, (0, 1, 2, 2)), ({"mrope_interleaved": True}, (0, 1, 2, 0))):
        turning = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2], **more}}
        (folder / "config.json").write_text(json.dumps({**config, **turning}))
        (rope,) = load_draft_head(str(folder), target)[0].model.ropes
        assert rope.axes == axes and spec.model.ropes[0].axes == ()
    with pytest.raises(ConfigError, match="vocab_size is 99, but that of the model is 203"):
        load_draft_head(str(make_draft_head(tmp_path / "other", vocab_size=99, state_layers=LAYERS)), target)


def test_loading_is_complete(tmp_path: Path, heads: dict[str, tuple[Path, Path]]) -> None:
    """By hand: a tensor that is not used, and a map that leaves the vocabulary, are refused."""
    options: dict[str, Any] = {"vocab_size": VOCABULARY, "state_layers": LAYERS, "draft_vocab_size": 61}
    more = {"mask_hidden": torch.zeros(1, 192)}
    for message, tensors in {
        "unexpected: mask_hidden": more,
        "outside of the vocabulary of 203": {"d2t": torch.full((61,), 150)},
    }.items():
        folder = make_draft_head(tmp_path / message, **options, tensors=tensors)
        with pytest.raises(WeightError, match=message):
            build(folder, heads["authors"][1], SingleRank())


def test_the_head_joins_a_group() -> None:
    """By hand: it is one more layer of the smallest group of its shape, or has a group of its own."""
    full = KvKind(window=None, num_kv_heads=4, head_dim=8)
    window = KvKind(window=16, num_kv_heads=4, head_dim=8)
    assert [group.layers for group in lay_out([full] * 3, 2, full).groups] == [(0, 1, 2, 3)]
    assert [group.layers for group in lay_out([full, window, full, window], 1, full).groups] == [(0, 2, 4), (1, 3)]
    assert [group.layers for group in lay_out([window] * 2, 1, full).groups] == [(2,), (0,), (1,)]
    narrow = KvKind(window=None, num_kv_heads=1, head_dim=8)
    assert [group.layers for group in lay_out([full] * 2, 1, narrow).groups] == [(0,), (1,), (2,)]
