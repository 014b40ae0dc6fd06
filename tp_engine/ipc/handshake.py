"""How the first rank of another host connects to rank 0: each proves to the other that it knows the job's key.

::

    rank 0's end                                              the other host's end
      | magic 8 | nonce 32 |                          --->
                                                      <---      | length u32 | HostHello as JSON | proof 32 |
      | length u32 | why not, or empty | proof 32 |   --->

    proof = HMAC-SHA-256(key, side, the other side's nonce, what is said)

The key is 32 random bytes that only the job's store holds.  A connection without the right proof is closed, and the
listener waits on: whatever comes to the port can not end the job.  Nothing is pickled.  A host with the right key whose
``identity`` differs from rank 0's (package, configuration, weights, device) is told why, and both ends raise it.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Literal

import msgspec

from tp_engine.errors import RankError
from tp_engine.log import get_logger

logger = get_logger(__name__)

PROTOCOL: Final = 2
KEY_BYTES: Final = 32
_MAGIC: Final = b"tpelink1"
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_LENGTH = struct.Struct("<I")
_MAX_BYTES: Final = 1 << 16
_PATIENCE_S: Final = 10.0
_MAX_HANDSHAKES: Final = 32
_RETRY_S: Final = 0.2


class HostHello(msgspec.Struct, kw_only=True):
    """What a host says first: which it is, what the connection is for, and what must be equal on all hosts."""

    protocol: int
    host: int
    name: str
    purpose: Literal["plan", "watch"]
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
    """Rank 0's end: accepts a connection of each purpose from each of ``hosts``, then closes its port.
    ``accepted(hello, connection)`` and ``refused(host, text)`` are called from threads."""

    def __init__(
        self,
        address: str,
        key: bytes,
        identity: Mapping[str, str],
        hosts: range,
        accepted: Callable[[HostHello, socket.socket], None],
        refused: Callable[[int, str], None],
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(64)
        self.port = int(self._socket.getsockname()[1])
        self._key, self._identity = key, dict(identity)
        self._accepted, self._refused = accepted, refused
        self._missing = {(host, purpose) for host in hosts for purpose in ("plan", "watch")}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._places = threading.Semaphore(_MAX_HANDSHAKES)
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)
        self._thread.start()

    @property
    def missing_hosts(self) -> list[int]:
        """The hosts that have not made all of their connections."""
        with self._lock:
            return sorted({host for host, _ in self._missing})

    def close(self) -> None:
        """Take no more connections; safe to call twice."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _run(self) -> None:
        while True:
            self._places.acquire()
            try:
                connection, peer = self._socket.accept()
            except OSError as error:
                self._places.release()
                if self._over.wait(_RETRY_S):
                    return
                logger.warning("a connection from another host was not accepted: %s", error)
                continue
            threading.Thread(target=self._greet, args=(connection, str(peer[0])), name="hello", daemon=True).start()

    def _greet(self, connection: socket.socket, peer: str) -> None:
        try:
            connection.settimeout(_PATIENCE_S)
            hello = self._handshake(connection)
            with self._lock:
                self._accepted(hello, connection)
                self._missing.discard((hello.host, hello.purpose))
                is_last = not self._missing
            if is_last:
                self.close()
        except (OSError, ValueError, msgspec.DecodeError) as error:
            logger.warning("a connection from %s was refused: %s", peer, error)
            connection.close()
        finally:
            self._places.release()

    def _handshake(self, connection: socket.socket) -> HostHello:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(_MAGIC + nonce)
        payload = _receive_proven(connection, self._key, b"host", nonce)
        hello = msgspec.json.decode(payload, type=HostHello)
        refusal = self._why_not(hello)
        _send_proven(connection, self._key, b"rank 0", bytes.fromhex(hello.nonce), refusal.encode())
        if refusal:
            raise ValueError(refusal)
        return hello

    def _why_not(self, hello: HostHello) -> str:
        with self._lock:
            if (hello.host, hello.purpose) not in self._missing:
                return f"host {hello.host} is not expected, or is connected already"
        found = differences(self._identity, hello.identity, hello.host)
        if hello.protocol != PROTOCOL:
            found = [f"protocol between hosts is {PROTOCOL} on host 0 and {hello.protocol} on host {hello.host}"]
        if not found:
            return ""
        text = f"host {hello.host} ({hello.name}) differs from host 0 ({socket.gethostname()}): {'; '.join(found)}"
        self._refused(hello.host, text)
        return text


def connect(
    address: str, port: int, key: bytes, hello: HostHello, *, rank: int, timeout_s: float, check: Callable[[], None]
) -> socket.socket:
    """Return the other host's end.  ``RankError`` (``rank``) if rank 0 refuses it; ``RankError`` (0) if it does not
    answer."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        check()
        try:
            connection = socket.create_connection((address, port), timeout=_PATIENCE_S)
            break
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise RankError(0, f"can not be reached at {address}:{port}: {error}; open it for the hosts") from error
            time.sleep(_RETRY_S)
    try:
        connection.settimeout(_PATIENCE_S)
        greeting = _receive(connection, len(_MAGIC) + _NONCE_BYTES)
        if greeting[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it is not rank 0 of this version")
        payload = msgspec.json.encode(hello)
        _send_proven(connection, key, b"host", greeting[len(_MAGIC) :], payload)
        refusal = _receive_proven(connection, key, b"rank 0", bytes.fromhex(hello.nonce)).decode()
    except (OSError, ValueError) as error:
        connection.close()
        raise RankError(0, f"did not accept the connection of host {hello.host}: {error}") from error
    if refusal:
        connection.close()
        raise RankError(rank, f"rank 0 refused this host: {refusal}")
    return connection


def new_hello(host: int, purpose: Literal["plan", "watch"], identity: Mapping[str, str]) -> HostHello:
    """Return the hello of this process."""
    return HostHello(
        protocol=PROTOCOL,
        host=host,
        name=socket.gethostname(),
        purpose=purpose,
        nonce=secrets.token_hex(_NONCE_BYTES),
        identity=dict(identity),
    )


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
