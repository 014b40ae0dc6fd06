"""Write a checkpoint's linear weights in 4 bits, in the layout of AWQ or of GPTQ, by rounding to the nearest code.

A code stands for ``(code - zero) * scale``; each ``group`` inputs of an output share a scale and a zero.  Eight codes
make one int32, the first in its lowest bits.  The tensors of a layer, from a weight [out, in]::

              awq (with zeros)                                gptq (symmetric: all zeros are 8)
    qweight   [in, out / 8], along outputs in _AWQ_ORDER      [in / 8, out], along inputs
    qzeros    [in / group, out / 8], along outputs like these [in / group, out / 8], along outputs, zero - 1
    scales    [in / group, out] in float16                    the same
    g_idx                                                     [in], the group of each input

Embeddings, norms and the head keep their type.  So does a layer whose inputs are no multiple of the group.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PACKINGS = ("awq", "gptq")
Tensors = dict[str, torch.Tensor]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write_int4_checkpoint(source: Path, target: Path, packing: str, group: int = 128) -> Path:
    """Write the checkpoint of ``source`` to the new folder ``target``; other files are copied.  Returns ``target``.
    ``packing`` is one of ``PACKINGS``.  The number of outputs of every linear layer must be a multiple of 8."""
    target.mkdir()
    kept: set[str] = set()
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            found = _packed_file(load_file(path), packing, group, kept)
            save_file(found, target / path.name, metadata={"format": "pt"})
        elif path.is_file() and not path.name.endswith(".index.json"):
            shutil.copy(path, target / path.name)
    if len(list(target.glob("*.safetensors"))) != 1:
        raise ValueError(f"{source} must have its weights in one safetensors file")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_config(packing, group, sorted(kept))
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return target


def quantization_config(packing: str, group: int, kept: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint in which layers whose last name is in ``kept`` are not quantised."""
    if packing == "awq":
        names = ["lm_head", *kept]
        settings = {"zero_point": True, "version": "gemm", "modules_to_not_convert": names}
    else:
        settings = {"sym": True, "desc_act": False, "checkpoint_format": "gptq", "lm_head": False}
        settings |= {"dynamic": {f"-:.*\\.{name}": {} for name in kept}} if kept else {}
    return {"quant_method": packing, "bits": 4, "group_size": group} | settings


def round_to_codes(weight: torch.Tensor, group: int, *, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """(codes [in, out], zeros [in / group, out], both int32 of 0 to 15, float16 scales [in / group, out]) of a weight
    [out, in]."""
    values = weight.float().T.reshape(-1, group, weight.shape[0])
    low, high = values.amin(1).clamp(max=0), values.amax(1).clamp(min=0)
    width = 2 * torch.maximum(-low, high) if symmetric else high - low
    scales = (width / 15).clamp(min=1e-6).half()
    steps = scales.float()
    zeros = torch.full_like(steps, 8.0) if symmetric else (-low / steps).round().clamp(0, 15)
    codes = ((values / steps[:, None]).round() + zeros[:, None]).clamp(0, 15)
    return codes.flatten(0, 1).int(), zeros.int(), scales


def pack_along(codes: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 words of eight codes along ``dim``; ``order`` names the code that each four bits hold, from the lowest."""
    last = codes.long().movedim(dim, -1)
    eights = last.reshape(*last.shape[:-1], -1, 8)[..., list(order)]
    words = (eights << torch.arange(0, 32, 4, dtype=torch.int64, device="cpu")).sum(-1)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return signed.int().movedim(-1, dim).contiguous()


def _packed_file(tensors: Tensors, packing: str, group: int, kept: set[str]) -> Tensors:
    """The tensors of one file, quantised; adds to ``kept`` the last names of layers that stay as they are."""
    found: Tensors = {}
    for name, value in tensors.items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj") or value.ndim != 2:
            found[name] = value
        elif value.shape[1] % group:
            found[name] = value
            kept.add(layer.rpartition(".")[2])
        else:
            found |= {f"{layer}.{part}": one for part, one in pack_layer(value, packing, group).items()}
    return found


def pack_layer(weight: torch.Tensor, packing: str, group: int) -> Tensors:
    """The tensors of a layer by the last part of their names, from its weight [out, in]."""
    codes, zeros, scales = round_to_codes(weight, group, symmetric=packing == "gptq")
    if packing == "awq":
        words, zero_words = pack_along(codes, 1, _AWQ_ORDER), pack_along(zeros, 1, _AWQ_ORDER)
        return {"qweight": words, "qzeros": zero_words, "scales": scales}
    index = torch.arange(weight.shape[1], dtype=torch.int32, device="cpu") // group
    return {"qweight": pack_along(codes, 0), "qzeros": pack_along(zeros - 1, 1), "scales": scales, "g_idx": index}
