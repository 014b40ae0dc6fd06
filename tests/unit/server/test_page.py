"""The web page without a browser: its files, their types, its security policy, and the requests."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.asgi import App, run_served
from tests.fake_engine import FakeEngine, echo
from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.server.config import ServerConfig
from tp_engine.server.web_page import ASSETS, INDEX

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "tp_engine"
FOLDER = PACKAGE / "server" / "page"
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
SVG_NAMESPACE = "http://www.w3.org/2000/svg"


def serve(scenario: Any, **config: Any) -> None:
    run_served(scenario, FakeEngine(echo), byte_level_tokenizer(), ServerConfig(**config))


def test_every_file_is_served_with_its_type_and_a_strict_policy() -> None:
    """Oracle: the folder's bytes, the extension, and a policy without another host or an unsafe source."""

    async def scenario(app: App) -> None:
        for name in (INDEX, *ASSETS):
            reply = await app.get("/" if name == INDEX else f"/page/{name}")
            assert (reply.status, reply.content) == (200, (FOLDER / name).read_bytes()), name
            assert reply.headers["content-type"].partition(";")[0] == TYPES[name.rpartition(".")[2]]
            assert reply.headers["x-content-type-options"] == "nosniff"
            policy = reply.headers["content-security-policy"]
            assert policy.startswith("default-src 'self';") and "frame-ancestors 'none'" in policy
            assert set(re.findall(r"'[^']*'", policy)) == {"'self'", "'none'"} and "http" not in policy
        assert (await app.start("HEAD", "/").reply()).status == 200
        for name in ("index.html", "nothing.js", "..%2Fapp.py", "%2e%2e/app.py"):
            reply = await app.get(f"/page/{name}")
            assert reply.status == 404 and reply.json()["error"]["message"], name

    serve(scenario)


def test_the_page_needs_no_key_but_its_data_does() -> None:
    """Oracle: 200 and 401; only the known files are open."""

    async def scenario(app: App) -> None:
        for path in ("/", *(f"/page/{name}" for name in ASSETS)):
            assert (await app.get(path)).status == 200, path
        for path in ("/engine", "/v1/models", "/page/", "/page/x.js", "/page/main.js/", "//"):
            assert (await app.get(path)).status == 401, path

    serve(scenario, api_key=("k",))


def test_links_follow_the_root_path() -> None:
    """Oracle: a base element before every link, its value escaped; none without a root path."""

    async def scenario(app: App) -> None:
        text = (await app.get("/")).content.decode()
        assert text.index('<base href="/a&quot;b/" />') < text.index("<link")

    serve(scenario, root_path='/a"b')
    assert "<base" not in (FOLDER / INDEX).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", (INDEX, *ASSETS))
def test_nothing_leads_outside(name: str) -> None:
    """Oracle: no address with a host, no inline code that the policy forbids, and every named file exists."""
    text = (FOLDER / name).read_text(encoding="utf-8").replace(SVG_NAMESPACE, "")
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text)
    assert not re.search(r"\bstyle=|\son[a-z]+=\"|<style|<script(?! type=\"module\" src=)|\beval\(|innerHTML", text)
    named = re.findall(r'"page/([^"]+)"', text) + re.findall(r'from "\./([^"]+)"', text)
    assert set(named) <= set(ASSETS)
    assert len(text.splitlines()) < 200


def test_every_line_of_a_ranks_memory_has_a_colour() -> None:
    """Oracle: the lines of the bar in ranks.js, a class of the style sheet each."""
    lines = re.search(r"const LINES = \{(.*?)\};", (FOLDER / "ranks.js").read_text(encoding="utf-8"), re.DOTALL)
    assert lines is not None
    names = re.findall(r"(\w+):", lines[1])
    styles = (FOLDER / "engine.css").read_text(encoding="utf-8")
    assert len(names) >= 8 and all(f".{name} {{ background:" in styles for name in names), names


def test_every_file_is_used_and_in_the_wheel() -> None:
    """Oracle: the links of the index and the imports of the modules; the patterns of pyproject.toml."""
    texts = [(FOLDER / name).read_text(encoding="utf-8") for name in (INDEX, *ASSETS)]
    named = {name for text in texts for name in re.findall(r'"(?:page|\.)/([a-z.]+)"', text)}
    assert named == set(ASSETS)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["tp_engine"]
    for file in FOLDER.iterdir():
        path = file.relative_to(PACKAGE).as_posix()
        assert any(fnmatch.fnmatch(path, pattern) for pattern in patterns), path
