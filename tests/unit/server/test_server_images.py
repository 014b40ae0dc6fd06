"""Images through the application in this process, before an engine that takes what it gets."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from tests.asgi import App, run_served, until
from tests.fake_engine import FakeEngine, arith
from tests.images import file_of, image_info, image_part, image_tokenizer, picture

PATH = "/v1/chat/completions"
PICTURE = picture(96, 64)  # 6 tokens


def engine(reply: Any = arith, **options: Any) -> FakeEngine:
    limits = options.pop("limits", {})
    return FakeEngine(reply, model_info=image_info(**limits), **options)


def body(*images: Any, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "see "}, *(image_part(one) for one in images)]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "ignore_eos": True, **fields}


def staged(app: App) -> int:
    """Bytes of pixels in shared memory now."""
    images = app.state.llm.input_processor.images
    assert images is not None
    return images.reader.staged.used


def test_answers_count_the_tokens_of_images() -> None:
    """Oracle: 6 tokens an image, in usage, in streams, in the metrics; all memory is free behind each answer."""

    async def scenario(app: App) -> None:
        usage = (await app.post(PATH, body(PICTURE, PICTURE))).json()["usage"]
        assert usage["prompt_tokens_details"]["image_tokens"] == 12
        assert usage["prompt_tokens"] > 12
        stream = await app.post(PATH, body(PICTURE, stream=True, stream_options={"include_usage": True}))
        assert stream.events[-1]["usage"]["prompt_tokens_details"]["image_tokens"] == 6
        part = {"type": "input_image", "image_url": image_part(PICTURE)["image_url"]}
        asked = {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 1}
        response = (await app.post("/v1/responses", asked)).json()["usage"]
        assert response["input_tokens_details"]["image_tokens"] == 6
        plain = (await app.post(PATH, body())).json()["usage"]
        assert "image_tokens" not in plain["prompt_tokens_details"]
        await until(lambda: staged(app) == 0, "all pixels to be given back")
        metrics = (await app.get("/metrics")).content.decode()
        for line in ("images_total{", "image_tokens_total{", "image_load_seconds_count{"):
            value = next(one for one in metrics.splitlines() if f":{line}" in one).rpartition(" ")[2]
            assert float(value) == {"images_total{": 4, "image_tokens_total{": 24}.get(line, 3)

    run_served(scenario, engine(), image_tokenizer())


def test_pixels_are_given_back_however_a_request_ends() -> None:
    """Oracle: 0 bytes after a client that leaves, an abort, n = 3, and a bad parameter."""

    async def scenario(app: App) -> None:
        for stream in (False, True):
            gone = app.start("POST", PATH, body(PICTURE, stream=stream, max_tokens=900))
            await until(lambda: app.service.engine.has_unfinished, "the request to run")
            assert staged(app) > 0
            gone.leave()
            await gone.ended()
            await until(lambda: staged(app) == 0, "the pixels of a client that left")
            await until(lambda: not app.service.engine.has_unfinished, "the request to end")
        exchange = app.start("POST", PATH, body(PICTURE, max_tokens=900, request_id="mine"))
        await until(lambda: app.service.engine.has_unfinished, "the request to run")
        await app.post("/abort", {"request_ids": ["mine"]})
        await exchange.reply()
        assert (await app.post(PATH, body(PICTURE, n=3))).status == 200
        assert (await app.post(PATH, body(PICTURE, logprobs=True, top_logprobs=99))).status == 400
        await until(lambda: staged(app) == 0, "all pixels to be given back")

    run_served(scenario, engine(step_delay_s=0.002), image_tokenizer())


def test_bad_images_are_400_and_the_log_has_none_of_them(caplog: Any) -> None:
    """Oracle: status, and OpenAI's error; neither answer nor log repeats the file."""

    async def scenario(app: App) -> None:
        for data in (b"<svg/>", file_of(PICTURE)[:200], b"noise" * 999):
            reply = await app.post(PATH, body(data))
            error = reply.json()["error"]
            assert reply.status == 400 and error["param"] == "messages" and len(reply.content) < 500
            assert "messages[0].content[1]" in error["message"]
        too_many = await app.post(PATH, body(*[picture(8, 8)] * 33))
        assert too_many.status == 400 and "At most 32 image(s)" in too_many.json()["error"]["message"]

    run_served(scenario, engine(), image_tokenizer())
    assert "bm9pc2Vub2lzZW5v" not in caplog.text


def test_images_wait_for_room_and_are_then_refused_for_now() -> None:
    """Oracle: 503 with the retryable code, as nothing is given back; texts are served meanwhile."""

    async def scenario(app: App) -> None:
        held = app.start("POST", PATH, body(PICTURE, max_tokens=900, stream=True))
        await until(lambda: app.service.engine.has_unfinished, "the request to run")
        images = app.state.llm.input_processor.images
        assert images is not None
        images.reader.staged.wait_s = 0.1
        waiting = app.start("POST", PATH, body(PICTURE))
        assert (await app.post(PATH, body())).status == 200
        reply = await waiting.reply()
        assert reply.status == 503 and reply.json()["error"]["code"] == "service_unavailable"
        held.leave()
        await held.ended()
        await until(lambda: staged(app) == 0, "the pixels to be given back")
        assert (await app.post(PATH, body(PICTURE))).status == 200

    run_served(scenario, engine(step_delay_s=0.005, limits={"transport_bytes": 20_000}), image_tokenizer())


def test_images_do_not_hold_up_texts() -> None:
    """Oracle: a text is answered while more images than there are threads wait for a host that does not answer."""
    answers = threading.Event()

    async def scenario(app: App) -> None:
        images = app.state.llm.input_processor.images
        assert images is not None
        read = images.reader.open

        def slow(sources: Any) -> Any:
            assert answers.wait(30)
            return read(sources)

        images.reader.open = slow  # type: ignore[method-assign]
        waiting = [app.start("POST", PATH, body(PICTURE, max_tokens=1)) for _ in range(8)]
        await asyncio.sleep(0)
        assert (await app.post(PATH, body())).status == 200
        assert not any(one.parts for one in waiting)
        answers.set()
        assert {(await one.reply()).status for one in waiting} == {200}

    run_served(scenario, engine(), image_tokenizer())
