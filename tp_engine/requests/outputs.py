"""What ``generate`` returns, with vLLM's field names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from tp_engine.plan import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Log-probability of one token at one position; ``rank`` 1 is the likeliest token.  ``decoded_token`` is what the
    token adds to the text before it: nothing if it leaves a character incomplete, and the whole character if it
    completes one.  ``token_bytes`` are the token's own bytes."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    token_bytes: bytes | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of one request in seconds.  TTFT is from arrival to the first token; TPOT is the mean per later token."""

    arrival_s: float
    queue_s: float
    ttft_s: float
    tpot_s: float
    e2e_s: float


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence of a request.  Of the ``num_draft_tokens`` that speculation verified for it,
    ``num_accepted_tokens`` were accepted."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request and its ``n`` sequences; ``outputs`` is ordered by index.  ``pooled`` is the result of a pooling
    request.  ``weight_version`` names the weights of the last token; None for those of the start.  ``row`` is the
    prompt's index in a call of ``LLM``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    pooled: FloatArray | None = None
    weight_version: str | None = None
    row: int | None = field(default=None, compare=False)


@dataclass(slots=True, kw_only=True)
class BeamSearchSequence:
    """One beam: ``tokens`` are the prompt's and the generated ones, a final EOS included; ``text`` is their text.
    ``logprobs`` has one mapping per generated token, with the candidates that the search considered.
    ``finish_reason`` is ``stop`` after an EOS, and ``length`` at the limit."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str
    finish_reason: str


@dataclass(slots=True, kw_only=True)
class BeamSearchOutput:
    """The ``beam_width`` best sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """A vector, of length 1 unless asked otherwise."""

    embedding: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOutput:
    """How well a document answers a query: a probability, or the cosine of two embeddings."""

    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOutput:
    """A number for each label of a classifier: probabilities, unless asked otherwise."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOutput:
    """What a model made of a prompt, float32: a vector (n,), or scores (labels,), or those of each token
    (tokens, labels)."""

    data: FloatArray


Pooled = TypeVar("Pooled")


@dataclass(frozen=True, kw_only=True)
class PoolingRequestOutput(Generic[Pooled]):
    """What a model made of one prompt."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The embedding of one prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The classification of one prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The score of one pair; ``prompt_token_ids`` are those of its prompt, or of both prompts, one after the other."""
