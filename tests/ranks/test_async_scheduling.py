"""Plans sent ahead change no token.  Oracle: the same job with ``async_scheduling`` off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import parity_job
from tests.ranks.test_parity import CACHED, PLAIN, make_case
from tests.ranks.warm_ranks import warm_ranks

pytestmark = pytest.mark.slow


def test_async_scheduling_changes_no_token(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the same job with ``async_scheduling`` off; greedy, sampled, stopped by id and by length, n = 2,
    preempted, chunked and cached."""
    folder = checkpoint("qwen3", num_kv_heads=2, vocab_size=97, head_dim=16)
    sampled = {"temperature": 0.9, "top_p": 0.95, "n": 2, "stop_token_ids": list(range(3, 97, 9))}
    cases: list[dict[str, Any]] = []
    for settings in (PLAIN, CACHED):
        for params in ({"temperature": 0.0, "ignore_eos": True}, sampled):
            for is_async in (True, False):
                case = make_case(folder, 2, {**settings, "async_scheduling": is_async})
                cases.append({**case, "params": params})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    warm_ranks(2, parity_job.main, tmp_path / "cases.json", tmp_path / "out.json")
    results = json.loads((tmp_path / "out.json").read_text())
    for ahead, behind in zip(results[::2], results[1::2], strict=True):
        assert ahead["batch"] == behind["batch"]
        assert ahead["alone"] == behind["alone"]
    lengths = {len(sample) for result in results[2:4] for output in result["batch"] for sample in output}
    assert len(lengths) > 5, "stop ids ended sequences at many lengths"
