"""The response object around its items."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tp_engine.api.openai.answer_shape import JsonObject
from tp_engine.api.openai.requests import PreparedAnswer
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.api.openai.responses_api.tools import ResponseTools

# By the finish reason of the chat: the response's status, and why it is incomplete.
_STATUS: Mapping[str, tuple[str, str | None]] = {
    "length": ("incomplete", "max_output_tokens"),
    "abort": ("cancelled", None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseShape:
    """The fields of a response that its request fixes; the answer and all its events share them."""

    response_id: str
    created: int
    model: str
    body: ResponsesBody
    temperature: float
    top_p: float
    tools: ResponseTools

    @classmethod
    def of(cls, body: ResponsesBody, prepared: PreparedAnswer, tools: ResponseTools) -> ResponseShape:
        """The shape for ``body`` and its prepared chat; the ids of the two differ only in the prefix."""
        params = prepared.requests[0].params
        return cls(
            response_id=f"resp_{prepared.shape.response_id.removeprefix('chatcmpl-')}",
            created=prepared.shape.created,
            model=prepared.shape.model,
            body=body,
            temperature=params.temperature,
            top_p=params.top_p,
            tools=tools,
        )

    def running(self) -> JsonObject:
        """The response before its first item."""
        return self._response("in_progress", [], None)

    def finished(self, items: list[JsonObject], finish_reason: str | None, usage: Mapping[str, Any]) -> JsonObject:
        """The response at its end; ``finish_reason`` and ``usage`` are the chat's."""
        status, reason = _STATUS.get(finish_reason or "", ("completed", None))
        response = self._response(status, items, response_usage(usage))
        if reason is not None:
            response["incomplete_details"] = {"reason": reason}
        if status == "completed":
            response["completed_at"] = int(time.time())
        return response

    def failed(self, items: list[JsonObject], message: str) -> JsonObject:
        """The response after an error that came after its first event."""
        return self._response("failed", items, None) | {"error": {"code": "server_error", "message": message}}

    def _response(self, status: str, items: list[JsonObject], usage: JsonObject | None) -> JsonObject:
        body = self.body
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": items,
            "usage": usage,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "background": False,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "text": _text_options(body),
            "tools": body.tools or [],
            "tool_choice": body.tool_choice or "auto",
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "service_tier": "default",
            "store": False,
            "user": body.user,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
        }


def response_usage(usage: Mapping[str, Any]) -> JsonObject:
    """The ``usage`` of a chat, under the names of the Responses API."""
    prompt_details = usage.get("prompt_tokens_details") or {}
    completion_details = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": prompt_details.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": completion_details.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }


def _text_options(body: ResponsesBody) -> JsonObject:
    options: JsonObject = {"format": (body.text and body.text.format) or {"type": "text"}}
    if body.text is not None and body.text.verbosity is not None:
        options["verbosity"] = body.text.verbosity
    return options
