"""The documents name files, sections and folders that exist, and the site has them all."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *PAGES)
# `folder/name.py`, `name.c`, `folder/`, but not `--flag`, /an/absolute/path or a NAME that stands for others.
FILE = re.compile(r"`((?:[a-z0-9_.-]+/)*[a-z0-9_-]+\.(?:py|c|h|md|toml|json|jinja)|(?:[a-z0-9_.-]+/)+)`")
# scripts/name.py with or without backticks.
SCRIPT = re.compile(r"(?<![\w:/])scripts/[a-z0-9_/]+(?:\.py)?")
# [text](target), but no address of another host.
LINK = re.compile(r"\]\((?![a-z]+:)([^)\s]+)\)")
# A document, perhaps with a comma and the name of one of its sections.
REFERENCE = re.compile(r"(?<![\w:/])(docs/[a-z_/]+\.(?:md|json|png|svg))(?:, ([A-Z][\w ]*))?")
MAX_LINES = 250
# Words of all documents, without examples, and without the pages and tables that scripts write.
MAX_WORDS = 45_000
WRITTEN_BY_SCRIPTS = {
    *("flags_engine.md", "flags_server.md", "other_servers.md", "features.md", "which_gpus.md", "classes.md"),
}
# An example comes within so many lines, but in lists, and where a picture or a table is one.
FIRST_LINES = 30
LISTS = {
    *("flags_engine.md", "flags_server.md", "other_servers.md", "python_reference.md"),
    *("containers.md", "page.md", "reliability.md"),
}
SOURCES = [
    path
    for top in ("tp_engine", "tests", "scripts", "deploy", "configs", "launch", ".github", ".ci")
    for path in sorted((ROOT / top).rglob("*"))
    if path.suffix in {".py", ".toml", ".yaml", ".yml", ".c", ".h", ""}
    and path.is_file()
    and b"docs/" in path.read_bytes()
] + [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "pyproject.toml")]
# Files of checkpoints and of users, which the documents also name.
NOT_OURS = {"config.json", "tokenizer.json", "generation_config.json", "tokenization_kimi.py"}


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


@cache
def titles(path: Path) -> list[str]:
    """The headings of a document."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The names by which GitHub and the site know the headings of a document."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles(path)}


@cache
def places() -> set[str]:
    """Every file and folder of the repository by each ending of its path: ``ipc/segment.py`` and ``segment.py``."""
    found: set[str] = set()
    tops = ("tp_engine", "tests", "scripts", "launch", "configs", "deploy", "docs", ".ci", ".github")
    paths = [path for top in tops for path in (ROOT / top).rglob("*") if "__pycache__" not in path.parts]
    for path in (*paths, *(ROOT / top for top in tops), *ROOT.glob("*.*")):
        parts = path.relative_to(ROOT).parts
        found |= {"/".join(parts[start:]) + ("/" if path.is_dir() else "") for start in range(len(parts))}
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    """Oracle: the files below docs/."""

    def listed(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [f"docs/{entry}"]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in listed(part)]

    assert sorted(listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])) == PAGES


