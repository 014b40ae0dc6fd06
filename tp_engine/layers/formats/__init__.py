"""How linear weights are kept: one file per format.  ``QUANTIZATIONS`` are the names that the options know."""

from __future__ import annotations

from collections.abc import Callable

from tp_engine.layers.formats.base import LinearFormat
from tp_engine.layers.formats.dense import Dense
from tp_engine.layers.formats.int8 import Int8, check_int8

# Each name: what to check on a kind of device, and the format.
QUANTIZATIONS: dict[str, tuple[Callable[[str], None], Callable[[], LinearFormat]]] = {"int8": (check_int8, Int8)}


def check_quantization(name: str | None, device_type: str) -> None:
    """Raise ``ConfigError`` unless linear weights can be kept so on ``device_type``."""
    if name is not None:
        QUANTIZATIONS[name][0](device_type)


def choose_formats(quantization: str | None) -> Callable[[str], LinearFormat]:
    """The format of the decoder's linear layer at each path."""
    chosen: LinearFormat = Dense() if quantization is None else QUANTIZATIONS[quantization][1]()
    return lambda path: chosen
