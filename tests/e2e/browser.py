"""A headless Chromium, if installed, that records the pages' requests and errors."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

DEADLINE_MS = 20_000
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Root in a container, no GPU, and no traffic of the browser's own.
_OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@dataclass
class Tab:
    """A page of ``origin``; ``complaints``: script errors and console lines; ``asked``: the addresses it requested."""

    page: Any
    origin: str
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.inner_text())

    def wait(self, selector: str, text: str | None = None) -> Any:
        """Wait until the selector, containing the text if one is given, is seen."""
        found = self.page.locator(selector, has_text=text).first
        found.wait_for(timeout=DEADLINE_MS)
        return found

    def gone(self, selector: str) -> None:
        self.page.locator(selector).first.wait_for(state="hidden", timeout=DEADLINE_MS)

    def ask(self, text: str) -> None:
        """Type into the composer, and send with the keyboard."""
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def strangers(self) -> list[str]:
        """The requested addresses outside the origin."""
        return [url for url in self.asked if not url.startswith(self.origin + "/")]


@contextlib.contextmanager
def running_browser() -> Iterator[Any]:
    """The browser; without one the test is skipped, and the reason says what to install."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("needs a Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=[*_OPTIONS])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def tab(browser: Any, origin: str, path: str = "/", width: int = 1200) -> Iterator[Tab]:
    """A fresh page (no stored data) at ``path``; closed at the end."""
    context = browser.new_context(viewport={"width": width, "height": 800})
    context.set_default_timeout(DEADLINE_MS)
    shown = Tab(context.new_page(), origin)
    shown.page.on("request", lambda request: shown.asked.append(request.url))
    shown.page.on("pageerror", lambda error: shown.complaints.append(str(error)))
    shown.page.on("console", lambda line: shown.complaints.append(line.text))
    try:
        shown.page.goto(origin + path)
        yield shown
    finally:
        context.close()
