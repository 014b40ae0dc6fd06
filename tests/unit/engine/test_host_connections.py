"""Connections between hosts: the handshake, plans over TCP, slots as bytes, clocks; two boards in one process."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tp_engine.engine import host_link
from tp_engine.engine.host_link import ClockOffset, HostLinks
from tp_engine.errors import PlanError, RankError
from tp_engine.ipc import handshake
from tp_engine.ipc.board_mirror import SlotPacker, unpack_slots
from tp_engine.ipc.handshake import KEY_BYTES, PURPOSES, Listener, Purpose, connect
from tp_engine.ipc.job_board import EchoCheck, JobBoard
from tp_engine.ipc.plan_channel import PlanPublisher, PlanSubscriber
from tp_engine.ipc.rank_slot import Ended, RankSlot, State, StepRecorder
from tp_engine.ipc.relay import PlanLink, RelayReader
from tp_engine.ipc.ring_buffer import RingReader, RingWriter
from tp_engine.plan import StepPlan

IDENTITY = {"block_size": "16", "weights": "abc"}
DEADLINE_S = 100.0


class Meeting:
    """A listener for host 1, and what it was told."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self.listener = Listener("127.0.0.1", self.key, IDENTITY, range(1, 2))
        self.accepted: dict[str, socket.socket] = {}
        self.refused: list[str] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while self.listener.missing and not self.over.is_set():
            for hello, refusal, connection in self.listener.take():
                if refusal:
                    self.refused.append(refusal)
                else:
                    self.accepted[hello.purpose] = connection
        self.listener.close()

    def connect(
        self,
        purpose: Purpose,
        *,
        key: bytes | None = None,
        timeout_s: float = DEADLINE_S,
        host: int = 1,
        **identity: str,
    ) -> socket.socket:
        return connect(
            "127.0.0.1", self.listener.port, key or self.key, host, purpose, IDENTITY | identity,
            rank=2, timeout_s=timeout_s, check=lambda: None,
        )  # fmt: skip


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    try:
        yield made
    finally:
        made.over.set()
        made.thread.join()
        for connection in made.accepted.values():
            connection.close()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_two_connections_and_the_port_closes(meeting: Meeting) -> None:
    """Oracle: both purposes are accepted once; afterwards nothing listens."""
    ends = [meeting.connect(purpose) for purpose in PURPOSES]
    meeting.thread.join(DEADLINE_S)
    assert len(meeting.accepted) == 2
    with pytest.raises(RankError, match="cannot be reached"):
        meeting.connect("plan", timeout_s=0.0)
    for end in ends:
        end.close()


