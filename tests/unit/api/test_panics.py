"""A library that panics refuses one request, and nothing else notices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.asgi import App, run_served
from tests.e2e.frontend import INFO, new_engine
from tests.panicking import PANIC_TEXT, panicking_model
from tests.unit.server.test_server_api import error_of
from tp_engine.api.preparing import LARGE, PreparingThreads
from tp_engine.engine.tokenizer import TokenDecoder, load_tokenizer, tokenize
from tp_engine.errors import RequestError
from tp_engine.system.panics import is_panic, panics_refused


class Panic(BaseException):
    """As those of pyo3."""

    __module__ = "pyo3_runtime"


class TimeIsOver(BaseException):
    """As that of pytest-timeout, which strikes whatever the thread does."""


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, ValueError, TimeIsOver]
)
def test_what_ends_a_program_a_task_or_a_test_is_no_panic(error: type[BaseException]) -> None:
    """Oracle: the exception itself."""
    assert not is_panic(error()) and is_panic(Panic())
    with pytest.raises(error), panics_refused("this"):
        raise error


def test_a_thread_that_prepares_requests_outlives_a_panic() -> None:
    """Oracle: the caller's error, for requests of each kind; the next one is prepared."""

    def panic() -> None:
        raise Panic("at line 7")

    async def scenario() -> None:
        threads = PreparingThreads()
        for size, has_images in ((1, False), (LARGE + 1, False), (1, True)):
            with pytest.raises(RequestError, match=r"cannot be prepared: .* failed \(Panic: at line 7\)"):
                await threads.run(size, panic, has_images=has_images)
            assert await threads.run(size, lambda: 7, has_images=has_images) == 7
        with pytest.raises(RequestError, match="at line 7"):
            await threads.parse(LARGE + 1, panic)
        threads.close()

    asyncio.run(scenario())


def test_a_text_that_the_vocabulary_cannot_write_is_refused() -> None:
    """Oracle: the library's words.  A vocabulary of a few letters without an unknown token raises a bare exception."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bases = Tokenizer(models.Unigram([(letter, -1.0) for letter in "ACGT"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bases)
    assert tokenize(tokenizer, "GATTACA", add_special_tokens=True, param="prompt") == [2, 0, 3, 3, 0, 1, 0]
    with pytest.raises(RequestError, match=r"prompt cannot be tokenized with this model's .*unk_id") as caught:
        tokenize(tokenizer, "hello" * 1000, add_special_tokens=True, param="prompt")
    assert caught.value.param == "prompt" and len(str(caught.value)) < 200
    assert TokenDecoder(tokenizer).token_bytes(2) == b"G"


@pytest.fixture(scope="module")
def panicking(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(str(panicking_model(tmp_path_factory.mktemp("panicking"))))


def test_a_text_that_the_tokenizer_fails_over_is_refused(panicking: Any) -> None:
    """Oracle: 400 with the field and the reason on each route that tokenizes; the tokenizer goes on."""
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "/v1/completions": ("prompt", {"prompt": PANIC_TEXT}),
        "/v1/chat/completions": ("messages", {"messages": [{"role": "user", "content": PANIC_TEXT}]}),
        "/v1/responses": ("input", {"input": PANIC_TEXT}),
        "/tokenize": ("prompt", {"prompt": PANIC_TEXT}),
    }

    async def scenario(app: App) -> None:
        for path, (field, body) in bodies.items():
            error = error_of(reply := await app.post(path, body))
            assert (reply.status, error["param"]) == (400, field) and "retry-limit-in-match" in error["message"]
            assert "cannot be tokenized" in error["message"]
        asked = {"prompt": "ab", "bad_words": [PANIC_TEXT]}
        assert error_of(await app.post("/v1/completions", asked))["param"] == "bad_words"
        assert (await app.post("/v1/completions", {"prompt": "ab"})).status == 200

    run_served(scenario, new_engine(), panicking)
    assert tokenize(panicking, "ab", add_special_tokens=False, param="prompt") == [97, 98]


def test_a_tokenizer_that_panics_when_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: an error of the configuration, which names the tokenizer."""

    def panic(*_arguments: Any, **_options: Any) -> None:
        raise Panic

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", panic)
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_tokenizer(INFO.tokenizer)
