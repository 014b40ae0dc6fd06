"""Parsing config.json, and the world sizes that a model allows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tp_engine.errors import ConfigError
from tp_engine.layers.rotary import inverse_frequencies
from tp_engine.model_config import (
    check_tensor_parallel,
    families,
    load_model_config,
    read_model,
    resolve_max_model_len,
)
from tp_engine.model_config.asked_decoder import ClassAnswer
from tp_engine.model_config.checkpoint_files import weight_files
from tp_engine.model_config.kv_layout import local_num_kv_heads
from tp_engine.model_config.rope import RopeSpec
from tp_engine.model_config.spec import AttentionSpec, ModelSpec, QkNormSpec


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of transformers are asked in ``tests/unit/models/test_recognition.py``, not here."""
    monkeypatch.setattr(families, "ask", lambda _values: ClassAnswer(problem="it is another model"))


QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def llama(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 4,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "vocab_size": 128256,
        **changes,
    }


def attention_of(config: ModelSpec) -> AttentionSpec:
    """The attention of the first layer."""
    return config.attentions[0]


def windows_of(config: ModelSpec) -> tuple[int | None, ...]:
    """The window of each layer."""
    return tuple(attention.window for attention in config.attentions)


def test_qwen3_06b_golden() -> None:
    """Oracle: the published config.json; head_dim is 128 although 1024 / 16 = 64 (GOLDEN, row A3)."""
    config = read_model(QWEN3_06B)
    attention = attention_of(config)
    assert (attention.head_dim, attention.num_heads, attention.num_kv_heads, config.num_layers) == (128, 16, 8, 28)
    assert config.ropes == (RopeSpec(rotary_dim=128, theta=1_000_000.0),)
    assert attention.qk_norm == QkNormSpec(eps=1e-6) and config.tie_word_embeddings and not attention.qkv_bias
    assert config.dtype == "bfloat16" and config.eos_token_ids == (151645,)
    assert windows_of(config) == (None,) * 28


@pytest.mark.parametrize("changes", [{}, {"head_dim": None}])
def test_head_dim_defaults_to_hidden_over_heads(changes: dict[str, Any]) -> None:
    """Oracle: row A3."""
    assert attention_of(read_model(llama(**changes))).head_dim == 128


def test_missing_kv_heads_means_one_per_query_head() -> None:
    """Oracle: the rule of transformers for Llama 2 checkpoints."""
    config = llama()
    del config["num_key_value_heads"]
    assert attention_of(read_model(config)).num_kv_heads == 32


def test_rope_spellings_agree() -> None:
    """Oracle: the classic spelling and the one of transformers 5 describe the same rotation."""
    classic = read_model(llama(rope_scaling=LLAMA3_ROPE))
    config = llama(rope_parameters={**LLAMA3_ROPE, "rope_theta": 500000.0})
    del config["rope_theta"]
    assert read_model(config).ropes == classic.ropes
    assert classic.ropes[0].original_max_position == 8192 and classic.ropes[0].factor == 8.0
    old = read_model(llama(rope_scaling={"type": "linear", "factor": 2}))
    assert old.ropes[0].kind == "linear" and old.ropes[0].factor == 2.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": -4.0}}, "factor -4.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0, "alpha": 1000.0}}, "alpha=1000.0"),
        ({"rope_scaling": {"type": "dynamic"}}, "factor"),
        ({"rope_scaling": {"type": "ntk", "factor": 4.0}}, "ntk"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
        ({"num_experts": 8}, "num_experts"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"qk_norm": True}, "qk_norm"),
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"num_attention_heads": "32"}, "num_attention_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"head_dim": 5}, "head_dim"),
        ({"vocab_size": True}, "vocab_size"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
    ],
)
def test_unsupported_options_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    """Oracle: the rule that the reader ignores no option of config.json."""
    with pytest.raises(ConfigError, match=named):
        read_model(llama(**changes))


def test_options_that_ask_for_nothing_pass() -> None:
    """Oracle: the same configuration without them."""
    extra: dict[str, Any] = {"quantization_config": None, "use_mrope": False, "attention_dropout": 0.1, "auto_map": {}}
    assert read_model(llama(**extra)) == read_model(llama())


