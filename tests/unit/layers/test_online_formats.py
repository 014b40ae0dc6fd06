"""Weights that are quantised when they are loaded: codes, errors, and whole models beside float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.simulated_ranks import run_ranks
from tests.unit.layers.test_int8_format import build, relative_rms
from tests.unit.models.test_models import logits_of, prompts
from tp_engine.distributed.collectives import Communicator
from tp_engine.kernels.quantization.weights import QuantisedWeight, dequantise
from tp_engine.layers.quantization.online import INT4_GROUP, quantise_e4m3, quantise_int4, quantise_int8
from tp_engine.model_config import load_model_config

Quantise = Callable[[torch.Tensor], QuantisedWeight]
# Half a step of each kind, as a share of the largest magnitude of its row or group.
STEPS = {"e4m3": 1 / 28, "int8": 1 / 254, "int4": 1 / 8}


@pytest.mark.parametrize("shape", [(5, 64), (7, 100), (3, 33), (2, 6, 96)])
@pytest.mark.parametrize("quantise", [quantise_e4m3, quantise_int8, quantise_int4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_errors_are_within_half_a_step(quantise: Quantise, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Oracle: the step that each row's, or group's, largest magnitude allows; zeros stay zero.  int4 clamps one end."""
    weight = torch.randn(shape).to(dtype)
    weight[..., 0, :] = 0
    found = quantise(weight)
    assert found.shape == shape
    values = dequantise(found)
    step = STEPS[found.kind] * weight.abs().amax().float()
    assert (values - weight.float()).abs().max() <= 1.02 * step
    assert (values[..., 0, :] == 0).all()
    if found.kind == "int4":
        assert found.scales is not None and found.scales.shape[-1] == -(-shape[-1] // INT4_GROUP)


def test_int4_beats_the_scale_of_the_largest_weight() -> None:
    """Oracle: llama.cpp's Q4_0, scale = w of the largest magnitude / -8; errors weighted by ``|w|``.  Each row is
    quantised by itself, wherever the weight is cut into parts."""
    weight = torch.randn(300, 1024)
    found = quantise_int4(weight)
    groups = weight.view(-1, INT4_GROUP)
    steps = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    simple = ((groups / steps).round().clamp(-8, 7) * steps).view_as(weight)
    error, simple_error = (((one - weight).square() * weight.abs()).sum() for one in (dequantise(found), simple))
    assert error < 0.95 * simple_error
    for row in (0, 255, 256, 299):
        assert torch.equal(dequantise(quantise_int4(weight[row : row + 1])), dequantise(found)[row : row + 1])


@pytest.mark.parametrize(
    "kind", ["random", "half of it zeros", "nine tenths of it zeros", "two of four", "skewed", "positive"]
)
def test_int4_is_never_worse_than_its_symmetric_form(kind: str) -> None:
    """Oracle: a step of an eighth of the largest weight, then the best one for these codes, with errors weighted by
    ``|w|``, and codes anew; the squared errors of each row."""
    generator = torch.Generator().manual_seed(0)
    weight, share = torch.randn(64, 1024, generator=generator), torch.rand(64, 1024, generator=generator)
    kept = {
        "half of it zeros": share > 0.5,
        "nine tenths of it zeros": share > 0.9,
        "two of four": torch.tensor([True, False, False, True]).repeat(256),
    }
    weight = {"skewed": weight.exp() - 1.3, "positive": weight.abs()}.get(kind, weight * kept.get(kind, 1))
    groups = weight.view(-1, INT4_GROUP)
    steps = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    codes = (groups / steps).nan_to_num().round().clamp(-8, 7)
    shares = groups.abs() * codes
    steps = ((shares * groups).sum(-1, keepdim=True) / (shares * codes).sum(-1, keepdim=True)).nan_to_num()
    symmetric = (groups / steps).nan_to_num().round().clamp(-8, 7) * steps
    error, symmetric_error = (
        (one.view_as(weight) - weight).square().sum(-1) for one in (dequantise(quantise_int4(weight)), symmetric)
    )
    assert (error <= symmetric_error).all(), (error / symmetric_error).max()


def test_int4_gives_back_weights_on_a_grid() -> None:
    """Oracle: the weights, which lie on 16 values from any lowest one on, as those of llama.cpp's Q4_1 do; a scale and
    a zero are rounded to 8 bits.  A row of equal weights, and groups of one sign and of zeros, are among them."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (40, 8, INT4_GROUP), generator=generator)
    codes[..., :2] = torch.tensor([0, 15])
    steps, lowest = torch.rand(2, 40, 8, 1, generator=generator) + torch.tensor([0.5, -1.2])[:, None, None, None]
    weight = (codes + 15 * lowest.clamp(-1, 0)) * steps
    weight[0], weight[1, 3], weight[2, 3] = 0.7, 0, weight[2, 3].abs()
    errors = (dequantise(quantise_int4(weight.flatten(1))).view_as(weight) - weight).abs()
    assert errors.max() <= 0.07 * steps.max(), errors.max()  # half a sixteenth, and 15 / 510
    assert (errors[1, 3] == 0).all()


@pytest.mark.parametrize(("quantization", "largest"), [("fp8", 0.05), ("int4", 0.15)])
@pytest.mark.parametrize(("architecture", "world_size"), [("llama", 1), ("qwen3", 2), ("qwen3-moe", 1), ("qwen2", 2)])
def test_error_of_a_model_is_bounded(
    architecture: str, world_size: int, quantization: str, largest: float, checkpoint: Callable[..., Path]
) -> None:
    """Oracle: the same model in float32; an error above zero proves the quantisation.  With experts, a token near a
    border goes to another one."""
    config, folder = load_model_config(str(checkpoint(architecture, hidden_size=128)))

    def logits(quantization: str | None) -> Callable[[Communicator], torch.Tensor | None]:
        return lambda communicator: logits_of(build(config, folder, communicator, quantization), prompts(config))

    found, expected = (run_ranks(world_size, logits(kind))[0] for kind in (quantization, None))
    assert found is not None and expected is not None
    error = relative_rms(found, expected)
    assert 0.001 < error < largest * (1.5 if architecture == "qwen3-moe" else 1.0), error


def test_int4_does_not_depend_on_the_order_of_sums() -> None:
    """Oracle: the columns of each group in another order, as another device adds them; codes follow their columns.

    Half of the groups have two weights of the largest magnitude, one of each sign, as bfloat16 weights often have.
    """
    weight = torch.randn(512, 8 * INT4_GROUP, generator=torch.Generator().manual_seed(0))
    groups = weight.view(-1, INT4_GROUP)
    groups[::2, 3] = groups[::2].abs().amax(-1) * 1.25
    groups[::2, 20] = -groups[::2, 3]
    order = torch.randperm(INT4_GROUP, generator=torch.Generator().manual_seed(1))
    one, other = (quantise_int4(rows.reshape(weight.shape)) for rows in (groups, groups[:, order]))
    assert one.scales is not None and other.scales is not None and torch.equal(one.scales, other.scales)
    codes = [torch.stack((each.codes & 15, each.codes >> 4), -1).view(-1, INT4_GROUP) for each in (one, other)]
    assert torch.equal(codes[0][:, order], codes[1])
