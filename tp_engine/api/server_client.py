"""Requests to a server with OpenAI's API.  Answers are read up to a limit, and checked before they are used."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from tp_engine.errors import printable
from tp_engine.system.units import KIB, MIB

MOST_BYTES = 64 * MIB
"""Of an answer."""
MOST_LINE_BYTES, MOST_STREAM_BYTES = 16 * MIB, 256 * MIB
"""Of a line of a streamed answer, and of all of it."""
_MOST_REFUSAL_BYTES = 64 * KIB

Content = TypeVar("Content")


class ServerError(RuntimeError):
    """The server refused a request, failed, or cannot be reached; the text is the server's where it gave one.

    ``status`` is the answer's, None if there was none.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(printable(text))
        self.status = status


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to a chat's answer."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """A choice of a chunk: ``delta`` of a chat, ``text`` of a completion."""

    delta: Delta = Delta()
    text: str = ""
    finish_reason: str | None = None


class StreamChunk(msgspec.Struct, frozen=True):
    """A chunk of a streamed answer, as far as it is read here."""

    choices: list[ChunkChoice]


class ModelCard(msgspec.Struct, frozen=True):
    """A model of a server."""

    id: str


class ModelCards(msgspec.Struct, frozen=True):
    """All models of a server."""

    data: list[ModelCard]


class ServerClient:
    """Requests to the server at ``url`` (with or without ``/v1``), each on a connection of its own."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    def model(self, wanted: str | None = None) -> str:
        """``wanted`` if the server has it, else its first model."""
        with self._exchange("GET", "/v1/models") as answer:
            names = [card.id for card in self._read(answer, "/v1/models", ModelCards).data]
        if wanted is not None and wanted not in names:
            raise ServerError(f"{self.url} has no model {wanted!r}; it has {', '.join(names) or 'none'}")
        if not names:
            raise ServerError(f"{self.url} has no model")
        return wanted or names[0]

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer, a JSON object of at most 64 MiB."""
        with self._exchange("POST", path, json.dumps(body).encode()) as answer:
            return self._read(answer, path, dict[str, Any])

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[StreamChunk]:
        """Yield the chunks of a streamed answer; leaving early closes the connection, which ends the answer."""
        with self._exchange("POST", path, json.dumps({**body, "stream": True}).encode()) as answer:
            num_bytes = 0
            while line := answer.readline(MOST_LINE_BYTES + 1):
                num_bytes += len(line)
                if len(line) > MOST_LINE_BYTES or num_bytes > MOST_STREAM_BYTES:
                    raise ServerError(
                        f"{self.url}{path} streams more than {MOST_LINE_BYTES // MIB} MiB in a line, or "
                        f"{MOST_STREAM_BYTES // MIB} MiB in all"
                    )
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                if error := _error_of(data):
                    raise ServerError(error)
                yield self._decode(data, path, StreamChunk)
        raise ServerError(f"{self.url} closed the connection before the answer was complete")

    def _read(self, answer: http.client.HTTPResponse, path: str, kind: type[Content]) -> Content:
        text = answer.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ServerError(f"{self.url}{path} answered with more than {MOST_BYTES // MIB} MiB")
        return self._decode(text, path, kind)

    def _decode(self, text: bytes, path: str, kind: type[Content]) -> Content:
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ServerError(
                f"{self.url}{path} answered with {text[:80]!r}, which is not of OpenAI's API: {error}"
            ) from None

    @contextlib.contextmanager
    def _exchange(self, method: str, path: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        where = urlsplit(self.url)
        kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
        connection = kind(where.hostname or "", where.port, timeout=self._timeout_s)
        try:
            connection.request(method, where.path + path, body, self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ServerError(_refusal(answer), answer.status)
            yield answer
        except TimeoutError as error:
            raise ServerError(f"{self.url} was silent for {self._timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url} cannot be reached: {error or type(error).__name__}") from error
        finally:
            connection.close()


def _refusal(answer: http.client.HTTPResponse) -> str:
    text = answer.read(_MOST_REFUSAL_BYTES)
    return _error_of(text) or f"HTTP {answer.status}: {text[:200].decode(errors='replace')}"


def _error_of(text: bytes) -> str | None:
    """The message of an answer that is an error; None for any other."""
    try:
        content = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    error = content.get("error") if isinstance(content, dict) else None
    if error is None:
        return None
    return str(error["message"]) if isinstance(error, dict) and "message" in error else "the answer broke off"
