"""What the engine knows of a model before it reads a weight: its config.json, parsed and checked.  No torch."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tp_engine.config import QUANTIZATIONS
from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.checkpoint_files import CheckpointHeaders
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.families import named, read_spec
from tp_engine.model_config.mlp import ExpertsSpec, MlpSpec
from tp_engine.model_config.recurrent import RecurrentSpec
from tp_engine.model_config.source import CONFIG_FILE, MODEL_FILES, QUANTIZATION_FILES, read_json, resolve_model_folder
from tp_engine.model_config.spec import ModelSpec
from tp_engine.model_config.stored_model import fitted, says_dtype
from tp_engine.model_config.vision import read_vision
from tp_engine.options.hf_overrides import REMEDY, overridden
from tp_engine.system.units import round_up

MAX_WORLD_SIZE = 64
VOCAB_ALIGNMENT = 16
_NO_HEADS = ("", 0), ("", 0)  # of a layer that is an MLP alone


def read_model(config: Mapping[str, Any], model_impl: str = "auto") -> ModelSpec:
    """Parse a config.json.  ``model_impl`` is ``EngineConfig``'s.  Raises ``ConfigError`` for anything that is missing,
    wrong or not supported.

    A class of transformers that describes the model is asked in a child process, and its answer kept in the cache.
    """
    whole = named(ConfigJson(config))
    spec = read_spec(whole, model_impl)
    vision = read_vision(whole, spec.hidden_size)
    if vision is not None and vision.deep_layers >= spec.num_layers:
        raise ConfigError(
            f"config.json: deepstack_visual_indexes has {vision.deep_layers} entries, one for each of the first "
            f"layers, and there are {spec.num_layers} layers: there must be more of them"
        )
    if (
        vision is not None
        and vision.turns_by_place
        and (wrong := [r for r in spec.ropes if len(r.axes) != r.num_pairs])
    ):
        raise ConfigError(
            f"config.json: mrope_section is {list(wrong[0].sections)}; {wrong[0].num_pairs} pairs of a head turn, and "
            "each by one of time, row and column: the numbers must add up to that"
        )
    ignored = tuple(sorted(whole.unread.ignored))
    return dataclasses.replace(spec, vision=vision, ignored_keys=ignored, warnings=whole.unread.warnings)


def load_model_config(
    model: str,
    revision: str | None = None,
    files: Sequence[str] = MODEL_FILES,
    hf_overrides: Mapping[str, Any] | None = None,
    model_impl: str = "auto",
) -> tuple[ModelSpec, Path]:
    """Find ``model`` (a folder or a hub name) and parse its config.json, generation_config.json, and, where config.json
    says nothing of a quantisation, the first of ``QUANTIZATION_FILES``.

    Returns the spec and the local folder with the model's files; ``files`` are downloaded for a hub name.
    ``hf_overrides`` change keys of config.json; ``model_impl`` is that of ``read_model``.  Raises ``ConfigError``.
    """
    folder = resolve_model_folder(model, revision, files)
    values = read_json(folder / CONFIG_FILE)
    changes, headers = hf_overrides or {}, CheckpointHeaders(folder)
    if not values.get("quantization_config"):
        values |= _quantization_beside(folder, headers)
    try:
        values = overridden(values, changes)
        _check_effect(values, changes)
        config = read_model(values, model_impl)
    except ConfigError as error:
        raise ConfigError(str(error) if "--hf-overrides" in str(error) else f"{error} ({REMEDY})") from error
    config = fitted(config, headers, says_dtype=says_dtype(values))
    return _with_eos(config, folder, says_eos=_says_eos(values)), folder


def _check_effect(values: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for a change of a key that ``text_config`` has too, where it counts."""
    copies = ConfigJson(values).copies_of_text_part
    for name in copies:
        if changes.get(name) is not None:
            raise ConfigError(
                f"hf_overrides sets {name}={shown(changes[name])}, and text_config has {name} too, which alone counts: "
                f"""give it as --hf-overrides '{{"text_config": {{"{name}": VALUE}}}}'"""
            )


def _quantization_beside(folder: Path, headers: CheckpointHeaders) -> dict[str, Any]:
    """``quantization_config`` as the first of ``QUANTIZATION_FILES`` says that is there and of this checkpoint."""
    for name, (method, end) in QUANTIZATION_FILES.items():
        is_there = (folder / name).is_file()
        if is_there and (not headers.names or any(tensor.endswith(end) for tensor in headers.names)):
            return {"quantization_config": {"quant_method": method, **read_json(folder / name)}}
    return {}


def _with_eos(spec: ModelSpec, folder: Path, *, says_eos: bool) -> ModelSpec:
    """``spec`` with the ids of generation_config.json too, which go before transformers' default; none is outside of
    the vocabulary."""
    generation, extra = folder / "generation_config.json", tuple[int, ...]()
    if generation.is_file():
        extra = ConfigJson(read_json(generation), "generation_config.json").take_token_ids("eos_token_id")
    found = dict.fromkeys((*(spec.eos_token_ids if says_eos or not extra else ()), *extra))
    outside = [one for one in found if not 0 <= one < spec.vocab_size]
    warnings = spec.warnings
    if outside and (says_eos or extra):
        listed = ", ".join(map(str, outside))
        warnings += (
            f"eos_token_id {listed} is outside of the vocabulary of {spec.vocab_size}, so no output ends with it",
        )
    eos = tuple(one for one in found if one not in outside)
    return dataclasses.replace(spec, eos_token_ids=eos, warnings=warnings)


