"""The messages between the frontend process and rank 0 on the local socket, as msgpack, never pickle.

::

    frontend -> rank 0    Hello, AddRequest, AddCall, AbortRequests, ExpectSession, GetReport, Act, Stop
    rank 0 -> frontend    Ready, Output, Rejected, Report, CommandDone, Stopped, EngineDead
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from tp_engine.engine.report import EngineReport
from tp_engine.engine.told_errors import ToldError
from tp_engine.images.settings import ImageSettings
from tp_engine.model_config.classifier import ClassifierSpec
from tp_engine.requests.request import EngineRequest, StepOutput
from tp_engine.requests.structured_outputs import StructuredOutputsDefaults
from tp_engine.sched.view import ViewLimits


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend must know about the model and the engine.

    ``model`` and ``tokenizer`` are folders or hub names; ``max_model_len`` counts prompt plus output tokens;
    ``num_blocks`` KV blocks of ``block_size`` tokens exist on every rank.  ``convert``, ``dimensions`` and
    ``classifier`` are those of ``PoolingSpec``.  ``images`` says how images are read; None: the model is served as text
    alone.  ``adapters`` are the folders, by name, of those that are loaded when the engine is ready.
    ``kernel_choices`` is ``Choices.digest``.
    """

    model: str
    tokenizer: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    tensor_parallel_size: int
    dtype: str
    device: str
    max_num_seqs: int
    max_logprobs: int
    revision: str | None = None
    structured_outputs: StructuredOutputsDefaults = StructuredOutputsDefaults()
    hidden_size: int = 0
    convert: str = "none"
    dimensions: tuple[int, ...] | None = None
    classifier: ClassifierSpec | None = None
    images: ImageSettings | None = None
    enable_lora: bool = False
    adapters: dict[str, str] = {}
    kernel_choices: str = "own"

    @property
    def generates_text(self) -> bool:
        """Whether it has an output head, as models for text and rerankers have."""
        return self.convert == "none" or (self.classifier is not None and not self.classifier.linears)


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Base of all messages; each is an array whose first element names the class."""


class Hello(_Message, frozen=True, kw_only=True):
    """The frontend's first message."""


class AddRequest(_Message, frozen=True, kw_only=True):
    """Queue a request."""

    request: EngineRequest


class AddCall(_Message, frozen=True, kw_only=True):
    """Queue requests that nobody reads before their ends: what they generate comes with their first tokens and their
    ends alone, unless they have stop strings, which the frontend looks for.  They are refused while the engine is
    paused, because a caller waits.  ``together``: all are queued or none, and only the first refusal is told."""

    requests: list[EngineRequest]
    together: bool


class AbortRequests(_Message, frozen=True, kw_only=True):
    """End requests soon, many of them between several steps; unknown ids are ignored.  ``forgotten``: nobody wants
    their last records."""

    request_ids: list[str]
    forgotten: bool = False


class ExpectSession(_Message, frozen=True, kw_only=True):
    """A client's session will continue soon (``Scheduler.prefetch_session``); there is no answer."""

    session: str
    salt: str = ""


class GetReport(_Message, frozen=True, kw_only=True):
    """Asks for ``Report``; ``view`` asks for the pool and the running sequences too."""

    view: ViewLimits | None = None


class Act(_Message, frozen=True, kw_only=True):
    """Asks for ``CommandDone``; ``action`` is a name in ``admin_commands.py``."""

    action: str
    arguments: dict[str, Any] = {}


class Stop(_Message, frozen=True, kw_only=True):
    """Abort everything and stop."""


class Ready(_Message, frozen=True, kw_only=True):
    """The answer to ``Hello``."""

    model_info: ModelInfo


class Output(_Message, frozen=True, kw_only=True):
    """The output of one step, or of an abort."""

    output: StepOutput


class Rejected(_Message, frozen=True, kw_only=True):
    """A ``RequestError``: the request was not queued, and nothing else changed."""

    request_id: str
    message: str
    param: str | None = None
    code: str | None = None


class Report(_Message, frozen=True, kw_only=True):
    """The answer to ``GetReport``."""

    report: EngineReport


class CommandDone(_Message, frozen=True, kw_only=True):
    """The answer to ``Act``; ``refusal`` is the ``RequestError`` with which it was refused, if it was."""

    result: dict[str, Any]
    refusal: str | None = None
    param: str | None = None
    code: str | None = None


class Stopped(_Message, frozen=True, kw_only=True):
    """The last message of an engine that was told to stop."""


class EngineDead(_Message, frozen=True, kw_only=True):
    """The last message of an engine that failed; every request in flight ends with ``error``."""

    error: ToldError


ToEngine: TypeAlias = Hello | AddRequest | AddCall | AbortRequests | ExpectSession | GetReport | Act | Stop
ToFrontend: TypeAlias = Ready | Output | Rejected | Report | CommandDone | Stopped | EngineDead

# Both ends are on one host, so arrays keep its byte order.
_ARRAY_TYPES = (np.dtype(np.int32), np.dtype(np.float32))


def _encode_array(value: object) -> tuple[str, tuple[int, ...], bytes]:
    """An array as (dtype, shape, bytes)."""
    if not isinstance(value, np.ndarray) or value.dtype not in _ARRAY_TYPES:
        raise TypeError(f"{value!r} cannot cross the socket: it is no array of int32 or float32")
    return value.dtype.str, value.shape, value.tobytes()


def _decode_array(annotation: Any, value: Any) -> npt.NDArray[Any]:
    """The array again; it is read-only and shares the message's memory."""
    dtype, shape, data = value
    if dtype != _expected_dtype(annotation).str:
        raise ValueError(f"expected {annotation}, got an array of {dtype}")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


@cache
def _expected_dtype(annotation: Any) -> np.dtype[Any]:
    """``NDArray[np.int32]`` -> int32."""
    dtype: np.dtype[Any] = np.dtype(get_args(get_args(annotation)[1])[0])
    return dtype


# From and to msgpack; ``msgspec.ValidationError`` (a ``ValueError``) for anything but a message of the other side.
encode: Callable[[ToEngine | ToFrontend], bytes] = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=_decode_array).decode
decode_to_frontend: Callable[[bytes], ToFrontend] = msgspec.msgpack.Decoder(ToFrontend, dec_hook=_decode_array).decode
