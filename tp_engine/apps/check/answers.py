"""An answer of an engine or a server with its log-probabilities, in the form in which a check compares it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tp_engine.apps.check.prompts import CheckPrompt
from tp_engine.requests.outputs import Logprob, RequestOutput

ALTERNATIVES = 4  # likeliest tokens compared at each position, beside the token itself

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt's answer, and the log-probabilities that the engine gives along the sequence of both.

    ::

        sequence (n,)               prompt, then answer
        alternatives (n, m)         token ids after each position; rows without any are -1
        logprobs (n, m)             theirs by the engine

    ``is_drawn``: its tokens need not be the likeliest.
    """

    prompt: CheckPrompt
    token_ids: tuple[int, ...]
    alternatives: Ids
    logprobs: Floats
    num_cached_tokens: int = 0
    is_drawn: bool = False

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.prompt.token_ids, *self.token_ids)

    @property
    def answer_logprobs(self) -> Floats:
        """(answer,): of the chosen tokens."""
        return self.logprobs[len(self.prompt.token_ids) - 1 : -1, 0]


def answer_of_output(prompt: CheckPrompt, output: RequestOutput, index: int = 0) -> Answer:
    """A prompt's answer by an engine here, the one of an ``index``."""
    sample = output.outputs[index]
    tokens = tuple(sample.token_ids)
    of_prompt: list[dict[int, Logprob] | None] = list((output.prompt_logprobs or [None] * len(prompt.token_ids))[1:])
    of_answer: list[dict[int, Logprob] | None] = list(sample.logprobs or [])
    rows = [*of_prompt, *of_answer]
    known = [{token: one.logprob for token, one in (row or {}).items()} for row in rows]
    return answer_of(prompt, tokens, known, output.num_cached_tokens)


def answer_of(
    prompt: CheckPrompt, tokens: Sequence[int], rows: Sequence[Mapping[int, float]], num_cached_tokens: int
) -> Answer:
    """The answer with the log-probabilities by token ids that ``rows`` has for each position but the last."""
    following = (*prompt.token_ids, *tokens)[1:]
    alternatives = np.full((len(following) + 1, ALTERNATIVES + 1), -1, np.int64)
    logprobs = np.zeros(alternatives.shape, np.float32)
    for position, (row, token) in enumerate(zip(rows, following, strict=True)):
        others = [other for other in row if other != token][:ALTERNATIVES]
        for column, other in enumerate((token, *others) if token in row else ()):
            alternatives[position, column], logprobs[position, column] = other, row[other]
    return Answer(prompt, tuple(tokens), alternatives, logprobs, num_cached_tokens)
