"""Levels of processors: the instructions that a build of the kernels may use.

The width of a vector decides the layout of packed weights, so a level is a whole library and not a choice inside one.
A library for instructions that the processor lacks would kill the process when it is called (SIGILL cannot be caught),
so a level is chosen from the processor's flags before anything is loaded.
"""

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_V2 = {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BFLOAT16_MATRICES = {"amx_bf16", "bf16"}  # x86-64, arm64


@dataclass(frozen=True, slots=True)
class Level:
    """A build for processors whose /proc/cpuinfo ``needs`` names, compiled with ``flags``; ``machine`` as ``uname -m``
    says it, "" for the one that compiles."""

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: frozenset[str]


# The best first; a processor that has a level has those of its machine after it.  The best is tuned for AMD's: gcc's
# generic order of reads from a panel makes a single row's product 2 to 4 % slower there.
LEVELS = (
    Level(
        "v4-bf16",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi", "-mtune=znver3"),
        frozenset(_V4 | {"avx512_bf16", "avx512vbmi"}),
    ),
    Level("v4", "x86_64", ("-march=x86-64-v4", "-mtune=generic"), frozenset(_V4)),
    Level("v3", "x86_64", ("-march=x86-64-v3", "-mtune=generic"), frozenset(_V3)),
    Level(
        "armv8.2",
        "aarch64",
        ("-march=armv8.2-a+fp16",),
        frozenset({"asimd", "asimdhp", "asimdrdm", "atomics", "crc32", "fphp"}),
    ),
)
# Any processor, this one exactly: never in a wheel.
NATIVE = Level("native", "", ("-march=native",), frozenset())


@cache
def processor_flags() -> frozenset[str]:
    """Return the instruction sets of the first processor, as Linux names them; empty where /proc does not tell."""
    try:
        first = _CPUINFO.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in first.splitlines())
    return frozenset(
        word for name, _, words in lines if name.strip() in ("flags", "Features") for word in words.split()
    )


def best_level(flags: frozenset[str], machine: str | None = None) -> Level | None:
    """Return the best level for a processor with ``flags``; None if it has none of them.

    ``machine``: of which kind, as ``uname -m`` says it; None: this one's.
    """
    fitting = (one for one in LEVELS if one.machine == (machine or platform.machine()) and one.needs <= flags)
    return next(fitting, None)


def shippable_levels() -> tuple[Level, ...]:
    """Return the levels that a wheel built on this machine holds."""
    return tuple(one for one in LEVELS if one.machine == platform.machine())


def multiplies_bfloat16_matrices() -> bool:
    """Return whether the processor has instructions for matrices of bfloat16, which oneDNN uses and the C files do
    not."""
    return bool(processor_flags() & _BFLOAT16_MATRICES)
