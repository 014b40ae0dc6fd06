"""One thing that was looked at."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Status(enum.StrEnum):
    """``NOTE`` would help or may matter; ``MISSING`` keeps the engine from running."""

    OK = "ok"
    NOTE = "note"
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``remedy`` says what to do about it, where there is something to do."""

    topic: str
    status: Status
    detail: str
    remedy: str | None = None


def as_text(findings: Iterable[Finding]) -> str:
    """A line per finding, remedies below."""
    lines = []
    for one in findings:
        mark = {Status.OK: " ok ", Status.NOTE: "note", Status.MISSING: "MISS"}[one.status]
        lines.append(f"[{mark}] {one.topic:<24}{one.detail}")
        if one.remedy is not None:
            lines.append(f"{'':<31}-> {one.remedy}")
    return "\n".join(lines)
