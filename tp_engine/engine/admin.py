"""Rank 0's engine between two steps, for what an admin asks (``admin_commands.py``): orders, pauses, weights."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import msgspec

from tp_engine.engine.incident import read_board
from tp_engine.engine.job import Job
from tp_engine.errors import RequestError, shown
from tp_engine.features.registry import Half
from tp_engine.plan import Order, StepPlan
from tp_engine.requests.request import StepOutput
from tp_engine.sched.scheduler import Scheduler
from tp_engine.worker.orders import Outcome
from tp_engine.worker.worker import Worker


class EngineAdmin:
    """What an operator's commands may do to an engine.

    ``standstill`` is a context in which no step is in flight; the output of those that were is appended to ``drained``,
    which ``Engine.step`` gives out unless ``take_drained`` has.  ``execute_command`` lets all ranks follow the order of
    a plan.  ``forget`` are told that all requests are aborted.

    ``is_paused``: no step runs.  ``is_asleep``: nor is there a KV cache.  ``weight_version`` names the weights; empty
    for those of the start.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        forget: Iterable[Callable[[None], None]],
        worker: Worker,
        job: Job,
        standstill: Callable[[], AbstractContextManager[None]],
        execute_command: Callable[[StepPlan], Outcome],
    ) -> None:
        self.drained: deque[StepOutput] = deque()
        self.is_paused = self.is_asleep = False
        self.weight_version = ""
        self._num_updates = 0
        self._scheduler, self._forget, self._worker, self._job = scheduler, forget, worker, job
        self._standstill, self._execute_command = standstill, execute_command

    @property
    def has_requests(self) -> bool:
        """Whether a request waits or runs, also while the engine is paused."""
        return self._scheduler.has_unfinished

    def feature(self, kind: type[Half]) -> Half | None:
        """Return the scheduler's half of a feature; None if it is switched off."""
        return self._scheduler.feature(kind)

    def record(self) -> dict[str, Any]:
        """Return a flight record of the job as it is now."""
        board, config = self._job.board, self._worker.effective.config
        made = read_board(board, config, cause="none: the record was asked for", culprit=None, writer="rank 0")
        return cast("dict[str, Any]", msgspec.to_builtins(made))

    @property
    def kernel_choices(self) -> str:
        """A word for the kernels that compute: engines where it differs may differ in the last bits of a result."""
        return self._worker.effective.choices.digest

    def configuration(self) -> dict[str, Any]:
        """Return the effective configuration, by field."""
        return self._worker.configuration

    def order(self, kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Let all ranks follow an order (``worker/orders.py``) when nothing is in flight; returns rank 0's result.
        ``RequestError`` if a rank cannot: then nothing has changed on any."""
        try:
            order = msgspec.json.encode(Order(kind, dict(arguments)))
        except UnicodeEncodeError as error:
            raise RequestError(f"{kind}: {shown(error.object)} has half a surrogate pair; use Unicode") from error
        with self._standstill():
            plan = StepPlan(step_id=self._scheduler.skip_step(), order=order)
            outcome = self._execute_command(plan)
            self._job.wait_step(plan.step_id, timeout_s=self.configuration()["startup_timeout_s"])
        if outcome.refusal:
            raise RequestError(outcome.refusal)
        return outcome.result

    def pause(self, *, abort_running: bool) -> None:
        """Run no step until ``resume``: requests end now with ``abort_running``, or wait and are computed again later.
        ``drained`` has what they end with.  New requests wait."""
        with self._standstill():
            if abort_running:
                for forget in self._forget:
                    forget(None)
                self.drained.append(StepOutput(deltas=self._scheduler.abort(None)))
            self._scheduler.preempt_all()
        self.is_paused = True

    def resume(self) -> None:
        """Run steps again."""
        self.is_paused = False

    def weights_changed(self, version: str | None) -> None:
        """Serve the ranks' new weights, called ``version`` or by their number: nothing that was cached is found any
        more.  No request may be running."""
        self._scheduler.renew_cache_keys()
        self._num_updates += 1
        self.weight_version = version or str(self._num_updates)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False if requests hold blocks."""
        return self._scheduler.reset_prefix_cache()

    def reset_mm_cache(self) -> None:
        """Forget all embeddings of images."""
        self._scheduler.reset_mm_cache()

    def check_integrity(self) -> None:
        """Assert that all blocks are accounted for."""
        self._scheduler.check_integrity()

    def memory_growth_bytes(self) -> int:
        """Bytes of device memory that rank 0 has taken since it became ready, without the KV cache."""
        return self._worker.memory_growth_bytes()

    def take_drained(self) -> list[StepOutput]:
        """Return the output of steps that an act waited for."""
        outputs = [*self.drained]
        self.drained.clear()
        return outputs
