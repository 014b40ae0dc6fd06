"""The publisher of KV events with real sockets, and its option.  Oracle: the wire format of docs/kv_events.md."""

from __future__ import annotations

import ctypes
import socket as sockets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from tests.kv_events import Subscriber, decode_as_dynamo, decode_as_llm_d, new_socket, plain_hashes
from tp_engine import ConfigError
from tp_engine.config import EngineConfig
from tp_engine.features.kv_events import publisher as publishing_thread
from tp_engine.features.kv_events.connections import MOST_BYTES, MOST_CONNECTIONS
from tp_engine.features.kv_events.options import KVEventsConfig
from tp_engine.features.kv_events.publisher import KVEventPublisher
from tp_engine.features.kv_events.scheduling import CacheChange, Cleared, Inserted, Moved, Rebuilt, Shortened
from tp_engine.options.flags import plain_spelling
from tp_engine.options.intake import take_options
from tp_engine.sched.blocks.cache_keys import CacheKey, Variant

SIZE = 4
LOOPBACK = "tcp://127.0.0.1:0"
DEADLINE_MS = 100_000
TOKENS = list(range(60_000, 60_012))


def inserted(serial: int, parent: int | str = "", tokens: list[int] = TOKENS, tier: int = 0) -> Inserted:
    """A run of blocks."""
    count = len(tokens) // SIZE
    data = np.array(tokens, dtype="<i4").tobytes()
    return Inserted(serial, parent, count, data, np.full(count, tier, dtype=np.uint8))


def moved(serial: int, numbers: list[int], tiers: list[int]) -> Moved:
    """Some blocks of the run, in other tiers."""
    data = np.array(TOKENS, dtype="<i4").tobytes()
    return Moved(serial, np.array(numbers), np.array(tiers, dtype=np.uint8), data)


class Listener:
    """A SUB socket that waits for the publisher's messages."""

    def __init__(self, publisher: KVEventPublisher, topic: str = "") -> None:
        self.socket = new_socket(zmq.SUB)
        self.socket.subscribe(topic)
        self.socket.connect(publisher.endpoint.replace("0.0.0.0", "127.0.0.1"))

    def receive(self) -> tuple[bytes, int, bytes]:
        """The next message: topic, number, payload."""
        assert self.socket.poll(DEADLINE_MS), "no message"
        topic, number, payload = self.socket.recv_multipart()
        assert len(number) == 8
        return topic, int.from_bytes(number, "big"), payload


@contextmanager
def publishing(**config: Any) -> Iterator[tuple[KVEventPublisher, Listener]]:
    """A publisher on a free port, and a listener whose subscription has arrived.  An XPUB socket, which is a PUB socket
    that also says who subscribes, shows that."""
    given = KVEventsConfig(enable_kv_cache_events=True, **{"endpoint": "tcp://*:0"} | config)
    with patch.object(zmq, "PUB", zmq.XPUB):
        made = KVEventPublisher(given, SIZE)
    with made as publisher:
        listener = Listener(publisher, given.topic)
        assert publisher._events.poll(DEADLINE_MS) and publisher._events.recv() == b"\1" + given.topic.encode()
        yield publisher, listener
        listener.socket.close(0)


def replay(publisher: KVEventPublisher, first: int) -> list[tuple[bytes, int, bytes]]:
    """What the ROUTER socket sends from ``first`` on."""
    socket = new_socket(zmq.DEALER)
    socket.connect(publisher.replay_endpoint)
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    found: list[tuple[bytes, int, bytes]] = []
    while True:
        assert socket.poll(DEADLINE_MS), "the replay has no end"
        empty, topic, number, payload = socket.recv_multipart()
        assert empty == b""
        if int.from_bytes(number, "big", signed=True) == -1:
            assert topic == payload == b""
            socket.close(0)
            return found
        found.append((topic, int.from_bytes(number, "big"), payload))


