"""``auto-round``: Intel's AutoRound, whose tensors are those of GPTQ or of AWQ."""

from collections.abc import Iterator
from dataclasses import replace

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.quantization import EVERY_MODULE, REGEX, QuantizationSpec, WeightScheme

METHODS = ("auto-round",)
_GPTQ, _AWQ = "auto_gptq", "auto_awq"
_BITS = {_GPTQ: (4, 8), _AWQ: (4,)}
_PLAIN_BITS = 16
# How the weights were found, and how other programs run them.
_NOTES = (
    "act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym", "amp", "autoround_version", "backend",
    "batch_size", "damp_percent", "dataset", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input",
    "gradient_accumulate_steps", "iters", "low_cpu_mem_usage", "low_gpu_mem_usage", "lr", "minmax_lr", "model_dtype",
    "model_free", "nsamples", "provider", "scale_dtype", "seqlen", "static_kv_dtype", "super_bits",
    "super_group_size", "true_sequential",
)  # fmt: skip


def read(config: ConfigJson) -> QuantizationSpec:
    """Modules of ``extra_config`` come first, then the blocks that are named, or all modules but the output head."""
    act_bits = config.take("act_bits", int, _PLAIN_BITS) or _PLAIN_BITS
    if act_bits < _PLAIN_BITS:
        raise config.refusal("act_bits", act_bits, "activations of few bits are not read", "look for w4a16 or w8a16")
    config.skip(*_NOTES)
    packing = _packing(config)
    scheme = _scheme(config, packing)
    head = scheme if config.take("lm_head", bool, False) else None
    blocks = _blocks(config)
    rules = (*_changes(config, packing), ("lm_head", head), *((name, scheme) for name in blocks or (EVERY_MODULE,)))
    has_zeros = any(one is not None and one.has_zeros for _, one in rules)
    if has_zeros:  # as in gptq.py
        rules = tuple((name, None if one is None else replace(one, has_zeros=True)) for name, one in rules)
    skipped = ("g_idx",) if has_zeros else ("g_idx", "qzeros")
    return QuantizationSpec(method="auto-round", rules=rules, skipped=skipped, is_found_by_tensors=True)


def _packing(config: ConfigJson) -> str:
    found = config.take("packing_format", str, f"auto_round:{_GPTQ}") or ""
    name = found.removeprefix("auto_round:")
    if name not in _BITS:
        raise config.refusal(
            "packing_format", found, f"this engine reads {_GPTQ} and {_AWQ}", "export it again in one of these formats"
        )
    return name


def _scheme(config: ConfigJson, packing: str, usual: WeightScheme | None = None) -> WeightScheme | None:
    """Return the scheme of a module, absent keys as in ``usual``; None for one of 16 bits."""
    bits = config.take("bits", int, None if usual is None else usual.bits)
    if bits == _PLAIN_BITS:
        config.skip("data_type", "group_size", "sym")
        return None
    if bits not in _BITS[packing]:
        rule = f"this engine reads {' and '.join(map(str, _BITS[packing]))} bits of {packing}"
        raise config.refusal("bits", bits, rule, "look for such a checkpoint")
    config.expect("data_type", str, "int")
    group = config.take("group_size", int, 128 if usual is None else usual.group or -1)
    if group is None or (group != -1 and group <= 0):
        raise config.refusal("group_size", group, "it must be positive, or -1 for whole rows", "use another checkpoint")
    is_symmetric = config.take("sym", bool, True if usual is None else not usual.has_zeros)
    return WeightScheme(
        packing="gptq" if packing == _GPTQ else "awq",
        kind="int4" if bits == 4 else "int8",
        group=None if group == -1 else group,
        has_zeros=packing == _AWQ or not is_symmetric,  # AWQ's tensors always have zero points
        scale_name="scales",
    )


def _changes(config: ConfigJson, packing: str) -> Iterator[tuple[str, WeightScheme | None]]:
    """``extra_config``: modules, or expressions for their whole names, with other values."""
    usual = _scheme(config, packing)
    changes = config.take_object("extra_config")
    for name, own in ({} if changes is None else changes.objects()).items():
        scheme = _scheme(own, packing, usual)
        own.finish_strictly(*_NOTES, "quantized", "fixed_by_user", "in_blocks", "tmp_dtype")
        is_expression = any(mark in name for mark in "*+[(|\\^$")
        yield (f"{REGEX}(?:{name})$" if is_expression else name), scheme


def _blocks(config: ConfigJson) -> tuple[str, ...]:
    """The names of the blocks that are quantised: a list, which may hold lists, or one text with commas."""
    names: dict[str, None] = {}
    for key in ("block_name_to_quantize", "to_quant_block_names"):
        found = config.peek(key)
        config.skip(key)
        listed = found.split(",") if isinstance(found, str) else found or []
        listed = listed if isinstance(listed, list) else [listed]
        flat = [name for one in listed for name in (one if isinstance(one, list) else [one])]
        if not all(isinstance(name, str) for name in flat):
            raise config.refusal(key, found, "it must list names", "use another checkpoint")
        names |= dict.fromkeys(name.strip() for name in flat)
    return tuple(names)
