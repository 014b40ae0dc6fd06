"""The safetensors files of a checkpoint, read slice by slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tp_engine.errors import WeightError
from tp_engine.model_config.checkpoint_files import weight_files, weight_map
from tp_engine.system.files import check_regular
from tp_engine.weights.source import Source

# Names of safetensors -> types.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Checkpoint:
    """An open checkpoint: one or several safetensors files, or the files that an index names.  A context manager.

    ``source`` is their folder, or the files themselves.  Several threads may read from it at once.
    """

    def __init__(self, source: Path | Sequence[Path]) -> None:
        self._stack = ExitStack()
        self._source = source
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Checkpoint:
        try:
            index = weight_map(self._source) if isinstance(self._source, Path) else {}
            for path in weight_files(self._source) if isinstance(self._source, Path) else self._source:
                self._open(path, index)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _open(self, path: Path, index: Mapping[str, Path]) -> None:
        """Add the tensors of a file; of one that is in several, the copy that the ``index`` names counts."""
        try:
            check_regular(path)
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: more than the process may map
            raise WeightError(f"{path} cannot be read as safetensors: {error}; is the download complete?") from error
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if name in self._files and name not in index:
                raise WeightError(f"{path.parent} holds tensor {name} in more than one file")
            if name not in self._files or index[name] == path:
                self._files[name] = file

    def names(self) -> set[str]:
        """Return all tensors of the files."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | str:
        """Return the tensor's type as stored; if PyTorch lacks the type, its name in the file."""
        stored = str(self._files[name].get_slice(name).get_dtype())
        return DTYPES.get(stored, stored)

    def read(self, name: str, source: Source) -> torch.Tensor:
        """Return the part of tensor ``name`` that ``source`` takes, as stored: a view of the mapped file, read page by
        page on access."""
        window = tuple(slice(span.start, span.start + span.size) for span in source.taken)
        tensor: torch.Tensor = self._files[name].get_slice(name)[window]
        return tensor
