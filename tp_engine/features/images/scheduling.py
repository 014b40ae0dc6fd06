"""Images of prompts: their names in the prefix cache, when they are encoded, on which rank, and what plans say of it.

*Names.*  Where an image's rows of embeddings stand, a sequence's tokens have a negative number in place of the model's
placeholder: one for each content that this process has seen.  The prefix cache compares these as it compares tokens,
so an equal image is found, and another one never is.  Ranks get the placeholder (``Sequence.ids_for_ranks``).

*Encoding.*  A chunk that touches an image needs its rows: the plan encodes it, unless the encoder cache has it.  If
there is no room for it in the cache or in the step, the chunk ends before the image::

    chunk       | text | image A ...... | text | image B .|           B is cut: the next chunk needs it too
    plan          encodes: A on rank 0, B on rank 1;   image_rows: where A and B are in the encoder cache

In a step the tower works on each rank no longer than a full chunk of a prompt takes.  An image that takes longer goes
through it some layers at a time (``encodes.py``): meanwhile its chunk waits, and all other rows go on.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from tp_engine.errors import RequestError
from tp_engine.features.images.encoder_cache import EncoderCache
from tp_engine.features.images.encodes import Encodes
from tp_engine.features.images.feature import COUNTERS, LIMITS, ImageCounters, ImageLimits
from tp_engine.images.image_input import ImageInput
from tp_engine.plan import IntArray, StepPlan, StepResult
from tp_engine.requests.request import EngineRequest
from tp_engine.sched.feature import SchedulerFeature, SchedulerHooks, SchedulerParts
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.sequence import RequestGroup, Sequence
from tp_engine.sched.step_scheduler import StepPlanBuilder

_FIRST_NAME = -2  # -1 has another meaning where tokens are drafted
_MOST_NAMES = 100_000


class PixelFile:
    """An anonymous file of another process, kept open by this one; it closes with the last reference."""

    def __init__(self, pid: int, fd: int) -> None:
        self.fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        self.num_bytes = os.fstat(self.fd).st_size
        weakref.finalize(self, os.close, self.fd)


@dataclass(slots=True)
class _Prompt:
    """A request's images, each with its name, and the files that hold their pixels."""

    images: list[tuple[ImageInput, int]]
    files: list[PixelFile]


