"""The summary of a batch job, as text for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tp_engine.api.batch_job.config import STANDARD_STREAM, BatchConfig
from tp_engine.api.batch_job.survey import LineState, Survey
from tp_engine.outputs import RequestOutput


class BatchStatus(StrEnum):
    """How the job ended."""

    COMPLETED = "completed"  # every line has its result
    STOPPED = "stopped"  # by request; the same command continues
    FAILED = "failed"  # by an error; the same command continues
    VALIDATED = "validated"  # lines were checked, nothing was run


@dataclass(slots=True)
class Tally:
    """Counts of this run: lines by outcome, tokens, and finish reasons of sequences."""

    num_succeeded: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def succeeded(self, outputs: Sequence[RequestOutput]) -> None:
        """Count an answered line; ``outputs`` are those of its prompts."""
        self.num_succeeded += 1
        for output in outputs:
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens
            self.completion_tokens += sum(len(sequence.token_ids) for sequence in output.outputs)
            self.finish_reasons.update(sequence.finish_reason or "none" for sequence in output.outputs)

    def failed(self, code: str) -> None:
        """Count a line whose result is an error."""
        self.num_failed += 1
        self.errors[code] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSummary:
    """The result of a job.

    ``num_lines`` are this shard's lines that are not blank: ``num_succeeded`` and ``num_failed`` have a result,
    ``num_earlier`` of these from earlier runs, and ``num_remaining`` have none yet.  Tokens, ``finish_reasons`` (of
    sequences) and ``errors`` (by code; after a validation the ones it found) count this run only.  ``elapsed_s`` is
    the time of this run, ``running_s`` the time from its first to its last line; rates are per second of the latter.
    """

    status: BatchStatus
    error: str | None = None
    input_file: str
    output_file: str
    error_file: str | None
    shard: str
    num_lines: int = 0
    num_succeeded: int = 0
    num_failed: int = 0
    num_earlier: int = 0
    num_remaining: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    elapsed_s: float = 0.0
    running_s: float = 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens per second while lines ran."""
        return self.prompt_tokens / self.running_s if self.running_s else 0.0

    @property
    def completion_tokens_per_s(self) -> float:
        """Generated tokens per second while lines ran."""
        return self.completion_tokens / self.running_s if self.running_s else 0.0

    def as_json(self) -> dict[str, object]:
        """Return all fields and the rates."""
        rates = {
            "prompt_tokens_per_s": self.prompt_tokens_per_s,
            "completion_tokens_per_s": self.completion_tokens_per_s,
        }
        return {**dataclasses.asdict(self), **{name: round(rate, 3) for name, rate in rates.items()}}

    def as_text(self) -> str:
        """Return a few lines for people."""
        if self.status is BatchStatus.VALIDATED:
            lines = [f"{self.status}: {self.num_lines:,} lines, {self.num_failed:,} of them bad"]
        else:
            lines = [
                f"{self.status}: {self.num_lines:,} lines, {self.num_succeeded:,} answered, {self.num_failed:,} with "
                f"an error, {self.num_remaining:,} left ({self.num_earlier:,} had a result before)",
                f"  {self.prompt_tokens:,} prompt tokens ({self.cached_tokens:,} cached), {self.completion_tokens:,} "
                f"generated, {self.completion_tokens_per_s:,.1f} generated/s, {self.running_s:,.1f} s of "
                f"{self.elapsed_s:,.1f} s",
            ]
        for name, counts in (("ended by", self.finish_reasons), ("errors", self.errors)):
            if counts:
                lines.append(f"  {name}: " + ", ".join(f"{key} {value:,}" for key, value in sorted(counts.items())))
        if self.status in (BatchStatus.STOPPED, BatchStatus.FAILED) and self.output_file != STANDARD_STREAM:
            lines.append("  run the same command to continue")
        return "\n".join(lines)

    @classmethod
    def of(
        cls,
        batch: BatchConfig,
        status: BatchStatus,
        survey: Survey,
        tally: Tally,
        error: BaseException | None,
        **times_s: float,
    ) -> BatchSummary:
        """Return the sum of ``tally`` and of earlier runs."""
        num_done, num_done_failed = survey.count(LineState.DONE), survey.count(LineState.DONE_FAILED)
        num_bad = survey.count(LineState.BAD, LineState.REPEATED)
        validated = status is BatchStatus.VALIDATED
        return cls(
            status=status,
            error=None if error is None else f"{type(error).__name__}: {error}",
            input_file=batch.input_file,
            output_file=batch.output_file,
            error_file=batch.error_file,
            shard=batch.shard,
            num_lines=survey.num_requests,
            num_succeeded=num_done + tally.num_succeeded,
            num_failed=num_bad if validated else num_done_failed + tally.num_failed,
            num_earlier=num_done + num_done_failed,
            num_remaining=survey.num_left - tally.num_succeeded - tally.num_failed,
            prompt_tokens=tally.prompt_tokens,
            cached_tokens=tally.cached_tokens,
            completion_tokens=tally.completion_tokens,
            finish_reasons=dict(tally.finish_reasons),
            errors=dict(survey.problems if validated else tally.errors),
            **{name: round(seconds, 3) for name, seconds in times_s.items()},
        )

    def write(self, path: Path) -> None:
        """Write ``as_json`` to ``path``; the file is complete or does not change."""
        draft = path.with_name(path.name + ".tmp")
        draft.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        os.replace(draft, path)
