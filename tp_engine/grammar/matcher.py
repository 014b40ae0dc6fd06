"""One output's place in its grammar, and the tokens that may follow.

::

    compiled --start()--> running --accept(token)--> running | over
                                                              |
                             the grammar allows no more, an end token was accepted, a token was refused, a limit
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tp_engine.grammar.library import llguidance
from tp_engine.grammar.vocabulary import GrammarVocabulary
from tp_engine.plan import IntArray

_IN_PARALLEL_FROM = 4


class GrammarMatcher:
    """One sequence's place in a grammar; implements the scheduler's ``TokenConstraint``.

    ``is_over``: no token may follow.  ``error``: why the grammar can not be followed any further, if a limit of the
    library is the reason and not the grammar's end.  ``ignore_eos``: an end token is allowed only if no other token is.
    """

    def __init__(self, matcher: Any, vocabulary: GrammarVocabulary, *, ignore_eos: bool) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._ignore_eos = ignore_eos
        self.is_over = False
        self.error: str | None = None

    def accept(self, token_id: int) -> bool:
        """Add a token; False if the grammar refuses it, and then the output ends without it."""
        if self.error is not None or not self._matcher.try_consume_tokens([token_id]):
            self.is_over = True
            self._note_error()
            return False
        self.is_over = self._matcher.is_stopped() or self._only_end_is_left()
        self._note_error()
        return True

    def forced(self) -> list[int]:
        """The tokens that must follow, as the tokenizer writes their text; others may write the same text.

        A copy is asked, so that no limit of the library is reached for it.
        """
        if self.is_over or self.error is not None:
            return []
        found: list[int] = self._matcher.deep_copy().compute_ff_tokens()
        return found

    def copy(self) -> GrammarMatcher:
        """The same place, which goes its own way from here; takes microseconds."""
        other = GrammarMatcher(self._matcher.deep_copy(), self._vocabulary, ignore_eos=self._ignore_eos)
        other.is_over, other.error = self.is_over, self.error
        return other

    def settle_mask(self, mask: IntArray) -> None:
        """Change ``mask`` (words,) int32, as the library wrote it, to what may be sampled; at least one bit is set."""
        self._note_error()
        end_mask = self._vocabulary.end_mask
        if self._ignore_eos and (others := mask & ~end_mask).any():
            mask[:] = others
        if self.error is not None or not mask.any():
            mask[:] = end_mask if end_mask.any() else -1

    def _only_end_is_left(self) -> bool:
        """Whether an output with ``ignore_eos`` has come to the grammar's end."""
        if not (self._ignore_eos and self._matcher.is_accepting()):
            return False
        mask = MaskFiller()([self])[0]
        return not (mask & ~self._vocabulary.end_mask).any()

    def _note_error(self) -> None:
        if self.error is None and self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().replace("<non-verbose/>", "").split())
            self.error = f"the grammar can not be followed any further: {reason}"


class MaskFiller:
    """Fills the masks of many sequences, on several threads if there are enough; releases the GIL meanwhile."""

    def __init__(self) -> None:
        self._executor: Any | None = None

    def __call__(self, matchers: Sequence[GrammarMatcher]) -> IntArray:
        """Masks (n, words) int32 of ``matchers``, all of one vocabulary: bit t % 32 of word t // 32; a new array."""
        vocabulary = matchers[0]._vocabulary
        own: IntArray = np.zeros((len(matchers), vocabulary.num_own_words), dtype=np.int32)
        if len(matchers) < _IN_PARALLEL_FROM:
            for matcher, row in zip(matchers, own, strict=True):
                with contextlib.suppress(ValueError):  # it has reached a limit, which its error state says
                    matcher._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        else:
            self._fill_together(matchers, own)
        masks = np.ascontiguousarray(own[:, : vocabulary.num_words])
        for matcher, mask in zip(matchers, masks, strict=True):
            matcher.settle_mask(mask)
        return masks

    def _fill_together(self, matchers: Sequence[GrammarMatcher], masks: IntArray) -> None:
        if self._executor is None:
            self._executor = llguidance().LLExecutor()
        places = [(one._matcher, place) for place, one in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(places, masks.ctypes.data, masks.strides[0], len(masks))
