"""Tasks: files of questions with their right answers, one JSON object a line, and how an answer is judged.

::

    {"scoring": "number", "max_tokens": 300}                       a first line without a prompt holds for all questions
    {"prompt": "What is 6 times 7?", "answer": 42}
    {"prompt": "Grass is", "choices": [" green", " red"], "answer": " green"}

Scorings: ``exact`` (the answer is this text, but for blanks around it), ``number`` (the last number of the answer) and
``choice`` (this one of ``choices`` is the likeliest continuation of the prompt, by its log-probability).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import msgspec

from tp_engine.errors import ConfigError, did_you_mean, shown
from tp_engine.system.files import read_text
from tp_engine.system.units import MIB

SCORINGS = ("exact", "number", "choice")
SHIPPED = Path(__file__).with_name("tasks")
_MOST_BYTES = 256 * MIB
_PLACE = "{prompt}"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_LONGEST_NUMBER = 40


class EvalQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of a task's file.

    ``answer`` is the right one, or several that are.  ``solution`` is what an example of a prompt shows (``answer``
    without it).  ``as_chat`` and ``as_completion`` are the texts around the prompt; ``stop`` ends completions.
    """

    prompt: str
    answer: str | int | float | list[str | int | float]
    id: str = ""
    scoring: str = ""
    choices: tuple[str, ...] = ()
    solution: str = ""
    max_tokens: int = 256
    as_chat: str = _PLACE
    as_completion: str = _PLACE
    stop: tuple[str, ...] = ()

    @property
    def accepted(self) -> tuple[str, ...]:
        """The right answers as texts."""
        several = self.answer if isinstance(self.answer, list) else [self.answer]
        return tuple(map(str, several))

    def chat_text(self) -> str:
        """What a user's message says."""
        return self.as_chat.replace(_PLACE, self.prompt)

    def completion_text(self) -> str:
        """What a completion continues."""
        return self.as_completion.replace(_PLACE, self.prompt)

    def example(self) -> str:
        """The answer that an example shows."""
        return self.solution or self.accepted[0]

    def is_right(self, answer: str) -> bool:
        """Return whether a generated answer is right."""
        if self.scoring == "number":
            given = last_number(answer)
            return given is not None and any(given == last_number(one) for one in self.accepted)
        return answer.strip() in {one.strip() for one in self.accepted}


@dataclass(frozen=True)
class Task:
    """Questions under a name."""

    name: str
    questions: Sequence[EvalQuestion]

    @property
    def digest(self) -> str:
        """A short hash of all that decides what is asked and what is right."""
        content = msgspec.json.encode(list(self.questions))
        return hashlib.sha256(content).hexdigest()[:16]

    def limited(self, limit: int | None, num_examples: int) -> tuple[Sequence[EvalQuestion], Task]:
        """The first ``num_examples`` questions, which are shown, and a task of at most ``limit`` others."""
        if num_examples >= len(self.questions):
            raise ConfigError(
                f"num_fewshot is {num_examples}; {self.name} has {len(self.questions)} questions, and one at least "
                "must be left to ask"
            )
        asked = self.questions[num_examples:]
        return self.questions[:num_examples], Task(self.name, asked[:limit])


@dataclass(frozen=True)
class HarnessTask:
    """A task of lm-eval; ``include_path`` is a folder with more of them."""

    name: str
    include_path: str | None = None


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text, without the commas between thousands; None if there is none."""
    found = _NUMBER.findall(text)
    if not found or len(found[-1]) > _LONGEST_NUMBER:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None


def shipped_tasks() -> list[str]:
    """Return the names of the tasks that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.jsonl"))


def load_task(name: str) -> Task:
    """Return a task that the package ships, or that of a file whose name ends with ``.jsonl``.

    ``ConfigError`` names the file, the line and the rule.
    """
    if name.endswith(".jsonl"):
        return read_task(Path(name))
    if name not in (known := shipped_tasks()):
        raise ConfigError(
            f"tasks names {shown(name)}; the package has {', '.join(known)}{did_you_mean(name, known)}; a file of "
            "questions ends with .jsonl, and lm-eval's tasks need pip install 'tp-engine[eval]'"
        )
    return read_task(SHIPPED / f"{name}.jsonl")


def read_task(path: Path) -> Task:
    """Return the task of a file, under the file's name."""
    try:
        lines = read_text(path, _MOST_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tasks names {path}, which cannot be read: {error}") from error
    common: dict[str, Any] = {}
    questions: list[EvalQuestion] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        found = _object(line, where)
        if "prompt" not in found and not questions and not common:
            common = found
            continue
        questions.append(_question({"id": str(len(questions)), **common, **found}, where))
    counts = Counter(question.id for question in questions)
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise ConfigError(f"{path}: two questions have the id {shown(twice)}; each needs its own, or none")
    if not questions:
        raise ConfigError(f'{path} has no questions; a line is such as {{"prompt": "12+34=", "answer": "46"}}')
    return Task(path.stem, questions)


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is {shown(found)}; each line must be a JSON object")
    return found


def _question(found: Mapping[str, Any], where: str) -> EvalQuestion:
    fields = {"scoring": "choice" if found.get("choices") else "exact", **found}
    try:
        question = msgspec.convert(fields, EvalQuestion, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    if reason := _problem(question):
        raise ConfigError(f"{where}: {reason}")
    return question


def _problem(question: EvalQuestion) -> str | None:
    """What is wrong with a question; None for a good one."""
    accepted = question.accepted
    if question.scoring not in SCORINGS:
        return f"scoring is {shown(question.scoring)}; choose {', '.join(SCORINGS)}"
    if not question.prompt or not accepted:
        return "prompt and answer must not be empty"
    if question.max_tokens < 1:
        return f"max_tokens is {question.max_tokens}; it must be at least 1"
    if question.scoring == "number" and any(last_number(one) is None for one in accepted):
        return f"answer is {shown(question.answer)}; scoring by number needs a number"
    if question.scoring != "choice":
        return "choices are for the scoring choice; leave them out" if question.choices else None
    if len(set(question.choices)) < 2 or len(set(question.choices)) != len(question.choices):
        return f"choices are {shown(list(question.choices))}; give at least two different ones"
    if not all(question.choices):
        return "choices has an empty text; each must have a token"
    if not set(accepted) <= set(question.choices):
        return f"answer is {shown(question.answer)}; it must be one of the choices"
    return None
