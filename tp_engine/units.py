"""Bytes and token counts as people read them."""

from __future__ import annotations

import re

from tp_engine.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTORS = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*$", re.IGNORECASE)


def format_gib(num_bytes: int) -> str:
    """``5301600256`` -> ``'4.94 GiB'``."""
    return f"{num_bytes / GIB:.2f} GiB"


def parse_bytes(text: str | int) -> int:
    """``'2GiB'``, ``'512m'`` or a plain number -> bytes (binary units)."""
    if isinstance(text, int):
        return text
    match = _SIZE.match(text)
    if match is None:
        raise ConfigError(
            f"{text!r} is not a size; write a number of bytes, or a number with K, M, G or T, as in '2GiB'"
        )
    return int(float(match[1]) * _FACTORS[match[2].lower()])


def ceil_div(numerator: int, denominator: int) -> int:
    """Smallest integer not below ``numerator / denominator``."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` not below ``value``."""
    return ceil_div(value, multiple) * multiple
