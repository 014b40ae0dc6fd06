"""The README is true: claims name tests that exist, numbers have a source, and the package index can show it."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import tomllib
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from figures.page import BEGIN, DOCUMENTS, END, read_figures, updated
from lib import smollm2
from readme_renderer import markdown

from tests.families import FAMILIES, families_on
from tests.image_models import IMAGE_FAMILIES
from tests.ranks.test_parity import MODELS
from tp_engine.attention.triton_backend import MIN_CAPABILITY
from tp_engine.model_config.families import families
from tp_engine.system.version import __version__

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLAIMS: dict[str, list[dict[str, Any]]] = tomllib.loads((ROOT / "tests" / "readme_claims.toml").read_text("utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NUMBER = re.compile(r"(?<![\w.\-/])\d[\d,]*(?:\.\d+)?(?![\w\-])")
# What an engine answers for, in the table beside others: its own column.
OTHERS = re.compile(r"(?m)^(\| [^|]+\| [^|]+\|).*$")
MEASURED = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)


def prose() -> list[str]:
    """The paragraphs, items and rows of the README in one line each; no titles, code, pictures, nor the others' cells
    of a table, nor the table that a run of a benchmark wrote."""
    text = MEASURED.sub("", re.sub(r"```.*?```", "", README, flags=re.DOTALL))
    text = re.sub(r"(?m)^(#.*|!\[.*|\| (---|\| ).*)$", "", text)
    text = re.sub(r"(?m)^(\* |\| )", r"\n\1", OTHERS.sub(r"\1", text))
    return [one for part in re.split(r"\n{2,}", text) if (one := " ".join(part.split()))]


@cache
def names_in(file: str) -> set[str]:
    """The functions of a test file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


@cache
def sourced() -> list[str]:
    """The words of the README whose numbers have a source; what can be counted is counted here."""
    (size,) = re.findall(r"\((\d+ MB)\)", Path(smollm2.__file__).read_text(encoding="utf-8"))
    images = len({family.model for family in IMAGE_FAMILIES.values()})
    table = json.loads((ROOT / "docs/classes.json").read_text(encoding="utf-8"))["classes"]
    asked = sum(way in ("recognised", "transformers") for _, way, _ in table)
    counted = {"architectures": len(families()), "images": images, "smollm2": size, "classes": asked}
    return [
        re.sub(r"\{(\w+)\}", lambda name: str(counted[name[1]]), one["says"])
        for kind in CLAIMS.values()
        for one in kind
    ]


def test_every_claim_is_in_the_readme_and_names_tests_that_exist() -> None:
    """Oracle: the README's words, with what the code counts; the functions of the test files."""
    text = " ".join(README.split())
    assert not [words for words in sourced() if words not in text], "tests/readme_claims.toml has words of no README"
    for node in (node for claim in CLAIMS["claim"] for node in claim["tests"]):
        file, _, name = node.partition("::")
        assert (ROOT / file).exists() and (not name or name in names_in(file)), f"{node} is no test"


def test_every_paragraph_has_a_claim_or_a_figure() -> None:
    """Oracle: the list of claims; advice and signposts claim nothing."""
    signposts = (
        "What sets it apart",
        "Take tp_engine to read",
        "On CPUs, beside",
        "[The architecture]",
        "Arguments pass",
    )
    bare = [part for part in prose() if not any(words in part for words in sourced())]
    assert not [part for part in bare if not part.startswith(signposts)]


def test_every_number_has_a_source() -> None:
    """Oracle: the list of claims; a claim's tests, or a file of figures, hold its numbers."""
    text = "\n".join(prose())
    for words in sorted(sourced(), key=len, reverse=True):
        text = text.replace(words, "")
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    assert not NUMBER.findall(text)


def test_its_figures_are_those_of_the_files() -> None:
    """Oracle: the files that benchmarks wrote, rounded as the README shows them; the words of the pages it quotes."""
    for figure in CLAIMS["figure"]:
        sections = json.loads((ROOT / figure["file"]).read_text(encoding="utf-8"))
        found = [one for section in sections for one in section["figures"] if one["label"] == figure["label"]]
        (value,) = [one["value"] for one in found if one["unit"] == figure["unit"]]
        value *= 100 if "%" in figure["says"] else 1
        shown = [number.replace(",", "") for number in NUMBER.findall(figure["says"])]
        assert any(f"{value:.{len(one.partition('.')[2])}f}" == one for one in shown), (figure["says"], value)
    for quote in CLAIMS["quote"]:
        page = " ".join((ROOT / quote["page"]).read_text(encoding="utf-8").split())
        assert all(words in page for words in quote["words"]), quote


def test_every_architecture_runs_on_the_ranks_that_are_told() -> None:
    """Oracle: the tables of the tests that the claims name."""
    assert set(families_on(1)) == set(families_on(2)) == set(families_on(3)) | set(families_on(4)) == set(FAMILIES)
    *others, last = sorted(name.title() for name in MODELS)
    assert f"{', '.join(others)} and {last} give the same tokens on 8" in " ".join(README.split())


def test_its_requirements_are_those_of_the_package() -> None:
    """Oracle: pyproject.toml, and what the kernels ask of a GPU."""
    (torch,) = (one for one in PROJECT["dependencies"] if one.startswith("torch>="))
    python, needed = PROJECT["requires-python"].removeprefix(">="), torch.removeprefix("torch>=").partition(",")[0]
    capability = ".".join(map(str, MIN_CAPABILITY))
    told = (
        f"Python {python} or later; GPUs need PyTorch {needed} with CUDA and compute capability {capability} or higher"
    )
    assert told in " ".join(README.split())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_beside_other_engines_are_the_file_s(path: Path) -> None:
    """Oracle: what ``scripts/readme_figures --document`` makes of the file."""
    text = path.read_text(encoding="utf-8")
    assert updated(text, read_figures()) == text


def test_it_names_nothing_that_does_not_exist_yet() -> None:
    """Oracle: the rule; a checkout knows no address of its own, no badge and no release."""
    assert not re.findall(r"https?://(?!127\.0\.0\.1)\S+|pip install tp[-_]engine", README)


class Addresses(HTMLParser):
    """What a page links to and shows."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [(name, value) for name, value in attrs if name in ("href", "src") and value]


def test_the_package_index_shows_it_whole() -> None:
    """Oracle: the index's own renderer; every address leads to a file of the repository, or to this page."""
    spec = importlib.util.spec_from_file_location("setup_of_the_project", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    page = markdown.render(setup.readme())
    assert page is not None and "<table>" in page
    repository, ref = PROJECT["urls"]["Repository"], "main" if "dev" in __version__ else f"v{__version__}"
    bases = {
        "href": f"{repository}/blob/{ref}/",
        "src": f"{repository.replace('https://github.com', 'https://raw.githubusercontent.com')}/{ref}/",
    }
    addresses = Addresses(page).found
    assert {name for name, _ in addresses} == set(bases) and len(addresses) >= 15
    for name, address in addresses:
        if not address.startswith(("#", "http://127.0.0.1:8000")):
            path = address.removeprefix(bases[name]).partition("#")[0]
            assert address.startswith(bases[name]) and (ROOT / path).exists(), address
