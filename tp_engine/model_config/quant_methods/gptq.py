"""``gptq``: 4 or 8 bits, with or without zero points, columns grouped by their places or, with ``desc_act``, by their
activations."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.quantization import EVERY_MODULE, REGEX, Packing, QuantizationSpec, WeightScheme

METHODS = ("gptq",)
_PACKINGS: dict[str, Packing] = {"gptq": "gptq", "gptq_v2": "gptq_v2"}
# How the weights were found, and how other programs run them.  GPTQModel writes them beside AWQ's too.
NOTES = (
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment",
    "damp_percent", "dataset", "exllama_config", "max_input_length", "meta", "model_file_base_name",
    "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "mse", "offload_to_disk",
    "offload_to_disk_path", "pad_token_id", "quantizer", "static_groups", "tokenizer", "true_sequential",
    "use_cuda_fp16", "use_exllama", "version",
)  # fmt: skip


def read(config: ConfigJson) -> QuantizationSpec:
    """Rules of ``dynamic`` come before all others; of ``modules_in_block_to_quantize`` only the named are quantised."""
    config.skip(*NOTES)
    config.expect("is_marlin_format", bool, False)
    config.expect("pack_dtype", str, "int32")
    config.expect("method", str, "gptq")
    packing = _packing(config)
    usual: dict[str, Any] = {
        "bits": config.require("bits", int),
        "group_size": config.take("group_size", int, 128),
        "sym": config.take("sym", bool, True),
        "desc_act": config.take("desc_act", bool, False),
    }
    scheme = _scheme(usual, packing, config)
    changes = tuple(_dynamic(config, usual, packing))
    named = _named(config)
    head = scheme if config.take("lm_head", bool, False) else None
    rules = (*changes, ("lm_head", head), *((name, scheme) for name in named or (EVERY_MODULE,)))
    has_zeros = any(one is not None and one.has_zeros for _, one in rules)
    if has_zeros:  # all modules' zero points are read, although those of symmetric ones are the middle
        rules = tuple((name, None if one is None else replace(one, has_zeros=True)) for name, one in rules)
    return QuantizationSpec(
        method="gptq", rules=rules, skipped=("g_idx",) if has_zeros else ("g_idx", "qzeros"), is_found_by_tensors=True
    )


def _packing(config: ConfigJson) -> Packing:
    found = config.take_either(str, "checkpoint_format", "format") or "gptq"
    if found not in _PACKINGS:
        raise config.refusal(
            "checkpoint_format",
            found,
            f"this engine reads {' and '.join(_PACKINGS)}",
            "look for such a checkpoint, or save this one again by gptqmodel in that format",
        )
    return _PACKINGS[found]


def _scheme(values: dict[str, Any], packing: Packing, config: ConfigJson) -> WeightScheme:
    bits, group, has_zeros = values["bits"], values["group_size"], not values["sym"]
    if bits not in (4, 8):
        raise config.refusal("bits", bits, "GPTQ of 4 or 8 bits is read", "look for such a checkpoint")
    if group != -1 and group <= 0:
        raise config.refusal("group_size", group, "it must be positive, or -1 for whole rows", "use another checkpoint")
    return WeightScheme(
        packing=packing,
        kind="int4" if bits == 4 else "int8",
        group=None if group == -1 else group,
        has_zeros=has_zeros,
        scale_name="scales",
        order_name="g_idx" if values["desc_act"] and group != -1 else "",
    )


def _dynamic(config: ConfigJson, usual: dict[str, Any], packing: Packing) -> Iterator[tuple[str, WeightScheme | None]]:
    """``-:regex`` excludes modules, ``+:regex`` or ``regex`` gives them other values."""
    changes = config.take_object("dynamic")
    for pattern, own in ({} if changes is None else changes.objects()).items():
        if pattern.startswith("-:"):
            yield REGEX + pattern[2:], None
            continue
        changed = {name: own.take(name, type(value), value) for name, value in usual.items()}
        own.finish_strictly(*NOTES)
        yield REGEX + pattern.removeprefix("+:"), _scheme(changed, packing, own)


def _named(config: ConfigJson) -> tuple[str, ...]:
    """A list of names, or of lists of them, which were quantised one after the other."""
    found = config.take("modules_in_block_to_quantize", list) or []
    names = [name for one in found for name in (one if isinstance(one, list) else [one])]
    if not all(isinstance(name, str) for name in names):
        raise config.refusal("modules_in_block_to_quantize", found, "it must list names", "use another checkpoint")
    return tuple(dict.fromkeys(names))
