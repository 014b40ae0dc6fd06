"""Fill this rank's parameters from a checkpoint, completely or not at all: its slices alone, straight to the device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tp_engine.dist.rank import RankInfo
from tp_engine.errors import WeightError
from tp_engine.model_config import ModelConfig
from tp_engine.weights.checkpoint import Checkpoint
from tp_engine.weights.dummy import DummyWeights
from tp_engine.weights.layout import Layout, Placement
from tp_engine.weights.transfer import Copy, for_each, num_threads_for

_MAX_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """``bytes_read`` of the checkpoint by this rank, in ``seconds``, for ``num_tensors``."""

    bytes_read: int
    seconds: float
    num_tensors: int


def load_weights(
    parameters: Mapping[str, torch.Tensor],
    config: ModelConfig,
    folder: Path,
    *,
    info: RankInfo,
    load_format: str = "auto",
    seed: int = 0,
) -> LoadReport:
    """Set every one of ``parameters`` (a model's ``named_parameters``) to this rank's part of the checkpoint.

    ``load_format`` ``dummy`` draws random weights from ``seed`` instead of reading ``folder``.  Values are converted to
    each parameter's type.  Raises ``WeightError`` with the tensors that are missing, unexpected or wrongly shaped.
    """
    begin = time.perf_counter()
    embedding = parameters["embed_tokens.weight"]
    layout = Layout(config, rank=info.rank, world_size=info.world_size, vocab_rows=embedding.shape[0])
    _check_cover(parameters, layout.placements)
    with _open_source(layout, folder, load_format, seed, embedding) as source, torch.no_grad():
        _check_tensors(source, layout)

        def load(placement: Placement, copy: Copy) -> int:
            return _load(source, placement, parameters[placement.parameter], copy)

        # Random weights are on the device already.
        num_threads = 1 if load_format == "dummy" else num_threads_for(embedding.device, info.local_world_size)
        bytes_read = for_each(layout.placements, load, embedding.device, num_threads)
    return LoadReport(bytes_read=bytes_read, seconds=time.perf_counter() - begin, num_tensors=len(layout.placements))


def _open_source(
    layout: Layout, folder: Path, load_format: str, seed: int, like: torch.Tensor
) -> Checkpoint | DummyWeights:
    if load_format == "dummy":
        shapes = {placement.name: placement.shape for placement in layout.placements}
        return DummyWeights(shapes, seed, dtype=like.dtype, device=like.device)
    return Checkpoint(folder)


def _load(source: Checkpoint | DummyWeights, placement: Placement, parameter: torch.Tensor, copy: Copy) -> int:
    """Copy one shard to its place and clear the rows that pad it; returns the bytes read."""
    shard = placement.shard
    target = parameter.narrow(0, placement.offset, shard.room if shard.dim == 0 else parameter.shape[0])
    if shard.size < shard.room:
        target[shard.size :].zero_()
    if shard.size == 0:
        return 0
    values = source.read(placement.name, shard)
    copy(values, target[: shard.size] if shard.dim == 0 else target)
    return values.nbytes


def _check_tensors(source: Checkpoint | DummyWeights, layout: Layout) -> None:
    """Refuse a checkpoint that is not exactly the one that the configuration describes."""
    found = source.names()
    expected = {placement.name: placement.shape for placement in layout.placements}
    shapes = {name: source.shape(name) for name in expected.keys() & found}
    wrong = [
        f"{name} is {shapes[name]} instead of {expected[name]}" for name in shapes if shapes[name] != expected[name]
    ]
    problems = {
        "missing": expected.keys() - found,
        "unexpected": {name for name in found - expected.keys() if not layout.is_harmless(name)},
        "wrongly shaped": wrong,
    }
    complaints = [f"{kind}: {_listed(names)}" for kind, names in problems.items() if names]
    if complaints:
        raise WeightError(f"the checkpoint does not fit its config.json; {'; '.join(complaints)}")


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_NAMED} more" if len(ordered) > _MAX_NAMED else ""
    return ", ".join(ordered[:_MAX_NAMED]) + more


def _check_cover(parameters: Mapping[str, torch.Tensor], placements: Iterable[Placement]) -> None:
    """Assert that the placements fill every parameter exactly once: our own bookkeeping, not the user's."""
    filled = dict.fromkeys(parameters, 0)
    for placement in placements:
        filled[placement.parameter] += placement.shard.room if placement.shard.dim == 0 else placement.shape[0]
    wrong = {name: rows for name, rows in filled.items() if rows != parameters[name].shape[0]}
    assert not wrong, f"rows filled, not equal to the parameters' rows: {wrong}"
