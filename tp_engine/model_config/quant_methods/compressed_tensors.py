"""``compressed-tensors``: groups of modules, each with its arguments and its format (llm-compressor, RedHatAI).

Inputs in the blocks of NVFP4, MXFP4 and MXFP8 are kept as a part of the scheme, if weights are in the same; others
before packed weights are left as they are, which is more exact.
"""

from dataclasses import dataclass, replace
from typing import Literal

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.quantization import (
    EVERY_MODULE,
    REGEX,
    Activations,
    Blocks,
    CodeKind,
    Packing,
    QuantizationSpec,
    WeightScheme,
)

METHODS = ("compressed-tensors",)
KV_SCALES = ("k_scale", "v_scale")
_LINEAR = "Linear"
_IRRELEVANT = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_KINDS: dict[tuple[str, int], CodeKind] = {
    ("int", 4): "int4",
    ("int", 8): "int8",
    ("float", 8): "e4m3",
    ("float", 4): "e2m1",
}


@dataclass(frozen=True, slots=True)
class _Format:
    """What a format may hold: kinds of codes, what a scale covers, and the blocks in which inputs may be."""

    packing: Packing
    kinds: tuple[CodeKind, ...]
    strategies: tuple[str, ...]
    group: int | None = None
    input_blocks: Blocks | None = None


_PACKED: Packing = "pack-quantized"
_FORMATS = {
    "pack-quantized": _Format(_PACKED, ("int4", "int8"), ("channel", "group")),
    "float-quantized": _Format("plain", ("e4m3",), ("channel", "tensor", "block")),
    "int-quantized": _Format("plain", ("int8",), ("channel", "tensor")),
    "naive-quantized": _Format("plain", ("e4m3", "int8"), ("channel", "tensor")),
    "nvfp4-pack-quantized": _Format("nvfp4", ("e2m1",), ("tensor_group",), 16, "nvfp4"),
    "mxfp4-pack-quantized": _Format("mxfp4-packed", ("e2m1",), ("group",), 32, "mxfp4"),
    "mxfp8-quantized": _Format("mxfp8", ("e4m3",), ("group",), 32, "mxfp8"),
}
_MIXED = "mixed-precision"


def read(config: ConfigJson) -> QuantizationSpec:
    """Ignored modules come first, then targets by name, then those by class."""
    config.skip("quantization_status", "global_compression_ratio", "version")
    _refuse_sparsity(config)
    if config.take_object("transform_config") is not None:
        raise config.refusal(
            "transform_config",
            "not empty",
            "rotations of activations are not computed here",
            "look for a checkpoint that was made without transforms (no SpinQuant, no QuIP)",
        )
    usual = config.take("format", str)
    groups = config.take_object("config_groups")
    if groups is None:
        raise config.refusal("config_groups", None, "it must say how weights are stored", "use a complete checkpoint")
    by_name: list[tuple[str, WeightScheme | None]] = []
    by_class: list[tuple[str, WeightScheme | None]] = []
    for group in groups.objects().values():
        scheme = _read_group(group, usual)
        for target in group.take_names("targets"):
            _check_target(group, target)
            rules, pattern = (by_class, EVERY_MODULE) if target == _LINEAR else (by_name, target)
            rules.append((pattern, scheme))
    ignored = config.take_names("ignore")
    has_zeros = any(scheme is not None and scheme.has_zeros for _, scheme in by_name + by_class)
    return QuantizationSpec(
        method="compressed-tensors",
        rules=(*((name, None) for name in ignored), *by_name, *by_class),
        skipped=(
            "weight_shape",
            "weight_g_idx",
            "input_scale",
            "input_global_scale",
            "input_zero_point",
            *(() if has_zeros else ("weight_zero_point",)),
            *KV_SCALES,
        ),
        has_kv_scales=has_kv_scales(config),
    )


def has_kv_scales(config: ConfigJson) -> bool:
    """Return whether ``kv_cache_scheme`` says that the checkpoint has scales for an fp8 KV cache."""
    scheme = config.take_object("kv_cache_scheme")
    if scheme is None:
        return False
    kind, bits = scheme.take("type", str, "float"), scheme.take("num_bits", int, 8)
    if (kind, bits) != ("float", 8):
        raise config.refusal(
            "kv_cache_scheme", f"{kind} of {bits} bits", "scales of a KV cache are for fp8", "use another checkpoint"
        )
    scheme.skip("strategy", "symmetric", "group_size", "block_structure", "actorder", *_IRRELEVANT)
    found = scheme.take("dynamic", bool, False)
    scheme.finish_strictly()
    return not found


def _refuse_sparsity(config: ConfigJson) -> None:
    sparsity = config.take_object("sparsity_config")
    if sparsity is not None and sparsity.take("format", str, "dense") != "dense":
        raise config.refusal(
            "sparsity_config",
            sparsity.peek("format"),
            "sparse weights are not read",
            "look for a checkpoint that is quantised without sparsity (no 2:4 in its name)",
        )


def _check_target(group: ConfigJson, target: str) -> None:
    """Class names begin with a capital."""
    is_class = not target.startswith(REGEX) and "." not in target and target[:1].isupper()
    if is_class and target != _LINEAR:
        raise group.refusal(
            "targets", target, f"of classes, only {_LINEAR} can be quantised here", "look for another checkpoint"
        )