def test_messages_are_vllms() -> None:
    """By hand: three blocks, of which the last goes to the host and then leaves; maps with the fields that are always
    there, and a number that rises from 0 on."""
    with publishing(topic="kv@pod@model") as (publisher, listener):
        subscriber = Subscriber(SIZE)
        changes: list[CacheChange] = [inserted(7), moved(7, [2], [1]), Shortened(7, 2), Cleared()]
        payloads = []
        for number, change in enumerate(changes):
            assert publisher.put(change)
            topic, at, payload = listener.receive()
            assert (topic, at) == (b"kv@pod@model", number)
            subscriber.take(payload)
            payloads.append(msgspec.msgpack.decode(payload))
        assert publisher.counters().num_batches == 4
    assert not subscriber.content() and (subscriber.num_stored, subscriber.num_removed) == (4, 2)
    time_s, (event,), rank = payloads[0]
    assert abs(time_s - time.time()) < 60 and rank == 0
    hashes = plain_hashes(TOKENS, SIZE)
    assert event == {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": TOKENS,
        "block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    (to_host, from_pool), (removed,), (cleared,) = (payload[1] for payload in payloads[1:])
    assert to_host["parent_block_hash"] == hashes[1] and to_host["token_ids"] == TOKENS[8:]
    assert to_host["medium"] == "CPU" and from_pool == {
        "type": "BlockRemoved",
        "block_hashes": hashes[2:],
        "medium": "GPU",
    }
    assert removed == {"type": "BlockRemoved", "block_hashes": hashes[2:], "medium": "CPU"}
    assert cleared == {"type": "AllBlocksCleared"}


@pytest.mark.parametrize("form", ["map", "array"])
def test_routers_read_them(form: str) -> None:
    """Oracle: the decoders of Dynamo for both forms, and of llm-d up to v0.8 for arrays."""
    with publishing(event_format=form, publish_salted=True) as (publisher, listener):
        key = CacheKey("k", "salt", Variant(3, "poet"))
        for change in (inserted(1), inserted(4, 3, TOKENS[:4]), inserted(9, key, tier=2), Shortened(1, 1), Cleared()):
            publisher.put(change)
        payloads: list[bytes] = []
        events: list[tuple[Any, ...]] = []
        while not events or events[-1][0] != "AllBlocksCleared":
            payloads.append(listener.receive()[2])
            events += decode_as_dynamo(payloads[-1])
    if form == "array":
        assert [one for payload in payloads for one in decode_as_llm_d(payload)] == events
    hashes = plain_hashes([*TOKENS, *TOKENS[:4]], SIZE)
    assert events[0] == ("BlockStored", hashes[:3], None, TOKENS, "GPU", None)
    assert events[1] == ("BlockStored", hashes[3:], hashes[2], TOKENS[:4], "GPU", None)
    assert events[2][2:] == (None, TOKENS, "STORAGE", "poet") and not set(events[2][1]) & set(hashes)
    assert events[3] == ("BlockRemoved", [hashes[3], hashes[2], hashes[1]], "GPU")


def test_missed_messages_come_again() -> None:
    """By hand: of six messages the last four are kept; requests for others, or that are none, change nothing."""
    with publishing(replay_endpoint=LOOPBACK, buffer_steps=4, topic="t") as (publisher, listener):
        sent = []
        for number in range(6):
            publisher.put(inserted(3 * number + 1, "", TOKENS[number:]))
            sent.append(listener.receive())
        socket = new_socket(zmq.DEALER)
        socket.connect(publisher.replay_endpoint)
        for frames in ((b"",), (b"", b"12"), (b"x", bytes(8)), (b"", bytes(8), b""), (b"", bytes(1 << 20))):
            socket.send_multipart(frames)
        assert replay(publisher, 4) == sent[4:]
        assert replay(publisher, 0) == sent[2:]
        assert replay(publisher, 6) == replay(publisher, (1 << 64) - 1) == []
        assert not socket.poll(0)
        socket.close(0)


def test_replays_rest_and_events_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: with a rest without an end one replay of four is answered, and later events are heard; close works."""
    monkeypatch.setattr(publishing_thread, "_REPLAY_RESTS", 1e12)
    with publishing(replay_endpoint=LOOPBACK, topic="t") as (publisher, listener):
        publisher.put(inserted(1, "", TOKENS))
        sent = listener.receive()
        assert replay(publisher, 0) == [sent]
        socket = new_socket(zmq.DEALER)
        socket.connect(publisher.replay_endpoint)
        for _ in range(3):
            socket.send_multipart((b"", bytes(8)))
        for number in range(1, 5):
            publisher.put(inserted(3 * number + 1, "", TOKENS[number:]))
            assert listener.receive()[1] == number
        assert not socket.poll(50)
        socket.close(0)


def test_a_gap_shows_what_was_lost() -> None:
    """By hand: where changes were lost a number is missing, and all that there is comes again."""
    with publishing() as (publisher, listener):
        subscriber = Subscriber(SIZE)
        publisher.put(inserted(1))
        _, first, payload = listener.receive()
        subscriber.take(payload)
        publisher.replace(Rebuilt([inserted(5, "", TOKENS[4:]), inserted(7, 6, TOKENS[:4])], is_behind_gap=True))
        _, second, payload = listener.receive()
        subscriber.take(payload)
        assert (first, second) == (0, 2) and publisher.counters().num_lost_changes == 1
    whole = [*TOKENS[4:], *TOKENS[:4]]
    assert set(subscriber.blocks) == set(plain_hashes(whole, SIZE))


def test_a_subscriber_that_does_not_read_holds_up_nothing() -> None:
    """Oracle: the number of messages, which are dropped for it beyond ``hwm``."""
    with publishing(hwm=1, max_queue_size=1 << 20) as (publisher, listener):
        listener.socket.rcvhwm = 1
        for number in range(300):
            assert publisher.put(inserted(4 * number + 1, "", [*TOKENS[:8], *range(number, number + 400)]))
            publisher.put(Cleared())
        deadline_s = time.monotonic() + 100
        while publisher.counters().num_batches < 30:
            assert publisher.put(Cleared())
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
    assert publisher.put(Cleared())  # after the end it is ignored


def test_what_waits_is_sent_at_the_end() -> None:
    """By hand: the change of a moment ago arrives."""
    with publishing() as (publisher, listener):
        publisher.put(inserted(1))
        publisher.close()
        publisher.close()
        assert listener.receive()[1] == 0


def test_it_connects_to_a_router_that_binds() -> None:
    """Oracle: vLLM's rule: an endpoint with a host is a router's, to which engines connect."""
    socket = new_socket(zmq.SUB)
    socket.subscribe("")
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    given = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{port}")
    assert not given.binds
    with KVEventPublisher(given, SIZE) as publisher:
        deadline_s = time.monotonic() + 100
        while not socket.poll(20):  # until the subscription has arrived
            publisher.put(Cleared())
            assert time.monotonic() < deadline_s
    socket.close(0)


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://lo:5557", True),
        ("ipc:///tmp/x", True),
        ("inproc://x", True),
        ("tcp://router:5557", False),
        ("tcp://10.0.0.0:5557", False),
        ("tcp://127.0.0.1:5557", False),
    ],
)
def test_endpoints(endpoint: str, binds: bool) -> None:
    """Oracle: vLLM's rule, with the address 0.0.0.0 as another spelling of any, and lo for this host alone."""
    assert KVEventsConfig(endpoint=endpoint).binds == binds


def test_an_endpoint_that_is_taken_is_refused(tmp_path: Path) -> None:
    """Oracle: the message names the option, the endpoint and what to do; the first publisher goes on."""
    with publishing(replay_endpoint=LOOPBACK) as (publisher, listener):
        port = publisher.endpoint.rpartition(":")[2]
        for config in (
            {"endpoint": f"tcp://*:{port}"},
            {"endpoint": "tcp://*:0", "replay_endpoint": f"tcp://*:{port}"},
        ):
            with pytest.raises(
                ConfigError, match=rf"kv_events_config has the .*endpoint tcp://\*:{port}.*in use; give another"
            ):
                KVEventPublisher(KVEventsConfig(**config), SIZE)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"ipc:///.*which cannot be used"):
            KVEventPublisher(KVEventsConfig(endpoint=f"ipc://{tmp_path}/none/socket"), SIZE)
        publisher.put(Cleared())
        assert listener.receive()[1] == 0


