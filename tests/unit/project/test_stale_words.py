"""Options, variables, metrics, endpoints and attributes that README, CONTRIBUTING and docs/ name exist in the program.

``test_serving_docs.py`` compares the pages that list all of them in both directions; these are names in passing.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import tp_engine
from tests.doc_commands import PAGES, ROOT
from tp_engine.server.app import create_app
from tp_engine.server.config import ServerConfig
from tp_engine.server.state import ServerState

PROGRAMS = ("tp_engine", "scripts", "launch", "deploy", ".ci", "tests/soak", "tests/faults", "tests/fake_cuda")
SUFFIXES = {"", ".py", ".toml", ".sh", ".c", ".h", ".yml", ".yaml", ".js", ".html"}
# Options of other programs, which no program here mentions -> whose.
OF_OTHERS = {
    "--health-check-interval-secs": "SGLang's router",
    "--policy": "SGLang's router",
    "--session-key": "SGLang's router",
    "--worker-urls": "SGLang's router",
    "--rdzv-backend": "torchrun",
    "--upgrade": "pip",
}
# Paths that are not in the schema of the API -> what they are.
OTHER_PATHS = {
    "/docs": "the schema's page",
    "/redoc": "the schema's page",
    "/openapi.json": "the schema",
    "/v1": "the beginning of all paths",
    "/apply-template": "llama.cpp's",
    "/register": "a router's",
    "/query": "a router's",
    "/exit": "a command of the chat in a terminal",
    "/reset": "a command of the chat in a terminal",
    "/dev/shm": "a folder",
}
ADDRESS = re.compile(r"`(?:[A-Z]+ )?(/[a-z0-9_/.{}-]+)`|(?:localhost|127\.0\.0\.1):8000(/[\w/-]+)")
METHOD = re.compile(r"(await )?\bllm\.([a-z]\w*)\(")
CLASSES = "LLM|AsyncLLM|SamplingParams|PoolingParams|BeamSearchParams|RequestOutput|CompletionOutput"


@cache
def words() -> set[str]:
    """Every word of the program, of its scripts, and of the tests that the documents start."""
    files = (path for top in PROGRAMS for path in (ROOT / top).rglob("*") if path.suffix in SUFFIXES)
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in files if path.is_file())
    return {word for text in texts for word in re.findall(r"[\w-]*\w", text)}


@cache
def is_option(flag: str) -> bool:
    """Whether the flag, or the field that it sets, is a word of the program."""
    name = flag.removeprefix("--")
    bare = re.sub("^(no|enable|disable)-", "", name)
    return not words().isdisjoint((flag, name, bare, name.replace("-", "_"), bare.replace("-", "_")))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_names_are_words_of_the_program() -> None:
    """Oracle: the texts of the program."""
    unknown = set[tuple[str, str]]()
    for page in PAGES:
        text = text_of(page)
        named = {flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text) if not is_option(flag)}
        named |= set(re.findall(r"\bTP_ENGINE_[A-Z_]*[A-Z]", text)) - words()
        for metric in re.findall(r"\b(?:tp_engine|vllm):(\w+)", text):
            if words().isdisjoint((metric, re.sub(r"_(total|bucket|count|sum)$", "", metric))):
                named.add(metric)
        unknown |= {(str(page.relative_to(ROOT)), name) for name in named - set(OF_OTHERS)}
    assert sorted(unknown) == [], "nothing in the program has these names"


def test_endpoints_exist() -> None:
    """Oracle: the server's own schema."""
    paths = create_app(ServerState(ServerConfig(), ("demo",))).openapi()["paths"]
    known = re.compile("|".join(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path)) for path in paths))
    named = {
        (str(page.relative_to(ROOT)), path)
        for page in PAGES
        for path in re.findall(
            r"`(?:[A-Z]+ )?(/[a-z0-9_/.{}-]+)`|(?:localhost|127\.0\.0\.1):8000(/[\w/-]+)", text_of(page)
        )
        for path in path
        if path
    }
    assert sorted(one for one in named if one[1] not in OTHER_PATHS and not known.fullmatch(one[1])) == []


def test_attributes_exist() -> None:
    """Oracle: the classes, and the fields of dataclasses."""
    text = "\n".join(map(text_of, PAGES))
    named = {("AsyncLLM" if is_async else "LLM", name) for is_async, name in METHOD.findall(text)}
    named |= set(re.findall(rf"\b({CLASSES})\.([a-z]\w*)", text))
    assert len(named) > 10
    owners = {name: getattr(tp_engine, name) for name, _ in named}
    fields = {name: {*dir(owner), *getattr(owner, "__dataclass_fields__", ())} for name, owner in owners.items()}
    assert sorted(place for place in named if place[1] not in fields[place[0]]) == []


def test_no_exception_is_stale() -> None:
    """Oracle: the pages."""
    texts = "\n".join(map(text_of, PAGES))
    assert [name for name in {**OF_OTHERS, **OTHER_PATHS} if not re.search(rf"{re.escape(name)}\b", texts)] == []
