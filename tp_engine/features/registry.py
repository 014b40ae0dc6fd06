"""The one table of optional features.

A feature is a folder ``features/NAME/`` with a ``Feature`` called ``FEATURE`` in its ``feature.py``.  The core knows
this table and no feature: it passes on what features put into ``extensions`` of its records, and asks here for their
halves, which are named as ``module:function`` and imported when they are needed, because this table, options and the
frontend do without torch::

    options.py       what a user sets: EngineConfig, the command line
    feature.py       FEATURE, sections of the plan, records behind extensions, metrics
    checks.py        what a model, GPUs or hosts cannot have          check = "...:check"
    scheduling.py    SchedulerFeature: hooks of rank 0's scheduler     scheduler = "...:make"
    ranks.py         RankFeature: a rank's memory, what it opens       rank = "...:make"
                     RunnerFeature: hooks of a rank's runner           runner = "...:make"
    anything else    EngineFeature: what stands beside rank 0's loop   engine = "...:open"

To move a feature here: move its files, name its halves in ``FEATURE``, its name in ``NAMES``; then give each field that
it has in a record of the core to a record of its own, an ``Extension``, or, of ``StepPlan``, to a section.  The table
in ``tests/unit/project/test_features.py`` counts the fields that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar

from tp_engine.errors import ConfigError, shown
from tp_engine.features.extension import Extensible, Extension
from tp_engine.features.metric import FeatureMetric, MetricFamily, Samples
from tp_engine.options.fields import json_object

NAMES = ("lora", "images", "tiers", "prompt_outputs", "structured_output", "speculation", "kv_events")
"""The folders, in the order in which the hooks of their features are called: tokens of a new request have their names
before others see them; loads that are brought forward come before draft tokens."""

_FEATURE_OPTIONS = "feature_options"

Half = TypeVar("Half")

ENTRY_POINTS = "tp_engine.features"
"""The group of entry points in which another distribution offers a ``Feature``."""


class PlanSection(Protocol):
    """A feature's part of the step plan (``ipc/plan_sections.py``)."""

    name: str

    def encode(self, value: Any, parts: list[Any]) -> int:
        """Append what ``value`` consists of to ``parts``; returns its size in bytes."""

    def decode(self, buffer: Any, offset: int, size: int, fields: Mapping[str, Any]) -> Any:
        """Return the value in ``size`` bytes from ``offset`` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """What the core is told of a feature.

    ``options`` are of a dataclass with the decorator ``checked``: the part of ``EngineConfig`` of a feature of another
    distribution, set by ``feature_options``; those of this one are fields of ``EngineConfig``.

    ``check`` names a function that raises ``ConfigError`` for what a model, GPUs or hosts cannot have of the feature.
    ``scheduler``, ``rank`` and ``runner`` name functions that yield its halves, given ``SchedulerParts``, ``RankParts``
    and ``RunnerParts``: the second has one half, which lives as long as the rank and may have halves of runners itself.
    ``engine`` names one that is given the configuration before any rank has started, and returns an ``EngineFeature``,
    or None.  ``commands`` names one that returns what an operator may ask for, by name.  ``stats`` is its part of
    ``SchedulerStats``, of which ``metrics`` are read, also while it is switched off if it ``tells_zeros``.
    """

    name: str
    options: Extension[Any] | None = None
    sections: tuple[PlanSection, ...] = ()
    check: str = ""
    scheduler: str = ""
    rank: str = ""
    runner: str = ""
    engine: str = ""
    commands: str = ""
    stats: Extension[Any] | None = None
    metrics: tuple[FeatureMetric, ...] = ()
    tells_zeros: bool = False


_added: list[Feature] = []


def features() -> Sequence[Feature]:
    """Return all features there are: the table's, those of other distributions, and those that were added."""
    return (*_installed(), *_added)


@contextmanager
def added(feature: Feature) -> Iterator[None]:
    """Add a feature to this process for a while, for tests."""
    assert all(feature.name != one.name for one in features()), f"there is a feature {feature.name} already"
    _added.append(feature)
    try:
        yield
    finally:
        _added.remove(feature)


def find_half(halves_made: Iterable[object], kind: type[Half]) -> Half | None:
    """Return the half of this kind; None if its feature is switched off."""
    return next((one for one in halves_made if isinstance(one, kind)), None)


def load(name: str) -> Callable[..., Any]:
    """Import a function by its ``module:function``."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def take_feature_options(given: object) -> dict[str, Any]:
    """Return the option ``feature_options`` as a mapping: the options of features that have some, by feature, as plain
    data.  Raises ``ConfigError`` for another feature, and for what one does not take."""
    known = {feature.name: feature.options.kind for feature in features() if feature.options is not None}
    found = json_object(_FEATURE_OPTIONS, given, known or None)
    if found and not known:
        raise ConfigError(
            f"{_FEATURE_OPTIONS} names {shown(next(iter(found)))}, but no other distribution that is installed adds a "
            "feature with options: install it, or leave the option out"
        )
    for name, values in found.items():
        within = f"{_FEATURE_OPTIONS}.{name}"
        known[name](**json_object(within, values, [spec.name for spec in fields(known[name])]))
    return found


def plan_sections() -> Iterator[PlanSection]:
    """Yield the sections of all features, in an order that is the same in all processes."""
    for feature in features():
        yield from feature.sections


def check_features(config: Any, model: Any, capability: tuple[int, int] | None, num_hosts: int) -> None:
    """Raise ``ConfigError`` for what ``model``, GPUs of this compute capability, or so many hosts cannot have."""
    for feature in features():
        if feature.check:
            load(feature.check)(config, model, capability, num_hosts)


def open_parts(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield what features have beside rank 0's engine, each an ``EngineFeature`` with its name."""
    for feature in features():
        if feature.engine and (part := load(feature.engine)(config)) is not None:
            yield feature.name, part


def commands() -> dict[str, Callable[..., dict[str, Any]]]:
    """Return what operators may ask features for, by name."""
    found: dict[str, Callable[..., dict[str, Any]]] = {}
    for feature in features():
        if feature.commands:
            found |= load(feature.commands)()
    return found


def halves(kind: str, parts: Any) -> Iterator[Any]:
    """Yield what the functions that features name as this ``kind`` (``scheduler``, ``rank``, ``runner``) make."""
    yield from (half for _, half in named_halves(kind, parts))


def named_halves(kind: str, parts: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``halves`` with the names of their features."""
    for feature in features():
        if name := getattr(feature, kind):
            yield from ((feature.name, half) for half in load(name)(parts))


def read_metrics(stats: Extensible) -> Iterator[tuple[MetricFamily, Samples]]:
    """Yield the metrics of the features that have a part in ``stats``, with their samples."""
    for feature in features():
        found = None if feature.stats is None else feature.stats.get(stats)
        if found is None and feature.stats is not None and feature.tells_zeros:
            found = feature.stats.kind()
        if found is not None:
            yield from ((metric.family, metric.read(found, stats)) for metric in feature.metrics)


@cache
def _installed() -> tuple[Feature, ...]:
    own = (import_module(f"tp_engine.features.{name}.feature").FEATURE for name in NAMES)
    offered = sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)
    return (*own, *(point.load() for point in offered))