@pytest.mark.parametrize(
    ("given", "is_on"),
    [
        ({}, False),
        ({"enable_kv_cache_events": True}, True),
        ({"enable_kv_cache_events": True, "publisher": "zmq"}, True),
        ({"enable_kv_cache_events": True, "publisher": "null"}, False),
        ({"enable_kv_cache_events": False, "publisher": "zmq"}, False),
        ({"publisher": "zmq", "topic": "kv-events"}, True),
        ({"enable_kv_cache_events": True, "replay_endpoint": None}, True),
    ],
)
def test_when_events_are_on(given: dict[str, Any], is_on: bool) -> None:
    """Oracle: vLLM's rule; SGLang has no switch but the publisher."""
    config = EngineConfig(**take_options({"kv_events_config": given}, [EngineConfig]))
    assert config.kv_events_config is not None and config.kv_events_config.is_on == is_on


def test_flags_key_by_key() -> None:
    """Oracle: the object that they spell."""
    words = "--kv-events-config.enable_kv_cache_events true --kv-events-config.hwm 5 --kv_events_config.topic=kv@a@b"
    flag, text = plain_spelling(words.split())
    assert flag == "--kv-events-config"
    config = KVEventsConfig.of(text)
    assert (config.hwm, config.topic, config.endpoint) == (5, "kv@a@b", "tcp://lo:5557")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object, such as"),
        ({"endpont": "tcp://*:1"}, "names 'endpont'; it can set enable_kv_cache_events"),
        ({"publisher": "kafka"}, "kv_events_config: publisher is 'kafka'; choose one of zmq, null"),
        ({"event_format": "json"}, "event_format is 'json'; choose one of map, array"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events is 'yes' of type str; it must be of type bool"),
        ({"endpoint": "localhost:5557"}, r"endpoint 'localhost:5557'; it must be tcp://HOST:PORT"),
        ({"endpoint": "tcp://*"}, "it must be tcp://HOST:PORT"),
        ({"endpoint": "tcp://*:70000"}, "a port up to 65535"),
        ({"endpoint": "udp://*:5557"}, "it must be tcp://HOST:PORT"),
        ({"endpoint": 5557}, "endpoint is 5557 of type int; it must be of type str"),
        ({"endpoint": ["tcp://*:1"]}, "of type list; it must be of type str"),
        ({"endpoint": "tcp://router:0"}, "must name a port"),
        ({"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5557"}, "give two of them"),
        ({"replay_endpoint": "x"}, "replay_endpoint 'x'"),
        ({"hwm": 0}, "hwm is 0; it must be at least 1, and at most"),
        ({"buffer_steps": -1}, "buffer_steps is -1"),
        ({"max_queue_size": 1.5}, "max_queue_size is 1.5 of type float"),
        ({"max_queue_size": True}, "max_queue_size is True of type bool"),
        ({"topic": 5}, "topic is 5 of type int; it must be of type str"),
        ({"topic": "x" * 2000}, "at most 1024"),
    ],
)
def test_wrong_options_are_refused(given: Any, words: str) -> None:
    """Oracle: the name, the value, the rule."""
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**dict[str, Any](kv_events_config=given))


