"""A request on its way in and its tokens on their way out: plain data that crosses process borders."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tp_engine.images.image_input import ImageInput
from tp_engine.plan import FloatArray, TokenLogprobs
from tp_engine.requests.sampling_params import SamplingParams

NOT_FINITE = (
    "the model's outputs for this prompt are not numbers (NaN or infinity): the weights may be broken, or values may "
    "overflow float16; serve it with --dtype bfloat16 or float32, or other weights"
)
"""The error of a request whose vector or scores are not finite."""


class FinishReason(enum.StrEnum):
    """Why a sequence ended; the values are those of the OpenAI API (and vLLM's ``abort``)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """What a request that generates nothing returns: the hidden state of its last token, after the final norm, or the
    scores that a classifier's head makes of it; with ``per_token`` those of all its tokens; with ``token_ids`` instead
    the logits of these as the next token."""

    token_ids: tuple[int, ...] = ()
    per_token: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A checked and tokenized request.

    ``eos_token_ids`` are the model's; ``arrival_s`` is the time.monotonic() of its arrival; a lower ``priority`` runs
    first, equal priorities of one ``client`` run in order of arrival; clients take turns (``sched.waiting_queue``).
    ``place`` is the prompt's number in the body that it came with, where long prompts count more than once.
    ``will_continue``: prompts that begin with all its tokens will follow, so the K/V of its last, partly filled block
    is kept, too.  A request with ``pooling`` ends with its prompt; nobody reads the one token that its ``params`` ask
    for.  ``prompt_field`` is the field of the client's request that has the prompt, for errors.  ``images`` are in the
    order of the prompt, where the model's placeholder (``VisionSpec.image_token_id``) stands for each of their rows;
    elsewhere that id is an ordinary token.  ``extensions`` has what features need to know of it.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    arrival_s: float = 0.0
    will_continue: bool = False
    pooling: Pooling | None = None
    prompt_field: str = "prompt"
    images: tuple[ImageInput, ...] = ()
    extensions: dict[str, Any] = field(default_factory=dict)
    client: str = ""
    place: int = 0

    @property
    def is_constrained(self) -> bool:
        """Whether the allowed next tokens depend on the tokens before them."""
        return self.params.structured_outputs is not None or bool(self.params.bad_words)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The token ids that end a sequence."""
        return frozenset(self.params.stop_token_ids).union(() if self.params.ignore_eos else self.eos_token_ids)


class SequenceDelta(msgspec.Struct, kw_only=True):
    """What one step added to one of a request's ``n`` sequences.

    ``finish_reason`` is None while it runs; ``stop_reason`` is the stop token id that ended it, if not an EOS.
    ``ends_with_text``: a grammar ended it, so that its last token is text, not a stop token.
    ``num_cached_tokens`` (prompt tokens found in the prefix cache), ``prompt_logprobs`` and ``pooled`` (float32, what a
    pooling request asks for) come with the first delta.
    ``num_draft_tokens`` have been verified, of which ``num_accepted_tokens`` were accepted; the last delta has all.
    ``first_scheduled_s`` is the time.monotonic() at which its prefill began (0.0 if it never ran).
    ``error_code`` is that of an ``error`` that the request caused; None for one of the engine.
    """

    request_id: str
    index: int
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = []
    pooled: FloatArray | None = None
    num_cached_tokens: int = 0
    first_scheduled_s: float = 0.0
    error: str | None = None
    error_code: str | None = None
    ends_with_text: bool = False
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class StepOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step added.  Sequence ``indices[i]`` of ``request_ids[i]`` got ``token_ids[i]`` and nothing else; those
    with more (a first token, log-probabilities, an end) have a record in ``deltas``.

    ``weight_version`` names the weights of the step; empty for those of the start.

    Iterating gives a record for every sequence.  Thanks to the columns, a steady step of many sequences needs no such
    records on its way to the process that reads it.
    """

    request_ids: list[str] = []
    indices: list[int] = []
    token_ids: list[int] = []
    deltas: list[SequenceDelta] = []
    weight_version: str = ""

    def __len__(self) -> int:
        return len(self.token_ids) + len(self.deltas)

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return len(self.token_ids) + sum(len(delta.new_token_ids) for delta in self.deltas)

    def __iter__(self) -> Iterator[SequenceDelta]:
        for request_id, index, token_id in zip(self.request_ids, self.indices, self.token_ids, strict=True):
            yield SequenceDelta(request_id=request_id, index=index, new_token_ids=[token_id])
        yield from self.deltas
