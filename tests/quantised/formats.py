"""The formats of quantised checkpoints: how each quantises a weight, packs it and describes itself in config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from tests.quantised.configs import (
    Json,
    Kept,
    describe_awq,
    describe_compressed_tensors,
    describe_fp8,
    describe_gptq,
    describe_modelopt,
    describe_mxfp4,
    describe_mxfp8,
    describe_quark,
    modelopt_files,
)
from tests.quantised.numbers import (
    Numbers,
    quantise_e4m3,
    quantise_int,
    quantise_mxfp4,
    quantise_mxfp8,
    quantise_nvfp4,
    quantise_ordered,
)
from tests.quantised.packing import (
    Tensors,
    pack_awq,
    pack_blocks_of_modelopt,
    pack_bytes,
    pack_gptq,
    pack_plain,
    pack_quantized,
)

INPUT_SCALE = torch.tensor(0.03125)
KV_SCALES = {"k_proj": "k_scale", "v_proj": "v_scale"}


@dataclass(frozen=True, kw_only=True)
class Format:
    """``quantise`` takes the weight and the group, ``describe`` the group and what is kept.

    ``files`` are further JSON files beside config.json; ``extra`` are tensors of modules by the last part of their name
    ("": of each); ``fused`` formats hold only gpt-oss's experts, and in ``ordered`` ones columns are in groups by their
    activations.
    """

    quantise: Callable[[torch.Tensor, int | None], Numbers]
    pack: Callable[[Numbers], Tensors]
    describe: Callable[[int | None, Kept], Json]
    group: int | None = None
    files: Callable[[int | None, Kept], dict[str, Json]] = lambda group, kept: {}
    extra: dict[str, Tensors] = field(default_factory=dict)
    fused: bool = False
    ordered: bool = False


def _int(weight: torch.Tensor, group: int | None, **options: Any) -> Numbers:
    return quantise_int(weight, group, **{"scale_type": torch.bfloat16, **options})


def _e4m3(weight: torch.Tensor, group: int | None, *, by: str, scale_type: torch.dtype = torch.float32) -> Numbers:
    block = {"tensor": (None, None), "channel": (1, None), "block": (group, group)}[by]
    return quantise_e4m3(weight, block, scale_type)


def _pack_fp4(numbers: Numbers, *, codes: str = "weight_packed", whole: str = "") -> Tensors:
    """``whole``: the name of the number for all, if there is one."""
    is_power = numbers.scales.dtype == torch.float8_e8m0fnu
    scales = numbers.scales.view(torch.uint8) if is_power else numbers.scales
    tensors = {codes: pack_bytes(numbers.codes), "weight_scale": scales}
    if numbers.divisor is not None:
        tensors[whole] = numbers.divisor.reshape(1)
    if numbers.factor is not None:
        tensors[whole] = numbers.factor
    return tensors


def _pack_gpt_oss(numbers: Numbers) -> Tensors:
    """Of one expert; the 16 bytes of a block are a dimension."""
    bytes_of_codes = pack_bytes(numbers.codes)
    return {
        "_blocks": bytes_of_codes.reshape(*bytes_of_codes.shape[:-1], -1, 16),
        "_scales": numbers.scales.view(torch.uint8),
    }


def _int_weights(bits: int, strategy: str, **more: Any) -> Json:
    return {"num_bits": bits, "type": "int", "strategy": strategy, **more}


_FLOAT8 = {"num_bits": 8, "type": "float"}
_FLOAT4 = {"num_bits": 4, "type": "float"}
_PER_TOKEN: Json = {"strategy": "token", "dynamic": True, "observer": None}
_STATIC: Json = {"": {"input_scale": INPUT_SCALE}}


def _pack(bits: int = 4, *, strategy: str = "group", group: int | None = 128, has_zeros: bool = False) -> Format:
    return Format(
        quantise=partial(_int, bits=bits, has_zeros=has_zeros),
        pack=pack_quantized,
        describe=partial(
            describe_compressed_tensors,
            layout="pack-quantized",
            weights=_int_weights(bits, strategy, symmetric=not has_zeros),
        ),
        group=group,
    )


def _gptq_format(bits: int = 4, *, sym: bool = True, version: int = 1, group: int | None = 128) -> Format:
    return Format(
        quantise=partial(_int, bits=bits, has_zeros=not sym, scale_type=torch.float16),
        pack=partial(pack_gptq, version=version),
        describe=partial(describe_gptq, bits=bits, sym=sym, version=version),
        group=group,
    )


def _ordered(how: Format, bits: int = 4, *, scale_type: torch.dtype, describe: Any, has_zeros: bool = False) -> Format:
    """``how`` with columns in groups by their activations."""
    quantise = partial(quantise_ordered, bits=bits, scale_type=scale_type, has_zeros=has_zeros)
    return replace(how, quantise=quantise, describe=describe, ordered=True)


def _modelopt_fp8(*, kv: bool = False) -> Format:
    cache = {name: {suffix: torch.tensor(0.5)} for name, suffix in KV_SCALES.items()}
    return Format(
        quantise=partial(_e4m3, by="tensor"),
        pack=partial(pack_plain, scale_shape=()),
        describe=partial(describe_modelopt, algorithm="FP8", kv=kv),
        files=partial(modelopt_files, algorithm="FP8", kv=kv),
        extra={**_STATIC, **(cache if kv else {})},
    )


def _float_quantized(strategy: str, weights_by: str, inputs: Json, *, group: int | None = None, **more: Any) -> Format:
    return Format(
        quantise=partial(_e4m3, by=weights_by, scale_type=torch.bfloat16),
        describe=partial(
            describe_compressed_tensors,
            layout="float-quantized",
            weights={**_FLOAT8, "strategy": strategy},
            inputs={**_FLOAT8, **inputs},
        ),
        group=group,
        **more,
    )


def _nvfp4_pack_quantized(inputs: Json | None, extra: dict[str, Tensors]) -> Format:
    return Format(
        quantise=lambda weight, group: quantise_nvfp4(weight, divides=True),
        pack=partial(_pack_fp4, whole="weight_global_scale"),
        describe=partial(
            describe_compressed_tensors,
            layout="nvfp4-pack-quantized",
            weights={**_FLOAT4, "strategy": "tensor_group"},
            inputs=inputs,
        ),
        group=16,
        extra=extra,
    )


def _mxfp8_format(describe: Callable[[int | None, Kept], Json], **more: Any) -> Format:
    return Format(quantise=lambda weight, group: quantise_mxfp8(weight), pack=pack_plain, describe=describe, **more)


def _modelopt_format(algorithm: str, quantise: Callable[[torch.Tensor, int | None], Numbers], pack: Any) -> Format:
    return Format(
        quantise=quantise,
        pack=pack,
        describe=partial(describe_modelopt, algorithm=algorithm),
        files=partial(modelopt_files, algorithm=algorithm),
    )


def _pack_rows(numbers: Numbers) -> Tensors:
    """A scale for each row, (rows,)."""
    return pack_plain(numbers, scale_shape=(-1,))


_QUARK_FP8: Json = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
_QUARK_ROWS: Json = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}
_QUARK_FP4: Json = {
    "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0",
    "scale_calculation_mode": "even",
}  # fmt: skip


FORMATS: dict[str, Format] = {
    "fp8-block": Format(
        quantise=partial(_e4m3, by="block"),
        pack=partial(pack_plain, scale_name="weight_scale_inv"),
        describe=partial(describe_fp8, activations="dynamic"),
        group=128,
    ),
    "fp8-tensor-static": Format(
        quantise=partial(_e4m3, by="tensor"),
        pack=partial(pack_plain, scale_shape=()),
        describe=partial(describe_fp8, activations="static"),
        extra=_STATIC,
    ),
    "fp8-tensor-dynamic": Format(
        quantise=partial(_e4m3, by="tensor"),
        pack=partial(pack_plain, scale_shape=()),
        describe=partial(describe_fp8, activations="dynamic"),
    ),
    "fp8-tensor-transformers": Format(
        quantise=partial(_e4m3, by="tensor"),
        pack=partial(pack_plain, scale_name="weight_scale_inv", scale_shape=()),
        describe=partial(describe_fp8, activations="static", is_of_transformers=True),
        extra={"": {"activation_scale": INPUT_SCALE}},
    ),
    "fp8-channel": _float_quantized("channel", "channel", _PER_TOKEN, pack=pack_plain),
    "fp8-ct-tensor": _float_quantized(
        "tensor",
        "tensor",
        {"strategy": "tensor", "dynamic": False},
        pack=partial(pack_plain, scale_shape=(1,)),
        extra={"": {"input_scale": INPUT_SCALE.reshape(1).bfloat16()}},
    ),
    "fp8-ct-block": _float_quantized(
        "block",
        "block",
        {"strategy": "group", "group_size": 128, "dynamic": True, "observer": None},
        group=128,
        pack=pack_plain,
    ),
    "modelopt-fp8": _modelopt_fp8(),
    "modelopt-fp8-kv": _modelopt_fp8(kv=True),
    "pack-quantized": _pack(),
    "pack-quantized-asym": _pack(has_zeros=True),
    "pack-quantized-channel": _pack(strategy="channel", group=None),
    "pack-quantized-8": _pack(8),
    "pack-quantized-8-channel": _pack(8, strategy="channel", group=None),
    "awq": Format(
        quantise=partial(_int, has_zeros=True, scale_type=torch.float16),
        pack=pack_awq,
        describe=describe_awq,
        group=128,
    ),
    "gptq": _gptq_format(),
    "gptq-asym": _gptq_format(sym=False),
    "gptq-channel": _gptq_format(group=None),
    "gptq-8": _gptq_format(8),
    "gptq-8-asym": _gptq_format(8, sym=False),
    "gptq-v2": _gptq_format(version=2),
    "gptq-v2-asym": _gptq_format(sym=False, version=2),
    "gptq-ordered": _ordered(
        _gptq_format(sym=False),
        scale_type=torch.float16,
        has_zeros=True,
        describe=partial(describe_gptq, sym=False, ordered=True),
    ),
    "gptq-8-ordered": _ordered(
        _gptq_format(8), 8, scale_type=torch.float16, describe=partial(describe_gptq, bits=8, ordered=True)
    ),
    "pack-quantized-ordered": _ordered(
        _pack(),
        scale_type=torch.bfloat16,
        describe=partial(
            describe_compressed_tensors,
            layout="pack-quantized",
            weights=_int_weights(4, "group", actorder="group"),
        ),
    ),
    "mxfp4": Format(
        quantise=lambda weight, group: quantise_mxfp4(weight),
        pack=_pack_gpt_oss,
        describe=describe_mxfp4,
        fused=True,
    ),
    "mxfp4-pack-quantized": Format(
        quantise=lambda weight, group: quantise_mxfp4(weight),
        pack=_pack_fp4,
        describe=partial(
            describe_compressed_tensors, layout="mxfp4-pack-quantized", weights={**_FLOAT4, "strategy": "group"}
        ),
        group=32,
    ),
    "nvfp4-pack-quantized": _nvfp4_pack_quantized(
        {**_FLOAT4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
        {"": {"input_global_scale": 1 / INPUT_SCALE.reshape(1)}},
    ),
    "nvfp4-pack-quantized-w4a16": _nvfp4_pack_quantized(None, {}),
    "nvfp4-modelopt": Format(
        quantise=lambda weight, group: quantise_nvfp4(weight, divides=False),
        pack=partial(_pack_fp4, codes="weight", whole="weight_scale_2"),
        describe=partial(describe_modelopt, algorithm="NVFP4"),
        files=partial(modelopt_files, algorithm="NVFP4"),
        group=16,
        extra=_STATIC,
    ),
    "mxfp8": _mxfp8_format(describe_mxfp8),
    "mxfp8-quantized": _mxfp8_format(
        partial(
            describe_compressed_tensors,
            layout="mxfp8-quantized",
            weights={**_FLOAT8, "strategy": "group", "scale_dtype": "torch.uint8"},
            inputs={**_FLOAT8, "strategy": "group", "group_size": 32, "dynamic": True},
        ),
        group=32,
    ),
    "modelopt-mxfp8": _modelopt_format("MXFP8", lambda weight, group: quantise_mxfp8(weight), pack_plain),
    "modelopt-fp8-channel": _modelopt_format("FP8_PER_CHANNEL_PER_TOKEN", partial(_e4m3, by="channel"), _pack_rows),
    "modelopt-fp8-block": _modelopt_format(
        "FP8_PB_WO", lambda weight, group: quantise_e4m3(weight, (128, 128)), pack_blocks_of_modelopt
    ),
    "modelopt-mxfp4": _modelopt_format(
        "W4A8_MXFP4_FP8", lambda weight, group: quantise_mxfp4(weight), partial(_pack_fp4, codes="weight")
    ),
    "quark-fp8": Format(
        quantise=partial(_e4m3, by="tensor"),
        pack=partial(pack_plain, scale_shape=()),
        describe=partial(describe_quark, weight=_QUARK_FP8, inputs=_QUARK_FP8),
        extra=_STATIC,
    ),
    "quark-fp8-channel": Format(
        quantise=partial(_e4m3, by="channel"),
        pack=_pack_rows,
        describe=partial(describe_quark, weight=_QUARK_ROWS, inputs={**_QUARK_ROWS, "ch_axis": 1, "is_dynamic": True}),
    ),
    "quark-mxfp4": Format(
        quantise=lambda weight, group: quantise_mxfp4(weight),
        pack=partial(_pack_fp4, codes="weight"),
        describe=partial(describe_quark, weight=_QUARK_FP4, inputs={**_QUARK_FP4, "is_dynamic": True}),
        group=32,
    ),
    "w8a8-int8": Format(
        quantise=lambda weight, group: _int(weight, None, bits=8),
        pack=pack_plain,
        describe=partial(
            describe_compressed_tensors,
            layout="int-quantized",
            weights=_int_weights(8, "channel"),
            inputs={"num_bits": 8, "type": "int", **_PER_TOKEN},
        ),
    ),
}