def publisher_with_key(**config: Any) -> KVEventPublisher:
    given = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://lo:0", replay_endpoint="tcp://lo:0", **config)
    return KVEventPublisher(given, SIZE, "secret")


def connected(kind: int, endpoint: str, password: bytes | None) -> tuple[zmq.Socket[bytes], int]:
    """A socket, and how its handshake ended."""
    socket = new_socket(kind)
    if password is not None:
        socket.plain_username, socket.plain_password = b"any", password
    ends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    monitor = socket.get_monitor_socket(ends | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    if kind == zmq.SUB:
        socket.subscribe(b"")
    socket.connect(endpoint)
    assert monitor.poll(DEADLINE_MS), "no end of the handshake"
    event = int(recv_monitor_message(monitor)["event"])
    socket.disable_monitor()
    return socket, event


def test_by_default_only_this_host_is_told() -> None:
    """By hand: the kernel's address of the default's socket."""
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=KVEventsConfig().endpoint.replace("5557", "0"))
    with KVEventPublisher(config, SIZE) as publisher:
        assert publisher.endpoint.startswith("tcp://127.0.0.1:")


def test_sockets_on_other_interfaces_without_a_key_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """By hand: the variable and the endpoints; none with a key, and none on this host."""
    for key, endpoint, warns in (("", "tcp://*:0", True), ("k", "tcp://*:0", False), ("", "tcp://lo:0", False)):
        caplog.clear()
        with KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint), SIZE, key):
            assert ("TP_ENGINE_KV_EVENTS_KEY" in caplog.text) == warns, (key, endpoint)


