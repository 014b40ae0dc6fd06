"""The HTTP server's configuration: frozen, checked, and the one place of its defaults."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tp_engine.config import check_type, option
from tp_engine.errors import ConfigError
from tp_engine.units import MIB


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the engine is offered over HTTP.  ``port`` 0 takes a free one, named in the line printed when ready."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    served_model_name: tuple[str, ...] = option(
        (), "names under which clients may ask for the model (default: --model, or its folder's name)"
    )
    api_key: str | None = option(
        None, "key that every /v1 request must bring (default: TP_ENGINE_API_KEY)", secret=True
    )
    root_path: str = option("", "path prefix that a reverse proxy strips, such as /llm")
    max_num_queued_reqs: int = option(1024, "requests that may wait beyond those running; more are answered with 429")
    max_body_bytes: int = option(16 * MIB, "largest request body", size=True)
    shutdown_timeout_s: float = option(20.0, "time that running requests get to finish after the first signal")

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            check_type(spec.name, getattr(self, spec.name), str(spec.type))
        if any(not isinstance(name, str) or not name for name in self.served_model_name):
            raise ConfigError(f"served_model_name is {self.served_model_name!r}; it must be names, none of them empty")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be from 0 (any free port) to 65535")
        if self.max_num_queued_reqs < 0:
            raise ConfigError(f"max_num_queued_reqs is {self.max_num_queued_reqs}; it must be at least 0")
        if self.max_body_bytes <= 0:
            raise ConfigError(f"max_body_bytes is {self.max_body_bytes}; it must be positive")
        if not 0.0 < self.shutdown_timeout_s <= 25.0:
            raise ConfigError(
                f"shutdown_timeout_s is {self.shutdown_timeout_s}; it must be above 0 and at most 25: torchrun kills "
                "the ranks 30 s after it signalled them"
            )
        if self.api_key == "":
            raise ConfigError("api_key is empty; give a key, or leave the option out")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path is {self.root_path!r}; it must begin with / and not end with it")
