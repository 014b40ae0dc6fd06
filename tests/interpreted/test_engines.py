"""Whole engines on the GPU's data path, whose tokens are those of the same engine on plain PyTorch or C."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.interpreted.engines import MODEL, NUM_TOKENS, RECORDED, STEPS, CountedSteps, generate, gpu_path
from tests.repeating_recorder import RepeatingRecorder
from tests.text_tokenizers import byte_level_tokenizer
from tests.tiny_models import make_checkpoint
from tests.unit.attention.test_kv_groups import WINDOWED, Engine, compare, serve
from tests.unit.kernels.kernel_harness import triton_ops_on_cpus
from tp_engine import LLM, SamplingParams, StructuredOutputsParams
from tp_engine.attention import mla
from tp_engine.attention.mla import MLABackend
from tp_engine.attention.triton_backend import TritonBackend
from tp_engine.attention.triton_mla import TritonMLABackend
from tp_engine.distributed.groups import RankGroups
from tp_engine.layers.quantization.dense import TreeLinear
from tp_engine.model_config.tp_invariant import NUM_SHARDS
from tp_engine.worker.graphs.step_runner import GraphPlan


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[CountedSteps]:
    """``CountedSteps`` that have seen no step."""
    monkeypatch.setattr(CountedSteps, "steps", set())
    monkeypatch.setattr(CountedSteps, "ends", [])
    monkeypatch.setattr(CountedSteps, "num_runs", 0)
    return CountedSteps


def test_engine(checkpoint: Callable[..., Path], counted: type[CountedSteps]) -> None:
    """Oracle: the tokens of the same engine on plain PyTorch, greedy and sampled; with recorded steps, too."""
    folder = checkpoint("qwen3", **MODEL)
    expected = generate(folder)
    with triton_ops_on_cpus() as used:
        with gpu_path():
            found = generate(folder)
        ending = patch.object(RankGroups, "close", lambda groups: counted.ends.append("process groups"))
        with gpu_path(RECORDED, steps=counted), ending:
            recorded = generate(folder)
    assert {"embed", "norm", "add_norm", "gate", "qk_norm_rope_store", "prepare_decodes", "advance_decodes"} <= used, (
        f"the engine took {used} from the table"
    )
    assert found == expected
    assert recorded == expected
    assert counted.ends == ["recordings", "recordings", "process groups"], "those of the trial come first"
    assert counted.steps == STEPS
    assert [len(tokens) for tokens in found] == list(NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_quantised_weights(quantization: str, checkpoint: Callable[..., Path]) -> None:
    """Oracle: the tokens of the same engine on C, greedy and sampled."""
    folder = checkpoint("qwen3", **MODEL)
    expected = generate(folder, quantization)
    with triton_ops_on_cpus(), gpu_path():
        assert generate(folder, quantization) == expected


@pytest.mark.slow
def test_tp_invariant(checkpoint: Callable[..., Path]) -> None:
    """Oracle: the tokens of the same engine on plain PyTorch; sums are trees, decodes are split by their lengths."""
    folder = checkpoint("qwen3", **MODEL)
    expected = generate(folder)
    with (
        triton_ops_on_cpus(),
        gpu_path(backend=lambda needs: TritonBackend(is_invariant=True)),
        patch("tp_engine.worker.effective_config.check_tp_invariant"),
        patch.object(TreeLinear, "__call__", autospec=True, side_effect=TreeLinear.__call__) as multiplied,
    ):
        found = generate(folder, tp_invariant=True)
    assert found == expected
    assert {call.args[0]._num_shards for call in multiplied.call_args_list} == {1, NUM_SHARDS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "operations"),
    [
        (
            "qwen3.5",
            {"layer_types": ["linear_attention", "full_attention"]}
            | {"linear_num_key_heads": 2, "linear_num_value_heads": 6},
            {"gated_delta_net_decode", "gate_heads"},
        ),
        ("nemotron-h", {"hybrid_override_pattern": "M*"}, {"mamba2_decode", "mamba2_prefill", "norm_groups"}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, {"short_conv_decode", "short_conv_prefill"}),
    ],
)
def test_recurrent_states(
    family: str, changes: dict[str, Any], operations: set[str], checkpoint: Callable[..., Path]
) -> None:
    """Oracle: the tokens of the same engine on C; one of its two layers has a recurrent state."""
    folder = checkpoint(family, num_layers=2, vocab_size=101, intermediate_size=64, **changes)
    expected = generate(folder)
    with triton_ops_on_cpus() as used, gpu_path(RECORDED):
        found = generate(folder)
    assert operations <= used, used
    assert found == expected


@pytest.mark.slow
def test_latents(checkpoint: Callable[..., Path], counted: type[CountedSteps]) -> None:
    """Oracle: the tokens of the same engine on C.  Triton decodes, recorded, and attends for short chunks; longer ones
    are expanded."""
    folder = checkpoint("deepseek-v3", num_layers=2, vocab_size=101)
    expected = generate(folder)
    with (
        triton_ops_on_cpus() as used,
        gpu_path(RECORDED, backend=lambda needs: MLABackend(TritonMLABackend()), steps=counted),
        patch.object(mla, "MIN_EXPANDED_QUERIES", 12),
    ):
        found = generate(folder)
    assert {"prepare_latents", "route"} <= used, used
    assert found == expected
    assert counted.steps, "no step of decodes was recorded"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek-v3.2", "glm-moe-dsa"])
def test_sparse_attention(family: str, checkpoint: Callable[..., Path], counted: type[CountedSteps]) -> None:
    """Oracle: the tokens of the same engine on C, which ``tests/ranks`` compares with transformers'.  Prompts are
    shorter and longer than the chosen keys, in chunks beside decodes, which are recorded."""
    folder = checkpoint(family, num_layers=2, vocab_size=101, index_topk=16, index_n_heads=8)
    expected = generate(folder)
    path = gpu_path(RECORDED, backend=lambda needs: MLABackend(TritonMLABackend(), needs.index_topk), steps=counted)
    with triton_ops_on_cpus() as used, path:
        found = generate(folder)
    assert {"prepare_index", "choose_keys"} <= used, used
    assert found == expected
    assert counted.steps, "no step of decodes was recorded"


@pytest.mark.slow
def test_groups_of_layers(checkpoint: Callable[..., Path]) -> None:
    """Oracle: the same model with one block table for all layers; tokens and log-probabilities are equal bit by bit."""
    shape: dict[str, Any] = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}
    two_layers = {"num_layers": 2, "layer_types": WINDOWED["layer_types"][:2]}
    folder = checkpoint(**shape, **WINDOWED | two_layers)
    with triton_ops_on_cpus():
        grouped = Engine(folder, TritonBackend)
        with patch("tp_engine.model_config.kv_layout.MAX_GROUPS", 1):
            single = Engine(folder, TritonBackend)
        assert [len(engine.windows) for engine in (grouped, single)] == [2, 1]
        compare(serve(grouped, 2), serve(single, 2))
    assert grouped.freed > 4


@pytest.mark.slow
def test_masks(tmp_path: Path, counted: type[CountedSteps]) -> None:
    """Oracle: the tokens of the same engine on plain PyTorch; one row follows a grammar, and a recording holds no
    masks."""
    folder = make_checkpoint(
        tmp_path, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, vocab_size=384, eos_token_id=1
    )
    byte_level_tokenizer().save_pretrained(folder)
    digits = StructuredOutputsParams(regex="[0-9]{4}")
    params = [
        SamplingParams(temperature=0, max_tokens=6, structured_outputs=digits),
        SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
    ]

    def tokens() -> list[list[int]]:
        sizes: dict[str, Any] = {
            "max_model_len": 32,
            "num_gpu_blocks_override": 8,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 2,
        }
        with LLM(str(folder), device="cpu", dtype="float32", attention_backend="torch", **sizes) as llm:
            return [output.outputs[0].token_ids for output in llm.generate([[5, 9], [7]], params, use_tqdm=False)]

    expected = tokens()
    plan = GraphPlan(sizes=(1, 2), make_recorder=RepeatingRecorder)
    with gpu_path(plan, steps=counted, warms_up=False, products=False):
        recorded = tokens()
    assert counted.num_runs >= 4, counted.num_runs
    assert recorded == expected
    text = byte_level_tokenizer().decode(expected[0])
    assert len(text) == 4 and text.isdigit(), text
