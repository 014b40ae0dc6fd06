"""Calculates a recommendation from model, device, ranks and workload.  Pure arithmetic, in this order:

::

    block size      the largest that wastes little of a mean request (block_size.py)
    KV cache        memory x utilization - weights - largest step - runtime
    blocks          KV cache / block bytes
    concurrency     (blocks - those of the shared prefix) / blocks of a mean request's own tokens; layers with a
                    window count only the tokens that they still see
    max_num_seqs    concurrency, rounded; the largest step depends on it, so all of this is calculated twice
"""

import dataclasses
from functools import partial

from tp_engine.apps.advice import sizes
from tp_engine.apps.advice.question import Question, Workload
from tp_engine.apps.advice.recommendation import Recommendation
from tp_engine.errors import ConfigError
from tp_engine.model_config import MAX_WORLD_SIZE, check_quantization_options, check_tensor_parallel, resolve_dtype
from tp_engine.model_config.block_size import choose_block_size, describe_waste
from tp_engine.model_config.kv_layout import KvCapacity, default_snapshots
from tp_engine.model_config.spec import ModelSpec
from tp_engine.options.fields import as_json
from tp_engine.system.units import MIB, format_gib

MAX_NUM_SEQS = 1024
DEFAULT_NUM_SEQS = 256
# The online formats to try where nothing fits, the most exact one first; int8 is for CPUs.
_SMALLER = {True: ("fp8", "int4"), False: ("int8", "int4")}


def advise(question: Question) -> Recommendation:
    """The recommendation, with remedies if nothing fits.

    Raises ``ConfigError`` for an illegal number of ranks, and for options that contradict the checkpoint.
    """
    check_quantization_options(question.model, question.quantization, question.kv_cache_dtype)
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


def _for_ranks(question: Question, world_size: int) -> Recommendation:
    first = _attempt(question, world_size, DEFAULT_NUM_SEQS)
    return _attempt(question, world_size, first.max_num_seqs)


