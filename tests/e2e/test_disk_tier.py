"""Real engines with a disk tier: what must not be used is computed again, a disk that hangs stops nothing, and a
conversation with the demo server goes on after a restart."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import WarmServer, warm_serving
from tp_engine import LLM, SamplingParams
from tp_engine.errors import ConfigError, MemoryBudgetError

pytestmark = pytest.mark.slow

PROMPT = [(7 * position) % 90 + 3 for position in range(100)]
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 160, "num_gpu_blocks_override": 40, "max_num_seqs": 4,
    "max_num_batched_tokens": 64, "block_size": 8,
}  # fmt: skip
NUM_FULL = 96  # tokens of the prompt's full blocks before its last token


def on_disk(folder: Path) -> dict[str, Any]:
    """The options of a disk tier."""
    return {"kv_offloading_size": 0.01, "kv_disk_path": str(folder), "kv_disk_size": 0.01}


def answer(model: Path, options: dict[str, Any]) -> tuple[list[int], int]:
    """A new engine's answer to the prompt, and how much of the prompt it had."""
    with LLM(str(model), **{**OPTIONS, **options}) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        llm.engine.check_integrity()
        return list(output.outputs[0].token_ids), output.num_cached_tokens


def flip(path: Path, offset: int) -> None:
    """Change a bit of the file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


@pytest.mark.usefixtures("warm_children")
def test_what_does_not_fit_is_computed_again(
    checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: each engine's tokens without a disk.  The same engine again, after a start that was refused; a flipped
    bit in the third slot; other weights under the same name; another rope; two ranks, and a flipped bit on one of them;
    another codec or type of cache.  The log says what differs, and engines with a codec or a quantised cache find what
    they have written."""
    model, disk = tmp_path / "model", tmp_path / "kv"
    shutil.copytree(checkpoint("qwen3", num_kv_heads=4, vocab_size=203), model)
    logging.getLogger("tp_engine").addHandler(caplog.handler)
    try:
        plain, _ = answer(model, {})
        with pytest.raises(MemoryBudgetError, match=r"what is free .* lower it to at most"):
            answer(model, {**on_disk(disk), "kv_disk_size": 1e9})
        assert answer(model, on_disk(disk)) == (plain, 0)
        assert answer(model, on_disk(disk)) == (plain, NUM_FULL)
        second = {**on_disk(disk), "flight_recorder_dir": str(tmp_path)}
        with LLM(str(model), **OPTIONS, **on_disk(disk)), pytest.raises(ConfigError, match="another engine uses"):
            answer(model, second)
        flip(disk / "rank-0.kv", 2 * 4096 + 11)
        caplog.clear()
        tokens, num_cached = answer(model, on_disk(disk))
        assert tokens == plain and num_cached < NUM_FULL
        assert "could not be read: they will be computed again" in caplog.text
        assert answer(model, on_disk(disk)) == (plain, NUM_FULL)

        config = json.loads((model / "config.json").read_text())
        weights = next(model.glob("*.safetensors"))
        changes: list[tuple[str, Callable[[], object], dict[str, Any]]] = [
            ("weights", lambda: flip(weights, weights.stat().st_size - 1), {}),
            ("model", lambda: (model / "config.json").write_text(json.dumps(other_rope(config))), {}),
            ("ranks", lambda: None, {"tensor_parallel_size": 2}),
            ("types", lambda: None, {"kv_offloading_codec": "int8", "kv_offloading_size": 0.01}),
            ("types", lambda: None, {"kv_cache_dtype": "int8"}),
        ]
        for name, change, options in changes:
            change()
            expected, _ = answer(model, options)
            caplog.clear()
            assert answer(model, {**options, **on_disk(disk)}) == (expected, 0), name
            (line,) = {one for one in caplog.messages if "begins empty" in one}
            assert name in line
            if "tensor_parallel_size" in options:
                flip(disk / "rank-1.kv", 2 * 4096 + 11)
                caplog.clear()
                tokens, num_cached = answer(model, {**options, **on_disk(disk)})
                assert tokens == expected and num_cached < NUM_FULL
                assert "could not be read: they will be computed again" in caplog.text
            elif options:
                assert answer(model, {**options, **on_disk(disk)})[1] == NUM_FULL, name
    finally:
        logging.getLogger("tp_engine").removeHandler(caplog.handler)


def other_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with another base of its rotary embedding."""
    if "rope_parameters" in config:
        return config | {"rope_parameters": config["rope_parameters"] | {"rope_theta": 4321.0}}
    return config | {"rope_theta": 4321.0}


def test_a_disk_that_hangs_stops_neither_requests_nor_the_end(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the tokens without a disk, while reads and writes of the second engine never end."""
    model, disk = checkpoint("qwen3", num_kv_heads=4, vocab_size=203), tmp_path / "kv"
    plain, _ = answer(model, on_disk(disk))
    never = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: never.wait() and 0)
        patch.setattr(os, "pwritev", lambda *_: never.wait() and 0)
        started_s = time.monotonic()
        assert answer(model, on_disk(disk)) == (plain, 0)
        assert time.monotonic() - started_s < 60
        never.set()


def chat(server: WarmServer, messages: list[dict[str, str]]) -> tuple[str, int]:
    """The answer, and the cached tokens of the prompt."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 24}
    found = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).json()
    return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_conversation_of_the_demo_server_goes_on_after_a_restart(tmp_path: Path) -> None:
    """Oracle: the same conversation's text before; a clean stop, then kill -9 of all ranks a second after an answer.

    On two ranks.  The prefix comes from disk, as ``cached_tokens`` says.
    """
    arguments = ["--kv-offloading-size", "0.05", "--kv-disk-path", str(tmp_path / "kv"), "--kv-disk-size", "0.05"]
    arguments += ["--device", "cpu", "--num-gpu-blocks-override", "256"]
    pairs = " ".join(f"{a}{b}={(3 * i + j) % 10}" for i, a in enumerate("abcd") for j, b in enumerate("efgh"))
    messages = [{"role": "user", "content": f"{pairs} ? bf"}]
    with warm_serving(2, *arguments) as server:
        first, cached = chat(server, messages)
        assert cached == 0
        again, cached = chat(server, messages)
        assert again == first and cached > 64
        assert server.stop() == [0, 0]
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "sort: 3 1 4"}]
    with warm_serving(2, *arguments) as server:
        repeated, cached = chat(server, messages[:1])
        assert repeated == first and cached > 64
        second, _ = chat(server, messages)
        metrics = httpx.get(server.url + "/metrics", timeout=100).text
        time.sleep(1.2)
        for rank in server.ranks:
            rank.kill()
    (line,) = [one for one in metrics.splitlines() if "prompt_tokens_by_source" in one and 'source="disk"' in one]
    assert float(line.split()[-1]) > 64
    with warm_serving(2, *arguments) as server:
        repeated, cached = chat(server, messages)
        assert repeated == second and cached >= 96
        assert server.stop() == [0, 0]
