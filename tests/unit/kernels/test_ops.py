"""The table of operations: which implementation runs, and which operations a recorded step may hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from tp_engine.cpu.library import native_library
from tp_engine.kernels import ops
from tp_engine.kernels.ops import OPS, Op, has_triton, implementation, is_recordable, op

WITHOUT_C = [name for name, entry in OPS.items() if entry.native is None]
needs_native = pytest.mark.skipif(native_library() is None, reason="the native kernels cannot be built here")


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    """No choice of implementation remains from before, in this test and after it."""
    for chosen in (op, is_recordable):
        chosen.cache_clear()
    yield
    for chosen in (op, is_recordable):
        chosen.cache_clear()


@pytest.mark.parametrize("name", OPS)
def test_every_implementation_can_be_had(name: str) -> None:
    """Oracle: the table itself: each name in it is a function."""
    entry = OPS[name]
    assert implementation(name, "twin") is entry.twin
    if entry.native is not None and native_library() is not None:
        assert callable(implementation(name, "native"))
    if entry.triton is not None and has_triton():
        assert callable(implementation(name, "triton"))


def test_every_operation_has_a_test() -> None:
    """Oracle: the words of the unit tests and of the kernels' cases."""
    texts = (path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("*.py"))
    assert sorted(OPS.keys() - set(re.findall(r"\w+", " ".join(texts)))) == []


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_the_decorator_of_kernels_is_that_of_triton() -> None:
    """Oracle: ``triton.jit`` itself, which reads the source of the function that it is given."""
    import triton

    from tp_engine.kernels.jit import jit

    assert jit is triton.jit


@needs_native
@pytest.mark.usefixtures("fresh_choice")
def test_what_c_does_not_have_falls_back_alone() -> None:
    """Oracle: the twin of the one operation without C; the others stay in C, and only that one cannot be recorded."""
    with patch.dict(OPS, {"gate": Op(OPS["gate"].twin, OPS["gate"].triton)}):
        assert op("gate", "cpu") is OPS["gate"].twin
        assert op("norm", "cpu") is not OPS["norm"].twin
        assert [name for name in OPS if not is_recordable(name, "cpu")] == ["gate", *WITHOUT_C]
    with (
        pytest.raises(AssertionError, match="nothing has no implementation of the kind native"),
        patch.dict(OPS, {"nothing": Op(OPS["gate"].twin)}),
    ):
        implementation("nothing", "native")


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize("is_installed", [False, True])
def test_the_kind_on_a_gpu(is_installed: bool) -> None:
    """Oracle: Triton's where it is installed and has one, otherwise the twin; a CUDA graph holds either."""
    with patch.object(ops, "has_triton", lambda: is_installed):
        for name, entry in OPS.items():
            expected = "triton" if is_installed and entry.triton is not None else "twin"
            assert ops.kind_of(name, "cuda") == expected
            assert is_recordable(name, "cuda")


@pytest.mark.usefixtures("fresh_choice")
def test_without_a_library_nothing_is_recorded() -> None:
    """Oracle: twins, on CPUs and on devices that are neither CPU nor CUDA."""
    with patch.object(ops, "native_library", lambda: None):
        assert all(op(name, "cpu") is entry.twin for name, entry in OPS.items())
        assert not any(is_recordable(name, "cpu") for name in OPS)
    assert all(ops.kind_of(name, "meta") == "twin" for name in OPS)


@needs_native
def test_all_operations_are_recordable_on_cpus() -> None:
    """Oracle: every operation has C, so any model decodes from tapes; the native attention stores K/V by itself, rows
    are codes, and steps with prompts padded, on GPUs only, and prompts are looked up behind the recorded step."""
    assert [name for name in OPS if not is_recordable(name, "cpu")] == WITHOUT_C
