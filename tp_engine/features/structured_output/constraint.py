"""What restricts a sequence's next token: a grammar, words that must not come (``bad_words``), and lists of token ids.

Banned words are masked from their last token on: always those that a token has in it, and those that have begun where
the next token would complete them.  ``allowed_token_ids`` and ``min_tokens`` change logits on the device; here they
are known too, because together with a grammar or with words they may leave no token::

    constraint of a sequence:   GrammarMatcher   |   TokenGuard   |   TokenGuard( GrammarMatcher )

A mask without a token ends its sequence when the step's token comes in, without that token: complete where the grammar
may end there, else with an error.  A request whose first mask is empty is refused.

A sequence waits outside of the queue (``Blocked.MASK``) while its grammar is compiled.  It then keeps a constraint of
its own for life, also through preemption, because known tokens stay known.  The mask of the next token depends on the
token before it, so such a row is planned only when that token is known (``StepScheduler``) and its mask has been found
(``Masks``), which travels with that plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, Protocol

import numpy as np

from tp_engine.errors import NO_TOKEN_LEFT
from tp_engine.plan import MASK_TOKENS, BoolArray, IntArray
from tp_engine.requests.request import EngineRequest
from tp_engine.system.units import ceil_div


class WordRules(Protocol):
    """Which tokens write a request's banned words.  A place is what matters of the output's last tokens.  ``start`` is
    the place before the first token; ``never`` (n,) are the token ids that are banned at every place."""

    @property
    def start(self) -> Any: ...
    @property
    def never(self) -> IntArray: ...
    def after(self, place: Any, token_id: int) -> Any: ...
    def completing(self, place: Any) -> Sequence[IntArray]: ...


class TokenConstraint(Protocol):
    """One sequence's place in its grammar.  ``is_quick``: to follow it takes hardly any time, as far as is known.
    ``is_over``: no token may follow; where it ``may_be_over``, what is found with the mask of the next token tells.
    ``error``: why the grammar cannot be followed further, though the output is not complete, with its ``error_code``.
    """

    is_over: bool

    @property
    def is_quick(self) -> bool: ...
    @property
    def may_be_over(self) -> bool: ...
    @property
    def error(self) -> str | None: ...
    @property
    def error_code(self) -> str: ...

    def accept(self, token_id: int) -> bool:
        """Accept one more token; False if the grammar refuses it, which ends the output without it."""

    def forced(self) -> list[int]:
        """Tokens that must follow, as far as they are known cheaply; they could be cut otherwise."""

    def decide(self) -> None:
        """Find out whether it is over, now that its mask has been found."""

    def may_end(self, mask: IntArray) -> bool:
        """Return whether the output is complete here, by the ``mask`` (words,) of the next token."""

    def copy(self) -> TokenConstraint:
        """Return a copy, which accepts its own tokens from here."""


class Grammar(Protocol):
    """A compiled grammar."""

    def start(self, *, ignore_eos: bool) -> TokenConstraint:
        """Return the place before the first token."""


class Masks(Protocol):
    """Finds the masks of the next tokens, beside the scheduler's thread, which asks for them and then looks."""

    def ask(self, constraints: Iterable[TokenConstraint]) -> None:
        """Begin to find their masks, unless that has begun; one that nobody holds any more is forgotten."""

    def be_patient(self) -> None:
        """Wait a moment for those that will be there in a moment."""

    def is_ready(self, constraint: TokenConstraint) -> bool:
        """Return whether its mask has been found; then it stays so until the next token."""

    def of(self, constraints: Sequence[TokenConstraint]) -> IntArray:
        """Return the masks (n, words) of constraints that are ready, as a plan has them (``MASKS``); a new array."""


class GrammarMasks(Protocol):
    """What finds the masks of grammars alone (``MaskFiller``)."""

    def ask(self, matchers: Iterable[Any]) -> None: ...
    def be_patient(self) -> None: ...
    def wait(self, matchers: Sequence[Any]) -> None: ...


