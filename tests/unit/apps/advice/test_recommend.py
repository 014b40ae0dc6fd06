"""Recommendations: the arithmetic of the ledger, real models' sizes, errors with remedies."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tp_engine
from tests.image_models import IMAGE_FAMILIES, image_config, make_image_model
from tests.tiers import slow_but
from tests.tiny_models import make_checkpoint
from tp_engine import recommend
from tp_engine.apps.advice import sizes
from tp_engine.apps.advice.question import GPU_GIB, WORKLOADS, Workload
from tp_engine.cli.main import main
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.images.settings import image_settings
from tp_engine.job.topology import RankInfo
from tp_engine.layers.embedding import VocabSlice
from tp_engine.model_config import load_model_config, read_model
from tp_engine.model_config.block_size import choose_block_size
from tp_engine.model_config.kv_layout import KvKind, lay_out
from tp_engine.model_config.spec import ModelSpec
from tp_engine.models.vision_tower import build_tower
from tp_engine.models.weight_sizes import local_parameters
from tp_engine.system.units import GIB
from tp_engine.worker.memory.kv_cache import KvCacheShape


def llama(layers: int, hidden: int, inner: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 4096,
        "vocab_size": 32_000,
        "torch_dtype": "float16",
        **more,
    }


SEVEN_B = llama(32, 4096, 11_008, 32)
THIRTEEN_B = llama(40, 5120, 13_824, 40)
SEVENTY_B = llama(80, 8192, 28_672, 64, num_key_value_heads=8)
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "vocab_size": 151_936,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}


def model(config: dict[str, Any]) -> ModelSpec:
    return read_model(config)


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [(SEVEN_B, 6_738_415_616), (THIRTEEN_B, 13_015_864_320), (SEVENTY_B, 68_976_648_192), (QWEN3_06B, 596_049_920)],
    ids=["Llama 2 7B", "Llama 2 13B", "Llama 2 70B", "Qwen3 0.6B"],
)
def test_parameters_of_real_models(config: dict[str, Any], num_parameters: int) -> None:
    """Oracle: the published numbers of parameters of these models."""
    assert local_parameters(model(config), 1) == num_parameters


@pytest.mark.parametrize(
    "architecture",
    [
        *("llama", "qwen2", "qwen3", "qwen2-moe", "qwen3-moe", "glm4-moe", "gpt-oss", "ernie4.5-moe"),
        *("deepseek-v2", "deepseek-v3", "mistral4"),
    ],
)
@pytest.mark.parametrize("tie", [True, False])
def test_parameters_of_checkpoints(tmp_path: Path, architecture: str, tie: bool) -> None:
    """Oracle: the tensors in a checkpoint that transformers wrote."""
    from safetensors import safe_open

    folder = make_checkpoint(tmp_path / "model", architecture, tie=tie)
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        found = sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118  (not a dict)
    # 100 inner elements of 6 experts in 2 layers have room for 104: gate, up and down for 64 hidden elements, 2 biases.
    padding = 2 * 6 * 4 * (3 * 64 + 2) if architecture == "gpt-oss" else 0
    spec = load_model_config(str(folder))[0]
    padding += -spec.vocab_size % 16 * spec.hidden_size * (1 if tie else 2)  # rows of the embedding and of the head
    assert local_parameters(spec, 1) == found + padding


QWEN3_30B = QWEN3_06B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def test_parameters_of_experts() -> None:
    """Oracle: Qwen3-30B-A3B is published with 30.5 billion parameters, of which 3.3 billion are active."""
    spec = model(QWEN3_30B)
    assert round(local_parameters(spec, 1) / 1e9, 1) == 30.5
    assert round(local_parameters(spec, 1, active_only=True) / 1e9, 1) == 3.4  # with the embedding
    found = recommend(spec, workload="chat", gpu="h100", tensor_parallel_size=1)
    assert found.fits and found.active_weight_bytes * 8 < found.weight_bytes
    assert "for one token: the experts that it goes to" in found.explain()
    dense = recommend(model(SEVEN_B), workload="chat", gpu="h100", tensor_parallel_size=1)
    assert dense.active_weight_bytes == dense.weight_bytes and "for one token" not in dense.explain()


def test_the_vocabulary_is_padded_as_the_layers_pad_it() -> None:
    """Oracle: the slice of the embedding layer, and by hand the next multiples of 16 per rank."""
    config = model(SEVEN_B | {"vocab_size": 32_003})
    found = [sizes.local_vocab_size(config, size) for size in (1, 2, 4, 8)]
    slices = [VocabSlice.of_rank(32_003, RankInfo(rank=0, world_size=size)).width for size in (1, 2, 4, 8)]
    assert found == slices == [32_003, 32_032 // 2, 32_064 // 4, 32_128 // 8]


@pytest.mark.parametrize(
    ("config", "world_size", "block_size", "num_bytes"),
    [(QWEN3_06B, 1, 256, 29_360_128), (SEVENTY_B, 8, 16, 655_360)],
    ids=["Qwen3 0.6B", "70B at TP 8"],
)
def test_golden_block_bytes(config: dict[str, Any], world_size: int, block_size: int, num_bytes: int) -> None:
    """GOLDEN A4: 28 MiB and 655,360 bytes."""
    assert sizes.block_bytes(model(config), world_size, block_size, "bfloat16") == num_bytes


def test_golden_guide_block_bytes() -> None:
    """GOLDEN A4: the allocation guide's 80 layers of 8 heads of 64."""
    assert lay_out([KvKind(window=None, num_kv_heads=8, head_dim=64)] * 80).block_bytes(16, 2) == 2_621_440


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_quantised_blocks_are_those_of_the_cache(dtype: str) -> None:
    """Oracle: the shape that the worker allocates."""
    kind = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[dtype]
    shape = KvCacheShape(layout=model(QWEN3_06B).kv_layout_on(2), block_size=16, dtype=kind)
    assert sizes.block_bytes(model(QWEN3_06B), 2, 16, dtype) == shape.block_bytes


