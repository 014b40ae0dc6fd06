"""The text of one sequence, token by token: detokenized, searched for stop strings, and cut where one is found.

Decoding one token by itself is wrong: characters span tokens, and decoders look at neighbouring tokens.  As in Hugging
Face's text-generation-inference, a window of recent tokens is decoded each time, and the new part that can no longer
change is returned::

    tokens   ... dropped ... | context  | new ...        window = context + new
    text                     | returned | to return | held

The context begins where the text could no longer change, so the window's text ends like the text of all tokens.  The
detokenizer holds back

* a last U+FFFD: it may be the first bytes of a character that the next tokens complete;
* a run of byte tokens (``<0xE4>``) until another token ends it: decoders with byte fallback show the whole run as
  U+FFFD if any part of it is not UTF-8, so a later byte can still change the text of earlier bytes.
"""

from collections.abc import Sequence

from tp_engine.engine.tokenizer import TokenDecoder
from tp_engine.requests.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"
# More than a character has bytes: decoding from any token that far back gives the same end as decoding all tokens.
_RESYNC_TOKENS = 16
_MAX_HELD_TOKENS = 64


def hidden_ids(decoder: TokenDecoder | None, params: SamplingParams) -> frozenset[int]:
    """Return the tokens that the text of a request leaves out."""
    return decoder.special_ids if decoder is not None and params.skip_special_tokens else frozenset()


class SequenceText:
    """The growing text.  A stop string ends it; ``stop_string`` then says which one."""

    def __init__(self, decoder: TokenDecoder, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(decoder, skip_special_tokens=params.skip_special_tokens)
        self._stops: StopStrings | None = None
        if params.stop:
            self._stops = StopStrings(params.stop, include_in_output=params.include_stop_str_in_output)
        self._show_stop_token = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found, if any."""
        return None if self._stops is None else self._stops.matched

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool, is_last: bool) -> tuple[str, int]:
        """Add tokens; returns the new text and how many of the tokens belong to the sequence (a stop string cuts it).
        ``ends_with_stop_token``: the last one is an EOS or stop token, whose text is shown only with
        ``include_stop_str_in_output``.  ``is_last``: no token follows, so the text held back is returned as it is."""
        shown, num_hidden = [], int(ends_with_stop_token and not self._show_stop_token)
        for count, token_id in enumerate(token_ids[: len(token_ids) - num_hidden], start=1):
            self._num_tokens += 1
            shown.append(self._search(self._detokenizer.push(token_id)))
            if self.stop_string is not None:
                return "".join(shown), count
        if is_last:
            shown.append(self._search(self._detokenizer.flush()))
            if self._stops is not None and self._stops.matched is None:
                shown.append(self._stops.flush())
        return "".join(shown), len(token_ids)

    def _search(self, text: str) -> str:
        if self._stops is None or not text:
            return text
        return self._stops.push(text, may_match=self._num_tokens > self._min_tokens)


class IncrementalDetokenizer:
    """Turns tokens into text one by one: what ``push`` returns, and ``flush`` at the end, is together the text of all
    tokens at once."""

    def __init__(self, decoder: TokenDecoder, *, skip_special_tokens: bool) -> None:
        self._decode = decoder.decode
        self._byte_ids = decoder.byte_ids
        self._skipped_ids: frozenset[int] = decoder.special_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_context = 0  # tokens at the window's start whose text has been returned
        self._num_given = 0  # characters of the window's text that have been returned

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that can no longer change and has not been returned."""
        if token_id in self._skipped_ids:
            return ""
        self._window.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            return self._give_all_but_last(text)
        new = text[self._num_given :]
        if new:
            del self._window[: self._num_context]
            self._num_context = len(self._window)
            self._num_given = len(self._decode(self._window))
        return new

    def flush(self) -> str:
        """Return the text that was held back, as it is."""
        new = self._decode(self._window)[self._num_given :] if self._window else ""
        self._window.clear()
        self._num_context = self._num_given = 0
        return new

    def _give_all_but_last(self, text: str) -> str:
        num_settled = max(self._num_given, len(text) - 1)
        new = text[self._num_given : num_settled]
        self._num_given = num_settled
        if len(self._window) > _MAX_HELD_TOKENS:
            del self._window[:-_RESYNC_TOKENS]
            self._num_context = 0
            self._num_given = len(self._decode(self._window)) - 1
        return new


class StopStrings:
    """Searches the text for ``stops``; holds back text that may be the beginning of one.  The stop string that ends
    first counts, and of those that end together the longest, so the result does not depend on how the text is cut into
    pieces."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        self.matched: str | None = None
        self._patterns = [_Pattern(stop) for stop in stops]
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Add text; returns what may be shown of it and of the held text: up to the stop string if one ``matched``.  A
        stop string that ends in text pushed with ``may_match`` False does not count."""
        num_before, pending = len(self._held), self._held + text
        for offset, character in enumerate(text, start=1):
            ended = [pattern.text for pattern in self._patterns if pattern.advance(character)]
            if ended and may_match:
                return self._cut(pending[: num_before + offset], max(ended, key=len))
        num_shown = len(pending) - max(pattern.num_matched for pattern in self._patterns)
        self._held = pending[num_shown:]
        return pending[:num_shown]

    def flush(self) -> str:
        """Return the held text, at the end of a text without a stop string."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str, stop: str) -> str:
        self.matched, self._held = stop, ""
        return text if self._include else text[: len(text) - len(stop)]


class _Pattern:
    """One stop string and how much of it the text ends with (Knuth, Morris and Pratt's automaton: O(1) a character).

    Its table is made as far as the text has ever matched: each sequence has one for each of its stop strings, which may
    be long.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallback = [0]  # for each prefix, the length of its longest proper suffix that is a prefix too

    def advance(self, character: str) -> bool:
        """Read the next character of the text; return whether the stop string ends with it."""
        matched = self._extended(self.num_matched, character)
        if matched > len(self._fallback):
            self._fallback.append(self._extended(self._fallback[-1], character))
        ended = matched == len(self.text)
        self.num_matched = self._fallback[-1] if ended else matched
        return ended

    def _extended(self, matched: int, character: str) -> int:
        """How much a text ends with that ended with the first ``matched`` characters, and goes on with one more."""
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.text[matched] == character)
