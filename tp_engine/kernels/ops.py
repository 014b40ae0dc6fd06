"""The table of operations: what implements each, and which implementation runs on a type of device.

A new operation is a file with its twin in plain PyTorch, which runs everywhere and is the oracle, and a line of
``OPS``.  A Triton kernel is a file beside it; a C function is in ``cpu/``, with a Python function that calls it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

from tp_engine.cpu import NativeInt8Rows, native_library
from tp_engine.kernels import gated_delta_net, kda, layer_ops, mamba2, short_conv, streams
from tp_engine.kernels.attention import heads, index_keys, latents
from tp_engine.kernels.experts import experts, routing
from tp_engine.kernels.kv_cache import block_codes, layer_kv
from tp_engine.kernels.linear import adapters
from tp_engine.kernels.quantization import block_rows, row_codes
from tp_engine.kernels.quantization.int8_rows import Int8Rows, TorchInt8Rows
from tp_engine.kernels.steps import decode_inputs, draft_inputs, padded_steps

Kind: TypeAlias = Literal["twin", "triton", "native"]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: its ``twin``, and the modules of faster implementations, imported when first used.

    ``triton`` is below ``tp_engine.kernels``: its ``NAME_triton`` takes and returns what the twin does.  ``native`` is
    below ``tp_engine.cpu``: the first argument of its ``NAME`` is the compiled library.
    """

    twin: Callable[..., Any]
    triton: str | None = None
    native: str | None = None


OPS: dict[str, Op] = {
    "embed": Op(layer_ops.embed, "elementwise_triton", "ops"),
    "norm": Op(layer_ops.norm, "norm_triton", "ops"),
    "add_norm": Op(layer_ops.add_norm, "norm_triton", "ops"),
    "add": Op(layer_ops.add, "norm_triton", "ops"),
    "copy_rows": Op(layer_ops.copy_rows, None, "ops"),
    "gate": Op(layer_ops.gate, "elementwise_triton", "ops"),
    "gate_heads": Op(layer_ops.gate_heads, "elementwise_triton", "ops"),
    "gated_delta_net_decode": Op(gated_delta_net.gated_delta_net_decode, "gated_delta_net_triton", "recurrent"),
    "gated_delta_net_prefill": Op(
        gated_delta_net.gated_delta_net_prefill, "gated_delta_net_prefill_triton", "recurrent"
    ),
    "kda_decode": Op(kda.kda_decode, None, "recurrent"),
    "kda_prefill": Op(kda.kda_prefill, None, "recurrent"),
    "mamba2_decode": Op(mamba2.mamba2_decode, "mamba2_triton", "recurrent"),
    "mamba2_prefill": Op(mamba2.mamba2_prefill, "mamba2_triton", "recurrent"),
    "group_squares": Op(mamba2.group_squares, "mamba2_triton", "recurrent"),
    "norm_groups": Op(mamba2.norm_groups, "mamba2_triton", "recurrent"),
    "short_conv_decode": Op(short_conv.short_conv_decode, "short_conv_triton", "recurrent"),
    "short_conv_prefill": Op(short_conv.short_conv_prefill, "short_conv_triton", "recurrent"),
    "spread_streams": Op(streams.spread_streams),
    "read_mixture": Op(streams.read_mixture),
    "write_streams": Op(streams.write_streams),
    "norm_streams": Op(streams.norm_streams),
    "gate_low": Op(streams.gate_low),
    "read_gated": Op(streams.read_gated),
    "cap_logits": Op(layer_ops.cap_logits, "elementwise_triton", "ops"),
    "qk_norm_rope_store": Op(heads.qk_norm_rope_store, "attention.heads_triton", "ops"),
    "head_squares": Op(heads.head_squares, "attention.head_width_triton", "ops"),
    "norm_width": Op(heads.norm_width, "attention.head_width_triton", "ops"),
    "prepare_latents": Op(latents.prepare_latents, "attention.latents_triton", "latents"),
    "absorb_w_uk": Op(latents.absorb_w_uk, "attention.latent_maps_triton", "latents"),
    "project_w_uv": Op(latents.project_w_uv, "attention.latent_maps_triton", "latents"),
    "prepare_index": Op(index_keys.prepare_index, "attention.index_keys_triton", "index"),
    "choose_keys": Op(index_keys.choose_keys, "attention.index_keys_triton", "index"),
    "route": Op(routing.route, "experts.routing_triton", "experts"),
    "to_float32": Op(routing.to_float32, None, "experts"),
    "add_gated": Op(experts.add_gated, "experts.experts_triton", "experts"),
    "prepare_decodes": Op(decode_inputs.prepare_decodes, "steps.decode_inputs_triton", "ops"),
    "advance_decodes": Op(decode_inputs.advance_decodes, "steps.decode_inputs_triton", "ops"),
    "advance_drafts": Op(draft_inputs.advance_drafts, None, "ops"),
    "prepare_steps": Op(padded_steps.prepare_steps, "steps.padded_steps_triton"),
    "advance_steps": Op(padded_steps.advance_steps, "steps.padded_steps_triton"),
    "quantise_rows": Op(row_codes.quantise_rows, "quantization.row_codes_triton"),
    "encode_rows": Op(block_rows.encode_rows, "quantization.block_rows_triton"),
    "round_rows": Op(block_rows.round_rows, "quantization.block_rows_triton"),
    "encode_blocks": Op(block_codes.encode_blocks, "kv_cache.block_codes_triton", "block_codes"),
    "decode_blocks": Op(block_codes.decode_blocks, "kv_cache.block_codes_triton", "block_codes"),
    "norm_codes": Op(row_codes.norm_codes, "quantization.norm_codes_triton"),
    "add_adapters": Op(adapters.add_adapters, "linear.adapters_triton", "ops"),
    # On CPUs the native attention stores what it is given, so there is no C function that only stores.
    "store_kv": Op(layer_kv.store_kv, "kv_cache.store_kv_triton"),
}


