"""The operations of the layers, and which implementation of each runs: chosen once per process and device type.

A new operation is a file with its twin, and a line of ``OPS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal, TypeAlias

from tp_engine.kernels import activation, embedding, head_width, logits, norm, rope
from tp_engine.kernels.int8_rows import Int8Rows, TorchInt8Rows
from tp_engine.kernels.native.int8_rows import NativeInt8Rows
from tp_engine.kernels.native.library import native_library
from tp_engine.kernels.native.ops import NativeOps
from tp_engine.kernels.triton_support import has_triton

Kind: TypeAlias = Literal["twin", "triton", "native"]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: its ``twin`` in plain PyTorch, which runs everywhere and is the oracle, and what is faster.

    ``triton`` is ``module:function`` under ``tp_engine.kernels``, imported when it is first asked for; ``native`` is a
    method of ``NativeOps``.  Both take and return what the twin does.
    """

    twin: Callable[..., Any]
    triton: str | None = None
    native: str | None = None


OPS: dict[str, Op] = {
    "embed": Op(embedding.embed, triton="embedding_triton:embed_triton", native="embed"),
    "norm": Op(norm.norm, triton="norm_triton:norm_triton", native="norm"),
    "add_norm": Op(norm.add_norm, triton="norm_triton:add_norm_triton", native="add_norm"),
    "add": Op(norm.add, triton="norm_triton:add_triton", native="add"),
    "gate": Op(activation.gate, triton="activation_triton:gate_triton", native="gate"),
    "prepare_heads": Op(rope.prepare_heads, triton="rope_triton:prepare_heads_triton", native="prepare_heads"),
    "head_squares": Op(head_width.head_squares, triton="head_width_triton:head_squares_triton", native="head_squares"),
    "norm_width": Op(head_width.norm_width, triton="head_width_triton:norm_width_triton", native="norm_width"),
    "cap_logits": Op(logits.cap_logits, triton="logits_triton:cap_logits_triton", native="cap_logits"),
}


@cache
def op(name: str, device_type: str) -> Callable[..., Any]:
    """The implementation of ``name`` that runs on tensors of ``device_type``."""
    return implementation(name, kind_of(name, device_type))


def kind_of(name: str, device_type: str) -> Kind:
    """Triton's on CUDA where Triton is installed, C's on CPUs where it can be had, and the twin where there is none."""
    entry = OPS[name]
    if device_type == "cuda" and entry.triton is not None and has_triton():
        return "triton"
    if device_type == "cpu" and entry.native is not None and native_library() is not None:
        return "native"
    return "twin"


@cache
def is_recordable(name: str, device_type: str) -> bool:
    """Whether a recorded step may use ``name``: on a CPU, if it is C, as tapes hold nothing else; a CUDA graph holds
    all."""
    return device_type == "cuda" or kind_of(name, device_type) == "native"


def implementation(name: str, kind: Kind) -> Callable[..., Any]:
    """That of one ``kind``; an assertion where there is none."""
    entry = OPS[name]
    if kind == "twin":
        return entry.twin
    place = entry.triton if kind == "triton" else entry.native
    assert place is not None, f"{name} has no implementation of the kind {kind}"
    if kind == "native":
        library = native_library()
        assert library is not None, "the compiled kernels can not be had here"
        found: Callable[..., Any] = getattr(NativeOps(library), place)
    else:
        module, _, function = place.partition(":")
        found = getattr(import_module(f"tp_engine.kernels.{module}"), function)
    return found


@cache
def int8_rows() -> Int8Rows:
    """What linear layers with int8 weights do to the rows on a CPU: in C where it can be had, else in plain PyTorch."""
    library = native_library()
    return TorchInt8Rows() if library is None else NativeInt8Rows(library)
