"""The engine and the input of these jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.frontend import new_engine
from tests.services import FakeLLM
from tests.unit.apps.batch.jobs import NUM_LINES, completion
from tp_engine.apps.batch import run as batch_run


@pytest.fixture(autouse=True)
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLLM]:
    """An engine for each job in turn: every job gets a fresh one."""
    first = FakeLLM(new_engine())
    unused = [first]
    monkeypatch.setattr(batch_run, "LLM", lambda **_: unused.pop() if unused else FakeLLM(new_engine()))
    yield first
    first.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Good lines of different lengths, with bad lines among them."""
    lines = [completion(f"id-{number}", "x" + "ab" * (number % 7)) for number in range(NUM_LINES)]
    lines[5] = "not json"
    lines[9] = completion("id-3", "twice")
    lines[11] = completion("id-11", "x", temperature=-1)
    lines[13] = completion("id-13", ["one", "two two"], n=2, stop=[" "])
    lines[17] = completion("id-17", "x" * 2000)
    lines[20] = completion("id-20", "x", model="gpt-4o")
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path
