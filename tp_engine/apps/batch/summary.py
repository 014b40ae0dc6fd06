"""The summary of a batch job: counted while it runs, shown as text to people and as JSON to programs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from tp_engine.api.batch_file.lines import STANDARD_STREAM
from tp_engine.requests.outputs import RequestOutput


class BatchStatus(StrEnum):
    """How the job ended."""

    COMPLETED = "completed"  # every line has its result
    STOPPED = "stopped"  # by request; the same command continues
    FAILED = "failed"  # by an error; the same command continues
    VALIDATED = "validated"  # lines were checked, nothing was run


@dataclass(slots=True, kw_only=True)
class BatchSummary:
    """The result of a job.

    ``num_lines`` are this shard's lines that are not blank: ``num_succeeded`` and ``num_failed`` have a result,
    ``num_earlier`` of these from earlier runs.  Tokens, ``finish_reasons`` (of sequences) and ``errors`` (by code;
    after a validation the ones it found) count this run only.  ``elapsed_s`` is the time of this run, ``running_s`` the
    time from its first to its last line; rates are per second of the latter.
    """

    status: BatchStatus = BatchStatus.FAILED
    error: str | None = None
    input_file: str
    output_file: str
    error_file: str | None
    shard: str
    num_lines: int = 0
    num_succeeded: int = 0
    num_failed: int = 0
    num_earlier: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    elapsed_s: float = 0.0
    running_s: float = 0.0

    @property
    def num_remaining(self) -> int:
        """Lines that have no result yet."""
        is_dry = self.status is BatchStatus.VALIDATED
        return self.num_lines - self.num_succeeded - (0 if is_dry else self.num_failed)

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens per second while lines ran."""
        return self.prompt_tokens / self.running_s if self.running_s else 0.0

    @property
    def completion_tokens_per_s(self) -> float:
        """Generated tokens per second while lines ran."""
        return self.completion_tokens / self.running_s if self.running_s else 0.0

    def count_answer(self, outputs: Sequence[RequestOutput]) -> None:
        """Count an answered line; ``outputs`` are those of its prompts."""
        self.num_succeeded += 1
        for output in outputs:
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens
            self.completion_tokens += sum(len(sequence.token_ids) for sequence in output.outputs)
            self.finish_reasons.update(sequence.finish_reason or "none" for sequence in output.outputs)

    def count_error(self, code: str) -> None:
        """Count a line whose result is an error."""
        self.num_failed += 1
        self.errors[code] += 1

    def as_json(self) -> dict[str, object]:
        """All fields, ``num_remaining`` and the rates; times are in seconds."""
        found: dict[str, object] = msgspec.to_builtins(self)
        found["num_remaining"] = self.num_remaining
        for name in ("elapsed_s", "running_s", "prompt_tokens_per_s", "completion_tokens_per_s"):
            found[name] = round(getattr(self, name), 3)
        return found

    def as_text(self) -> str:
        """A few lines for people."""
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

    def write(self, path: Path) -> None:
        """Write ``as_json`` to ``path``; the file is complete or does not change."""
        draft = path.with_name(path.name + ".tmp")
        draft.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        os.replace(draft, path)
