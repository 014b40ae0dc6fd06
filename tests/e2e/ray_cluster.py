"""A local Ray cluster with replicas of the demo model; a separate program, because Ray starts many processes.

``python ray_cluster.py FOLDER`` prints one JSON object: what Ray Data, Ray Serve and its clients saw.  FOLDER is for
Ray's files and must have a short path, because Ray keeps sockets in it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import ray
from ray import serve
from ray.data import ActorPoolStrategy
from ray.data.llm import HttpRequestProcessorConfig, build_processor

from tests.e2e.serving import free_port
from tp_engine.apps.ray import ray_actor_options
from tp_engine.apps.ray.data import Generate
from tp_engine.apps.ray.serve import build_app

ENGINE = {"tensor_parallel_size": 2, "device": "cpu", "num_gpu_blocks_override": 256, "max_num_seqs": 8}
REPLICAS = 2
CLIENTS = 6
DEADLINE_S = 90.0
LONG = {"prompt": "12+34=", "max_tokens": 150, "ignore_eos": True, "temperature": 0, "stream": True}


@dataclass
class Exchange:
    """One streamed request of the load: when it began, the replica of its headers, and whether it came to its end."""

    began_s: float
    replica: str | None = None
    status: int | None = None
    is_whole: bool = False


class Load:
    """Clients that stream one completion after the other until ``stop``."""

    def __init__(self, url: str) -> None:
        self.exchanges: list[Exchange] = []
        self._url = url
        self._stopped = threading.Event()
        self._clients = [threading.Thread(target=self._run) for _ in range(CLIENTS)]
        for client in self._clients:
            client.start()

    def stop(self) -> None:
        self._stopped.set()
        for client in self._clients:
            client.join(DEADLINE_S)

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=DEADLINE_S) as client:
            while not self._stopped.is_set():
                exchange = Exchange(time.monotonic())
                self.exchanges.append(exchange)
                try:
                    self._stream(client, exchange)
                except httpx.HTTPError:
                    continue

    def _stream(self, client: httpx.Client, exchange: Exchange) -> None:
        with client.stream("POST", "/v1/completions", json=LONG) as reply:
            exchange.status, exchange.replica = reply.status_code, reply.headers.get("x-replica-id")
            lines = list(reply.iter_lines())
        exchange.is_whole = (
            reply.status_code == 200 and "data: [DONE]" in lines and not any('"error"' in x for x in lines)
        )


def replicas(client: httpx.Client) -> dict[str, list[int]]:
    """The pids of the ranks of each replica, by the replica's name; Serve picks a replica for each question."""
    found: dict[str, list[int]] = {}
    for _ in range(40):
        reply = client.get("/engine")
        if reply.status_code == 200:
            found[reply.headers["x-replica-id"]] = [rank["pid"] for rank in reply.json()["ranks"]]
    return found


def wait_until(condition: Any, what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.1)


def num_running() -> int:
    """How many replicas Serve counts as running."""
    deployments = serve.status().applications["default"].deployments
    return int(deployments["tp_engine"].replica_states.get("RUNNING", 0))


def offline() -> list[str]:
    """Ray Data: sums by two actors with an engine each; the texts in the order of the questions."""
    rows = [{"id": number, "prompt": [{"role": "user", "content": f"{number}+{number}="}]} for number in range(12)]
    done = ray.data.from_items(rows).map_batches(
        Generate,
        fn_constructor_kwargs={"engine": ENGINE, "sampling": {"temperature": 0, "max_tokens": 8}},
        compute=ActorPoolStrategy(size=REPLICAS),
        batch_size=3,
        **ray_actor_options(ENGINE, num_cpus=1),
    )
    return [row["generated_text"] for row in sorted(done.take_all(), key=lambda row: int(row["id"]))]


def over_http(url: str) -> list[str]:
    """Ray Data against the running servers, with Ray's own processor."""
    config = HttpRequestProcessorConfig(url=f"{url}/v1/chat/completions", qps=50, batch_size=4, concurrency=1)
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "payload": {
                "messages": [{"role": "user", "content": f"{row['item']}+{row['item']}="}],
                "temperature": 0,
                "max_tokens": 8,
            }
        },
        postprocess=lambda row: {"text": row["http_response"]["choices"][0]["message"]["content"]},
    )
    return sorted(row["text"] for row in processor(ray.data.from_items([2, 4, 6, 8])).take_all())


def kill_one(url: str, client: httpx.Client) -> dict[str, Any]:
    """SIGKILL for one replica's actor under load, until Serve has replaced it and the new one answers."""
    before = replicas(client)
    victim, ranks = sorted(before.items())[0]
    actor = psutil.Process(ranks[0]).parent()
    assert actor is not None
    load = Load(url)
    wait_until(lambda: sum(exchange.is_whole for exchange in load.exchanges) > CLIENTS, "the load")
    wait_until(lambda: any(x.replica == victim and not x.is_whole for x in load.exchanges), "a request in flight")
    killed_s = time.monotonic()
    os.kill(actor.pid, signal.SIGKILL)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), "the end of the ranks")
    ranks_gone_s = time.monotonic() - killed_s
    wait_until(lambda: set(replicas(client)) - set(before), "another replica")
    wait_until(lambda: num_running() == REPLICAS, "all replicas")
    replaced_s = time.monotonic() - killed_s
    num_before = len(load.exchanges)
    wait_until(lambda: len(load.exchanges) > num_before + 3 * CLIENTS, "more answers")
    load.stop()
    lost = [exchange for exchange in load.exchanges if not exchange.is_whole]
    return {
        "num_requests": len(load.exchanges),
        "by_replica": len(Counter(exchange.replica for exchange in load.exchanges if exchange.is_whole)),
        "lost": [
            {"after_kill_s": x.began_s - killed_s, "on_victim": x.replica == victim, "status": x.status} for x in lost
        ],
        "ranks_gone_s": ranks_gone_s,
        "replaced_s": replaced_s,
    }


def main() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    began_s = time.monotonic()
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=sys.argv[1])
    result: dict[str, Any] = {"offline": offline()}
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    app = build_app(
        {
            "engine": ENGINE,
            "server": {"served_model_name": ["demo"]},
            "deployment": {
                "num_replicas": REPLICAS,
                "ray_actor_options": {"num_cpus": 1},
                "health_check_period_s": 1.0,
            },
        }
    )
    serve.run(app)
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        result["ready_s"] = time.monotonic() - began_s
        result["models"] = [model["id"] for model in client.get("/v1/models").json()["data"]]
        result["over_http"] = over_http(url)
        result["kill"] = kill_one(url, client)
        ranks = [pid for pids in replicas(client).values() for pid in pids]
    serve.shutdown()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), "the end of all ranks")
    ray.shutdown()
    print(json.dumps({**result, "total_s": time.monotonic() - began_s}))


if __name__ == "__main__":
    main()
