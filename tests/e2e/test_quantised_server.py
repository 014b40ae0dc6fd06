"""Quantised checkpoints behind the server on two ranks, beside the float checkpoints of the same numbers."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import serving
from tests.quantised.checkpoints import compress
from tests.tiny_models import make_checkpoint
from tests.tiny_server import chat_tokenizer

pytestmark = pytest.mark.slow

OPTIONS = ("--device", "cpu", "--num-gpu-blocks-override", "64", "--dtype", "float32")


def answer(folder: Path) -> dict[str, object]:
    """Text and log-probabilities of a greedy completion."""
    chat_tokenizer().save_pretrained(folder)
    with serving(2, "--model", str(folder), *OPTIONS, timeout_s=100) as server:
        request = {"model": folder.name, "prompt": "twelve", "max_tokens": 24, "temperature": 0, "logprobs": 0}
        found = httpx.post(server.url + "/v1/completions", json=request, timeout=60).raise_for_status().json()
        choice: dict[str, object] = found["choices"][0]
        return choice


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "architecture"), [("awq", "qwen3"), ("fp8-block", "qwen3-moe")])
def test_answers_equal_the_twin_s(name: str, architecture: str, tmp_path: Path) -> None:
    """Oracle: the twin's tokens.  A rank's shard of 96 inner elements cuts a block of 128."""
    folder = make_checkpoint(tmp_path / "float", architecture, hidden_size=128, intermediate_size=192, vocab_size=384)
    compress(folder, tmp_path / "target", tmp_path / "twin", name, group=64 if name == "awq" else None)
    found, expected = answer(tmp_path / "target"), answer(tmp_path / "twin")
    assert found["text"] == expected["text"] and found["text"]
