"""How linear weights are kept: one file per format.  ``QUANTIZATIONS`` are the names that the options know."""

from __future__ import annotations

from collections.abc import Callable

from tp_engine.layers.formats.base import LinearFormat
from tp_engine.layers.formats.dense import Dense
from tp_engine.layers.formats.int8 import Int8, check_int8

# Each name: the check of a device's type, and the format.
QUANTIZATIONS: dict[str, tuple[Callable[[str], None], Callable[[], LinearFormat]]] = {"int8": (check_int8, Int8)}


def check_quantization(name: str | None, device_type: str) -> None:
    """Raise ``ConfigError`` unless ``device_type`` can hold linear weights in the format ``name``."""
    if name is not None:
        QUANTIZATIONS[name][0](device_type)


def choose_formats(quantization: str | None) -> Callable[[str], LinearFormat]:
    """The format of the decoder's linear layer at each path."""
    chosen: LinearFormat = Dense() if quantization is None else QUANTIZATIONS[quantization][1]()
    return lambda path: chosen
