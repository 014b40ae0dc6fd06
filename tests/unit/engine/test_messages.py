"""What crosses the socket between the frontend and rank 0 arrives as it was sent."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.fake_engine import MODEL_INFO, FakeEngine
from tp_engine.engine import messages
from tp_engine.engine.messages import ToEngine, ToFrontend, decode_to_engine, decode_to_frontend, encode
from tp_engine.engine.told_errors import ToldError
from tp_engine.errors import RequestError
from tp_engine.features.registry import features
from tp_engine.images.image_input import ImageInput
from tp_engine.plan import TokenLogprobs
from tp_engine.requests.request import EngineRequest, FinishReason, Pooling, SequenceDelta, StepOutput
from tp_engine.requests.sampling_params import SamplingParams

EVERY_PARAM = SamplingParams(
    n=3,
    temperature=0.7,
    top_p=0.1 + 0.2,
    top_k=-1,
    min_p=0.05,
    presence_penalty=-2.0,
    frequency_penalty=1.5,
    repetition_penalty=1.1,
    logit_bias={5: -100.0, 7: 1e-3},
    allowed_token_ids=[1, 2],
    seed=-(2**63),
    stop=["停止", "\n\n"],
    stop_token_ids=[9],
    include_stop_str_in_output=True,
    ignore_eos=True,
    min_tokens=2,
    max_tokens=40,
    logprobs=0,
    prompt_logprobs=20,
    skip_special_tokens=False,
    cache_salt="tenant \U0001f600",
    prompt_cache_key="session \U0001f600",
)


def logprobs(num_positions: int, num_columns: int) -> TokenLogprobs:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((num_positions, num_columns)).astype(np.float32)
    if values.size:
        values[0, 0] = -np.inf
    return TokenLogprobs(
        token_ids=rng.integers(0, 2**31 - 1, (num_positions, num_columns), dtype=np.int32),
        logprobs=values,
        ranks=rng.integers(1, 100, num_positions, dtype=np.int32),
    )


def plain(value: object) -> Any:
    """Arrays as (dtype, values), dataclasses as their fields: comparable, and exact to the bit."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)})
    if isinstance(value, msgspec.Struct):
        return (type(value), {name: plain(getattr(value, name)) for name in value.__struct_fields__})
    if isinstance(value, list | tuple):
        return (type(value), [plain(item) for item in value])
    return (type(value), value)


TO_ENGINE: list[ToEngine] = [
    messages.Hello(),
    messages.AddRequest(
        request=EngineRequest(
            request_id="a/b \U0001f600",
            prompt_token_ids=[0, 2**31 - 1],
            params=EVERY_PARAM,
            eos_token_ids=(1, 2),
            priority=-5,
            arrival_s=12345.678901234567,
        )
    ),
    messages.AddRequest(request=EngineRequest(request_id="", prompt_token_ids=[], params=SamplingParams())),
    messages.AddRequest(
        request=EngineRequest(
            request_id="p", prompt_token_ids=[7], params=SamplingParams(), pooling=Pooling(token_ids=(3, 5))
        )
    ),
    messages.AddRequest(
        request=EngineRequest(
            request_id="i",
            prompt_token_ids=[7, 300, 300],
            params=SamplingParams(),
            images=(
                ImageInput(
                    start=1,
                    num_tokens=2,
                    grid=(1, 2),
                    digest=bytes(range(32)),
                    pid=2**22,
                    fd=9,
                    offset=2**33,
                    height=32,
                    width=64,
                ),
            ),
        )
    ),
    messages.AddCall(requests=[], together=True),
    messages.AbortRequests(request_ids=["a", "b"]),
    messages.ExpectSession(session="agent 7", salt="a"),
    messages.GetReport(),
    messages.Stop(),
]

