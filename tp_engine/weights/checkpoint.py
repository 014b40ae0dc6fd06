"""The safetensors files of a checkpoint, read slice by slice."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tp_engine.errors import ConfigError, WeightError
from tp_engine.weights.shard import Shard

READABLE = (torch.float32, torch.bfloat16, torch.float16)
INDEX_FILE = "model.safetensors.index.json"


class Checkpoint:
    """An open checkpoint: one safetensors file, several, or those that an index names.  A context manager.

    Several threads may read from it at once.
    """

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._folder = folder
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Checkpoint:
        try:
            for path in _weight_files(self._folder):
                self._open(path)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _open(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise WeightError(f"{path} can not be read as safetensors: {error}; is the download complete?") from error
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if name in self._files:
                raise WeightError(f"{self._folder} holds tensor {name} in more than one file")
            self._files[name] = file

    def names(self) -> set[str]:
        """All tensors of the files."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str, shard: Shard) -> torch.Tensor:
        """The shard alone, in the checkpoint's type: a view of the mapped file, whose pages are read when it is."""
        window = [slice(None)] * shard.dim + [slice(shard.start, shard.start + shard.size)]
        tensor: torch.Tensor = self._files[name].get_slice(name)[tuple(window)]
        if tensor.dtype not in READABLE:
            raise WeightError(f"{name} is stored as {tensor.dtype}; only {', '.join(map(str, READABLE))} can be loaded")
        return tensor


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightError(f"{index} is not an index of safetensors files ({error!r})") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise WeightError(f"{index} names {', '.join(missing)}, which is not there; is the download complete?")
        return [folder / name for name in names]
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(
            f"{folder} holds no *.safetensors; convert the weights to safetensors, or use load_format='dummy' for a "
            "run with random weights"
        )
    return paths
