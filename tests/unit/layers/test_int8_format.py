"""int8 weights: rows, products, errors, and whole models beside the same models unquantised."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.simulated_ranks import run_ranks
from tests.unit.models.test_models import BACKENDS, CPU, bind_caches, logits_of, prompts
from tp_engine.config import EngineConfig
from tp_engine.distributed.collectives import Communicator
from tp_engine.errors import ConfigError
from tp_engine.kernels.ops import int8_rows
from tp_engine.kernels.quantization import int8_products
from tp_engine.kernels.quantization.int8_products import (
    Int8ByRows,
    Int8Linear,
    check_int8,
    make_int8_linear,
    quantise_weight,
)
from tp_engine.kernels.quantization.int8_rows import TorchInt8Rows
from tp_engine.layers.quantization.base import Product
from tp_engine.layers.quantization.int8 import choose_int8_product
from tp_engine.model_config import load_model_config
from tp_engine.model_config.spec import ModelSpec
from tp_engine.models.causal_lm import build_model
from tp_engine.models.language_model import LanguageModel
from tp_engine.weights.loader import load_weights
from tp_engine.worker.effective_config import resolve

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative root mean square error of the logits; measured: 0.0088 to 0.0123.
LARGEST_ERROR = 0.02


def relative_rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (5, 64), (33, 1000)])
def test_rows_equal_their_twin(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Oracle: plain PyTorch; a code may differ by one where a value lies between two."""
    x, products, bias = torch.randn(shape).to(dtype), torch.randn(shape), torch.randn(shape[1]).to(dtype)
    (codes, scales), (expected_codes, expected_scales) = int8_rows().quantise(x), TorchInt8Rows().quantise(x)
    assert (codes.int() - expected_codes.int()).abs().max() <= 1
    assert (codes != expected_codes).sum() <= 1 + 0.01 * codes.numel()
    torch.testing.assert_close(scales, expected_scales)
    for offset in (None, bias):
        found = int8_rows().scale(products, scales, offset, dtype)
        torch.testing.assert_close(found, TorchInt8Rows().scale(products, scales, offset, dtype))


@pytest.mark.parametrize("rows", [int8_rows(), TorchInt8Rows()])
def test_rows_of_zeros_and_nan(rows: TorchInt8Rows) -> None:
    """Oracle: zeros give the bias, and NaN stays in its row."""
    x = torch.zeros(3, 40)
    x[1, 5], x[2, 0] = float("nan"), 1.0
    codes, scales = rows.quantise(x)
    assert (codes[0] == 128).all() and codes[2, 0] == 255
    found = rows.scale(torch.ones(3, 2), scales, None, torch.float32)
    assert found.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (31, 17), (96, 688)])
