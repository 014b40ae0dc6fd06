"""The service on rank 0 and its asyncio client, with a fake engine in a thread or a process."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.fake_engine import MODEL_INFO, FakeEngine, ServiceThread, arith, fake_service
from tp_engine.engine.client import EngineClient
from tp_engine.engine.service import EngineService
from tp_engine.engine.service_socket import ServiceSocket, new_address, remove_address
from tp_engine.errors import CODE_UNAVAILABLE, EngineDeadError, RequestError
from tp_engine.requests.request import EngineRequest, FinishReason, SequenceDelta, StepOutput
from tp_engine.requests.sampling_params import SamplingParams

DEADLINE_S = 100.0


class Recorder:
    """Everything that a client reported, with a condition to wait on."""

    def __init__(self) -> None:
        self.deltas: list[SequenceDelta] = []
        self.rejected: dict[str, RequestError] = {}
        self.ended: EngineDeadError | None = None
        self._changed = asyncio.Event()

    def on_output(self, output: StepOutput) -> None:
        self.deltas += output
        self._changed.set()

    def on_rejected(self, request_id: str, error: RequestError) -> None:
        self.rejected[request_id] = error
        self._changed.set()

    is_busy = False

    async def wait_delivered(self) -> None:
        """Always ready."""

    def on_ended(self, error: EngineDeadError) -> None:
        self.ended = error
        self._changed.set()

    def tokens(self, request_id: str) -> list[int]:
        return [t for delta in self.deltas if delta.request_id == request_id for t in delta.new_token_ids]

    def finish_reasons(self) -> dict[str, str]:
        return {d.request_id: d.finish_reason.value for d in self.deltas if d.finish_reason is not None}

    async def until(self, condition: object) -> None:
        assert callable(condition)
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            self._changed.clear()


def request(request_id: str, prompt: list[int] | None = None, **params: object) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt or [5, 6, 7],
        params=SamplingParams(**params),  # type: ignore[arg-type]
        eos_token_ids=(1,),
        arrival_s=time.monotonic(),
    )


async def connected(address: str) -> tuple[EngineClient, Recorder]:
    recorder = Recorder()
    return await EngineClient.connect(address, recorder, timeout_s=DEADLINE_S), recorder


def test_requests_are_answered_and_a_stop_is_clean() -> None:
    """Oracle: the fake engine's echo."""

    async def scenario() -> None:
        client, recorder = await connected(service.address)
        assert client.model_info == MODEL_INFO
        for i in range(20):
            client.add_request(request(f"r{i}", [10 + i, 11 + i], n=2))
        await recorder.until(lambda: sum(d.finish_reason is not None for d in recorder.deltas) == 40)
        for i in range(20):
            assert sorted(recorder.tokens(f"r{i}")) == sorted(2 * [10 + i, 11 + i, 1])
        stats = (await client.report(None, timeout_s=DEADLINE_S)).stats
        assert (stats.num_running, stats.num_free_blocks) == (0, 256)
        client.stop()
        assert await client.wait_ended(timeout_s=DEADLINE_S)
        assert client.stopped
        await client.close()

    with fake_service() as service:
        asyncio.run(scenario())
        service.join()
    assert service.error is None


def test_work_of_pauses_begins_right_after_the_last_step() -> None:
    """Oracle: what the loop does: after a step a short look at the socket and work, as long as there is work; then it
    waits longer."""
    acts: list[object] = []

    class Busy(FakeEngine):
        num_left = 0

        def step(self) -> StepOutput:
            acts.append("step")
            self.num_left = 3
            return super().step()

        def run_background_io(self) -> bool:
            self.num_left -= 1
            acts.append("work" if self.num_left >= 0 else "none")
            return self.num_left > 0

    async def scenario(service: ServiceThread) -> None:
        client, recorder = await connected(service.address)
        sockets = service.service._socket
        receive = sockets.receive

        def noted(timeout_s: float) -> list[bytes]:
            acts.append(timeout_s)
            return receive(timeout_s)

        sockets.receive = noted  # type: ignore[method-assign]
        client.add_request(request("a", max_tokens=2))
        await recorder.until(lambda: "a" in recorder.finish_reasons())
        deadline_s = time.monotonic() + DEADLINE_S
        while acts.count("work") < 3 or acts[-1] != 1.0:
            assert time.monotonic() < deadline_s, acts
            await asyncio.sleep(0.01)
        client.stop()
        await client.close()

    with fake_service(Busy()) as service:
        asyncio.run(scenario(service))
        service.join()
    last = len(acts) - 1 - acts[::-1].index("step")
    assert acts[last + 1 : last + 8] == [0.001, "work", 0.001, "work", 0.001, "work", 1.0]


