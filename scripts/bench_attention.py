#!/usr/bin/env python
"""Time one attention layer's decode: prepare once per step, forward once per layer.  Ends with one JSON line.

Beside each time it prints the rate of reading keys and values, as a share of the bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from benchmarks.machine import copy_bandwidth, processor_name, read_bandwidth

from tp_engine.attention.base import AttentionMetadata, AttentionNeeds, AttentionShape
from tp_engine.attention.registry import select_backend
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv, layer_view
from tp_engine.worker.batch.step_inputs import slots_for

NUM_LAYERS = 4
SHAPES = {"B": (12, 4, 64), "C": (8, 4, 32)}
KINDS = (("B", "float32"), ("B", "bfloat16"), ("C", "float32"))


def decode_batch(
    seq_lens: np.ndarray, block_size: int, device: str, consecutive: bool
) -> tuple[AttentionMetadata, int]:
    """One token of each request, blocks at random or one after another; and the number of blocks."""
    width = -(-int(seq_lens.max()) // block_size)
    count = len(seq_lens) * width
    ids = np.arange(count) if consecutive else np.random.default_rng(0).permutation(count)
    table = ids.reshape(len(seq_lens), width).astype(np.int32)
    ones = np.ones(len(seq_lens), dtype=np.int32)
    metadata = AttentionMetadata(
        num_decodes=len(seq_lens),
        slot_mapping=torch.from_numpy(slots_for(table, np.arange(len(seq_lens)), seq_lens - 1, block_size)).to(device),
        block_table=torch.from_numpy(table).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        query_start=torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=device),
        host_query_lens=ones,
        host_seq_lens=seq_lens,
    )
    return metadata, count


def timed(prepare: Callable[[], object], forward: Callable[[], object], args: argparse.Namespace) -> dict[str, float]:
    """Microseconds per layer, and microseconds per step for the work that all layers share; the first layer does it.

    ``cpu`` is this thread's own time: the figure to compare on a busy machine with one thread.
    """
    samples: dict[str, list[float]] = {"layer": [], "shared": [], "layer_cpu": [], "shared_cpu": []}
    for _ in range(args.repeats + 5):
        marks = [_clocks(args.device)]
        prepare()
        forward()
        marks.append(_clocks(args.device))
        for _ in range(NUM_LAYERS):
            forward()
        marks.append(_clocks(args.device))
        for clock, suffix in enumerate(("", "_cpu")):
            first, last = ((marks[i + 1][clock] - marks[i][clock]) * 1e6 for i in range(2))
            samples["layer" + suffix].append(last / NUM_LAYERS)
            samples["shared" + suffix].append(first - last / NUM_LAYERS)
    return {f"{name}_us": round(statistics.median(values[5:]), 1) for name, values in samples.items()} | {
        "layer_min_us": round(min(samples["layer"][5:]), 1)
    }


def _clocks(device: str) -> tuple[float, float]:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter(), time.thread_time()


def measure(
    shape_name: str,
    dtype_name: str,
    seq_lens: np.ndarray,
    args: argparse.Namespace,
    consecutive: bool,
    bandwidth: float,
) -> dict[str, object]:
    """One row of the table."""
    num_heads, num_kv_heads, head_dim = SHAPES[shape_name]
    dtype = getattr(torch, dtype_name)
    shape = AttentionShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5)
    metadata, num_blocks = decode_batch(seq_lens, args.block_size, args.device, consecutive)
    blocks = torch.zeros(
        num_blocks, NUM_LAYERS, 2, args.block_size, num_kv_heads, head_dim, dtype=dtype, device=args.device
    ).normal_()
    query = torch.randn(len(seq_lens), num_heads, head_dim, dtype=dtype, device=args.device)
    new = KeyValue(*torch.randn(2, len(seq_lens), num_kv_heads, head_dim, dtype=dtype, device=args.device))
    needs = AttentionNeeds(
        device_type=args.device, dtype=dtype, kv_cache_dtype=dtype, block_size=args.block_size, head_dims=(head_dim,)
    )
    backend = select_backend(args.backend, needs)

    layers = itertools.cycle([LayerKv(layer_view(blocks, place)) for place in range(NUM_LAYERS)])

    def forward() -> None:
        backend.forward(query, new, next(layers), metadata, shape)

    facts = {"shape": shape_name, "dtype": dtype_name, "rows": len(seq_lens), "tokens": int(seq_lens.sum())}
    times = timed(lambda: backend.prepare(metadata), forward, args)
    num_bytes = int(seq_lens.sum()) * 2 * num_kv_heads * head_dim * dtype.itemsize
    share = {"share_of_bandwidth": round(num_bytes / (times["layer_us"] * 1e-6) / bandwidth, 3)}
    return facts | {"consecutive": consecutive} | times | share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bandwidth = copy_bandwidth() if args.device == "cuda" else read_bandwidth()
    print(f"{processor_name()}: {bandwidth / 1e9:.1f} GB/s")
    results = []
    with torch.inference_mode():
        for (shape_name, dtype_name), rows in itertools.product(KINDS, (1, 32)):
            batches = [(np.full(1, 256), False), (np.full(1, 256), True)]
            if rows > 1:
                uneven = np.random.default_rng(1).integers(32, 257, rows)
                batches = [(np.full(rows, length), False) for length in (200, 272)] + [(uneven, False)]
            for seq_lens, consecutive in batches:
                result = measure(shape_name, dtype_name, seq_lens.astype(np.int32), args, consecutive, bandwidth)
                results.append(result)
                print(*(f"{name} {value}" for name, value in result.items()), sep="  ")
    facts = {"benchmark": "attention_decode", "threads": args.threads, "gb_per_s": round(bandwidth / 1e9, 1)}
    print(json.dumps(facts | {"results": results}))


if __name__ == "__main__":
    main()
