"""Calculates a recommendation from model, device, ranks and workload.  Pure arithmetic, in this order:

::

    block size      the largest whose half-empty last block wastes at most MAX_WASTE of a mean request
    KV cache        memory x utilization - weights - largest step - runtime
    blocks          KV cache / block bytes
    concurrency     (blocks - those of the shared prefix) / blocks of a mean request's own tokens; layers with a
                    window count only the tokens that they still see
    max_num_seqs    concurrency, rounded; the largest step depends on it, so all of this is calculated twice
"""

from __future__ import annotations

import dataclasses

from tp_engine.advice import sizes
from tp_engine.advice.question import Question, Workload
from tp_engine.advice.recommendation import Recommendation
from tp_engine.errors import ConfigError
from tp_engine.kv_layout import KvCapacity
from tp_engine.model_config import MAX_WORLD_SIZE, check_tensor_parallel
from tp_engine.model_config.spec import ModelSpec
from tp_engine.units import format_gib

BLOCK_SIZES = (16, 32, 64)
MAX_WASTE = 0.02
MAX_NUM_SEQS = 1024
DEFAULT_NUM_SEQS = 256


def advise(question: Question) -> Recommendation:
    """The recommendation, with remedies if nothing fits.  Raises ``ConfigError`` for an illegal number of ranks."""
    if question.tensor_parallel_size is not None:
        check_tensor_parallel(question.model, question.tensor_parallel_size)
        return _with_remedies(question, _for_ranks(question, question.tensor_parallel_size))
    sizes_to_try = legal_sizes(question.model)
    for world_size in sizes_to_try:
        found = _for_ranks(question, world_size)
        if found.fits:
            why = "one rank is enough" if world_size == 1 else f"the smallest number of ranks that fits is {world_size}"
            return dataclasses.replace(found, reasons=(f"tensor_parallel_size {world_size}: {why}", *found.reasons))
    return _with_remedies(question, _for_ranks(question, sizes_to_try[0]))


def legal_sizes(model: ModelSpec) -> list[int]:
    """All numbers of ranks that can share the model."""
    found = []
    for world_size in range(1, MAX_WORLD_SIZE + 1):
        try:
            check_tensor_parallel(model, world_size)
        except ConfigError:
            continue
        found.append(world_size)
    return found


def choose_block_size(workload: Workload) -> int:
    """The largest size with half a block at most ``MAX_WASTE`` of a mean request, else the smallest size."""
    good = [size for size in BLOCK_SIZES if size / 2 <= MAX_WASTE * workload.live_tokens]
    return max(good, default=BLOCK_SIZES[0])


def _for_ranks(question: Question, world_size: int) -> Recommendation:
    first = _attempt(question, world_size, DEFAULT_NUM_SEQS)
    return _attempt(question, world_size, first.max_num_seqs)


