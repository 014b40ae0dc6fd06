"""Golden answers: those of one machine, driver or version, with which another one is compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tp_engine.apps.check.answers import Answer
from tp_engine.apps.check.files import sha256
from tp_engine.apps.check.report import CheckFinding, CheckStatus
from tp_engine.errors import ConfigError
from tp_engine.model_config.checkpoint_files import weight_files
from tp_engine.system import files

_NAME = "golden"
_MAX_NAMED = 6
_NOT_COMPARED = ("seconds",)


class GoldenAnswer(msgspec.Struct, frozen=True):
    """A prompt's answer: its tokens, with the log-probability of each."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    token_ids: list[int]
    logprobs: list[float]

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"prompt {self.prompt!r} has tokens without log-probabilities")


class Golden(msgspec.Struct, frozen=True, kw_only=True):
    """A golden file: ``environment`` has versions and hardware, ``options`` are those of the engine, ``files`` the
    SHA-256 of each file of weights; ``bound`` is the largest error of a log-probability that was allowed."""

    format: Literal[1] = 1
    subject: str
    environment: dict[str, str]
    options: dict[str, Any]
    files: dict[str, str]
    bound: float
    answers: list[GoldenAnswer]


def golden_content(
    subject: str,
    folder: Path,
    answers: Sequence[Answer],
    *,
    bound: float,
    environment: Mapping[str, str],
    options: Mapping[str, Any],
) -> str:
    """The JSON of a golden file."""
    golden = Golden(
        subject=subject,
        environment=dict(environment),
        options={name: value for name, value in options.items() if value is not None},
        files={path.name: sha256(path) for path in weight_files(folder)},
        bound=bound,
        answers=[
            GoldenAnswer(one.prompt.name, one.prompt.token_ids, list(one.token_ids), one.answer_logprobs.tolist())
            for one in answers
        ],
    )
    return msgspec.json.format(msgspec.json.encode(golden, enc_hook=str).decode(), indent=1) + "\n"


def read_golden(path: Path) -> Golden:
    """The content of a golden file.  ``ConfigError`` if it is not one."""
    try:
        return msgspec.json.decode(files.read_bytes(path, files.MAX_JSON_BYTES), type=Golden)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no golden file: {error}; --record writes such a file") from error


def compare(
    golden: Golden, folder: Path, answers: Sequence[Answer], *, bound: float, environment: Mapping[str, str]
) -> Iterator[CheckFinding]:
    """Yield what differs from the golden file: the weights' files, and the answers beyond both bounds together."""
    yield _files(golden, folder)
    known = {one.prompt_token_ids: one for one in golden.answers}
    pairs = [(one, known[one.prompt.token_ids]) for one in answers if one.prompt.token_ids in known]
    told = _told(golden.environment, environment)
    if not pairs:
        yield CheckFinding.not_checked(
            _NAME,
            "no prompt of the golden file was run",
            remedy="record it again with the same options (--quick or not, --max-model-len)",
        )
        return
    allowed, largest, wrong = bound + golden.bound, 0.0, ""
    for answer, one in pairs:
        error, place = _difference(answer, one, allowed)
        largest = max(largest, error)
        if error > allowed and not wrong:
            wrong = f"prompt {answer.prompt.name!r}, {place}"
    detail = (
        f"{len(pairs)} answers differ by at most {largest:.1e} in a log-probability, {allowed:.1e} is allowed; {told}"
    )
    yield CheckFinding(
        name=_NAME,
        status=CheckStatus.WRONG if wrong else CheckStatus.RIGHT,
        detail=detail,
        place=wrong,
        meaning="this machine or version answers otherwise than the one that was recorded" if wrong else "",
        remedy="change back what differs, one at a time" if wrong else "",
        numbers={"largest_difference": largest, "allowed": allowed},
    )


def _difference(answer: Answer, golden: GoldenAnswer, allowed: float) -> tuple[float, str]:
    """The largest difference of log-probabilities up to the first token that differs, and where.

    A token that differs is right if both are within ``allowed`` of one another: then rounding decides.
    """
    first, largest, place = len(answer.prompt.token_ids) - 1, 0.0, ""
    for index, (own, other) in enumerate(zip(answer.token_ids, golden.token_ids, strict=False)):
        chosen, recorded = float(answer.logprobs[first + index, 0]), golden.logprobs[index]
        error, what = abs(chosen - recorded), f"log-probability {chosen:.4f} instead of {recorded:.4f}"
        if own != other:
            alternatives = answer.alternatives[first + index].tolist()
            rank = alternatives.index(other) if other in alternatives else None
            gap = float("inf") if rank is None else chosen - float(answer.logprobs[first + index, rank])
            error, what = gap if gap > allowed else 0.0, f"{own} instead of {other}"
        if error > largest:
            largest, place = error, f"answer's token {index}: {what}"
        if own != other:
            break
    return largest, place


def _files(golden: Golden, folder: Path) -> CheckFinding:
    name, own = "golden files", {path.name: sha256(path) for path in weight_files(folder)}
    changed = sorted(file for file in own.keys() | golden.files.keys() if own.get(file) != golden.files.get(file))
    if not changed:
        return CheckFinding.right(name, f"{len(own)} files of weights have the recorded SHA-256")
    return CheckFinding.wrong(
        name,
        f"{len(changed)} files of weights are not those that were recorded",
        place=", ".join(changed[:_MAX_NAMED]),
        meaning="other weights: another download, a broken file, or another model",
        remedy="download the weights again, or record again",
    )


def _told(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    changes = [
        f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and name not in _NOT_COMPARED
    ]
    return "changed since: " + ", ".join(changes) if changes else "same versions and hardware"
