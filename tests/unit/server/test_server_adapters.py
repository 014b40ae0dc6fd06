"""Adapters over HTTP, in front of an engine without a model: loading, unloading, names, and the models' list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from tests.asgi import App, run_served
from tests.fake_engine import MODEL_INFO, FakeEngine
from tests.tiny_server import chat_tokenizer
from tp_engine.errors import RequestError
from tp_engine.features.lora.feature import ADAPTER
from tp_engine.features.lora.scheduling import LoRASlots
from tp_engine.server.config import ServerConfig

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Refusing(FakeEngine):
    """An engine whose ranks cannot load what is below ``bad``."""

    def order(self, kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if arguments["path"] == "bad":
            raise RequestError("rank 1: WeightError: bad is not a whole safetensors file")
        return super().order(kind, arguments)


def serve(scenario: Callable[[App], Awaitable[None]], config: ServerConfig | None = None) -> FakeEngine:
    """Run ``scenario`` against a server that has loaded ``first`` from ``one`` at its start."""
    slots = LoRASlots(2)
    slots.add("first", slots.new_generation())
    info = msgspec.structs.replace(MODEL_INFO, enable_lora=True, adapters={"first": "one"})
    engine = Refusing(model_info=info, adapters=slots)
    run_served(scenario, engine, chat_tokenizer(), config or ServerConfig(allowed_model_dirs=(".",)))
    return engine


def body(name: str, path: str | None = None, **more: Any) -> dict[str, Any]:
    return {"lora_name": name, **({} if path is None else {"lora_path": path}), **more}


def test_load_and_unload() -> None:
    """Oracle: vLLM's status codes and texts; ``root`` and ``parent`` of /v1/models; what reaches the engine."""

    async def scenario(app: App) -> None:
        reply = await app.post(LOAD, body("second", "two"))
        assert (reply.status, reply.content) == (200, b"Success: LoRA adapter 'second' added successfully.")
        cards = {card["id"]: card for card in (await app.get("/v1/models")).json()["data"]}
        assert list(cards) == ["demo", "alias", "first", "second"]
        assert [(cards[name]["root"], cards[name]["parent"]) for name in cards] == [
            ("demo", None), ("demo", None), ("one", "demo"), ("two", "demo"),
        ]  # fmt: skip
        assert (await app.get("/v1/models/second")).json() == cards["second"]
        taken = await app.post(LOAD, body("second", "other"))
        assert taken.status == 400 and "has already been loaded" in taken.json()["error"]["message"]
        assert (await app.post(LOAD, body("second", "other", load_inplace=True))).status == 200
        assert (await app.get("/v1/models/second")).json()["root"] == "other"
        reply = await app.post(UNLOAD, body("second"))
        assert (reply.status, reply.content) == (200, b"Success: LoRA adapter 'second' removed successfully.")
        unknown = await app.post(UNLOAD, body("second"))
        assert unknown.status == 404 and unknown.json()["error"]["message"] == (
            "The lora adapter 'second' cannot be found."
        )
        assert (await app.post("/v1/completions", {"model": "second", "prompt": [5]})).status == 404

    engine = serve(scenario)
    assert engine.orders == ["load_lora_adapter"] * 2


def test_what_is_refused_changes_nothing() -> None:
    """Oracle: 400, and the list of models: the model's own names, a rank's refusal, bodies without a name or path."""

    async def scenario(app: App) -> None:
        before = (await app.get("/v1/models")).json()
        for wrong, message in (
            (body("alias", "two"), "names the model"),
            (body("second", "bad"), "rank 1: WeightError"),
            (body("first", "bad", load_inplace=True), "rank 1: WeightError"),
            (body("second"), "lora_path"),
            ({"lora_path": "two"}, "lora_name"),
            (body("", "two"), "lora_name"),
        ):
            reply = await app.post(LOAD, wrong)
            assert reply.status == 400 and message in reply.content.decode(), reply.content
        assert (await app.post(UNLOAD, {})).status == 400
        assert (await app.get("/v1/models")).json() == before

    serve(scenario)


def test_a_model_chooses_the_adapter() -> None:
    """Oracle: the engine's requests, and the name in the answer."""

    async def scenario(app: App) -> None:
        for path, request in (
            ("/v1/completions", {"prompt": [5, 6], "max_tokens": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
        ):
            for model, adapter in (("first", "first"), ("demo", ""), (None, "")):
                reply = await app.post(path, request if model is None else {"model": model, **request})
                assert reply.status == 200 and reply.json()["model"] == (model or "demo")
                assert isinstance(app.service.engine, FakeEngine)
                asked = ADAPTER.get(app.service.engine.added[-1])
                assert (asked.name if asked is not None else "") == adapter

    serve(scenario)


def test_an_engine_without_slots_and_the_key() -> None:
    """Oracle: 400 with the flag's name; 401 without a key, 403 with a client's."""

    async def without(app: App) -> None:
        for path in (LOAD, UNLOAD):
            reply = await app.post(path, body("first", "one"))
            assert reply.status == 400 and "--enable-lora" in reply.content.decode()

    async def locked(app: App) -> None:
        for path in (LOAD, UNLOAD):
            assert (await app.post(path, body("first", "one"))).status == 401
            key = {"Authorization": "Bearer secret"}
            assert (await app.post(path, body("first", "one"), **key)).status == 403

    run_served(without, FakeEngine(), chat_tokenizer())
    serve(locked, ServerConfig(api_key=("secret",)))