TO_FRONTEND: list[ToFrontend] = [
    messages.Ready(model_info=MODEL_INFO),
    messages.Output(output=StepOutput()),
    messages.Output(
        output=StepOutput(
            request_ids=["a", "c"],
            indices=[0, 1],
            token_ids=[3, 70_000],
            deltas=[
                SequenceDelta(
                    request_id="b",
                    index=2,
                    new_token_ids=[3, 4, 5],
                    finish_reason=FinishReason.STOP,
                    stop_reason=5,
                    logprobs=logprobs(3, 21),
                    prompt_logprobs=[logprobs(4, 1), logprobs(0, 3)],
                    pooled=np.array([0.5, -1.25], dtype=np.float32),
                    num_cached_tokens=32,
                    first_scheduled_s=0.1,
                    error="text",
                ),
            ],
        )
    ),
    messages.Rejected(request_id="a", message="too long", param="prompt", code="context_length_exceeded"),
    messages.Rejected(request_id="a", message="no"),
    messages.Report(report=FakeEngine().report()),
    messages.Stopped(),
    messages.EngineDead(error=ToldError(kind="RankError", text="rank 1: gone", rank=1)),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_to_engine_round_trip(message: ToEngine) -> None:
    """Oracle: the message itself, compared field by field with types, arrays by their bytes."""
    assert plain(decode_to_engine(encode(message))) == plain(message)


@pytest.mark.parametrize("message", TO_FRONTEND, ids=lambda message: type(message).__name__)
def test_to_frontend_round_trip(message: ToFrontend) -> None:
    """Oracle: the message itself, compared field by field with types, arrays by their bytes; of a report also the parts
    of features, which are plain data until their features read them."""
    received = decode_to_frontend(encode(message))
    if isinstance(received, messages.Report):
        for key in (feature.stats for feature in features() if feature.stats is not None):
            key.get(received.report.stats)
    assert plain(received) == plain(message)


def test_arrays_that_are_not_contiguous_arrive() -> None:
    """Oracle: numpy's equality; a slice of a wider array is what the engine sends."""
    wide = logprobs(6, 8)
    part = TokenLogprobs(token_ids=wide.token_ids[1:3, :4], logprobs=wide.logprobs[1:3, :4], ranks=wide.ranks[::2])
    delta = SequenceDelta(request_id="a", index=0, new_token_ids=[1, 2], logprobs=part)
    decoded = decode_to_frontend(encode(messages.Output(output=StepOutput(deltas=[delta]))))
    assert isinstance(decoded, messages.Output) and (got := decoded.output.deltas[0].logprobs) is not None
    assert np.array_equal(got.logprobs, part.logprobs) and np.array_equal(got.token_ids, part.token_ids)
    assert np.array_equal(got.ranks, part.ranks)


def test_arrays_of_other_types_are_refused() -> None:
    """Oracle: the contract is int32 and float32; float64 would double the traffic, objects would need pickle."""
    for wrong in (np.zeros((1, 1)), np.zeros((1, 1), dtype=np.int64), np.array([[None]])):
        part = TokenLogprobs(token_ids=wrong, logprobs=wrong, ranks=wrong)  # type: ignore[arg-type]
        delta = SequenceDelta(request_id="a", index=0, new_token_ids=[1], logprobs=part)
        with pytest.raises(TypeError, match="cannot cross the socket"):
            encode(messages.Output(output=StepOutput(deltas=[delta])))


@pytest.mark.parametrize(
    "data", [b"", b"\x00", msgspec.msgpack.encode(["Unknown"]), msgspec.msgpack.encode(["Act", 7])]
)
def test_garbage_is_a_value_error(data: bytes) -> None:
    """Oracle: msgspec's validation."""
    with pytest.raises(msgspec.DecodeError):
        decode_to_engine(data)


def test_values_out_of_range_are_refused_on_arrival_too() -> None:
    """Rank 0 checks values that a frontend did not check. Oracle: SamplingParams' own rules."""
    fields = {"request_id": "a", "prompt_token_ids": [1], "params": {"temperature": -1.0}}
    with pytest.raises(msgspec.ValidationError, match="temperature is -1"):
        decode_to_engine(msgspec.msgpack.encode(["AddRequest", fields]))


def test_lists_of_params_are_frozen() -> None:
    """Oracle: a list changed after the checks leaves the parameters unchanged; None gives an empty one; other types are
    refused."""
    stops = [3]
    params = SamplingParams(stop_token_ids=stops, stop=None)  # type: ignore[arg-type]
    stops.append(-1)
    assert (params.stop_token_ids, params.stop) == ((3,), ())
    with pytest.raises(RequestError, match="stop_token_ids is 5 of type int; it must be a list"):
        SamplingParams(stop_token_ids=5)  # type: ignore[arg-type]
