"""Quantised checkpoints behind the server on two ranks, beside the float checkpoints of the same numbers on one."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import warm_serving
from tests.quantised.checkpoints import compress
from tests.tiny_models import make_checkpoint
from tests.tiny_server import chat_tokenizer
from tp_engine import LLM, SamplingParams

pytestmark = pytest.mark.slow

OPTIONS = ("--device", "cpu", "--num-gpu-blocks-override", "64", "--dtype", "float32")
PROMPT = "twelve"


def answer(folder: Path) -> str:
    """The server's text of a greedy completion."""
    with warm_serving(2, "--model", str(folder), *OPTIONS) as server:
        request = {"model": folder.name, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        found = httpx.post(server.url + "/v1/completions", json=request, timeout=60).raise_for_status().json()
        return str(found["choices"][0]["text"])


def expected(folder: Path) -> str:
    """The text of one rank in this process."""
    with LLM(str(folder), device="cpu", num_gpu_blocks_override=64, dtype="float32") as llm:
        (found,) = llm.generate([PROMPT], SamplingParams(max_tokens=24, temperature=0), use_tqdm=False)
        return found.outputs[0].text


@pytest.mark.parametrize(("name", "architecture"), [("awq", "qwen3"), ("fp8-block", "qwen3-moe")])
def test_answers_equal_the_twin_s(name: str, architecture: str, tmp_path: Path) -> None:
    """Oracle: the twin's tokens.  A rank's shard of 96 inner elements cuts a block of 128."""
    folder = make_checkpoint(tmp_path / "float", architecture, hidden_size=128, intermediate_size=192, vocab_size=384)
    compress(folder, tmp_path / "target", tmp_path / "twin", name, group=64 if name == "awq" else None)
    for own in ("target", "twin"):
        chat_tokenizer().save_pretrained(tmp_path / own)
    text = answer(tmp_path / "target")
    assert text and text == expected(tmp_path / "twin")
