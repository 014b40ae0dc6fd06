"""Where a parameter's values come from: each parameter has its sources, and the loader follows them.

::

    stored tensor (rows, columns)            parameter (rows of several, columns of this rank)
    +---------------------------+            +-----------+
    |      | taken      |       |  decode    |           |
    |      +------------+       | ---------> |  target   |
    |                           |            |           |
    +---------------------------+            +-----------+

Several sources may fill one parameter, and several parameters may take parts of one stored tensor.  Elements without a
source are zero.

Which part of a dimension belongs to which rank::

    equal     [r * n, (r + 1) * n)                query heads, inner sizes
    blocks    as equal as whole blocks of up      experts' inner sizes (40 on 3 ranks: 8 16 16), and
              to 32 can be                        whole experts
    KV heads  those of the rank's KV heads        fewer heads than ranks repeat (K=2, W=4: 0 0 1 1)
    vocab     [r * n, (r + 1) * n) of the         the last ranks may get fewer rows, or none
              padded vocabulary
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from tp_engine.model_config.mlp import block_bounds


class Span(NamedTuple):
    """``size`` elements along one dimension, beginning with ``start``."""

    start: int
    size: int


Spans: TypeAlias = tuple[Span, ...]
Alternatives: TypeAlias = tuple[tuple["Source", ...], ...]
Decode: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A pure function: the taken values, as stored -> the parameter's values."""


def as_stored(values: torch.Tensor) -> torch.Tensor:
    """Return no change."""
    return values


def whole(shape: Sequence[int]) -> Spans:
    """Return all of every dimension."""
    return tuple(Span(0, size) for size in shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Part of the stored tensor ``name`` of ``shape``: the spans ``taken``, decoded, go to the spans ``target``.

    ``name`` is in the usual spelling (``model.layers.3.mlp.up_proj.weight``); the loader translates it to the
    checkpoint's.  ``dtype`` is the type on disk; None: the parameter's, or any float for a float.  ``init`` is the
    value of dummy weights; None: random.  Unless it ``is_spelled``, the name is the checkpoint's own.
    """

    name: str
    shape: tuple[int, ...]
    taken: Spans
    target: Spans
    decode: Decode = as_stored
    dtype: torch.dtype | None = None
    init: float | None = None
    is_spelled: bool = True


def vector_source(name: str, size: int, own: Span | None = None, **changes: Any) -> Source:
    """Return the source of a parameter (n,): the elements ``own`` of the tensor ``name`` (size,), or all of them."""
    taken = Span(0, size) if own is None else own
    return Source(name=name, shape=(size,), taken=(taken,), target=(Span(0, taken.size),), **changes)


def whole_source(name: str, shape: Sequence[int], **changes: Any) -> Source:
    """Return the source of a parameter that is all of the tensor ``name``, of the same ``shape``."""
    return Source(name=name, shape=tuple(shape), taken=whole(shape), target=whole(shape), **changes)


def set_sources(parameter: nn.Parameter, *alternatives: Sequence[Source]) -> None:
    """Attach the sources of ``parameter``: the ``alternatives`` are the ways in which checkpoints store it."""
    parameter._sources = tuple(tuple(one) for one in alternatives)  # type: ignore[attr-defined]


def tie_sources(parameters: Iterable[nn.Parameter]) -> None:
    """Let all of these, which have as many alternatives, be read in the same one of them: a stack that is square in one
    tensor tells its order only by the others."""
    tied = tuple(parameters)
    alternatives: list[Alternatives] = [parameter._sources for parameter in tied]  # type: ignore[attr-defined]
    assert len({*map(len, alternatives)}) == 1, "each has its sources for each way"
    for parameter in tied:
        parameter._tied = alternatives  # type: ignore[attr-defined]


def sources_of(parameter: torch.Tensor, is_stored: Callable[[Source], bool] | None = None) -> tuple[Source, ...]:
    """Return the first alternative whose sources, and those of the parameters that are tied to it, all satisfy
    ``is_stored``; the first one if none does, or if it is None."""
    alternatives: Alternatives = parameter._sources  # type: ignore[attr-defined]
    if is_stored is None or len(alternatives) == 1:
        return alternatives[0]
    tied: Sequence[Alternatives] = getattr(parameter, "_tied", [alternatives])
    for index, own in enumerate(alternatives):
        if all(is_stored(source) for other in tied for source in other[index]):
            return own
    return alternatives[0]


def keep_stored_type(parameter: nn.Parameter) -> nn.Parameter:
    """Let the loader give ``parameter`` the floating point type that its tensors have on disk."""
    parameter._keeps_stored_type = True  # type: ignore[attr-defined]
    return parameter


def keeps_stored_type(parameter: torch.Tensor) -> bool:
    """Return whether ``keep_stored_type`` was called for it."""
    return getattr(parameter, "_keeps_stored_type", False)


def equal_share(size: int, rank: int, world_size: int) -> Span:
    """Return one of ``world_size`` equal parts; the configuration checks ensure that ``size`` divides."""
    assert size % world_size == 0, f"{size} is not divisible by {world_size}"
    share = size // world_size
    return Span(rank * share, share)


def block_share(size: int, rank: int, world_size: int, *, block: int = 1) -> Span:
    """Return one of the parts of ``block_bounds``; some are empty if there are more ranks than elements."""
    start, end = block_bounds(size, world_size, block=block)[rank : rank + 2]
    return Span(start, end - start)


def kv_head_share(num_kv_heads: int, rank: int, world_size: int) -> Span:
    """Return the KV heads of one rank.  Ranks that share a head count as one part."""
    num_parts = min(num_kv_heads, world_size)
    assert world_size % num_parts == 0, f"{num_kv_heads} KV heads on {world_size} ranks"
    return equal_share(num_kv_heads, rank * num_parts // world_size, num_parts)


def vocab_share(vocab_size: int, rank: int, num_rows: int) -> Span:
    """Return the token ids of one rank, which holds up to ``num_rows``."""
    start = min(rank * num_rows, vocab_size)
    return Span(start, min(num_rows, vocab_size - start))


def times(heads: Span, head_dim: int) -> Span:
    """Return the rows of ``heads``, each of ``head_dim``."""
    return Span(heads.start * head_dim, heads.size * head_dim)
