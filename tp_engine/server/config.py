"""The HTTP server's configuration: frozen, checked, and the one place of its defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tp_engine.api.openai.chat.options import ChatOptions
from tp_engine.api.sampling_defaults import SamplingDefaultOptions
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.options.fields import checked, option
from tp_engine.system import env
from tp_engine.system.files import read_text
from tp_engine.system.units import MIB

_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NO_BATCHES = "none"
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@checked()
@dataclass(frozen=True, kw_only=True)
class ServerConfig(ChatOptions, SamplingDefaultOptions):
    """How the server offers the engine.  ``port`` 0 takes a free port, named in the line printed when ready.

    A list may also be given as one JSON list, as in vLLM.
    """

    host: str = option("127.0.0.1", "address to listen on", section="Server")
    port: int = option(8000, "port to listen on; 0 takes a free one", least=0, most=65535)
    port_file: str | None = option(None, "file that holds the port, from before the model loads until the server ends")
    uds: str | None = option(None, "path of a Unix socket to listen on, instead of host and port")
    root_path: str = option("", "path prefix that a reverse proxy strips, such as /llm")
    ssl_keyfile: str | None = option(None, "the private key's file, for HTTPS", section="HTTPS")
    ssl_certfile: str | None = option(None, "the certificate's file, for HTTPS")
    ssl_ca_certs: str | None = option(None, "file of the authorities whose client certificates are accepted")
    ssl_cert_reqs: int = option(0, "client certificates: 0 none, 1 optional, 2 required", choices=(0, 1, 2))
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names of this server beside the local ones, as in the header Host; *.example.com, or * for any",
        section="Web pages of other origins",
    )
    allowed_origins: tuple[str, ...] = option((), "origins whose web pages may send requests; * means all")
    allowed_methods: tuple[str, ...] = option(("*",), "methods that those pages may use")
    allowed_headers: tuple[str, ...] = option(("*",), "headers that those pages may send")
    allow_credentials: bool = option(False, "let those pages send cookies and the like")
    api_key: tuple[str, ...] = option(
        (),
        "keys, one of which every request but health checks must bring (default: TP_ENGINE_API_KEY)",
        secret=True,
        section="Keys",
    )
    api_key_file: str | None = option(None, "file of such keys, one in a line; other users cannot see it in ps")
    admin_api_key: tuple[str, ...] = option(
        (), "keys of operators, who may also pause, reload and empty it (default: TP_ENGINE_ADMIN_API_KEY)", secret=True
    )
    admin_api_key_file: str | None = option(None, "file of such keys, one in a line")
    allowed_model_dirs: tuple[str, ...] = option(
        (), "folders below which requests may name weights and adapters (default: the model's and those of adapters)"
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "names under which clients may ask for the model (default: --model, or its folder's name)",
        section="Clients and requests",
    )
    max_num_queued_reqs: int = option(
        1024,
        "requests that may wait beyond those running; more are answered with 429",
        least=0,
        flags=("--max-queued-requests",),
    )
    max_body_bytes: int = option(64 * MIB, "largest request body", size=True, positive=True)
    max_bodies_bytes: int = option(
        1024 * MIB,
        "largest size of the bodies of all requests together, beyond 64 KiB of each",
        size=True,
        positive=True,
    )
    body_timeout_s: float = option(60.0, "longest time that the body of a request may take to arrive", positive=True)
    header_timeout_s: float = option(
        20.0, "longest time that a connection may take to send the header of a request", positive=True
    )
    write_timeout_s: float = option(120.0, "after so long without reading, a client loses its answer", positive=True)
    max_connections: int = option(
        16384,
        "connections beyond which those without a request are closed (fewer, if descriptors are scarce)",
        positive=True,
    )
    sse_keep_alive_interval: float = option(
        10.0, "seconds of silence after which a stream sends its headers and a comment; 0: never", least=0
    )
    shutdown_timeout_s: float = option(
        20.0, "time that running requests get to finish after the first signal", flags=("--shutdown-timeout",)
    )
    batch_storage_dir: str | None = option(
        None,
        "folder of files and batches, which the next server with it goes on with; none: no files and batches (default: "
        "a temporary folder, which ends with the server)",
        section="Files and batches",
    )
    batch_retention_hours: int = option(
        720, "how long files are kept, unless their sender says otherwise", positive=True
    )
    batch_priority: int = option(
        1000,
        "priority of batches' requests; larger numbers wait for smaller ones",
        least=-(2**31),
        most=2**31 - 1,
    )
    batch_max_file_bytes: int = option(200 * MIB, "largest file that may be sent", size=True, positive=True)
    batch_max_storage_bytes: int = option(16384 * MIB, "largest size of all files together", size=True, positive=True)
    batch_upload_timeout_s: float = option(600.0, "longest time that a file may take to arrive", positive=True)
    enable_log_requests: bool = option(
        False,
        "a line in the log for every request",
        flags=("--log-requests",),
        negative_flags=("--disable-log-requests",),
        section="Logs and metrics",
    )
    metrics_prefix: tuple[str, ...] = option(
        ("tp_engine",), "prefixes of names in /metrics; vllm for routers that read vLLM's names, several for both"
    )
    disable_log_stats: bool = option(False, "no line in the log every ten seconds on throughput, queue and KV cache")
    otlp_traces_endpoint: str | None = option(
        None, "OpenTelemetry collector that gets a span per prompt, such as http://localhost:4317 (extra: otel)"
    )
    uvicorn_log_level: str = option(
        "info", "level of the HTTP library's own log", choices=LOG_LEVELS, flags=("--log-level",)
    )
    disable_fastapi_docs: bool = option(False, "do not offer /openapi.json, /docs and /redoc")

    def __post_init__(self) -> None:
        self.check_chat_options()
        self._check_ranges()
        self._check_listening()
        if set(self.api_keys) & set(self.admin_api_keys):
            raise ConfigError("a key of admin_api_key is a key of api_key too; give operators a key of their own")
        if self.otlp_traces_endpoint is not None and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_traces_endpoint is {self.otlp_traces_endpoint!r}; it must be a URL, such as http://localhost:4317"
            )

    def _check_ranges(self) -> None:
        bad = [prefix for prefix in self.metrics_prefix if not _PREFIX.fullmatch(prefix)]
        if bad or not self.metrics_prefix or len(set(self.metrics_prefix)) < len(self.metrics_prefix):
            raise ConfigError(
                f"metrics_prefix is {' '.join(self.metrics_prefix)!r}; it must be one name or several different ones, "
                "of letters, digits and _, such as tp_engine vllm"
            )
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_bodies_bytes is {self.max_bodies_bytes}, less than the {self.max_body_bytes} of max_body_bytes: "
                "raise the one or lower the other"
            )
        if not 0.0 < self.shutdown_timeout_s <= 25.0:
            raise ConfigError(
                f"shutdown_timeout_s is {self.shutdown_timeout_s}; it must be above 0 and at most 25: torchrun kills "
                "the ranks 30 s after it signalled them"
            )

    def _check_listening(self) -> None:
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path is {self.root_path!r}; it must begin with / and not end with it")
        if self.port_file is not None and self.uds is not None:
            raise ConfigError(f"port_file is {self.port_file!r}, but uds {self.uds!r} has no port; give one of the two")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("HTTPS needs both ssl_keyfile and ssl_certfile; give both, or neither")
        if (self.ssl_ca_certs or self.ssl_cert_reqs) and not self.ssl_certfile:
            raise ConfigError("ssl_ca_certs and ssl_cert_reqs are of HTTPS; give ssl_keyfile and ssl_certfile too")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            value = getattr(self, name)
            if value and not Path(value).is_file():
                raise ConfigError(f"{name} is {value!r}; there is no such file")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("allow_credentials needs allowed_origins by name; browsers take no cookies from *")

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys of ``api_key`` and ``api_key_file``, else the environment's; empty for an open server."""
        return _keys("api_key_file", self.api_key, self.api_key_file, env.API_KEY.read() or None)

    @property
    def admin_api_keys(self) -> tuple[str, ...]:
        """The keys of ``admin_api_key`` and ``admin_api_key_file``, else the environment's."""
        default = env.ADMIN_API_KEY.read() or None
        return _keys("admin_api_key_file", self.admin_api_key, self.admin_api_key_file, default)


def _keys(name: str, given: tuple[str, ...], path: str | None, default: str | None) -> tuple[str, ...]:
    """The keys without the white space around them, which HTTP strips from what a client sends."""
    found = given or (() if default is None or path is not None else (default,))
    keys = tuple(key.strip() for key in found)
    if not all(keys):
        raise ConfigError(f"{name.removesuffix('_file')} is blank; give a key, or leave it out")
    if path is None:
        return keys
    try:
        lines = read_text(Path(path).expanduser(), MIB).split()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{name} is {path!r}, which cannot be read: {reason}") from error
    if not lines:
        raise ConfigError(f"{name} is {path!r}, which holds no key; write one in each line")
    return (*keys, *lines)


# A server's tables of options.
SERVE_TABLES = {"engine": EngineConfig, "server": ServerConfig}
