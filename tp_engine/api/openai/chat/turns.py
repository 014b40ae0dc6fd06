"""Calls of tools, their answers and other messages, in turns that a template takes.

| clients send | where the template | it gets |
| --- | --- | --- |
| several calls in one message | takes, or shows, only one | call, answer, call, answer |
| a message of another role between a call and its answer | loses one of these | the answer first |
| a text of the assistant between them | loses one of these | the text beside the call |
| ids of other models | refuses them | nine letters and digits, derived from each id |
| ids of other models | belongs to one that knows ids of one form only | ids of that form |
| no ids | prints them | ids, the same for a call and the next answer without one; a number as text |
| an answer whose call is not there | hides it | a message of the user |

Messages that cannot follow each other become one.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def complete_ids(messages: Sequence[Message]) -> None:
    """Give calls without an id a new one, and answers without an id that of the first such call, of their tool if they
    name it."""
    waiting: dict[str | None, deque[str]] = {}  # ids that are made here, for all and for each tool
    answered: set[str] = set()
    number = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            if call.get("id") is None:
                call["id"] = f"call_{number}"
                for name in (None, call["function"]["name"]):
                    waiting.setdefault(name, deque()).append(call["id"])
            call["id"] = str(call["id"])
            number += 1
        if message["role"] == "tool" and "tool_call_id" not in message:
            ids = waiting.get(message.get("name"), deque())
            while ids and ids[0] in answered:
                ids.popleft()
            if ids:
                message["tool_call_id"] = ids.popleft()
                answered.add(message["tool_call_id"])
        elif message["role"] == "tool":
            message["tool_call_id"] = str(message["tool_call_id"])


def name_tools(messages: Sequence[Message]) -> None:
    """Add function names to tools' answers: clients give the id of the call, some templates need the function."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {str(call.get("id")): call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(str(message.get("tool_call_id")))
        if message["role"] == "tool" and "name" not in message and name is not None:
            message["name"] = name


def number_calls(messages: Sequence[Message], form: str) -> None:
    """Give calls, and the tools' answers to them, ids of the ``form``, which has the name and the number of a call."""
    _rename(messages, lambda call, number: form.format(name=call["function"]["name"], number=number))


def shorten_ids(messages: Sequence[Message]) -> None:
    """Give calls, and the tools' answers, ids of nine letters and digits; such ids stay, and equal ids stay equal."""
    _rename(messages, lambda call, number: _short_id(call.get("id", number)), _short_id)


def _rename(
    messages: Sequence[Message], new_id: Callable[[Mapping[str, Any], int], str], unknown: Callable[[Any], Any] = str
) -> None:
    """Give calls a ``new_id``, which gets the call's number, and answers that of their call, or ``unknown`` of their
    own."""
    ids: dict[str, str] = {}
    number = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            ids[str(call.get("id"))] = made = new_id(call, number)
            call["id"] = made
            number += 1
        if "tool_call_id" in message:
            given = message["tool_call_id"]
            message["tool_call_id"] = ids[str(given)] if str(given) in ids else unknown(given)


def _short_id(given: object) -> str:
    text = str(given)
    return text if _SHORT_ID.fullmatch(text) else blake2b(text.encode(errors="replace"), digest_size=5).hexdigest()[:9]


def with_answers(
    messages: Sequence[Message], *, one_call: bool, answers_first: bool, hides_answers: bool = False
) -> list[Message]:
    """The messages with tools' answers after their calls: with ``one_call`` after each of the calls of one message,
    which become one message each; with ``answers_first`` after all calls.  ``hides_answers``: an answer without its
    call becomes a message of the user."""
    answers: dict[str, deque[int]] = {}
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            answers.setdefault(str(message.get("tool_call_id")), deque()).append(place)
    placed: list[list[Message]] = []
    taken: set[int] = set()
    called: set[str] = set()
    calling, last = 0, 0  # the latest message with calls, and the place of the last answer to it
    for place, message in enumerate(messages):
        if place in taken:
            continue
        if "tool_calls" in message:
            calling, last = len(placed), 0
            called.update(str(call.get("id")) for call in message["tool_calls"])
            is_split = one_call and len(message["tool_calls"]) > 1
            for turn in _single_calls(message) if is_split else (message,):
                found = sorted(_found(answers, turn["tool_calls"], place)) if is_split or answers_first else []
                taken.update(found)
                placed += [[turn], *([messages[one]] for one in found)]
                last = max((last, *found))
        elif message["role"] == "assistant" and answers_first and place < last:
            placed[calling].append(message)
        elif message["role"] == "tool" and hides_answers and str(message.get("tool_call_id")) not in called:
            placed.append([{"role": "user", "content": message["content"]}])
        else:
            placed.append([message])
    return [merged(group) for group in placed]


def _single_calls(message: Message) -> Iterator[Message]:
    first, *others = message["tool_calls"]
    yield {**message, "tool_calls": [first]}
    for call in others:
        yield {"role": message["role"], "content": None, "tool_calls": [call]}


def _found(answers: Mapping[str, deque[int]], calls: Sequence[Mapping[str, Any]], place: int) -> Iterator[int]:
    """The places of the answers to ``calls`` of the message at ``place``; each answer is found once."""
    for call in calls:
        waiting = answers.get(str(call.get("id")), deque())
        while waiting:
            found = waiting.popleft()
            if found > place:
                yield found
                break


def merged(group: Sequence[Message]) -> Message:
    """Several messages as one, with the first one's fields."""
    if len(group) == 1:
        return group[0]
    both: Message = {}
    for message in reversed(group):
        both |= message
    both["content"] = _joined([message["content"] for message in group])
    if calls := [call for message in group for call in message.get("tool_calls", ())]:
        both["tool_calls"] = calls
    if thoughts := [str(message["reasoning_content"]) for message in group if "reasoning_content" in message]:
        both["reasoning_content"] = "\n\n".join(thoughts)
    return both


def _joined(contents: Sequence[Any]) -> Any:
    """Several contents as one: a text if all are, else the parts of all."""
    contents = [one for one in contents if one]
    if all(isinstance(one, str) for one in contents):
        return "\n\n".join(contents)
    return [part for one in contents for part in ([one] if isinstance(one, str) else one)]
