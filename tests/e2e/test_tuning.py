"""A job on two ranks tries kernels at its first start, finds the choice at the second, and takes a pinned one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tp_engine import LLM, SamplingParams
from tp_engine.cli.main import main
from tp_engine.system import env

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_children")]

OPTIONS: dict[str, Any] = {
    "device": "cpu", "quantization": "int8", "tensor_parallel_size": 2, "max_num_seqs": 2, "max_model_len": 64,
    "num_gpu_blocks_override": 16, "max_num_batched_tokens": 64,
}  # fmt: skip


def answer(**options: Any) -> tuple[str, list[float]]:
    """The text and the log-probabilities of a sum."""
    with LLM(**OPTIONS, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
        found = llm.chat([{"role": "user", "content": "12+34="}], params, use_tqdm=False)[0].outputs[0]
        assert found.logprobs is not None
        return found.text, [next(iter(one.values())).logprob for one in found.logprobs]


def test_first_second_and_pinned_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the right answer, and the same log-probabilities each time, because the choices are the same; the first
    start leaves a file for each shape, which the second and ``tp-engine tune --to`` find, and the pinned start needs
    none."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for compiled in env.cache_dir().glob("code-*"):
        shutil.copytree(compiled, folder / compiled.name)
    monkeypatch.setenv("TP_ENGINE_CACHE_DIR", str(folder))
    pinned = tmp_path / "tuned.json"

    def files() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (folder / "tuned").iterdir()}

    first = answer(tune="quick")
    made = files()
    assert first[0] == "46" and len(made) == 4 and all(name.endswith(".json") for name in made)
    assert answer(tune="quick") == first
    assert main(["tune", "--device", "cpu", "-q", "int8", "-tp", "2", "--quick", "--to", str(pinned)]) == 0
    assert files() == made
    shutil.rmtree(folder / "tuned")
    assert answer(tuned=str(pinned)) == first
    assert not (folder / "tuned").exists()
