"""PEFT's adapter_config.json -> ``AdapterSpec``: the rank and the scale of each module's pair of matrices.

A LoRA adapter (https://arxiv.org/abs/2106.09685) adds ``scale * B A x`` to the product of each module that it adapts.
What changes the base model in another way is refused by name, because it would give wrong answers in silence.  Fields
and their meaning are those of PEFT 0.21 (``LoraConfig``), matched as PEFT matches them (``get_pattern_key``).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.patterns import compile_pattern
from tp_engine.model_config.spec import ModelSpec
from tp_engine.model_config.unread_keys import is_nothing
from tp_engine.system.files import read_json

Value = TypeVar("Value")

_LARGEST = 1e9
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

# Stacks of experts' weights, as transformers names them.
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")

# Initialisations that subtract something from the base weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def _has_others(value: object) -> bool:
    names = value if isinstance(value, list) else [value] if value else []
    return any(str(name).rpartition(".")[2] not in EXPERT_PARAMETERS for name in names)


def _changes_base(value: object) -> bool:
    return isinstance(value, str) and value.lower().startswith(_CHANGES_BASE)


# Field -> whether its value is refused, and what it stands for.
_REFUSED: dict[str, tuple[Callable[[object], bool], str]] = {
    "bias": (lambda value: value not in (None, "none"), "trained biases"),
    "lora_bias": (bool, "biases of B"),
    "modules_to_save": (bool, "whole trained modules"),
    "use_dora": (bool, "DoRA"),
    "use_qalora": (bool, "QALoRA"),
    "use_bdlora": (bool, "BD-LoRA"),
    "velora_config": (bool, "VeLoRA"),
    "monteclora_config": (bool, "MonteCLoRA"),
    "kasa_config": (bool, "KaSA"),
    "arrow_config": (bool, "Arrow routing"),
    "alora_invocation_tokens": (bool, "activated LoRA"),
    "layer_replication": (bool, "replicated layers"),
    "trainable_token_indices": (bool, "trained tokens"),
    "target_parameters": (_has_others, "adapted parameters other than experts' stacks, such as a router's,"),
    "fan_in_fan_out": (bool, "transposed weights"),
    "megatron_config": (bool, "Megatron's layers"),
    "init_lora_weights": (_changes_base, "an initialisation that changes the base weights"),
}


# Fields that the file of weights repeats, or that are of the training alone.
_WITHOUT_EFFECT = (
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules",
    "task_type",
)  # fmt: skip
_READ = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Rank ``r`` and ``alpha`` of an adapter's modules; patterns, regular expressions of module names, have others.

    The first pattern that matches a whole name, or its end after a dot, decides.
    """

    r: int
    alpha: float
    uses_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        """Return the rank of the pair of ``module``."""
        return _of_pattern(self.rank_pattern, module, self.r)

    def scale_of(self, module: str) -> float:
        """Return what the product of the pair is multiplied by: alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA
        (https://arxiv.org/abs/2312.03732)."""
        rank, alpha = self.rank_of(module), _of_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / rank**0.5 if self.uses_rslora else alpha / rank


def read_adapter_config(folder: Path) -> AdapterSpec:
    """Return the spec of the adapter in ``folder``.  ``ConfigError`` names what is missing, malformed or not
    supported."""
    path = folder / ADAPTER_CONFIG
    try:
        given: Any = read_json(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); give the folder of a PEFT adapter, on every host of the engine"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(given, dict) or given.get("peft_type") != "LORA":
        kind = given.get("peft_type") if isinstance(given, dict) else given
        raise ConfigError(f"{path} has the peft_type {shown(kind)}; only 'LORA' can be served")
    for name, (is_refused, meaning) in _REFUSED.items():
        value = given.get(name)
        if is_refused(value):
            raise ConfigError(f"{path} has {name} {shown(value)}: {meaning} cannot be served")
    known = (*_REFUSED, *_WITHOUT_EFFECT, *_READ)
    for name, value in given.items():
        if name not in known and not name.startswith("unsloth") and not is_nothing(name, value):
            raise ConfigError(
                f"{path} has {name} {shown(value)}, a field that this engine does not know and that may change what "
                "the adapter does; remove it if it does not"
            )
    return AdapterSpec(
        r=_rank(path, "r", given.get("r")),
        alpha=_number(path, "lora_alpha", given.get("lora_alpha")),
        uses_rslora=bool(given.get("use_rslora")),
        rank_pattern={key: _rank(path, f"rank_pattern {key!r}", one) for key, one in _patterns(path, given, "rank")},
        alpha_pattern={
            key: _number(path, f"alpha_pattern {key!r}", one) for key, one in _patterns(path, given, "alpha")
        },
    )


def check_expert_adapters(model: ModelSpec, config: EngineConfig) -> None:
    """Raise ``ConfigError`` if ``config`` asks for adapters of routed experts that cannot be served."""
    if not config.lora_experts:
        return
    layers = [layer.experts for layer in model.distinct_layers if layer.experts is not None]
    if not layers:
        problem = f"this {model.architecture} has none"
    elif config.device != "cpu":
        problem = "they have no kernel for GPUs"
    elif model.quantization is not None or config.quantization is not None:
        problem = "only unquantised experts can have them"
    elif any(one.bias or any(stored.kind == "transposed" for stored in one.stored) for one in layers):
        problem = f"experts of this {model.architecture} have biases or transposed stacks, which cannot have them"
    else:
        return
    raise ConfigError(f"lora_experts is set, for adapters of routed experts, and {problem}: leave lora_experts out")


def _patterns(path: Path, given: Mapping[str, Any], kind: str) -> list[tuple[str, Any]]:
    """The patterns of a field and their values; every key is a regular expression."""
    found = given.get(f"{kind}_pattern") or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path} has {kind}_pattern {shown(found)}; it must be an object")
    for key in found:
        compile_pattern(rf"(?:.*\.)?(?:{key})$", f"{path}: {kind}_pattern")
    return list(found.items())


def _rank(path: Path, name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{path} has {name} {shown(value)}; a rank is an integer, at least 1")
    return value


def _number(path: Path, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
        raise ConfigError(f"{path} has {name} {shown(value)}; it must be a number, at most {_LARGEST:g}")
    return float(value)


def _of_pattern(patterns: Mapping[str, Value], module: str, default: Value) -> Value:
    """The value of the first key that is ``module``, or its end after a dot."""
    return next((value for key, value in patterns.items() if re.match(rf"(?:.*\.)?(?:{key})$", module)), default)
