"""Stop strings in a text that grows: found wherever they are split, and never shown in part."""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """One stop string and how much of it the text ends with (Knuth, Morris and Pratt's automaton: O(1) a character)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallback = _fallback_table(text)

    def advance(self, character: str) -> bool:
        """Whether the stop string ends with this character of the text."""
        matched = self.num_matched
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        if self.text[matched] == character:
            matched += 1
        ended = matched == len(self.text)
        self.num_matched = self._fallback[-1] if ended else matched
        return ended


class StopStrings:
    """Searches one sequence's text for ``stops``; text that may be the beginning of one is held back.

    The stop string that ends first counts, the longest of those that end together; so the result does not depend on
    how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        self.matched: str | None = None
        self._patterns = [_Pattern(stop) for stop in stops]
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Add text; returns what may be shown of it and of what was held, up to the stop string once ``matched``.

        A stop string that ends in text pushed with ``may_match`` False does not count.
        """
        num_before, pending = len(self._held), self._held + text
        for offset, character in enumerate(text, start=1):
            ended = [pattern.text for pattern in self._patterns if pattern.advance(character)]
            if ended and may_match:
                return self._cut(pending[: num_before + offset], max(ended, key=len))
        num_shown = len(pending) - max(pattern.num_matched for pattern in self._patterns)
        self._held = pending[num_shown:]
        return pending[:num_shown]

    def flush(self) -> str:
        """What is still held: the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str, stop: str) -> str:
        self.matched, self._held = stop, ""
        return text if self._include else text[: len(text) - len(stop)]


def _fallback_table(text: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix too."""
    table = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return table