def test_windows_let_blocks_go() -> None:
    """Oracle: by hand.  Every second of 28 layers sees 1,024 tokens: two groups of 14 layers, whose blocks of 16 tokens
    are half of one group's.  A document of 32,768 tokens takes 2,048 blocks of the full group; the other group takes
    blocks for the window, a tile of 128 and a chunk of 8,192, and one more; a mean document of 12,250 tokens decodes
    with 766 and 74."""
    windows = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "head_dim": None,
        "use_sliding_window": True,
        "sliding_window": 1_024,
        "layer_types": ["full_attention", "sliding_attention"] * 14,
    }
    full = {**windows, "layer_types": ["full_attention"] * 28}
    options: dict[str, Any] = {"workload": "long-doc", "gpu": "rtx4090", "block_size": 16}
    found, plain = (recommend(model(QWEN3_06B | more), **options) for more in (windows, full))
    assert found.block_bytes * 2 == plain.block_bytes and found.bytes_per_token == plain.bytes_per_token
    per_request = 2_048 + (1_024 + 128 + 8_192) // 16 + 1
    assert found.num_tokens == found.num_blocks * 32_768 // per_request
    assert found.expected_concurrency == pytest.approx(found.num_blocks / (766 + (1_024 + 128) // 16 + 1 + 1))
    assert found.longest_request == 32_768 and found.expected_concurrency > 1.7 * plain.expected_concurrency


def test_the_numbers_of_7b_for_chat_on_24_gb() -> None:
    """Oracle: by hand.  8 MiB a block (2 x 32 layers x 16 tokens x 32 heads x 128 x 2 bytes), 12.55 GiB of weights; 512
    + 256 / 2 tokens on average, 128 of them shared: 32 own blocks beside 8 shared ones."""
    found = recommend(model(SEVEN_B), workload="chat", gpu="rtx4090")
    assert found.fits and found.block_size == 16 and found.block_bytes == 8 << 20
    assert found.weight_bytes == 6_738_415_616 * 2 and found.requested_bytes == int(int(23.5 * GIB) * 0.9)
    rest = found.requested_bytes - found.weight_bytes - found.activation_bytes - found.overhead_bytes
    assert found.kv_cache_bytes == rest and found.num_blocks == rest // (8 << 20)
    assert found.expected_concurrency == pytest.approx((found.num_blocks - 8) / 32)
    assert found.max_num_seqs == int(found.expected_concurrency) // 8 * 8


@pytest.mark.parametrize("config", [SEVEN_B, THIRTEEN_B], ids=["7B", "13B"])
@pytest.mark.parametrize("workload", list(WORKLOADS))
@pytest.mark.parametrize("gpu", ["rtx4090", "a100-40g", "a100-80g"])
def test_the_document_s_table(config: dict[str, Any], workload: str, gpu: str) -> None:
    """Row C2: 7B and 13B for chat, code and long documents.  Oracle: a recommendation needs no more than the device
    has, holds the longest request, and passes the engine's own checks.  A refusal is right: 13B never fits in 24 GB at
    one rank, and 12,500 tokens never in 4,096 positions."""
    found = recommend(model(config), workload=workload, gpu=gpu, tensor_parallel_size=1)
    impossible = workload == "long-doc" or (config is THIRTEEN_B and gpu == "rtx4090")
    assert found.fits != impossible
    if not found.fits:
        assert found.problems and found.remedies and found.command is None and not found.options
        return
    used = found.weight_bytes + found.activation_bytes + found.overhead_bytes + found.num_blocks * found.block_bytes
    assert used <= found.requested_bytes <= GPU_GIB[gpu] * GIB
    assert found.num_tokens >= found.max_model_len and found.expected_concurrency >= 1
    EngineConfig(**found.options)
    assert found.command is not None and f"--max-num-seqs {found.max_num_seqs}" in found.command


def test_the_smallest_number_of_ranks_that_fits_is_found() -> None:
    """Oracle: 70B in 16 bits is 128.5 GiB: two H100 hold it, one does not; a remedy names the same number."""
    found = recommend(model(SEVENTY_B), gpu="h100")
    assert found.fits and found.tensor_parallel_size == 2
    refused = recommend(model(SEVENTY_B), gpu="h100", tensor_parallel_size=1)
    assert not refused.fits and "tensor_parallel_size 2" in refused.remedies


def test_a_request_that_is_too_long_for_the_pool_gets_remedies() -> None:
    """Oracle: one request of 40,960 tokens needs 4.4 GiB at 112 KiB a token; with half the bytes per value it fits."""
    question: dict[str, Any] = {"workload": "chat", "max_model_len": 40_960, "device_memory": "6GiB"}
    refused = recommend(model(QWEN3_06B), **question, tensor_parallel_size=1)
    assert not refused.fits and "40,960" in refused.problems[0]
    assert any("fp8" in remedy for remedy in refused.remedies)
    assert any("max_model_len" in remedy for remedy in refused.remedies)
    assert recommend(model(QWEN3_06B), **question, kv_cache_dtype="fp8", tensor_parallel_size=1).fits


def test_block_sizes_follow_lengths() -> None:
    """Oracle: half of the last block is at most 2 % of a mean request, where a size allows it."""
    assert {name: choose_block_size(workload.lengths) for name, workload in WORKLOADS.items()} == {
        "chat": 16,
        "code": 64,
        "long-doc": 64,
    }
    assert choose_block_size(Workload(name="w", prompt=900, output=200, longest=2000).lengths) == 32
    assert choose_block_size(Workload(name="w", prompt=20, output=10, longest=2000).lengths) == 8


def test_illegal_questions_are_refused() -> None:
    """Oracle: errors that name the value and the choices."""
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3.*Legal sizes"):
        recommend(model(SEVEN_B), gpu="h100", tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="did you mean rtx4090"):
        recommend(model(SEVEN_B), gpu="rtx409")
    with pytest.raises(ConfigError, match="did you mean long-doc"):
        recommend(model(SEVEN_B), gpu="h100", workload="longdoc")
    with pytest.raises(ConfigError, match="longest is 5"):
        Workload(name="w", prompt=10, output=10, longest=5)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: exit code 0 and the function's numbers as JSON; for a model that does not fit, exit code 1 and the
    reasons."""
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B))
    arguments = ["recommend", "--model", str(tmp_path), "--workload", "code"]
    assert main([*arguments, "--device-memory", "40GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    same = tp_engine.recommend(str(tmp_path), workload="code", device_memory="40GiB")
    assert found["num_blocks"] == same.num_blocks and found["options"] == same.options and found["fits"]
    assert main(["recommend", str(tmp_path), *arguments[3:], "--gpu", "t4", "-tp", "1"]) == 1
    printed = capsys.readouterr().out
    assert "It does not fit:" in printed and "tensor_parallel_size 2" in printed
    assert main([*arguments, "--gpu", "rtx4090", "--input-len", "1000", "--output-len", "100"]) == 0
    assert "1,050 tokens that a request holds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "vision", "message"),
    [
        ("qwen3-vl", {"hidden_size": "wide"}, "hidden_size is 'wide'; it must be a whole number from 1 to 65,536"),
        ("qwen3-vl", {"intermediate_size": [1]}, r"intermediate_size is \[1\]; it must be a whole number"),
        ("qwen3-vl", {"hidden_size": True}, "hidden_size is True; it must be a whole number"),
        ("qwen3-vl", {"depth": 10**9}, "depth is 1000000000; it must be a whole number from 1 to 512"),
        ("mistral3-vision", {"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number"),
        ("qwen3-vl", {"num_heads": "x"}, "cannot make the vision part .*num_heads"),
        ("qwen3-vl", {"num_heads": 0}, "cannot make the vision part .*division"),
    ],
)
def test_sizes_that_no_tower_has_are_refused_by_name(
    name: str, vision: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Oracle: an error that names the key, its value, the rule and a remedy, before anything as large is made."""
    config = image_config(name).to_dict()
    config["vision_config"] |= vision
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(IMAGE_FAMILIES[name].settings))
    with pytest.raises(ConfigError, match=f"(?s){message}.*(--hf-overrides|--limit-mm-per-prompt)"):
        recommend(str(tmp_path), device_memory="24GiB")


TOWERS = ("qwen3-vl", "qwen2.5-vl", "mistral3-vision", "gemma4-vision", "kimi-k2.5-vision")


@pytest.mark.parametrize("name", slow_but(["qwen3-vl"], TOWERS))
def test_a_tower_and_the_embeddings_of_images(name: str, tmp_path: Path) -> None:
    """Oracle: the tensors in the checkpoint; without them the tower has the same size, and without a processor's
    settings there is none.  The encoder cache is the engine's: so many rows as a step has tokens, DeepStack's too; and
    what the engine's own tower keeps of the largest image between two layers."""
    from safetensors import safe_open

    folder = make_image_model(tmp_path / "model", name)

    def ask() -> tp_engine.Recommendation:
        workload = Workload(name="short", prompt=64, output=64, longest=300)
        return recommend(str(folder), workload=workload, device_memory="24GiB", dtype="float32")

    found = ask()
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        names = [one for one in tensors.keys() if re.search("visual|vision|multi_modal|mm_projector", one)]  # noqa: SIM118
        stored = sum(tensors.get_tensor(one).nbytes for one in names)
    width = {"qwen3-vl": 4 * 64, "qwen2.5-vl": 128}.get(name, 64)
    vision = load_model_config(str(folder))[0].vision
    images = image_settings(EngineConfig(), vision, folder)
    assert vision is not None and images is not None
    vision = dataclasses.replace(vision, largest=images.rules().largest)
    between = build_tower(vision, dtype=torch.float32, device=torch.device("cpu")).unfinished_bytes
    between = between // vision.most_rows * min(vision.most_rows, 300)
    assert found.fits and found.image_bytes == found.max_num_batched_tokens * width * 4 + between
    assert "embeddings of images" in found.explain()
    settings = folder / "preprocessor_config.json"
    for file in (None, folder / "model.safetensors"):
        if file is not None:
            file.unlink()
        found = ask()
        settings.rename(folder / "away.json")
        assert (ask().image_bytes, ask().weight_bytes) == (0, found.weight_bytes - stored)
        (folder / "away.json").rename(settings)
