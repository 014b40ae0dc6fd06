"""Rows rounded in blocks by compressed-tensors, the oracle of ``--round-activations``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

ARGUMENTS = {
    "nvfp4": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
    "mxfp4": {"num_bits": 4, "strategy": "group", "group_size": 32, "dynamic": True},
    "mxfp8": {"num_bits": 8, "strategy": "group", "group_size": 32, "dynamic": True},
}


def fake_rows(x: torch.Tensor, kind: str, scale: torch.Tensor | None, num_shards: int = 1) -> torch.Tensor:
    """``x`` (..., in) float32, rounded; each of ``num_shards`` equal shares of the columns has groups of its own."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    scale_type = torch.float8_e4m3fn if kind == "nvfp4" else torch.uint8
    arguments = QuantizationArgs.model_validate({"type": "float", "scale_dtype": scale_type, **ARGUMENTS[kind]})
    group, divisor = arguments.group_size, None if scale is None else 1 / scale.reshape(1)
    assert group is not None
    parts = x.reshape(-1, x.shape[-1] // num_shards)
    padded = F.pad(parts, (0, -parts.shape[1] % group))
    groups = padded.reshape(len(parts), -1, group)
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments, global_scale=divisor)
    found: torch.Tensor = fake_quantize(padded, scales, zeros, arguments, global_scale=divisor)
    return found[:, : parts.shape[1]].reshape(x.shape)
