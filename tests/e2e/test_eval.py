"""``tp-engine eval`` with the demo model: log-probabilities, shares of right answers, and the server it starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import WarmServer, warm_serving
from tp_engine import LLM, SamplingParams
from tp_engine.api.server_client import ServerClient
from tp_engine.apps.eval.asking import Asker
from tp_engine.apps.eval.command import main

pytestmark = pytest.mark.slow

SMALL = ("--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "256")


@pytest.fixture(scope="module")
def server() -> Iterator[WarmServer]:
    """The demo model on two ranks."""
    with warm_serving(2, *SMALL) as running:
        yield running


def test_continuations_are_those_of_the_engine(server: WarmServer) -> None:
    """Oracle: ``prompt_logprobs`` of an ``LLM`` on one rank, whose tokens are bytes."""
    context, texts = "12+34=", ("46", "47", " é")
    asker = Asker(client=ServerClient(server.url), model="demo_model")
    with LLM(device="cpu", dtype="float32", num_gpu_blocks_override=64) as llm:
        for text in texts:
            ids = list((context + text).encode())
            asked = SamplingParams(max_tokens=1, prompt_logprobs=1)
            (output,) = llm.generate([ids], asked, use_tqdm=False)
            assert output.prompt_logprobs is not None
            shown = [row[token] for token, row in zip(ids, output.prompt_logprobs, strict=True) if row is not None]
            exact = shown[len(context) - 1 :]
            found = asker.continuation(context, text)
            assert found.logprob == pytest.approx(sum(one.logprob for one in exact), abs=1e-3)
            assert found.is_likeliest == all(one.rank == 1 for one in exact)


def test_the_demo_model_passes_its_gate(server: WarmServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the accuracy that the model's README tells of additions, of 96 %; 0 against itself."""
    record = tmp_path / "record.json"
    order = ["--url", server.url, "--tasks", "sums", "facts", "--threshold", "sums=80%", "--limit", "60"]
    assert main([*order, "--record", str(record)]) == 0
    sums, facts = json.loads(record.read_text(encoding="utf-8"))["lines"]
    assert 0.85 < sums["numbers"]["share"] <= 1 and facts["numbers"]["asked"] == 60
    assert main([*order, "--against", str(record)]) == 0
    assert "of 60 questions 0 became wrong and 0 right" in capsys.readouterr().out


def test_it_starts_a_server_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the README's accuracy again, of a model on this machine; the fixtures check for what is left."""
    assert main([*SMALL, "--threshold", "60%", "--limit", "20", "--num-fewshot", "2"]) == 0
    assert "sums" in capsys.readouterr().out
