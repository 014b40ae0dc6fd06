"""Plans as bytes: exact both ways, in a fixed format (golden bytes), and refused when a single bit is wrong."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tp_engine.errors import PlanError
from tp_engine.features.registry import plan_sections
from tp_engine.features.speculation.feature import BASE_ROWS, DRAFT_TOKENS, KEPT_ROWS, KEPT_TOKENS, NUM_DRAFTS
from tp_engine.features.structured_output.feature import MASK_ROWS, MASKS
from tp_engine.features.tiers.feature import DISK_READS, DISK_WRITES, LOADS, STORES, WAIT_LOAD
from tp_engine.ipc.plan_codec import PlanCodec, decode_plan, encode_plan
from tp_engine.ipc.plan_sections import SECTIONS, ArraySection
from tp_engine.plan import NO_PAIRS, Admission, Control, IntArray, RowSampling, StepPlan

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
        pools=draw(INT32),
        stop_token_ids=draw(ids(st.integers(0, 5))),
        bias_token_ids=draw(ids(num_bias)),
        bias_values=draw(arrays.arrays(np.float32, num_bias, elements=st.floats(width=32, allow_nan=False))),
        allowed_token_ids=draw(ids(st.integers(0, 5))),
        pooled_token_ids=draw(ids(st.integers(0, 5))),
    )


@st.composite
def feature_sections(draw: st.DrawFn) -> dict[str, Any]:
    """Sections of features, some of them empty, in any order; a plan has those that it is given."""
    pairs = arrays.arrays(np.int32, st.tuples(st.integers(0, 4), st.just(2)), elements=INT32)
    sections = [(one.name, pairs) for one in (STORES, LOADS, DISK_READS, DISK_WRITES)]
    sections += [(one.name, ids(st.integers(0, 6))) for one in (BASE_ROWS, DRAFT_TOKENS, KEPT_ROWS, KEPT_TOKENS)]
    numbers = [(one.name, st.integers(1, 2**63 - 1)) for one in (WAIT_LOAD, NUM_DRAFTS)]
    chosen = draw(st.lists(st.sampled_from([*sections, *numbers]), unique_by=str))
    return {name: draw(values) for name, values in chosen}


@st.composite
def step_masks(draw: st.DrawFn) -> dict[str, Any]:
    """Masks of up to three rows, each of up to five words."""
    num_rows, num_words = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    masks = arrays.arrays(np.int32, (num_rows, num_words), elements=INT32)
    return {MASK_ROWS.name: draw(ids(num_rows)), MASKS.name: draw(masks)} if num_rows else {}


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Random plans; half of them only decode, as most real plans do."""
    num_blocks, num_prefills, num_groups = draw(st.integers(0, 9)), draw(st.integers(0, 9)), draw(st.integers(1, 8))
    num_decodes, epoch = draw(st.integers(0, 20)), draw(st.integers(1, 2**63 - 1))
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
        rows_epoch=epoch if num_decodes else 0,
        block_rows=draw(ids(num_blocks)),
        block_ids=draw(ids(num_blocks * num_groups)),
        decode_rows=draw(ids(num_decodes)),
    )
    if draw(st.booleans()):
        return decodes
    return msgspec.structs.replace(
        decodes,
        control=Control(draw(st.integers(0, 1))),
        released=draw(ids(st.integers(0, 9))),
        admitted=tuple(draw(st.lists(admission, max_size=3))),
        copies=draw(arrays.arrays(np.int32, st.tuples(st.integers(0, 4), st.just(2)), elements=INT32)),
        prefill_rows=draw(ids(num_prefills)),
        prefill_tokens=draw(ids(num_prefills)),
        prefill_samples=draw(arrays.arrays(np.bool_, num_prefills)),
        state_copies=draw(arrays.arrays(np.int32, st.tuples(st.integers(0, 4), st.just(2)), elements=INT32)),
        images=draw(arrays.arrays(np.int32, st.tuples(st.integers(0, 3), st.just(5)), elements=INT32)),
        encodes=draw(arrays.arrays(np.int32, st.tuples(st.integers(0, 3), st.just(12)), elements=INT32)),
        image_rows=draw(arrays.arrays(np.int32, st.tuples(st.integers(0, 3), st.just(3)), elements=INT32)),
        order=draw(st.binary(max_size=40)),
        extensions=draw(feature_sections()) | draw(step_masks()),
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
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for name in left:
            assert_equal(left[name], right[name])
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert (left == right).all()
    else:
        assert left == right


def int32(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def small_plan() -> StepPlan:
    """A plan with one of everything."""
    sampling = RowSampling(
        temperature=0.5,
        top_k=40,
        seed=-2,
        logprobs=3,
        stop_token_ids=int32(151645),
        bias_token_ids=int32(9),
        bias_values=np.array([-1.5], dtype=np.float32),
        pools=1,
        pooled_token_ids=int32(17, 18),
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
        rows_epoch=7,
        control=Control.STOP,
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
    """A plan with one of everything; each logical block belongs to three groups."""
    plain = small_plan()
    admission = msgspec.structs.replace(plain.admitted[0], block_ids=int32(7, 8, 9))
    return msgspec.structs.replace(
        plain,
        admitted=(admission,),
        block_rows=int32(0, 0),
        block_ids=int32(10, 11, 12, 13, 14, 15),
        copies=int32(5, 6, 3, 4, 1, 2).reshape(3, 2),
    )


def moving(plan: StepPlan) -> StepPlan:
    """A plan with two stores and a load of the host tier besides, a read and a write of the disk tier, that waits for
    batch 5 of the moves."""
    stores, loads = int32(8, 1, 9, 2).reshape(2, 2), int32(3, 7).reshape(1, 2)
    reads, writes = int32(40, 3).reshape(1, 2), int32(4, 41).reshape(1, 2)
    pairs = {STORES: stores, LOADS: loads, DISK_READS: reads, DISK_WRITES: writes}
    return plan.extended({section.name: value for section, value in pairs.items()} | {WAIT_LOAD.name: 5})


def with_states(plan: StepPlan) -> StepPlan:
    """A plan with two state copies besides."""
    return msgspec.structs.replace(plan, state_copies=int32(1, 4, 1, 5).reshape(2, 2))


SMALL_PLANS = pytest.mark.parametrize(
    "plan",
    [small_plan(), small_plan_of_three_groups(), moving(small_plan()), with_states(small_plan())],
    ids=["one", "three", "moving", "states"],
)


GOLDEN = (
    "54505350120000005750c47e22b56e7c30010000010000002a000000000000000700000000000000ff01000004000000"
    "040000000400000008000000080000000400000004000000010000009c00000002000000000000000000000000000000"
    "080000000000000005000000060000000000000001000000030000000000000003000000000000000100000000000000"
    "01000000030000000300000000000000000000000000e03f000000000000f03f00000000000000000000000000000000"
    "0000000000000000000000000000f03ffeffffffffffffff2800000003000000ffffffff000000000100000003000000"
    "0100000001000000010000000000000001000000020000000b0000000c0000000d000000070000005d50020009000000"
    "0000c0bf110000001200000000000000"
)


GOLDEN_OF_THREE_GROUPS = (
    "5450535012000000d1288d7cccef09ca58010000010000002a000000000000000700000000000000ff01000004000000"
    "08000000180000001800000008000000040000000400000001000000a400000002000000000000000000000000000000"
    "0a0000000b0000000c0000000d0000000e0000000f000000050000000600000003000000040000000100000002000000"
    "000000000100000003000000000000000300000000000000010000000000000001000000030000000300000000000000"
    "000000000000e03f000000000000f03f000000000000000000000000000000000000000000000000000000000000f03f"
    "feffffffffffffff2800000003000000ffffffff00000000010000000300000003000000010000000100000000000000"
    "01000000020000000b0000000c0000000d0000000700000008000000090000005d500200090000000000c0bf11000000"
    "1200000000000000"
)
GOLDEN_STEADY_OF_TWO_GROUPS = (
    "5450535012000000161031f66ff0df0848000000000000002a0000000000000007000000000000000600000004000000"
    "080000000000000001000000000000000700000008000000"
)


@settings(max_examples=300, deadline=None)
@given(plans())
def test_round_trip(plan: StepPlan) -> None:
    """Oracle: the plan itself, from any kind of buffer."""
    data = encode_plan(plan)
    assert len(data) % 8 == 0
    for buffer in (data, bytearray(data), memoryview(data)):
        assert_equal(decode_plan(buffer), plan)


@settings(max_examples=200, deadline=None)
@given(plans())
def test_rows_that_are_known(plan: StepPlan) -> None:
    """Oracle: the plan itself, with the very array that the reader knows; its bytes are fewer by those of its rows."""
    assume(plan.rows_epoch)
    data = encode_plan(plan, plan.rows_epoch)
    decoded = decode_plan(data, plan.rows_epoch, plan.decode_rows)
    assert_equal(decoded, plan)
    assert decoded.decode_rows is plan.decode_rows
    assert 0 <= len(encode_plan(plan)) - len(data) - 4 * len(plan.decode_rows) + 4 <= 16
    with pytest.raises(PlanError, match=f"rows of epoch {plan.rows_epoch}, the last known ones are of epoch 0"):
        decode_plan(data)


def test_rows_without_an_epoch_are_always_sent() -> None:
    """Oracle: epoch 0 means no set of rows; a plan whose epoch is not the known one has its own rows."""
    for epoch, known in ((0, 0), (0, 5), (6, 5)):
        plan = StepPlan(step_id=1, rows_epoch=epoch, decode_rows=int32(4, 5))
        data = encode_plan(plan, known)
        assert data == encode_plan(plan)
        assert_equal(decode_plan(data), plan)


class WiderPlan(StepPlan, frozen=True, kw_only=True, gc=False):
    """A plan with one section more."""

    shards: IntArray = NO_PAIRS


def test_a_new_section_is_a_field_and_a_line() -> None:
    """Oracle: a plan with a new section; without that section, its bytes are those of today."""
    codec = PlanCodec((*SECTIONS, ArraySection("shards", columns=2)), WiderPlan)
    fields = msgspec.structs.asdict(small_plan())
    plan = WiderPlan(**fields, shards=int32(1, 2, 3, 4).reshape(2, 2))
    data = codec.encode(plan)
    assert_equal(codec.decode(data), plan)
    assert codec.encode(WiderPlan(**fields)) == encode_plan(small_plan())


def test_golden_bytes() -> None:
    """Oracle: bytes written down when version 18 was defined; if they change, the version must change."""
    assert encode_plan(small_plan()).hex() == GOLDEN
    assert_equal(decode_plan(bytes.fromhex(GOLDEN)), small_plan())


def test_golden_bytes_of_groups() -> None:
    """Oracle: bytes written down when version 18 was defined: as in the drawing, with G ids for each new block."""
    plan = small_plan_of_three_groups()
    assert encode_plan(plan).hex() == GOLDEN_OF_THREE_GROUPS
    assert_equal(decode_plan(bytes.fromhex(GOLDEN_OF_THREE_GROUPS)), plan)
    steady = StepPlan(step_id=42, rows_epoch=7, block_rows=int32(1), block_ids=int32(7, 8), decode_rows=int32(0, 1))
    data = encode_plan(steady, 7)
    assert data.hex() == GOLDEN_STEADY_OF_TWO_GROUPS
    assert_equal(decode_plan(data, 7, steady.decode_rows), steady)


@SMALL_PLANS
def test_every_flipped_byte_is_seen(plan: StepPlan) -> None:
    """Oracle: a flip of one bit or of all bits in any byte of a plan makes it invalid."""
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
    """Oracle: for each check of the envelope, the expected value and the actual one."""
    data = encode_plan(small_plan())
    with pytest.raises(PlanError, match=r"must be b'TPSP', received b'JUNK'"):
        decode_plan(b"JUNK" + data[4:])
    with pytest.raises(PlanError, match=r"must be 18, received 1"):
        decode_plan(data[:4] + struct.pack("<I", 1) + data[8:])
    wrong = xxhash.xxh3_64_intdigest(data[16:]) ^ 1
    with pytest.raises(PlanError, match=rf"says {wrong:#018x}, its bytes give {wrong ^ 1:#018x}"):
        decode_plan(data[:8] + struct.pack("<Q", wrong) + data[16:])


def test_masks_are_a_section_of_their_own() -> None:
    """Oracle: by hand: one size in the header; in the section a head of two pairs, a row, and its words."""
    plain = small_plan()
    masked = plain.extended({MASK_ROWS.name: int32(1), MASKS.name: int32(-1, 7, 9).reshape(1, 3)})
    before, after = bytes(encode_plan(plain)), bytes(encode_plan(masked))
    names = [section.name for section in plan_sections()]
    head = [2, names.index(MASK_ROWS.name), 4, names.index(MASKS.name), 12, 0]
    section = np.array([*head, 1, 0, -1, 7, 9, 0], dtype="<i4").tobytes()
    start = 80 + 8  # header of nine sizes
    assert after[start:] == before[80:] + section
    assert_equal(decode_plan(after), masked)


def test_moves_take_eight_bytes_each_and_nothing_where_there_are_none() -> None:
    """Oracle: by hand: one size in the header; in the section a head of five pairs, 8 bytes for each pair of a move, 8
    of a number."""
    plan = StepPlan(step_id=1, rows_epoch=5, decode_rows=int32(0, 1))
    before, after = encode_plan(plan, 5), encode_plan(moving(plan), 5)
    assert (len(before), len(after)) == (48, 48 + 48 + 48)
    names = [section.name for section in plan_sections()]
    first = names.index(STORES.name)
    sizes = ((0, 16), (1, 8), (2, 8), (3, 8), (4, 8))
    assert after[40:48] == struct.pack("<2I", 1 << [one.name for one in SECTIONS].index("extensions"), 96)
    head = struct.pack("<11I", 5, *(word for index, size in sizes for word in (first + index, size)))
    assert after[48:96] == head + bytes(4)
    assert after[96:] == struct.pack("<10iq", 8, 1, 9, 2, 3, 7, 40, 3, 4, 41, 5)
    assert_equal(decode_plan(after, 5, plan.decode_rows), moving(plan))


def test_wrong_dtypes_are_our_own_fault() -> None:
    """Oracle: int64 ids would lose bits, so encoding raises an error."""
    with pytest.raises(TypeError):
        encode_plan(StepPlan(step_id=0, decode_rows=np.arange(3, dtype=np.int64)))  # type: ignore[arg-type]
    for block_rows, block_ids in ((int32(1), int32()), (int32(1, 2), int32(1, 2, 3)), (int32(), int32(1))):
        with pytest.raises(AssertionError, match=f"{len(block_ids)} block_ids for {len(block_rows)} block_rows"):
            encode_plan(StepPlan(step_id=0, block_rows=block_rows, block_ids=block_ids))


def test_arrays_received_are_writable_views() -> None:
    """Oracle: numpy's flags; torch.from_numpy warns for read-only memory, and a copy would cost time."""
    buffer = bytearray(encode_plan(small_plan()))
    plan = decode_plan(buffer)
    assert plan.decode_rows.flags.writeable
    assert np.shares_memory(plan.decode_rows, np.frombuffer(buffer, np.uint8))


def test_a_steady_decode_is_small() -> None:
    """Oracle: a header, three columns of 256, 16 and 16 ids; 16 more for a second group."""
    plan = StepPlan(
        step_id=9,
        rows_epoch=3,
        block_rows=np.arange(16, dtype=np.int32),
        block_ids=np.arange(100, 116, dtype=np.int32),
        decode_rows=np.arange(256, dtype=np.int32),
    )
    assert (len(encode_plan(plan)), len(encode_plan(plan, 3))) == (1208, 184)
    of_two = msgspec.structs.replace(plan, block_ids=np.arange(100, 132, dtype=np.int32))
    assert (len(encode_plan(of_two)), len(encode_plan(of_two, 3))) == (1272, 248)
