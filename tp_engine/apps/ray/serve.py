"""Ray Serve: replicas of the OpenAI-compatible server, each an actor with an engine of its own (extra: ray).

Serve starts, routes to, scales and replaces the replicas; the application is that of ``tp_engine.server``.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tp_engine.api.async_llm import AsyncLLM
from tp_engine.api.openai.requests import default_model_name
from tp_engine.apps.ray import ray_actor_options
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.server.app import create_app
from tp_engine.server.config import ServerConfig
from tp_engine.server.state import ServerState

_BY_SERVE = "0.0.0.0"  # Serve's proxy listens, for clients of any host
_TABLES = ("engine", "server", "deployment")


def build_app(args: dict[str, dict[str, Any]]) -> serve.Application:
    """An application for ``serve.run``, or for ``import_path`` and ``args`` of a Serve config file.

    ``args["engine"]`` are fields of ``EngineConfig``, ``args["server"]`` of ``ServerConfig`` (those on listening have
    no effect), ``args["deployment"]`` options of ``serve.deployment``: ``num_replicas``, ``autoscaling_config``, ....
    A replica is a placement group of one bundle.  Raises ``ConfigError`` before anything is started.
    """
    if unknown := args.keys() - set(_TABLES):
        raise ConfigError(f"args has {', '.join(sorted(unknown))}; its keys are {', '.join(_TABLES)}")
    engine, server, deployment = (dict(args.get(table, {})) for table in _TABLES)
    config, server_config = EngineConfig(**engine), ServerConfig(**server)
    given = deployment.pop("ray_actor_options", {})
    options = {**ray_actor_options(engine, given.get("num_cpus")), **given}
    bundle = {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}
    defaults = {
        "name": "tp_engine",
        "max_ongoing_requests": config.max_num_seqs + server_config.max_num_queued_reqs,
        "ray_actor_options": options,
        "placement_group_bundles": [{name: number for name, number in bundle.items() if number}],
    }
    return serve.deployment(Replica, **{**defaults, **deployment}).bind(engine, server)


@serve.ingress()
class Replica:
    """One engine, and the server's application in front of it; Serve replaces it when ``check_health`` raises."""

    async def __init__(self, engine: dict[str, Any], server: dict[str, Any]) -> None:  # type: ignore[misc]
        llm, config = AsyncLLM(**engine), ServerConfig(**{**server, "host": _BY_SERVE})
        await llm.start()
        self._state = ServerState(config, config.served_model_name or (default_model_name(llm.model_info.model),))
        await self._state.open(llm)
        self._watching = asyncio.create_task(self._state.watch.run())

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = create_app(self._state)
        app.add_middleware(_name_replica, name=serve.get_replica_context().replica_id.unique_id)
        return app

    def check_health(self) -> None:
        """Raise if the engine has ended or hangs."""
        self._state.healthy_llm()

    async def __del__(self) -> None:
        self._watching.cancel()  # Serve has waited for the running requests
        await self._state.close()


def _name_replica(app: ASGIApp, name: str) -> ASGIApp:
    """``app``, whose answers have a header ``X-Replica-Id``."""

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-replica-id", name.encode())]
            await send(message)

        await app(scope, receive, send_named)

    return named