def test_refused_and_malformed_requests_leave_the_loop_alive() -> None:
    """Oracle: the engine's RequestError arrives with its fields, the error names a wrong type, the next request is
    served."""

    class Strict(FakeEngine):
        def add_request(self, request: EngineRequest) -> None:
            if len(request.prompt_token_ids) > 3:
                raise RequestError("too long by 1", param="prompt", code="context_length_exceeded")
            super().add_request(request)

    async def scenario() -> None:
        client, recorder = await connected(service.address)
        client.add_request(request("long", [1, 2, 3, 4]))
        client.add_request(request("wrong", ["a"]))  # type: ignore[list-item]
        client.add_request(request("good"))
        await recorder.until(lambda: "good" in recorder.finish_reasons())
        long, wrong = recorder.rejected["long"], recorder.rejected["wrong"]
        assert (str(long), long.param, long.code) == ("too long by 1", "prompt", "context_length_exceeded")
        assert "prompt_token_ids" in str(wrong)
        client.stop()
        await client.wait_ended(timeout_s=DEADLINE_S)
        await client.close()

    with fake_service(Strict()) as service:
        asyncio.run(scenario())
        service.join()
    assert service.error is None


def test_abort_ends_only_the_named_request() -> None:
    """Oracle: the finish reasons."""

    async def scenario() -> None:
        client, recorder = await connected(service.address)
        client.add_request(request("gone", max_tokens=10_000))
        client.add_request(request("stays", max_tokens=30))
        await recorder.until(lambda: len(recorder.tokens("gone")) > 2)
        client.abort(["gone", "unknown"])
        await recorder.until(lambda: len(recorder.finish_reasons()) == 2)
        assert recorder.finish_reasons() == {"gone": "abort", "stays": "length"}
        client.stop()
        await client.wait_ended(timeout_s=DEADLINE_S)
        await client.close()

    with fake_service(FakeEngine(arith, step_delay_s=0.002)) as service:
        asyncio.run(scenario())


@pytest.mark.parametrize("forgotten", [False, True])
def test_many_sequences_are_aborted_between_several_steps(forgotten: bool) -> None:
    """Oracle: counts.  No part has more sequences than a turn takes, steps run between the parts, each sequence has one
    last record, or none where nobody wants it; a namesake that comes next finds the id free."""
    parts: list[tuple[int, int]] = []

    class Counted(FakeEngine):
        def abort(self, request_ids: Iterable[str]) -> list[SequenceDelta]:
            ended = super().abort(request_ids)
            parts.append((len(ended), self.num_steps))
            return ended

    async def scenario() -> None:
        client, recorder = await connected(service.address)
        client.add_request(request("stays", max_tokens=10_000))
        names = [f"many {number}" for number in range(24)]
        for name in names:
            client.add_request(request(name, max_tokens=10_000, n=128))
        await recorder.until(lambda: len(recorder.tokens("stays")) > 2)
        client.abort(names, forgotten=forgotten)
        client.add_request(request(names[-1], max_tokens=1))
        await recorder.until(lambda: recorder.finish_reasons().get(names[-1]) == "length")
        ends = [delta for delta in recorder.deltas if delta.finish_reason is FinishReason.ABORT]
        assert len(ends) == (0 if forgotten else 24 * 128)
        client.abort(["stays"])
        await recorder.until(lambda: recorder.finish_reasons().get("stays") == "abort")
        client.stop()
        await client.wait_ended(timeout_s=DEADLINE_S)
        await client.close()

    with fake_service(Counted(arith, max_running=2)) as service:
        asyncio.run(scenario())
    counts = [count for count, _ in parts if count > 1]
    assert sum(counts) == 24 * 128 and max(counts) <= 1024
    assert len({step for count, step in parts if count > 1}) >= 3


