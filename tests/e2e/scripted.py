"""A model that says what it is told: ``SAY:`` in a prompt, and what follows up to the message's end is the answer."""

from __future__ import annotations

import pydantic

from tests.e2e.frontend import END_OF_TURN, INFO, repeat_prompt
from tests.fake_engine import FakeEngine
from tp_engine.request import EngineRequest

_MARK, _END_OF_MESSAGE = list(b"SAY:"), 258


TEXT = "héllo 😀 中文"


class City(pydantic.BaseModel):
    """What a structured answer is parsed into."""

    name: str
    people: int


def say(request: EngineRequest) -> list[int]:
    """What follows the last ``SAY:`` up to the end of that message; without one the prompt is repeated."""
    ids = request.prompt_token_ids
    places = [place for place in range(len(ids)) if ids[place : place + len(_MARK)] == _MARK]
    if not places:
        return repeat_prompt(request)
    rest = ids[places[-1] + len(_MARK) :]
    said = rest[: rest.index(_END_OF_MESSAGE)] if _END_OF_MESSAGE in rest else rest
    return [*said, END_OF_TURN]


def scripted_engine(step_delay_s: float = 0.0) -> FakeEngine:
    """One token per byte, as the demo model's tokenizer has it."""
    return FakeEngine(say, step_delay_s=step_delay_s, model_info=INFO)
