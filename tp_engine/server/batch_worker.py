"""Runs stored batches through the server's engine, beside its other requests and with lower priority.

::

    validating -> in_progress -> finalizing -> completed
        |             |`-> cancelling -> cancelled      finished lines are kept
        v             `--> expired                      lines without a result are errors
      failed: a line is not a request, and nothing is run

The result files are a batch's memory: after a server was killed, the next one runs the lines without a result.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from tp_engine.api.batch_file.endpoints import prepare_request
from tp_engine.api.batch_file.lines import BatchInput, BatchRequest, ResultLine
from tp_engine.api.batch_file.results import Results
from tp_engine.api.batches.lines import check_lines, count_results, open_requests
from tp_engine.api.batches.objects import Batch, BatchErrors, StoredFile
from tp_engine.api.batches.store import BatchStore
from tp_engine.api.openai.errors import HttpError
from tp_engine.api.preparing import LARGE
from tp_engine.errors import EngineDeadError, RequestError
from tp_engine.requests.request import EngineRequest
from tp_engine.server.access import act_for
from tp_engine.server.generation import whole_outputs
from tp_engine.server.state import ServerState
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

_SAVE_PERIOD_S = 2.0
_SWEEP_PERIOD_S = 600.0
_LINES_AT_ONCE = 64
_IMAGE_PARTS = (b'"image', b'"input_image"', b'"file"', b'"input_file"')  # of chats and responses
_MAX_ACTIVE = 100


class BatchWorker:
    """The batches of a server; for its event loop alone."""

    def __init__(self, state: ServerState, store: BatchStore) -> None:
        self.store = store
        self._state, self._figures = state, state.metrics.batches
        self._figures.stored = store.batches
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(max(1, state.llm.model_info.max_num_seqs * 3 // 4))  # leaves room for others
        self._sweeping = asyncio.ensure_future(self._sweep())
        for batch in [one for one in store.batches.values() if one.is_active]:
            logger.info("batch %s goes on: %s", batch.id, batch.status)
            self._start(batch)

    def check_room(self) -> None:
        """Raise ``HttpError`` 429 if no further batch can wait."""
        self.store.check_room()
        if len(self._tasks) >= _MAX_ACTIVE:
            raise HttpError(429, f"{_MAX_ACTIVE} batches are not finished; wait for one", code="too_many_batches")

    async def add(self, batch: Batch, source: StoredFile) -> None:
        """Store a new batch, whose lines are those of ``source``, and run it."""
        await asyncio.to_thread(self.store.add_batch, batch, source)
        self._start(batch)

    async def cancel(self, batch: Batch) -> Batch:
        """Stop a batch, and return it as of then: it may end before that is on the disk.

        Raises ``RequestError`` if it has ended.
        """
        if not batch.is_active:
            raise RequestError(f"batch {batch.id} is {batch.status}; only a batch that has not ended can be cancelled")
        if batch.status in ("validating", "in_progress") and batch.expired_at is None:
            batch.enter("cancelling", int(time.time()))
            told = copy.deepcopy(batch)
            if batch.id in self._tasks:
                self._tasks[batch.id].cancel()
            else:  # a disk error has stopped it
                self._start(batch)
            await self._save(batch)
            return told
        return batch

    async def stop(self) -> None:
        """Stop all batches as they are; the next server with the same folder continues them."""
        tasks = [self._sweeping, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, batch: Batch) -> None:
        task = self._tasks[batch.id] = asyncio.ensure_future(self._run(batch))
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def _run(self, batch: Batch) -> None:
        act_for(batch.owner)
        try:
            with contextlib.suppress(asyncio.CancelledError):  # by ``cancel``, or by ``stop``
                if batch.status == "validating":
                    await self._validate(batch)
                if batch.status == "in_progress":
                    await self._run_lines(batch)
            if batch.status in ("cancelling", "finalizing"):
                await self._finish(batch)
        except (EngineDeadError, OSError) as error:
            logger.error("batch %s stands still until a server goes on with it: %s", batch.id, error)
        except Exception as error:
            logger.exception("batch %s failed", batch.id)
            await self._fail(batch, [{"code": "server_error", "line": None, "message": str(error), "param": None}])

    async def _validate(self, batch: Batch) -> None:
        path, config = self.store.batch_folder(batch) / "input", self._state.config
        total, errors = await asyncio.to_thread(check_lines, path, batch.endpoint, config.max_body_bytes)
        if errors:
            await self._fail(batch, errors)
            return
        batch.request_counts.total = total
        batch.enter("in_progress", int(time.time()))
        await self._save(batch)

    async def _fail(self, batch: Batch, errors: list[dict[str, object]]) -> None:
        batch.errors = BatchErrors(data=errors)
        batch.enter("failed", int(time.time()))
        await self._save(batch)

    async def _save(self, batch: Batch) -> None:
        """Write the state to the disk, which may be slow, without holding up other requests."""
        await asyncio.to_thread(self.store.save, batch)

    async def _run_lines(self, batch: Batch) -> None:
        """Run all lines without a result; returns when the batch is finalizing."""
        folder = self.store.batch_folder(batch)
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(
                BatchInput(str(folder / "input"), max_line_bytes=self._state.config.max_body_bytes)
            )
            results = stack.enter_context(Results(folder / "output", folder / "errors"))
            earlier, counts = results.earlier, batch.request_counts
            counts.failed = sum(earlier.answered.values())
            counts.completed = len(earlier.answered) - counts.failed
            left = open_requests(source, batch.endpoint, earlier)
            saving = asyncio.ensure_future(self._save_often(batch, results))
            try:
                async with asyncio.timeout(max(0.0, batch.expires_at - time.time())):
                    await self._run_all(batch, left, results)
            except TimeoutError:
                batch.expired_at = int(time.time())
                self._count(batch, failed=await asyncio.to_thread(self._write_expired, batch, source, results))
            finally:
                saving.cancel()
        batch.enter("finalizing", int(time.time()))
        await self._save(batch)

    async def _run_all(self, batch: Batch, requests: Iterator[BatchRequest], results: Results) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                while several := await asyncio.to_thread(lambda: list(itertools.islice(requests, _LINES_AT_ONCE))):
                    for request in several:
                        await self._room.acquire()
                        group.create_task(self._run_line(batch, request, results))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run_line(self, batch: Batch, request: BatchRequest, results: Results) -> None:
        try:
            size, answer = await self._answer(request)
        finally:
            self._room.release()

        def write() -> ResultLine:
            result = _result(request, answer)
            results.write(result)
            return result

        result = write() if size <= LARGE else await self._state.preparing.run(size, write)
        self._count(batch, completed=result.error is None, failed=result.error is not None)

    def _count(self, batch: Batch, *, completed: int = 0, failed: int = 0) -> None:
        batch.request_counts.completed += completed
        batch.request_counts.failed += failed
        self._figures.count(completed=completed, failed=failed)

    async def _answer(self, request: BatchRequest) -> tuple[int, Callable[[], dict[str, Any]]]:
        """Roughly the size of a line's answer, and what makes it or raises the error that ended the line."""
        state = self._state
        try:
            has_images = state.takes_images and any(kind in request.raw_body for kind in _IMAGE_PARTS)
            prepared = await state.preparing.run(
                len(request.raw_body),
                prepare_request,
                request,
                state.llm.input_processor,
                (*state.model_names, *state.adapters),
                state.sampling_defaults,
                state.limit.max_num_prompts,
                has_images=has_images,
                forces_calls=b'"tool_choice"' in request.raw_body,
                client="batches",
            )
            for search in prepared.searches:
                search.request = _later(search.request, state.config.batch_priority)
            prepared = replace(
                prepared, requests=[_later(one, state.config.batch_priority) for one in prepared.requests]
            )
            outputs = await whole_outputs(state, prepared)
            return prepared.answer_bytes(outputs), lambda: prepared.answer(outputs)
        except EngineDeadError:
            raise
        except Exception as error:
            if isinstance(error, HttpError) and error.status == 503:  # the server ends
                raise EngineDeadError(str(error)) from None
            return 0, partial(_raise, error)

    def _write_expired(self, batch: Batch, source: BatchInput, results: Results) -> int:
        """Write an error for each line that has no result when the batch's time is over; returns their number."""
        results.close()
        folder, count = self.store.batch_folder(batch), 0
        error = HttpError(408, "the batch's completion_window was over before this line ran", code="batch_expired")
        with Results(folder / "output", folder / "errors") as again:
            for request in open_requests(source, batch.endpoint, again.earlier):
                again.write(request.failure(error))
                count += 1
        return count

    async def _save_often(self, batch: Batch, results: Results) -> None:
        while True:
            await asyncio.sleep(_SAVE_PERIOD_S)
            await self._save(batch)
            await asyncio.to_thread(results.sync_if_due)

    async def _finish(self, batch: Batch) -> None:
        """Turn the results into files, and end the batch."""
        folder, counts = self.store.batch_folder(batch), batch.request_counts
        if (folder / "output").exists():
            found = await asyncio.to_thread(count_results, folder / "output", folder / "errors")
            counts.completed, counts.failed, batch.model, batch.usage = found
        await asyncio.to_thread(self.store.keep_results, batch)
        was_cancelled = batch.status == "cancelling"
        status = "cancelled" if was_cancelled else "completed" if batch.expired_at is None else "expired"
        batch.enter(status, int(time.time()))
        await self._save(batch)
        text = "batch %s is %s: %d answers and %d errors for %d lines"
        logger.info(text, batch.id, status, counts.completed, counts.failed, counts.total)

    async def _sweep(self) -> None:
        while True:
            await asyncio.to_thread(self.store.forget_expired)
            await asyncio.sleep(_SWEEP_PERIOD_S)


def _later(request: EngineRequest, priority: int) -> EngineRequest:
    """The request with a lower priority; a line's own priority is added."""
    return replace(request, priority=max(-(2**31), min(2**31 - 1, request.priority + priority)))


def _result(request: BatchRequest, answer: Callable[[], dict[str, Any]]) -> ResultLine:
    """The result of a line: what ``answer`` returns, or the error that it raises."""
    try:
        return request.result(200, answer())
    except Exception as error:
        if not isinstance(error, (HttpError, RequestError)):
            logger.exception("a line of a batch failed")
        return request.failure(error)


def _raise(error: Exception) -> NoReturn:
    raise error