@pytest.mark.parametrize(
    "extra",
    [
        {"rope_scaling": LLAMA3_ROPE, "mlp_bias": False, "attention_bias": False, "pretraining_tp": 2},
        {"rope_scaling": None, "max_sequence_length": 2048, "pad_token_id": 0, "bos_token_id": 1, "use_cache": True},
        {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
        {
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": False,
            "sliding_window": 131072,
            "max_window_layers": 28,
            "use_mrope": False,
        },
        {
            "architectures": ["MistralForCausalLM"],
            "sliding_window": 4096,
            "_name_or_path": "x",
            "torch_dtype": "float16",
        },
    ],
    ids=["llama-3.1", "llama-2", "smollm2", "qwen2.5", "mistral"],
)
def test_published_configurations_are_accepted(extra: dict[str, Any]) -> None:
    """Oracle: keys and values as the publishers wrote them; these models run."""
    assert attention_of(read_model(llama(**extra))).head_dim == 128


def test_biases_by_architecture() -> None:
    """Oracle: the modules of transformers' Llama, Qwen2 and Qwen3."""
    both = read_model(llama(attention_bias=True, mlp_bias=True))
    assert attention_of(both).qkv_bias and attention_of(both).out_bias
    assert both.layers[0].mlp is not None and both.layers[0].mlp.bias
    qwen2 = attention_of(read_model(llama(architectures=["Qwen2ForCausalLM"])))
    assert qwen2.qkv_bias and not qwen2.out_bias and qwen2.qk_norm is None
    qwen3 = attention_of(read_model({**QWEN3_06B, "attention_bias": True}))
    assert qwen3.qkv_bias and qwen3.out_bias
    with pytest.raises(ConfigError, match="attention_bias"):
        read_model(llama(architectures=["MistralForCausalLM"], attention_bias=True))


def test_sliding_windows_per_layer() -> None:
    """Oracle: the layer types that transformers derives for Mistral, Qwen2 and Qwen3."""
    mistral = llama(architectures=["MistralForCausalLM"])
    assert windows_of(read_model({**mistral, "sliding_window": 16})) == (16,) * 4
    assert windows_of(read_model({**mistral, "sliding_window": None})) == (None,) * 4
    qwen2 = llama(architectures=["Qwen2ForCausalLM"], sliding_window=16, max_window_layers=3)
    assert windows_of(read_model(qwen2)) == (None,) * 4
    qwen2["use_sliding_window"] = True
    assert windows_of(read_model(qwen2)) == (None, None, None, 16)
    qwen2["layer_types"] = ["sliding_attention", "full_attention"] * 2
    assert windows_of(read_model(qwen2)) == (16, None, 16, None)
    with pytest.raises(ConfigError, match="layer_types"):
        read_model({**qwen2, "layer_types": ["full_attention"]})


def test_kv_layout_of_a_model() -> None:
    """By hand: four layers alike are one group, with their window if they have one; a window on every second layer
    makes two."""
    mistral = llama(architectures=["MistralForCausalLM"])
    assert read_model({**mistral, "sliding_window": None}).kv_layout.windows == (None,)
    assert read_model({**mistral, "sliding_window": 16}).kv_layout.windows == (16,)
    qwen2 = llama(architectures=["Qwen2ForCausalLM"], sliding_window=16, use_sliding_window=True)
    layout = read_model({**qwen2, "layer_types": ["sliding_attention", "full_attention"] * 2}).kv_layout
    assert layout.windows == (None, 16) and [group.layers for group in layout.groups] == [(1, 3), (0, 2)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "intermediate", "legal"),
    [
        (32, 8, 14336, {1, 2, 4, 8, 16, 32}),
        (6, 3, 96, {1, 3, 6}),
        (24, 1, 96, {1, 2, 3, 4, 6, 8, 12, 24}),
        (12, 4, 24, {1, 2, 4, 12}),
        (8, 2, 100, {1, 2, 4}),
    ],
)
def test_legal_world_sizes(heads: int, kv_heads: int, intermediate: int, legal: set[int]) -> None:
    """Oracle: the three divisibility rules, worked out by hand; every refusal lists the same legal sizes."""
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": intermediate}
    config = read_model(llama(head_dim=64, **changes))
    listed = ", ".join(str(size) for size in sorted(legal))
    for size in range(-1, 65):
        if size in legal:
            check_tensor_parallel(config, size)
            assert local_num_kv_heads(kv_heads, size) == max(1, kv_heads // size)
        else:
            with pytest.raises(ConfigError, match=f"{size}.*: {listed}$"):
                check_tensor_parallel(config, size)


def test_max_model_len() -> None:
    """Oracle: the model's positions."""
    config = read_model(llama())
    assert resolve_max_model_len(config, None) == 131072
    assert resolve_max_model_len(config, 100) == 100
    with pytest.raises(ConfigError, match=r"131073.*at most 131072"):
        resolve_max_model_len(config, 131073)


def test_load_joins_the_eos_ids_of_both_files(tmp_path: Path) -> None:
    """Oracle: the union in order: transformers' generation stops at any of them."""
    (tmp_path / "config.json").write_text(json.dumps(llama(eos_token_id=[5, 6], dtype="float16")))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5], "temperature": 0.6}))
    config, folder = load_model_config(str(tmp_path))
    assert config.eos_token_ids == (5, 6, 7) and config.dtype == "float16" and folder == tmp_path


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, (2,)),
        ({}, {}, (2,)),
        ({}, {"eos_token_id": [7]}, (7,)),
        ({"eos_token_id": None}, None, ()),
        ({"eos_token_id": None}, {"eos_token_id": 7}, (7,)),
        ({"eos_token_id": [5, 99_999_999, -1]}, {"eos_token_id": 10**40}, (5,)),
    ],
)
def test_where_eos_ids_come_from(config: Any, generation: Any, expected: tuple[int, ...], tmp_path: Path) -> None:
    """Oracle: transformers: its class's default (Llama: 2) holds if neither file has the key; null is none.

    An id outside of the vocabulary cannot be generated; a warning names it.
    """
    (tmp_path / "config.json").write_text(json.dumps(llama(**config)))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    spec = load_model_config(str(tmp_path))[0]
    assert spec.eos_token_ids == expected
    assert any("outside of the vocabulary" in warning for warning in spec.warnings) is ("10" in str(generation))


