"""One prompt of a batch line: the engine requests that it takes, and in the end its output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from tp_engine.api.beam.outputs import request_output
from tp_engine.api.beam.search import BeamSearch
from tp_engine.engine.detokenizer import TokenDecoder
from tp_engine.outputs import RequestOutput
from tp_engine.request import EngineRequest


@dataclass(slots=True)
class PlainPrompt:
    """Takes one request, whose output is the prompt's."""

    request: EngineRequest
    output: RequestOutput | None = None

    def next_requests(self) -> list[EngineRequest]:
        """What to run now."""
        return [self.request]

    def take(self, output: RequestOutput) -> bool:
        """One of them is done; returns whether it is time for the next ones."""
        self.output = output
        return False


@dataclass(slots=True)
class SearchedPrompt:
    """Takes a round of requests after the other; the ``n`` best sequences of ``search`` are the output."""

    search: BeamSearch
    decoder: TokenDecoder | None
    n: int
    output: RequestOutput | None = None
    _asked: list[str] = field(default_factory=list)
    _given: dict[str, RequestOutput] = field(default_factory=dict)

    def next_requests(self) -> list[EngineRequest]:
        """What to run now."""
        requests = self.search.next_requests()
        self._asked = [request.request_id for request in requests]
        self._given = {}
        return requests

    def take(self, output: RequestOutput) -> bool:
        """One of them is done; returns whether it is time for the next ones."""
        self._given[output.request_id] = output
        if len(self._given) < len(self._asked):
            return False
        self.search.advance([self._given[request_id] for request_id in self._asked])
        if self.search.done:
            self.output = request_output(self.search, self.decoder, n=self.n)
        return not self.search.done


BatchPrompt: TypeAlias = PlainPrompt | SearchedPrompt
