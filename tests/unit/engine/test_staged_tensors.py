"""Tensors on their way to the ranks: files in memory that a checkpoint's reader reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tp_engine.engine.staged_tensors import StagedTensors
from tp_engine.errors import RequestError
from tp_engine.weights.checkpoint import Checkpoint
from tp_engine.weights.source import Source, whole


def tensors() -> dict[str, torch.Tensor]:
    """Every type, odd sizes, a scalar, an empty tensor, strides, a gradient."""
    values = torch.arange(-7, 8, dtype=torch.float32)
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    integers = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    made = {str(dtype): values.to(dtype) for dtype in (*types, *integers)}
    made |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "strided": values.reshape(3, 5).t()}
    return made | {"parameter": torch.nn.Parameter(values.repeat(2))}


@pytest.mark.parametrize("file_bytes", [1, 100, 1 << 20])
def test_what_is_read_is_what_was_given(file_bytes: int) -> None:
    """Oracle: the tensors; the files are read by safetensors, through the paths that other processes use."""
    given = tensors()
    with StagedTensors(iter(given.items()), file_bytes=file_bytes) as staged:
        paths = [Path(file["path"]) for file in staged.files]
        assert (len(paths) > 1) == (file_bytes < 1 << 20)
        assert [os.stat(path).st_ino for path in paths] == [file["inode"] for file in staged.files]
        with Checkpoint(paths) as checkpoint:
            assert checkpoint.names() == set(given)
            for name, tensor in given.items():
                shape = tuple(tensor.shape)
                assert checkpoint.shape(name) == shape and checkpoint.dtype(name) == tensor.dtype
                if tensor.ndim:
                    source = Source(name=name, shape=shape, taken=whole(shape), target=whole(shape))
                    assert torch.equal(checkpoint.read(name, source), tensor.detach()), name
    assert not staged.files


def test_what_no_checkpoint_holds_is_refused() -> None:
    """Oracle: the promise; no descriptor is left."""
    before = len(os.listdir("/proc/self/fd"))
    one = torch.ones(2)
    for wrong, text in (
        ([], "there are no tensors"),
        ([("a", one), ("a", one)], "a comes twice"),
        ([("a", one), ("b", [1.0])], "b is list"),
        ([("a", one.to(torch.complex64))], r"a is a tensor of torch\.complex64"),
        ([("a", one.to_sparse())], "a is a tensor"),
    ):
        with pytest.raises(RequestError, match=text):
            StagedTensors(wrong, file_bytes=1)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        StagedTensors(((str(number), one / (1 // number)) for number in (1, 0)), file_bytes=1)
    assert len(os.listdir("/proc/self/fd")) == before
