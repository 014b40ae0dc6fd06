"""The worker of stored batches, without a server around it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tp_engine.api.batches.objects import Batch
from tp_engine.api.batches.store import BatchStore
from tp_engine.server.batch_worker import BatchWorker


@pytest.mark.parametrize("stands_still", [False, True])
def test_a_cancel_is_told_as_cancelling(stands_still: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the state that OpenAI's API promises, although the batch has ended before that was on the disk; also of a
    batch that stands still because of an error of the disk."""

    def check_lines(*_: object) -> None:
        if stands_still:
            raise OSError("no space")
        time.sleep(0.01)

    def save(store: BatchStore, batch: Batch) -> None:
        deadline_s = time.monotonic() + 100
        while batch.status == "cancelling" and time.monotonic() < deadline_s:
            time.sleep(0.001)

    async def run() -> tuple[str, str]:
        with BatchStore(tmp_path, retention_s=9, max_bytes=9) as store:
            worker = BatchWorker(state, store)
            batch = Batch(id="b", endpoint="e", input_file_id="f", completion_window="1h", **times)
            await worker.add(batch, source)
            await asyncio.sleep(0)
            while stands_still and worker._tasks:
                await asyncio.sleep(0.001)
            told = await worker.cancel(batch)
            await worker.stop()
            return told.status, batch.status

    times: Any = {"created_at": 1, "expires_at": 2, "retention_s": 9}
    source: Any = None
    state: Any = SimpleNamespace(
        metrics=SimpleNamespace(batches=SimpleNamespace()),
        llm=SimpleNamespace(model_info=SimpleNamespace(max_num_seqs=4)),
        config=SimpleNamespace(max_body_bytes=9),
    )
    monkeypatch.setattr(BatchStore, "add_batch", lambda *_: None)
    monkeypatch.setattr(BatchStore, "save", save)
    monkeypatch.setattr("tp_engine.server.batch_worker.check_lines", check_lines)
    assert asyncio.run(run()) == ("cancelling", "cancelled")
