"""What the engine's ``structured_outputs_config`` sets for constraints that leave it open."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.fake_engine import MODEL_INFO
from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.api.input_processor import InputProcessor
from tp_engine.config import EngineConfig
from tp_engine.engine.start import check_config
from tp_engine.errors import ConfigError
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.requests.structured_outputs import StructuredOutputsDefaults, StructuredOutputsParams

CONFIG = '{"whitespace_pattern": " ?", "disable_additional_properties": true}'
REFUSED = [
    ("{", "not JSON"),
    ("[1]", "must be a JSON object"),
    ('{"whitespace": " "}', "names 'whitespace'; it can set disable_any_whitespace, "),
    ('{"disable_any_whitespace": "yes"}', "disable_any_whitespace is 'yes' of type str; it must be of type bool"),
    ('{"whitespace_pattern": 3}', "whitespace_pattern is 3"),
    ('{"whitespace_pattern": " ", "disable_any_whitespace": true}', "give one of them"),
]


def constraint_of(config: str | None, asked: dict[str, Any]) -> StructuredOutputsParams | None:
    defaults = StructuredOutputsDefaults() if config is None else StructuredOutputsDefaults.of(config)
    processor = InputProcessor(msgspec.structs.replace(MODEL_INFO, structured_outputs=defaults), byte_level_tokenizer())
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True, **asked))
    return processor.process([5], params, request_id="r").params.structured_outputs


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, {"whitespace_pattern": " ?"}),
        ({"whitespace_pattern": "\n"}, {"whitespace_pattern": "\n"}),
        ({"disable_any_whitespace": True}, {"disable_any_whitespace": True}),
    ],
)
def test_requests_take_the_engines_defaults(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    """Oracle: the constraint written out; a request's own white space takes precedence over the engine's."""
    given = StructuredOutputsParams(json_object=True, disable_additional_properties=True, **expected)
    assert constraint_of(CONFIG, asked) == given
    assert constraint_of(None, asked) == StructuredOutputsParams(json_object=True, **asked)


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_what_can_not_be_meant_is_refused(text: str, words: str) -> None:
    """Oracle: the words of the error, before any model is loaded."""
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**dict[str, Any](structured_outputs_config=text))


def test_white_space_that_the_library_refuses() -> None:
    """Oracle: the library's words, when the configuration is checked."""
    with pytest.raises(ConfigError, match=r"structured_outputs_config cannot be used: .*unclosed group"):
        check_config(EngineConfig(structured_outputs_config=StructuredOutputsDefaults(whitespace_pattern="(")))
