"""Which files hold a checkpoint's weights, and what their headers say of each tensor, before one is read.  No torch.

A header has for each tensor ``{"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]}``; offsets count from the
header's end.
"""

import contextlib
from collections.abc import Generator, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from tp_engine.errors import ConfigError, WeightError
from tp_engine.model_config.source import other_content
from tp_engine.system.files import MAX_INDEX_BYTES, open_regular, read_header, read_json

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
# Copies of the weights for other programs, and adapters of the model.
_OTHERS = ("consolidated", "adapter_model")
_CHUNK_BYTES = 1 << 20
_MAX_NAMED = 5

# Types that the model may have -> their names here; transformers takes the first such tensor's type too.
_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class TensorInfo(NamedTuple):
    """A tensor in a file: bytes ``begin`` to ``end`` of ``path``, of the library's type ``dtype``."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: those that the index names, or ``model.safetensors``, or all but
    copies for other programs.

    Raises ``WeightError`` for an index that is broken or names absent files, ``ConfigError`` if there are no weights.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        named = sorted(set(weight_map(folder).values()))
        missing = [path.relative_to(folder).as_posix() for path in named if not path.is_file()]
        if missing:
            more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
            listed = ", ".join(missing[:_MAX_NAMED]) + more
            raise WeightError(f"{index} names {listed}, which is not there; is the download complete?")
        return named
    if (folder / WEIGHTS_FILE).exists():
        return [folder / WEIGHTS_FILE]
    paths = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith(_OTHERS)]
    if not paths:
        problem, other = f"{folder} holds no *.safetensors of a whole model", other_content(folder)
        remedy = "convert the weights to safetensors, or use load_format='dummy' for a run with random weights"
        raise ConfigError(f"{problem}, but {other}" if other else f"{problem}; {remedy}")
    return paths


def weight_map(folder: Path) -> dict[str, Path]:
    """Tensors -> files below ``folder``, as its index says; empty without an index.  Raises ``WeightError``."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return {}
    try:
        found = read_json(index, MAX_INDEX_BYTES)["weight_map"]
        if not all(_is_below(name) for name in found.values()):
            raise ValueError("it names files outside of its folder")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightError(f"{index} is not an index of safetensors files ({error!r})") from error
    return {name: folder / file for name, file in found.items()}


def _is_below(name: object) -> bool:
    return isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts


class CheckpointHeaders:
    """The tensors of a checkpoint, its folder or its files, by their headers.

    None if these cannot be read: the loader says what is wrong with them.
    """

    def __init__(self, source: Path | Sequence[Path]) -> None:
        self._headers: dict[Path, dict[str, TensorInfo]] = {}
        self._file_of: dict[str, Path] = {}
        self._first: Path | None = None
        with contextlib.suppress(OSError, ValueError, ConfigError, WeightError):
            paths = weight_files(source) if isinstance(source, Path) else source
            self._file_of = weight_map(source) if isinstance(source, Path) else {}
            self._file_of = self._file_of or {name: path for path in paths for name in self._header(path)}
            self._first = next(iter(paths), None)

    @property
    def names(self) -> Set[str]:
        """The names of all tensors."""
        return self._file_of.keys()

    def find(self, name: str) -> TensorInfo | None:
        """Return the tensor of that name; None if there is none, or if its file cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            return self._header(self._file_of[name]).get(name) if name in self._file_of else None
        return None

    @property
    def dtype(self) -> str | None:
        """The type of the first file's first tensor, by name, of a type that a model may have; None without one."""
        found: dict[str, TensorInfo] = {}
        with contextlib.suppress(OSError, ValueError):
            found = {} if self._first is None else self._header(self._first)
        types = (_FLOATS.get(found[name].dtype) for name in sorted(found))
        return next(filter(None, types), None)

    def _header(self, path: Path) -> dict[str, TensorInfo]:
        if path not in self._headers:
            self._headers[path] = _read_header(path)
        return self._headers[path]


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """A file's tensors.  Raises ``OSError`` or ``ValueError``."""
    found, first_byte = read_header(path)
    try:
        return {name: _tensor(path, entry, first_byte) for name, entry in found.items() if name != "__metadata__"}
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} is no safetensors file: {error!r}") from error


def _tensor(path: Path, entry: Any, first_byte: int) -> TensorInfo:
    begin, end = (first_byte + int(offset) for offset in entry["data_offsets"])
    return TensorInfo(path, str(entry["dtype"]), tuple(map(int, entry["shape"])), begin, end)


def are_equal(one: TensorInfo, other: TensorInfo) -> bool:
    """Return whether two tensors have the same type, shape and bytes.  Ends at the first difference."""
    if (one.dtype, one.shape, one.end - one.begin) != (other.dtype, other.shape, other.end - other.begin):
        return False
    with contextlib.closing(_chunks(one)) as ones, contextlib.closing(_chunks(other)) as others:
        return all(first == second for first, second in zip(ones, others, strict=False))


def _chunks(tensor: TensorInfo) -> Generator[bytes]:
    with open_regular(tensor.path) as file:
        file.seek(tensor.begin)
        for begin in range(tensor.begin, tensor.end, _CHUNK_BYTES):
            if not (chunk := file.read(min(_CHUNK_BYTES, tensor.end - begin))):
                return  # a truncated file: the loader refuses it
            yield chunk
