"""Messages over a Unix socket: whole ones, whatever the kernel cuts them into."""

from __future__ import annotations

import random
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from tp_engine.engine.message_socket import MessageSocket
from tp_engine.engine.messages import CommandDone, ToFrontend, decode_to_frontend
from tp_engine.engine.service_socket import ServiceSocket, connect, new_address

LENGTH = 8
DEADLINE_S = 100.0


@pytest.fixture
def pair() -> Iterator[tuple[MessageSocket, MessageSocket]]:
    one, other = (MessageSocket(end) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def exchanged(sender: MessageSocket, receiver: MessageSocket, messages: list[bytes]) -> list[bytes]:
    found: list[bytes] = []
    for message in messages:
        sender.send(message)
    while sender.has_unsent or len(found) < len(messages):
        sender.flush()
        new = receiver.receive()
        assert new or receiver.is_amid or not sender.has_unsent
        found += new
    return found


@pytest.mark.parametrize(
    "sizes", [[0, 1, 7, 8, 9], [1 << 18, (1 << 18) - LENGTH, 5], [3_000_000, 2, 1_000_000], [3] * 500]
)
def test_messages_of_any_size_arrive_whole_and_in_order(
    sizes: list[int], pair: tuple[MessageSocket, MessageSocket]
) -> None:
    """Oracle: the messages themselves; longer ones than the kernel takes at once go on by ``flush``."""
    messages = [random.Random(number).randbytes(size) for number, size in enumerate(sizes)]
    one, other = pair
    assert exchanged(one, other, messages) == messages
    assert exchanged(other, one, messages[::-1]) == messages[::-1]
    assert not (one.is_amid or other.is_amid or one.ended or other.ended)


def test_bytes_that_come_one_by_one_are_put_together() -> None:
    """Oracle: the message; none before its last byte."""
    raw, end = socket.socketpair()
    receiver = MessageSocket(end)
    for byte in (5).to_bytes(LENGTH, "little") + b"hell":
        raw.send(bytes([byte]))
        assert receiver.receive() == [] and receiver.is_amid
    raw.send(b"o" + (1).to_bytes(LENGTH, "little"))
    assert receiver.receive() == [b"hello"]
    assert receiver.is_amid and not receiver.ended
    raw.close()
    receiver.close()


def test_what_a_peer_sent_before_it_left_is_returned_first(pair: tuple[MessageSocket, MessageSocket]) -> None:
    """Oracle: two messages, and then the end; what was not read by the peer, and what is sent to it later, harms
    nobody."""
    one, other = pair
    one.send(b"unread by the one who leaves")
    other.send(b"first")
    other.send(b"last words")
    other.close()
    one.send(b"too late")
    assert not one.has_unsent
    assert one.receive() == [b"first", b"last words"] and not one.ended
    assert one.receive() == [] and one.ended
    assert one.receive() == [] and one.ended


def test_nothing_is_there(pair: tuple[MessageSocket, MessageSocket]) -> None:
    """Oracle: reading an empty socket returns at once."""
    assert pair[0].receive() == [] and not pair[0].ended and not pair[0].is_amid


def test_rank_0_does_not_wait_for_a_frontend_that_reads_late() -> None:
    """Oracle: answers of 5 MB each, which nobody reads while they are sent, arrive whole and in order, and also when
    rank 0 closes meanwhile; so does a long message to rank 0."""
    service = ServiceSocket(address := new_address())
    frontend = connect(address)
    service.receive(DEADLINE_S)
    texts = [letter * 5_000_000 for letter in "abc"]
    for text in texts:
        service.send(CommandDone(result={"text": text}))
    found: list[ToFrontend] = []

    def read() -> None:
        while len(found) < len(texts):
            select.select([frontend], [], [], DEADLINE_S)
            found.extend(map(decode_to_frontend, frontend.receive()))

    def write() -> None:
        frontend.send(bytes(5_000_000))
        while frontend.has_unsent:
            select.select([], [frontend], [], DEADLINE_S)
            frontend.flush()

    writer = threading.Thread(target=write)
    writer.start()
    arrived: list[bytes] = []
    while not arrived:
        arrived += service.receive(DEADLINE_S)
    assert arrived == [bytes(5_000_000)]
    writer.join()
    reader = threading.Thread(target=read)
    reader.start()
    service.close()
    reader.join()
    assert [answer.result["text"] for answer in found if isinstance(answer, CommandDone)] == texts
    frontend.close()
