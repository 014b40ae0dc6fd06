"""Parameters of requests are declared and checked as options are."""

from __future__ import annotations

import ast
import dataclasses
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tp_engine.api.openai.protocol import ChatBody, CompletionBody
from tp_engine.api.pooling import PoolingParams
from tp_engine.errors import RequestError
from tp_engine.options.params import as_tuple, check_params, number, switch, takes_forms, whole
from tp_engine.requests.sampling_params import BeamSearchParams, SamplingParams
from tp_engine.requests.structured_outputs import StructuredOutputsParams

PACKAGE = Path(__file__).parents[3] / "tp_engine"


@takes_forms
@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """Parameters of a toy."""

    size: int = whole(4, "a whole number from 1 to 9", least=1, most=9)
    weight: float = number(0.5, "between 0 and 1", 0, 1)
    is_red: bool = switch(False)
    names: tuple[str, ...] = dataclasses.field(default=(), metadata={"form": as_tuple("names")})

    def __post_init__(self) -> None:
        check_params(self)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"size": 10}, "size is 10; it must be a whole number from 1 to 9"),
        ({"size": True}, "size is True of type bool; it must be a whole number from 1 to 9"),
        ({"size": None}, "size is None of type NoneType; it must be a whole number"),
        ({"weight": float("nan")}, "weight is nan; it must be between 0 and 1"),
        ({"weight": "x"}, "weight is 'x' of type str; it must be a number between 0 and 1"),
        ({"is_red": 1}, "is_red is 1 of type int; it must be True or False"),
        ({"names": "ab"}, "names is 'ab' of type str; it must be a list"),
    ],
)
def test_a_declaration_is_a_check(given: dict[str, Any], words: str) -> None:
    """Oracle: the value and the rule of the declaration; the error names the parameter."""
    with pytest.raises(RequestError) as caught:
        Toy(**given)
    assert words in str(caught.value) and caught.value.param == next(iter(given))


def test_forms() -> None:
    """Oracle: Python's values; a record made anew, copied or sent is the same."""
    given: dict[str, Any] = {"size": np.int64(3), "weight": np.float32(0.5), "names": ["a", "b"]}
    toy = Toy(**given)
    assert (toy.size, toy.weight, toy.names) == (3, 0.5, ("a", "b")) and type(toy.size) is int
    assert dataclasses.replace(toy, size=5) == Toy(size=5, names=("a", "b"))
    assert pickle.loads(pickle.dumps(toy)) == toy
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(toy), type=Toy) == toy


BAD: dict[str, Any] = {"whole": [1.5, True, "1", 2**40], "number": ["1", True, float("nan"), float("inf"), 1e9]}


@pytest.mark.parametrize("kind", [SamplingParams, BeamSearchParams])
def test_every_bounded_parameter_refuses_what_is_no_number_of_its_range(kind: type[Any]) -> None:
    """Oracle: the fields with bounds: no other type, nothing endless, and nothing beyond them passes."""
    needed = {"beam_width": 2, "max_tokens": 3} if kind is BeamSearchParams else {"max_tokens": None}
    bounded = [spec for spec in dataclasses.fields(kind) if "least" in spec.metadata]
    assert len(bounded) >= 4
    for spec in bounded:
        bad = BAD["number" if str(spec.type) == "float" else "whole"]
        if str(spec.type) != "float" and spec.metadata["most"] > 2**40:
            bad = [1.5, True, "1", 2**70]
        for value in (*bad, spec.metadata["least"] - 3):
            with pytest.raises(RequestError, match=f"^{spec.name} is ") as caught:
                kind(**{**needed, spec.name: value})
            assert caught.value.param == spec.name
        assert getattr(kind(**{**needed, spec.name: spec.metadata["most"]}), spec.name) == spec.metadata["most"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dimensions": "64"}, "dimensions is '64' of type str; it must be a whole number"),
        ({"use_activation": 1}, "use_activation is 1 of type int; it must be True or False"),
        ({"truncate_prompt_tokens": 1.0}, "truncate_prompt_tokens is 1.0 of type float"),
        ({"truncation_side": "top"}, "truncation_side is 'top'; choose one of left, right"),
        ({"add_special_tokens": "no"}, "add_special_tokens is 'no' of type str; it must be True or False"),
        ({"cache_salt": 5}, "cache_salt is 5 of type int; it must be a text"),
        ({"dimension": 5}, "did you mean dimensions?"),
    ],
)
def test_pooling_parameters(given: dict[str, Any], words: str) -> None:
    """Oracle: the value and the rule."""
    with pytest.raises(RequestError) as caught:
        PoolingParams(**given)
    assert words in str(caught.value)


def test_a_schema_is_read_once() -> None:
    """Oracle: the text that the record holds; what another process sends is checked, and not read again."""
    constraint = StructuredOutputsParams(json={"type": "object", "title": "é"})
    assert constraint.json == '{"type":"object","title":"é"}'
    sent = msgspec.msgpack.encode(SamplingParams(structured_outputs=constraint, stop="x", stop_token_ids=[3]))
    read = msgspec.msgpack.decode(sent, type=SamplingParams)
    assert read == SamplingParams(structured_outputs=constraint, stop=["x"], stop_token_ids=(3,))
    assert (type(read.stop), type(read.stop_token_ids)) == (tuple, tuple)
    with pytest.raises(msgspec.ValidationError, match="exactly one must be"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"regex": "a", "grammar": "b"}), type=StructuredOutputsParams)


def test_no_parameters_are_patched() -> None:
    """Oracle: the names."""
    for path in (PACKAGE / "requests").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        assert not [node for node in nodes if isinstance(node, ast.Call) and "__setattr__" in ast.unparse(node.func)]


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_bodies_tell_the_same_bounds(body: Any) -> None:
    """Oracle: the declarations, in the schema that the server publishes."""
    properties = body.model_json_schema()["properties"]
    assert properties["temperature"]["description"] == "Must be between 0 (greedy) and 100."
    assert properties["seed"]["description"] == "Must be a 64-bit whole number, or null."
    assert "description" not in properties["max_tokens"]
