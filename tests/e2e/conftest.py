"""The server and the client of tests that do not change the server; a module may define its own."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.frontend import DEADLINE_S, RunningServer, new_engine, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """The HTTP server in front of a fake engine that repeats the prompt."""
    with running_server(new_engine(step_delay_s=0.002)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=DEADLINE_S, max_retries=0) as made:
        yield made
