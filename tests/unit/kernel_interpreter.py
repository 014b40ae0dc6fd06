"""Run a module of kernel cases in Triton's interpreter, with the rounding of a device.

    TRITON_INTERPRET=1 python -m tests.unit.kernel_interpreter kernel_cases_layer_ops

By itself the interpreter (of Triton 3.7) truncates to bfloat16 instead of rounding, loses a carry when it rounds to
8-bit floats, and takes the bits of bfloat16 for integers in matrix products and in conversions from integers.  It also
searches the whole language for builtins at each call of each function, which takes half of the time.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from inspect import getmembers
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def round_as_a_device_does() -> None:
    """Mend this process's interpreter."""
    builder = interpreter.InterpreterBuilder
    convert, dot, cast = interpreter._convert_float, builder.create_dot, builder.cast_impl

    def convert_exactly(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source not in _TYPES or target not in _TYPES:
            converted: np.ndarray = convert(data, source, target, rounding)
            return converted
        values = torch.from_numpy(np.ascontiguousarray(data)).view(_TYPES[source])
        rounded = values.to(torch.float32).to(_TYPES[target]).view(_SAME_SIZE[_TYPES[target].itemsize])
        return rounded.numpy().reshape(data.shape)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        values = convert_exactly(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(values, tl.float32)

    def dot_of_floats(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def cast_by_value(self: Any, source: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16 and np.issubdtype(source.data.dtype, np.integer) and source.dtype.is_int():
            source = interpreter.TensorHandle(source.data.astype(np.float32), tl.float32)
        return cast(self, source, target)

    interpreter._convert_float = convert_exactly
    builder.create_dot = dot_of_floats
    builder.cast_impl = cast_by_value


def search_for_builtins_once() -> None:
    """Mend this process's interpreter: a module of the language has the same builtins in each call.

    Those that are interpreted already are no builtins any more, as without this function.
    """

    @cache
    def names_of(package: Any) -> tuple[str, ...]:
        return tuple(name for name, member in getmembers(package) if tl.core.is_builtin(member))

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name in names_of(package):
            if tl.core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtins


if __name__ == "__main__":
    search_for_builtins_once()
    round_as_a_device_does()
    importlib.import_module(f"tests.unit.{sys.argv[1]}").main(*sys.argv[2:])
