"""Bytes and token counts in the units that people write."""

import re

from tp_engine.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTORS = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*$", re.IGNORECASE)
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9}
_COUNT = re.compile(r"^(\d+(?:\.\d+)?)([kKmMgG]?)$")


def format_gib(num_bytes: int) -> str:
    """``5301600256`` -> ``'4.94 GiB'``."""
    return f"{num_bytes / GIB:.2f} GiB"


def shown_size(num_bytes: int) -> str:
    """``16777216`` -> ``'16 MiB'``; a number that is not a whole number of units stays in bytes."""
    unit = next((one for one in ((GIB, " GiB"), (MIB, " MiB"), (KIB, " KiB")) if num_bytes % one[0] == 0), (1, ""))
    return f"{num_bytes // unit[0]}{unit[1]}"


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


def parse_count(text: str | int) -> int:
    """Tokens: ``'32k'`` -> 32,000, ``'32K'`` -> 32,768, ``'25.6k'`` -> 25,600 (binary units take no fractions)."""
    if isinstance(text, int):
        return text
    match = _COUNT.match(text)
    if match is None or ("." in match[1] and match[2] not in _DECIMAL):
        raise ConfigError(
            f"{text!r} is not a count; write a whole number, or a number with k, m, g (thousands) or K, M, G (1024s)"
        )
    factor = _DECIMAL.get(match[2]) or _FACTORS[match[2].lower()]
    return round(float(match[1]) * factor)


def ceil_div(numerator: int, denominator: int) -> int:
    """``numerator / denominator``, rounded up."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """``value``, rounded up to a multiple of ``multiple``."""
    return ceil_div(value, multiple) * multiple
