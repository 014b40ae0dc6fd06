"""Quantise a tiny float32 checkpoint: the files as a format's makers write them, and a twin in float32."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.quantised.configs import Kept
from tests.quantised.formats import FORMATS, Format
from tests.quantised.numbers import Numbers, quantise_int
from tests.quantised.packing import Tensors

# Routers and the gates of shared experts are never quantised, nor are the gates of the delta rule, the weights of
# indexers, the output layer and what reads images.
KEPT_MODULES = re.compile(
    r"lm_head|.*\.(gate|router|router\.proj|shared_expert_gate|in_proj_(ba|b|a)|weights_proj)|.*\.(vision_tower|visual)\..*"
)
_KEPT_BUT_HEAD = re.compile(KEPT_MODULES.pattern.removeprefix("lm_head|"))
STACKED_EXPERTS = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")
SAME_NUMBERS = ("pack-quantized-asym", "awq", "gptq-asym", "gptq-v2-asym")


def compress(
    folder: Path,
    target: Path,
    twin: Path,
    name: str,
    *,
    group: int | None = None,
    kept_layers: Sequence[int] = (),
    with_patterns: bool = False,
    moves_experts: bool = False,
    kept_modules: str = "",
    with_head: bool = False,
) -> None:
    """Write the checkpoint ``folder`` in the format ``name`` of ``FORMATS``.

    ``target`` gets the quantised checkpoint, ``twin`` a float32 one with the weights that the codes stand for.
    ``group`` is the group or block size, if the format has one (None: its usual one).  The layers ``kept_layers`` stay
    as they are, which the configuration says ``with_patterns`` if the format has any.  Modules whose whole names match
    ``kept_modules`` stay too, and so does the output head unless ``with_head``.  Stacks of experts (experts, out, in)
    become modules for each expert, as in what compressors write; with ``moves_experts`` they are below ``moe``.

    Raises ``ValueError`` if a weight's columns are no multiple of the group.
    """
    how = FORMATS[name]
    if group is not None and how.group is None:
        raise ValueError(f"{name} has no groups: leave out group={group}")
    how = replace(how, group=group or how.group)
    folders = (folder, target, twin)
    usual = _KEPT_BUT_HEAD if with_head else KEPT_MODULES
    kept = re.compile(f"{usual.pattern}|{kept_modules}") if kept_modules else usual

    def quantise(weight: torch.Tensor) -> Numbers:
        return how.quantise(weight, how.group)

    _write(*folders, how, kept_layers, with_patterns, quantise, moves_experts, kept)


def compress_alike(folder: Path, targets: dict[str, Path], twin: Path, *, group: int = 32) -> None:
    """Write the same codes, scales and zero points in several packings, ``targets`` by a name of ``SAME_NUMBERS``."""

    def quantise(weight: torch.Tensor) -> Numbers:
        return quantise_int(weight, group, has_zeros=True, scale_type=torch.float16)

    for name, target in targets.items():
        if name not in SAME_NUMBERS:
            raise ValueError(f"{name} cannot hold 4-bit codes with zero points: choose from {SAME_NUMBERS}")
        _write(folder, target, twin, replace(FORMATS[name], group=group), (), False, quantise)


def compress_mixed(folder: Path, target: Path, twin: Path, *, joint_rows: Sequence[int] = ()) -> None:
    """As NVIDIA's Qwen3.6: attention and the delta rule in FP8, MLPs, experts and the output head in NVFP4.

    With ``joint_rows``, the rows of q, k and v in one module, these have a scale each, in one tensor.
    """
    fp8, fp4 = FORMATS["modelopt-fp8"], FORMATS["nvfp4-modelopt"]
    fp4 = replace(fp4, extra={})  # W4A16: without scales of inputs
    layers: dict[str, Any] = {}

    def pack(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        how = fp8 if "attn" in module else fp4
        stack = module.partition(".experts.")[0] + ".experts" if ".experts." in module else module
        layers[stack] = {"quant_algo": "FP8"} if how is fp8 else {"quant_algo": "W4A16_NVFP4", "group_size": 16}
        is_joint = bool(joint_rows) and module.endswith(("in_proj_qkv", "qkv_proj"))
        rows = list(torch.split(weight, list(joint_rows))) if is_joint else [weight]
        parts = [how.quantise(one, how.group) for one in rows]
        packed = [how.pack(one) | how.extra.get("", {}) for one in parts]
        whole = packed[0]
        if is_joint:
            scales = {name: torch.stack([one[name] for one in packed]) for name in whole if name.endswith("scale")}
            whole = {"weight": torch.cat([one["weight"] for one in packed]), **scales}
        return whole, torch.cat([one.weight() for one in parts])

    _write(
        folder,
        target,
        twin,
        fp4,
        (),
        False,
        lambda weight: fp4.quantise(weight, fp4.group),
        False,
        _KEPT_BUT_HEAD,
        pack,
    )
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
        "ignore": ["mtp*"],
        "producer": {"name": "modelopt", "version": "0.37.0"},
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    (target / "hf_quant_config.json").unlink(missing_ok=True)


def _write(
    folder: Path,
    target: Path,
    twin: Path,
    how: Format,
    kept_layers: Sequence[int],
    with_patterns: bool,
    quantise: Callable[[torch.Tensor], Numbers],
    moves_experts: bool = False,
    kept_modules: re.Pattern[str] = KEPT_MODULES,
    pack_module: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]] | None = None,
) -> None:
    from safetensors.torch import load_file

    stored: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    quantised: Tensors = {}
    floats: Tensors = {}
    kept = ["lm_head"]
    outside = tuple(f"model.layers.{layer}." for layer in kept_layers)

    def pack(module: str, weight: torch.Tensor) -> torch.Tensor:
        """The tensors of a quantised module; returns the weight that they stand for."""
        if pack_module is not None:
            own, values = pack_module(module, weight)
            quantised.update({f"{module}.{suffix}": one for suffix, one in own.items()})
            return values
        numbers = quantise(weight)
        own = how.pack(numbers) | how.extra.get("", {}) | how.extra.get(module.rpartition(".")[2], {})
        quantised.update({f"{module}.{suffix}": values for suffix, values in own.items()})
        return numbers.weight()

    for name, tensor in stored.items():
        module, _, last = name.rpartition(".")
        is_linear = last == "weight" and tensor.dim() == 2 and "embed" not in module
        is_stack = tensor.dim() == 3 and STACKED_EXPERTS.fullmatch(name) is not None
        if how.fused and is_stack:
            packed, floats[name] = _fused(tensor, how, quantise)
            quantised |= {name + suffix: values for suffix, values in packed.items()}
        elif is_stack:
            path = module.replace(".experts", ".moe.experts") if moves_experts else module
            floats[name] = torch.stack(
                [
                    torch.cat([pack(f"{path}.{number}.{part}", weight) for part, weight in _parts(last, one)])
                    for number, one in enumerate(tensor)
                ]
            )
        elif how.fused or not is_linear or kept_modules.fullmatch(module) or name.startswith(outside):
            if is_linear and module != "lm_head":
                kept.append(module)
            quantised[name] = floats[name] = tensor
        else:
            floats[name] = pack(module, tensor)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    what = Kept(kept, kept_layers, with_patterns)
    _save(twin, floats, {"config.json": config})
    config["quantization_config"] = how.describe(how.group, what)
    _save(target, quantised, {"config.json": config, **how.files(how.group, what)})


def _parts(name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The modules of an expert's stacked weight: gate rows come before up rows."""
    if name == "down_proj":
        return [(name, weight)]
    gate, up = weight.chunk(2)
    return [("gate_proj", gate), ("up_proj", up)]


def _fused(
    weight: torch.Tensor, how: Format, quantise: Callable[[torch.Tensor], Numbers]
) -> tuple[Tensors, torch.Tensor]:
    """gpt-oss's experts (experts, in, out), which are stored as (experts, out, in): packed, and their values."""
    numbers = [quantise(one.T.contiguous()) for one in weight]
    packed = [how.pack(one) for one in numbers]
    stacked = {suffix: torch.stack([one[suffix] for one in packed]) for suffix in packed[0]}
    return stacked, torch.stack([one.weight().T for one in numbers]).contiguous()


def _save(folder: Path, tensors: Tensors, files: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    owned = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(owned, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
