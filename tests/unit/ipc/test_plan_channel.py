"""The channel: plans arrive whole and in order, or the error names the wrong step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tp_engine.errors import PlanError, RankError
from tp_engine.ipc.plan_channel import PlanPublisher, PlanSubscriber
from tp_engine.ipc.plan_codec import encode_plan
from tp_engine.ipc.ring_buffer import RingReader, RingWriter
from tp_engine.ipc.segment import open_segment
from tp_engine.plan import NO_IDS, Admission, RowSampling, StepPlan

TIMEOUT_S = 100.0


@pytest.fixture
def publisher() -> Iterator[PlanPublisher]:
    publisher = PlanPublisher(RingWriter(2))
    yield publisher
    publisher.close()


@pytest.fixture
def subscribers(publisher: PlanPublisher) -> Iterator[list[PlanSubscriber]]:
    subscribers = [PlanSubscriber(RingReader(publisher.name, index)) for index in range(2)]
    publisher.wait_attached(TIMEOUT_S)
    yield subscribers
    for subscriber in subscribers:
        subscriber.close()


def plan(step_id: int, num_rows: int = 3, epoch: int = 0) -> StepPlan:
    return StepPlan(step_id=step_id, rows_epoch=epoch, decode_rows=np.arange(num_rows, dtype=np.int32) + step_id)


def test_every_rank_receives_every_plan(publisher: PlanPublisher, subscribers: list[PlanSubscriber]) -> None:
    """Oracle: rows that depend on the step id; the ring is no longer shared after all ranks attached."""
    with pytest.raises(FileNotFoundError):
        open_segment(publisher.name)
    for step_id in range(1, 301):
        publisher.publish(plan(step_id), TIMEOUT_S)
        for subscriber in subscribers:
            received = subscriber.receive(TIMEOUT_S)
            assert received.step_id == step_id
            assert received.decode_rows.tolist() == [step_id, step_id + 1, step_id + 2]


def test_rows_that_go_on_are_sent_once(publisher: PlanPublisher, subscribers: list[PlanSubscriber]) -> None:
    """Oracle: the bytes of a header alone, or of header and rows; a rank gets the very array of the last plan with an
    epoch, and the epoch.  The epoch identifies rows, not the array."""
    seen = []
    for step_id, epoch in enumerate((1, 1, 1, 2, 2, 0, 2, 1), start=1):
        rows = np.arange(10, dtype=np.int32) if epoch else NO_IDS
        publisher.publish(StepPlan(step_id=step_id, rows_epoch=epoch, decode_rows=rows), TIMEOUT_S)
        received = [subscriber.receive(TIMEOUT_S) for subscriber in subscribers][1]
        seen.append(received.decode_rows)
        assert publisher.last_num_bytes == (48 if step_id in (2, 3, 5, 6, 7) else 88)
        assert np.array_equal(seen[-1], rows) and received.rows_epoch == epoch
    assert seen[0] is seen[1] is seen[2] is not seen[3] is seen[4] is seen[6]
    assert seen[7] is not seen[0]


def test_a_lost_plan_is_seen_by_what_follows_it() -> None:
    """Oracle: a reader of steps 1 and 3 does not know the rows of step 2, of epoch 2."""
    ring = RingWriter(1)
    subscriber = PlanSubscriber(RingReader(ring.name, 0))
    for data in (encode_plan(plan(1, epoch=1)), encode_plan(plan(3, num_rows=4, epoch=2), 2)):
        ring.write(data, TIMEOUT_S)
    subscriber.receive(TIMEOUT_S)
    lost = "step 2: step plan lost: step 3 leaves out the rows of epoch 2, the last known ones are of epoch 1"
    with pytest.raises(PlanError, match=lost):
        subscriber.receive(TIMEOUT_S)
    subscriber.close()
    ring.close()


def test_a_call_is_no_plan() -> None:
    """Oracle: the sent plans and the last one's checksum, although the ranks only wake up when they are called."""
    publisher = PlanPublisher(RingWriter(1, spin_s=1e-6))
    subscriber = PlanSubscriber(RingReader(publisher.name, 0))
    publisher.wait_attached(TIMEOUT_S)
    for step_id in range(1, 4):
        publisher.call()
        publisher.publish(plan(step_id), TIMEOUT_S)
        assert subscriber.receive(TIMEOUT_S).decode_rows.tolist() == plan(step_id).decode_rows.tolist()
        assert subscriber.last_checksum == publisher.last_checksum
    subscriber.close()
    publisher.close()


