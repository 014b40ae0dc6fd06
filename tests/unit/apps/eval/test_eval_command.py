"""``tp-engine eval --url`` against a server whose answers are known: exit codes, files, and what is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.unit.apps.eval.scripted_server import ScriptedServer, added, scripted_server
from tp_engine.api.server_client import ServerClient, ServerError
from tp_engine.apps.eval import asking
from tp_engine.apps.eval.asking import Asker
from tp_engine.apps.eval.command import main
from tp_engine.apps.eval.options import EvalConfig
from tp_engine.apps.eval.tasks import EvalQuestion
from tp_engine.errors import ConfigError


def mostly(text: str) -> str:
    """Wrong for every tenth first number."""
    return added(text) if int(text.split("+")[0]) % 10 else "no idea"


def run(server: ScriptedServer, *more: str) -> int:
    return main(["--url", server.url, "--tasks", "sums", "--limit", "100", *more])


def test_an_accuracy_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the sums that the server knows, counted here; 0 from the threshold on, 1 where chance does not explain
    it, 2 between; the files have the same verdict."""
    with scripted_server(mostly) as server:
        junit, markdown, record = (str(tmp_path / "out" / name) for name in ("junit.xml", "report.md", "record.json"))
        assert run(server, "--threshold", "50%", "--junit", junit, "--markdown", markdown, "--record", record) == 0
        asked = [body["messages"][-1]["content"] for body in server.bodies]
        right = sum(int(one.split("+")[0]) % 10 > 0 for one in asked)
        assert len(asked) == 100 and 60 < right < 95
        assert f"{right} of 100 right" in capsys.readouterr().out
        assert run(server, "--threshold", f"sums={(right + 1) / 100}") == 2
        assert run(server, "--threshold", "0.99", "--junit", junit) == 1
        assert "chance does not explain it" in capsys.readouterr().out
        assert run(server, "--against", record) == 0
        capsys.readouterr()
        server.answer = lambda text: "no idea"
        assert run(server, "--against", record, "--json") == 1
        found = json.loads(capsys.readouterr().out)
        assert [line["verdict"] for line in found["lines"]] == ["measured", "failed"]
        assert found["lines"][1]["numbers"]["lost"] == right
        assert run(server, "--against", record, "--limit", "50") == 2
        assert "the questions differ" in capsys.readouterr().out
        assert run(server, "--against", record, "--limit", "50", "--force") == 1
    recorded = json.loads(Path(record).read_text(encoding="utf-8"))
    assert sum(one["right"] for one in recorded["tasks"][0]["outcomes"]) == right
    (case,) = ElementTree.parse(junit).iter("testcase")
    assert case.attrib["name"] == "sums" and [child.tag for child in case] == ["failure"]
    assert "✅ passed" in Path(markdown).read_text(encoding="utf-8")


def test_what_cannot_be_asked_is_not_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: exit code 2, never 1, for a server that is not there, breaks down, or is of another kind; one that is
    busy for a moment is asked again."""
    monkeypatch.setattr(asking, "_RETRIES_S", (0.0, 0.0, 0.0))
    with scripted_server() as server:
        server.refusals = [503, 429, 503]
        assert main(["--url", server.url, "--tasks", "sums", "--limit", "3", "--concurrency", "1"]) == 0
        server.refusals = [500]
        assert run(server, "--threshold", "50%") == 2
        assert "could not be asked: busy" in capsys.readouterr().out
        server.reply = lambda path, body: {"choices": []}  # type: ignore[method-assign]
        assert run(server) == 2 and "answered with another shape" in capsys.readouterr().out
    assert main(["--url", server.url, "--tasks", "sums"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


def test_what_is_sent() -> None:
    """Oracle: the forms of a question in a chat and in a completion, with an example before it."""
    fields: dict[str, Any] = {"as_chat": "{prompt} Think.", "as_completion": "Q: {prompt}\nA:", "scoring": "number"}
    shown = EvalQuestion(prompt="1+2=", answer=3, solution="It is 3.", **fields)
    asked = EvalQuestion(prompt="3+4=", answer=7, stop=("\n",), max_tokens=9, **fields)
    with scripted_server(lambda text: "7") as server:
        client = ServerClient(server.url)
        assert Asker(client=client, model="m", sampling={"seed": 1}).answer(asked, [shown]) == "7"
        assert Asker(client=client, model="m", as_chat=False).answer(asked, [shown]) == "7"
    chat, completion = server.bodies
    assert [turn["content"] for turn in chat["messages"]] == ["1+2= Think.", "It is 3.", "3+4= Think."]
    assert (chat["max_tokens"], chat["temperature"], chat["seed"], chat["model"]) == (9, 0, 1, "m")
    assert "stop" not in chat, "a chat's answer has several lines"
    assert completion["prompt"] == "Q: 1+2=\nA: It is 3.\n\nQ: 3+4=\nA:" and completion["stop"] == ["\n"]


def test_choices_are_weighed_by_their_log_probability() -> None:
    """Oracle: -1 for each liked character and -2 for any other, of the choice alone."""
    question = EvalQuestion(prompt="Grass is", choices=(" red", " blue", " green"), answer=" green", scoring="choice")
    with scripted_server(likes=" eulb") as server:
        asker = Asker(client=ServerClient(server.url), model="m")
        assert asker.continuation("Grass is", " blue") == (-5.0, True)
        assert asker.continuation("Grass is", " red") == (-6.0, False)
        assert asker.answer(question) == " blue"
        server.reply = lambda path, body: {"choices": [{"text": "x"}]}  # type: ignore[method-assign]
        with pytest.raises(ServerError, match="shows no log-probabilities"):
            asker.continuation("a", "b")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tasks", "sum"], "did you mean sums"), (["--threshold", "2"], "a share such as 90% or 0.9"),
        (["--tasks", "sums", "--threshold", "facts=50%"], "threshold names 'facts'; asked are sums"),
        (["--tasks", "sums", "sums.jsonl"], "sums.jsonl"), (["--force"], "give the reference"),
        (["--against", "/nowhere/ref.json"], "cannot be read"), (["--sampling", "[1]"], "must be a JSON object"),
        (["--url", "http://127.0.0.1:1", "--max-model-len", "64"], "for a model that runs here"),
        (["--junit", "/proc/none/x.xml"], "folder cannot be made"), (["--markdown", "/tmp"], "is a folder"),
    ],
)  # fmt: skip
def test_orders_that_cannot_work(arguments: list[str], told: str) -> None:
    """Oracle: an error that names the value and the remedy, before anything starts."""
    with pytest.raises(ConfigError, match=told):
        main(arguments)


def test_thresholds_of_several_tasks() -> None:
    """Oracle: by hand; the last sign of equality divides."""
    assert EvalConfig(threshold=("a=b=50%", "0.2")).thresholds == {"a=b": 0.5, "": 0.2}
