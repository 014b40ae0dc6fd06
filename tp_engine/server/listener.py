"""The listening socket: bound before anything is loaded, so that a taken port is known at once."""

from __future__ import annotations

import errno
import socket

from tp_engine.errors import ConfigError
from tp_engine.server.config import ServerConfig

_BACKLOG = 2048


def open_listener(config: ServerConfig) -> socket.socket:
    """Bind and listen; ``OSError`` for a taken port, ``ConfigError`` for an address that is not this host's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"host is {config.host!r}, which is not an address: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(config, error) from error
    return listener


def listener_url(listener: socket.socket, root_path: str = "") -> str:
    """``http://host:port`` under which a client on this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}{root_path}"


def _bind_error(config: ServerConfig, error: OSError) -> Exception:
    where = f"{config.host}:{config.port}"
    if error.errno == errno.EADDRINUSE:
        return OSError(f"{where} is in use by another program; stop it, or choose another port with --port")
    if error.errno == errno.EACCES:
        return OSError(f"no permission to listen on {where}; choose a port of 1024 or above with --port")
    return ConfigError(f"can not listen on {where}: {error.strerror}; --host must be an address of this machine")
