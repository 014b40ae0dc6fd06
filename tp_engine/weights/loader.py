"""Fill all of this rank's parameters from a checkpoint, or fail: only the rank's slices are read, to the device."""

import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from tp_engine.errors import WeightError
from tp_engine.job.progress import tell_progress
from tp_engine.job.topology import RankInfo
from tp_engine.model_config.spec import ModelSpec
from tp_engine.weights.checkpoint import Checkpoint
from tp_engine.weights.dummy import DummyWeights
from tp_engine.weights.source import Source, keeps_stored_type, sources_of
from tp_engine.weights.transfer import Copy, for_each, num_threads_for

Stored: TypeAlias = Checkpoint | DummyWeights

# These types are converted into one another; a tensor of any other type must have the parameter's type.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_POWERS = torch.float8_e8m0fnu  # scales that are powers of two; they become float32
_NEVER_NEEDED = re.compile(r"\.rotary_emb\.inv_freq$")
_EMBEDDING = "model.embed_tokens.weight"
_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """``bytes_read`` of the checkpoint by this rank, in ``seconds``, from ``num_tensors``.

    ``mtp_tensors`` are the names of those of multi-token prediction, which are not read.
    """

    bytes_read: int
    seconds: float
    num_tensors: int
    mtp_tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Item:
    """One source of one parameter; ``name`` is the tensor's in the checkpoint."""

    name: str
    source: Source
    parameter: torch.Tensor


def load_weights(
    parameters: Mapping[str, torch.Tensor],
    spec: ModelSpec,
    source: Path | Sequence[Path],
    *,
    info: RankInfo,
    load_format: str = "auto",
    seed: int = 0,
    note_read: Callable[[], None] = lambda: None,
) -> LoadReport:
    """Set every one of ``parameters`` (a model's ``named_parameters``) to this rank's part of the checkpoint.

    ``source`` is its folder, or its files; ``note_read`` is called for each tensor that has been read.
    ``load_format`` ``dummy`` draws random weights from ``seed`` instead of reading it.  Floating point values
    are converted to each parameter's type.  Before a byte is read, ``WeightError`` names the tensors that are missing,
    unexpected, or of the wrong shape or type.
    """
    begin = time.perf_counter()
    first = next(iter(parameters.values()))
    with _open(parameters, source, load_format, seed, first) as stored, torch.no_grad():
        items = _items(parameters, spec, stored)
        mtp = spec.mtp_names(stored.names()) - {item.name for item in items}
        if spec.mtp is not None:  # its tensors are complete, but for copies of the model's own
            mtp = {name for name in mtp if name.endswith(_COPIES)}
        _check_tensors(stored, items, spec, mtp)
        _take_stored_types(stored, items)
        for name, parameter in parameters.items():
            _clear_uncovered(name, parameter)

        num_read = itertools.count(1)

        def load(item: _Item, copy: Copy) -> int:
            num_bytes = _load(stored, item, copy)
            note_read()
            tell_progress("loading weights", next(num_read), len(items), "tensors")
            return num_bytes

        # Random weights are already on the device.
        num_threads = 1 if load_format == "dummy" else num_threads_for(first.device, info.local_world_size)
        bytes_read = for_each(items, load, first.device, num_threads)
    num_tensors = len({item.name for item in items})
    seconds = time.perf_counter() - begin
    return LoadReport(bytes_read=bytes_read, seconds=seconds, num_tensors=num_tensors, mtp_tensors=tuple(sorted(mtp)))


def _open(
    parameters: Mapping[str, torch.Tensor],
    source: Path | Sequence[Path],
    load_format: str,
    seed: int,
    like: torch.Tensor,
) -> Stored:
    if load_format == "dummy":
        sources = (one for parameter in parameters.values() for one in sources_of(parameter))
        return DummyWeights(sources, seed, dtype=like.dtype, device=like.device)
    return Checkpoint(source)


def _items(parameters: Mapping[str, torch.Tensor], spec: ModelSpec, stored: Stored) -> list[_Item]:
    """Every source of every parameter, in the spelling that the checkpoint uses for the embedding."""
    found = stored.names()
    names, spellings = spec.names, spec.names.spellings
    chosen = next((one for one in spellings if names.spelled(_EMBEDDING, one) in found), spellings[0])

    def name_of(source: Source) -> str:
        return names.spelled(source.name, chosen) if source.is_spelled else source.name

    def is_stored(source: Source) -> bool:
        name = name_of(source)
        return name in found and stored.shape(name) == source.shape

    return [
        _Item(name_of(source), source, parameter)
        for parameter in parameters.values()
        for source in sources_of(parameter, is_stored)
    ]


