"""A bar for work that takes long: on a terminal it moves, elsewhere plain lines say how far it is, one in a while."""

import io
import sys
from collections.abc import Callable
from typing import Any

_LINES = "{desc}: {n_fmt} of {total_fmt} ({percentage:.0f} %), {rate_fmt}{postfix}, {remaining} left"
_LINES_WITHOUT_TOTAL = "{desc}: {n_fmt}, {elapsed}"
_LINE_PERIOD_S = 10.0


def progress_bar(
    desc: str,
    *,
    total: int | None,
    say: Callable[[str], None],
    period_s: float = _LINE_PERIOD_S,
    delay_s: float = 0.0,
    **options: Any,
) -> Any:
    """Return a bar of tqdm, whose other ``options`` these are.  On a terminal it appears after ``delay_s``; elsewhere
    ``say`` gets a line each ``period_s``, so that work which takes less says nothing."""
    from tqdm import tqdm  # most starts are over before there is a bar

    if is_terminal():
        return tqdm(total=total, desc=desc, dynamic_ncols=True, file=sys.stderr, delay=delay_s, **options)
    return tqdm(
        total=total, desc=desc, file=_PlainLines(say), mininterval=period_s, miniters=1, delay=period_s,
        bar_format=_LINES_WITHOUT_TOTAL if total is None else _LINES, **options,
    )  # fmt: skip


def is_terminal() -> bool:
    """Return whether a person reads standard error as it is written: a terminal, or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def say_plainly(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)


class _PlainLines(io.StringIO):
    """Where a bar goes if there is no terminal."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def write(self, text: str) -> int:
        if words := text.strip():
            self._say(words)
        return len(text)
