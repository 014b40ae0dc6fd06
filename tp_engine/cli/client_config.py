"""Options that ``chat`` and ``complete`` share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tp_engine import env
from tp_engine.config import EngineConfig, check_type, option
from tp_engine.errors import ConfigError
from tp_engine.options import Options, parse_options


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Whom to ask, and for what kind of answer."""

    url: str | None = option(
        None, "a running server, such as http://localhost:8000 (default: start one for this session)"
    )
    api_key: str | None = option(None, "the server's key (default: TP_ENGINE_API_KEY)", secret=True)
    quick: str | None = option(None, "answer this text alone and leave", flags=("-q",))
    max_tokens: int | None = option(None, "most tokens of an answer (default: the server's)")
    temperature: float | None = option(None, "0 always takes the likeliest token (default: the server's)")
    top_p: float | None = option(None, "share of the likeliest tokens to choose from (default: the server's)")
    timeout_s: float = option(600.0, "longest silence of the server while it answers")

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            check_type(spec.name, getattr(self, spec.name), str(spec.type))
        if self.url is not None and (
            urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc
        ):
            raise ConfigError(f"url is {self.url!r}; it must be like http://localhost:8000")
        if self.timeout_s <= 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}; it must be positive")

    @property
    def key(self) -> str | None:
        """The key to send, if any."""
        return self.api_key or env.default_api_key()

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of a request's body that were given."""
        names = ("max_tokens", "temperature", "top_p")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def parse_client(prog: str, text: str, name: str, kind: type[ClientConfig], argv: Sequence[str]) -> Options:
    """The options of a client command; with ``--url``, ``--model`` is a name and the engine's other options refused."""
    tables: Mapping[str, type[Any]] = {"engine": EngineConfig, name: kind}
    options = parse_options(prog, text, tables, argv)
    foreign = sorted(options.given["engine"].keys() - {"model"})
    if options.given[name].get("url") is not None and foreign:
        flag = foreign[0].replace("_", "-")
        raise ConfigError(f"--{flag} is for a model that {prog} starts; leave it out, or leave --url out")
    return options
