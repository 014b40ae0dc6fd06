"""An engine without a model, with the interface of ``Engine``: it gives known tokens, one per sequence and step.

A test may drive ``FakeEngine`` directly, or serve it in a thread with ``fake_service``.  ``python -m tests.fake_engine
ADDRESS`` serves it in a process that the test may kill.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np

from tp_engine.engine.messages import ModelInfo
from tp_engine.engine.report import (
    PLAN_BYTES,
    STEP_TIME_S,
    STEP_TOKENS,
    WAIT_S,
    Distribution,
    EngineReport,
    ExpertBalance,
    RankReport,
)
from tp_engine.engine.service import EngineService
from tp_engine.engine.service_socket import new_address
from tp_engine.errors import RequestError
from tp_engine.features.extension import Extension
from tp_engine.features.images.feature import ImageCounters
from tp_engine.features.kv_events.feature import KVEventCounters
from tp_engine.features.lora.feature import AdapterStats
from tp_engine.features.lora.scheduling import LoRASlots
from tp_engine.features.registry import Half, features
from tp_engine.features.speculation.feature import SpeculationCounters
from tp_engine.features.tiers.feature import TierStats
from tp_engine.model_config.kv_layout import DiskCounters, MoveCounters
from tp_engine.plan import FloatArray, TokenLogprobs
from tp_engine.requests.request import EngineRequest, FinishReason, SequenceDelta, StepOutput
from tp_engine.sched.view import PoolGrid, RunningSequence, SchedulerStats, SchedulerView, ViewLimits

THREAD_DEADLINE_S = 100.0
Reply = Callable[[EngineRequest], Sequence[int]]

MODEL_INFO = ModelInfo(
    model="fake",
    tokenizer="fake",
    max_model_len=1024,
    vocab_size=1000,
    eos_token_ids=(1,),
    block_size=16,
    num_blocks=256,
    tensor_parallel_size=1,
    dtype="float32",
    device="cpu",
    max_num_seqs=64,
    max_logprobs=20,
)


# Figures of features that tests look at; the others have their defaults.
STATS: dict[str, Any] = {
    "speculation": SpeculationCounters(5, 20, 12, [5, 4, 2, 1], {"ngram": (20, 12)}),
    "lora": AdapterStats(max_loras=4, running=("one", "two"), waiting=("three",)),
    "images": ImageCounters(num_queries=9, num_hits=4, num_encoded=5, num_rows_used=70),
    "tiers": TierStats(num_host_slots=12, num_used_host_slots=3),
    "kv_events": KVEventCounters(num_batches=6, num_lost_changes=2),
}


def _parts_of_stats() -> list[Extension[Any]]:
    """The features' parts of the statistics."""
    return [feature.stats for feature in features() if feature.stats is not None]


def echo(request: EngineRequest) -> list[int]:
    """The prompt again, then the end."""
    return [*request.prompt_token_ids, *request.eos_token_ids[:1]]


def arith(request: EngineRequest) -> list[int]:
    """The prompt's last token plus 1, 2, 3, ... without an end (modulo 1000)."""
    last = request.prompt_token_ids[-1]
    return [(last + 1 + i) % 1000 for i in range(request.params.max_tokens or 0)]


def says(token_ids: Sequence[int]) -> Reply:
    """A reply of these tokens, then the end."""
    return lambda request: [*token_ids, *request.eos_token_ids[:1]]


