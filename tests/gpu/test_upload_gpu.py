"""Uploads to a GPU through pinned memory that is used in turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tp_engine.layers.upload import upload_all, upload_into

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_arrays_arrive_while_the_gpu_is_busy() -> None:
    """Oracle: the arrays, about 60 MB in all: five times the pinned memory, one array larger than a part of it; the GPU
    copies while the host goes on and writes the next ones."""
    device, rng = torch.device("cuda", torch.cuda.current_device()), np.random.default_rng(0)
    busy = torch.ones((4096, 4096), device=device)
    kept, targets = [], []
    for number in range(300):
        busy = busy @ busy * 1e-4
        size = 1_500_000 if number == 7 else int(rng.integers(0, 30_000))
        arrays: list[npt.NDArray[Any]] = [
            rng.integers(0, 1 << 30, size).astype(np.int32), rng.integers(0, 1 << 40, 3), rng.random(size // 3) < 0.5,
        ]  # fmt: skip
        target = torch.zeros(size, dtype=torch.int32, device=device)
        upload_into(target, arrays[0])
        kept += arrays
        targets += [*upload_all(arrays, device)]
        kept.append(arrays[0])
        targets.append(target)
    torch.cuda.synchronize()
    for array, tensor in zip(kept, targets, strict=True):
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)
        assert tensor.data_ptr() % 16 == 0
