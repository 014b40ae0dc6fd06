"""Structured output: what a grammar, banned words or lists of tokens leave (docs/structured_output.md).

A plan that samples rows which something restricts has a mask for each of them, for this step alone.
"""

from dataclasses import dataclass

from tp_engine.errors import NO_TOKEN_LEFT, RequestError, shown
from tp_engine.features.extension import Extension
from tp_engine.features.registry import Feature
from tp_engine.ipc.plan_sections import ANY, ArraySection
from tp_engine.requests.request import EngineRequest

MASK_ROWS = ArraySection("structured_output.mask_rows")
"""Those sampled rows, draft rows too, whose next token is restricted."""

MASKS = ArraySection("structured_output.masks", columns=ANY, per=MASK_ROWS.name)
"""Of each of them: bit t % 32 of word t // 32 is set where token t may come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BannedWords:
    """The token ids of ``SamplingParams.bad_words``, in every spelling."""

    token_ids: tuple[tuple[int, ...], ...] = ()


BANNED = Extension("structured_output", BannedWords)


def banned_words(request: EngineRequest) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of the words that a request must not have."""
    found = BANNED.get(request)
    return () if found is None else found.token_ids


def check_first_token(request: EngineRequest, vocab_size: int) -> None:
    """Raise ``RequestError`` if ``allowed_token_ids``, words of one token and ``min_tokens`` forbid every token.

    What a grammar, or the spelling of words, leaves is known to the engine alone (``constraint``)."""
    params = request.params
    banned = {word[0] for word in banned_words(request) if len(word) == 1}
    stops = request.stop_ids if params.min_tokens else frozenset()
    if not (banned or stops):
        return
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if any(token_id not in banned and token_id not in stops for token_id in allowed):
        return
    told = {
        "allowed_token_ids": (params.allowed_token_ids is not None, shown(list(params.allowed_token_ids or ()))),
        "bad_words": (not banned.isdisjoint(allowed), shown(list(params.bad_words))),
        "min_tokens": (
            not stops.isdisjoint(allowed),
            f"{params.min_tokens}, before which no EOS and none of stop_token_ids comes",
        ),
    }
    fields = {name: text for name, (takes_part, text) in told.items() if takes_part}
    named = " and ".join(f"{name} ({text})" for name, text in fields.items())
    raise RequestError(
        f"{named} leave no token that may come first; allow more tokens, or leave one of them out",
        param=next(iter(fields)),
        code=NO_TOKEN_LEFT,
    )


FEATURE = Feature(
    name="structured_output",
    sections=(MASK_ROWS, MASKS),
    engine="tp_engine.features.structured_output.engine:open_grammars",
    scheduler="tp_engine.features.structured_output.scheduling:make",
    runner="tp_engine.features.structured_output.ranks:make",
)
