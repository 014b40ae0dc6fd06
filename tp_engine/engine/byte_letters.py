"""The letters that stand for bytes in byte-level vocabularies, as in GPT-2's."""

import itertools
from functools import cache


@cache
def byte_letters() -> tuple[str, ...]:
    """Return the letter of each byte: itself if it is printable, else one of those from 256 on."""
    others = itertools.count(256)
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))
