"""Images of real clients and of the page, through a frontend process, to an engine that looks at the pixels."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import numpy as np
import openai
import pytest
from PIL import Image

from tests.e2e.browser import running_browser, tab
from tests.e2e.frontend import RunningServer, running_server, wait_until
from tests.fake_engine import FakeEngine
from tests.images import data_url, file_of, image_info, image_tokenizer, picture
from tp_engine.config import DEMO_MODEL
from tp_engine.requests.request import EngineRequest

pytestmark = pytest.mark.slow

PICTURE = picture(96, 64)
URL = data_url(PICTURE)


def saw(request: EngineRequest) -> list[int]:
    """The sizes of the images, and whether the last one's pixels are those of the picture; read as a rank reads."""
    text = []
    for image in request.images:
        with open(f"/proc/{image.pid}/fd/{image.fd}", "rb") as file:
            file.seek(image.offset)
            pixels = np.frombuffer(file.read(image.num_bytes), np.uint8).reshape(image.height, image.width, 3)
        expected = np.asarray(PICTURE.resize((image.width, image.height), Image.Resampling.BICUBIC))
        text.append(f"{image.width}x{image.height} {'equal' if np.array_equal(pixels, expected) else 'other'}")
    ids: list[int] = image_tokenizer().encode("saw " + ", ".join(text), add_special_tokens=False)
    return [*ids, *request.eos_token_ids[:1]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("model")
    image_tokenizer().save_pretrained(folder)
    info = msgspec.structs.replace(image_info(), model=str(DEMO_MODEL), tokenizer=str(folder))
    with running_server(FakeEngine(saw, model_info=info)) as found:
        yield found


def test_the_openai_client_sends_pictures(server: RunningServer) -> None:
    """Oracle: the engine's own look at the pixels; ``usage`` counts 6 tokens for each image."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    part: Any = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
    chat = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": [part, part]}])
    assert chat.choices[0].message.content == "saw 96x64 equal, 96x64 equal"
    assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.model_dump()["image_tokens"] == 12
    item: Any = {"role": "user", "content": [{"type": "input_image", "image_url": URL, "detail": "auto"}]}
    assert client.responses.create(model="demo", input=[item]).output_text == "saw 96x64 equal"
    broken: Any = {"type": "image_url", "image_url": {"url": data_url(file_of(PICTURE)[:99])}}
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[0\]: the image is"):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": [broken]}])


def test_the_anthropic_client_sends_pictures(server: RunningServer) -> None:
    """Oracle: as above, in a message and in a tool's result."""
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file_of(PICTURE)).decode()}
    block: Any = {"type": "image", "source": source}
    message = client.messages.create(model="demo", max_tokens=99, messages=[{"role": "user", "content": [block]}])
    assert message.content[0].model_dump()["text"] == "saw 96x64 equal"
    call: Any = {"type": "tool_use", "id": "toolu_123", "name": "look", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "toolu_123", "content": [block]}
    answer = client.messages.create(
        model="demo",
        max_tokens=99,
        messages=[
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    )
    assert answer.content[0].model_dump()["text"] == "saw 96x64 equal"


# Gives the composer a file, as a drop or a paste does.
GIVE = """([event, kind, base64]) => {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const data = new DataTransfer();
    data.items.add(new File([bytes], "picture.png", { type: "image/png" }));
    const init = { bubbles: true, cancelable: true, [kind]: data };
    const made = event === "drop" ? new DragEvent(event, init) : new ClipboardEvent(event, init);
    document.querySelector("#prompt").dispatchEvent(made);
}"""


def test_the_page_sends_what_is_dropped_and_pasted(server: RunningServer, tmp_path: Path) -> None:
    """Oracle: the engine's look at the pixels; a click takes an image away; the question shows what was sent."""
    content = base64.b64encode(file_of(PICTURE)).decode()
    with running_browser() as browser, tab(browser, server.url) as shown:
        shown.wait("#status[data-state=live]")
        for event, kind in (("drop", "dataTransfer"), ("paste", "clipboardData"), ("drop", "dataTransfer")):
            before = shown.page.locator("#pictures img").count()
            shown.page.evaluate(GIVE, [event, kind, content])
            wait_until(lambda before=before: shown.page.locator("#pictures img").count() > before, "the image")
        shown.page.locator("#pictures img").first.click()
        assert shown.page.locator("#pictures img").count() == 2
        shown.ask("what is it?")
        shown.wait(".message.assistant footer", "stop")
        assert shown.text(".message.assistant .text") == "saw 96x64 equal, 96x64 equal"
        assert shown.page.locator(".message.user img").count() == 2
        assert shown.page.locator("#pictures img").count() == 0
        assert not shown.complaints
