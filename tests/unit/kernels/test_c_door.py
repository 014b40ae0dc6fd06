"""What compiled kernels are given: a tensor of another type, elsewhere, or too small is an error, not a crash."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tp_engine.cpu import ops
from tp_engine.cpu.extents import EXTENTS
from tp_engine.cpu.library import native_library
from tp_engine.cpu.prototypes import prototypes
from tp_engine.cpu.tape import Tape, recording
from tp_engine.kernels.steps.decode_inputs import DecodeInputs, RowTables

LIBRARY = native_library()
compiled = pytest.mark.skipif(LIBRARY is None, reason="the native kernels cannot be built here")


def test_every_pointer_of_a_taped_function_has_an_extent() -> None:
    """Oracle: the prototypes in the C sources; a pointer to a description of other memory has none."""
    taped = {one.name: one for one in prototypes() if one.is_taped}
    assert set(taped) == set(EXTENTS), "each needs a row in tp_engine/cpu/extents.py"
    plain = ("char", "void", "float", "int32_t", "int64_t")
    for name, prototype in taped.items():
        pointers = {one for one, item in zip(prototype.names, prototype.items, strict=True) if item in plain}
        assert name == "paged_attention" or set(EXTENTS[name]) == pointers, name


def tables_and_inputs(**changes: Any) -> tuple[RowTables, DecodeInputs]:
    """A decode step's tables of four rows, and its inputs, of which some fields are changed."""
    tables = RowTables(
        token_ids=torch.zeros(4, 16, dtype=torch.int32),
        num_computed=torch.ones(4, dtype=torch.int32),
        block_table=torch.zeros(1, 4, 4, dtype=torch.int32),
        block_size=4,
    )
    inputs = DecodeInputs.allocate(4, tables)
    for name, value in changes.items():
        object.__setattr__(inputs, name, value)
    return tables, inputs


PLANTED = {
    "rows of int64": ({"rows": torch.zeros(4, dtype=torch.int64)}, TypeError, "torch.int32"),
    "positions of float32": ({"positions": torch.zeros(4)}, TypeError, "torch.int64"),
    "lengths elsewhere": ({"seq_lens": torch.zeros(4, dtype=torch.int32, device="meta")}, TypeError, "on meta"),
    "few ids": ({"input_ids": torch.zeros(3, dtype=torch.int32)}, ValueError, "input_ids.*for 3 .* touch 4"),
    "a short table": ({"block_table": torch.zeros(1, 2, 4, dtype=torch.int32)}, ValueError, "block_table.*for 8 .*16"),
    "the end of a tensor": ({"positions": torch.zeros(9, dtype=torch.int64)[6:]}, ValueError, "positions.*for 3 .*4"),
}  # fmt: skip


@compiled
@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_input_of_a_tape_is_named(planted: str) -> None:
    """Oracle: the written cases; the right inputs are taken."""
    assert LIBRARY is not None
    with recording(Tape(LIBRARY)):
        ops.prepare_decodes(LIBRARY, *tables_and_inputs())
        changes, kind, words = PLANTED[planted]
        with pytest.raises(kind, match=f"prepare_decodes.*{words}"):
            ops.prepare_decodes(LIBRARY, *tables_and_inputs(**changes))


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_default_that_slips_through_is_an_error(dtype: torch.dtype) -> None:
    """Oracle: a tensor of the default type, where C reads float32; also without a tape."""
    assert LIBRARY is not None
    x, out = torch.zeros(2, 8), torch.empty(2, 2, dtype=dtype)
    with pytest.raises(TypeError, match=f"group_squares.*torch.float32.*{dtype}"):
        LIBRARY.group_squares(x, out, 2, 2, 4)
    with recording(Tape(LIBRARY)), pytest.raises(TypeError, match="norm_rows: weight is of"):
        LIBRARY.norm_rows(x, None, x[0].to(dtype), x.clone(), 2, 8, 8, 1e-5, 0.0, 1.0, 1.0, 0, x.dtype)


@compiled
def test_numbers_and_addresses_pass() -> None:
    """Oracle: arguments that are no tensors are the caller's affair."""
    assert LIBRARY is not None
    x = torch.arange(8, dtype=torch.float32).view(2, 4)
    out = torch.empty(2, 1)
    LIBRARY.group_squares(ctypes.c_void_p(x.data_ptr()), out, 2, 1, 4)
    assert torch.equal(out, x.square().sum(1, keepdim=True))
