"""Requests in flight while their server fails."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable

_PATIENCE_S = 60.0
_BODY = {"model": None, "prompt": [65, 66, 67], "max_tokens": 200, "ignore_eos": True, "temperature": 0}


class Asking:
    """Two requests, one streamed and one whole, sent at once from two threads."""

    def __init__(self, url: str, enter: Callable[[], None] = lambda: None) -> None:
        """``enter`` is called by each thread before it opens a connection."""
        self.url = url
        self._enter = enter
        self._answers: dict[bool, str] = {}
        self._threads = [threading.Thread(target=self._ask, args=(stream,), daemon=True) for stream in (False, True)]
        for thread in self._threads:
            thread.start()

    def problems(self) -> list[str]:
        """Every request must have ended with an error in the protocol."""
        for thread in self._threads:
            thread.join(_PATIENCE_S / 4)
        found = []
        for stream in (False, True):
            answer, what = self._answers.get(stream), "stream" if stream else "request"
            if answer is None:
                found.append(f"a {what} in flight was never answered")
            elif not answer.startswith("error"):
                found.append(f"a {what} in flight ended with {answer}")
        return found

    def _ask(self, stream: bool) -> None:
        self._enter()
        host, _, port = self.url.removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=_PATIENCE_S)
        body = json.dumps({name: value for name, value in (_BODY | {"stream": stream}).items() if value is not None})
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            self._answers[stream] = f"a broken connection ({type(error).__name__}: {error})"
            return
        finally:
            connection.close()
        if response.status >= 500 or '"error"' in text:
            self._answers[stream] = f"error {response.status}: {text[-300:]}"
        else:
            self._answers[stream] = f"status {response.status}: {text[-300:]!r}"
