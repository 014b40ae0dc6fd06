"""Modules of other libraries made in a type that is not torch's default one.

Their constructors name no type, and torch has one default for all threads of a process, which is not the engine's to
change.  A mode of torch's functions is of the thread that enters it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CONVERSIONS = frozenset({"to", "type", "type_as", "view", "float", "double", "half", "bfloat16"})


class MadeIn(TorchFunctionMode):
    """Within, what torch would make in its default type is made in ``dtype``, whatever that default is: new tensors
    without a type of their own, and quotients of integers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``; again, with the type, if its result has the default one."""
        named = dict(kwargs or {})
        found = func(*args, **named)
        given = [one for value in (*args, *named.values()) for one in _each(value)]
        if not self._is_by_default(func, found, given):
            return found
        if any(isinstance(one, torch.Tensor) for one in given):
            return func(*map(self._converted, args), **{name: self._converted(value) for name, value in named.items()})
        return func(*args, **{**named, "dtype": self.dtype})

    def _is_by_default(self, func: Callable[..., Any], found: Any, given: Sequence[Any]) -> bool:
        """Whether ``found`` has the default type because nothing that was ``given`` says another."""
        return (
            isinstance(found, torch.Tensor)
            and found.dtype == torch.get_default_dtype() != self.dtype
            and getattr(func, "__name__", "") not in _CONVERSIONS
            and not any(map(_says_type, given))
        )

    def _converted(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._converted(one) for one in value]
        return value.to(self.dtype) if isinstance(value, torch.Tensor) else value


def _each(value: Any) -> Iterator[Any]:
    """A value, or those in its lists."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from _each(one)
    else:
        yield value


def _says_type(one: Any) -> bool:
    return isinstance(one, torch.dtype) or (isinstance(one, torch.Tensor) and one.is_floating_point())
