"""KV events of real engines, over real sockets.  Oracle: what the prompts' own hashes say, and what is cached."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from tests.e2e.serving import warm_serving
from tests.kv_events import Subscriber, new_socket, plain_hashes
from tests.tiers import slow_but
from tp_engine import LLM, ConfigError, SamplingParams
from tp_engine.features.kv_events.feature import COUNTERS

pytestmark = pytest.mark.usefixtures("warm_children")

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 96, "num_gpu_blocks_override": 14, "max_num_seqs": 4,
    "max_num_batched_tokens": 32, "block_size": 8,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
SECONDS = 20


def subscribe(endpoint: str, topic: str) -> zmq.Socket[bytes]:
    """A socket that gets what is sent from a moment later on."""
    socket = new_socket(zmq.SUB)
    socket.subscribe(topic)
    socket.connect(endpoint)
    return socket


def replay(endpoint: str, first: int, subscriber: Subscriber) -> int:
    """Take the messages from ``first`` on from the ROUTER socket; the number behind the last."""
    with new_socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            assert socket.poll(SECONDS * 1000), "the replay has no end"
            _, _, number, payload = socket.recv_multipart()
            at = int.from_bytes(number, "big", signed=True)
            if at == -1:
                return first
            assert at == first
            subscriber.take(payload)
            first += 1


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for it."""
    deadline_s = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {SECONDS} s for {what}"
        time.sleep(0.02)


@pytest.mark.parametrize("num_ranks", slow_but([1], [1, 2]))
def test_a_subscriber_knows_what_is_cached(num_ranks: int, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: of each sequence as many blocks as a prompt that begins with it finds; 14 blocks are too few for all, so
    some are evicted, and with a host tier they go there.  A second engine at the endpoint is refused."""
    folder = checkpoint("qwen3", vocab_size=203)
    config: dict[str, Any] = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
        "topic": "kv@pod@model",
    }
    options = {**OPTIONS, "tensor_parallel_size": num_ranks, "kv_offloading_size": 0.001, "kv_events_config": config}
    prompts = [[(7 * seed + 3 * place) % 190 + 5 for place in range(30 + seed)] for seed in range(8)]
    subscriber = Subscriber(8)
    with LLM(str(folder), **options) as llm, subscribe(config["endpoint"], "kv@") as socket:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        llm.generate([[3]], GREEDY, use_tqdm=False)  # in whose steps the last copies to the host tier arrive
        number = 0

        def is_current() -> bool:
            nonlocal number
            number = replay(config["replay_endpoint"], number, subscriber)
            sent = COUNTERS.get(llm.engine.stats())
            assert sent is not None and sent.num_lost_changes == 0
            return number == sent.num_batches

        until(is_current, "the last message")
        assert socket.poll(SECONDS * 1000) and socket.recv_multipart()[0] == b"kv@pod@model"
        sequences = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
        told = [[hash in subscriber.blocks for hash in plain_hashes(one, 8)] for one in sequences]
        assert all(one == sorted(one, reverse=True) for one in told), "a block without the one before it"
        assert subscriber.num_removed and subscriber.media["CPU"]
        with pytest.raises(ConfigError, match=r"endpoint ipc://.*in use"):
            LLM(str(folder), **{**options, "tensor_parallel_size": 1})
        (output,) = llm.generate([[*sequences[-1], 1]], SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.num_cached_tokens == 8 * sum(told[-1])
        assert llm.reset_prefix_cache()
        until(lambda: is_current() and not subscriber.content(), "the cleared cache")


@pytest.mark.slow
def test_a_server_publishes() -> None:
    """Oracle: the hashes of a prompt of known tokens; a reset clears; the metrics count; the flags are spelt key by
    key."""
    with new_socket(zmq.SUB) as socket:
        socket.subscribe("t")
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        words = ("enable_kv_cache_events true", f"endpoint tcp://127.0.0.1:{port}", "topic t")
        flags = [word for one in words for word in f"--kv-events-config.{one}".split()]
        with (
            warm_serving(1, *flags, "--num-gpu-blocks-override", "64") as server,
            httpx.Client(base_url=server.url, timeout=SECONDS) as client,
        ):
            assert not socket.poll(100)  # which also takes the connection in, and sends the subscription
            subscriber = Subscriber(16)
            prompt = list(range(1, 41))
            client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).raise_for_status()
            assert socket.poll(SECONDS * 1000), "no event"
            subscriber.take(socket.recv_multipart()[2])
            assert sorted(subscriber.blocks) == sorted(plain_hashes(prompt, 16))
            client.post("/reset_prefix_cache").raise_for_status()
            assert socket.poll(SECONDS * 1000), "no event"
            subscriber.take(socket.recv_multipart()[2])
            assert not subscriber.content()
            text = client.get("/metrics").text
            assert 'tp_engine:kv_event_batches_total{model_name="demo_model"} 2.0' in text
