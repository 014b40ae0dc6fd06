"""The web page in headless Chromium, used as a person does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.browser import Tab, running_browser, tab
from tests.e2e.frontend import RunningServer, running_server
from tests.e2e.scripted import scripted_engine
from tests.e2e.serving import warm_serving
from tp_engine.server.config import ServerConfig

pytestmark = pytest.mark.slow

# How opaque the first cell of the pool's last row is.
LAST_ROW_ALPHA = """() => {
    const canvas = document.querySelector("#pool-grid");
    return canvas.getContext("2d").getImageData(3, canvas.height - 4, 1, 1).data[3];
}"""
KEY = "open-sesame"
CALL = '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'


@pytest.fixture
def browser() -> Iterator[Any]:
    with running_browser() as found:
        yield found


@pytest.fixture(scope="module")
def fake() -> Iterator[RunningServer]:
    """A server with a key and a prefix; its model has scripted answers."""
    config = ServerConfig(
        port=0, root_path="/llm", api_key=(KEY,), reasoning_parser="qwen3", enable_auto_tool_choice=True,
        tool_call_parser="hermes",
    )  # fmt: skip
    with running_server(scripted_engine(), config) as server:
        yield server


def fill(shown: Tab, **fields: str) -> None:
    """Open the settings, which are folded at first, and fill them in."""
    if shown.page.locator("#settings[open]").count() == 0:
        shown.page.click("#settings summary")
    for name, text in fields.items():
        shown.page.fill(f"#settings-form [name={name}]", text)


def unexpected(shown: Tab) -> list[str]:
    """The console's lines, without the error statuses that the test provokes."""
    return [line for line in shown.complaints if not ("status of 401" in line or "status of 400" in line)]


def number(shown: Tab, state: str) -> int:
    return int(shown.text(f"#pool [data-state={state}]").replace(",", ""))


def test_a_chat_with_the_demo_model_and_its_blocks(browser: Any, tmp_path: Path) -> None:
    """Oracle: arithmetic; an answer grows while its blocks are in use; a stop gives the blocks back; what is cached is
    written to disk."""
    small = ["--device", "cpu", "--num-gpu-blocks-override", "2048", "--block-size", "16"]
    tiers = ["--kv-offloading-size", "0.02", "--kv-disk-path", str(tmp_path), "--kv-disk-size", "0.02"]
    with warm_serving(1, *small, *tiers) as server, tab(browser, server.url) as shown:
        shown.wait("#status[data-state=live]")
        assert (number(shown, "used"), number(shown, "free")) == (0, 2048)
        assert shown.text("#api") == f"{server.url}/v1" and "one of these" in shown.text("#first")
        shown.wait("#examples button", "12+34=").click()
        shown.gone("#welcome h2")
        shown.wait(".message.assistant footer", "stop")
        shown.wait(".message.assistant", "first token")
        assert shown.text(".message.assistant .text") == "46"
        shown.page.click("#clear")
        fill(shown, temperature="0", max_tokens="900", more='{"ignore_eos": true, "n": 32}')
        shown.ask("copy: a prompt of several blocks, which all samples of the request share")
        shown.wait("#running tbody tr .pill", "decode")
        first = len(shown.text(".message.assistant .text"))
        for state in ("used", "shared"):
            shown.wait(f"#pool .legend b[data-state={state}]:not(:text-is('0'))")
        shown.page.hover("#running tbody tr")
        assert number(shown, "used") > 0 and number(shown, "shared") > 0
        assert re.match(r"\d", shown.text("#running tbody td.blocks"))
        assert shown.page.evaluate(LAST_ROW_ALPHA) < 128, "blocks of others are not dimmed"
        shown.page.keyboard.press("Escape")
        shown.wait(".message.assistant footer", "stopped")
        assert len(shown.text(".message.assistant .text")) > first and "tokens/s" in shown.text("#chat footer")
        shown.wait("#running.idle")
        shown.wait("#pool .legend b[data-state=used]:text-is('0')")
        shown.wait("#pool .tier[data-tier=disk] b:not(:text-matches('^0 of'))", "blocks")
        assert number(shown, "cached") > 0 and shown.text("#rank-rows").startswith("rank 0")
        assert (shown.complaints, shown.strangers()) == ([], [])


def test_keys_errors_reasoning_and_tools(browser: Any, fake: RunningServer) -> None:
    """Oracle: the key stays in the session; errors show the server's message; reasoning and calls are shown apart."""
    with tab(browser, fake.url) as shown:
        for key in ("wrong", KEY):
            shown.wait("#key-dialog[open]" if key == "wrong" else "#key-words:text('API key')")
            shown.page.fill("#key-input", key)
            shown.page.press("#key-input", "Enter")
        shown.wait("#status[data-state=live]")
        assert not shown.page.evaluate("Object.values(localStorage).includes('" + KEY + "')")
        shown.ask("SAY:<think>hm</think>Good day")
        shown.wait(".message.assistant footer", "stop")
        assert shown.text(".message.assistant > .text").strip() == "Good day"
        assert not shown.page.locator(".reasoning .text").is_visible()
        shown.page.click(".reasoning summary")
        assert shown.text(".reasoning .text") == "hm"
        shown.page.click("#clear")
        fill(shown, more='{"tools": [{"type": "function", "function": {"name": "look"}}]}')
        shown.ask("SAY:" + CALL)
        shown.wait(".message.assistant footer", "tool_calls")
        assert shown.text(".call b") == "look" and '"sky"' in shown.text(".call code")
        for name, wrong, words in (("temperature", "-1", "temperature"), ("more", "[]", "JSON object")):
            fill(shown, **{name: wrong})
            shown.ask("SAY:x")
            shown.wait(".message .error", words)
        assert unexpected(shown) == [] and shown.strangers() == []


def test_narrow_screens_themes_and_models_without_a_template(browser: Any, fake: RunningServer) -> None:
    """Oracle: one part at a time is shown, and only that part asks the server; a completion's prompt is the text."""
    bodies = []

    def refuse(route: Any) -> None:
        error = {
            "message": "the model has no chat template",
            "code": "no_chat_template",
            "type": "x",
            "param": "messages",
        }
        route.fulfill(status=400, json={"error": error})

    with tab(browser, fake.url, "/llm/", width=420) as shown:
        shown.page.fill("#key-input", KEY)
        shown.page.press("#key-input", "Enter")
        shown.gone("#key-dialog")
        assert not shown.page.locator("#engine").is_visible()
        shown.page.on("request", lambda request: bodies.append((request.url, request.post_data_json)))
        shown.page.route("**/v1/chat/completions", refuse)
        shown.ask("SAY:on and on")
        shown.wait(".message.assistant .note", "no chat template")
        shown.wait(".message.assistant > .text", "on and on")
        assert bodies[-1][0].endswith("/v1/completions") and bodies[-1][1]["prompt"] == "SAY:on and on"
        assert not [url for url in shown.asked if url.endswith("/engine")]
        shown.page.focus("#tab-chat")
        shown.page.keyboard.press("ArrowRight")
        shown.wait("#engine")
        shown.wait("#status[data-state=live]")
        assert not shown.page.locator("#chat").is_visible()
        assert shown.page.evaluate("document.documentElement.scrollWidth") <= 420
        for name in ("Light", "Dark"):
            shown.page.click("#theme")
            shown.wait("#theme", name)
        assert shown.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
        assert unexpected(shown) == [] and shown.strangers() == []