def test_a_long_prompt_travels_in_pieces(publisher: PlanPublisher, subscribers: list[PlanSubscriber]) -> None:
    """Oracle: a prompt of 131,072 ids (512 KiB, 9 slots) arrives as it was sent."""
    token_ids = np.arange(131_072, dtype=np.int32)
    admission = Admission(
        row=0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=0,
        block_ids=np.arange(8192, dtype=np.int32),
        sampling=RowSampling(),
    )
    publisher.publish(StepPlan(step_id=1, admitted=(admission,)), TIMEOUT_S)
    for subscriber in subscribers:
        (received,) = subscriber.receive(TIMEOUT_S).admitted
        assert np.array_equal(received.token_ids, token_ids)


def test_a_lost_plan_names_both_steps(publisher: PlanPublisher, subscribers: list[PlanSubscriber]) -> None:
    """Oracle: step 2 dropped: expected 2, received 3."""
    for step_id in (1, 3):
        publisher.publish(plan(step_id), TIMEOUT_S)
    subscribers[0].receive(TIMEOUT_S)
    with pytest.raises(PlanError, match="step plan lost: expected step 2, received step 3"):
        subscribers[0].receive(TIMEOUT_S)


def test_a_lost_first_plan_is_seen(publisher: PlanPublisher, subscribers: list[PlanSubscriber]) -> None:
    """Oracle: plans start at step 1 by default."""
    publisher.publish(plan(2), TIMEOUT_S)
    with pytest.raises(PlanError, match="expected step 1, received step 2"):
        subscribers[0].receive(TIMEOUT_S)


def test_a_repeated_plan_names_both_steps(publisher: PlanPublisher, subscribers: list[PlanSubscriber]) -> None:
    """Oracle: step 1 sent twice: expected 2, received 1."""
    for _ in range(2):
        publisher.publish(plan(1), TIMEOUT_S)
    subscribers[1].receive(TIMEOUT_S)
    with pytest.raises(PlanError, match="step plan repeated: expected step 2, received step 1"):
        subscribers[1].receive(TIMEOUT_S)


def test_both_ends_know_the_checksum_of_the_last_plan(
    publisher: PlanPublisher, subscribers: list[PlanSubscriber]
) -> None:
    """Oracle: the encoded plan's own checksum (bytes 8 to 16) and size; equal at both ends, different for another
    plan."""
    assert publisher.last_checksum == publisher.last_num_bytes == subscribers[0].last_checksum == 0
    seen = []
    for step_id in (1, 2):
        publisher.publish(plan(step_id), TIMEOUT_S)
        data = encode_plan(plan(step_id))
        assert publisher.last_num_bytes == len(data)
        assert publisher.last_checksum == int.from_bytes(data[8:16], "little")
        for subscriber in subscribers:
            subscriber.receive(TIMEOUT_S)
            assert subscriber.last_checksum == publisher.last_checksum
            assert subscriber.last_num_bytes == publisher.last_num_bytes == len(data)
        seen.append(publisher.last_checksum)
    assert seen[0] != seen[1]


def test_a_flipped_byte_in_the_ring_is_seen() -> None:
    """Oracle: a plan with one wrong byte, sent through the real ring, is a PlanError with step and both checksums."""
    ring = RingWriter(1)
    subscriber = PlanSubscriber(RingReader(ring.name, 0))
    data = bytearray(encode_plan(plan(1)))
    data[-1] ^= 1
    ring.write(bytes(data), TIMEOUT_S)
    with pytest.raises(PlanError, match=r"step 1: corrupted step plan: its checksum says 0x.*, its bytes give 0x"):
        subscriber.receive(TIMEOUT_S)
    subscriber.close()
    ring.close()


def test_waits_name_the_rank(publisher: PlanPublisher) -> None:
    """Oracle: rank 2 never attached; rank 0 sent nothing; rank 0 is gone."""
    subscriber = PlanSubscriber(RingReader(publisher.name, 0, alive=lambda: False))
    with pytest.raises(RankError, match=r"rank 2: .*missing ranks: \[2\]"):
        publisher.wait_attached(0.1)
    with pytest.raises(RankError, match="rank 0: sent no step plan within"):
        subscriber.receive(0.1)
    with pytest.raises(RankError, match=r"rank 0: .*its process is gone"):
        subscriber.receive()
    subscriber.close()


def test_waiting_for_ever_needs_a_way_out(publisher: PlanPublisher, subscribers: list[PlanSubscriber]) -> None:
    """Oracle: an error: without a deadline and a liveness check, a wait might never end."""
    with pytest.raises(AssertionError, match="a wait needs a deadline"):
        subscribers[0].receive()
