"""Speculation: draft tokens, of which one step verifies several (docs/speculation.md).

They are verified in *draft rows*: spare rows (``SchedulerLimits.num_spare_rows``) that stand for a row at later
positions in one step.  The last ``len(BASE_ROWS)`` of a plan's ``decode_rows`` are draft rows; ``BASE_ROWS`` (n,),
grouped, are the rows that they stand for, and ``DRAFT_TOKENS`` (n,) the draft tokens.  If a row goes on after its
computed position p, its first draft row has draft token 0 at p + 1, the next one draft token 1 at p + 2.  All are
sampled with the row's parameters::

    decode_rows | 4 7 64 65 66 |    BASE_ROWS | 4 4 7 |    DRAFT_TOKENS | 31 8 5 |

Of these tokens only that of the row itself counts at once.  Where draft tokens were right, a later plan says what
follows: ``KEPT_ROWS`` (n,), grouped, have one more computed token for each entry, after which ``KEPT_TOKENS`` (n,)
come.  A row's recurrent state is then copied from the draft row of its last kept token (``StepPlan.state_copies``).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tp_engine.features.extension import Extension
from tp_engine.features.metric import FeatureMetric, MetricFamily, Samples, counter
from tp_engine.features.registry import Feature
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.ipc.plan_sections import ArraySection, NumberSection
from tp_engine.plan import IntArray, StepPlan
from tp_engine.requests.request import SequenceDelta

BASE_ROWS = ArraySection("speculation.base_rows")
DRAFT_TOKENS = ArraySection("speculation.draft_tokens")
KEPT_ROWS = ArraySection("speculation.kept_rows")
KEPT_TOKENS = ArraySection("speculation.kept_tokens")

NUM_DRAFTS = NumberSection("speculation.num_drafts")
"""How many tokens the ranks' head drafts after each row that is sampled; they come back with the step's result
(``StepResult.drafts``)."""


def draft_rows(plan: StepPlan) -> IntArray:
    """Return the plan's draft rows."""
    return plan.decode_rows[len(plan.decode_rows) - len(BASE_ROWS.of(plan)) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationLimits:
    """How tokens are drafted.  ``decode_seconds``: numbers of decodes in a step, and the time that it takes, and
    ``draft_seconds``, that of one more draft of a head for each, if these decide how many draft tokens pay."""

    config: SpeculativeConfig
    decode_seconds: tuple[tuple[int, float], ...] = ()
    draft_seconds: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class DraftTally:
    """Of a sequence, the draft tokens that were verified for it, and those that were right."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def enter(self, delta: SequenceDelta) -> None:
        """Put both counts into a record of the sequence."""
        delta.num_draft_tokens, delta.num_accepted_tokens = self.num_draft_tokens, self.num_accepted_tokens


@dataclass(slots=True)
class SpeculationCounters:
    """Totals since the start: verified runs, their tokens, those that were right, and these by their place in the run;
    and tokens and right ones of each source."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)


LIMITS = Extension("speculation", SpeculationLimits)
TALLY = Extension("speculation", DraftTally)
COUNTERS = Extension("speculation", SpeculationCounters)


def _accepted_at(found: SpeculationCounters, _stats: Any) -> Samples:
    yield from (((str(place),), count) for place, count in enumerate(found.accepted_at))


def _of_sources(which: int) -> Callable[[SpeculationCounters, Any], Samples]:
    """Read a count of each source: 0 its draft tokens, 1 those that were right."""
    return lambda found, _stats: [((source,), counts[which]) for source, counts in found.by_source.items()]


FEATURE = Feature(
    name="speculation",
    sections=(BASE_ROWS, DRAFT_TOKENS, KEPT_ROWS, KEPT_TOKENS, NUM_DRAFTS),
    engine="tp_engine.features.speculation.ranks:open_speculation",
    scheduler="tp_engine.features.speculation.scheduling:make",
    rank="tp_engine.features.speculation.ranks:make",
    stats=COUNTERS,
    metrics=(
        counter("spec_decode_num_drafts", "runs of draft tokens that a step verified", "num_drafts"),
        counter("spec_decode_num_draft_tokens", "draft tokens that a step verified", "num_draft_tokens"),
        counter("spec_decode_num_accepted_tokens", "draft tokens that were right", "num_accepted_tokens"),
        FeatureMetric(
            MetricFamily(
                "counter",
                "spec_decode_num_accepted_tokens_per_pos",
                "draft tokens that were right, by their place in the run",
                ("position",),
            ),
            _accepted_at,
        ),
        FeatureMetric(
            MetricFamily(
                "counter",
                "spec_decode_source_draft_tokens",
                "draft tokens that were verified, by their source",
                ("source",),
            ),
            _of_sources(0),
        ),
        FeatureMetric(
            MetricFamily(
                "counter",
                "spec_decode_source_accepted_tokens",
                "draft tokens that were right, by their source",
                ("source",),
            ),
            _of_sources(1),
        ),
    ),
)
