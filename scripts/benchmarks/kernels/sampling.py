"""Sampling for ``bench_kernels``: one rank's kernels, from logits to token ids."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.kernels.cases import KernelCase, Launch, Shape
from tp_engine.distributed.collectives import SingleRank
from tp_engine.plan import RowSampling
from tp_engine.sampling.device_sampler import DeviceSampler
from tp_engine.sampling.state import SamplingState

WAYS = {
    "greedy": RowSampling(),
    "temperature": RowSampling(temperature=0.8, seed=1),
    "penalties": RowSampling(temperature=0.8, frequency_penalty=0.5, seed=1),
    "min_p": RowSampling(temperature=0.8, min_p=0.05, seed=1),
    "top_k 50": RowSampling(temperature=0.8, top_k=50, seed=1),
    "top_k 20, top_p 0.95": RowSampling(temperature=0.6, top_k=20, top_p=0.95, seed=1),
    "top_p 0.95, flat": RowSampling(temperature=0.8, top_p=0.95, seed=1),
    "top_p 0.95, peaked": RowSampling(temperature=0.8, top_p=0.95, seed=1),
}
# The logits' standard deviation: with 8, as in real text, the nucleus has few tokens; with 3, tens of thousands.
SPREAD, PEAKED_SPREAD = 3.0, 8.0


def sampling_cases(shape: Shape, num_rows: int, vocab_size: int) -> Iterator[KernelCase]:
    """Rows that are all sampled in the same way.  Bytes count one read of the logits; filters read them again."""
    for name, sampling in WAYS.items():
        yield KernelCase(
            kernel=f"sample: {name}",
            size=f"{num_rows} x {vocab_size}",
            num_bytes=num_rows * vocab_size * shape.dtype.itemsize,
            make=partial(_launch, shape, num_rows, vocab_size, sampling, PEAKED_SPREAD if "peaked" in name else SPREAD),
        )


def _launch(shape: Shape, num_rows: int, vocab_size: int, sampling: RowSampling, spread: float) -> Launch:
    device, prompt = torch.device(shape.device), np.arange(4, dtype=np.int32)
    state = SamplingState(max_num_seqs=num_rows, vocab_size=vocab_size, device=device, has_tables=True)
    for row in range(num_rows):
        state.admit(row, sampling, prompt, len(prompt))
    sampler = DeviceSampler(state, SingleRank())
    rows, positions = np.arange(num_rows, dtype=np.int32), np.full(num_rows, len(prompt), dtype=np.int32)
    kind = sampler.kind_of(rows, positions)
    assert kind is not None, f"no kernel samples {sampling}"
    logits = (spread * torch.randn(num_rows, vocab_size, device=device)).to(shape.dtype)
    on_device = [torch.from_numpy(array).to(device) for array in (rows, positions.astype(np.int64) - 1)]
    return lambda: sampler.sample(kind, logits, *on_device)
