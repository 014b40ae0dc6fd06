"""The functions of the C sources: their prototypes alone say what each takes and returns."""

import ctypes
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
PLAYERS = "players.c"
_FUNCTION = re.compile(r"^(TAPED )?(int|int64_t|void) (\w+)\(([^)]*)\)\s*\{", re.MULTILINE)
_TYPES: dict[str, Any] = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float, "void": None}
_WORDS = {
    ctypes.c_void_p: ("void *", "pointer"),
    ctypes.c_int64: ("int64_t", "integer"),
    ctypes.c_float: ("float", "number"),
}


class Prototype(NamedTuple):
    """A function that other C files or Python may call; a tape can hold it if it ``is_taped``.

    It ``takes_threads`` if its last parameter is the number of threads that share its work.  ``names`` are those of its
    parameters, and ``items`` the C types that its pointers point to, ``""`` of numbers.
    """

    name: str
    result: Any
    parameters: tuple[Any, ...]
    is_taped: bool
    takes_threads: bool
    names: tuple[str, ...]
    items: tuple[str, ...]


@cache
def prototypes() -> tuple[Prototype, ...]:
    """Return the functions of all C files; pointers of all types are ``c_void_p``."""
    sources = (path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.c")))
    found = [match for source in sources for match in _FUNCTION.findall(source)]
    twice = [name for name, count in Counter(name for _, _, name, _ in found).items() if count > 1]
    assert not twice, f"two C files define {', '.join(twice)}: give one of them another name"
    return tuple(
        Prototype(name, _TYPES[result], *_parameters(given, bool(mark))) for mark, result, name, given in found
    )


def _parameters(given: str, is_taped: bool) -> tuple[Any, ...]:
    """What follows the result in a ``Prototype``."""
    words = [] if given == "void" else given.replace("*", " * ").split(",")
    kinds = tuple(ctypes.c_void_p if "*" in one else _TYPES[one.split()[-2]] for one in words)
    items = tuple(one.split("*")[0].split()[-1] if "*" in one else "" for one in words)
    return kinds, is_taped, given.endswith(" num_threads"), tuple(one.split()[-1] for one in words), items


def players() -> str:
    """Return ``PLAYERS``, a C file with a function for each that is taped: it takes the arguments from words."""
    lines = ['#include "tape.h"']
    for name, _, parameters, is_taped, *_ in prototypes():
        if is_taped:
            types = ", ".join(_WORDS[one][0] for one in parameters)
            words = ", ".join(f"a[{index}].{_WORDS[one][1]}" for index, one in enumerate(parameters))
            lines += [f"int {name}({types});", f"int play_{name}(const Word *a) {{ return {name}({words}); }}"]
    return "\n".join(lines) + "\n"