@dataclass
class _Sequence:
    request: EngineRequest
    index: int
    reply: Sequence[int]
    num_given: int = 0
    first_scheduled_s: float = 0.0

    def next_delta(self, now_s: float) -> SequenceDelta:
        request, is_first = self.request, self.num_given == 0
        self.first_scheduled_s = self.first_scheduled_s or now_s
        if request.pooling is not None:
            return SequenceDelta(
                request_id=request.request_id,
                index=self.index,
                new_token_ids=[],
                finish_reason=FinishReason.STOP,
                pooled=fake_pooled(request),
                first_scheduled_s=self.first_scheduled_s,
            )
        token_id = self.reply[self.num_given]
        self.num_given += 1
        params = request.params
        wants_prompt = is_first and params.prompt_logprobs is not None
        finish_reason, stop_reason = self._finish(token_id)
        return SequenceDelta(
            request_id=request.request_id,
            index=self.index,
            new_token_ids=[token_id],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=None if params.logprobs is None else fake_logprobs([token_id], params.logprobs),
            prompt_logprobs=[fake_logprobs(request.prompt_token_ids[1:], params.prompt_logprobs or 0)]
            if wants_prompt
            else [],
            first_scheduled_s=self.first_scheduled_s,
        )

    def _finish(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        params, allowed = self.request.params, self.num_given > self.request.params.min_tokens
        if allowed and not params.ignore_eos and token_id in self.request.eos_token_ids:
            return FinishReason.STOP, None
        if allowed and token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
        if self.num_given == params.max_tokens or self.num_given == len(self.reply):
            return FinishReason.LENGTH, None
        return None, None


def fake_pooled(request: EngineRequest) -> FloatArray:
    """4 hidden values, or 4 scores, that depend on the prompt; 4 scores per token; or two logits that favour short
    prompts."""
    token_ids = request.prompt_token_ids
    if request.pooling is not None and request.pooling.per_token:
        return np.array([[place, token_id, 0, 1] for place, token_id in enumerate(token_ids)], dtype=np.float32)
    if request.pooling is not None and request.pooling.token_ids:
        return np.array([10.0 - 0.125 * len(token_ids), 0.0], dtype=np.float32)
    return np.array([len(token_ids), token_ids[0], token_ids[-1], 1.0], dtype=np.float32)


def fake_logprobs(token_ids: Sequence[int], num_alternatives: int) -> TokenLogprobs:
    """-0.5 and rank 1 for the chosen token; alternatives are it and the following ids, each lower by 0.5."""
    chosen = np.asarray(token_ids, dtype=np.int32).reshape(-1, 1)
    steps = np.arange(num_alternatives, dtype=np.int32)
    return TokenLogprobs(
        token_ids=np.concatenate((chosen, chosen + steps), axis=1, dtype=np.int32),
        logprobs=np.tile(np.concatenate(([-0.5], -0.5 - 0.5 * steps)).astype(np.float32), (len(chosen), 1)),
        ranks=np.ones(len(chosen), dtype=np.int32),
    )


def in_columns(deltas: Sequence[SequenceDelta]) -> StepOutput:
    """The form of ``Scheduler.update``: deltas with one token and nothing else are in columns."""
    more = [(one.finish_reason, one.logprobs, one.prompt_logprobs, one.num_cached_tokens) for one in deltas]
    plain = [delta for delta, others in zip(deltas, more, strict=True) if not any(others)]
    return StepOutput(
        request_ids=[delta.request_id for delta in plain],
        indices=[delta.index for delta in plain],
        token_ids=[delta.new_token_ids[0] for delta in plain],
        deltas=[delta for delta in deltas if delta not in plain],
    )


def fake_distribution(bounds: Sequence[float], count: int) -> Distribution:
    """``count`` values in the first bucket."""
    return Distribution(counts=[count] + [0] * len(bounds), total=float(count * bounds[0]))


def fake_rank(rank: int, num_steps: int) -> RankReport:
    return RankReport(
        rank=rank,
        pid=100 + rank,
        state="ready",
        num_steps=num_steps,
        num_last=num_steps * rank,
        cpu_s=1.5,
        heartbeat_age_s=0.25,
        collective_s=0.125,
        resident_bytes=1000,
        memory={"total": 4000, "requested": 3000, "weights": 1000, "kv_cache_available": 1500, "kv_cache": 1000 + rank},
        plan_wait=fake_distribution(WAIT_S, num_steps),
        step_time=fake_distribution(STEP_TIME_S, num_steps),
        collective_wait=fake_distribution(WAIT_S, num_steps),
        recent_step_s=[0.0005] * min(num_steps, 4),
        startup_s={"loading weights": 0.75, "profiling memory": 0.25},
    )


def fake_view(running: Sequence[_Sequence], num_blocks: int, limits: ViewLimits) -> SchedulerView:
    """A view in which sequence number i holds block i."""
    cells = bytearray(num_blocks // 4)
    for block in range(len(running)):
        cells[block // 4] |= 2 << 2 * (block % 4)
    return SchedulerView(
        grid=PoolGrid(num_blocks=num_blocks, blocks_per_cell=1, num_cells=num_blocks, cells=bytes(cells)),
        running=[
            RunningSequence(
                request_id=one.request.request_id[:24],
                index=one.index,
                phase="decode",
                priority=one.request.priority,
                num_prompt_tokens=len(one.request.prompt_token_ids),
                num_output_tokens=one.num_given,
                num_computed_tokens=len(one.request.prompt_token_ids) + one.num_given,
                num_cached_tokens=0,
                num_preemptions=0,
                arrival_s=one.request.arrival_s,
                num_blocks=1,
                num_shared_blocks=0,
                blocks=[block],
            )
            for block, one in enumerate(running[: limits.max_sequences])
        ],
        num_omitted=max(0, len(running) - limits.max_sequences),
    )


@dataclass
class FakeEngine:
    """Each step of ``step_delay_s`` gives ``max_running`` sequences a token; step number ``fail_at_step`` raises."""

    reply: Reply = echo
    step_delay_s: float = 0.0
    max_running: int = 64
    fail_at_step: int | None = None
    model_info: ModelInfo = MODEL_INFO
    num_steps: int = 0
    aborted: list[str] = field(default_factory=list)
    expected: list[tuple[str, str]] = field(default_factory=list)
    added: list[EngineRequest] = field(default_factory=list)
    trace_folder: str | None = None
    orders: list[str] = field(default_factory=list)
    is_paused: bool = False
    is_asleep: bool = False
    weight_version: str = ""
    kernel_choices: str = "own"
    adapters: LoRASlots | None = None
    _sequences: list[_Sequence] = field(default_factory=list)
    _ended: StepOutput = field(default_factory=StepOutput)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences) and not self.is_paused

    @property
    def has_requests(self) -> bool:
        return bool(self._sequences)

    def add_request(self, request: EngineRequest) -> None:
        if any(sequence.request.request_id == request.request_id for sequence in self._sequences):
            raise RequestError(f"request_id {request.request_id!r} is in use", param="request_id")
        self.added.append(request)
        reply = self.reply(request)
        self._sequences += [_Sequence(request, index, reply) for index in range(request.params.n)]

    def compile_grammars(self) -> list[SequenceDelta]:
        """No request waits for a grammar."""
        return []

    def abort(self, request_ids: Iterable[str]) -> list[SequenceDelta]:
        ids = set(request_ids)
        ended = [sequence for sequence in self._sequences if sequence.request.request_id in ids]
        self._sequences = [sequence for sequence in self._sequences if sequence.request.request_id not in ids]
        self.aborted += sorted({sequence.request.request_id for sequence in ended})
        return [
            SequenceDelta(
                request_id=sequence.request.request_id,
                index=sequence.index,
                new_token_ids=[],
                finish_reason=FinishReason.ABORT,
            )
            for sequence in ended
        ]

    def step(self) -> StepOutput:
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            raise RuntimeError("rank 1: this step was told to fail")
        time.sleep(self.step_delay_s)
        now_s = time.monotonic()
        deltas = [sequence.next_delta(now_s) for sequence in self._sequences[: self.max_running]]
        ended = {(delta.request_id, delta.index) for delta in deltas if delta.finish_reason is not None}
        self._sequences = [s for s in self._sequences if (s.request.request_id, s.index) not in ended]
        output = in_columns(deltas)
        output.weight_version = self.weight_version
        return output

    def stats(self) -> SchedulerStats:
        num_running = min(len(self._sequences), self.max_running)
        return SchedulerStats(
            num_running=num_running,
            num_waiting=len(self._sequences) - num_running,
            num_free_blocks=self.model_info.num_blocks - num_running,
            num_cached_blocks=0,
            num_used_blocks=num_running,
            num_live_tokens=num_running,
            fragmentation=0.0,
            num_prefix_query_tokens=0,
            num_prefix_hit_tokens=0,
            num_preemptions=0,
            num_recomputed_tokens=0,
            extensions={one.name: one.kind() for one in _parts_of_stats() if one.name not in STATS} | STATS,
        )

    def report(self, view: ViewLimits | None = None) -> EngineReport:
        """A report of two ranks with round figures; each running sequence holds one block."""
        running = self._sequences[: self.max_running]
        return EngineReport(
            stats=self.stats(),
            ranks=[fake_rank(0, self.num_steps), fake_rank(1, self.num_steps)],
            step_tokens=fake_distribution(STEP_TOKENS, self.num_steps),
            plan_bytes=fake_distribution(PLAN_BYTES, self.num_steps),
            step_skew=fake_distribution(WAIT_S, self.num_steps),
            num_missed_steps=0,
            experts=ExpertBalance(num_experts=[0, 0, 1, 2, 3, 1, 1, 0, 0, 0, 0], largest_load=1.5),
            moves=MoveCounters(stored_bytes=3000, loaded_bytes=2000, store_s=0.5, load_s=0.25, wait_s=0.125),
            disk_moves=DiskCounters(read_bytes=700, written_bytes=900, read_s=0.5, write_s=0.75),
            encode_s=0.375,
            view=None if view is None else fake_view(running, self.model_info.num_blocks, view),
        )

    def prefetch_session(self, session: str, salt: str) -> None:
        self.expected.append((session, salt))

    def reset_prefix_cache(self) -> bool:
        return self.is_paused or not self._sequences  # a pause takes them out of their rows

    def reset_mm_cache(self) -> None:
        """It keeps no image."""

    def pause(self, *, abort_running: bool) -> None:
        self.is_paused = True
        if abort_running:
            self._ended = StepOutput(deltas=self.abort([one.request.request_id for one in self._sequences]))

    def resume(self) -> None:
        self.is_paused = False

    def weights_changed(self, version: str | None) -> None:
        self.weight_version = version or "1"

    def feature(self, kind: type[Half]) -> Half | None:
        """The slots of adapters, the one feature that commands ask for."""
        return self.adapters if isinstance(self.adapters, kind) else None

    def order(self, kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self.orders.append(kind)
        return {}

    @property
    def operator(self) -> Any:
        """The engine is its own."""
        return self

    def take_drained(self) -> list[StepOutput]:
        """No step is ever in flight; the ends of requests that a pause has aborted."""
        ended, self._ended = self._ended, StepOutput()
        return [ended]

    def configuration(self) -> dict[str, Any]:
        return {"model": self.model_info.model, "profile": self.trace_folder}

    def record(self) -> dict[str, Any]:
        return {"format": 1, "ranks": []}

    def check_health(self) -> None:
        """The engine is always healthy."""

    def run_background_io(self) -> bool:
        """Do nothing: there is no other work."""
        return False

    def close(self) -> None:
        """Nothing to free."""


AnyEngine: TypeAlias = Any
"""``FakeEngine``, or an ``Engine``."""


class ServiceThread:
    """An ``EngineService`` in a thread; ``error`` is the exception that ended it, None after a requested stop."""

    def __init__(self, engine: AnyEngine, **options: Any) -> None:
        self.engine = engine
        self.address = new_address()
        self.service = EngineService(cast(Any, engine), self.address, **options)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fake service", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the loop; an assertion fails if it does not end."""
        self._thread.join(THREAD_DEADLINE_S)
        assert not self._thread.is_alive(), f"the service still runs after {THREAD_DEADLINE_S} s"

    def _run(self) -> None:
        try:
            self.service.run()
        except Exception as error:
            self.error = error
        finally:
            self.service.close()


@contextlib.contextmanager
def fake_service(engine: AnyEngine | None = None, **options: Any) -> Iterator[ServiceThread]:
    """Serve an engine at ``.address``; stop and join it at the end."""
    thread = ServiceThread(FakeEngine() if engine is None else engine, **options)
    try:
        yield thread
    finally:
        thread.service.request_stop()
        thread.join()


def main(address: str, step_delay_s: float = 0.01, **model_info: str) -> None:
    """Serve a ``FakeEngine`` at ``address`` until told to stop."""
    info = msgspec.structs.replace(MODEL_INFO, **model_info)
    service = EngineService(cast(Any, FakeEngine(arith, step_delay_s=step_delay_s, model_info=info)), address)
    try:
        service.run()
    finally:
        service.close()


if __name__ == "__main__":
    main(sys.argv[1])
