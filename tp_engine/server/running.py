"""Which engine requests run on behalf of which client request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class RunningRequests:
    """Engine ids while they run.  That of prompt NUMBER of the answer ``cmpl-ID`` is ``cmpl-ID-NUMBER-RANDOM``."""

    def __init__(self) -> None:
        self._engine_ids: set[str] = set()

    @contextlib.contextmanager
    def noted(self, engine_id: str) -> Iterator[None]:
        """Within, the request can be found."""
        self._engine_ids.add(engine_id)
        try:
            yield
        finally:
            self._engine_ids.discard(engine_id)

    def all(self) -> list[str]:
        """Every engine id."""
        return sorted(self._engine_ids)

    def of(self, name: str) -> list[str]:
        """The engine ids of an answer, by its ``id`` (``cmpl-ID``, ``resp_ID``) or the client's request id (``ID``)."""
        name, found = name.removeprefix("resp_"), []
        for engine_id in self._engine_ids:
            answer_id = engine_id.rsplit("-", 2)[0]
            if name in (answer_id, answer_id.partition("-")[2]):
                found.append(engine_id)
        return sorted(found)
