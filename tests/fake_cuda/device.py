"""Operations of torch and launches of Triton on a device whose memory is the host's: the CPU runs them there.

Each operation of torch that has a kernel for CUDA gets another one, in Python: it calls the same operation with CPU
tensors over the same memory.  So it works in every thread, below autograd and inference mode, and for calls from C++.
While a stream records, or is behind, only the shapes of the results are computed (on the meta device): what computes
them is given to the stream, which runs it later, at each replay again.  A launch of Triton runs in its interpreter,
whose pointers are addresses.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map

from tests.fake_cuda import late_ranks

Closure: TypeAlias = Callable[[], object]

_runtime = ctypes.CDLL(None)
_runtime.fake_cuda_defers.argtypes = [ctypes.c_void_p]
_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long)
_runtime.fake_cuda_give.argtypes = [ctypes.c_void_p, _CALL, ctypes.c_long]

# Kernels that only make or describe tensors; the device's own do that.
_KEPT = {
    "empty", "empty_strided", "as_strided", "as_strided_", "view", "_reshape_alias", "resize_", "set_", "unfold",
    "record_stream", "is_set_to", "_efficientzerotensor", "_local_scalar_dense", "is_pinned", "_pin_memory",
    "empty_quantized", "_empty_affine_quantized", "_empty_per_channel_affine_quantized", "unfold_backward",
    "_cudnn_init_dropout_state", "_cudnn_rnn_flatten_weight", "_has_same_storage_numel", "view_as_real",
    "view_as_complex", "_conj", "_neg_view", "squeeze", "alias", "_to_sparse", "resize_as_sparse_",
}  # fmt: skip
# Their results' sizes depend on values, so a device's host waits.
_WAITING = {
    "nonzero", "equal", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave",
    "bincount",
}  # fmt: skip

_closures: list[Closure] = []
_waiting: dict[int, Iterator[None]] = {}


def _call(number: int) -> int:
    """Run a closure, or go on with one that waits for other ranks, which is a generator; 0: it waits still."""
    try:
        with torch.inference_mode():
            found = _waiting.pop(number, None) or _closures[number]()
            if isinstance(found, Iterator):
                for _ in found:
                    _waiting[number] = found
                    return 0
    except BaseException:
        _fail(f"operation {number}")
    return 1


_run = _CALL(_call)


def _fail(what: str) -> None:
    """A fault of this fake: the log has it, and no test passes."""
    text = "".join(traceback.format_exception(*sys.exc_info()))
    print(f"fake_cuda: {what} failed\n{text}", file=sys.stderr, flush=True)
    _say("unmodelled", f"{what}: {sys.exc_info()[1]}")


def _say(event: str, text: str) -> None:
    clean = text.replace("\\", " ").replace('"', "'").replace("\n", " ")
    _runtime.fake_cuda_say(event.encode(), clean.encode("ascii", "replace"))


def _stream() -> int:
    return int(torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()))


def _give(closure: Closure) -> None:
    """Let the current stream run ``closure``: now, later, or at each replay of what it records."""
    _closures.append(closure)
    _runtime.fake_cuda_give(_stream(), _run, len(_closures) - 1)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of ``tensor``, which does not keep it."""
    storage = tensor.untyped_storage()
    num_bytes = storage.nbytes()
    found = torch.empty(0, dtype=tensor.dtype)
    if not num_bytes:
        return found.reshape(tensor.shape) if not tensor.numel() else found
    memory = (ctypes.c_char * num_bytes).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return found.set_(whole, tensor.storage_offset(), tensor.size(), tensor.stride())


