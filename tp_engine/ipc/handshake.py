"""How the first rank of another host connects to rank 0: each proves to the other that it knows the job's key.

::

    rank 0's end                                              the other host's end
      | magic 8 | nonce 32 |                          --->
                                                      <---      | length u32 | HostHello as JSON | proof 32 |
      | length u32 | why not, or empty | proof 32 |   --->

    proof = HMAC-SHA-256(key, side, the other side's nonce, what is said)

The key is 32 random bytes that only the job's store holds.  A connection without the right proof is closed, and the
listener waits on: whatever comes to the port cannot end the job.  Nothing is pickled.  A host with the right key whose
``identity`` differs from rank 0's (package, configuration, weights, device) is told why, and both ends raise it.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from tp_engine.errors import RankError
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

PROTOCOL: Final = 3
KEY_BYTES: Final = 32
_MAGIC: Final = b"tpelink1"
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_LENGTH = struct.Struct("<I")
_MAX_BYTES: Final = 1 << 16
_PATIENCE_S: Final = 10.0
_MAX_HANDSHAKES: Final = 32
_RETRY_S: Final = 0.2
_POLL_S: Final = 0.005

Purpose: TypeAlias = Literal["watch", "plan"]
PURPOSES: Final[tuple[Purpose, ...]] = get_args(Purpose)
"""What a host's connections are for: the boards of all hosts, and step plans."""


class HostHello(msgspec.Struct, kw_only=True):
    """What a host says first: which it is, what the connection is for, and what must be equal on all hosts."""

    protocol: int
    host: int
    name: str
    purpose: Purpose
    nonce: str
    identity: dict[str, str]


def differences(identity: Mapping[str, str], far: Mapping[str, str], host: int) -> list[str]:
    """``'dtype is bfloat16 on host 0 and float32 on host 1'``, one per field in which ``host`` differs from host 0."""
    return [
        f"{name} is {identity.get(name, 'unknown')} on host 0 and {far.get(name, 'unknown')} on host {host}"
        for name in sorted(identity.keys() | far.keys())
        if identity.get(name) != far.get(name)
    ]


class Listener:
    """Rank 0's end: ``take`` accepts a connection of each purpose from each of ``hosts``; ``missing`` has those that
    have not come.  Strangers are greeted in threads, a few at a time."""

    def __init__(self, address: str, key: bytes, identity: Mapping[str, str], hosts: range) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=64)
        self._socket.settimeout(_POLL_S)
        self.port = int(self._socket.getsockname()[1])
        self.missing = {(host, purpose) for host in hosts for purpose in PURPOSES}
        self._key, self._identity = key, dict(identity)
        self._pool = ThreadPoolExecutor(_MAX_HANDSHAKES, thread_name_prefix="hello")
        self._greeted: dict[Future[tuple[HostHello, str]], tuple[socket.socket, str]] = {}

    def take(self) -> Iterator[tuple[HostHello, str, socket.socket]]:
        """Wait for a few milliseconds at most; the hellos that have come, why not if they were refused, and their
        connections."""
        try:
            if len(self._greeted) < _MAX_HANDSHAKES:
                connection, (peer, *_) = self._socket.accept()
                self._greeted[self._pool.submit(self._greet, connection)] = connection, peer
            else:
                time.sleep(_POLL_S)
        except TimeoutError:
            pass
        except OSError as error:
            logger.warning("a connection from another host was not accepted: %s", error)
            time.sleep(_RETRY_S)
        for greeting in [one for one in self._greeted if one.done()]:
            connection, peer = self._greeted.pop(greeting)
            hello: HostHello | None = None
            try:
                told, refusal = greeting.result()
                if (told.host, told.purpose) in self.missing:
                    hello = told
                else:  # not the cause of the job's end
                    refusal = _not_expected(told)
            except (OSError, ValueError, msgspec.DecodeError) as error:
                refusal = str(error)
            if hello is None or refusal:
                logger.warning("a connection from %s was refused: %s", peer, refusal)
                connection.close()
            else:
                self.missing.discard((hello.host, hello.purpose))
            if hello is not None:
                yield hello, refusal, connection

    def close(self) -> None:
        """Take no more connections; safe to call twice."""
        self._socket.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for connection, _ in self._greeted.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # its thread waits for no more bytes

    def _greet(self, connection: socket.socket) -> tuple[HostHello, str]:
        connection.settimeout(_PATIENCE_S)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(_MAGIC + nonce)
        hello = msgspec.json.decode(_receive_proven(connection, self._key, b"host", nonce), type=HostHello)
        refusal = self._why_not(hello)
        # That the host cannot take part is known although it may not learn of it.
        with contextlib.suppress(OSError) if refusal else contextlib.nullcontext():
            _send_proven(connection, self._key, b"rank 0", bytes.fromhex(hello.nonce), refusal.encode())
        return hello, refusal

    def _why_not(self, hello: HostHello) -> str:
        if (hello.host, hello.purpose) not in self.missing:
            return _not_expected(hello)
        found = differences(self._identity, hello.identity, hello.host)
        if hello.protocol != PROTOCOL:
            found = [f"protocol between hosts is {PROTOCOL} on host 0 and {hello.protocol} on host {hello.host}"]
        head = f"host {hello.host} ({hello.name}) differs from host 0 ({socket.gethostname()}): "
        return head + "; ".join(found) if found else ""


