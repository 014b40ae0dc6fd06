"""What a start prints, for tests of any that they make."""

from __future__ import annotations

import re

_LINE = re.compile(r"^\d\d:\d\d:\d\d (\w+) \[([^]]+)\] (.*)$")
_SCREEN = 24
_COLUMNS = 80
_OF_ANOTHER_RANK = re.compile(r"rank [1-9]")


def check_start(text: str, *, says: tuple[str, ...] = ("model: ", "computing on ", "GPU KV cache size: ")) -> None:
    """Assert that a start's output is at most a screen of 24 lines of 80 columns, that it ``says`` what one looks for
    once, and that only rank 0 speaks for the ranks; torchrun's own lines do not count."""
    lines = [line for line in text.splitlines() if not re.search(r"torch/distributed|OMP_NUM_THREADS|\*{9}", line)]
    spoken = [match.groups() for line in lines if (match := _LINE.match(line))]
    assert sum(-(-len(line) // _COLUMNS) or 1 for line in lines) <= _SCREEN, "\n".join(lines)
    assert not [who for _, who, _ in spoken if _OF_ANOTHER_RANK.fullmatch(who)], text
    messages = [message for _, _, message in spoken]
    assert len(messages) == len(set(messages)), text
    for word in says:
        assert sum(word in message for message in messages) == 1, (word, text)
    assert not [level for level, _, _ in spoken if level != "INFO"], text
