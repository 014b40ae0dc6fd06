"""The engine on all ranks of a torchrun job: NCCL where there are GPUs, gloo on CPUs.  Every rank runs every test.

scripts/test_multi_gpu --nproc-per-node 8
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.tiny_models import make_checkpoint
from tp_engine import LLM, SamplingParams
from tp_engine.config import DEMO_MODEL, EngineConfig
from tp_engine.engine.start import serve_rank
from tp_engine.server.config import ServerConfig
from tp_engine.server.lifecycle import serve
from tp_engine.system import env
from tp_engine.worker import start

LAUNCHED = env.launched_rank() or pytest.fail("run this through scripts/test_multi_gpu")
PROMPTS = [[5, 9, 13, 7], list(range(20, 60)), [100, 3, 50], [7] * 17]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same random model on every rank, each in its own folder."""
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", hidden_size=64, num_heads=8, num_kv_heads=4)


@contextmanager
def engine(**options: Any) -> Iterator[LLM | None]:
    """An LLM on rank 0; on other ranks None, after rank 0 has closed its LLM."""
    if LAUNCHED.rank > 0:
        serve_rank(EngineConfig(**options))
        yield None
        return
    with LLM(**options) as llm:
        yield llm


def reference(folder: Path) -> list[list[int]]:
    """transformers on the CPU, greedy, fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, min_new_tokens=12,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def test_tokens_of_all_ranks_together_equal_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: transformers in fp32.  Chunked, preempted and cached, then once more from the cache.

    The ranks run their first steps together, as on GPUs.
    """
    monkeypatch.setattr(start, "warms_up", lambda device_type: True)
    options = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 24, "max_num_seqs": 8}
    with engine(model=str(folder), num_gpu_blocks_override=24, block_size=4, **options) as llm:
        if llm is None:
            return
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        expected = reference(folder)
        for _ in range(2):
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        llm.engine.check_integrity()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="steps are recorded on GPUs")
@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_k": 20, "top_p": 0.9}], ids=str)
def test_recorded_steps_give_the_tokens_of_eager_ones(folder: Path, filters: dict[str, Any]) -> None:
    """Oracle: the same engine with ``enforce_eager``; the ranks' exchange is part of the recordings."""
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True, **filters)
    found = []
    for enforce_eager in (False, True):
        with engine(model=str(folder), dtype="float32", max_model_len=128, enforce_eager=enforce_eager) as llm:
            if llm is not None:
                outputs = llm.generate(PROMPTS, params, use_tqdm=False)
                found.append([output.outputs[0].token_ids for output in outputs])
    assert not found or found[0] == found[1]


@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_agree_on_the_smallest_number_of_blocks(folder: Path, seed: int) -> None:
    """Oracle: the minimum over ranks; each rank has a random fraction of 8 MiB, which every rank can compute."""
    fractions = np.random.default_rng(seed).uniform(0.2, 1.0, LAUNCHED.world_size)
    cache_bytes = [int(fraction * (8 << 20)) for fraction in fractions]
    with engine(
        model=str(folder), dtype="float32", max_model_len=128, kv_cache_memory_bytes=cache_bytes[LAUNCHED.rank]
    ) as llm:
        if llm is None:
            return
        local_kv_heads = max(1, 4 // LAUNCHED.world_size)
        block_bytes = 2 * 2 * 16 * local_kv_heads * 8 * 4
        assert llm.engine.model_info.num_blocks == min(cache_bytes) // block_bytes
        assert len(llm.generate(PROMPTS, SamplingParams(max_tokens=3), use_tqdm=False)) == len(PROMPTS)


def test_one_rank_without_memory_fails_every_rank(folder: Path) -> None:
    """Oracle: the last rank cannot hold one block; every rank ends with the same error, which names that rank."""
    last = LAUNCHED.world_size - 1
    cache_bytes = 16 if LAUNCHED.rank == last else 8 << 20
    with (
        pytest.raises(RuntimeError, match=f"rank {last}: MemoryBudgetError: kv_cache_memory_bytes is 16"),
        engine(model=str(folder), max_model_len=128, kv_cache_memory_bytes=cache_bytes),
    ):
        pass


def test_a_request_is_served_over_http() -> None:
    """Oracle: arithmetic, by the demo model behind the real server; SIGTERM on rank 0 ends all ranks with code 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers: list[str] = []
    if LAUNCHED.rank == 0:
        threading.Thread(target=_ask_and_stop, args=(f"http://127.0.0.1:{port}", answers), daemon=True).start()
    config = EngineConfig(model=str(DEMO_MODEL), num_gpu_blocks_override=256)
    assert serve(config, ServerConfig(port=port)) == 0
    if LAUNCHED.rank == 0:
        assert answers == ["46"]


def _ask_and_stop(url: str, answers: list[str]) -> None:
    """The client: wait until the server is ready, ask once, and signal this rank's process."""
    try:
        deadline = time.monotonic() + 120
        while not _is_ready(url) and time.monotonic() < deadline:
            time.sleep(0.2)
        body = {"messages": [{"role": "user", "content": "12+34="}], "temperature": 0}
        answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=60).json()
        answers.append(answer["choices"][0]["message"]["content"])
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