def _attempt(question: Question, world_size: int, num_sequences: int) -> Recommendation:
    workload, hardware = question.workload, question.hardware
    max_model_len = question.max_model_len or min(question.model.max_position, workload.longest)
    model = question.model.within(max_model_len)
    dtype = resolve_dtype(model, question.dtype, is_gpu=hardware.is_gpu)
    kv_dtype = dtype if question.kv_cache_dtype == "auto" else question.kv_cache_dtype
    utilization = question.gpu_memory_utilization or hardware.utilization
    block_size = question.block_size or choose_block_size(workload.lengths)
    block_size = max(block_size, model.kv_layout.largest_rate)
    whole_image = 0 if model.vision is None or not model.vision.is_bidirectional else model.vision.most_rows
    num_batched_tokens = max(workload.step_tokens, num_sequences + whole_image)  # such an image is computed in one step
    how = {"dtype": dtype, "quantization": question.quantization}
    weights, active = (question.weight_bytes(model, world_size, **how, active_only=one) for one in (False, True))
    activations = sizes.activation_bytes(
        model, world_size, dtype=dtype, num_tokens=num_batched_tokens, num_sequences=num_sequences
    )
    images, encoding = sizes.image_bytes(model, dtype=dtype, num_tokens=num_batched_tokens, max_model_len=max_model_len)
    activations = max(activations, encoding)
    overhead = sizes.overhead_bytes(world_size, is_gpu=hardware.is_gpu)
    memory = hardware.memory if hardware.is_gpu else hardware.memory // world_size
    requested = int(memory * utilization)
    spare = requested - weights - activations - overhead - images
    block_bytes = sizes.block_bytes(model, world_size, block_size, kv_dtype)
    capacity = KvCapacity(
        layout=model.kv_layout_on(world_size),
        block_size=block_size,
        max_model_len=max_model_len,
        chunk_tokens=num_batched_tokens,
    )
    states = partial(sizes.state_bytes, model, world_size)
    per_row = states(MAX_NUM_SEQS) / MAX_NUM_SEQS
    draft_rows = partial(question.num_draft_rows, max_num_batched_tokens=num_batched_tokens)
    of_drafts = states(num_sequences, draft_rows(num_sequences)) - states(num_sequences)
    num_blocks = max(0, (spare - of_drafts) // block_bytes)
    concurrency = _concurrency(workload, capacity, num_blocks, per_row / block_bytes)
    max_num_seqs = _num_sequences(concurrency)
    available = spare - states(max_num_seqs, draft_rows(max_num_seqs))
    num_blocks = max(0, available // block_bytes)
    problems = _problems(question, available, capacity, num_blocks)
    return Recommendation(
        model=question.name,
        device=hardware.name,
        workload=workload.name,
        tensor_parallel_size=world_size,
        dtype=dtype,
        quantization=question.quantization,
        weight_format=question.quantization or (dtype if model.quantization is None else model.quantization.method),
        kv_cache_dtype=kv_dtype,
        gpu_memory_utilization=utilization,
        total_bytes=memory,
        requested_bytes=requested,
        weight_bytes=weights,
        active_weight_bytes=active,
        activation_bytes=activations,
        overhead_bytes=overhead,
        image_bytes=images,
        state_bytes=spare - available,
        kv_cache_bytes=available,
        block_size=block_size,
        block_bytes=block_bytes,
        bytes_per_token=block_bytes // block_size * len(capacity.layout.groups),
        num_blocks=num_blocks,
        num_tokens=capacity.num_tokens(num_blocks),
        longest_request=capacity.longest_request(num_blocks),
        max_model_len=capacity.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=num_batched_tokens,
        expected_concurrency=concurrency,
        speculative_config=None if (drafting := question.speculative_config) is None else as_json(drafting),
        notes=model.notes,
        fits=not problems,
        reasons=_reasons(question, capacity, concurrency, block_bytes),
        problems=problems,
    )


def _concurrency(workload: Workload, capacity: KvCapacity, num_blocks: int, blocks_of_state: float) -> float:
    """Mean requests at once, each with the memory of ``blocks_of_state`` besides.

    Layers without a window hold the shared prefix's full blocks once for all requests.
    """
    block_size, layout = capacity.block_size, capacity.layout
    num_shared = workload.shared_prefix // block_size * layout.windows.count(None)
    own_blocks = layout.blocks_for(workload.live_tokens, block_size, 1) - num_shared
    return max(0, num_blocks - num_shared) / (own_blocks + blocks_of_state)


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


def _reasons(question: Question, capacity: KvCapacity, concurrency: float, block_bytes: int) -> tuple[str, ...]:
    workload, model, max_model_len = question.workload, question.model, capacity.max_model_len
    length = f"the longest request of {workload.name}"
    if max_model_len == model.max_position and max_model_len < workload.longest:
        length = "all positions that the model has"
    elif question.max_model_len is not None:
        length = "as asked"
    sequences = f"max_num_seqs {_num_sequences(concurrency)}: {concurrency:.1f} mean requests fit"
    limit = "more than that gain little speed" if concurrency > MAX_NUM_SEQS else "more would only preempt each other"
    own, quantization, weights = model.quantization, question.quantization, list[str]()
    if own is not None:
        weights = [f"weights: {own.method}, as the checkpoint has them; embedding, output head and norms stay in dtype"]
    elif quantization is not None:
        weights = [f"quantization {quantization}: linear weights, quantised while they are loaded"]
    return (
        *weights,
        f"block_size {describe_waste(workload.lengths, capacity.block_size)}",
        f"max_model_len {max_model_len:,}: {length}; the model could {model.max_position:,}",
        f"{sequences}; {limit}",
        *_state_reasons(capacity, _num_sequences(concurrency), block_bytes),
        f"max_num_batched_tokens {capacity.chunk_tokens:,}: a step holds that much of the prompts, and a token of each "
        "running request",
    )


def _state_reasons(capacity: KvCapacity, max_num_seqs: int, block_bytes: int) -> tuple[str, ...]:
    """The memory of recurrent states beside K/V, of a model that has some."""
    layout = capacity.layout
    if layout.states is None:
        return ()
    size, per_token = layout.states.slot_bytes, block_bytes / capacity.block_size * len(layout.groups)
    share = "" if not per_token else f", as much as the K/V of {size / per_token:,.0f} tokens"
    return (
        f"recurrent states: {size / MIB:.1f} MiB each{share}; {max_num_seqs:,} for running requests, "
        f"{default_snapshots(max_num_seqs):,} for prefixes (num_state_snapshots)",
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
    own = question.model.quantization
    smaller_cache = "int8" if own is not None and own.has_kv_scales else "fp8"
    half = dataclasses.replace(question, kv_cache_dtype=smaller_cache)
    if found.kv_cache_dtype not in sizes.QUANTISED and _for_ranks(half, found.tensor_parallel_size).fits:
        remedies.append(f"kv_cache_dtype {smaller_cache}, which halves the KV cache")
    if own is None and question.quantization is None:
        for name in _SMALLER[question.hardware.is_gpu]:
            if _for_ranks(dataclasses.replace(question, quantization=name), found.tensor_parallel_size).fits:
                remedies.append(f"quantization {name}, or a checkpoint that is quantised to as many bits")
                break
    workload = question.workload
    mean, longest = workload.prompt + workload.output, found.longest_request
    if longest < found.max_model_len and mean <= longest <= question.model.max_position:
        remedies.append(f"max_model_len {longest // 256 * 256 or longest}, if no request is longer")
    if found.max_model_len < mean or found.max_model_len > question.model.max_position:
        remedies.append("a model with more positions")
    if not remedies:
        remedies.append("a device with more memory, a smaller model, or one with quantised weights")
    return dataclasses.replace(found, remedies=tuple(remedies))
