"""Which implementation the layers use for their small operations, chosen once per process and device type."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from tp_engine.kernels import activation, embedding, norm, rope
from tp_engine.kernels.int8_rows import Int8Rows, TorchInt8Rows
from tp_engine.kernels.native.int8_rows import NativeInt8Rows
from tp_engine.kernels.native.library import native_library
from tp_engine.kernels.native.ops import NativeOps
from tp_engine.kernels.rope import HeadNorm, Heads, Rotation
from tp_engine.kernels.triton_support import has_triton


class Embed(Protocol):
    """As ``embedding.embed``."""

    def __call__(self, token_ids: torch.Tensor, weight: torch.Tensor, first_id: int | None, /) -> torch.Tensor: ...


class RmsNorm(Protocol):
    """As ``norm.rms_norm``."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float, /) -> torch.Tensor: ...


class AddRmsNorm(Protocol):
    """As ``norm.add_rms_norm``."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, /
    ) -> torch.Tensor: ...


class SiluAndMul(Protocol):
    """As ``activation.silu_and_mul``."""

    def __call__(self, gate_up: torch.Tensor, /) -> torch.Tensor: ...


class PrepareHeads(Protocol):
    """As ``rope.prepare_heads``."""

    def __call__(
        self,
        heads: torch.Tensor,
        num_kv_heads: int,
        norm: HeadNorm | None,
        rotation: Rotation,
        kv_cache: torch.Tensor | None,
        kv_scales: torch.Tensor | None,
        slot_mapping: torch.Tensor,
        /,
    ) -> Heads: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOps:
    """One implementation; layers take its functions when they are built."""

    name: str
    embed: Embed
    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    silu_and_mul: SiluAndMul
    prepare_heads: PrepareHeads


TORCH_OPS = LayerOps(
    name="torch",
    embed=embedding.embed,
    rms_norm=norm.rms_norm,
    add_rms_norm=norm.add_rms_norm,
    silu_and_mul=activation.silu_and_mul,
    prepare_heads=rope.prepare_heads,
)


@cache
def layer_ops(device_type: str) -> LayerOps:
    """Triton's on CUDA where Triton is installed, C's on CPUs where they can be had, plain PyTorch elsewhere."""
    if device_type == "cuda" and has_triton():
        return triton_ops()
    if device_type == "cpu" and (library := native_library()) is not None:
        return native_ops(library)
    return TORCH_OPS


@cache
def int8_rows() -> Int8Rows:
    """What linear layers with int8 weights do to the rows on a CPU: in C where it can be had, else in plain PyTorch."""
    library = native_library()
    return TorchInt8Rows() if library is None else NativeInt8Rows(library)


def triton_ops() -> LayerOps:
    """The Triton kernels, which run on CUDA and in Triton's interpreter; imported when they are asked for."""
    from tp_engine.kernels.activation_triton import silu_and_mul_triton
    from tp_engine.kernels.norm_triton import add_rms_norm_triton, rms_norm_triton
    from tp_engine.kernels.rope_triton import prepare_heads_triton

    return LayerOps(
        name="triton",
        embed=embedding.embed,
        rms_norm=rms_norm_triton,
        add_rms_norm=add_rms_norm_triton,
        silu_and_mul=silu_and_mul_triton,
        prepare_heads=prepare_heads_triton,
    )


def native_ops(library: ctypes.CDLL) -> LayerOps:
    """The kernels in C."""
    ops = NativeOps(library)
    return LayerOps(
        name="native",
        embed=ops.embed,
        rms_norm=ops.rms_norm,
        add_rms_norm=ops.add_rms_norm,
        silu_and_mul=ops.silu_and_mul,
        prepare_heads=ops.prepare_heads,
    )
