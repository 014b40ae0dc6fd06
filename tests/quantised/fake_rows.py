"""Rows rounded in blocks by compressed-tensors, the oracle of ``--round-activations``."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.nn.functional as F

from tests.quantised.formats import INPUT_SCALE

ARGUMENTS = {
    "nvfp4": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
    "mxfp4": {"num_bits": 4, "strategy": "group", "group_size": 32, "dynamic": True},
    "mxfp8": {"num_bits": 8, "strategy": "group", "group_size": 32, "dynamic": True},
}
_SCALE_OF_EXPERT = re.compile(r".*\.experts\.(?P<expert>\d+)\.(?P<module>\w+)\.(?P<kind>input_(global_)?scale)")


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


def scale_experts(folder: Path) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Give each stored expert its own scales of NVFP4's inputs, and return them: those of x and of what down reads.

    Up's is twice gate's: of both, the larger one holds.
    """
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    stored, found = load_file(path), dict[int, tuple[torch.Tensor, torch.Tensor]]()
    for name, values in stored.items():
        if (match := _SCALE_OF_EXPERT.fullmatch(name)) is None:
            continue
        expert, module, is_divisor = int(match["expert"]), match["module"], match["kind"] == "input_global_scale"
        scale = INPUT_SCALE * (expert + 1) / {"gate_proj": 2, "up_proj": 1, "down_proj": 4}[module]
        stored[name] = (1 / scale if is_divisor else scale).reshape(values.shape)
        found[expert] = INPUT_SCALE * (expert + 1), INPUT_SCALE * (expert + 1) / 4
    save_file(stored, path)
    return found
