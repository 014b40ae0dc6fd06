"""The one table of optional features.

A feature is a folder ``features/NAME/`` with a ``Feature`` called ``FEATURE`` in its ``__init__.py``.  The core knows
this table and no feature: it passes on what features put into ``extensions`` of its records, and asks here for their
halves, which are named as ``module:function`` and imported when they are needed, because this table, options and the
frontend do without torch::

    options.py       what a user sets                                 EngineConfig, the command line
    __init__.py      FEATURE: sections of the plan, statistics, metrics
    scheduling.py    SchedulerFeature: hooks of rank 0's scheduler    scheduler = "...:make"
    ranks.py         RunnerFeature: hooks of every rank's runner      runner = "...:make"
    anything else    what runs beside rank 0's engine                 engine = "...:open"

To move a feature here: move its files, name its halves in ``FEATURE``, its name in ``NAMES``; then give each field that
it has in a record of the core to a record of its own, an ``Extension``, or, of ``StepPlan``, to a section.  The table
in ``tests/unit/project/test_features.py`` counts the fields that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol

from tp_engine.features.extension import Extensible, Extension
from tp_engine.features.metric import FeatureMetric, MetricFamily, Samples

NAMES = ("lora", "images", "tiers", "speculation", "kv_events")
"""The folders, in the order in which the hooks of their features are called: tokens of a new request have their names
before others see them; loads that are brought forward come before draft tokens."""

ENTRY_POINTS = "tp_engine.features"
"""The group of entry points in which another distribution offers a ``Feature``."""


class PlanSection(Protocol):
    """A feature's part of the step plan (``ipc/plan_sections.py``)."""

    name: str

    def encode(self, value: Any, parts: list[Any]) -> int:
        """Append what ``value`` consists of to ``parts``; returns its size in bytes."""

    def decode(self, buffer: Any, offset: int, size: int, fields: Mapping[str, Any]) -> Any:
        """Return the value in ``size`` bytes from ``offset`` on."""


class Closable(Protocol):
    """What a feature has beside rank 0's engine."""

    def close(self) -> None:
        """Give back what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """What the core is told of a feature.

    ``scheduler`` and ``runner`` name functions that yield its halves, given ``SchedulerParts`` and ``RunnerParts``.
    ``engine`` names one that is given the configuration before any rank has started, and returns what the scheduler's
    half is to be given, with a ``close()``, or None.  ``stats`` is its part of ``SchedulerStats``, of which ``metrics``
    are read.
    """

    name: str
    sections: tuple[PlanSection, ...] = ()
    scheduler: str = ""
    runner: str = ""
    engine: str = ""
    stats: Extension[Any] | None = None
    metrics: tuple[FeatureMetric, ...] = ()


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


def load(name: str) -> Callable[..., Any]:
    """Import a function by its ``module:function``."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def plan_sections() -> Iterator[PlanSection]:
    """Yield the sections of all features, in an order that is the same in all processes."""
    for feature in features():
        yield from feature.sections


def open_parts(config: Any, undo: ExitStack) -> dict[str, Closable]:
    """Open what features have beside rank 0's engine, and let ``undo`` close it; by feature, for the scheduler."""
    opened = {}
    for feature in features():
        if feature.engine and (part := load(feature.engine)(config)) is not None:
            undo.callback(part.close)
            opened[feature.name] = part
    return opened


def halves(kind: str, parts: Any) -> Iterator[Any]:
    """Yield what the functions that features name as their ``kind`` (``scheduler``, ``runner``) make of ``parts``."""
    for feature in features():
        if name := getattr(feature, kind):
            yield from load(name)(parts)


def read_metrics(stats: Extensible) -> Iterator[tuple[MetricFamily, Samples]]:
    """Yield the metrics of the features that have a part in ``stats``, with their samples."""
    for feature in features():
        if feature.stats is not None and (found := feature.stats.get(stats)) is not None:
            yield from ((metric.family, metric.read(found)) for metric in feature.metrics)


@cache
def _installed() -> tuple[Feature, ...]:
    own = (import_module(f"tp_engine.features.{name}").FEATURE for name in NAMES)
    offered = sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)
    return (*own, *(point.load() for point in offered))
