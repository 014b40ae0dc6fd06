"""Whether rank 0 of this torchrun job lives, known to the other ranks before any process group exists.

Rank 0 holds an abstract Unix socket named after the torchrun agent, the parent of all ranks of a host.  The kernel
drops it when rank 0 ends, however it ends; the name is no file and can not be left behind.
"""

from __future__ import annotations

import os
import socket


def announce_rank0() -> socket.socket:
    """Hold the returned socket for as long as rank 0 lives."""
    presence = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    presence.bind(_name())
    presence.listen()
    return presence


def rank0_lives() -> bool:
    """Asked by another rank; False before ``announce_rank0`` and after rank 0's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(_name())
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def _name() -> str:
    return f"\0tp_engine-rank0-of-{os.getppid()}"