def _load(stored: Stored, item: _Item, copy: Copy) -> int:
    """Copy one source's part to its target; returns the bytes read."""
    if not all(span.size for span in item.source.target):
        return 0
    values = stored.read(item.name, item.source)
    target = item.parameter
    for dim, span in enumerate(item.source.target):
        target = target.narrow(dim, span.start, span.size)
    try:
        decoded = item.source.decode(values)
    except WeightError as error:  # says what is wrong with the values
        raise WeightError(f"{item.name} {error}") from None
    assert decoded.shape == target.shape, f"{item.name}: {tuple(decoded.shape)} for {tuple(target.shape)}"
    copy(decoded, target)
    return values.nbytes


def _check_tensors(stored: Stored, items: list[_Item], spec: ModelSpec, mtp: set[str]) -> None:
    """Raise ``WeightError`` unless the checkpoint is what the configuration describes, and the tensors ``mtp``."""
    found = stored.names()
    expected = {item.name: item.source.shape for item in items}
    shapes = {name: stored.shape(name) for name in expected.keys() & found}
    problems = {
        "missing": expected.keys() - found,
        "unexpected": {name for name in found - expected.keys() - mtp if not _may_be_skipped(name, spec)},
        "wrongly shaped": [
            f"{name} is {shapes[name]} instead of {expected[name]}" for name in shapes if shapes[name] != expected[name]
        ],
        "of the wrong type": {
            f"{item.name} is stored as {stored.dtype(item.name)}, which cannot become {_wanted_type(item)}"
            for item in items
            if item.name in found and not _converts(stored.dtype(item.name), item)
        },
    }
    complaints = [f"{kind}: {_listed(names)}" for kind, names in problems.items() if names]
    if complaints:
        raise WeightError(f"the weights do not fit the model that config.json describes; {'; '.join(complaints)}")


def _may_be_skipped(name: str, spec: ModelSpec) -> bool:
    """Whether a checkpoint may hold this tensor although the model does not read it."""
    heads = tuple(f"{head}weight" for _, head in spec.names.spellings)
    is_tied_head = spec.is_tied and name in heads
    is_of_format = spec.quantization is not None and name.endswith(spec.quantization.skipped)
    return is_tied_head or is_of_format or name.startswith(spec.names.skipped) or bool(_NEVER_NEEDED.search(name))


def _wanted_type(item: _Item) -> torch.dtype:
    """The type that a source's tensor should have on disk, but for conversions among floats."""
    return item.parameter.dtype if item.source.dtype is None else item.source.dtype


def _converts(stored: torch.dtype | str, item: _Item) -> bool:
    wanted = _wanted_type(item)
    readable = (*FLOATS, _POWERS) if keeps_stored_type(item.parameter) else FLOATS
    return stored == wanted or (item.source.dtype is None and stored in readable and wanted in FLOATS)


def _take_stored_types(stored: Stored, items: list[_Item]) -> None:
    """Give the parameters that keep their tensors' type that type; float32 if it is not one, or is eight bits."""
    types: dict[torch.Tensor, set[torch.dtype]] = {}
    for item in items:
        dtype = stored.dtype(item.name)
        if keeps_stored_type(item.parameter) and isinstance(dtype, torch.dtype):
            types.setdefault(item.parameter, set()).add(torch.float32 if dtype is _POWERS else dtype)
    for parameter, found in types.items():
        parameter.data = torch.empty_like(parameter, dtype=found.pop() if len(found) == 1 else torch.float32)


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_NAMED} more" if len(ordered) > _MAX_NAMED else ""
    return ", ".join(ordered[:_MAX_NAMED]) + more


def _clear_uncovered(name: str, parameter: torch.Tensor) -> None:
    """Zero a parameter that its sources fill only in part; assert that they stay within it."""
    num_filled = 0
    for source in sources_of(parameter):
        num_filled += math.prod(span.size for span in source.target)
        ends = [span.start + span.size for span in source.target]
        assert all(end <= size for end, size in zip(ends, parameter.shape, strict=True)), f"{name}: {source}"
    assert num_filled <= parameter.numel(), f"{name} is filled more than once"
    if num_filled < parameter.numel():
        parameter.zero_()
