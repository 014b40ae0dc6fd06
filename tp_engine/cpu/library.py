"""The compiled kernels in this process: the library, or the reason for none."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from tp_engine.cpu.compiling.cache import compiled_library
from tp_engine.cpu.compiling.gcc import BuildError
from tp_engine.cpu.compiling.levels import NATIVE, Level, best_level, processor_flags, shippable_levels
from tp_engine.cpu.compiling.shipped import is_shipped, shipped_library
from tp_engine.cpu.prototypes import prototypes
from tp_engine.cpu.self_check import disagreement
from tp_engine.cpu.tape import NativeFunction
from tp_engine.errors import ConfigError
from tp_engine.system import env
from tp_engine.system.log import get_logger

_logger = get_logger(__name__)


@cache
def native_library() -> ctypes.CDLL | None:
    """Return the kernels, compiled if need be; None, with one line in the log, if they are unavailable or switched
    off.  ``ConfigError`` if TP_ENGINE_NATIVE names no level, or one that this processor lacks."""
    wanted = env.NATIVE_KERNELS.read()
    if wanted == "0":
        _logger.info("native CPU kernels are switched off by TP_ENGINE_NATIVE")
        return None
    reason: object = None
    for level in _levels(wanted):
        try:
            library = _load(_path_of(level))
        except (RuntimeError, OSError, AttributeError) as error:  # RuntimeError: a BuildError, or no home folder
            reason = reason or error
            continue
        if found := disagreement(library):
            reason = reason or found
            continue
        setattr(library, _LEVEL, level.name)
        return library
    _logger.warning("no native CPU kernels, so PyTorch computes, 2 to 4 times slower: %s", reason)
    return None


def kernel_level() -> str | None:
    """Return the name of the level (``compiling/levels.py``) of the kernels in this process; None without kernels."""
    return getattr(native_library(), _LEVEL, None)


_LEVEL = "level_name"


def _levels(wanted: str) -> tuple[Level, ...]:
    """What is tried, in this order: what a wheel has brought, else what is compiled for exactly this processor."""
    if wanted == "1":
        best = best_level(processor_flags())
        return (NATIVE,) if best is None or not is_shipped(best) else (best, NATIVE)
    levels = {one.name: one for one in (*shippable_levels(), NATIVE)}
    if wanted not in levels:
        raise ConfigError(f"TP_ENGINE_NATIVE is {wanted!r}; it must be 0, 1, {', '.join(levels)}")
    if missing := levels[wanted].needs - processor_flags():
        raise ConfigError(
            f"TP_ENGINE_NATIVE is {wanted!r}, for processors with {', '.join(sorted(missing))}, which this one lacks; "
            "unset it"
        )
    return (levels[wanted],)


def _path_of(level: Level) -> Path:
    try:
        shipped = shipped_library(level)
    except BuildError as error:
        _logger.warning("%s", error)
        shipped = None
    return shipped or compiled_library(level)


def _load(path: Path) -> ctypes.CDLL:
    # The library names no OpenMP runtime, and finds the symbols of the one that is loaded.  torch makes its own global;
    # where one does not, this does.
    ctypes.CDLL(str(_loaded_openmp()), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    for one in prototypes():
        plain = getattr(library, one.name)
        plain.argtypes, plain.restype = one.parameters, one.result
        player = getattr(library, f"play_{one.name}") if one.is_taped else None
        setattr(library, one.name, NativeFunction(one, plain, player))
    return library


def _loaded_openmp() -> Path:
    """The OpenMP runtime that torch's own threads belong to."""
    assert torch.get_num_threads() > 0  # torch is loaded, and its runtime with it
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise BuildError(f"the loaded libraries cannot be listed: {error}") from error
    paths = {Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    found = sorted(path for path in paths if path.name.startswith(("libgomp", "libomp", "libiomp5")))
    torch_root = Path(torch.__file__).parents[1]
    for path in found:
        if path.is_relative_to(torch_root):
            return path
    if not found:
        raise BuildError("torch has loaded no OpenMP runtime")
    return found[0]
