"""The text of one sequence, from its token ids to what may be shown: detokenized, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from tp_engine.engine.detokenizer import IncrementalDetokenizer, TokenDecoder
from tp_engine.engine.stop_strings import StopStrings
from tp_engine.sampling_params import SamplingParams


class SequenceText:
    """Text as it grows.  ``stop_string`` is the stop string that ended it, if one did; then nothing more is to come."""

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
        """The stop string that was found."""
        return None if self._stops is None else self._stops.matched

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool, is_last: bool) -> tuple[str, int]:
        """Add tokens; returns the new text and how many of the tokens belong to the sequence (a stop string cuts it).

        ``ends_with_stop_token``: the last of them is an EOS or stop token, whose text is not shown unless
        ``include_stop_str_in_output``.  ``is_last``: nothing follows, what was held back is returned as it stands.
        """
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