def _not_expected(hello: HostHello) -> str:
    return f"host {hello.host} is not expected, or is connected already"


def connect(
    address: str,
    port: int,
    key: bytes,
    host: int,
    purpose: Purpose,
    identity: Mapping[str, str],
    *,
    rank: int,
    timeout_s: float,
    check: Callable[[], None],
) -> socket.socket:
    """Return the end of ``host``.  ``RankError`` (``rank``) if rank 0 refuses it; ``RankError`` (0) if it does not
    answer."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        check()
        try:
            connection = socket.create_connection((address, port), timeout=_PATIENCE_S)
            break
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise RankError(0, f"cannot be reached at {address}:{port}: {error}; open it for the hosts") from error
            time.sleep(_RETRY_S)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    hello = HostHello(
        protocol=PROTOCOL, host=host, name=socket.gethostname(), purpose=purpose, nonce=nonce.hex(),
        identity=dict(identity),
    )  # fmt: skip
    try:
        greeting = _receive(connection, len(_MAGIC) + _NONCE_BYTES)
        if greeting[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it is not rank 0 of this version")
        _send_proven(connection, key, b"host", greeting[len(_MAGIC) :], msgspec.json.encode(hello))
        refusal = _receive_proven(connection, key, b"rank 0", nonce).decode()
    except (OSError, ValueError) as error:
        connection.close()
        raise RankError(0, f"did not accept the connection of host {host}: {error}") from error
    if refusal:
        connection.close()
        raise RankError(rank, f"rank 0 refused this host: {refusal}")
    return connection


def watch_peer(connection: socket.socket, timeout_s: float) -> None:
    """Let the kernel end ``connection`` when its peer has acknowledged nothing for ``timeout_s``; send at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * timeout_s))


def _send_proven(connection: socket.socket, key: bytes, side: bytes, nonce: bytes, payload: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(payload)) + payload + _proof(key, side, nonce, payload))


def _receive_proven(connection: socket.socket, key: bytes, side: bytes, nonce: bytes) -> bytes:
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if length > _MAX_BYTES:
        raise ValueError("it does not speak the protocol between hosts")
    payload = _receive(connection, length)
    if not hmac.compare_digest(_receive(connection, _PROOF_BYTES), _proof(key, side, nonce, payload)):
        raise ValueError("it does not know the job's key")
    return payload


def _proof(key: bytes, side: bytes, nonce: bytes, payload: bytes) -> bytes:
    return hmac.digest(key, b"|".join((side, nonce, payload)), "sha256")


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    """The next bytes; ``TimeoutError`` if they have not all come within ``_PATIENCE_S``."""
    data, deadline_s = bytearray(), time.monotonic() + _PATIENCE_S
    while len(data) < num_bytes:
        if time.monotonic() > deadline_s:
            raise TimeoutError("it said too little for too long")
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise ValueError("it closed the connection before it had said what it is")
        data += more
    return bytes(data)