@pytest.mark.parametrize("password", [None, b"wrong", b"secret2"])
def test_strangers_do_not_come_in(password: bytes | None) -> None:
    """Oracle: libzmq's own account of the handshakes; those with the key hear and get replays."""
    with publisher_with_key() as publisher:
        for kind, endpoint in ((zmq.SUB, publisher.endpoint), (zmq.DEALER, publisher.replay_endpoint)):
            stranger, end = connected(kind, endpoint, password)
            stranger.close(0)
            assert end != zmq.EVENT_HANDSHAKE_SUCCEEDED
        listener, end = connected(zmq.SUB, publisher.endpoint, b"secret")
        assert end == zmq.EVENT_HANDSHAKE_SUCCEEDED
        asking, end = connected(zmq.DEALER, publisher.replay_endpoint, b"secret")
        assert end == zmq.EVENT_HANDSHAKE_SUCCEEDED
        while not listener.poll(10):  # the subscription may still be on its way
            assert publisher.put(Cleared())
        asking.send_multipart((b"", (0).to_bytes(8, "big")))
        assert asking.poll(DEADLINE_MS)
        for socket in (listener, asking):
            socket.close(0)


def test_a_key_that_zmq_can_not_carry_is_refused() -> None:
    """By hand: its passwords have at most 255 bytes."""
    with pytest.raises(ConfigError, match="TP_ENGINE_KV_EVENTS_KEY has 256 bytes; it must have at most 255"):
        KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://lo:0"), SIZE, "k" * 256)


def test_a_huge_message_ends_its_connection_alone() -> None:
    """By hand: libzmq drops a client that sends more than a number or a topic; others get their replays."""
    with publishing(replay_endpoint=LOOPBACK) as (publisher, listener):
        for kind, endpoint in ((zmq.DEALER, publisher.replay_endpoint), (zmq.XSUB, publisher.endpoint)):
            stranger = new_socket(kind)
            monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            stranger.connect(endpoint)
            stranger.send(b"\1" + b"x" * 5000)
            assert monitor.poll(DEADLINE_MS), "the connection lives"
            stranger.disable_monitor()
            stranger.close(0)
        assert publisher.put(Cleared())
        assert listener.receive()[1] == 0 and [one[1] for one in replay(publisher, 0)] == [0]


GREETING = b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)


def raw_subscriber(endpoint: str, kind: bytes = b"SUB") -> sockets.socket:
    """A client that speaks the protocol (ZMTP 3.0) itself."""
    ready = b"\5READY" + b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    connection = sockets.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])), timeout=DEADLINE_MS / 1000)
    connection.sendall(GREETING + b"\4" + bytes([len(ready)]) + ready)
    heard = b""
    while b"Socket-Type" not in heard and (more := connection.recv(1 << 10)):
        heard += more
    return connection