def test_a_failing_step_is_told_and_raised() -> None:
    """Oracle: the fake engine's exception: the client gets it as a reason, ``run`` raises it."""

    async def scenario() -> None:
        client, recorder = await connected(service.address)
        client.add_request(request("r", max_tokens=100))
        assert await client.wait_ended(timeout_s=DEADLINE_S)
        assert recorder.ended is not None and "rank 1: this step was told to fail" in str(recorder.ended)
        assert not client.stopped
        with pytest.raises(EngineDeadError, match="told to fail"):
            client.add_request(request("late"))
        with pytest.raises(EngineDeadError, match="told to fail"):
            await client.report(None, timeout_s=DEADLINE_S)
        client.abort(["r"])
        await client.close()

    with fake_service(FakeEngine(arith, fail_at_step=3)) as service:
        asyncio.run(scenario())
        service.join()
    assert isinstance(service.error, RuntimeError) and "told to fail" in str(service.error)


def test_a_request_that_comes_with_the_stop_is_refused() -> None:
    """Oracle: running requests are aborted; a request that arrives in the same step as the stop gets the code for
    503.  Both are sent while a step is held up."""
    may_go_on, is_held = threading.Event(), threading.Event()
    may_go_on.set()

    class Held(FakeEngine):
        def step(self) -> StepOutput:
            if not may_go_on.is_set():
                is_held.set()
                assert may_go_on.wait(DEADLINE_S)
            return super().step()

    async def scenario() -> None:
        client, recorder = await connected(service.address)
        client.add_request(request("runs", max_tokens=40))
        await recorder.until(lambda: recorder.tokens("runs"))
        may_go_on.clear()
        assert await asyncio.to_thread(is_held.wait, DEADLINE_S)
        client.stop()
        client.add_request(request("late"))
        may_go_on.set()
        assert await client.wait_ended(timeout_s=DEADLINE_S)
        assert client.stopped
        assert recorder.finish_reasons() == {"runs": "abort"}
        assert recorder.rejected["late"].code == CODE_UNAVAILABLE
        await client.close()

    with fake_service(Held(arith, step_delay_s=0.5)) as service:
        asyncio.run(scenario())
        service.join()
    assert service.error is None


def test_serving_out_refuses_nothing_and_ends_with_the_frontend() -> None:
    """Oracle: a request after another one finishes; the loop ends without an error when the frontend leaves."""

    async def scenario() -> None:
        client, recorder = await connected(service.address)
        client.add_request(request("first", max_tokens=3))
        service.service.drain(DEADLINE_S)
        await recorder.until(lambda: "first" in recorder.finish_reasons())
        client.add_request(request("second", max_tokens=3))
        await recorder.until(lambda: "second" in recorder.finish_reasons())
        assert recorder.finish_reasons() == {"first": "length", "second": "length"}
        assert client.error is None
        await client.close()

    with fake_service(FakeEngine(arith, step_delay_s=0.005)) as service:
        asyncio.run(scenario())
        service.join()
    assert service.error is None


def test_the_deadline_of_serving_out_aborts_what_still_runs() -> None:
    """Oracle: a request of 10,000 tokens, 10 ms each, ends with abort after a deadline of 0.1 s, far from its end."""

    async def scenario() -> None:
        client, recorder = await connected(service.address)
        client.add_request(request("slow", max_tokens=10_000))
        await recorder.until(lambda: recorder.tokens("slow"))
        started_s = time.monotonic()
        service.service.drain(0.1)
        assert await client.wait_ended(timeout_s=DEADLINE_S)
        assert time.monotonic() - started_s >= 0.1
        assert len(recorder.tokens("slow")) < 2_000
        assert recorder.finish_reasons() == {"slow": "abort"}
        await client.close()

    with fake_service(FakeEngine(arith, step_delay_s=0.01)) as service:
        asyncio.run(scenario())


