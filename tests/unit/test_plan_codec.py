"""Plans as bytes: exact both ways, fixed for ever (golden bytes), and refused when a single bit is wrong."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tp_engine.errors import PlanError
from tp_engine.ipc.plan_codec import decode_plan, encode_plan
from tp_engine.plan import Admission, Control, RowSampling, StepPlan

INT32 = st.integers(-(2**31), 2**31 - 1)
COUNT = st.integers(0, 2**31 - 1)
FLOAT = st.floats(allow_nan=False)


def ids(size: st.SearchStrategy[int] | int) -> st.SearchStrategy[Any]:
    return arrays.arrays(np.int32, size, elements=INT32)


@st.composite
def samplings(draw: st.DrawFn) -> RowSampling:
    num_bias = draw(st.integers(0, 5))
    return RowSampling(
        temperature=draw(FLOAT),
        top_k=draw(INT32),
        top_p=draw(FLOAT),
        min_p=draw(FLOAT),
        presence_penalty=draw(FLOAT),
        frequency_penalty=draw(FLOAT),
        repetition_penalty=draw(FLOAT),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        logprobs=draw(INT32),
        prompt_logprobs=draw(INT32),
        min_tokens=draw(COUNT),
        stop_token_ids=draw(ids(st.integers(0, 5))),
        bias_token_ids=draw(ids(num_bias)),
        bias_values=draw(arrays.arrays(np.float32, num_bias, elements=st.floats(width=32, allow_nan=False))),
        allowed_token_ids=draw(ids(st.integers(0, 5))),
    )


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    num_blocks, num_prefills = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    num_masks, num_words = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    admission = st.builds(
        Admission,
        row=COUNT,
        token_ids=ids(st.integers(0, 40)),
        num_prompt_tokens=COUNT,
        num_computed_tokens=COUNT,
        block_ids=ids(st.integers(0, 9)),
        sampling=samplings(),
    )
    return StepPlan(
        step_id=draw(st.integers(0, 2**63 - 1)),
        control=Control(draw(st.integers(0, 15))),
        released=draw(ids(st.integers(0, 9))),
        admitted=tuple(draw(st.lists(admission, max_size=3))),
        block_rows=draw(ids(num_blocks)),
        block_ids=draw(ids(num_blocks)),
        copies=draw(arrays.arrays(np.int32, st.tuples(st.integers(0, 4), st.just(2)), elements=INT32)),
        decode_rows=draw(ids(st.integers(0, 20))),
        prefill_rows=draw(ids(num_prefills)),
        prefill_tokens=draw(ids(num_prefills)),
        prefill_samples=draw(arrays.arrays(np.bool_, num_prefills)),
        mask_rows=draw(ids(num_masks)),
        masks=draw(arrays.arrays(np.int32, (num_masks, num_words if num_masks else 0), elements=INT32)),
    )


def assert_equal(left: Any, right: Any) -> None:
    """Equality of plans, field by field; arrays with their dtypes and shapes."""
    assert type(left) is type(right)
    if isinstance(left, msgspec.Struct):
        for name in left.__struct_fields__:
            assert_equal(getattr(left, name), getattr(right, name))
    elif isinstance(left, tuple):
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert (left == right).all()
    else:
        assert left == right


def int32(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def small_plan() -> StepPlan:
    """One of everything."""
    sampling = RowSampling(
        temperature=0.5,
        top_k=40,
        seed=-2,
        logprobs=3,
        stop_token_ids=int32(151645),
        bias_token_ids=int32(9),
        bias_values=np.array([-1.5], dtype=np.float32),
    )
    admission = Admission(
        row=3,
        token_ids=int32(11, 12, 13),
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_ids=int32(7),
        sampling=sampling,
    )
    return StepPlan(
        step_id=42,
        control=Control.DRAIN,
        released=int32(2),
        admitted=(admission,),
        block_rows=int32(0),
        block_ids=int32(8),
        copies=int32(5, 6).reshape(1, 2),
        decode_rows=int32(0, 1),
        prefill_rows=int32(3),
        prefill_tokens=int32(3),
        prefill_samples=np.array([True]),
    )


def resealed(data: bytes) -> bytes:
    """The same bytes with the checksum that they should have."""
    return data[:8] + xxhash.xxh3_64_intdigest(data[16:]).to_bytes(8, "little") + data[16:]


GOLDEN = (
    "5450535002000000e7a85dee8ec24f86e8000000020000002a0000000000000001000000010000000100000002000000"
    "010000000100000002000000000000000800000005000000060000000000000001000000030000000300000001000000"
    "0300000003000000000000000300000001000000010000000100000000000000000000000000e03f000000000000f03f"
    "000000000000000000000000000000000000000000000000000000000000f03ffeffffffffffffff2800000003000000"
    "ffffffff000000000b0000000c0000000d000000070000005d500200090000000000c0bf00000000"
)


@settings(max_examples=300, deadline=None)
@given(plans())
def test_round_trip(plan: StepPlan) -> None:
    """Oracle: the plan itself, whatever kind of buffer it comes back in."""
    data = encode_plan(plan)
    assert len(data) % 8 == 0
    for buffer in (data, bytearray(data), memoryview(data)):
        assert_equal(decode_plan(buffer), plan)


@settings(max_examples=200, deadline=None)
@given(plans())
def test_rows_that_are_repeated(plan: StepPlan) -> None:
    """Oracle: the plan itself, with the very array of the plan before, in as many bytes less as its rows take."""
    data = encode_plan(plan, repeats_rows=True)
    decoded = decode_plan(data, plan.decode_rows)
    assert_equal(decoded, plan)
    assert decoded.decode_rows is plan.decode_rows
    assert 0 <= len(encode_plan(plan)) - len(data) - 4 * len(plan.decode_rows) + 4 <= 8
    with pytest.raises(PlanError, match="were in the last one"):
        decode_plan(data, np.zeros(len(plan.decode_rows) + 1, dtype=np.int32))


def test_golden_bytes() -> None:
    """Oracle: bytes written down when version 2 was defined; a change of them is a change of version."""
    assert encode_plan(small_plan()).hex() == GOLDEN
    assert_equal(decode_plan(bytes.fromhex(GOLDEN)), small_plan())


def test_every_flipped_byte_is_seen() -> None:
    """Oracle: each single byte of a plan, with one bit and with all bits flipped, makes it invalid."""
    data = encode_plan(small_plan())
    for position in range(len(data)):
        for mask in (1, 255):
            flipped = bytearray(data)
            flipped[position] ^= mask
            with pytest.raises(PlanError):
                decode_plan(flipped)


def test_every_truncation_and_extension_is_seen() -> None:
    """Oracle: the error gives the length in the plan and the length received."""
    data = encode_plan(small_plan())
    for size in range(len(data)):
        with pytest.raises(PlanError, match=f"{size} received"):
            decode_plan(data[:size])
    with pytest.raises(PlanError, match=f"says {len(data)} bytes, {len(data) + 8} received"):
        decode_plan(data + bytes(8))


def test_errors_give_both_values() -> None:
    """Oracle: for each check of the envelope, what it must be and what it is."""
    data = encode_plan(small_plan())
    with pytest.raises(PlanError, match=r"must be b'TPSP', received b'JUNK'"):
        decode_plan(b"JUNK" + data[4:])
    with pytest.raises(PlanError, match=r"must be 2, received 1"):
        decode_plan(data[:4] + struct.pack("<I", 1) + data[8:])
    wrong = xxhash.xxh3_64_intdigest(data[16:]) ^ 1
    with pytest.raises(PlanError, match=rf"says {wrong:#018x}, its bytes give {wrong ^ 1:#018x}"):
        decode_plan(data[:8] + struct.pack("<Q", wrong) + data[16:])


@settings(max_examples=200, deadline=None)
@given(offset=st.integers(32, 55), value=st.integers(0, 255), plan=plans())
def test_wrong_counts_never_read_past_the_end(offset: int, value: int, plan: StepPlan) -> None:
    """Oracle: with any byte of the counts changed and a checksum that fits, a PlanError or another whole plan."""
    data = bytearray(encode_plan(plan))
    data[offset] = value
    try:
        decode_plan(resealed(bytes(data)))
    except PlanError as error:
        assert "malformed" in str(error)


@pytest.mark.parametrize("offset", range(12, 32, 4))
def test_wrong_counts_of_an_admission_are_seen(offset: int) -> None:
    """Oracle: each of an admission's five counts made huge, with a checksum that fits, is a malformed plan."""
    empty = Admission(
        row=0,
        token_ids=int32(),
        num_prompt_tokens=0,
        num_computed_tokens=0,
        block_ids=int32(),
        sampling=RowSampling(),
    )
    data = bytearray(encode_plan(StepPlan(step_id=0, admitted=(empty,))))
    struct.pack_into("<I", data, 56 + offset, 2**31)
    with pytest.raises(PlanError, match="malformed"):
        decode_plan(resealed(bytes(data)))


