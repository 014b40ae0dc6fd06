"""What a rank's process says at its end."""

from __future__ import annotations

import pytest

from tp_engine.engine.rank_process import _log
from tp_engine.errors import RankError


@pytest.mark.parametrize(
    ("error", "words", "has_traceback"),
    [
        (RankError(0, "process 7 is gone, in collective 3 of step 4"), "rank 1 ends: rank 0: process 7 is gone", False),
        (RankError(1, "its own fault"), "rank 1 failed", True),
        (ValueError("a bug"), "rank 1 failed", True),
    ],
)
def test_only_a_ranks_own_fault_has_a_traceback(
    error: Exception, words: str, has_traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the log; a program that is killed in a step ends with a line of each rank, not with a page."""
    _log(1, error)
    (record,) = caplog.records
    assert record.getMessage().startswith(words) and (record.exc_info is not None) == has_traceback