def _read_group(group: ConfigJson, usual: str | None) -> WeightScheme:
    name = group.take("format", str, None if usual == _MIXED else usual)
    form = _FORMATS.get(name or "")
    if form is None:
        raise group.refusal("format", name, f"this engine reads {', '.join(_FORMATS)}", "look for such a checkpoint")
    if group.take("output_activations", dict):
        raise group.refusal(
            "output_activations", "not null", "outputs stay as they are", "look for a checkpoint without them"
        )
    weights = group.take_object("weights")
    if weights is None:
        raise group.refusal("weights", None, "a group must quantise weights", "look for another checkpoint")
    scheme = _read_weights(weights, form)
    if form.packing == "plain":
        return replace(scheme, activations=_read_inputs(group))
    return replace(scheme, input_blocks=_read_input_blocks(group, form))


def _read_weights(weights: ConfigJson, form: _Format) -> WeightScheme:
    kind = _kind(weights, form)
    if weights.peek("dynamic"):
        raise weights.refusal(
            "dynamic", weights.peek("dynamic"), "weights must have stored scales", "use another checkpoint"
        )
    order = weights.peek("actorder")
    if order not in (None, False, "weight", "static", "group") or (order == "group" and form.packing != _PACKED):
        rule = "it must be null, weight, static, or, of packed integers, group"
        raise weights.refusal("actorder", order, rule, "look for such a checkpoint")
    weights.skip("dynamic", "actorder", *_IRRELEVANT)
    symmetric = weights.take("symmetric", bool, True)
    if not symmetric and form.packing != _PACKED:
        raise weights.refusal(
            "symmetric", symmetric, "only packed integers may have zero points", "look for a symmetric checkpoint"
        )
    group, row_block = _grid(weights, form)
    weights.finish_strictly()
    return WeightScheme(
        packing=form.packing,
        kind=kind,
        group=group,
        row_block=row_block,
        has_zeros=not symmetric,
        order_name="weight_g_idx" if order == "group" and group is not None else "",
    )


def _kind(weights: ConfigJson, form: _Format) -> CodeKind:
    kind, bits = (weights.take("type", str, "int") or "").lower(), weights.take("num_bits", int, 8) or 0
    found = _KINDS.get((kind, bits))
    if found is None or found not in form.kinds:
        known = " or ".join(f"{kind} of {bits} bits" for (kind, bits), one in _KINDS.items() if one in form.kinds)
        raise weights.refusal("num_bits", f"{kind} of {bits} bits", f"it must be {known}", "look for such a checkpoint")
    return found


def _grid(weights: ConfigJson, form: _Format) -> tuple[int | None, int | None]:
    """Columns and rows that one scale covers."""
    size = weights.take("group_size", int)
    block = weights.take_block("block_structure")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = (weights.take("strategy", str) or implied).lower()
    if strategy not in form.strategies:
        raise weights.refusal(
            "strategy",
            strategy,
            f"it must be {' or '.join(form.strategies)} in this format",
            "look for such a checkpoint",
        )
    if strategy == "block":
        if block is None:
            raise weights.refusal("block_structure", None, "blocks need their size", "use a complete checkpoint")
        return block[1], block[0]
    if strategy in ("channel", "tensor"):
        return None, 1 if strategy == "channel" else None
    if size is None or size <= 0 or form.group not in (None, size):
        rule = "it must be positive" if form.group is None else f"it must be {form.group} in this format"
        raise weights.refusal("group_size", size, rule, "look for such a checkpoint")
    return size, 1


def _read_input_blocks(group: ConfigJson, form: _Format) -> Blocks | None:
    """The blocks in which inputs were rounded: those of the weights, with scales that are found while running."""
    inputs = group.take_object("input_activations")
    if inputs is None or form.input_blocks is None:
        return None
    strategy, size = str(inputs.peek("strategy")).lower(), inputs.peek("group_size")
    code = _KINDS.get((str(inputs.peek("type") or "int").lower(), inputs.peek("num_bits") or 8))
    # NVFP4 has one stored scale beside those of the blocks, which are local then.
    dynamic = "local" if form.input_blocks == "nvfp4" else True
    is_same = code in form.kinds and strategy in form.strategies and size == form.group
    return form.input_blocks if is_same and inputs.peek("dynamic") == dynamic else None


def _read_inputs(group: ConfigJson) -> Activations | None:
    """How 8-bit weights' inputs were quantised."""
    inputs = group.take_object("input_activations")
    if inputs is None:
        return None
    kind, bits = inputs.take("type", str, "int"), inputs.take("num_bits", int, 8)
    strategy, dynamic = inputs.take("strategy", str, "tensor"), inputs.peek("dynamic")
    inputs.skip("dynamic", "group_size", "block_structure", "actorder", *_IRRELEVANT)
    weights = group.peek("weights") or {}
    if (kind, bits) != (weights.get("type", "int"), 8):
        raise inputs.refusal(
            "num_bits",
            f"{kind} of {bits} bits",
            "inputs must be 8 bits of the weights' type",
            "look for such a checkpoint",
        )
    if not inputs.take("symmetric", bool, True):
        raise inputs.refusal("symmetric", False, "inputs have no zero points here", "look for a symmetric checkpoint")
    inputs.finish_strictly()
    ways: dict[tuple[str | None, object], Literal["token", "tensor", "group"]] = {
        ("token", True): "token",
        ("tensor", True): "token",
        ("tensor", False): "tensor",
        ("group", True): "group",
    }
    if (strategy, bool(dynamic)) not in ways:
        raise inputs.refusal(
            "strategy", strategy, "it must be token or group with dynamic, or tensor", "look for such a checkpoint"
        )
    return ways[strategy, bool(dynamic)]
