"""What ``tp-engine doctor`` finds, as text, and its first findings: Python and the packages."""

import enum
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

from tp_engine.system.version import installed_version

MIN_PYTHON = (3, 11)
PROJECT = "tp-engine"
# By package: what it is for.
OPTIONAL = {
    "triton": "kernels on GPUs",
    "flash-attn": "attention on GPUs, where attention_backend names it",
    "uvloop": "a faster event loop (extra: fast)",
    "httptools": "a faster HTTP parser (extra: fast)",
    "opentelemetry-sdk": "traces (extra: otel)",
}
# For a checkout that is used without being installed.
NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "xxhash", "msgspec", "pyzmq", "fastapi",
          "uvicorn", "pydantic", "prometheus-client", "jinja2", "tqdm", "llguidance")  # fmt: skip
_SCREEN_LINES, _SCREEN_COLUMNS = 21, 100  # beside a line above and two below
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*(?:>=([0-9.]+))?")


class Status(enum.StrEnum):
    """``NOTE``: could be better, or may matter; ``MISSING``: without it the engine does not run."""

    OK = "ok"
    NOTE = "note"
    MISSING = "missing"


class Speed(enum.StrEnum):
    """What a part of the machine or of the configuration will be."""

    FAST = "fast"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result; ``remedy`` says what to do, if anything.  ``speed`` is that of what it makes fast or slow."""

    topic: str
    status: Status
    detail: str
    remedy: str | None = None
    speed: Speed | None = None

    @property
    def verdict(self) -> str:
        """The word of the first screen."""
        if self.status is Status.MISSING or self.speed is None:
            return self.status.value
        return self.speed.value


def as_screen(findings: Iterable[Finding]) -> str:
    """The findings that say what will be fast, what slow and what is missing, as a screen; the others are counted.

    What is missing comes first, then what is slow or may matter, then what is fast.  Long lines are cut.
    """
    order = [Status.MISSING.value, Speed.SLOW.value, Status.NOTE.value, Speed.FAST.value]
    every = list(findings)
    shown = [one for one in every if one.speed is not None or one.status is Status.MISSING or one.remedy is not None]
    lines, num_shown = [f"{'':<8}{'subject':<18}why"], 0
    for one in sorted(shown, key=lambda one: order.index(one.verdict)):
        more = [f"{one.verdict:<8}{one.topic:<18}{one.detail}"]
        if one.remedy is not None:
            more.append(f"{'':<26}-> {one.remedy}")
        if len(lines) + len(more) > _SCREEN_LINES:
            break
        lines += [_cut(line) for line in more]
        num_shown += 1
    rest = len(every) - num_shown
    return "\n".join((*lines, f"{rest} more findings, and whole lines: tp-engine doctor --verbose"))


def _cut(line: str) -> str:
    """One line that fits."""
    line = " ".join(line.splitlines())
    return line if len(line) <= _SCREEN_COLUMNS else f"{line[: _SCREEN_COLUMNS - 4]} ..."


def as_text(findings: Iterable[Finding]) -> str:
    """One line per finding, its remedy below."""
    lines = []
    for one in findings:
        mark = {Status.OK: " ok ", Status.NOTE: "note", Status.MISSING: "MISS"}[one.status]
        lines.append(f"[{mark}] {one.topic:<24}{one.detail}")
        if one.remedy is not None:
            lines.append(f"{'':<31}-> {one.remedy}")
    return "\n".join(lines)


def check_packages() -> Iterator[Finding]:
    """Versions, and which packages are missing or too old."""
    good = sys.version_info[:2] >= MIN_PYTHON
    remedy = None if good else f"use Python {'.'.join(map(str, MIN_PYTHON))} or newer"
    told = f"{platform.python_version()} at {sys.executable}"
    yield Finding("python", Status.OK if good else Status.MISSING, told, remedy)
    yield _needed(needed_packages())
    found = {name: present for name in OPTIONAL if (present := installed_version(name)) is not None}
    absent = [f"{name} ({use})" for name, use in OPTIONAL.items() if name not in found]
    yield Finding("optional packages", Status.OK, _listed(found) or "none")
    if absent:
        yield Finding("not installed", Status.OK, ", ".join(absent))


def needed_packages() -> dict[str, str]:
    """Name -> least version, from this package's own metadata."""
    try:
        lines = [line for line in metadata.requires(PROJECT) or () if "extra ==" not in line]
    except metadata.PackageNotFoundError:
        lines = list(NEEDED)
    found = [match for line in lines if (match := _REQUIREMENT.match(line))]
    return {match[1]: match[2] or "0" for match in found}


def _needed(packages: Mapping[str, str]) -> Finding:
    versions = {name: installed_version(name) for name in packages}
    wrong = [name for name, found in versions.items() if found is None or _numbers(found) < _numbers(packages[name])]
    if not wrong:
        return Finding("packages", Status.OK, _listed(versions))
    asked = " ".join(f"'{name}>={packages[name]}'" for name in wrong)
    told = ", ".join(f"{name} {versions[name] or 'is not installed'}" for name in wrong)
    return Finding("packages", Status.MISSING, told, remedy=f"pip install {asked}")


def _numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` -> (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _listed(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
