"""A model with scripted answers: the answer is the text after ``SAY:`` in the prompt, up to the message's end."""

from __future__ import annotations

import pydantic

from tests.e2e.frontend import END_OF_TURN, INFO, repeat_prompt
from tests.fake_engine import FakeEngine
from tp_engine.requests.request import EngineRequest
from tp_engine.server.config import ServerConfig

_MARK, _END_OF_MESSAGE = list(b"SAY:"), 258


TEXT = "héllo 😀 中文"


class City(pydantic.BaseModel):
    """The type of a parsed structured answer."""

    name: str
    people: int


def say(request: EngineRequest) -> list[int]:
    """The text from the last ``SAY:`` to the end of its message; the whole prompt if it has no ``SAY:``."""
    ids = request.prompt_token_ids
    places = [place for place in range(len(ids)) if ids[place : place + len(_MARK)] == _MARK]
    if not places:
        return repeat_prompt(request)
    rest = ids[places[-1] + len(_MARK) :]
    said = rest[: rest.index(_END_OF_MESSAGE)] if _END_OF_MESSAGE in rest else rest
    return [*said, END_OF_TURN]


def scripted_engine(step_delay_s: float = 0.0) -> FakeEngine:
    """A fake engine with one token per byte, as in the demo model's tokenizer."""
    return FakeEngine(say, step_delay_s=step_delay_s, model_info=INFO)


def client_config() -> ServerConfig:
    """A server for client libraries: with the key ``sesame``, tools and reasoning, and no queue."""
    return ServerConfig(
        port=0,
        generation_config="vllm",  # the demo model's own settings would end long answers
        api_key=("sesame",),
        max_num_queued_reqs=0,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    )