def test_load_refuses_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: each message names the value and the remedy."""
    with pytest.raises(ConfigError, match=r"without config\.json"):
        load_model_config(str(tmp_path))
    with pytest.raises(ConfigError, match="no such folder"):
        load_model_config(str(tmp_path / "nothing" / "here"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        load_model_config(str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"nobody/nothing.*huggingface_hub"):
        load_model_config("nobody/nothing")


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("params.json", "which is Mistral's own format"),
        ("tekken.json", "which is Mistral's own format"),
        ("consolidated.safetensors", "which is Mistral's own format"),
        ("Qwen3-Q4_K_M.gguf", "which is llama.cpp's format"),
        ("adapter_config.json", "which is an adapter's: give its base model, and this folder with --lora-modules"),
        ("pytorch_model-00001-of-00002.bin", "a format that can run code and is never read: save the model again"),
    ],
)
def test_other_formats_are_named(file: str, what: str, tmp_path: Path) -> None:
    """Oracle: the file that tells the format, whether there is a config.json or not."""
    (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=rf"without config\.json but with {file}, {what}"):
        load_model_config(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"holds no \*\.safetensors of a whole model, but {file}, {what}"):
        weight_files(tmp_path)


def test_dynamic_rotations_are_plain_ones_up_to_the_models_positions() -> None:
    """Oracle: transformers' own frequencies of a sequence that has all of the model's positions."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "dynamic", "factor": 4.0}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=128, rope_scaling=scaling)
    expected, factor = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=128)
    spec = read_model(llama(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
                            max_position_embeddings=128, rope_theta=10_000.0, rope_scaling=scaling))  # fmt: skip
    assert (spec.max_position, spec.ropes[0].attention_factor) == (128, factor)
    torch.testing.assert_close(inverse_frequencies(spec.ropes[0], 128), expected)


def test_decoders_without_a_head_are_read() -> None:
    """Oracle: the same decoder with its head; models for embeddings are saved so (e5-mistral, bge-multilingual)."""
    for name in ("Mistral", "Qwen2", "Llama"):
        whole = read_model(llama(architectures=[f"{name}ForCausalLM"]))
        assert read_model(llama(architectures=[f"{name}Model"])) == whole
    with pytest.raises(ConfigError, match=r"architectures is .'BertModel'.; this engine runs exactly one of"):
        read_model(llama(architectures=["BertModel"]))