class TokenLists:
    """Which tokens ``allowed_token_ids`` and ``min_tokens`` of a request leave, as masks of ``vocab_size`` tokens."""

    def __init__(self, request: EngineRequest, vocab_size: int) -> None:
        params = request.params
        self._min_tokens = params.min_tokens
        flags = np.zeros(ceil_div(vocab_size, MASK_TOKENS) * MASK_TOKENS, dtype=np.bool_)
        flags[:vocab_size] = params.allowed_token_ids is None
        flags[list(params.allowed_token_ids or ())] = True
        self._later = _packed(flags)
        flags[[token_id for token_id in request.stop_ids if token_id < vocab_size]] = False
        self._first = _packed(flags)

    def mask(self, num_tokens: int) -> IntArray:
        """Return the mask (words,) of the token after ``num_tokens`` generated ones; not to be changed."""
        return self._first if num_tokens < self._min_tokens else self._later


class TokenRules:
    """What a request's words and lists allow, with or without a grammar; implements ``Grammar``."""

    def __init__(self, words: WordRules, request: EngineRequest, vocab_size: int, grammar: Grammar | None) -> None:
        self.words, self.lists = words, TokenLists(request, vocab_size)
        self.fields = restricting_fields(request)
        self._grammar = grammar

    @property
    def no_token_left(self) -> str:
        """The error: these rules leave no token; and what to change."""
        names = " and ".join(self.fields)
        return f"{names} leave no token that may come next; allow more tokens, or leave one of them out"

    def start(self, *, ignore_eos: bool) -> TokenGuard:
        inner = None if self._grammar is None else self._grammar.start(ignore_eos=ignore_eos)
        return TokenGuard(self, self.words.start, inner)


def restricting_fields(request: EngineRequest) -> list[str]:
    """Return the names of the request's fields that forbid tokens."""
    params = request.params
    given = {
        "structured_outputs": params.structured_outputs is not None,
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "min_tokens": params.min_tokens > 0 and bool(request.stop_ids),
    }
    return [name for name, is_given in given.items() if is_given]


class TokenGuard:
    """One sequence's place in its rules, after ``num_tokens`` tokens; implements ``TokenConstraint``."""

    def __init__(self, rules: TokenRules, place: Any, inner: TokenConstraint | None, num_tokens: int = 0) -> None:
        self.inner = inner
        self.is_over = False
        self._rules, self._place, self._num_tokens = rules, place, num_tokens
        self._is_stuck = False

    @property
    def is_quick(self) -> bool:
        """Whether its grammar is."""
        return self.inner is None or self.inner.is_quick

    @property
    def may_be_over(self) -> bool:
        """Whether the mask of its grammar tells whether it is over."""
        return self.inner is not None and self.inner.may_be_over

    @property
    def error(self) -> str | None:
        """Why it cannot go on, though the output is not complete."""
        if self._is_stuck:
            return f"after {self._num_tokens} tokens {self._rules.no_token_left}"
        return None if self.inner is None else self.inner.error

    @property
    def error_code(self) -> str:
        """The code of ``error``."""
        return NO_TOKEN_LEFT if self._is_stuck or self.inner is None else self.inner.error_code

    def accept(self, token_id: int) -> bool:
        """Accept one more token; False if the grammar or a list refuses it."""
        if self.is_over or not _has(self._rules.lists.mask(self._num_tokens), token_id):
            self.is_over = True
            return False
        self._place = self._rules.words.after(self._place, token_id)
        self._num_tokens += 1
        if self.inner is None:
            return True
        accepted = self.inner.accept(token_id)
        self.is_over = self.inner.is_over
        return accepted

    def forced(self) -> list[int]:
        return [] if self.inner is None else self.inner.forced()

    def decide(self) -> None:
        if self.inner is not None:
            self.inner.decide()
            self.is_over = self.inner.is_over

    def may_end(self, mask: IntArray) -> bool:
        """Return whether the grammar may end here; text without one is never complete."""
        return self.inner is not None and self.inner.may_end(mask)

    def copy(self) -> TokenGuard:
        other = TokenGuard(
            self._rules, self._place, None if self.inner is None else self.inner.copy(), self._num_tokens
        )
        other.is_over, other._is_stuck = self.is_over, self._is_stuck
        return other

    def banned(self) -> IntArray:
        """Return the tokens that would complete a word now."""
        return np.concatenate([self._rules.words.never, *self._rules.words.completing(self._place)])

    def narrow(self, mask: IntArray) -> None:
        """Take from ``mask`` (words,), what the grammar allows, all that words and lists forbid.  Where nothing is
        left, no token follows: then the mask allows all, so that the device has a token to give, which is refused."""
        left = mask & self._rules.lists.mask(self._num_tokens)
        _clear(left, self.banned())
        if left.any():
            mask[:] = left
            return
        self.is_over = True
        self._is_stuck = self.error is None and not self.may_end(mask)
        mask[:] = -1


