"""A photograph on its whole way: dropped on the page of a server in a real browser, read, encoded, answered."""

from __future__ import annotations

import base64
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw, ImageFilter

from tests.e2e.browser import running_browser, tab
from tests.e2e.serving import warm_serving
from tests.e2e.test_image_server import make_model, prompt_of
from tests.images import file_of

pytestmark = pytest.mark.slow

NUM_TOKENS = 8
# Drop a file of this content, in base64, on the composer.
DROP = """(content) => {
    const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
    const data = new DataTransfer();
    data.items.add(new File([bytes], "photo.jpg", { type: "image/jpeg" }));
    const event = new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
    document.querySelector("#composer").dispatchEvent(event);
}"""


def photograph() -> bytes:
    """A JPEG that a phone could have taken: soft shapes, a text, held upright by its EXIF alone."""
    image = Image.linear_gradient("L").resize((120, 90)).convert("RGB")
    draw = ImageDraw.Draw(image)
    draw.ellipse((10, 10, 60, 60), fill=(220, 180, 40))
    draw.rectangle((70, 30, 110, 80), fill=(30, 60, 200))
    draw.text((20, 70), "STOP 12", fill=(255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6
    return file_of(image.filter(ImageFilter.GaussianBlur(1)), "JPEG", quality=90, exif=exif)


def test_a_photograph_goes_through_the_page(tmp_path: Path) -> None:
    """Oracle: the API's answer to the request that the page sent, which has the photograph; its prompt has as many
    tokens as the turned image takes, and the page shows the photograph, the answer and no complaint."""
    folder = make_model(tmp_path / "model", "qwen3.5-vision")
    options = ["--model", str(folder), "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "256"]
    with running_browser() as browser, warm_serving(1, *options) as server, tab(browser, server.url) as shown:
        shown.wait("#status[data-state=live]")
        shown.page.click("#settings summary")
        for name, value in {"temperature": "0", "max_tokens": str(NUM_TOKENS), "more": '{"ignore_eos": true}'}.items():
            shown.page.fill(f"#settings-form [name={name}]", value)
        shown.page.evaluate(DROP, base64.b64encode(photograph()).decode())
        shown.wait("#pictures img")
        with shown.page.expect_request("**/v1/chat/completions") as sent:
            shown.ask("what is it?")
        shown.wait(".message.user img")
        shown.wait(".message.assistant footer", "length")
        text = shown.text(".message.assistant .text")
        body: dict[str, Any] = {**json.loads(sent.value.post_data), "stream": False}
        body.pop("stream_options", None)
        request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer = json.load(reply)
        assert "".join(text.split()) == "".join(answer["choices"][0]["message"]["content"].split()) != ""
        details = answer["usage"]["prompt_tokens_details"]
        turned = Image.new("RGB", (90, 120))
        assert details["image_tokens"] == prompt_of(folder, "qwen3.5-vision", turned).images[0].num_tokens
        assert details["cached_tokens"] > 0 and not shown.strangers() and not shown.complaints
