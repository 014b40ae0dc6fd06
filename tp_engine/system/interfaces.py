"""This host's network interfaces: which of its addresses leads to another host, and the name of the interface.

The kernel's routes answer the first question, without a packet and without the command ``ip``, which containers lack.
"""

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915
_IFNAME_BYTES = 16
_REQUEST_BYTES = 40
_ADDRESS_OFFSET = 20


def address_towards(host: str, port: int) -> str:
    """Return this host's address on the route to ``host``; ``OSError`` if there is none.  Sends nothing."""
    family, _, _, _, target = socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Return whether only this host can reach ``address``."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str | None:
    """Return the name of the interface with ``address``, such as ``eth0``; None if none has it."""
    names = [name for _, name in socket.if_nameindex()]
    if is_loopback(address):
        return "lo" if "lo" in names else None
    if ":" in address:
        return _with_ipv6(address)
    return next((name for name in names if _ipv4_of(name) == address), None)


def _ipv4_of(name: str) -> str | None:
    request = array.array("B", struct.pack(f"{_REQUEST_BYTES}s", name.encode()[: _IFNAME_BYTES - 1]))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, _SIOCGIFADDR, request, True)
        except OSError:  # an interface without an address
            return None
    return socket.inet_ntoa(request.tobytes()[_ADDRESS_OFFSET : _ADDRESS_OFFSET + 4])


def _with_ipv6(address: str) -> str | None:
    wanted = ipaddress.ip_address(address.partition("%")[0]).packed.hex()
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            fields = line.split()
            if fields[0] == wanted:
                return fields[-1]
    return None