def test_the_site_names_the_projects_repository() -> None:
    """Oracle: the addresses of pyproject.toml."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (site["repo_url"], site["site_description"]) == (project["urls"]["Repository"], project["description"])


def test_documents_name_no_commit() -> None:
    """Oracle: the rule; an export has no history, so a document names a version, a date, or how git finds a commit.

    Names of requests in examples (``chatcmpl-...``, ids of 32 digits) are none.
    """
    commit = re.compile(r"(?<![\w/.#-])(?=[a-f]*[0-9])(?=[0-9]*[a-f])(?:[0-9a-f]{7,12}|[0-9a-f]{40})(?![\w-])")
    pages = [
        *ROOT.glob("*.md"),
        *(path for top in ("docs", "deploy", "tp_engine") for path in (ROOT / top).rglob("*.md")),
    ]
    named = {
        f"{path.relative_to(ROOT)}:{number}": found
        for path in pages
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (found := commit.findall(line))
    }
    assert not named


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short(page: str) -> None:
    """Oracle: the rule of the site."""
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_the_documents_are_short() -> None:
    """Oracle: the rule: what one page says the others link; a word has a letter."""
    texts = [
        (ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS if Path(name).name not in WRITTEN_BY_SCRIPTS
    ]
    written = re.compile(r"^ *```.*?^ *```$|<!-- figures of .*?<!-- end of the figures -->", re.DOTALL | re.MULTILINE)
    prose = (written.sub("", text) for text in texts)
    num_words = sum(bool(re.search("[A-Za-z]", word)) for text in prose for word in text.split())
    assert num_words <= MAX_WORDS, f"{num_words:,} words: say it once, and link it"


def test_pages_of_users_begin_with_an_example() -> None:
    """Oracle: the rule: what, one example, then options; lists that scripts write and tables of texts have none."""
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    wanted = {
        page for part in navigation for name in ("Tutorials", "Use", "Features", "Run") for page in part.get(name, ())
    }
    without = {
        page
        for page in wanted - LISTS
        if "```" not in "\n".join((ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()[:FIRST_LINES])
    }
    assert len(wanted) > 30 and sorted(without) == []


def sentence_lengths(text: str) -> list[int]:
    """The number of words of each sentence in paragraphs and lists."""
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))
    blocks = [block.strip() for block in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )|\n(?=\|)", text)]
    sentences = (
        sentence
        for block in blocks
        if block[:1] not in ("", "|", "#", "<", "!")
        for sentence in re.split(r"(?<=[.!?:;])\s+(?=[A-Z`*\[\"(])", block)
    )
    lengths = (len(re.findall(r"\S*\w\S*", sentence)) for sentence in sentences)
    return [length for length in lengths if length > 1]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    """Oracle: the rule: at most 25 words on the average of a page."""
    lengths = sentence_lengths((ROOT / page).read_text(encoding="utf-8"))
    assert sum(lengths) <= 25 * len(lengths)


@cache
def texts_of_the_program() -> str:
    """All texts in the package's code, one in a line, with a NUL for each value that is put in."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text, node.values))
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "\0"

    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tp_engine").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr)))
    return "\n".join(text(node).replace("\n", " ") for node in nodes)


def test_quoted_messages_stand_in_the_code() -> None:
    """Oracle: the texts of the program; ``...`` is any value."""
    page = re.sub(r"\n  +", " ", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    quoted = re.findall(r"^\* `([^`]+)`(?=:| \()", page, re.MULTILINE)
    assert len(quoted) >= 20
    missing = [
        message
        for message in quoted
        if not re.search("[^\n]*".join(map(re.escape, message.split("..."))), texts_of_the_program())
    ]
    assert not missing, f"docs/troubleshooting.md quotes what the program does not say: {missing}"


def test_pages_for_users_start_what_a_wheel_installs() -> None:
    """Oracle: the rule; a checkout's own starters are for developers, whose pages are below docs/design/."""
    starts = re.compile(r"scripts/serve\b|launch/\w+\.py")
    pages = [page for page in PAGES if "/design/" not in page and not page.endswith("architecture.md")]
    assert not [page for page in pages if starts.search((ROOT / page).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_to_a_file_and_a_section(document: str) -> None:
    """Oracle: the files, and the headings of those that are documents."""
    folder, wrong = (ROOT / document).parent, []
    for target in LINK.findall(without_code((ROOT / document).read_text(encoding="utf-8"))):
        path, _, anchor = target.partition("#")
        file = (folder / path).resolve() if path else ROOT / document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(target)
    assert not wrong, f"{document} has links that lead nowhere: {wrong}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_reference_to_a_document_names_one(path: Path) -> None:
    """Oracle: the files below docs/, and their headings."""
    wrong = []
    for page, section in REFERENCE.findall(re.sub(r"\s*\n[\s#*]*", " ", path.read_text(encoding="utf-8"))):
        file = ROOT / page
        if not file.is_file() or (section and not any(section.startswith(title) for title in titles(file))):
            wrong.append((page, section))
    assert not wrong, f"{path.relative_to(ROOT)} names documents or sections that do not exist: {wrong}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_a_document_names_exists(document: str) -> None:
    """Oracle: the repository."""
    text = (ROOT / document).read_text(encoding="utf-8")
    named = (set(FILE.findall(text)) | {name.rstrip("/") for name in SCRIPT.findall(text)}) - NOT_OURS
    missing = sorted(named - places())
    assert not missing, f"{document} names files that do not exist: {', '.join(missing)}"


def test_the_folder_list_is_complete() -> None:
    """Oracle: the folders of the package, and those beside it."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    house = text.split("\n## The house\n", 1)[1].split("\n## ", 1)[0]
    folders = {path.parent.name for path in (ROOT / "tp_engine").glob("*/__init__.py")} | {
        "deploy",
        "launch",
        "scripts",
        "tests",
    }
    missing = sorted(folder for folder in folders if f"{folder}/" not in house)
    assert not missing, f"the folder list of docs/architecture.md lacks {', '.join(missing)}"
