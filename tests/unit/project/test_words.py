"""The words of the package: the field's names, and docstrings that say what a function does."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODULES = sorted((ROOT / "tp_engine").rglob("*.py"))
DOCUMENTS = [
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]

# Words of an earlier dialect -> what vLLM, SGLang and PyTorch say.
REFUSED = {
    "guess": "draft token, propose",
    "guesses": "draft tokens",
    "guessed": "drafted",
    "guessing": "drafting",
    "lane": "draft row; simd_width for vectors",
    "lanes": "draft rows; simd_width for vectors",
    "obey": "execute_command",
    "hurry": "load_now",
    "blame": "record_failure",
    "blamed": "failed",
    "upkeep": "the writer's name",
}
# Processors and GPUs have lanes: vectors of C and programs of Triton.
WITH_LANES = re.compile(r"tp_engine/cpu/|_triton\.py$")

# With these a docstring describes a value, where it should say what the function does: Return ..., Note that ...
NO_VERBS = {
    "of",
    "for",
    "with",
    "what",
    "which",
    "how",
    "whether",
    "see",
    "as",
    "where",
    "why",
    "when",
    "the",
    "a",
    "an",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def words_in(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower()))


def found_in(path: Path) -> set[str]:
    found = words_in(path.read_text(encoding="utf-8")) & REFUSED.keys()
    return found - {"lane", "lanes"} if WITH_LANES.search(name_of(path)) else found


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in MODULES} | {ROOT / "docs", ROOT / "docs" / "design"}), ids=name_of
)
def test_the_fields_words(folder: Path) -> None:
    """Oracle: the table above."""
    files = [path for path in (*MODULES, *DOCUMENTS) if path.parent == folder]
    found = {name_of(path): {word: REFUSED[word] for word in words} for path in files if (words := found_in(path))}
    assert not found, f"words that have a name in this field already: {found}"


def public_functions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of functions and methods that others call, but for properties and programs of GPUs."""
    for scope in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(scope, ast.Module | ast.ClassDef):
            continue
        for node in scope.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                continue
            is_value = any("property" in ast.unparse(one) for one in node.decorator_list)
            if (text := ast.get_docstring(node)) and not is_value and not node.name.endswith("_kernel"):
                yield f"{name_of(path)}:{node.lineno} {node.name}", text


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_docstrings_of_functions_begin_with_a_verb(path: Path) -> None:
    """Oracle: the first word; "See what comes" is a verb, "See ``X``" is not."""
    wrong = [
        name
        for name, text in public_functions(path)
        if (first := re.split(r"[ \n,;:]", text)[0].lower()) in NO_VERBS
        and not (first == "see" and "``" not in text[:7])
    ]
    assert not wrong, f"docstrings that do not say what the function does: {wrong}"
