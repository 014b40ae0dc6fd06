"""Optional features own their data: what the core's records still have of them, and what the core imports of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import numpy as np
import pytest

from tests.fake_engine import FakeEngine
from tests.unit.project.test_imports import Use, all_uses
from tests.unit.sched.scheduler_harness import Simulation, limits
from tp_engine.config import EngineConfig
from tp_engine.engine.feature import EngineFeature
from tp_engine.errors import ConfigError
from tp_engine.features.extension import Extension
from tp_engine.features.metric import counter
from tp_engine.features.registry import Feature, added, find_half, halves, open_parts, plan_sections
from tp_engine.ipc.plan_codec import PlanCodec
from tp_engine.ipc.plan_sections import SECTIONS, ArraySection, ExtensionSection, NumberSection
from tp_engine.options.fields import checked, key
from tp_engine.options.flags import plain_spelling
from tp_engine.options.intake import take_options
from tp_engine.plan import IntArray, StepPlan
from tp_engine.requests.request import EngineRequest
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.sched.feature import SchedulerFeature, SchedulerHooks, SchedulerParts
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.sched.scheduler import Scheduler
from tp_engine.sched.sequence import Sequence
from tp_engine.sched.step_scheduler import StepPlanBuilder
from tp_engine.sched.view import SchedulerStats
from tp_engine.server.metrics import ServerMetrics
from tp_engine.worker.feature import RunnerFeature, RunnerHooks

# The fields of the core's records that belong to an optional feature.  What is not named here is the core's.
OWNERS: dict[type[Any], dict[str, tuple[str, ...]]] = {
    StepPlan: {
        "new weights": ("order",),
        "images": ("images", "encodes", "image_rows"),
        "recurrent states": ("state_copies",),
    },
    Sequence: {
        "recurrent states": ("snapshots_at",),
    },
    SchedulerLimits: {
        "recurrent states": ("has_states", "num_snapshots"),
    },
    SchedulerStats: {},
    EngineRequest: {
        "pooling": ("pooling",),
        "images": ("images",),
        "agents": ("will_continue",),
    },
    StepPlanBuilder: {
        "recurrent states": ("state_copies", "snapshots"),
    },
}  # fmt: skip

MOST_OPTIONAL = 13  # of the 93 fields of all these records: fewer than one in six

# Features that stand in the core's folders until they are moved, and what the core imports of them.
NOT_MOVED = ("worker.image_encoder",)
LEFT = {
    ("worker/features.py", "worker.image_encoder"),
}

CORE = ("tp_engine/sched/", "tp_engine/worker/", "tp_engine/engine/", "tp_engine/ipc/", "tp_engine/plan.py")
TABLES = {"extension", "metric", "registry"}


def names_of(kind: type[Any]) -> set[str]:
    """The fields that a record is made with."""
    if issubclass(kind, msgspec.Struct):
        return set(kind.__struct_fields__)
    return {one.name for one in dataclasses.fields(kind) if one.init}


def test_the_core_has_few_fields_of_features() -> None:
    """Oracle: the fields of the records, and the table of their owners above."""
    total = sum(len(names_of(kind)) for kind in OWNERS)
    optional = {kind: {name for names in owners.values() for name in names} for kind, owners in OWNERS.items()}
    for kind, names in optional.items():
        assert names <= names_of(kind), f"not fields of {kind.__name__} any more: {sorted(names - names_of(kind))}"
    count = sum(map(len, optional.values()))
    print(f"{count} of {total} fields: { ({kind.__name__: len(names) for kind, names in optional.items()}) }")
    assert count <= MOST_OPTIONAL, f"{count} of {total} fields belong to optional features"


def of_the_core(use: Use) -> bool:
    return is_of_core(use.path) and use.names("tp_engine.features")


def is_of_core(path: str) -> bool:
    """Whether the file is neither a feature's nor outside of the core."""
    module = path.removeprefix("tp_engine/").removesuffix(".py").replace("/", ".")
    return path.startswith(CORE) and not module.startswith(NOT_MOVED)


def test_the_core_imports_no_feature() -> None:
    """Oracle: the imports of sched/, worker/, engine/, ipc/ and plan.py; the registry is no feature."""
    broken = [
        f"{use.path}:{use.line}: {use.name}"
        for use in all_uses()
        if of_the_core(use) and use.name.split(".")[2] not in TABLES
    ]
    assert not broken, "the core must not import a feature:\n  " + "\n  ".join(broken)


def test_what_the_core_imports_of_features_that_stand_in_it() -> None:
    """Oracle: the list above, which only becomes shorter."""
    found = set()
    for use in all_uses():
        importer = use.path.removeprefix("tp_engine/")
        if is_of_core(use.path):
            found |= {(importer, one) for one in NOT_MOVED if use.names(f"tp_engine.{one}")}
    assert found == LEFT, f"new: {sorted(found - LEFT)}; to be struck off: {sorted(LEFT - found)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Beat:
    """What the toy counts."""

    num_beats: int = 0


@checked("drum")
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrumOptions:
    """What a user sets of the toy."""

    volume: int = key(1, least=1, most=11)


OPTIONS = Extension("drum", DrumOptions)
BEATS = ArraySection("drum.beats", columns=2)
VOLUME = NumberSection("drum.volume")
COUNTERS = Extension("drum", Beat)