def test_idle_loop_wakes_at_once_and_costs_nothing() -> None:
    """Oracle: this process's CPU clock while idle; a stop from another thread ends an idle wait."""
    engine = FakeEngine()
    with fake_service(engine) as service:
        before_s = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before_s < 0.05
        service.service.request_stop()
        service.join()


def test_a_frontend_that_leaves_ends_the_loop() -> None:
    """Oracle: the engine's record of aborted requests, and the error's text."""
    engine = FakeEngine(arith, step_delay_s=0.002)

    async def scenario() -> None:
        client, recorder = await connected(service.address)
        client.add_request(request("orphan", max_tokens=10_000))
        await recorder.until(lambda: recorder.tokens("orphan"))
        await client.close()

    with fake_service(engine) as service:
        asyncio.run(scenario())
        service.join()
    assert "frontend process went away" in str(service.error)
    assert engine.aborted == ["orphan"] and not engine.has_unfinished


def test_a_frontend_that_never_comes_is_named() -> None:
    """Oracle: the error's text, after the set time."""
    with fake_service(connect_timeout_s=0.0) as service:
        service.join()
    assert "waited 0 s for the frontend process to connect" in str(service.error)


def test_killed_rank_0_is_noticed() -> None:
    """Oracle: kill -9; the client reports the end and keeps what it received before."""
    address = new_address()
    process = subprocess.Popen([sys.executable, "-m", "tests.fake_engine", address], cwd=Path(__file__).parents[3])

    async def scenario() -> None:
        client, recorder = await connected(address)
        client.add_request(request("r", max_tokens=1000))
        await recorder.until(lambda: recorder.tokens("r"))
        process.kill()
        assert await client.wait_ended(timeout_s=DEADLINE_S)
        assert "rank 0 went away" in str(recorder.ended)
        await client.close()

    try:
        asyncio.run(scenario())
        assert not Path(address.removeprefix("unix://")).parent.exists()
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        remove_address(address)


def test_connecting_to_nobody_ends_at_the_deadline() -> None:
    """Oracle: the error names the address."""
    address = new_address()

    async def scenario() -> None:
        with pytest.raises(EngineDeadError, match=r"waited 0\.1 s for rank 0"):
            await EngineClient.connect(address, Recorder(), timeout_s=0.1)

    try:
        asyncio.run(scenario())
    finally:
        remove_address(address)


def test_address_is_private_and_removed() -> None:
    """Oracle: mode bits of the folder; the folder is gone after close; a second removal raises nothing."""
    address = new_address()
    folder = Path(address.removeprefix("unix://")).parent
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    ServiceSocket(address).close()
    assert not folder.exists()
    remove_address(address)


def test_service_that_can_not_bind_leaves_nothing() -> None:
    """Oracle: the system's own error for a missing folder."""
    address = new_address()
    remove_address(address)
    with pytest.raises(FileNotFoundError):
        EngineService(cast(Any, FakeEngine()), address)


def test_finish_reasons_cover_the_fake_engine() -> None:
    """The fake engine itself: EOS stops, a stop token is named, length ends. Oracle: the definitions."""
    engine = FakeEngine()
    engine.add_request(request("eos", [4]))
    engine.add_request(request("stop", [4], stop_token_ids=[4]))
    engine.add_request(request("length", [4], max_tokens=1))
    ends: dict[str, Any] = {}
    while engine.has_unfinished:
        ends |= {d.request_id: (d.finish_reason, d.stop_reason) for d in engine.step() if d.finish_reason}
    assert ends == {
        "eos": (FinishReason.STOP, None),
        "stop": (FinishReason.STOP, 4),
        "length": (FinishReason.LENGTH, None),
    }
