"""DeepSeek V4 as its vendor stores it: other names, FP8 in blocks, experts in FP4; and the blocks of its cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.models.test_models import oracle_logits, parallel_logits, prompts
from tp_engine.config import EngineConfig
from tp_engine.kernels.quantization.weights import E2M1_VALUES
from tp_engine.model_config import load_model_config
from tp_engine.worker.effective_config import resolve

_IN_FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "shared_experts.w1", "shared_experts.w2", "shared_experts.w3")


def is_in_fp8(module: str) -> bool:
    return module.endswith(_IN_FP8) and "compressor" not in module


def quantise(values: torch.Tensor, *, is_fp4: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What is stored of ``values`` (N, K), and the values of that."""
    rows, columns = (1, 32) if is_fp4 else (128, 128)
    shape = -(-values.shape[0] // rows), -(-values.shape[1] // columns)
    powers = torch.randint(-4, -1, shape).float().exp2()
    scales = powers.repeat_interleave(rows, 0)[: len(values)].repeat_interleave(columns, 1)[:, : values.shape[1]]
    stored = {"scale": powers.to(torch.float8_e8m0fnu)}
    if not is_fp4:
        stored["weight"] = (values / scales).to(torch.float8_e4m3fn)
        return stored, stored["weight"].float() * scales
    table = torch.tensor(E2M1_VALUES)
    codes = ((values / scales).unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8)
    stored["weight"] = (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
    return stored, table[codes.long()] * scales


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The quantised checkpoint by the vendor's names, and the same values as transformers stores them."""
    torch.manual_seed(0)
    plain = checkpoint("deepseek-v4", intermediate_size=64)
    quantised, values = (tmp_path_factory.mktemp(name) for name in ("quantised", "values"))
    stored: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        own = name.removeprefix("model.").replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_")
        module = own.removesuffix(".weight")
        exact[name] = tensor
        if is_fp4 := ".experts." in own or is_in_fp8(module):
            found, exact[name] = quantise(tensor, is_fp4=".experts." in own)
            stored |= {f"{module}.{part}": value for part, value in found.items()}
        if not is_fp4:
            stored[own] = tensor
    stored["mtp.0.norm.weight"] = torch.ones(3)  # of the draft head, which is not read
    save_file(stored, quantised / "model.safetensors")
    save_file(exact, values / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (values / "config.json").write_text(json.dumps(config))
    block = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic"}
    config |= {"expert_dtype": "fp4", "quantization_config": {**block, "weight_block_size": [128, 128]}}
    (quantised / "config.json").write_text(json.dumps(config))
    return quantised, values


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_vendors_format_equals_its_values(folders: tuple[Path, Path], world_size: int) -> None:
    """Oracle: transformers with the values that the codes stand for."""
    quantised, values = folders
    model, _ = load_model_config(str(quantised))
    found = parallel_logits(model, quantised, world_size)
    expected = oracle_logits(values, prompts(model))
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), atol=2e-3, rtol=0)


def test_blocks_that_grow_are_noted(checkpoint: Callable[..., Path]) -> None:
    """Oracle: the largest rate, 4 tokens; the operator reads why the blocks are not those that were asked for."""
    folder = str(checkpoint("deepseek-v4"))
    found = {size: resolve(EngineConfig(model=folder, device="cpu", block_size=size)) for size in (2, 4)}
    assert {size: one.config.block_size for size, one in found.items()} == {2: 4, 4: 4}
    notes = {size: [note for note in one.model.notes if "block_size" in note] for size, one in found.items()}
    assert notes[4] == [] and notes[2] == [
        "block_size is 4 instead of 2: a cached entry of this model stands for 4 tokens"
    ]