class MaskWriter:
    """``Masks`` of all kinds of constraints; ``grammars`` finds those of grammars alone, whose place knows them."""

    def __init__(self, grammars: GrammarMasks, vocab_size: int) -> None:
        self._grammars = grammars
        self._num_words = ceil_div(vocab_size, MASK_TOKENS)

    def ask(self, constraints: Iterable[TokenConstraint]) -> None:
        self._grammars.ask([matcher for one in constraints if (matcher := _grammar_of(one)) is not None])

    def be_patient(self) -> None:
        self._grammars.be_patient()

    def is_ready(self, constraint: TokenConstraint) -> bool:
        matcher = _grammar_of(constraint)
        return matcher is None or bool(matcher.is_ready)

    def of(self, constraints: Sequence[TokenConstraint]) -> IntArray:
        """Masks (n, words) int32; a new array.  A constraint whose mask would be empty is over."""
        masks: IntArray = np.full((len(constraints), self._num_words), -1, dtype=np.int32)
        for mask, one in zip(masks, constraints, strict=True):
            if (matcher := _grammar_of(one)) is not None:
                mask[:] = matcher.settle_mask()
            if isinstance(one, TokenGuard):
                one.narrow(mask)
        return masks

    def wait(self, constraint: TokenConstraint) -> IntArray:
        """Wait for the mask (words,) of one constraint; not for the scheduler's thread."""
        if (matcher := _grammar_of(constraint)) is not None:
            self._grammars.wait([matcher])
        (mask,) = self.of([constraint])
        found: IntArray = mask
        return found


def _grammar_of(constraint: TokenConstraint) -> Any | None:
    """The matcher of a constraint; None if it has no grammar."""
    return constraint.inner if isinstance(constraint, TokenGuard) else constraint


def _packed(flags: BoolArray) -> IntArray:
    return np.packbits(flags, bitorder="little").view("<i4")


def _clear(mask: IntArray, token_ids: IntArray) -> None:
    bits = np.uint32(1) << (token_ids % MASK_TOKENS).astype(np.uint32)
    np.bitwise_and.at(mask.view(np.uint32), token_ids // MASK_TOKENS, ~bits)


def _has(mask: IntArray, token_id: int) -> bool:
    return bool(int(mask[token_id // MASK_TOKENS]) >> token_id % MASK_TOKENS & 1)


def follow(constraint: TokenConstraint, draft_tokens: Iterable[int]) -> list[TokenConstraint]:
    """Copies of ``constraint`` after each of ``draft_tokens``, up to the first that it refuses or that ends the
    output.

    A draft row (plan.py) is sampled under the mask that its position has if the draft tokens before it are right::

        constraint          the row's own, after its last known token       mask of the row's next token, as always
        copies[0]           a copy that has accepted draft token 0          mask of draft row 0
        copies[1]           a copy of that, and draft token 1               mask of draft row 1

    The row's own constraint never sees a draft token: it accepts what is kept, token by token.  So a draft token that
    is wrong has nothing to take back, and an error of a copy ends the draft tokens before it, not the request.  In a
    slow grammar nothing is drafted, as its masks would come too late.
    """
    copies: list[TokenConstraint] = []
    for token_id in draft_tokens if constraint.is_quick else ():
        constraint = constraint.copy()
        if not constraint.accept(token_id) or constraint.is_over:
            break
        copies.append(constraint)
    return copies


def masks_of(places: list[list[TokenConstraint]], masks: Masks) -> list[IntArray]:
    """Return for each list of ``follow`` the masks (n, words) of its first n: of those before one whose mask is not
    there in a moment, that has come to a limit, or where no token may follow."""
    masks.ask(one for copies in places for one in copies)
    masks.be_patient()
    ready = [list(takewhile(masks.is_ready, copies)) for copies in places]
    found = masks.of([one for copies in ready for one in copies])
    parts: list[IntArray] = []
    for copies in ready:
        ends = (place for place, one in enumerate(copies) if one.is_over or one.error is not None)
        parts.append(found[: next(ends, len(copies))])
        found = found[len(copies) :]
    return parts
