"""From arrays of log-probabilities to one mapping per position, with the tokens' text."""

from __future__ import annotations

from collections.abc import Sequence

from tp_engine.engine.detokenizer import TokenDecoder
from tp_engine.outputs import Logprob
from tp_engine.plan import TokenLogprobs


def positions(
    logprobs: TokenLogprobs, num_positions: int, num_alternatives: int, decoder: TokenDecoder | None
) -> list[dict[int, Logprob]]:
    """The first ``num_positions``: token id -> ``Logprob`` of the chosen token, then of the likeliest in order."""
    columns = slice(1 + num_alternatives)
    return [
        _position(token_ids, values, rank, decoder)
        for token_ids, values, rank in zip(
            logprobs.token_ids[:num_positions, columns].tolist(),
            logprobs.logprobs[:num_positions, columns].tolist(),
            logprobs.ranks[:num_positions].tolist(),
            strict=True,
        )
    ]


def prompt_positions(
    parts: Sequence[TokenLogprobs], prompt_token_ids: Sequence[int], num_alternatives: int, decoder: TokenDecoder | None
) -> list[dict[int, Logprob] | None]:
    """One entry per prompt token; the first is None, for nothing precedes it."""
    found: list[dict[int, Logprob] | None] = [None]
    for part in parts:
        found += positions(part, len(prompt_token_ids) - len(found), num_alternatives, decoder)
    return found


def _position(
    token_ids: Sequence[int], values: Sequence[float], rank: int, decoder: TokenDecoder | None
) -> dict[int, Logprob]:
    found: dict[int, Logprob] = {}
    ranks = (rank, *range(1, len(token_ids)))
    for token_id, value, place in zip(token_ids, values, ranks, strict=True):
        if token_id not in found:
            text = None if decoder is None else decoder.token_text(token_id)
            found[token_id] = Logprob(logprob=value, rank=place, decoded_token=text)
    return found
