"""``tp-engine check --url`` against servers with transformers behind them: right ones of several dialects, and faults.

The servers are of tests/oracle_server.py; the model is a tiny Qwen3 in float32, so the bound is 1e-4.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from tests.oracle_server import OracleModel, oracle_server
from tests.text_tokenizers import byte_level_tokenizer
from tests.tiny_models import make_checkpoint
from tests.tiny_server import chat_tokenizer
from tp_engine.api.server_client import ServerClient, ServerError
from tp_engine.apps.check.behaviour import NotShownError
from tp_engine.apps.check.command import main
from tp_engine.apps.check.prompts import CheckPrompt
from tp_engine.apps.check.report import CheckFinding, CheckReport, CheckStatus
from tp_engine.apps.check.served import ServedModel
from tp_engine.apps.check.url_check import UrlCheck
from tp_engine.errors import ConfigError

RIGHT, WRONG, SKIPPED = CheckStatus.RIGHT, CheckStatus.WRONG, CheckStatus.SKIPPED
CHECKS = ("tokens", "chat template", "alone", "in a batch", "cached prefix", "chats", "end of sequence",
          "JSON by schema", "tool call")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template; </s>, token 1, ends a sequence."""
    made = make_checkpoint(
        tmp_path_factory.mktemp("model"), num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2,
        intermediate_size=48, vocab_size=384, max_position=256, eos_token_id=1,
    )  # fmt: skip
    chat_tokenizer().save_pretrained(made)
    return made


def check(folder: Path, dialect: str = "vllm", *faults: str, of_check: dict[str, Any] | None = None,
          **of_model: Any) -> CheckReport:  # fmt: skip
    """The report on a server with these faults."""
    model = OracleModel(folder, chat_tokenizer(), dialect=dialect, faults=frozenset(faults), **of_model)
    with oracle_server(model) as url:
        return UrlCheck(url=url, model=str(folder), quick=True, **(of_check or {})).run()


def by_name(report: CheckReport) -> dict[str, CheckFinding]:
    return {one.name: one for one in report.findings}


@pytest.mark.parametrize("dialect", ["vllm", "llama.cpp", "openai"])
def test_a_right_server_is_right(folder: Path, dialect: str) -> None:
    """Oracle: the server is transformers itself; what a dialect cannot show is said, and is no alarm."""
    report = check(folder, dialect)
    found = by_name(report)
    assert report.exit_code == 0, report.as_text()
    assert {name: found[name].status for name in CHECKS} == dict.fromkeys(CHECKS, RIGHT), report.as_text()
    assert ("prompts" in found) == (dialect == "llama.cpp")
    if dialect == "openai":
        assert "usage.prompt_tokens of 7 requests" in found["tokens"].detail


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_server_in_16_bits_is_right(folder: Path, dtype: torch.dtype) -> None:
    """Oracle: transformers in that type is within 1.5 times its own error; told float32, it is found to be none."""
    name = str(dtype).removeprefix("torch.")
    report = check(folder, dtype=dtype, of_check={"dtype": name})
    assert report.exit_code == 0, report.as_text()
    assert by_name(check(folder, dtype=dtype))["alone"].status is WRONG


