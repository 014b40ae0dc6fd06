"""The decorator for Triton kernels.

A kernel is a function of Triton's language: its arguments have no Python types, and no type checker knows what its
body means.  For a type checker ``jit`` is therefore ``typing.no_type_check``, and a kernel is Any; at run time it is
``triton.jit`` itself.  A kernel with options has both decorators::

    @triton.jit(do_not_specialize=["num_rows"])
    @no_type_check
    def some_kernel(x, num_rows, BLOCK: tl.constexpr): ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import no_type_check as jit
else:
    from triton import jit

__all__ = ["jit"]
