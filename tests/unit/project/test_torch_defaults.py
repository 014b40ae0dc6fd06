"""Tensors say their own types and places: what a program has set for torch as a whole decides neither."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
MAKERS = {
    "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace",
    "normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
SAID = {"dtype", "device"}
LEGACY = {"Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "LongTensor", "IntTensor"}


def silent_makers(source: str) -> list[tuple[int, str]]:
    """The lines that leave a type or a place to torch's defaults, or may, because they name a maker without a call."""
    tree, found, called = ast.parse(source), [], set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        is_partial = isinstance(node.func, ast.Name) and node.func.id == "partial" and bool(node.args)
        first = node.args[0] if is_partial else node.func
        makers = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
        given = {keyword.arg for keyword in node.keywords}
        if None in given or given >= SAID:  # all that it makes has both, or gets them from elsewhere
            called |= {id(one) for one in makers}
        if is_legacy(node.func):
            found.append((node.lineno, ast.unparse(node.func)))
    named = (node for node in ast.walk(tree) if isinstance(node, ast.expr) and is_maker(node))
    return found + [(node.lineno, ast.unparse(node)) for node in named if id(node) not in called]


def is_maker(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch" and node.attr in MAKERS


def is_legacy(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch" and node.attr in LEGACY


def test_the_search_finds_what_it_should() -> None:
    """Oracle: written cases."""
    assert silent_makers("torch.zeros(3)") and silent_makers("torch.zeros(3, dtype=d)")
    assert silent_makers("(torch.zeros if a else torch.empty)(3, dtype=d)") and silent_makers("torch.Tensor([1])")
    assert silent_makers("partial(torch.empty, dtype=d)") and silent_makers("make = torch.zeros")
    assert not silent_makers("torch.zeros(3, dtype=d, device=e)") and not silent_makers("torch.zeros(3, **kept)")


def test_no_tensor_is_left_to_the_defaults() -> None:
    """Oracle: the sources: each maker of a tensor names its dtype and its device."""
    found = {}
    for path in sorted((ROOT / "tp_engine").rglob("*.py")):
        if lines := silent_makers(path.read_text(encoding="utf-8")):
            found[str(path.relative_to(ROOT))] = lines
    assert not found, f"name dtype and device: {found}"
