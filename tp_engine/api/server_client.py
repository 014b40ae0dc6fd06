"""Requests to a server of OpenAI's API, with nothing but the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

_MOST_BYTES = 64 << 20


class ServerError(RuntimeError):
    """The server refused a request, failed, or can not be reached; the text is the server's where it gave one.

    ``status`` is the answer's, None if there was none.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


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
            names = [str(card["id"]) for card in json.loads(answer.read())["data"]]
        if wanted is not None and wanted not in names:
            raise ServerError(f"{self.url} has no model {wanted!r}; it has {', '.join(names)}")
        return wanted or names[0]

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer, a JSON object of at most 64 MiB."""
        with self._exchange("POST", path, json.dumps(body).encode()) as answer:
            text = answer.read(_MOST_BYTES)
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise ServerError(f"{self.url}{path} answered with {text[:80]!r}, which is no JSON object")
        return content

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed answer; leaving early closes the connection, which ends the answer."""
        with self._exchange("POST", path, json.dumps({**body, "stream": True}).encode()) as answer:
            for line in answer:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk: dict[str, Any] = json.loads(data)
                if "error" in chunk:
                    raise ServerError(_words(chunk, "the answer broke off"))
                yield chunk
        raise ServerError(f"{self.url} closed the connection before the answer was complete")

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
            raise ServerError(f"{self.url} can not be reached: {error or type(error).__name__}") from error
        finally:
            connection.close()


def _refusal(answer: http.client.HTTPResponse) -> str:
    text = answer.read(65536)
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    return _words(content, f"HTTP {answer.status}: {text[:200].decode(errors='replace')}")


def _words(content: Any, otherwise: str) -> str:
    error = content.get("error") if isinstance(content, dict) else None
    return str(error["message"]) if isinstance(error, dict) and "message" in error else otherwise