def subscriptions(number: int) -> bytes:
    """64 of a subscriber, which no other call has."""
    topics = (one.to_bytes(4, "little") * 15 for one in range(64 * number, 64 * number + 64))
    return b"".join(b"\0\x3d\1" + topic for topic in topics)


def frames(_number: int) -> bytes:
    """Some of a message that has no end, each of a size that may be."""
    return 16 * (b"\3" + (4000).to_bytes(8, "big") + bytes(4000))


@pytest.mark.parametrize(
    ("name", "kind", "written"), [("endpoint", b"SUB", subscriptions), ("replay_endpoint", b"DEALER", frames)]
)
def test_what_a_stranger_sends_is_bounded(name: str, kind: bytes, written: Callable[[int], bytes]) -> None:
    """By hand: of subscriptions, and of a message, without end some megabytes are taken; who listens goes on."""
    with (
        publishing(replay_endpoint=LOOPBACK) as (publisher, listener),
        raw_subscriber(getattr(publisher, name), kind) as stranger,
    ):
        stranger.settimeout(0.02)
        sent = number = 0
        with pytest.raises(ConnectionError):
            while sent < 1 << 29:
                with suppress(TimeoutError):  # libzmq reads on when the publisher has sent something
                    sent += stranger.send(written(number := number + 1))
                assert publisher.put(Cleared())
        assert sent > MOST_BYTES
        assert listener.receive()[1] == 0 and replay(publisher, 1 << 40) == []


class _Malloc(ctypes.Structure):
    """The C library's struct mallinfo2."""

    _fields_ = [(f"field_{number}", ctypes.c_size_t) for number in range(10)]


def malloc_bytes() -> int:
    """What is in use of the C library's memory, in mappings and in its heap."""
    look = ctypes.CDLL(None).mallinfo2
    look.restype = _Malloc
    found = look()
    return int(found.field_4) + int(found.field_7)


def test_replays_that_nobody_reads_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the C library; four replays of 12 MB to a client that does not read are no copies of it."""
    monkeypatch.setattr(publishing_thread, "_REPLAY_RESTS", 0)
    payload = bytes(1 << 20)
    with (
        patch.object(publishing_thread, "encode", lambda *_, **__: payload),
        publishing(replay_endpoint=LOOPBACK) as (publisher, listener),
        raw_subscriber(publisher.replay_endpoint, b"DEALER") as stranger,
    ):
        for number in range(12):
            publisher.put(Cleared())
            assert listener.receive()[1] == number
        before = malloc_bytes()
        for _ in range(4):
            ended_s = publisher._next_replay_s
            stranger.sendall(b"\1\0\0\x08" + bytes(8))
            deadline_s = time.monotonic() + DEADLINE_MS / 1000
            while publisher._next_replay_s == ended_s:
                assert time.monotonic() < deadline_s, "no replay"
                time.sleep(0.001)
        assert malloc_bytes() - before < 12 << 20


@pytest.mark.parametrize(("name", "kind"), [("endpoint", b"SUB"), ("replay_endpoint", b"DEALER")])
def test_connections_of_strangers_are_bounded(name: str, kind: bytes) -> None:
    """By hand: one more than may be is closed, those before it live, and when all have left there is room again."""
    with publishing(replay_endpoint=LOOPBACK) as (publisher, listener), ExitStack() as stack:
        endpoint = getattr(publisher, name)
        for _ in range(MOST_CONNECTIONS - (name == "endpoint")):
            stack.enter_context(raw_subscriber(endpoint, kind))
        with suppress(ConnectionError), raw_subscriber(endpoint, kind) as one_more:
            while one_more.recv(1 << 16):
                pass
        publisher.put(Cleared())
        assert listener.receive()[1] == 0
        stack.close()
        assert replay(publisher, 1) == []