def test_a_model_further_down_is_named(tmp_path: Path) -> None:
    """Oracle: the folder below that has config.json, as in a trainer's output and in the hub's cache."""
    for name in ("checkpoint-200", "checkpoint-100", "cache/snapshots/abc"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    for folder, found in ((tmp_path, "checkpoint-100"), (tmp_path / "cache", "snapshots/abc")):
        with pytest.raises(ConfigError, match=rf"but with {found}/config\.json: give that folder"):
            load_model_config(str(folder))


def test_hub_failures_say_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the message names the hub, its error and the remedy without a network."""

    class Hub:
        @staticmethod
        def snapshot_download(name: str, **_: Any) -> str:
            raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    with pytest.raises(ConfigError, match=r"nobody/nothing.*hub.*no route to host.*Without a network"):
        load_model_config("nobody/nothing")


@pytest.mark.parametrize(
    ("name", "keys", "wrong"),
    [
        ("Qwen3MoeForCausalLM", {"use_qk_norm": True, "shared_expert_intermediate_size": 0}, {"use_qk_norm": False}),
        ("Gemma2ForCausalLM", {"sliding_window": 4096, "sliding_window_size": 4096}, {"sliding_window_size": 2048}),
        ("GlmMoeDsaForCausalLM", {"moe_router_dtype": "float32"}, {"moe_router_dtype": "bfloat16"}),
        ("GlmMoeDsaForCausalLM", {"scoring_func": "sigmoid", "qk_head_dim": 192}, {"scoring_func": "softmax"}),
        ("Ernie4_5_MoeForCausalLM", {"use_rmsnorm": True, "num_nextn_predict_layers": 1}, {"use_rmsnorm": False}),
        ("GptOssForCausalLM", {"experts_per_token": 4, "num_experts_per_tok": 4}, {"experts_per_token": 8}),
    ],
)
def test_keys_of_real_files_are_taken_by_their_values(name: str, keys: dict[str, Any], wrong: dict[str, Any]) -> None:
    """Oracle: keys of published files that have one supported value, or repeat another key."""
    of_family: dict[str, Any] = {
        "Gemma2ForCausalLM": {"head_dim": 128, "hidden_activation": "gelu_pytorch_tanh"},
        "GptOssForCausalLM": {"num_local_experts": 32, "rope_parameters": {"rope_type": "default"}},
        "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 8, "moe_k": 2},
        "GlmMoeDsaForCausalLM": {"n_routed_experts": 8, "q_lora_rank": 64, "qk_nope_head_dim": 128},
    }
    sizes = {"moe_intermediate_size": 512} if "Moe" in name else {}
    sizes |= {"num_experts": 8} if name.startswith("Qwen") else {}
    config = llama(architectures=[name], **sizes, **of_family.get(name, {}))
    read_model({**config, **keys})
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        read_model({**config, **keys, **wrong})


def test_dual_chunk_attention_is_bounded() -> None:
    """Oracle: the files of Qwen2.5-7B-Instruct-1M: up to the positions of the training it is dense attention."""
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 65536}
    config = llama(architectures=["Qwen2ForCausalLM"], dual_chunk_attention_config=chunks)
    spec = read_model(config)
    assert spec.max_position == 65536
    with pytest.raises(ConfigError, match="at most 65536"):
        resolve_max_model_len(spec, 65537)
    with pytest.raises(ConfigError, match="surprise"):
        read_model({**config, "dual_chunk_attention_config": {**chunks, "surprise": 1}})
    with pytest.raises(ConfigError, match="dual_chunk_attention_config"):
        read_model(llama(dual_chunk_attention_config=chunks))


@pytest.mark.parametrize(
    ("name", "relatives"),
    [
        ("DeepseekV5ForCausalLM", ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM")),
        ("Glm5NextForConditionalGeneration", ("GlmForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")),
        ("MiniMaxM3ForCausalLM", ("MiniMaxM2ForCausalLM",)),  # and not Ministral
        ("HYV4ForCausalLM", ("HYV3ForCausalLM",)),
        ("Cohere2MoeForCausalLM", ("Cohere2ForCausalLM",)),
        ("LlamaForCasualLM", ("LlamaForCausalLM",)),
        ("AfmoeForCausalLM", ()),
        ("", ()),
        ("x" * 100_000, ()),
    ],
)
def test_the_relatives_of_an_architecture_are_named(name: str, relatives: tuple[str, ...]) -> None:
    """Oracle: by hand: those of the same makers, and no list of all names; what helps is said."""
    with pytest.raises(ConfigError, match=r"this engine runs exactly one of \d+ architectures") as caught:
        read_model(llama(architectures=[name]))
    text = str(caught.value)
    assert all(one in text for one in relatives) and len(text) < 1000
    assert "Qwen3ForCausalLM" not in text and "docs/models.md" in text and "take a " in text
    assert ("Nearest by name" in text) == ("--hf-overrides" in text) == bool(relatives)


@pytest.mark.parametrize("listed", [[], [3], [["a"]], ["LlamaForCausalLM", "X"], "LlamaForCausalLM", {}])
def test_architectures_must_be_one_name(listed: Any) -> None:
    """Oracle: the error names the key, whatever its value is."""
    with pytest.raises(ConfigError, match="architectures"):
        read_model(llama(architectures=listed))


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ({"n_group": 5}, "n_group is 5"),
        ({"n_group": 8}, "groups of at least 2"),
        ({"n_group": 4, "topk_group": 5}, "topk_group is 5"),
        ({"n_group": 4, "topk_group": 2, "num_experts_per_tok": 5}, "goes to 5 experts"),
        ({"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}, None),
        ({"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8}, None),
    ],
)
def test_groups_of_experts(groups: dict[str, int], named: str | None) -> None:
    """By hand: 8 experts in groups of which the best are chosen, each by its two best experts."""
    config = llama(architectures=["Glm4MoeForCausalLM"], n_routed_experts=8, moe_intermediate_size=64, **groups)
    if named is None:
        read_model(config)
        return
    with pytest.raises(ConfigError, match=named):
        read_model({"num_experts_per_tok": 2, **config})
