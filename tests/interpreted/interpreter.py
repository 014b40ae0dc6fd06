"""Triton's interpreter with the rounding of a device, and with less work.

By itself the interpreter (of Triton 3.7) truncates to bfloat16 instead of rounding, loses a carry when it rounds to
8-bit floats, lacks products with scales, and takes the bits of bfloat16 for integers in matrix products and in
conversions from integers.  Its products are numpy's, whose library may add up each row of a tile in another order,
where a device treats all alike: here they are taken in float64 and rounded once.  It also patches the whole language at
each call of each function, and does other work in vain: most of its time.
"""

from __future__ import annotations

from functools import cache
from inspect import getmembers, ismodule
from math import prod
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir as tl_ir
from triton.runtime import interpreter

from tp_engine.kernels.quantization.weights import E2M1_VALUES

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

    def widened(handle: Any) -> np.ndarray:
        values: np.ndarray = handle.data
        if handle.dtype.scalar in (tl.bfloat16, tl.float8e4nv):
            values = convert_exactly(values, handle.dtype.scalar, tl.float32, None).view(np.float32)
        return values.astype(np.float64)

    def dot_of_floats(self: Any, a: Any, b: Any, added: Any, *rest: Any) -> Any:
        if not added.dtype.scalar.is_floating():
            return dot(self, a, b, added, *rest)
        products = np.matmul(widened(a), widened(b)) + added.data
        return interpreter.TensorHandle(products.astype(added.data.dtype), added.dtype.scalar)

    def microscaled(handle: Any, scales: Any, kind: Any) -> np.ndarray:
        """Rows of codes of the formats that ``dot_scaled`` takes, as numbers: two codes of 4 bits are a byte."""
        if kind != tl_ir.ScaleDotElemTypeTY.E2M1:
            values = widened(handle)
        else:
            low, high = handle.data & 15, handle.data >> 4
            values = np.array(E2M1_VALUES)[np.stack((low, high), -1).reshape(len(low), -1)]
        if scales is None:
            return values
        is_power = scales.dtype.scalar == tl.uint8
        factors = np.exp2(scales.data.astype(np.float64) - 127) if is_power else widened(scales)
        scaled: np.ndarray = values * factors.repeat(values.shape[1] // factors.shape[1], 1)
        return scaled

    def dot_of_microscaled(
        self: Any, a: Any, a_scale: Any, a_kind: Any, b: Any, b_scale: Any, b_kind: Any, *rest: Any
    ) -> Any:
        added, columns = rest[-1], interpreter.TensorHandle(b.data.T, b.dtype)
        products = np.matmul(microscaled(a, a_scale, a_kind), microscaled(columns, b_scale, b_kind).T) + added.data
        return interpreter.TensorHandle(products.astype(added.data.dtype), added.dtype.scalar)

    def cast_by_value(self: Any, source: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16 and np.issubdtype(source.data.dtype, np.integer) and source.dtype.is_int():
            source = interpreter.TensorHandle(source.data.astype(np.float32), tl.float32)
        return cast(self, source, target)

    interpreter._convert_float = convert_exactly
    builder.create_dot = dot_of_floats
    builder.create_dot_scaled = dot_of_microscaled
    builder.cast_impl = cast_by_value


def patch_the_language_once() -> None:
    """Mend this process's interpreter: a launch patches the language, and functions that its programs call need not.

    Left out of a call is only what the launch, or a call before that nothing undoes, has done already.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    of_launch: list[frozenset[str]] = []
    lasting: set[str] = set()

    @cache
    def modules_of(function: Any) -> frozenset[str]:
        seen = [value for value in function.__globals__.values() if ismodule(value)]
        return frozenset(module.__name__ for module in seen if module in (tl, tl.core))

    def patch_if_needed(function: Any) -> Any:
        modules = modules_of(function)
        if not of_launch:  # the launch itself, which undoes it at its end
            of_launch.append(modules)
            return patch(function)
        if modules <= of_launch[0] | lasting:
            return interpreter._LangPatchScope()
        lasting.update(modules - of_launch[0])
        return patch(function)

    def launch_and_forget(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return launch(self, *args, **kwargs)
        finally:
            of_launch.clear()

    interpreter._patch_lang = patch_if_needed
    interpreter.GridExecutor.__call__ = launch_and_forget


def search_for_builtins_once() -> None:
    """Mend this process's interpreter: a module of the language has the same builtins in each launch.

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


def skip_what_is_not_used() -> None:
    """Mend this process's interpreter: it would compute each sum of integers again to look for an overflow, of which
    it tells only in Triton's debugging mode, and make a table of all types to look one up."""
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    of_scalar = cache(interpreter._get_np_dtype)

    def type_in_numpy(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, tl.block_type) else of
        return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    interpreter._get_np_dtype = type_in_numpy


def size_blocks_once() -> None:
    """Mend this process's interpreter: each value has a type, which checks its shape and writes its own name, and wraps
    each number of the shape.  All that is the same for each shape and name of an element's type."""
    make = tl.block_type.__init__
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape))
        if key not in known:
            make(self, element_ty, shape)
            known[key] = self.__dict__ | {"sizes": sizes_of(self.shape)}
        self.__dict__.update(known[key])
        self.element_ty = element_ty

    def sizes_of(shape: Any) -> tuple[Any, Any]:
        return tl.constexpr(prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])

    of_scalar = sizes_of(())

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.sizes if type.is_block() else of_scalar

    tl.block_type.__init__, tl.tensor.__init__ = make_block_type, make_tensor


def leave_operands_alike_as_they_are() -> None:
    """Mend this process's interpreter: operands of one type need no common one, and those of one shape no common shape.

    A builtin is called without a check that the interpreter has given it what it always gives.
    """
    semantic, same = interpreter.interpreter_semantic, tl.dtype.__eq__
    with_one_type, with_one_shape = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value

    def to_one_type(left: Any, right: Any, *flags: bool) -> Any:  # the fourth: a division, which may change the type
        are_values = len(flags) < 4 and isinstance(left, tl.tensor) and isinstance(right, tl.tensor)
        if are_values and left.dtype is right.dtype and not left.dtype.is_ptr():
            return to_one_shape(left, right)
        return with_one_type(left, right, *flags)

    def to_one_shape(left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        if one.is_block() == other.is_block() and (not one.is_block() or one.shape.values == other.shape.values):
            return left, right
        return with_one_shape(left, right)

    def patch_attribute(package: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        builtin = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return builtin(*args, **kwargs)

        scope.set_attr(package, name, call)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = to_one_type, to_one_shape
    tl.dtype.__eq__ = lambda self, other: self is other or same(self, other)
    interpreter._patch_attr = patch_attribute


def mend_interpreter() -> None:
    """Do all of the above, once in a process."""
    size_blocks_once()
    leave_operands_alike_as_they_are()
    patch_the_language_once()
    search_for_builtins_once()
    skip_what_is_not_used()
    round_as_a_device_does()
