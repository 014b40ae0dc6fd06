"""What rank 0 tells a rank that it starts."""

from __future__ import annotations

import msgspec


class RankSpec(msgspec.Struct, kw_only=True):
    """JSON on the new process's standard input; ``board`` is the address of the job's board."""

    config: dict[str, str | int | float | bool | None]
    rank: int
    store_host: str
    store_port: int
    parent_pid: int
    board: str