@cache
def op(name: str, device_type: str) -> Callable[..., Any]:
    """The implementation of ``name`` that runs on tensors of ``device_type``."""
    return implementation(name, kind_of(name, device_type))


def kind_of(name: str, device_type: str) -> Kind:
    """Triton on CUDA where Triton is installed; C on CPUs where it can be compiled; otherwise the twin."""
    entry = OPS[name]
    if device_type == "cuda" and entry.triton is not None and has_triton():
        return "triton"
    if device_type == "cpu" and entry.native is not None and native_library() is not None:
        return "native"
    return "twin"


@cache
def is_recordable(name: str, device_type: str) -> bool:
    """Whether a recorded step may use ``name``: a CUDA graph holds every operation, a tape (on a CPU) only C."""
    return device_type == "cuda" or kind_of(name, device_type) == "native"


def implementation(name: str, kind: Kind) -> Callable[..., Any]:
    """The implementation of ``name`` of one ``kind``; an assertion fails if there is none."""
    entry = OPS[name]
    if kind == "twin":
        return entry.twin
    module = entry.triton if kind == "triton" else entry.native
    assert module is not None, f"{name} has no implementation of the kind {kind}"
    if kind == "triton":
        found: Callable[..., Any] = getattr(import_module(f"tp_engine.kernels.{module}"), f"{name}_triton")
        return found
    library = native_library()
    assert library is not None, "the compiled kernels cannot be had here"
    return partial(getattr(import_module(f"tp_engine.cpu.{module}"), name), library)


def has_triton() -> bool:
    """Whether the ``triton`` package is installed, without importing it, which costs each rank 0.2 s."""
    return find_spec("triton") is not None


@cache
def int8_rows() -> Int8Rows:
    """How rows are rounded and scaled for int8 weights on a CPU: in C if it can be compiled, else in plain PyTorch."""
    library = native_library()
    return TorchInt8Rows() if library is None else NativeInt8Rows(library)