class Drummer(SchedulerFeature):
    """Beats with every step."""

    def __init__(self, volume: int) -> None:
        self._volume, self._num_beats = volume, 0

    def attach(self, hooks: SchedulerHooks) -> None:
        hooks.finish_plan.append(self.finish_plan)
        hooks.stats.append(self.stats)

    def finish_plan(self, plan: StepPlan) -> StepPlan:
        self._num_beats += 1
        beat = np.array([[plan.step_id, self._num_beats]], np.int32)
        own = {BEATS.name: beat, VOLUME.name: self._volume}
        return msgspec.structs.replace(plan, extensions={**plan.extensions, **own})

    def stats(self) -> dict[str, Any]:
        return {COUNTERS.name: Beat(self._num_beats)}


class Listener(RunnerFeature):
    """Hears the beats on a rank."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, IntArray]] = []

    def attach(self, hooks: RunnerHooks) -> None:
        hooks.apply.append(self.apply)

    def apply(self, plan: StepPlan) -> None:
        self.heard.append((VOLUME.of(plan), BEATS.of(plan)))


def make_drummer(parts: SchedulerParts) -> Iterator[SchedulerFeature]:
    yield Drummer(parts.given["drum"])


class Stand(EngineFeature):
    """What the toy has beside rank 0's engine: its options."""

    def __init__(self, options: DrumOptions) -> None:
        self._options = options

    @property
    def given(self) -> int:
        return self._options.volume

    def close(self) -> None:
        pass


def open_stand(config: EngineConfig) -> Stand:
    return Stand(OPTIONS.get(config) or DrumOptions())


def make_listener(parts: object) -> Iterator[RunnerFeature]:
    yield Listener()


DRUM = Feature(
    name="drum",
    options=OPTIONS,
    sections=(BEATS, VOLUME),
    engine=f"{__name__}:open_stand",
    scheduler=f"{__name__}:make_drummer",
    runner=f"{__name__}:make_listener",
    stats=COUNTERS,
    metrics=(counter("drum_beats", "beats of the drum", "num_beats"),),
)


def test_a_feature_is_added_from_outside() -> None:
    """Oracle: the drum's beats, by hand: decided by rank 0, sent as bytes, heard by a rank, counted in the metrics."""
    with added(DRUM):
        codec = PlanCodec([one if one.name != "extensions" else own_extensions() for one in SECTIONS])
        flag, text = plain_spelling(["--feature-options.drum.volume", "7"])
        config = EngineConfig(**take_options({flag.removeprefix("--").replace("-", "_"): text}, [EngineConfig]))
        scheduler, hooks = Scheduler(limits(), given=opened(config)), RunnerHooks()
        listener = find_half(halves("runner", MagicMock()), Listener)
        assert listener is not None
        listener.attach(hooks)
        scheduler.add(EngineRequest(request_id="a", prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=2)))
        plan = scheduler.schedule()
        assert plan is not None
        for apply in hooks.apply:
            apply(codec.decode(codec.encode(plan)))
        ((volume, beats),) = listener.heard
        assert (volume, beats.tolist()) == (7, [[1, 1]])
        report = replace(FakeEngine().report(), stats=scheduler.stats())
        text = ServerMetrics("m").exposition(report).decode()
        assert 'tp_engine:drum_beats_total{model_name="m"} 1.0' in text
        over_the_wire = msgspec.msgpack.decode(msgspec.msgpack.encode(scheduler.stats()), type=SchedulerStats)
        assert COUNTERS.get(over_the_wire) == Beat(1)
    assert BEATS.of(StepPlan(step_id=1)).shape == (0, 2) and VOLUME.of(StepPlan(step_id=1)) == 0


def opened(config: EngineConfig) -> dict[str, Any]:
    """What the features have beside the engine gives the scheduler."""
    return {name: part.given for name, part in open_parts(config)}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"drum": {"volume": 12}}, "drum: volume is 12; it must be at least 1, and at most 11"),
        ({"drum": {"loud": 1}}, "feature_options.drum names 'loud'; it can set volume"),
        ({"harp": {}}, "feature_options names 'harp'; it can set drum"),
    ],
)
def test_options_of_features_are_checked_at_the_door(given: dict[str, Any], error: str) -> None:
    """Oracle: the value, the rule and the remedy, by hand."""
    with added(DRUM), pytest.raises(ConfigError, match=re.escape(error)):
        EngineConfig(feature_options=given)


def test_options_of_features_that_there_are_not() -> None:
    """Oracle: the value, the rule and the remedy, by hand."""
    with pytest.raises(
        ConfigError, match=r"names 'drum', but no other distribution .* install it, or leave the option"
    ):
        EngineConfig(feature_options={"drum": {"volume": 2}})
    assert EngineConfig(feature_options={}).extensions == EngineConfig().extensions == {}


def own_extensions() -> ExtensionSection:
    """The sections of the features that there are now; those of the running program are read once."""
    return ExtensionSection("extensions", plan_sections)


def test_a_feature_may_have_nothing_in_a_record() -> None:
    """Oracle: by hand; what is made on demand stays."""
    stats = Simulation(limits()).scheduler.stats()
    assert COUNTERS.get(stats) is None
    assert COUNTERS.of(stats) is COUNTERS.get(stats) is COUNTERS.of(stats)


def test_two_features_of_one_name_are_refused() -> None:
    """Oracle: the rule."""
    with added(DRUM), pytest.raises(AssertionError, match="drum"), added(DRUM):
        pass