@pytest.mark.parametrize(
    ("fault", "places"),
    [
        ("template without a blank", {"chat template", "chats"}),
        ("adds BOS", {"tokens"}),
        ("EOS missing", {"end of sequence"}),
        ("stale prefix", {"cached prefix", "chats"}),
        ("rows mixed up", {"in a batch"}),
        ("ignores schemas", {"JSON by schema"}),
        ("calls as text", {"tool call"}),
        ("after temperature", {"alone", "in a batch", "cached prefix", "chats"}),
    ],
)
def test_a_fault_of_a_server_is_found_in_its_place(folder: Path, fault: str, places: set[str]) -> None:
    """Oracle: the checks that the planted fault concerns, and no other one; each says what it means and what to try."""
    report = check(folder, "vllm", fault)
    wrong = {one.name: one for one in report.findings if one.status is WRONG}
    assert wrong.keys() == places, report.as_text()
    assert report.exit_code == 1
    assert all(one.place and one.meaning for one in wrong.values())


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["vllm", "llama.cpp", "openai"])
@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 9000.0}},
        {"hidden_act": "gelu"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_model_that_computes_something_else_is_found(folder: Path, dialect: str, change: dict[str, Any]) -> None:
    """Oracle: a config.json that differs in one key on the server: every answer is wrong, in each dialect."""
    found = by_name(check(folder, dialect, **change))
    assert all(found[name].status is WRONG for name in ("alone", "in a batch", "chats"))
    assert found["tokens"].status is RIGHT


def test_an_answer_of_which_a_token_is_not_shown_is_not_compared(folder: Path) -> None:
    """Oracle: llama.cpp's way with characters of several tokens: every second prompt's answer lacks an entry."""
    report = check(folder, "llama.cpp", "hides a token")
    assert report.exit_code == 0, report.as_text()
    assert "5 answers" not in by_name(report)["in a batch"].detail


def test_tokens_of_another_model_are_found(folder: Path) -> None:
    """Oracle: the position where the two tokenizations part, and the texts there."""
    wrong = by_name(check(folder, "vllm", "adds BOS"))["tokens"]
    assert wrong.place.startswith("position 0: ") and "instead of" in wrong.place


def test_a_server_that_is_not_there_could_not_be_checked(folder: Path) -> None:
    """Oracle: exit code 2, and the address in the reason."""
    report = UrlCheck(url="http://127.0.0.1:9", model=str(folder), timeout_s=5).run()
    assert report.exit_code == 2 and "http://127.0.0.1:9 cannot be reached" in report.findings[-1].detail


def test_text_for_a_call_is_no_alarm_where_the_template_has_no_tools(folder: Path, tmp_path: Path) -> None:
    """Oracle: transformers' template, which shows the model no tools; a right call is still said to be right."""
    plain = tmp_path / "plain"
    shutil.copytree(folder, plain)
    tokenizer = copy.deepcopy(chat_tokenizer())
    tokenizer.chat_template = tokenizer.chat_template.replace("tools or []", "[]")
    tokenizer.save_pretrained(plain)
    found = by_name(check(plain, "vllm", "calls as text"))["tool call"]
    assert found.status is SKIPPED and found.detail.startswith("the chat template takes no tools; a forced call ")
    assert by_name(check(plain))["tool call"].status is RIGHT


def test_a_model_that_the_server_does_not_have(folder: Path) -> None:
    """Oracle: exit code 2, and the names that the server has."""
    with oracle_server(OracleModel(folder, byte_level_tokenizer())) as url:
        report = UrlCheck(url=url, model=str(folder), name="other").run()
    assert report.exit_code == 2 and "it has served" in report.findings[-1].detail


def test_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the exit code and JUnit's file of a fault; options that only an engine here has are refused."""
    monkeypatch.setenv("TP_ENGINE_LOG_LEVEL", "WARNING")  # the command sets it
    junit = tmp_path / "junit.xml"
    model = OracleModel(folder, chat_tokenizer(), faults=frozenset({"EOS missing"}))
    with oracle_server(model) as url:
        assert main([str(folder), "--url", url, "--quick", "--junit", str(junit)]) == 1
    failed = [
        one.attrib["name"] for one in ElementTree.parse(junit).iter("testcase") if one.find("failure") is not None
    ]
    assert failed == ["end of sequence"]
    for flags in (["--block-size", "8"], ["--bisect"], ["--record", str(junit)]):
        with pytest.raises(ConfigError, match="leave it out, or leave url out"):
            main([str(folder), "--url", "http://127.0.0.1:9", *flags])


class JunkClient(ServerClient):
    """Answers every path with one object."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__("http://127.0.0.1:1")
        self._junk = answer

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._junk


JUNK: list[dict[str, Any]] = [
    {"tokens": ["x"] * 5, "choices": [{"logprobs": {"tokens": [1], "token_logprobs": ["a"], "top_logprobs": 7}}]},
    {
        "tokens": ["9" * 6000],
        "choices": [{"logprobs": {"content": [{"token": "token_id:" + "9" * 6000, "logprob": 0}]}}],
    },
    {"tokens": [None], "choices": [{"logprobs": 7, "message": [5]}], "usage": [1]},
    {"tokens": [[1]], "choices": [{"logprobs": {"content": [3]}, "message": 3}], "usage": {"prompt_tokens_details": 1}},
    {"tokens": [float("inf")], "choices": [[]]},
]


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_values_of_another_kind_are_no_traceback(junk: dict[str, Any]) -> None:
    """By hand: each question ends with an answer or an error about the server."""
    served = ServedModel(JunkClient(junk), "m", None)
    prompt = CheckPrompt("a", (1, 2, 3))
    questions: list[Callable[[], object]] = [
        lambda: served.token_ids("a"), lambda: served.chat_token_ids([]), lambda: served.num_prompt_tokens("a"),
        lambda: served.end_after(1), served.shaped_answer, lambda: list(served.check_call("tool", None)),
        lambda: served.answer(prompt, 4, of_prompt=True), lambda: served.chat(prompt, 4),
    ]  # fmt: skip
    for ask in questions:
        with contextlib.suppress(ServerError, NotShownError):
            ask()
