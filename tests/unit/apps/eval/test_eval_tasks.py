"""Tasks: the shipped files, how lines are read, and how answers are judged."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import pytest
from lib.eval_tasks import TASKS, text_of

from tp_engine.apps.eval.tasks import SHIPPED, EvalQuestion, last_number, load_task, read_task, shipped_tasks
from tp_engine.errors import ConfigError


def test_the_shipped_tasks_are_those_of_their_script() -> None:
    """Oracle: scripts/generate."""
    assert shipped_tasks() == sorted(TASKS)
    for name in TASKS:
        assert (SHIPPED / f"{name}.jsonl").read_text(encoding="utf-8") == text_of(name), "scripts/generate"


def test_the_word_problems_are_right() -> None:
    """Oracle: Python's arithmetic on every equation of every solution; the last one gives the answer."""
    questions = load_task("word_problems").questions
    assert len({question.prompt for question in questions}) == len(questions) == 160
    for question in questions:
        equations = re.findall(r"([\d(][\d(). +*/-]*?) = (\d+)", question.solution)
        assert len(equations) >= 1, question
        for left, right in equations:
            assert eval(left) == int(right), question
        assert int(equations[-1][1]) == question.answer and question.is_right(question.example())


def test_the_sums_and_facts_are_right() -> None:
    """Oracle: Python's sums; one right choice of four."""
    for question in load_task("sums").questions:
        one, other = question.prompt.removesuffix("=").split("+")
        assert question.accepted == (str(int(one) + int(other)),)
    for question in load_task("facts").questions:
        assert len(set(question.choices)) == 4 and question.choices.count(question.accepted[0]) == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("6 times 7 is 42.", "42"), ("**$1,234.50**", "1234.5"), ("from 3 to -4", "-4"), ("The answer is 18\n", "18"),
        ("about .5", "0.5"), ("none", None), ("7" * 5000, None), ("3.0", "3"),
    ],
)  # fmt: skip
def test_the_last_number_counts(text: str, number: str | None) -> None:
    """Oracle: as a reader sees it; a number of thousands of digits is none."""
    assert last_number(text) == (None if number is None else Decimal(number))


def test_scorings() -> None:
    """Oracle: the rules of the module."""
    exact = EvalQuestion(prompt="x", answer=["yes", "Yes"], scoring="exact")
    assert exact.is_right(" yes\n") and not exact.is_right("yes.")
    number = EvalQuestion(prompt="x", answer=1200, scoring="number")
    assert number.is_right("so 1,200.0 in all") and not number.is_right("1200 or 1201") and not number.is_right("")


def test_lines_share_what_the_first_one_says(tmp_path: Path) -> None:
    """Oracle: the example of the module; empty lines count for nothing, and ids are given where they lack."""
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"scoring": "number", "as_chat": "Q: {prompt}"}\n\n{"prompt": "6*7?", "answer": 42}\n'
        '{"prompt": "Grass is", "choices": [" green", " red"], "answer": " green", "scoring": "choice", "id": "g"}\n'
    )
    task = read_task(path)
    assert task.name == "mine" and [one.id for one in task.questions] == ["0", "g"]
    assert task.questions[0].chat_text() == "Q: 6*7?" and task.questions[0].completion_text() == "6*7?"
    assert task.digest != load_task("sums").digest
    shown, rest = task.limited(5, 1)
    assert [one.id for one in shown] == ["0"] and [one.id for one in rest.questions] == ["g"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", ":1 is not JSON"), ("[1]", "must be a JSON object"), ("", "has no questions"),
        ('{"scoring": "exact"}', "has no questions"), ('{"prompt": "x"}', "answer"),
        ('{"prompt": "x", "answer": "y", "colour": 1}', "colour"), ('{"prompt": "", "answer": "y"}', "not be empty"),
        ('{"prompt": "x", "answer": []}', "not be empty"), ('{"prompt": "x", "answer": "y", "max_tokens": 0}', "1"),
        ('{"prompt": "x", "answer": "y", "scoring": "near"}', "exact, number, choice"),
        ('{"prompt": "x", "answer": "y", "scoring": "number"}', "needs a number"),
        ('{"prompt": "x", "answer": "y", "choices": ["y"]}', "two different"),
        ('{"prompt": "x", "answer": "z", "choices": ["y", "x"]}', "one of the choices"),
        ('{"prompt": "x", "answer": "y", "choices": ["y", ""]}', "empty"),
        ('{"prompt": "x", "answer": "y", "choices": ["y", "z"], "scoring": "exact"}', "leave them out"),
        ('{"prompt": "x", "answer": 1, "id": "a"}\n{"prompt": "x", "answer": 1, "id": "a"}', "two questions have"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, text: str, told: str) -> None:
    """Oracle: the error names the file and the rule."""
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(told)) as found:
        read_task(path)
    assert str(path) in str(found.value)


def test_an_unknown_task_is_named() -> None:
    """Oracle: the shipped names, and the nearest; a missing file is one too."""
    with pytest.raises(ConfigError, match="did you mean sums"):
        load_task("sum")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_task("/nowhere.jsonl")
    with pytest.raises(ConfigError, match="num_fewshot is 200"):
        load_task("sums").limited(None, 200)
