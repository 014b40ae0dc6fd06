"""What is not a number stays so in every kernel that could lose it: interpreted and on CUDA (``CASES``).

Maxima and minima of a GPU leave NaN out, so a scale or a clamp may turn it into a plausible number, and a broken model
would look healthy on GPUs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.paged_batches import among_layers
from tests.unit.kernels.kernel_cases_heads import SLOTS, Heads, read_part
from tests.unit.kernels.kernel_cases_layer_ops import both, random
from tests.unit.kernels.kernel_cases_paged_attention import FP8, INT8, Case, rule_of, run_on, stored_batch
from tp_engine.kernels.attention.heads import Rotation
from tp_engine.kernels.attention.plain_attention import paged_attention
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv, dequantise
from tp_engine.kernels.layer_ops import NormRule

NAN = float("nan")


def check_stored(cache_dtype: torch.dtype, device: str) -> None:
    """One head's key, and another one's value: what attention reads of them is NaN, and all else is a number."""
    key, value = random((2, 6, 2, 32), torch.bfloat16, device)
    key[0, 1, 5] = value[3, 0, 31] = NAN
    slots = torch.tensor(SLOTS, device=device)
    read = []
    for store in both("store_kv"):
        kv = Heads(num_heads=2, num_kv_heads=2, head_dim=32, dtype=torch.bfloat16).cache(cache_dtype, device)
        store(KeyValue(key, value), kv, slots)
        read.append(torch.stack([read_part(kv, part) for part in (0, 1)]).isnan().all(-1))
    assert torch.equal(*read) and int(read[0].sum()) == 2


def check_prepared_heads(cache_dtype: torch.dtype, head_dim: int, rotary_dim: int, device: str) -> None:
    """The same by the kernel that turns and stores heads, in each part of a head."""
    case = Heads(
        num_heads=2, num_kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16, rotary_dim=rotary_dim,
        cache_dtype=cache_dtype,
    )  # fmt: skip
    merged = random((6, 6, head_dim), torch.bfloat16, device)
    merged[0, 2, 1] = merged[2, 3, rotary_dim - 1] = merged[3, 4, head_dim - 1] = NAN
    read = []
    for prepare in both("qk_norm_rope_store"):
        kv = case.cache(cache_dtype, device)
        query, key, value = prepare(
            merged.clone(), 2, None, case.rotation(device), kv, torch.tensor(SLOTS, device=device)
        )
        if key is not None:
            both("store_kv")[1](KeyValue(key, value), kv, torch.tensor(SLOTS, device=device))
        assert not query.isnan().any()
        read.append(torch.stack([read_part(kv, part) for part in (0, 1)]).isnan().all(-1))
    assert torch.equal(*read) and int(read[0].sum()) == 3


def check_prepared_latents(place: int, device: str) -> None:
    """A stored row of latent attention, with NaN at ``place`` of the latent and the turned part: one scale for all."""
    prepare, _ = both("prepare_latents")
    query, row = random((2, 3, 48), torch.bfloat16, device), random((2, 72), torch.bfloat16, device, 1)
    row[1, place] = NAN
    kv = LayerKv(
        among_layers(torch.zeros(1, 2, 4, 1, 72, device=device).to(INT8)),
        among_layers(torch.zeros(1, 2, 1, 4, device=device)),
    )
    rotation = Rotation(random((9, 8), torch.bfloat16, device, 2), torch.tensor([3, 5], device=device), None)
    rule = NormRule(torch.ones(64, dtype=torch.bfloat16, device=device), 1e-6)
    prepare(query, row, rule, rotation, False, kv, torch.tensor([1, 6], device=device))
    assert kv.scales is not None
    found = dequantise(kv.cache[0], kv.scales[0].transpose(1, 2)).isnan().all(-1).flatten()
    assert found.tolist() == [index == 6 for index in range(8)]


def check_attention(case: Case, where: str, device: str) -> None:
    """NaN in a query, or in the value of one key, whose request has several parts: exactly the twin's outputs."""
    requests = [(1, 40), (1, 300), (1, 65)]
    batch, scales = stored_batch(case, requests, device)
    if where == "query":
        batch.query[1, 2, 3] = NAN
    else:
        block = int(batch.metadata.block_table[1, 5])
        if scales is None:
            batch.kv_cache[1, block, 3, 1] = NAN
        else:
            scales[1, block, 1, 3] = NAN
    exact = paged_attention(
        batch.query.float(),
        LayerKv(batch.kv_cache.float() if scales is None else dequantise(batch.kv_cache, scales.transpose(2, 3))),
        batch.metadata.block_table,
        batch.metadata.seq_lens,
        batch.metadata.query_start,
        **rule_of(case.shape, batch.query.device),
    )
    out = run_on(batch, scales, case)
    assert torch.equal(out.isnan().all(-1), exact.isnan().all(-1)) and exact.isnan().any()
    assert torch.equal(out.isnan().any(-1), exact.isnan().all(-1))


def make_cases() -> dict[str, Callable[[str], None]]:
    """Name -> check on a device."""
    cases: dict[str, Callable[[str], None]] = {}
    for dtype in (INT8, FP8):
        cases[f"store_kv, {dtype}"] = partial(check_stored, dtype)
        for head_dim, rotary_dim in ((32, 32), (80, 32)):
            cases[f"qk_norm_rope_store of {head_dim}, {dtype}"] = partial(
                check_prepared_heads, dtype, head_dim, rotary_dim
            )
    cases |= {f"prepare_latents, {place}": partial(check_prepared_latents, place) for place in (0, 63, 64, 71)}
    bfloat16: dict[str, Any] = {"dtype": torch.bfloat16, "group": 2}
    for one in (Case(**bfloat16), Case(**bfloat16, splits=1), Case(**bfloat16, cache_dtype=FP8), Case(softcap=2.0)):
        cases |= {f"decode of {one}, {where}": partial(check_attention, one, where) for where in ("query", "value")}
    return cases


CASES = make_cases()