def _says_eos(values: Mapping[str, Any]) -> bool:
    inner = values.get("text_config")
    return "eos_token_id" in values or (isinstance(inner, dict) and "eos_token_id" in inner)


def resolve_dtype(model: ModelSpec, asked: str, *, is_gpu: bool, has_bfloat16: bool = True) -> str:
    """Return the type of weights and activations: ``asked``, or for ``auto`` the checkpoint's.

    A float32 checkpoint runs in 16 bits on GPUs, as in vLLM: bfloat16 has its range, and GPUs their speed.
    """
    if asked != "auto":
        return asked
    if model.dtype == "float32" and is_gpu:
        return "bfloat16" if has_bfloat16 else "float16"
    return model.dtype


def resolve_max_model_len(model: ModelSpec, requested: int | None) -> int:
    """Return the longest prompt plus output in tokens: ``requested``, or all of the model's positions."""
    if requested is None:
        return model.max_position
    if requested > model.max_position:
        raise ConfigError(
            f"max_model_len is {requested}; the model has {model.max_position} positions "
            f"({model.max_position_key}): ask for at most {model.max_position}, leave max_model_len out, or extend the "
            "context by YaRN with --hf-overrides, if the model is made for it"
        )
    return requested


def check_quantization_options(model: ModelSpec, quantization: str | None, kv_cache_dtype: str) -> None:
    """Raise ``ConfigError`` for options that contradict the checkpoint's own quantisation."""
    own = model.quantization
    if own is None:
        if quantization is not None and quantization not in QUANTIZATIONS:
            raise ConfigError(
                f"quantization is {quantization}, but the checkpoint's weights are not quantised; leave it out, or set "
                f"one of {', '.join(QUANTIZATIONS)} to quantise them while loading"
            )
        return
    if quantization not in (None, own.method.partition(" ")[0]):
        raise ConfigError(
            f"quantization is {quantization}, but the checkpoint's weights are quantised already ({own.method}); leave "
            "quantization out: they are served as they are"
        )
    if own.has_kv_scales and kv_cache_dtype == "fp8":
        raise ConfigError(
            f"kv_cache_dtype is fp8, and the checkpoint ({own.method}) has scales for an fp8 KV cache, which this "
            "engine does not apply: it measures a scale for each token and head. Set kv_cache_dtype to int8 or auto; "
            "or remove kv_cache_scheme and kv_cache_quant_algo from the checkpoint's configuration, and scales are "
            "measured"
        )


def with_rounded_inputs(model: ModelSpec) -> ModelSpec:
    """Return the model, whose linear layers round their inputs to the blocks that the checkpoint declares.

    Raises ``ConfigError`` if it declares none.
    """
    own = model.quantization
    if own is None:
        raise ConfigError("round_activations is set, but the checkpoint is not quantised; leave round_activations out")
    return dataclasses.replace(model, quantization=own.with_rounded_inputs())


def check_tensor_parallel(model: ModelSpec, world_size: int) -> None:
    """Raise ``ConfigError``, with the legal sizes, if the model cannot be split over ``world_size`` ranks."""
    problem = split_problem(model, world_size)
    if problem is None:
        return
    legal = [str(size) for size in range(1, MAX_WORLD_SIZE + 1) if split_problem(model, size) is None]
    raise ConfigError(
        f"tensor_parallel_size is {world_size}; {problem}. Legal sizes for this {model.architecture}: "
        f"{', '.join(legal)}"
    )


def split_problem(model: ModelSpec, world_size: int) -> str | None:
    """Return what forbids this world size.  The vocabulary is padded, so it fits every size."""
    if world_size < 1:
        return "it must be at least 1"
    for layer in model.distinct_layers:
        attention = layer.attention
        (name, num_heads), (shared_name, num_shared) = _NO_HEADS if attention is None else attention.heads
        if num_heads % world_size:
            return f"the {num_heads} {name} cannot be divided equally"
        if problem := next(filter(None, (_mlp_problem(mlp, world_size) for mlp in layer.mlps)), None):
            return problem
        if num_shared % world_size and world_size % num_shared:
            return f"the {num_shared} {shared_name} can be neither divided equally nor repeated equally often"
        if isinstance(attention, RecurrentSpec) and (problem := attention.split_problem(world_size)):
            return problem
    return None


def _mlp_problem(mlp: MlpSpec | ExpertsSpec, world_size: int) -> str | None:
    """Inner sizes of dense MLPs are divided equally; those of experts need not be."""
    if isinstance(mlp, ExpertsSpec):
        if mlp.inner_size < world_size:
            return f"the experts' inner size of {mlp.inner_size} is smaller than the number of ranks"
        return None if mlp.shared is None else _mlp_problem(mlp.shared, world_size)
    if mlp.inner_size % world_size:
        return f"the intermediate size of {mlp.inner_size} cannot be divided equally"
    return None


def padded_vocab_size(vocab_size: int, world_size: int) -> int:
    """Rows of the vocabulary on all ranks together; each rank's share is a multiple of ``VOCAB_ALIGNMENT``."""
    return round_up(vocab_size, VOCAB_ALIGNMENT * world_size)
