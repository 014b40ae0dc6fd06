"""How linear weights are kept: one file per format.

A checkpoint's own quantisation (``ModelSpec.quantization``) decides, module by module; for any other checkpoint the
option ``quantization`` does, whose values are ``QUANTIZATIONS``.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

from tp_engine.kernels.candidates import DEFAULTS, Choices
from tp_engine.kernels.quantization.int8_products import check_int8
from tp_engine.layers.quantization.base import LinearFormat
from tp_engine.layers.quantization.dense import Dense
from tp_engine.layers.quantization.int8 import Int8
from tp_engine.layers.quantization.online import Online, quantise_e4m3, quantise_int4, quantise_int8
from tp_engine.layers.quantization.ordered import Ordered
from tp_engine.layers.quantization.quantised import Quantised
from tp_engine.model_config.quantization import WeightScheme
from tp_engine.model_config.spec import ModelSpec

HEAD = "lm_head"


# Each name: the format of linear layers, and that of the output head.
QUANTIZATIONS: dict[str, tuple[Callable[..., LinearFormat], Callable[..., LinearFormat]]] = {
    "int8": (Int8, Dense),
    "fp8": (partial(Online, quantise_e4m3, quantises_activations=True), Dense),
    "int4": (partial(Online, quantise_int4), partial(Online, quantise_int8)),
}
_CHECKS = {"int8": check_int8}  # of a device's type


def check_quantization(name: str | None, device_type: str) -> None:
    """Raise ``ConfigError`` unless ``device_type`` can hold linear weights in the format ``name``."""
    if name in _CHECKS:
        _CHECKS[name](device_type)


def choose_formats(
    quantization: str | None,
    spec: ModelSpec | None = None,
    *,
    tp_invariant: bool = False,
    choices: Choices = DEFAULTS,
) -> Callable[[Sequence[str]], LinearFormat]:
    """The function from the names of stored modules to the format of the linear layer that is made of them;
    ``choices`` are those of the device."""
    if spec is not None and spec.quantization is not None:
        return _formats_of_checkpoint(spec, choices)
    if quantization is None:
        dense = Dense(is_invariant=tp_invariant, choices=choices)
        return lambda names: dense
    make, make_head = QUANTIZATIONS[quantization]
    body, head = make(choices=choices), make_head(choices=choices)
    return lambda names: head if list(names) == [HEAD] else body


def _format_of_scheme(scheme: WeightScheme, choices: Choices) -> LinearFormat:
    return Ordered(scheme, choices) if scheme.order_name else Quantised(scheme, choices)


def _formats_of_checkpoint(spec: ModelSpec, choices: Choices) -> Callable[[Sequence[str]], LinearFormat]:
    dense, of_scheme = Dense(choices=choices), cache(partial(_format_of_scheme, choices=choices))

    def format_of(names: Sequence[str]) -> LinearFormat:
        scheme = None if spec.is_tied and list(names) == [HEAD] else spec.scheme_of(*names)
        return dense if scheme is None else of_scheme(scheme)

    return format_of