def _host(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_cuda:
        return on_host(value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _kept_host(value: Any) -> Any:
    """As ``_host``, for later: a tensor of the host is read now."""
    if isinstance(value, torch.Tensor) and not value.is_cuda:
        return value.clone()
    return _host(value)


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _form(value: Any) -> Any:
    """As ``_meta``, but small and on the host: some operations that only make numbers are slow on the meta device."""
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _like(result: torch.Tensor) -> torch.Tensor:
    """An empty tensor of the device with the form of ``result``, which overlaps nothing."""
    form = torch.empty_like(result, device="meta")
    return torch.empty_strided(form.shape, form.stride(), dtype=result.dtype, device="cuda")


def _kernel(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The kernel of ``op`` for CUDA tensors."""
    schema = op._schema
    written = [place for place, one in enumerate(schema.arguments) if one.alias_info and one.alias_info.is_write]
    names = [one.name for one in schema.arguments]
    returns_arguments = bool(schema.returns) and all(one.alias_info for one in schema.returns)
    waits = schema.name.removeprefix("aten::") in _WAITING
    is_out = any(schema.arguments[place].is_out for place in written)
    tensors = [place for place, one in enumerate(schema.arguments) if str(one.type) == "Tensor"]
    chosen = _SUBSTITUTES.get(str(op), op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # A number in the place of a tensor: another overload takes it as such, by the rules of type promotion.
        has_number = any(place < len(args) and isinstance(args[place], (int, float)) for place in tensors)
        run = op.overloadpacket if has_number else chosen
        defers = _runtime.fake_cuda_defers(_stream())
        if defers and (waits or any(_is_mask(one) for one in args)):
            torch.cuda.current_stream().synchronize()
            defers = 0
        changed = [args[place] if place < len(args) else kwargs[names[place]] for place in written]
        outputs = changed if returns_arguments or not schema.returns else None
        if is_out and any(not one.numel() for one in _tensors(changed)):
            form = _meta if len(_tensors([*args, *kwargs.values()])) > len(_tensors(changed)) else _form
            shaped = _tensors(run(*tree_map(form, args), **tree_map(form, kwargs)))
            for one, shape in zip(_tensors(changed), shaped, strict=True):
                one.resize_(shape.shape)
        if not defers:
            with torch.inference_mode():
                found = run(*tree_map(_host, args), **tree_map(_host, kwargs))
            return _outputs(outputs, schema, found) if outputs is not None else tree_map(_on_device, found)
        made = None
        if outputs is None:
            shapes = run(*tree_map(_meta, args), **tree_map(_meta, kwargs))
            made = tree_map(lambda one: _like(one) if isinstance(one, torch.Tensor) else one, shapes)
        targets = [on_host(one) for one in _tensors(made)]
        host_args, host_kwargs = tree_map(_kept_host, args), tree_map(_kept_host, kwargs)

        def later() -> None:
            results = _tensors(run(*host_args, **host_kwargs))
            for target, result in zip(targets, results, strict=bool(targets)):
                target.copy_(result)

        _give(later)
        return _outputs(outputs, schema, None) if outputs is not None else made

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except NotImplementedError:
            _fail(str(op))
            raise

    return guarded


def _is_mask(value: Any) -> bool:
    """Whether ``value`` holds indices that are a mask: their number is known by waiting."""
    return isinstance(value, (list, tuple)) and any(
        isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in value
    )


def _outputs(changed: list[Any], schema: Any, found: Any) -> Any:
    """The arguments that an operation returns."""
    if not schema.returns:
        return None
    return changed[0] if len(schema.returns) == 1 else tuple(changed[: len(schema.returns)])


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for part in value for one in _tensors(part)] if isinstance(value, (list, tuple)) else []


def _on_device(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    made = _like(value)
    on_host(made).copy_(value)
    return made


_BACKEND = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``target.copy_(source)``: torch's own where it is a copy of bytes, or goes between devices."""
    is_plain = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
    if not (target.is_cuda and source.is_cuda) or (is_plain and target.shape == source.shape):
        torch.ops.aten.copy_.default.redispatch(_BACKEND, target, source, non_blocking)
        return target
    to, of = on_host(target), on_host(source)
    if _runtime.fake_cuda_defers(_stream()):
        _give(lambda: to.copy_(of))
    else:
        with torch.inference_mode():
            to.copy_(of)
    return target


# In the order of NCCL's numbers: types of elements, and operations, of which the last is the mean.
_DTYPES = (
    torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.float16, torch.float32,
    torch.float64, torch.bfloat16,
)  # fmt: skip
_REDUCTIONS = (torch.add, torch.mul, torch.maximum, torch.minimum, torch.add)
_REDUCE = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int
)


def _reduce(places: Any, ranks: int, target: int, count: int, number: int, op: int) -> None:
    """NCCL's reduction of what all ranks have posted, in their order; one rounding, as on a GPU."""
    try:
        dtype = _DTYPES[number]
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        with torch.inference_mode():
            posted = [_memory(places[rank], torch.empty(count, dtype=dtype)).to(wide) for rank in range(ranks)]
            total = functools.reduce(_REDUCTIONS[op], posted)
            _memory(target, torch.empty(count, dtype=dtype)).copy_(total / ranks if op == 4 else total)
    except BaseException:
        _fail("a reduction of NCCL")


_reducer = _REDUCE(_reduce)


def _one_shot(room: torch.Tensor, own: torch.Tensor, _op: str, group: str, out: torch.Tensor) -> torch.Tensor:
    """symm_mem's all-reduce of ``own`` through ``room``, a part of the buffer that all ranks have mapped."""
    _give(_sum_of_ranks(room, group, on_host(own), on_host(out)))
    return out


def _two_shot(room: torch.Tensor, _op: str, group: str, out: torch.Tensor) -> torch.Tensor:
    """As ``_one_shot``, of what is in ``room`` already."""
    _give(_sum_of_ranks(room, group, None, on_host(out)))
    return out


def _sum_of_ranks(room: torch.Tensor, group: str, own: torch.Tensor | None, out: torch.Tensor) -> Closure:
    """Adds up the ranks' rooms, in the order of the ranks; begins and ends when all ranks have come so far."""
    symmetric: Any = torch.distributed._symmetric_memory
    handle = symmetric.rendezvous(room, group)  # not in the closure, which lives on when the memory goes
    rank, form = handle.rank, room.shape
    offset = room.data_ptr() - handle.buffer_ptrs[rank]
    rooms = [_memory(address + offset, room) for address in handle.buffer_ptrs]
    # The last word of a rank's signals: how often it has come.
    counts = [ctypes.c_int64.from_address(pad + handle.signal_pad_size - 8) for pad in handle.signal_pad_ptrs]

    late_ranks.counts = counts, rank

    def meet() -> Iterator[None]:
        counts[rank].value += 1
        while any(one.value < counts[rank].value for one in counts):
            yield

    def closure() -> Iterator[None]:
        if own is not None:
            rooms[rank].copy_(own.view(form))
        yield from meet()
        total = rooms[0].clone()
        for one in rooms[1:]:
            total += one
        yield from meet()
        out.copy_(total.view_as(out))

    return closure


def _memory(address: int, like: torch.Tensor) -> torch.Tensor:
    """The memory at ``address`` with the form of ``like``, which is contiguous."""
    memory = (ctypes.c_char * like.nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def _depthwise(values: Any, weight: Any, _size: Any, bias: Any, stride: Any, padding: Any, dilation: Any) -> Any:
    """cuDNN's convolution of each channel by itself, as that of all devices."""
    groups = values.shape[-3]
    return torch.ops.aten.convolution(values, weight, bias, stride, padding, dilation, False, [0, 0], groups)


def _convolution(
    values: Any, weight: Any, padding: Any, stride: Any, dilation: Any, groups: int, *_flags: bool, **_more: bool
) -> Any:
    """cuDNN's other convolution, too."""
    none = [0] * len(padding)
    return torch.ops.aten.convolution(values, weight, None, stride, padding, dilation, False, none, groups)


def _attention(query: Any, key: Any, value: Any, mask: Any, is_causal: bool, scale: float | None) -> Any:
    """Attention as all devices have it; the second result is the weights."""
    attend = torch.ops.aten._scaled_dot_product_attention_math
    return attend(query, key, value, mask, 0.0, is_causal, scale=scale)


def _efficient(
    query: Any, key: Any, value: Any, mask: Any, _sums: bool, _dropout: float = 0.0, is_causal: bool = False,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """Attention as CUTLASS has it; no training needs the other results."""
    found, weights = _attention(query, key, value, mask, is_causal, scale)
    none = query.new_empty((), dtype=torch.int64)
    return found, weights.new_empty(0, dtype=torch.float32), none, none


def _flash(
    query: Any, key: Any, value: Any, _dropout: float = 0.0, is_causal: bool = False, _mask: bool = False,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """Attention as flash-attn has it."""
    found, weights = _attention(query, key, value, None, is_causal, scale)
    none = query.new_empty((), dtype=torch.int64)
    sums, debug = weights.new_empty(0, dtype=torch.float32), query.new_empty(0)
    return found, sums, none, none, query.shape[-2], key.shape[-2], none, none, debug


# Operations that only CUDA has.
_SUBSTITUTES: dict[str, Any] = {
    "aten._conv_depthwise2d.default": _depthwise, "aten.cudnn_convolution.default": _convolution,
    "aten._scaled_dot_product_efficient_attention.default": _efficient,
    "aten._scaled_dot_product_flash_attention.default": _flash,
}  # fmt: skip
_libraries: list[Any] = []


def use_torch() -> None:
    """Replace the kernels of torch for CUDA."""
    library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace != "aten" or base in _KEPT:
            continue
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        library.impl(rest, _kernel(op), "CUDA", allow_override=True)
    library.impl("copy_", _copy, "CUDA", allow_override=True)
    symmetric = torch.library.Library("symm_mem", "IMPL")
    symmetric.impl("one_shot_all_reduce_copy_out", _one_shot, "CUDA", allow_override=True)
    symmetric.impl("two_shot_all_reduce_out", _two_shot, "CUDA", allow_override=True)
    _libraries.extend((library, symmetric))
    ctypes.c_void_p.in_dll(_runtime, "fake_cuda_reduce").value = ctypes.cast(_reducer, ctypes.c_void_p).value
    atexit.register(_release)


def _release() -> None:
    """Give back what torch keeps for later, so that the log's last lines have what the program keeps."""
    gc.unfreeze()  # an engine's process does not search what is left at its end
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
        # Objects of Python: torch keeps events of its own to use them again.
        _runtime.fake_cuda_say_held(sum(issubclass(type(one), torch.cuda.Event) for one in gc.get_objects()))


def use_triton() -> None:
    """Let Triton's interpreter, which programs choose by TRITON_INTERPRET, run launches on the device's streams."""
    from triton._C.libtriton import ir as tl_ir
    from triton.runtime import interpreter

    executor: Any = interpreter.GridExecutor
    builder: Any = type(interpreter.interpreter_builder)
    set_place, launches, exchange_words = builder.set_grid_idx, Counter[str](), builder.create_atomic_cas
    is_backwards, late_rank = False, late_ranks.Launch({})

    def exchange(self: Any, place: Any, wanted: Any, value: Any, order: Any, scope: Any) -> Any:
        found = exchange_words(self, place, wanted, value, order, scope)
        late_rank.exchanged(place.data, wanted.data, found.data, order == tl_ir.MEM_SEMANTIC.ACQUIRE)
        return found

    def set_any_place(self: Any, *place: int) -> None:
        turned = (size - 1 - one for size, one in zip(self.grid_dim, place, strict=True))
        set_place(self, *(turned if is_backwards else place))

    class Launch(executor):  # type: ignore[misc]
        """A launch whose pointers are valid as they are.  A GPU begins programs in any order: here the last one is the
        first of every second launch of a kernel, on all ranks alike, whose programs may wait for each other."""

        def __call__(self, *args: Any, **kwargs: Any) -> None:
            nonlocal is_backwards, late_rank
            launches[self.fn.__name__] += 1
            is_backwards = launches[self.fn.__name__] % 2 == 0
            late_rank = late_ranks.Launch(dict(zip(self.arg_names, args, strict=False)) | kwargs)
            super().__call__(*args, **kwargs)

        def _init_args_hst(self, args: Any, kwargs: Any) -> Any:
            return args, kwargs

        def _restore_args_dev(self, *args: Any) -> None:
            pass

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if warmup:
            return
        launch = Launch(self.rewrite(), self.arg_names, grid, self.pre_run_hooks)
        host_args, host_kwargs = tree_map(_host, args), tree_map(_host, kwargs)
        if "PDL" in host_kwargs:
            host_kwargs["PDL"] = False  # the interpreter has no way to start a kernel early
        _give(lambda: launch(*host_args, **host_kwargs))

    interpreter.InterpretedFunction.run = run
    builder.set_grid_idx, builder.create_atomic_cas = set_any_place, exchange
    from tests.interpreted.interpreter import mend_interpreter

    mend_interpreter()


def use_kernels() -> None:
    """Let the kernels that a GPU has to prove be the code's own choice: jobs here try none, which an interpreter would
    take minutes for."""
    from dataclasses import replace

    from tp_engine.kernels import recurrent_candidates as candidates
    from tp_engine.kernels.candidates import MANY

    for name in ("GATED_DELTA_NET", "MAMBA2", "SHORT_CONV"):
        own = replace(getattr(candidates, name), default=lambda shape, device: ((MANY, "triton"),))
        setattr(candidates, name, own)


def use_tiles() -> None:
    """The same of long chunks of latent attention."""
    from dataclasses import replace

    from tp_engine.attention import expanded
    from tp_engine.kernels.candidates import MANY, Choice, Shape

    def fitting(shape: Shape, device: torch.device) -> Choice:
        tiles = (one for one in expanded.OPERATION.candidates if one.name.startswith("tiles"))
        return ((MANY, next(one.name for one in tiles if one.why_not(shape, device) is None)),)

    expanded.OPERATION = replace(expanded.OPERATION, default=fitting)


def use_draws() -> None:
    """The same of draws with top_k."""
    from dataclasses import replace

    from tp_engine.kernels.candidates import MANY
    from tp_engine.sampling import ranked_shares

    own = replace(ranked_shares.OPERATION, default=lambda shape, device: ((MANY, "triton"),))
    ranked_shares.OPERATION = own


def use_gpu_host() -> None:
    """Give a host with GPUs the file of NVIDIA's kernel module."""
    from tp_engine.worker import gpu_host

    if os.environ["FAKE_CUDA_DEVICES"]:
        path = Path(os.environ["FAKE_CUDA_LOG"], "driver")
        path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05\n")
        gpu_host._DRIVER_FILE = path
