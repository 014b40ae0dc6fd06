"""The compiled kernels in this process: the library, or the reason for none."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from tp_engine.cpu.build import BuildError, built_library
from tp_engine.cpu.prototypes import prototypes
from tp_engine.cpu.self_check import disagreement
from tp_engine.cpu.tape import NativeFunction
from tp_engine.system import env
from tp_engine.system.log import get_logger

_logger = get_logger(__name__)


@cache
def native_library() -> ctypes.CDLL | None:
    """Return the kernels, compiled if need be; None, with one line in the log, if they are unavailable or switched
    off."""
    if env.NATIVE_KERNELS.read() == "0":
        _logger.info("native CPU kernels are switched off by TP_ENGINE_NATIVE")
        return None
    try:
        library = _load(built_library(_loaded_openmp()))
    except (RuntimeError, OSError, AttributeError) as error:  # RuntimeError: a BuildError, or no home folder
        _logger.warning("no native CPU kernels, PyTorch computes instead: %s", error)
        return None
    if found := disagreement(library):
        _logger.warning("no native CPU kernels, PyTorch computes instead: %s", found)
        return None
    return library


def _load(path: Path) -> ctypes.CDLL:
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
