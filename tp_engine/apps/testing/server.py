"""The server of a test session: its address for clients, and its log for failures."""

from __future__ import annotations

import contextlib
import http
import http.client
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tp_engine.apps.own_server import OwnServer

# Tests ask what the server did with their requests; a request that a test has left must not delay the end.
_DEFAULTS = {"enable_log_requests": True, "shutdown_timeout_s": 2.0}
# Values that the session itself chooses, so that two sessions never conflict.
_CHOSEN = ("host", "port", "port_file", "uds", "ssl_certfile", "ssl_keyfile")
_MOST_BYTES = 32768
_HEALTH_S = 10.0
_CAUSE = " ERROR "  # of a line of the log; the first one is the cause, the others are its consequences


class TpServer:
    """A server that runs until the end of the session.

    ``url`` is its address, such as ``http://127.0.0.1:41357``, and ``base_url`` the same with ``/v1``, as OpenAI's
    clients want it; ``api_key`` the key that every request must bring; ``model`` the name of the model in requests,
    ``place`` its folder or name of the hub; ``log`` the file of its log, which the session's temporary folder keeps.
    """

    def __init__(self, running: OwnServer, model: str, place: str) -> None:
        self.url = running.url
        self.base_url = running.url + "/v1"
        self.api_key = running.api_key
        self.model, self.place = model, place
        self.log = running.log
        self._process = running.process

    def __repr__(self) -> str:
        return f"<TpServer {self.model} at {self.url}>"

    @property
    def exit_code(self) -> int | None:
        """How the server's process ended, negative for a signal; None while it runs."""
        return self._process.poll()

    def end(self) -> tuple[str, str] | None:
        """How it ended, and the log's first error; None while it serves, and while it is too busy to tell.

        After the death of a rank the server still tells all clients, for some seconds: it has ended before its process
        has.
        """
        if self.exit_code is not None:
            end = f"ended with exit code {self.exit_code}"
        elif self._is_dead():
            end = "stopped"
        else:
            return None
        return end, next((line for line in self.log_since(0).splitlines() if _CAUSE in line), "")

    def _is_dead(self) -> bool:
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_HEALTH_S)
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            return answer.status != http.HTTPStatus.OK and b"engine_dead" in answer.read(_MOST_BYTES)
        except TimeoutError:
            return False
        except (OSError, http.client.HTTPException):  # it listens no more
            return True
        finally:
            connection.close()

    def log_size(self) -> int:
        """The bytes of the log so far."""
        return self.log.stat().st_size

    def log_since(self, size: int) -> str:
        """The log after its first ``size`` bytes, but at most the last 32 KiB."""
        with self.log.open("rb") as file:
            file.seek(max(size, self.log_size() - _MOST_BYTES))
            return file.read().decode(errors="replace")


@contextlib.contextmanager
def started(options: Mapping[str, Any], log_file: Path) -> Iterator[TpServer]:
    """Start a server with ``options``, which are those of ``tp-engine serve`` under their names in Python; stop it at
    the end.

    ``ConfigError`` for an unknown or impossible option, ``RuntimeError`` with the end of the log if it does not start.
    """
    from tp_engine.api.server_client import ServerClient
    from tp_engine.apps.own_server import own_server
    from tp_engine.config import EngineConfig
    from tp_engine.errors import ConfigError
    from tp_engine.options import fields_of
    from tp_engine.options.intake import take_options
    from tp_engine.server.config import ServerConfig

    taken = take_options(dict(options), (EngineConfig, ServerConfig), where="tp_options")
    if chosen := [name for name in _CHOSEN if name in taken]:
        raise ConfigError(f"tp_options: {chosen[0]} is {taken[chosen[0]]!r}; leave it out: tp_server takes a free port")
    engine, server = fields_of(EngineConfig, taken), _DEFAULTS | fields_of(ServerConfig, taken)
    place = EngineConfig(**engine).model
    ServerConfig(**server)
    with own_server(engine, server, log_file=log_file) as running:
        yield TpServer(running, ServerClient(running.url, api_key=running.api_key).model(), place)


def llm_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The ``options`` that an ``LLM`` has, as its keywords; ``ConfigError`` for an unknown one."""
    from tp_engine.api.openai.chat.options import TemplateOptions
    from tp_engine.api.sampling_defaults import SamplingDefaultOptions
    from tp_engine.config import EngineConfig
    from tp_engine.options import fields_of
    from tp_engine.options.intake import take_options
    from tp_engine.server.config import ServerConfig

    taken = take_options(dict(options), (EngineConfig, ServerConfig), where="tp_options")
    kinds = (EngineConfig, SamplingDefaultOptions, TemplateOptions)
    return {name: value for kind in kinds for name, value in fields_of(kind, taken).items()}
