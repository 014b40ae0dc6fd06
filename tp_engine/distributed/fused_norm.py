"""All-reduce, residual sum and norm in one kernel, for parts of few rows: the table of those who have one.

::

    flashinfer   the package, where it is installed: RMS norm without a scale
    triton       kernels/distributed/reduce_norm_triton.py, over the memory that the ranks' GPUs share

The code's own choice is an all-reduce, and then the norm.  ``worker/tuning/fused_norm.py`` proves these on the user's
GPUs, all ranks together, and takes one that is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
import torch.distributed as dist

from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.ops import has_triton


class SharedAddresses(Protocol):
    """What kernels need of a ``SymmetricBuffer``."""

    addresses: torch.Tensor
    signals: torch.Tensor


class FusedNorm(Protocol):
    """``layer_ops.add_norm`` of the ranks' sum of ``part`` (N, size), contiguous; a collective."""

    def takes(self, rule: NormRule, scale: float, stream_scale: float) -> bool:
        """Return whether it is for such norms; the same on every rank."""

    def __call__(
        self, part: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float, stream_scale: float, /
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedSizes:
    """For what one is made: ``rank`` of ``world_size``, ``group`` of torch's, at most ``max_rows`` of ``size``."""

    rank: int
    world_size: int
    group: dist.ProcessGroup | None
    max_rows: int
    size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKind:
    """A row: why these ranks cannot have it, None if they can, and how it is made, by all ranks at once."""

    why_not: Callable[[FusedSizes], str | None]
    make: Callable[[FusedSizes, SharedAddresses], FusedNorm]


class TritonFusedNorm:
    """Every norm, over a buffer that has room for the rows."""

    def __init__(self, sizes: FusedSizes, buffer: SharedAddresses) -> None:
        from tp_engine.kernels.distributed.reduce_norm_triton import all_reduce_add_norm_triton

        self._run, self._buffer, self._rank = all_reduce_add_norm_triton, buffer, sizes.rank

    def takes(self, rule: NormRule, scale: float, stream_scale: float) -> bool:
        return True

    def __call__(
        self, part: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float, stream_scale: float, /
    ) -> torch.Tensor:
        buffers, signals = self._buffer.addresses, self._buffer.signals
        return self._run(part, residual, rule, scale, stream_scale, buffers=buffers, signals=signals, rank=self._rank)


class FlashInferFusedNorm:
    """TensorRT-LLM's kernel for few rows, in memory of its own."""

    def __init__(self, sizes: FusedSizes, _buffer: SharedAddresses) -> None:
        from flashinfer import comm

        self._run, self._pattern = comm.allreduce_fusion, comm.AllReduceFusionPattern.kARResidualRMSNorm
        self._workspace = comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=sizes.world_size,
            rank=sizes.rank,
            max_token_num=sizes.max_rows,
            hidden_dim=sizes.size,
            dtype=sizes.dtype,
            group=sizes.group,
        )

    def takes(self, rule: NormRule, scale: float, stream_scale: float) -> bool:
        return not rule.is_centred and rule.offset == 0.0 and scale == stream_scale == 1.0

    def __call__(
        self, part: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float, stream_scale: float, /
    ) -> torch.Tensor:
        out = torch.empty_like(part)
        self._run(
            input=part,
            workspace=self._workspace,
            pattern=self._pattern,
            residual_in=residual,
            residual_out=residual,
            norm_out=out,
            rms_gamma=rule.weight,
            rms_eps=rule.eps,
            use_oneshot=True,
            fp32_acc=True,
        )
        return out


def _why_not_flashinfer(sizes: FusedSizes) -> str | None:
    if find_spec("flashinfer") is None:
        return "the package flashinfer is not installed"
    return None if sizes.dtype == torch.bfloat16 else f"it is for bfloat16, and dtype is {sizes.dtype}"


FUSED_NORMS: dict[str, FusedKind] = {
    "flashinfer": FusedKind(why_not=_why_not_flashinfer, make=FlashInferFusedNorm),
    "triton": FusedKind(
        why_not=lambda _: None if has_triton() else "the package triton is not installed", make=TritonFusedNorm
    ),
}