def test_product_is_exact_but_for_the_codes(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Oracle: float64 arithmetic on the codes and scales; rows together give the same as each alone."""
    weight, bias, x = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype), torch.randn(5, shape[1]).to(dtype)
    x[3] *= 100
    codes, scales = int8_rows().quantise(x)
    weight_codes, weight_scales = quantise_weight(weight)
    method = make_int8_linear(weight_codes, weight_scales)
    exact = (codes.double() - 128) @ weight_codes.double().T * weight_scales * scales.unsqueeze(1) + bias
    found = method(x, bias)
    assert found.dtype == dtype
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=2 * unit, atol=4e-6 * float(exact.abs().max()))
    for row in range(5):
        assert torch.equal(method(x[row : row + 1], bias)[0], found[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_rows_are_not_rounded(dtype: torch.dtype) -> None:
    """Oracle: float64 of the int8 weight.  The code's own choice is C up to four rows, whose error is the type's own,
    and oneDNN above, whose rows have 8 bits."""
    weight, x = quantise_weight(torch.randn(96, 688) / 26), torch.randn(5, 688).to(dtype)
    product = choose_int8_product(weight, dtype)
    exact = x.double() @ (weight.codes.double() * weight.scales.double().unsqueeze(1)).T
    for rows in (1, 4):
        assert relative_rms(product(x[:rows], None), exact[:rows]) <= max(torch.finfo(dtype).eps, 1e-6)
    assert torch.equal(product(x, None), make_int8_linear(*weight)(x, None))
    assert not product.is_recordable


def test_what_can_not_be_trusted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: value, rule and remedy, for a product that is missing or wrong; PyTorch never silently replaces it."""

    class Missing(Int8Linear):
        def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
            raise RuntimeError("not compiled with oneDNN")

    class Wrong(Int8Linear):
        def products(self, codes: torch.Tensor) -> torch.Tensor:
            return super().products(codes) * 1.001

    for broken in (Missing, Wrong):
        monkeypatch.setattr(int8_products, "Int8Linear", broken)
        monkeypatch.setattr(int8_products, "_trusted", {})
        int8_products._problem.cache_clear()
        with pytest.raises(ConfigError, match=r"quantization is int8, but .*shape.*; leave quantization out"):
            make_int8_linear(*quantise_weight(torch.randn(31, 17)))
        with pytest.raises(ConfigError, match=r"quantization is int8, but .*; leave quantization out"):
            check_int8("cpu")
    int8_products._problem.cache_clear()


def test_a_wrong_column_with_a_small_scale_is_seen() -> None:
    """Oracle: the error of each result by its own column's scale; beside the largest one's it would be nothing."""

    class Wrong(Int8Linear):
        def products(self, codes: torch.Tensor) -> torch.Tensor:
            found = super().products(codes)
            found[:, 5] *= 1.001
            return found

    codes, scales = quantise_weight(torch.randn(31, 64) * torch.logspace(0, -5, 31).unsqueeze(1))
    assert int8_products._agrees(Int8Linear(codes, scales), codes, scales)
    assert not int8_products._agrees(Wrong(codes, scales), codes, scales)


def test_values_and_devices_are_refused() -> None:
    """Oracle: value, rule and remedy, before anything starts."""
    assert resolve(EngineConfig(quantization="int8", device="cpu")).config.quantization == "int8"
    with pytest.raises(ConfigError, match="quantization is 'int2'; choose one of int8, fp8, int4, awq, gptq"):
        EngineConfig(quantization="int2")
    with pytest.raises(ConfigError, match="for CPUs, but the model runs on cuda; leave quantization out, or"):
        check_int8("cuda")


def build(config: ModelSpec, folder: Path, communicator: Communicator, quantization: str | None) -> LanguageModel:
    """A model with weights as models are initialised (standard deviation 0.02); the tiny checkpoints' are far wider."""
    model = build_model(
        config,
        communicator=communicator,
        dtype=torch.float32,
        device=CPU,
        backends=BACKENDS,
        max_model_len=128,
        quantization=quantization,
    )
    load_weights(dict(model.named_parameters()), config, folder, info=communicator.info, load_format="dummy")
    model.finish_loading()
    bind_caches(model.attention_layers)
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_error_of_a_model_is_bounded(architecture: str, world_size: int, checkpoint: Callable[..., Path]) -> None:
    """Oracle: the same model in float32; an error above zero proves the quantisation.  The plain weights are gone."""
    config, folder = load_model_config(str(checkpoint(architecture, hidden_size=128)))

    def logits(quantization: str | None) -> Callable[[Communicator], torch.Tensor | None]:
        def body(communicator: Communicator) -> torch.Tensor | None:
            model = build(config, folder, communicator, quantization)
            kept = {name for name, _ in model.named_parameters() if name.endswith("proj.weight")}
            assert quantization is None or not kept
            return logits_of(model, prompts(config))

        return body

    found, expected = (run_ranks(world_size, logits(quantization))[0] for quantization in ("int8", None))
    assert found is not None and expected is not None
    error = relative_rms(found, expected)
    assert 0.001 < error < LARGEST_ERROR


def test_output_head_keeps_its_type(checkpoint: Callable[..., Path]) -> None:
    """Oracle: the product with the embedding's own matrix, which is the head's too."""
    config, folder = load_model_config(str(checkpoint("llama", tie=True)))

    def body(communicator: Communicator) -> tuple[Product | None, torch.Tensor, torch.Tensor]:
        model = build(config, folder, communicator, "int8")
        hidden, matrix = torch.randn(4, config.hidden_size), model.embed_tokens(torch.arange(config.vocab_size))
        return model.lm_head.loaded, model.compute_local_logits(hidden), hidden @ matrix.T

    method, found, expected = run_ranks(1, body)[0]
    assert not isinstance(method, Int8ByRows)
    torch.testing.assert_close(found[:, : config.vocab_size], expected[:, : config.vocab_size])


def test_effective_configuration_names_it() -> None:
    """Oracle: the field, so that /server_info and the report of a start show it."""
    assert dataclasses.asdict(EngineConfig(quantization="int8"))["quantization"] == "int8"