class Images(SchedulerFeature):
    """Names, encodes and places the images of ``state``'s requests."""

    def __init__(self, state: SchedulerState, limits: ImageLimits) -> None:
        self._state, self._limits = state, limits
        self._budget = max(state.limits.max_num_batched_tokens, 1)
        self._cache = EncoderCache(limits.num_rows)
        self._names: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self._next_name = _FIRST_NAME
        self._prompts: dict[str, _Prompt] = {}
        self._opened: tuple[str, list[PixelFile]] | None = None
        self._used: set[int] = set()  # by the plan in the making
        self._encodes = Encodes(limits, self._budget)
        self._begun_for = 0  # the step for which ``_encodes`` has begun to plan
        self._closing: deque[tuple[int, list[PixelFile]]] = deque()
        self._last_plan = self._last_result = 0
        self._counters = ImageCounters()

    def attach(self, hooks: SchedulerHooks) -> None:
        hooks.resolve.append(self.resolve)
        hooks.on_add.append(self.on_add)
        hooks.begin_plan.append(self.begin_plan)
        hooks.must_send.append(self.must_send)
        hooks.finish_plan.append(self.finish_plan)
        hooks.limit_chunk.append(self.limit_chunk)
        hooks.on_result.append(self.on_result)
        hooks.on_request_end.append(self.on_request_end)
        hooks.on_new_weights.append(self.on_new_weights)
        hooks.reset_mm_cache.append(self.reset_mm_cache)
        hooks.stats.append(self.stats)
        hooks.check_integrity.append(self.check_integrity)

    def resolve(self, request: EngineRequest) -> EngineRequest:
        """Check the images of a request, and hold their pixels from now on, whatever their sender does."""
        if not request.images:
            return request
        check_images(request, self._limits)
        files: dict[tuple[int, int], PixelFile] = {}
        held: list[ImageInput] = []
        for image in request.images:
            key = image.pid, image.fd
            try:
                file = files[key] = files.get(key) or PixelFile(*key)
            except OSError as error:
                raise _lost(request) from error
            if file.num_bytes < image.offset + image.num_bytes:
                raise _lost(request)
            held.append(replace(image, pid=os.getpid(), fd=file.fd))
        self._opened = request.request_id, list(files.values())
        return replace(request, images=tuple(held))

    def on_add(self, group: RequestGroup) -> None:
        """Give the images of a request their names."""
        request = group.request
        if not request.images:
            return
        assert self._opened is not None and self._opened[0] == request.request_id
        files, self._opened = self._opened[1], None
        salt = request.params.cache_salt or ""
        images = [(image, self._name(salt, image.digest)) for image in request.images]
        self._prompts[request.request_id] = _Prompt(images, files)
        group.prompt = tokens = group.prompt.copy()
        for image, name in images:
            tokens[image.start + row_places(image)] = name
        for sequence in group.sequences:
            sequence.token_ids = tokens

    def begin_plan(self, builder: StepPlanBuilder) -> None:
        """Go on with what is half done, and forget what an attempt at a plan wanted that was not made."""
        self._begin(builder.step_id)

    def must_send(self) -> bool:
        """Return whether an image is on its way through the tower, for which its prompt waits."""
        return len(self._encodes) > 0

    def limit_chunk(self, sequence: Sequence, start: int, end: int) -> int:
        """Return where a chunk from ``start`` ends that could go to ``end``: before the first image whose rows are not
        there in this step, or that would be cut and must not be.  ``start`` itself: it has to wait.

        A draft head reads the next token, so a token of the text before an image waits with it.  One of another image
        does not: the encoder cache may have no room for both."""
        limit, behind = end, -1
        for image, name in self._touched(sequence, start, end):
            first = image.start - (0 if image.start == behind else self._limits.num_ahead)
            behind = image.start + image.num_tokens
            if limit < end:  # another rank may have nothing to do
                if self._cache.use(name) is None and self._encodes.would_cut(image):
                    self._start(name, image)
            elif self._limits.is_bidirectional and image.start < end < behind:
                limit = max(image.start, start)
            elif not self._reserve(name, image) and first < end:
                limit = max(first, start)
        return limit

    def finish_plan(self, plan: StepPlan) -> StepPlan:
        """Add the images of rows that enter, of chunks, and those to encode."""
        self._last_plan = plan.step_id
        if not self._prompts or not (len(plan.prefill_rows) or plan.admitted or self._encodes):
            return plan
        if self._begun_for != plan.step_id:
            self._begin(plan.step_id)
        rows = self._state.rows
        entering: list[tuple[int, ...]] = [
            (admission.row, image.start, image.num_tokens, *image.grid)
            for admission in plan.admitted
            if (sequence := rows.sequences[admission.row]) is not None
            for image in sequence.group.request.images
        ]
        touched, names = self._touched_by(plan)
        for name in self._encodes.forget_whole(names):  # their chunks were not scheduled after all
            self._cache.drop(name)
        encoded = {*self._encodes.finishing}
        self._counters.num_encoded += len(encoded)
        self._counters.num_queries += len(names)
        self._counters.num_hits += sum(name not in encoded for name in names)
        encodes = self._encodes.advance(self._cache.use)
        if not (entering or touched or encodes):
            return plan
        return msgspec.structs.replace(
            plan,
            images=_array(entering, 5),
            image_rows=_array(touched, 3),
            encodes=_array(encodes, 12),
        )

    def _touched_by(self, plan: StepPlan) -> tuple[list[tuple[int, ...]], list[int]]:
        """The plan's ``image_rows``, and the name of the image of each."""
        rows = self._state.rows
        found: list[tuple[int, ...]] = []
        names: list[int] = []
        for row, count in zip(plan.prefill_rows.tolist(), plan.prefill_tokens.tolist(), strict=True):
            end = int(rows.num_scheduled[row])
            for image, name in self._touched(rows.sequences[row], end - count, end):
                first = self._cache.use(name)
                if first is None or self._encodes.is_unfinished(name):
                    assert image.start >= end, "a chunk was planned without its image"
                    continue  # drafts alone are made without it
                found.append((row, image.start, first))
                names.append(name)
        return found, names

    def on_result(self, plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
        """Close the files that no step in flight reads any more."""
        self._last_result = plan.step_id
        while self._closing and self._closing[0][0] <= plan.step_id:
            self._closing.popleft()
        return plan, result

    def on_request_end(self, group: RequestGroup) -> None:
        """Release the pixels of a request, once no step in flight reads them."""
        prompt = self._prompts.pop(group.request.request_id, None)
        if prompt is None:
            return
        if self._last_result < self._last_plan:
            self._closing.append((self._last_plan, prompt.files))
        if self._encodes:
            wanted = {name for other in self._prompts.values() for _, name in other.images}
            for name in self._encodes.forget(name for _, name in prompt.images if name not in wanted):
                self._cache.drop(name)

    def on_new_weights(self) -> None:
        """Forget all embeddings: the tower may be another one."""
        self.reset_mm_cache()

    def reset_mm_cache(self) -> None:
        """Forget all embeddings; chunks that need them have them encoded again."""
        self._encodes.clear()
        self._cache.clear()

    def stats(self) -> dict[str, ImageCounters]:
        return {COUNTERS.name: replace(self._counters, num_rows_used=self._cache.num_used)}

    def check_integrity(self) -> None:
        self._cache.check_integrity()

    def _name(self, salt: str, digest: bytes) -> int:
        """The number of an image; that of one seen long ago may be a new one."""
        name = self._names.get((salt, digest))
        if name is None:
            name = self._next_name
            self._next_name -= 1
            self._names[salt, digest] = name
            if len(self._names) > _MOST_NAMES:
                self._names.popitem(last=False)
        self._names.move_to_end((salt, digest))
        return name

    def _begin(self, step_id: int) -> None:
        """Plan what is half done for this step; what is not begun is planned anew."""
        self._begun_for = step_id
        self._used.clear()
        for name in self._encodes.begin_step():
            self._cache.drop(name)

    def _reserve(self, name: int, image: ImageInput) -> bool:
        """Whether the plan in the making has the rows of an image: those in the cache, or those that it encodes."""
        if self._cache.use(name) is None and not self._start(name, image):
            return False
        if self._encodes.is_unfinished(name):
            return False
        self._used.add(name)
        return True

    def _start(self, name: int, image: ImageInput) -> bool:
        """Whether the plan in the making begins to encode an image: a rank has time for it, and the cache has room."""
        rank = self._encodes.free_rank(image)
        if rank is None or self._cache.add(name, image.num_rows, self._used | self._encodes.names) is None:
            return False
        self._encodes.start(name, image, rank)
        return True

    def _touched(self, sequence: Sequence | None, start: int, end: int) -> list[tuple[ImageInput, int]]:
        """The images, and their names, of which a chunk from token ``start`` to ``end`` has a part, or which a draft
        head reads after it."""
        if sequence is None or not sequence.group.request.images:
            return []
        return [
            (image, name)
            for image, name in self._prompts[sequence.request_id].images
            if image.start < end + self._limits.num_ahead and start < image.start + image.num_tokens
        ]


def row_places(image: ImageInput) -> IntArray:
    """Return the places of an image's rows of embeddings among its tokens (num_rows,): each row of its grid may end
    with tokens of the text."""
    rows, columns = image.grid
    places = np.arange(rows)[:, None] * (image.num_tokens // rows) + np.arange(columns)
    return places.reshape(-1).astype(np.int32)


def check_images(request: EngineRequest, limits: ImageLimits) -> None:
    """Raise ``RequestError`` unless the images of a request stand where its prompt has their placeholders."""
    if request.pooling is not None:
        raise RequestError("images are for generated text, not for vectors and scores", param=request.prompt_field)
    ids, end = np.array(request.prompt_token_ids, dtype=np.int64), 0
    for number, image in enumerate(request.images):
        rows, columns = image.grid
        problem = None
        if min(rows, columns, image.height, image.width) < 1 or len(image.digest) != 32:
            problem = f"has a grid of {rows} x {columns} and {image.width} x {image.height} pixels"
        elif image.num_tokens % rows or image.num_tokens < image.num_rows:
            problem = f"has {image.num_rows} embeddings, and takes {image.num_tokens} places"
        elif image.start < end or image.start + image.num_tokens > len(ids):
            problem = f"stands at {image.start}, beyond the prompt or within another image"
        elif (ids[image.start + row_places(image)] != limits.token_id).any():
            problem = f"stands where the prompt has not {image.num_rows} tokens {limits.token_id}, the placeholder"
        elif image.num_rows > limits.num_rows:
            problem = f"takes {image.num_rows} rows of the encoder cache, which has {limits.num_rows}"
        if problem is not None:
            raise RequestError(f"image {number} {problem}", param=request.prompt_field)
        end = image.start + image.num_tokens


def _lost(request: EngineRequest) -> RequestError:
    return RequestError("the pixels of an image are gone; send the request again", param=request.prompt_field)


def _array(entries: list[tuple[int, ...]], columns: int) -> IntArray:
    return np.array(entries, dtype=np.int32).reshape(-1, columns)


def make(parts: SchedulerParts) -> Iterator[Images]:
    """Make the scheduler's half if the model reads images."""
    limits = LIMITS.get(parts.state.limits)
    if limits is not None:
        yield Images(parts.state, limits)
