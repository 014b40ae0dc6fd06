"""On which addresses the stores listen in which ranks meet, with and without a launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.serving import free_port

ROOT = Path(__file__).parents[3]

# A process of its own: the server of a launched job lives as long as the process.
SCRIPT = """
import json, os, sys
import psutil
from tp_engine.distributed.store import host_store, launched_store

def listening():
    connections = psutil.Process().net_connections("tcp")
    return sorted((one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN)

own = host_store(timeout_s=20)
found = [listening()]
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR=sys.argv[1], MASTER_PORT=sys.argv[2])
first, second = launched_store(timeout_s=20), launched_store(timeout_s=10)
first.set("key", "1")
found.append([place for place in listening() if place not in [tuple(one) for one in found[0]]])
print(json.dumps([own.port, found, first.get("key").decode(), second.check(["key"])]))
"""


def listens(master_addr: str) -> tuple[list[str], list[str]]:
    """The addresses of the store of own ranks, and of a launched job's."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, master_addr, str(port)], capture_output=True, text=True, timeout=120,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    own_port, (own, launched), value, is_shared = json.loads(done.stdout.splitlines()[-1])
    assert [place[1] for place in own] == [own_port] and {place[1] for place in launched} == {port}
    assert value == "1" and not is_shared, "each engine has its own prefix"
    return [place[0] for place in own], [place[0] for place in launched]


def test_stores_listen_where_the_ranks_are() -> None:
    """Oracle: the kernel's table: the loopback interface alone for own ranks, and for a job that meets at localhost."""
    assert listens("127.0.0.1") == (["127.0.0.1"], ["127.0.0.1"])
