"""How far a job is, with tokens per second and the time that is left: a bar on a terminal, else lines in the log."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from tqdm import tqdm

from tp_engine.log import get_logger

logger = get_logger(__name__)

_LOG_PERIOD_S = 30.0
_RATE_PERIOD_S = 2.0


class Progress:
    """``total`` lines of which ``initial`` were done before; the rate is that of the last few seconds."""

    def __init__(self, total: int, initial: int, *, shown: bool) -> None:
        self._total, self._initial, self._shown = total, initial, shown
        self._num_done = 0
        self._num_tokens = self._num_tokens_before = 0
        self._started_s = self._rated_s = self._logged_s = time.monotonic()
        self._rate = 0.0
        on_terminal = shown and sys.stderr.isatty()
        self._bar = tqdm(
            total=total, initial=initial, desc="lines", unit="line", disable=not on_terminal, dynamic_ncols=True
        )

    def tokens(self, number: int) -> None:
        """One step generated ``number`` tokens."""
        self._num_tokens += number
        now_s = time.monotonic()
        if now_s - self._rated_s >= _RATE_PERIOD_S:
            self._rate = (self._num_tokens - self._num_tokens_before) / (now_s - self._rated_s)
            self._num_tokens_before, self._rated_s = self._num_tokens, now_s
            self._bar.set_postfix_str(f"{self._rate:,.0f} tokens/s")
            if self._shown and self._bar.disable and now_s - self._logged_s >= _LOG_PERIOD_S:
                self._logged_s = now_s
                logger.info("%s", self.text(now_s))

    def line(self) -> None:
        """One more line has its result."""
        self._num_done += 1
        self._bar.update(1)

    def text(self, now_s: float) -> str:
        """One line for the log; ``now_s`` is time.monotonic()."""
        done = self._initial + self._num_done
        share = 100 * done / self._total if self._total else 100.0
        left_s = (now_s - self._started_s) * (self._total - done) / self._num_done if self._num_done else None
        left = "" if left_s is None else f", {timedelta(seconds=round(left_s))} left"
        return f"{done:,} of {self._total:,} lines ({share:.1f} %), {self._rate:,.0f} tokens/s{left}"

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
