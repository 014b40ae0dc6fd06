"""Measure the HTTP frontend's own cost per streamed token, in front of an engine that computes nothing.

    python scripts/bench_frontend.py                                    64 streams, at full speed
    python scripts/bench_frontend.py --streams 1000 --tokens 200 --step-ms 100

The frontend is one process with one event loop; engine, client and health probe are separate processes.  It prints
tokens per second of wall time, tokens per second of the frontend's CPU time (the rate of one full core), and the time
of ``/health`` under this load.  The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.machine import processor_name
from benchmarks.serving.launch import own_server

_PROBE_EVERY_S = 0.02


def main() -> int:
    """Measure and print; returns 1 if a stream broke."""
    args = parse_arguments()
    if args.probe:
        return probe_health(args.probe)
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--step-ms", str(args.step_ms), "--max-num-seqs", str(args.streams)]
        arguments += ["--max-num-batched-tokens", str(max(2048, args.streams)), "--generation-config", "vllm"]
        script = "scripts/bench_fake_server.py"
        with own_server(arguments, 1, Path(folder) / "server.log", script=script) as url:
            asyncio.run(stream_all(url, args, num_streams=min(8, args.streams), num_tokens=50))
            report = measure(url, args)
    for name in ("tokens_per_s", "tokens_per_frontend_cpu_s", "frontend_us_per_token"):
        print(f"{name:<28}{report[name]:>12,.1f}")
    print(f"{'health p50, p99, max (ms)':<28}" + "".join(f"{report['health_ms'][name]:>9.1f}" for name in _PROBED))
    print(json.dumps(report))
    return 1 if report["broken"] else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="requests at once")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of each")
    parser.add_argument("--step-ms", type=float, default=0.0, help="the engine's time per token; 0: none")
    parser.add_argument("--chat", action="store_true", help="the chat endpoint instead of completions")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run all streams at once, and a probe of ``/health`` beside them."""
    frontend = find_frontend()
    probe = subprocess.Popen(
        [sys.executable, __file__, "--probe", url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert probe.stdout is not None
    probe.stdout.readline()  # it has begun
    began_s, began_cpu_s = time.perf_counter(), cpu_seconds(frontend)
    num_whole = asyncio.run(stream_all(url, args, num_streams=args.streams, num_tokens=args.tokens))
    wall_s, cpu_s = time.perf_counter() - began_s, cpu_seconds(frontend) - began_cpu_s
    health, _ = probe.communicate("")
    num_tokens = args.streams * args.tokens
    return {
        "benchmark": "frontend", "machine": processor_name(), "streams": args.streams, "tokens": args.tokens,
        "step_ms": args.step_ms, "endpoint": "chat" if args.chat else "completions",
        "tokens_per_s": num_tokens / wall_s, "tokens_per_frontend_cpu_s": num_tokens / cpu_s,
        "frontend_us_per_token": cpu_s / num_tokens * 1e6, "frontend_cpu_share": cpu_s / wall_s,
        "broken": args.streams - num_whole, "health_ms": json.loads(health.splitlines()[-1]),
    }  # fmt: skip


class Reader(asyncio.Protocol):
    """Sends one request and reads to the end; ``whole``: the stream has all tokens."""

    def __init__(self, request: bytes, num_tokens: int) -> None:
        self._request = request
        self._ending = b'"completion_tokens":%d,' % num_tokens
        self._tail = b""
        self.whole = False
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-1024:]

    def connection_lost(self, exc: Exception | None) -> None:
        self.whole = self._ending in self._tail and b"data: [DONE]" in self._tail
        self.done.set_result(None)


async def stream_all(url: str, args: argparse.Namespace, *, num_streams: int, num_tokens: int) -> int:
    """The number of streams that arrived whole."""
    where, loop = urlsplit(url), asyncio.get_running_loop()
    body: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    body["stream_options"] = {"include_usage": True}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if args.chat else {"prompt": "hi"}
    payload = json.dumps(body).encode()
    path = "/v1/chat/completions" if args.chat else "/v1/completions"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    assert where.hostname is not None and where.port is not None
    readers = []
    for _ in range(num_streams):
        _, reader = await loop.create_connection(
            lambda: Reader(head.encode() + payload, num_tokens), where.hostname, where.port
        )
        readers.append(reader)
    await asyncio.gather(*(reader.done for reader in readers))
    return sum(reader.whole for reader in readers)


_PROBED = ("p50", "p99", "max")


def probe_health(url: str) -> int:
    """Ask ``/health`` until standard input ends, each time on a new connection; prints milliseconds."""
    where, times = urlsplit(url), []
    stdin = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115 - open until the process ends
    os.set_blocking(stdin.fileno(), False)
    print("probing", flush=True)
    while stdin.read(1) != b"":
        began_s = time.perf_counter()
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        times.append((time.perf_counter() - began_s) * 1e3)
        time.sleep(_PROBE_EVERY_S)
    times.sort()
    values = (times[len(times) // 2], times[min(len(times) - 1, int(len(times) * 0.99))], times[-1])
    print(json.dumps(dict(zip(_PROBED, values, strict=True)) | {"probes": len(times)}))
    return 0


def find_frontend() -> int:
    """The process id of the frontend: the descendant of this process that runs ``tp_engine.server.main``."""
    todo = [os.getpid()]
    while todo:
        pid = todo.pop()
        if b"tp_engine.server.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
        for task in Path(f"/proc/{pid}/task").iterdir():
            todo += map(int, (task / "children").read_text().split())
    raise RuntimeError("there is no frontend process")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
