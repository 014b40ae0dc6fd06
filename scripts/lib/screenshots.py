"""Take the pictures of docs/images: the page of a server that runs the demo model, in light and dark colours.

Usage: python screenshots.py [FOLDER]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
SERVE = ("launch/serve.py", "-tp", "2", "--device", "cpu", "--port", "0", "--num-gpu-blocks-override", "512")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S, STOP_S, DEADLINE_MS, MOST_BYTES = 120.0, 30.0, 30_000, 200_000
QUESTIONS = ("12+34=", "sort: 3 1 4", "reverse: 3 1 4")


def take(browser: Browser, url: str, scheme: str, folder: Path) -> None:
    """Write ``page_welcome_SCHEME.png``, the first screen, and ``page_SCHEME.png``, after some answers."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
    context.set_default_timeout(DEADLINE_MS)
    page = context.new_page()
    page.goto(url)
    page.locator("#status[data-state=live]").wait_for()
    page.locator("#examples button").first.wait_for()
    save(page.screenshot(), folder / f"page_welcome_{scheme}.png")
    for number, question in enumerate(QUESTIONS, 1):
        page.fill("#prompt", question)
        page.press("#prompt", "Enter")
        page.locator("#log .message").nth(2 * number - 1).wait_for()
        page.locator("#send", has_text="Send").wait_for()
    page.wait_for_timeout(2500)  # the live view is drawn once a second
    save(page.screenshot(), folder / f"page_{scheme}.png")
    context.close()


def save(picture: bytes, path: Path) -> None:
    if len(picture) > MOST_BYTES:
        raise SystemExit(f"{path.name} has {len(picture)} bytes; a picture of the documents has at most {MOST_BYTES}")
    path.write_bytes(picture)
    print(f"{path}: {len(picture)} bytes")


def wait_for_port(process: subprocess.Popen[bytes], port_file: Path) -> int:
    """The port that the server has written; it is ready then or soon."""
    deadline = time.monotonic() + START_S
    while not port_file.is_file() or not port_file.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the server did not start")
        time.sleep(0.1)
    return int(port_file.read_text())


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise SystemExit(f"there is no browser; install one of {', '.join(BROWSERS)}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        port_file = Path(work) / "port"
        process = subprocess.Popen([sys.executable, *SERVE, "--port-file", str(port_file)], cwd=ROOT)
        try:
            url = f"http://127.0.0.1:{wait_for_port(process, port_file)}/"
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
                for scheme in ("light", "dark"):
                    take(browser, url, scheme, folder)
                browser.close()
        finally:
            process.terminate()
            process.wait(STOP_S)


if __name__ == "__main__":
    main()
