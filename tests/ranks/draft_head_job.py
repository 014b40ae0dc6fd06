"""Run one batch of requests with drafts made on the ranks of a job, or without; for ``parity_job.main``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.ranks.speculation_job import run_once
from tests.services import engine_of
from tp_engine import LLM
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.features.speculation.proposer import DraftHeadProposer, Proposal
from tp_engine.features.speculation.scheduling import Speculation
from tp_engine.features.structured_output.scheduling import constraint_of
from tp_engine.plan import IntArray
from tp_engine.sched.sequence import Sequence


class Watched(DraftHeadProposer):
    """Keeps all drafts that are looked for of greedy requests: the tokens before them, and the drafts."""

    def __init__(self, method: str) -> None:
        super().__init__(SpeculativeConfig(method=method, model="any" if method == "eagle3" else None))
        self.seen: list[tuple[list[int], list[int]]] = []
        self.requests: list[str] = []

    def proposals(self, sequence: Sequence, tokens: IntArray, count: int) -> Iterable[Proposal]:
        """See ``Proposer``."""
        drafts = None if constraint_of(sequence) is not None else self._drafts.get(sequence.row)
        if drafts is not None and sequence.group.request.params.temperature == 0.0:
            self.seen.append((tokens.tolist(), drafts.tolist()))
            self.requests.append(sequence.request_id)
        return super().proposals(sequence, tokens, count)


def watch(llm: LLM) -> Watched | None:
    """Watch the drafts of a head from now on; None if there is no head."""
    speculation = engine_of(llm).scheduler.feature(Speculation)
    if speculation is None or not speculation.sources.has_head:
        return None
    (source,) = speculation.sources.sources
    watched = Watched(next(iter(source.most_matched)))
    speculation.sources.sources = [watched]
    return watched


def run(llm: LLM, case: dict[str, Any]) -> dict[str, Any]:
    """As ``run_once``, and with a drafter all drafts."""
    watched = watch(llm)
    return run_once(llm, case) if watched is None else {**run_once(llm, case), "drafts": watched.seen}