def test_masks_are_a_section_of_their_own() -> None:
    """Oracle: the drawing in ``plan_codec``: 8 + 4 + 12 bytes between the plan's samples and its admission."""
    plain = small_plan()
    masked = msgspec.structs.replace(plain, mask_rows=int32(1), masks=int32(-1, 7, 9).reshape(1, 3))
    before, after = bytes(encode_plan(plain)), bytes(encode_plan(masked))
    start = 96  # header, nine numbers, a sample, zeros
    section = np.array([1, 3, 1, -1, 7, 9], dtype="<i4").tobytes()
    assert after[56:start] + after[start + len(section) :] == before[56:]
    assert after[start : start + len(section)] == section
    assert_equal(decode_plan(after), masked)
    with pytest.raises(PlanError, match="masks end at byte"):
        decode_plan(resealed(after[:start] + b"\xff" + after[start + 1 :]))


def test_wrong_dtypes_are_our_own_fault() -> None:
    """Oracle: int64 ids would lose bits, so encoding refuses them."""
    with pytest.raises(TypeError):
        encode_plan(StepPlan(step_id=0, decode_rows=np.arange(3, dtype=np.int64)))  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        encode_plan(StepPlan(step_id=0, block_rows=int32(1)))


def test_arrays_received_are_writable_views() -> None:
    """Oracle: numpy's flags; torch.from_numpy warns for read-only memory, and a copy would cost time."""
    buffer = bytearray(encode_plan(small_plan()))
    plan = decode_plan(buffer)
    assert plan.decode_rows.flags.writeable
    assert np.shares_memory(plan.decode_rows, np.frombuffer(buffer, np.uint8))


def test_a_steady_decode_is_small() -> None:
    """Oracle: a header, three columns of 256, 16 and 16 ids; how quick it is, scripts/bench_control_plane.py shows."""
    plan = StepPlan(
        step_id=9,
        block_rows=np.arange(16, dtype=np.int32),
        block_ids=np.arange(100, 116, dtype=np.int32),
        decode_rows=np.arange(256, dtype=np.int32),
    )
    assert (len(encode_plan(plan)), len(encode_plan(plan, repeats_rows=True))) == (1208, 184)
