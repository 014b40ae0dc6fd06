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
    """Half of them only decode, which has a fast way of its own."""
    num_blocks, num_prefills, num_groups = draw(st.integers(0, 9)), draw(st.integers(0, 9)), draw(st.integers(1, 8))
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
    decodes = StepPlan(
        step_id=draw(st.integers(0, 2**63 - 1)),
        block_rows=draw(ids(num_blocks)),
        block_ids=draw(ids(num_blocks * num_groups)),
        decode_rows=draw(ids(st.integers(0, 20))),
    )
    if draw(st.booleans()):
        return decodes
    return msgspec.structs.replace(
        decodes,
        control=Control(draw(st.integers(0, 15))),
        released=draw(ids(st.integers(0, 9))),
        admitted=tuple(draw(st.lists(admission, max_size=3))),
        copies=draw(arrays.arrays(np.int32, st.tuples(st.integers(0, 4), st.just(2)), elements=INT32)),
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


def small_plan_of_three_groups() -> StepPlan:
    """One of everything, each logical block of three groups."""
    plain = small_plan()
    admission = msgspec.structs.replace(plain.admitted[0], block_ids=int32(7, 8, 9))
    return msgspec.structs.replace(
        plain,
        admitted=(admission,),
        block_rows=int32(0, 0),
        block_ids=int32(10, 11, 12, 13, 14, 15),
        copies=int32(5, 6, 3, 4, 1, 2).reshape(3, 2),
    )


SMALL_PLANS = pytest.mark.parametrize("plan", [small_plan(), small_plan_of_three_groups()], ids=["one", "three"])


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


GOLDEN_OF_THREE_GROUPS = (
    "54505350020000009d13cb406918522a18010000020000022a0000000000000001000000020000000300000002000000"
    "01000000010000000200000000000000000000000a0000000b0000000c0000000d0000000e0000000f00000005000000"
    "060000000300000004000000010000000200000000000000010000000300000003000000010000000300000003000000"
    "000000000300000003000000010000000100000000000000000000000000e03f000000000000f03f0000000000000000"
    "00000000000000000000000000000000000000000000f03ffeffffffffffffff2800000003000000ffffffff00000000"
    "0b0000000c0000000d0000000700000008000000090000005d500200090000000000c0bf00000000"
)
GOLDEN_STEADY_OF_TWO_GROUPS = (
    "54505350020000009ba80df151aa740f48000000000000412a0000000000000000000000010000000000000002000000"
    "000000000000000001000000070000000800000000000000"
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


def test_golden_bytes_of_groups() -> None:
    """Oracle: bytes written down when plans got groups: those of the drawing, G - 1 in the last byte of control."""
    plan = small_plan_of_three_groups()
    assert encode_plan(plan).hex() == GOLDEN_OF_THREE_GROUPS
    assert_equal(decode_plan(bytes.fromhex(GOLDEN_OF_THREE_GROUPS)), plan)
    steady = StepPlan(step_id=42, block_rows=int32(1), block_ids=int32(7, 8), decode_rows=int32(0, 1))
    data = encode_plan(steady, repeats_rows=True)
    assert data.hex() == GOLDEN_STEADY_OF_TWO_GROUPS
    assert_equal(decode_plan(data, steady.decode_rows), steady)


def test_groups_without_blocks_are_malformed() -> None:
    """Oracle: ``encode_plan`` never says so; in a plan that only decodes and in one of everything."""
    for plan in (StepPlan(step_id=1, decode_rows=int32(0)), StepPlan(step_id=1, released=int32(3))):
        data = bytearray(encode_plan(plan))
        data[23] |= 3
        with pytest.raises(PlanError, match="malformed step plan: it says 4 groups of layers, and has no new blocks"):
            decode_plan(resealed(bytes(data)))


@settings(max_examples=200, deadline=None)
@given(value=st.integers(0, 7), plan=plans())
def test_a_wrong_number_of_groups_never_reads_past_the_end(value: int, plan: StepPlan) -> None:
    """Oracle: with the groups changed and a checksum that fits, a PlanError or another whole plan."""
    data = bytearray(encode_plan(plan))
    data[23] = data[23] & 0xF8 | value
    try:
        decode_plan(resealed(bytes(data)))
    except PlanError as error:
        assert "malformed" in str(error)


@SMALL_PLANS
def test_every_flipped_byte_is_seen(plan: StepPlan) -> None:
    """Oracle: each single byte of a plan, with one bit and with all bits flipped, makes it invalid."""
    data = encode_plan(plan)
    for position in range(len(data)):
        for mask in (1, 255):
            flipped = bytearray(data)
            flipped[position] ^= mask
            with pytest.raises(PlanError):
                decode_plan(flipped)


@SMALL_PLANS
def test_every_truncation_and_extension_is_seen(plan: StepPlan) -> None:
    """Oracle: the error gives the length in the plan and the length received."""
    data = encode_plan(plan)
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
    for block_rows, block_ids in ((int32(1), int32()), (int32(1, 2), int32(1, 2, 3)), (int32(), int32(1))):
        with pytest.raises(AssertionError, match=f"{len(block_ids)} ids for {len(block_rows)} new blocks"):
            encode_plan(StepPlan(step_id=0, block_rows=block_rows, block_ids=block_ids))


def test_arrays_received_are_writable_views() -> None:
    """Oracle: numpy's flags; torch.from_numpy warns for read-only memory, and a copy would cost time."""
    buffer = bytearray(encode_plan(small_plan()))
    plan = decode_plan(buffer)
    assert plan.decode_rows.flags.writeable
    assert np.shares_memory(plan.decode_rows, np.frombuffer(buffer, np.uint8))


def test_a_steady_decode_is_small() -> None:
    """Oracle: a header, three columns of 256, 16 and 16 ids; 16 more for a second group.  How quick it is,
    scripts/bench_control_plane.py shows."""
    plan = StepPlan(
        step_id=9,
        block_rows=np.arange(16, dtype=np.int32),
        block_ids=np.arange(100, 116, dtype=np.int32),
        decode_rows=np.arange(256, dtype=np.int32),
    )
    assert (len(encode_plan(plan)), len(encode_plan(plan, repeats_rows=True))) == (1208, 184)
    of_two = msgspec.structs.replace(plan, block_ids=np.arange(100, 132, dtype=np.int32))
    assert (len(encode_plan(of_two)), len(encode_plan(of_two, repeats_rows=True))) == (1272, 248)
