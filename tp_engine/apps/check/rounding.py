"""The rounding of types and formats, for the twin: transformers' model with the engine's rounding.

The bounds of a check follow from the error of the twin against the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from tp_engine.model_config.quant_methods import input_blocks

Round: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Values -> the nearest ones of a format, in the same type."""

_E4M3_LARGEST = 448.0
_INT4_GROUP = 32
_TINY = 1e-30


def keep(values: torch.Tensor) -> torch.Tensor:
    """Round nothing."""
    return values


def _steps(values: torch.Tensor, largest: int) -> torch.Tensor:
    step = values.abs().amax(-1, keepdim=True).clamp_min(_TINY) / largest
    return (values / step).round().clamp(-largest, largest) * step


def int8_rows(values: torch.Tensor) -> torch.Tensor:
    """Round to 8 bits with a scale for each row (..., n)."""
    return _steps(values.float(), 127).to(values.dtype)


def int4_groups(values: torch.Tensor) -> torch.Tensor:
    """Round to 4 bits with a scale, in 255 parts of its row's largest, and a zero point, in sixteenths of a step, for
    each 32 columns."""
    columns = values.shape[-1]
    padded = torch.nn.functional.pad(values.float(), (0, -columns % _INT4_GROUP))
    groups = padded.unflatten(-1, (-1, _INT4_GROUP))
    lowest, highest = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    step = (highest - lowest).clamp_min(_TINY) / 15
    part = step.amax(-2, keepdim=True) / 255
    step = (step / part).round().clamp_min(1) * part
    zero = (lowest / step * 16).round() / 16
    rounded: torch.Tensor = ((groups / step - zero).round().clamp(0, 15) + zero) * step
    return rounded.flatten(-2)[..., :columns].to(values.dtype)


def e4m3_rows(values: torch.Tensor) -> torch.Tensor:
    """Round to 8-bit floats with a scale for each row."""
    step = values.float().abs().amax(-1, keepdim=True).clamp_min(_TINY) / _E4M3_LARGEST
    return ((values.float() / step).to(torch.float8_e4m3fn).float() * step).to(values.dtype)


def _blocks(values: torch.Tensor, group: int, float_of: _Float, *, has_powers: bool) -> torch.Tensor:
    """Round to floats of few bits, with a scale of any size, or a power of two, for each ``group`` columns."""
    columns, (bits, least, largest) = values.shape[-1], float_of
    groups = torch.nn.functional.pad(values.float(), (0, -columns % group)).unflatten(-1, (-1, group))
    step = groups.abs().amax(-1, keepdim=True).clamp_min(_TINY) / largest
    scaled = groups / (step.log2().ceil().exp2() if has_powers else step)
    unit = (scaled.abs().clamp_min(_TINY).log2().floor().clamp_min(least) - bits).exp2()
    rounded: torch.Tensor = (scaled / unit).round() * unit * (groups / scaled).nan_to_num(1.0)
    return rounded.flatten(-2)[..., :columns].to(values.dtype)


# Bits of the mantissa, the least exponent, the largest number.
_Float: TypeAlias = tuple[int, int, float]
_E2M1: _Float = (1, 0, 6.0)
_E4M3: _Float = (3, -6, _E4M3_LARGEST)
BLOCKS: Mapping[str, Round] = {
    "nvfp4": partial(_blocks, group=16, float_of=_E2M1, has_powers=False),
    "mxfp4": partial(_blocks, group=32, float_of=_E2M1, has_powers=True),
    "mxfp8": partial(_blocks, group=32, float_of=_E4M3, has_powers=True),
}
"""The blocks of rows; NVFP4's scales of 8 bits change a row's error little, so they are not rounded."""


def bfloat16(values: torch.Tensor) -> torch.Tensor:
    """Round to 16-bit floats of 8 bits of precision."""
    return values.bfloat16().to(values.dtype)


def float16(values: torch.Tensor) -> torch.Tensor:
    """Round to 16-bit floats of 11 bits of precision."""
    return values.half().to(values.dtype)


WEIGHTS: Mapping[str, Round] = {"int8": int8_rows, "int4": int4_groups, "fp8": e4m3_rows}
CACHE: Mapping[str, Round] = {"int8": int8_rows, "fp8": e4m3_rows, "bfloat16": bfloat16, "float16": float16}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """How an engine rounds: everything to ``dtype``; the decoder's ``weights``, the ``rows`` that linear layers
    multiply, the ``cache`` of keys and values, and the weights of the output ``head`` further."""

    dtype: torch.dtype
    weights: Round = keep
    rows: Round = keep
    cache: Round = keep
    head: Round = keep

    @property
    def is_exact(self) -> bool:
        """Whether the engine computes in float32 throughout."""
        return self.dtype is torch.float32 and self.weights is self.rows is self.cache is keep

    @property
    def is_rough(self) -> bool:
        """Whether something is rounded beyond ``dtype``."""
        return not self.weights is self.rows is self.cache is keep

    def in_dtype(self, values: torch.Tensor) -> torch.Tensor:
        """Round to ``dtype``."""
        return values.to(self.dtype).float()


FINER = Rounding(dtype=torch.float64)
"""Float64, except where transformers itself computes in float32: the measure of float32's error."""


def rounding_of(configuration: Mapping[str, Any], quantization: Mapping[str, Any] | None, device: str) -> Rounding:
    """What an engine with this effective configuration rounds, and a checkpoint with this
    ``quantization_config``."""
    chosen = configuration.get("quantization") if quantization is None else None
    rows: Round = keep
    on_gpu, found = device.startswith("cuda"), quantization or {}
    is_fp8 = found.get("quant_method") == "fp8" or found.get("quant_algo") == "FP8" or _rounds_rows_to(found, "float")
    if chosen == "int8" or _rounds_rows_to(quantization, "int"):
        rows = int8_rows
    elif on_gpu and (chosen == "fp8" or is_fp8):
        rows = e4m3_rows
    elif configuration.get("round_activations"):
        rows = BLOCKS[input_blocks(found)]
    cache = configuration.get("kv_cache_dtype", "auto")
    return Rounding(
        dtype=_DTYPES[configuration["dtype"]],
        weights=WEIGHTS.get(str(chosen), keep),
        rows=rows,
        head=int8_rows if chosen == "int4" else keep,
        cache=keep if cache == configuration["dtype"] else CACHE.get(cache, keep),
    )


def _rounds_rows_to(quantization: Mapping[str, Any] | None, kind: str) -> bool:
    groups = (quantization or {}).get("config_groups") or {}
    inputs = [one.get("input_activations") or {} for one in groups.values()]
    return any(one.get("type") == kind and one.get("num_bits") == 8 for one in inputs)
