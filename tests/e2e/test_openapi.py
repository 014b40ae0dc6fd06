"""Requests made from the server's own OpenAPI schema, valid and invalid: none gets a 5xx."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from tests.asgi import App, Reply, served
from tests.e2e.frontend import INFO
from tests.e2e.scripted import say
from tests.fake_engine import FakeEngine, fake_service
from tests.tiny_server import chat_tokenizer

pytestmark = pytest.mark.slow

EXAMPLES_PER_OPERATION = int(6 * float(os.environ.get("TP_ENGINE_TEST_SCALE", "1")))


class Client:
    """The application on an event loop that runs only during a request."""

    def __init__(self, runner: asyncio.Runner, app: App) -> None:
        self._runner = runner
        self.app = app

    def send(self, case: Any) -> Reply:
        """Send a case of schemathesis as a request."""
        request = requests.Request(**case.as_transport_kwargs(base_url="http://test")).prepare()
        body = request.body or b""
        assert isinstance(body, str | bytes)
        exchange = self._start(request, body.encode() if isinstance(body, str) else body)
        return self._runner.run(exchange)

    async def _start(self, request: Any, body: bytes) -> Reply:
        headers = {str(key).lower(): str(value) for key, value in request.headers.items()}
        return await self.app.start(request.method, request.path_url, body, **headers).reply()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    engine = FakeEngine(say, model_info=INFO)
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(fake_service(engine))
        runner = stack.enter_context(asyncio.Runner())
        serving = served(service, chat_tokenizer())
        app = runner.run(serving.__aenter__())
        stack.callback(lambda: runner.run(serving.__aexit__(None, None, None)))
        yield Client(runner, app)


def operations(app: App) -> list[Any]:
    schema = schemathesis.openapi.from_dict(app.app.openapi())
    found: list[Any] = [*schema.get_all_operations()]
    return [result.ok() for result in found]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
def test_no_request_of_the_schema_is_a_5xx(client: Client, mode: GenerationMode) -> None:
    """Oracle: the status; errors of the API have the OpenAI shape."""
    statuses: set[int] = set()
    for operation in operations(client.app):
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # without a body there is nothing to make invalid

        @settings(
            max_examples=EXAMPLES_PER_OPERATION, database=None, derandomize=True, deadline=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            reply = client.send(case)
            statuses.add(reply.status)
            assert reply.status < 500, (case.method, case.path, case.body, reply.content)
            if reply.status >= 400:
                assert reply.json()["error"]["message"], reply.content

        check()
    assert (200 if mode is GenerationMode.POSITIVE else 400) in statuses
