"""One person at a terminal and one server: the options of ``chat`` and ``complete``, the connection, lines and text."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tp_engine.api.server_client import ChunkChoice, ServerClient
from tp_engine.apps.own_server import own_server
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError, printable
from tp_engine.options import Options, parse_options
from tp_engine.options.fields import checked, option
from tp_engine.system import env

Ask = Callable[[str], str]  # a prompt -> the line; EOFError at the end, KeyboardInterrupt for Ctrl-C


@checked()
@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Which server to ask, and for what kind of answer."""

    url: str | None = option(
        None, "a running server, such as http://localhost:8000 (default: start one for this session)"
    )
    api_key: str | None = option(None, "the server's key (default: TP_ENGINE_API_KEY)", secret=True)
    quick: str | None = option(None, "answer this text alone and leave", flags=("-q",))
    max_tokens: int | None = option(None, "most tokens of an answer (default: the server's)")
    temperature: float | None = option(None, "0 always takes the likeliest token (default: the server's)")
    top_p: float | None = option(None, "share of the likeliest tokens to choose from (default: the server's)")
    timeout_s: float = option(600.0, "longest silence of the server while it answers", positive=True)

    def __post_init__(self) -> None:
        if self.url is not None and (
            urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc
        ):
            raise ConfigError(f"url is {self.url!r}; it must be like http://localhost:8000")

    @property
    def key(self) -> str | None:
        """The key to send, if any."""
        return self.api_key or env.API_KEY.read() or None

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of a request's body that were given."""
        names = ("max_tokens", "temperature", "top_p")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def parse_client(prog: str, text: str, name: str, kind: type[ClientConfig], argv: Sequence[str]) -> Options:
    """The options of a client command; with ``--url`` only ``--model`` is allowed of the engine's."""
    tables: Mapping[str, type[Any]] = {"engine": EngineConfig, name: kind}
    options = parse_options(prog, text, tables, argv)
    for line in options.notes:
        note(line)
    foreign = sorted(options.given["engine"].keys() - {"model"})
    if options.given[name].get("url") is not None and foreign:
        flag = foreign[0].replace("_", "-")
        raise ConfigError(f"--{flag} is for a model that {prog} starts; leave it out, or leave --url out")
    return options


def print_config(options: Options) -> int:
    """Print the effective configuration, and return the exit code."""
    for table, kind in options.tables.items():
        options.build(table, kind)
    print(options.effective_toml(), end="")
    return 0


@contextlib.contextmanager
def connected(options: Options, name: str, kind: type[ClientConfig]) -> Iterator[tuple[ServerClient, str]]:
    """Yield a client and the model's name, from the server at ``--url``, or from one started for this session."""
    config, engine = options.build(name, kind), options.given["engine"]
    with contextlib.ExitStack() as stack:
        if config.url is not None:
            client = ServerClient(config.url, api_key=config.key, timeout_s=config.timeout_s)
            wanted: str | None = engine.get("model")
        else:
            EngineConfig(**engine)
            note(f"loading {engine.get('model') or 'the demo model'} ...")
            server = stack.enter_context(own_server(engine))
            client, wanted = ServerClient(server.url, api_key=server.api_key, timeout_s=config.timeout_s), None
        yield client, client.model(wanted)


def ask_person(prompt: str) -> str:
    """A line from the terminal, with its history, or from a file without a prompt."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then edits lines and remembers them)
        return input(prompt)
    return input()


def show(text: str) -> None:
    """Show a piece of an answer."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def note(text: str) -> None:
    """Show a line that belongs to no answer."""
    print(printable(text), file=sys.stderr, flush=True)


def finish_note(choice: ChunkChoice) -> str | None:
    """A note on an answer that was cut off."""
    return "(cut off: --max-tokens or the model's length is reached)" if choice.finish_reason == "length" else None