def _attempt(question: Question, world_size: int, num_sequences: int) -> Recommendation:
    model, workload, hardware = question.model, question.workload, question.hardware
    dtype = model.dtype if question.dtype == "auto" else question.dtype
    kv_dtype = dtype if question.kv_cache_dtype == "auto" else question.kv_cache_dtype
    utilization = question.gpu_memory_utilization or hardware.utilization
    block_size = question.block_size or choose_block_size(workload)
    num_batched_tokens = max(workload.step_tokens, num_sequences)
    weights, active = (
        sizes.local_parameters(model, world_size, active_only=active_only) * sizes.ITEMSIZES[dtype]
        for active_only in (False, True)
    )
    activations = sizes.activation_bytes(
        model, world_size, dtype=dtype, num_tokens=num_batched_tokens, num_sequences=num_sequences
    )
    overhead = sizes.overhead_bytes(world_size, is_gpu=hardware.is_gpu)
    memory = hardware.memory if hardware.is_gpu else hardware.memory // world_size
    requested = int(memory * utilization)
    available = requested - weights - activations - overhead
    block_bytes = sizes.block_bytes(model, world_size, block_size, kv_dtype)
    num_blocks = max(0, available // block_bytes)
    capacity = KvCapacity(
        layout=model.kv_layout,
        block_size=block_size,
        max_model_len=question.max_model_len or min(model.max_position, workload.longest),
        chunk_tokens=num_batched_tokens,
    )
    concurrency = _concurrency(workload, capacity, num_blocks)
    problems = _problems(question, available, capacity, num_blocks)
    return Recommendation(
        model=question.name,
        device=hardware.name,
        workload=workload.name,
        tensor_parallel_size=world_size,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        gpu_memory_utilization=utilization,
        total_bytes=memory,
        requested_bytes=requested,
        weight_bytes=weights,
        active_weight_bytes=active,
        activation_bytes=activations,
        overhead_bytes=overhead,
        kv_cache_bytes=available,
        block_size=block_size,
        block_bytes=block_bytes,
        bytes_per_token=block_bytes // block_size * len(capacity.layout.groups),
        num_blocks=num_blocks,
        num_tokens=capacity.num_tokens(num_blocks),
        longest_request=capacity.longest_request(num_blocks),
        max_model_len=capacity.max_model_len,
        max_num_seqs=_num_sequences(concurrency),
        max_num_batched_tokens=num_batched_tokens,
        expected_concurrency=concurrency,
        fits=not problems,
        reasons=_reasons(question, capacity, concurrency),
        problems=problems,
    )


def _concurrency(workload: Workload, capacity: KvCapacity, num_blocks: int) -> float:
    """Mean requests at once.  Layers without a window hold the shared prefix's full blocks once for all requests."""
    block_size, layout = capacity.block_size, capacity.layout
    num_shared = workload.shared_prefix // block_size * layout.windows.count(None)
    own_blocks = layout.blocks_for(workload.live_tokens, block_size, 1) - num_shared
    return max(0, num_blocks - num_shared) / own_blocks


def _num_sequences(concurrency: float) -> int:
    whole = max(1, min(MAX_NUM_SEQS, int(concurrency)))
    return whole if whole < 8 else whole // 8 * 8


def _problems(question: Question, available: int, capacity: KvCapacity, num_blocks: int) -> tuple[str, ...]:
    model, workload, max_model_len = question.model, question.workload, capacity.max_model_len
    found = []
    if max_model_len > model.max_position:
        found.append(f"max_model_len is {max_model_len:,}; the model has {model.max_position:,} positions")
    if max_model_len < workload.prompt + workload.output:
        found.append(
            f"requests of {workload.name} have {workload.prompt + workload.output:,} tokens on the average, and the "
            f"longest possible one here has {max_model_len:,}"
        )
    if available <= 0:
        found.append(f"weights, largest step and runtime alone are {format_gib(-available)} more than may be used")
    elif num_blocks < capacity.blocks_per_request:
        longest = capacity.longest_request(num_blocks)
        found.append(f"the KV cache holds {longest:,} tokens; one request may have {max_model_len:,}")
    return tuple(found)


def _reasons(question: Question, capacity: KvCapacity, concurrency: float) -> tuple[str, ...]:
    workload, model = question.workload, question.model
    block_size, max_model_len = capacity.block_size, capacity.max_model_len
    waste = block_size / 2 / workload.live_tokens
    length = f"the longest request of {workload.name}"
    if max_model_len == model.max_position and max_model_len < workload.longest:
        length = "all positions that the model has"
    elif question.max_model_len is not None:
        length = "as asked"
    shared = f", of which {workload.shared_prefix:,} are shared" if workload.shared_prefix else ""
    sequences = f"max_num_seqs {_num_sequences(concurrency)}: {concurrency:.1f} mean requests fit"
    limit = "more than that gain little speed" if concurrency > MAX_NUM_SEQS else "more would only preempt each other"
    return (
        f"block_size {block_size}: half a block is {waste:.1%} of the {workload.live_tokens:,} tokens that a request "
        f"holds on the average{shared}",
        f"max_model_len {max_model_len:,}: {length}; the model could {model.max_position:,}",
        f"{sequences}; {limit}",
        f"max_num_batched_tokens {capacity.chunk_tokens:,}: a step holds that much of the prompts, and a token of each "
        "running request",
    )


def _with_remedies(question: Question, found: Recommendation) -> Recommendation:
    """If it does not fit: add the changes that would make it fit.  Each one is tried."""
    if found.fits:
        return found
    remedies = []
    more_ranks = [size for size in legal_sizes(question.model) if size > found.tensor_parallel_size]
    enough = next((size for size in more_ranks if _for_ranks(question, size).fits), None)
    if enough is not None:
        remedies.append(f"tensor_parallel_size {enough}")
    half = dataclasses.replace(question, kv_cache_dtype="fp8")
    if found.kv_cache_dtype not in sizes.QUANTISED and _for_ranks(half, found.tensor_parallel_size).fits:
        remedies.append("kv_cache_dtype fp8, which halves the KV cache")
    workload = question.workload
    mean, longest = workload.prompt + workload.output, found.longest_request
    if longest < found.max_model_len and mean <= longest <= question.model.max_position:
        remedies.append(f"max_model_len {longest // 256 * 256 or longest}, if no request is longer")
    if found.max_model_len < mean or found.max_model_len > question.model.max_position:
        remedies.append("a model with more positions")
    if not remedies:
        remedies.append("a device with more memory, a smaller model, or one with quantised weights")
    return dataclasses.replace(found, remedies=tuple(remedies))
