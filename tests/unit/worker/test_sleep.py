"""The order in which a rank gives its memory back when it sleeps, and takes it when it wakes up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tp_engine.worker.sleep import sleep, wake_up


def test_recordings_go_before_the_memory_that_they_read() -> None:
    """Oracle: by hand: a recording that outlives the cache would replay over what others have there by then; only what
    is free by now goes back to the device, and new recordings come last."""
    cache = torch.empty(64, dtype=torch.uint8, device="meta")
    calls: list[tuple[str, int]] = []

    def note(name: str) -> Any:
        return lambda: calls.append((name, cache.untyped_storage().nbytes()))

    runner: Any = SimpleNamespace(
        check_sleep=note("check"), graphs=SimpleNamespace(forget=note("forget")), kv_memory=(cache,), is_asleep=False,
        record_again=note("record"),
    )  # fmt: skip
    sleep(runner, note("empty")).commit()
    assert runner.is_asleep and calls[:2] == [("check", 64), ("forget", 64)]
    assert calls[2:] == [("empty", 0)]
    wake_up(runner).commit()
    assert not runner.is_asleep and calls[3:] == [("record", 64)]
