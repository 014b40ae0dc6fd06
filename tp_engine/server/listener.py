"""The listening socket: bound before anything is loaded, so that a taken port is reported at once."""

import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tp_engine.errors import ConfigError
from tp_engine.server.config import ServerConfig
from tp_engine.system.interfaces import is_loopback

BACKLOG = 2048
_PROBE_S = 1.0
_LONGEST_S = 1e6


def open_listener(config: ServerConfig) -> socket.socket:
    """Bind and listen; ``OSError`` for a port or path in use, ``ConfigError`` for a bad address or certificate."""
    _check_certificate(config)
    return _listen_on_host(config) if config.uds is None else _listen_on_path(config.uds)


def close_listener(config: ServerConfig) -> None:
    """Remove the socket's file, if it has one."""
    if config.uds is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(config.uds)


def write_port_file(path: str, listener: socket.socket) -> Callable[[], None]:
    """Write the port of a bound socket into a file, atomically; returns a function that removes it.

    A killed server's file is replaced; the removal spares a file that another server has written since.
    """
    text = f"{listener.getsockname()[1]}\n"
    unfinished = Path(f"{path}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(
            f"cannot write port_file {path!r}: {error.strerror}; name a file in a folder where you may write"
        ) from error

    def remove() -> None:
        with contextlib.suppress(OSError):
            if Path(path).read_text() == text:
                os.unlink(path)

    return remove


def listener_url(listener: socket.socket, root_path: str = "", *, scheme: str = "http") -> str:
    """``http://host:port`` by which a client on this machine reaches the socket."""
    if listener.family == socket.AF_UNIX:
        return f"{scheme}://localhost{root_path}"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{host}:{port}{root_path}"


def is_local(config: ServerConfig) -> bool:
    """Whether only programs on this machine can reach the server."""
    return config.uds is not None or is_loopback(str(_address(config)[2][0]))


def _address(config: ServerConfig) -> tuple[int, int, tuple[Any, ...]]:
    """The family, protocol and address of ``host`` and ``port``."""
    try:
        family, _, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"host is {config.host!r}, which is not an address: {error.strerror}") from error
    return family, protocol, address


def _listen_on_host(config: ServerConfig) -> socket.socket:
    family, protocol, address = _address(config)
    listener = socket.socket(family, socket.SOCK_STREAM, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it: the kernel ends one whose client has acknowledged nothing for this long.
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(min(config.write_timeout_s, _LONGEST_S) * 1000)
        )
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(config, error) from error
    return listener


def _listen_on_path(path: str) -> socket.socket:
    """Replaces a killed server's socket file, but no socket in use and no other file."""
    if os.path.lexists(path):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"uds is {path!r}, which is a file of another kind; choose another path")
        if is_listened_on(path):
            raise OSError(f"{path} is in use by another program; stop it, or choose another path with --uds")
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on uds {path!r}: {error.strerror or error}") from error
    return listener


def is_listened_on(path: str) -> bool:
    """Whether a process listens on a Unix socket, given as a file or an abstract name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def _check_certificate(config: ServerConfig) -> None:
    if config.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: b"")
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ssl_certfile {config.ssl_certfile!r} and ssl_keyfile {config.ssl_keyfile!r} cannot be used: {error}; "
            "both must be PEM files without a password, of one pair"
        ) from error


def _bind_error(config: ServerConfig, error: OSError) -> Exception:
    where = f"{config.host}:{config.port}"
    if error.errno == errno.EADDRINUSE:
        return OSError(f"{where} is in use by another program; stop it, or choose another port with --port")
    if error.errno == errno.EACCES:
        return OSError(f"no permission to listen on {where}; choose a port of 1024 or above with --port")
    return ConfigError(f"cannot listen on {where}: {error.strerror}; --host must be an address of this machine")
