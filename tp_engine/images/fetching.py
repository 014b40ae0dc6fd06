"""Fetching an image by its URL, only from hosts that the operator names, and never from a private network by accident.

::

    URL -> strict parse -> host, port and scheme in the list -> one look-up -> every address is public -> connect to it
      ^                                                                                                    |
      +------------------------------------ 3 redirects at most, checked the same way --------------------+

An entry of the list is ``HOST``, ``HOST:PORT`` or ``http://HOST``; without a scheme it is https.  A host that the list
names by its address may be private: the operator says so.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

from tp_engine.errors import ConfigError, RequestError, shown

TIMEOUT_S = 5.0
MAX_REDIRECTS = 3
_PIECE = 1 << 16
_PORTS = {"https": 443, "http": 80}
_HOST = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*|\[[0-9a-f:.]+\]")
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\\]")
# What is routed; the other blocks of IPv6 have uses of their own (IANA's registries of special-purpose addresses).
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Global to ipaddress, or to that of older Pythons: protocol assignments with Oracle's metadata, the old 6to4 relays,
# Azure's wire server, which hosts of Azure alone reach, and the second block of documentation.
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "3fff::/20")))
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True, slots=True)
class _Server:
    """A server: what one entry of the list allows, and what a URL asks for."""

    scheme: str
    host: str
    port: int


def parse_domains(entries: Sequence[str]) -> frozenset[_Server]:
    """Return what the entries of ``--allowed-media-domains`` allow; ``ConfigError`` for one that names no host."""
    places = set()
    for entry in entries:
        try:
            place, rest = _parse(entry if "://" in entry else f"https://{entry}")
        except RequestError as error:
            raise ConfigError(f"allowed_media_domains has {shown(entry)}: {error}") from error
        if rest not in ("", "/"):
            raise ConfigError(f"allowed_media_domains has {shown(entry)}; give a host, such as images.example.com")
        places.add(place)
    return frozenset(places)


def fetch(url: str, domains: Sequence[str], max_bytes: int, *, timeout_s: float = TIMEOUT_S) -> bytes:
    """Return the content of ``url``; ``RequestError`` for a host that is not allowed, and for whatever goes wrong.

    Takes at most ``timeout_s`` in all, but for the look-up of names, and ``max_bytes``.
    """
    allowed, deadline_s = parse_domains(domains), time.monotonic() + timeout_s
    for _ in range(MAX_REDIRECTS + 1):
        place, target = _parse(url)
        if place not in allowed:
            raise RequestError(
                f"images are not fetched from {shown(place.host)} by {place.scheme} at port {place.port}; this server "
                "allows those of --allowed-media-domains"
            )
        try:
            found = _get(place, target, max_bytes, deadline_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, RequestError):
                raise
            is_late = time.monotonic() >= deadline_s
            reason = f"its server took longer than {timeout_s:g} s" if is_late else type(error).__name__
            raise RequestError(f"the image could not be fetched ({reason})") from error
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise RequestError(f"the image could not be fetched: more than {MAX_REDIRECTS} redirects")


def _parse(url: str) -> tuple[_Server, str]:
    """The server, and the path with the query.  Strict: what two parsers may read in two ways is refused."""
    refused = RequestError("the URL of an image must be https://HOST/..., with no user, space or backslash")
    if len(url) > 8192 or not url.isascii() or _FORBIDDEN.search(url):
        raise refused
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise refused from None
    host = parts.netloc.rpartition(":")[0] if port is not None else parts.netloc
    if parts.scheme not in _PORTS or not _HOST.fullmatch(host.lower()):
        raise refused
    target = (parts.path or "") + (f"?{parts.query}" if parts.query else "")
    return _Server(parts.scheme, host.lower(), _PORTS[parts.scheme] if port is None else port), target


def _addresses(place: _Server) -> list[str]:
    """The addresses of a host; ``RequestError`` unless all are public, or the host is itself an address."""
    literal = place.host.strip("[]")
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(literal))]
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(literal, place.port, type=socket.SOCK_STREAM)]
    if not found or not all(map(_is_public, found)):
        raise RequestError(f"images are not fetched from {shown(place.host)}: its address is not a public one")
    return found


def _is_public(address: str) -> bool:
    """Whether an address, and one that it carries inside, is of the public internet."""
    found = ipaddress.ip_address(address.partition("%")[0])
    is_global = found.is_global and not found.is_multicast and not any(found in block for block in _NOT_PUBLIC)
    if isinstance(found, ipaddress.IPv4Address):
        return is_global
    inner = found.ipv4_mapped or found.sixtofour or _translated(found)
    if inner is not None and not _is_public(str(inner)):
        return False
    if found.ipv4_mapped is not None or found in _NAT64:
        return True
    return is_global and found in _GLOBAL_UNICAST and found.teredo is None


def _translated(found: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that NAT64 or ISATAP reads in the last 32 bits."""
    is_isatap = (int(found) >> 32) & 0xFDFFFFFF == 0x5EFE  # RFC 5214; the bit that is left out says "universal"
    return ipaddress.IPv4Address(int(found) & 0xFFFFFFFF) if is_isatap or found in _NAT64 else None


def _get(place: _Server, target: str, max_bytes: int, deadline_s: float) -> bytes | str:
    """The content, or the address of a redirect."""
    address = _addresses(place)[0]
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    name = place.host.strip("[]")
    connection = http.client.HTTPConnection(name, place.port)
    connection.sock = socket.create_connection((address, place.port), timeout=left_s)
    # a server that sends a byte at a time meets no timeout of a read: the connection ends at the deadline
    ending = threading.Timer(max(0.0, deadline_s - time.monotonic()), _end, [connection])
    ending.start()
    try:
        if place.scheme == "https":
            secure = ssl.create_default_context().wrap_socket(
                connection.sock, server_hostname=name, do_handshake_on_connect=False
            )
            connection.sock = secure
            secure.do_handshake()
        host = place.host if place.port == _PORTS[place.scheme] else f"{place.host}:{place.port}"
        headers = {"Host": host, "Accept": "image/*", "Accept-Encoding": "identity"}
        connection.request("GET", target or "/", headers=headers)
        return _content(connection.getresponse(), max_bytes, deadline_s)
    finally:
        ending.cancel()
        connection.close()


def _content(response: http.client.HTTPResponse, max_bytes: int, deadline_s: float) -> bytes | str:
    if response.status in _REDIRECTS and (location := response.getheader("Location")):
        return location
    if response.status != 200:
        raise RequestError(f"the image could not be fetched: its server answered {response.status}")
    if response.getheader("Content-Encoding", "identity") != "identity":
        raise RequestError("the image could not be fetched: its server sent it compressed")
    too_large = RequestError(f"the image could not be fetched: it has more than {max_bytes:,} bytes")
    if response.length is not None and response.length > max_bytes:
        raise too_large
    content = bytearray()
    while piece := response.read(_PIECE):
        content += piece
        if len(content) > max_bytes:
            raise too_large
        if time.monotonic() > deadline_s:
            raise TimeoutError
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return bytes(content)


def _end(connection: http.client.HTTPConnection) -> None:
    sock: socket.socket | None = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