def test_garbage_and_a_wrong_key_are_refused(meeting: Meeting, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: each is closed with a line in the log, nothing is reported, and a good one is accepted after them."""
    with caplog.at_level(logging.WARNING, logger="tp_engine"):
        for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 20, b"\x00" * 200, b"\xff" * 400):
            with socket.create_connection(("127.0.0.1", meeting.listener.port), timeout=DEADLINE_S) as stranger:
                stranger.sendall(garbage)
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(1000):
                        pass
        with pytest.raises(RankError, match="rank 0: did not accept the connection of host 1"):
            meeting.connect("watch", key=b"x" * KEY_BYTES)
        wait_until(lambda: sum("was refused" in one.getMessage() for one in caplog.records) == 4)
    assert not meeting.refused and not meeting.accepted
    meeting.connect("watch").close()
    wait_until(lambda: "watch" in meeting.accepted)


def test_a_stranger_that_dribbles_does_not_keep_its_place(
    meeting: Meeting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: its connection ends although bytes keep coming, with a line in the log."""
    monkeypatch.setattr(handshake, "_PATIENCE_S", 0.2)
    with (
        caplog.at_level(logging.WARNING, logger="tp_engine"),
        socket.create_connection(("127.0.0.1", meeting.listener.port), timeout=DEADLINE_S) as stranger,
    ):
        stranger.sendall((60_000).to_bytes(4, "little"))

        def is_refused_while_it_dribbles() -> bool:
            with contextlib.suppress(OSError):
                stranger.sendall(b" ")
            return "was refused" in caplog.text

        wait_until(is_refused_while_it_dribbles)


def test_another_configuration_is_named_on_both_ends(meeting: Meeting) -> None:
    """Oracle: the field, both values and both hosts."""
    with pytest.raises(RankError, match=r"block_size is 16 on host 0 and 32 on host 1; weights is abc .* def"):
        meeting.connect("watch", block_size="32", weights="def")
    wait_until(lambda: len(meeting.refused) == 1)
    assert "block_size is 16 on host 0 and 32 on host 1" in meeting.refused[0]


def test_a_host_that_is_not_expected_is_told_so(meeting: Meeting) -> None:
    """Oracle: the refused rank and the reason, in the host's own error; the job goes on."""
    end = meeting.connect("watch")
    wait_until(lambda: "watch" in meeting.accepted)
    for host in (1, 7):
        with pytest.raises(RankError, match=f"rank 2: rank 0 refused this host: host {host} is not expected, or is"):
            meeting.connect("watch", host=host)
    meeting.connect("plan").close()
    meeting.thread.join(DEADLINE_S)
    end.close()
    assert not meeting.refused and len(meeting.accepted) == 2


def test_a_refusal_that_the_host_does_not_read_is_known(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: what differs reaches rank 0 although sending it failed."""
    send = handshake._send_proven

    def send_or_fail(connection: socket.socket, key: bytes, side: bytes, *rest: bytes) -> None:
        if side == b"rank 0":
            raise BrokenPipeError
        send(connection, key, side, *rest)

    monkeypatch.setattr(handshake, "_send_proven", send_or_fail)
    with pytest.raises(RankError):
        meeting.connect("watch", block_size="32")
    wait_until(lambda: len(meeting.refused) == 1)
    assert "block_size is 16 on host 0 and 32 on host 1" in meeting.refused[0]


@pytest.fixture
def relay() -> Iterator[tuple[PlanPublisher, PlanSubscriber, PlanSubscriber, PlanLink]]:
    """Rank 0's publisher, and the subscribers of another host: its first rank, and one behind that one's ring."""
    near, far = tcp_pair()
    ring = RingWriter(1, first_rank=3, spin_s=0.0)
    link = PlanLink(near, 2, alive=lambda rank: True)
    publisher = PlanPublisher(None, [link])
    first = PlanSubscriber(RelayReader(far, ring, alive=lambda: True, ring_timeout_s=DEADLINE_S))
    second = PlanSubscriber(RingReader(ring.name, 0, spin_s=0.0))
    try:
        yield publisher, first, second, link
    finally:
        second.close()
        first.close()
        publisher.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def plan_of(step_id: int, num_rows: int = 3) -> StepPlan:
    return StepPlan(step_id=step_id, decode_rows=np.arange(num_rows, dtype=np.int32), rows_epoch=step_id)


def test_plans_reach_every_rank_of_the_other_host(
    relay: tuple[PlanPublisher, PlanSubscriber, PlanSubscriber, PlanLink],
) -> None:
    """Oracle: the plans sent, their checksums, and one message per plan; small ones, and one of half a megabyte."""
    publisher, first, second, _ = relay
    sizes = [3, 256, 120_000, 1]

    def publish() -> None:
        for step_id, size in enumerate(sizes, 1):
            publisher.publish(plan_of(step_id, size), DEADLINE_S)

    sender = threading.Thread(target=publish)
    sender.start()
    for step_id, size in enumerate(sizes, 1):
        for subscriber in (first, second):
            plan = subscriber.receive(DEADLINE_S)
            assert plan.step_id == step_id and plan.decode_rows.tolist() == list(range(size))
        assert first.last_checksum == second.last_checksum != 0
    sender.join()


def test_a_lost_plan_and_a_closed_connection(
    relay: tuple[PlanPublisher, PlanSubscriber, PlanSubscriber, PlanLink],
) -> None:
    """Oracle: both step ids in the error; rank 0 is named when its connection ends; a late plan is named too."""
    publisher, first, second, _ = relay
    publisher.publish(plan_of(2), DEADLINE_S)
    for subscriber in (first, second):
        with pytest.raises(PlanError, match="expected step 1, received step 2"):
            subscriber.receive(DEADLINE_S)
    with pytest.raises(RankError, match=r"rank 0: sent no step plan within 0\.01 s"):
        first.receive(0.01)
    publisher.close()
    with pytest.raises(RankError, match="rank 0: its connection for step plans is closed"):
        first.receive(DEADLINE_S)


def test_a_host_that_takes_nothing_is_named() -> None:
    """Oracle: the rank and the limit; the plan is larger than all buffers."""
    near, far = tcp_pair()
    with contextlib.closing(far), contextlib.closing(PlanLink(near, 2, alive=lambda rank: True)) as link:
        assert link.room_bytes > 50_000
        with pytest.raises(RankError, match=r"rank 2: has not taken a step plan within 0\.2 s"):
            link.send(b"x" * 50_000_000, 0.2)


def boards() -> tuple[JobBoard, JobBoard]:
    return JobBoard.create(4, local_world_size=2), JobBoard.create(4, local_world_size=2, host=1)


def run_steps(slot: RankSlot, first: int, last: int, *, checksum: int = 7) -> None:
    recorder = StepRecorder(slot)
    for step_id in range(first, last + 1):
        recorder.received(plan_of(step_id), 100, checksum + step_id)
        recorder.begin(step_id)
        recorder.done(step_id)


def test_slots_travel_with_their_times_converted() -> None:
    """Oracle: the slot's own values; a clock that is ahead by half; this host's own slots are left alone."""
    near, far = boards()
    ahead_ns = time.monotonic_ns() // 2  # so that no time is before this host's clock began
    slot = far.slots[3]
    slot.register()
    run_steps(slot, 1, 700)
    slot.fail("Traceback: no memory", failed_rank=None)
    near.slots[0].state = State.READY
    arrived: list[tuple[int, int]] = []
    data = SlotPacker().pack(far.slots, with_records=True)
    assert unpack_slots(near, data, ahead_ns, lambda slot, records: arrived.append((slot.rank, len(records))))
    copy = near.slots[3]
    assert copy.state == State.FAILED and copy.failure_text == "Traceback: no memory"
    assert copy.failed_ns == slot.failed_ns - ahead_ns and copy.heartbeat_ns == slot.heartbeat_ns - ahead_ns
    assert (copy.pid, copy.step_done, copy.host.name) == (slot.pid, 700, socket.gethostname())
    assert copy.records[:, 4].tolist() == (slot.records[:, 4] - ahead_ns).tolist()
    assert arrived == [(2, 0), (3, 512)] and near.slots[0].state == State.READY


def test_steps_are_sent_once() -> None:
    """Oracle: the number of new steps."""
    near, far = boards()
    packer, numbers = SlotPacker(), []
    for last in (3, 3, 10):
        run_steps(far.slots[2], far.slots[2].step_done + 1, last)
        data = packer.pack(far.local_slots, with_records=True)
        unpack_slots(near, data, 0, lambda slot, records: numbers.append(len(records)))
    assert numbers[::2] == [3, 0, 7]


def test_plans_that_differ_on_another_host_are_found() -> None:
    """Oracle: the rank, the step and both low halves; equal plans pass."""
    near, far = boards()
    check, packer = EchoCheck(near, checks_inputs=False), SlotPacker()
    for rank in (0, 1):
        run_steps(near.slots[rank], 1, 40)
    run_steps(far.slots[2], 1, 40)
    unpack_slots(near, packer.pack(far.local_slots, with_records=True), 0, check.compare_far)
    check.check(40)
    run_steps(far.slots[2], 41, 41, checksum=8)
    for rank in (0, 1):
        run_steps(near.slots[rank], 41, 41)
    unpack_slots(near, packer.pack(far.local_slots, with_records=True), 0, check.compare_far)
    with pytest.raises(PlanError, match=r"step 41: .* rank 2 has the plan 0x00000031, rank 0 sent 0x00000030"):
        check.check(41)


def test_the_shortest_round_trip_tells_the_clocks_difference() -> None:
    """Oracle: a clock 5 s ahead; the quick round is exact, the slow one is off by half of its delay."""
    clock = ClockOffset()
    assert clock.ahead_ns is None
    second = 10**9
    clock.add(100, 100 + 5 * second + 40_000_000, 0, 100 + 40_000_000)
    clock.add(second, second + 5 * second + 10_000 + 3_000, 3_000, second + 20_000 + 3_000)
    assert clock.ahead_ns == 5 * second


def test_two_boards_become_alike_and_a_closed_connection_is_a_death() -> None:
    """Oracle: states written on either board appear on the other; a connection that ends marks the other first rank."""
    near, far = boards()
    near_end, far_end = tcp_pair()
    hub, spoke = HostLinks(near, 0), HostLinks(far, 2)
    woken = threading.Event()
    hub.wake = woken.set
    hub.add(1, near_end)
    spoke.add(0, far_end)
    try:
        for slot in (near.slots[0], near.slots[1], far.slots[2], far.slots[3]):
            slot.register()
            slot.state = State.READY
        wait_until(lambda: all(slot.state == State.READY for board in (near, far) for slot in board.slots))
        wait_until(lambda: near.slots[3].host.resident_bytes > 0)
        woken.clear()
        far.slots[3].host.note_ended(Ended.PROCESS, time.monotonic_ns())
        spoke.tell()
        assert woken.wait(DEADLINE_S) and near.slots[3].host.ended == Ended.PROCESS
        far_end.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: near.slots[2].host.ended == Ended.CLOSED and far.slots[0].host.ended == Ended.CLOSED)
    finally:
        hub.stop()
        spoke.stop()


def fill(spoke: HostLinks) -> None:
    """Send until the connection to host 0 takes no more."""

    def waits() -> bool:
        spoke.tell()
        return 0 in spoke._links and spoke._links[0].num_unsent > 0

    wait_until(waits)


def test_a_failure_is_told_behind_a_beat_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the text arrives as soon as there is room, with no further beat of the clock."""
    monkeypatch.setattr(host_link, "BEAT_S", 3600.0)
    board = JobBoard.create(4, local_world_size=2, host=1)
    near_end, far_end = tcp_pair()
    spoke = HostLinks(board, 2)
    try:
        spoke.add(0, far_end)
        fill(spoke)
        board.slots[2].fail("Traceback: no memory")
        spoke.tell()
        near_end.settimeout(DEADLINE_S)
        heard = b""
        while b"no memory" not in heard:
            heard += near_end.recv(1 << 16)
    finally:
        near_end.close()
        spoke.stop()
    spoke.tell()  # does nothing any more


def test_a_host_that_resets_its_connection_at_once_has_ended() -> None:
    """Oracle: its first rank's end, although the connection never had a beat."""
    board = JobBoard.create(2, local_world_size=1)
    near_end, far_end = tcp_pair()
    far_end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far_end.close()
    with pytest.raises(OSError):
        near_end.recv(1)  # what it sent has arrived
    hub = HostLinks(board, 0)
    try:
        hub.add(1, near_end)
        wait_until(lambda: board.slots[1].host.ended == Ended.CLOSED)
    finally:
        hub.stop()


def test_a_host_that_takes_nothing_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: after the farewell's time the socket is closed, and no task waits for the other end."""
    monkeypatch.setattr(host_link, "_FAREWELL_S", 0.01)
    near_end, far_end = tcp_pair()
    spoke = HostLinks(JobBoard.create(4, local_world_size=2, host=1), 2)
    spoke.add(0, far_end)
    fill(spoke)
    spoke.stop()
    near_end.close()
    assert far_end.fileno() < 0 and all(task.done() for task in spoke._tasks)


def test_hosts_hear_of_each_other_through_rank_0() -> None:
    """Oracle: an end that host 1 sees appears on host 2, although only rank 0 is connected with both."""
    hub_board, *far_boards = [JobBoard.create(6, local_world_size=2, host=host) for host in range(3)]
    hub, spokes = HostLinks(hub_board, 0), [HostLinks(board, 2 * board.host) for board in far_boards]
    try:
        for spoke, board in zip(spokes, far_boards, strict=True):
            near_end, far_end = tcp_pair()
            hub.add(board.host, near_end)
            spoke.add(0, far_end)
        woken = threading.Event()
        spokes[1].wake = woken.set
        far_boards[0].slots[3].register()
        wait_until(lambda: far_boards[1].slots[3].pid == far_boards[0].slots[3].pid != 0)
        far_boards[0].slots[3].host.note_ended(Ended.PROCESS, time.monotonic_ns())
        spokes[0].tell()
        wait_until(lambda: far_boards[1].slots[3].host.ended == Ended.PROCESS)
        assert woken.wait(DEADLINE_S)
    finally:
        for links in (hub, *spokes):
            links.stop()
