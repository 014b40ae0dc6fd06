"""Images on a rank: it encodes those that plans give it, keeps all ranks' rows, and puts them into steps.

::

    plan.encodes      owners:    pixels -> layers of the tower -> rows -+
                      the others:                                zeros -+--> one all-reduce --> encoder cache
    plan.image_rows   encoder cache -> the chunk's tokens

The encoder cache is equal on all ranks.  Between the plans of a large image its owner keeps what its layers have made.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.attention.tiles import ImageSpan
from tp_engine.distributed.collectives import Communicator
from tp_engine.job.progress import RankPhase, RankProgress
from tp_engine.layers.attention import Attention
from tp_engine.layers.image_rows import StepImages, seeing
from tp_engine.layers.upload import upload_all
from tp_engine.models.language_model import LanguageModel
from tp_engine.models.tower_run import TowerRun
from tp_engine.models.vision_tower import VisionTower
from tp_engine.plan import IntArray, StepPlan
from tp_engine.worker.batch.step_inputs import StepInputs
from tp_engine.worker.feature import RunnerFeature, RunnerHooks
from tp_engine.worker.results.readback import PendingStep, SpanClock

_Positions = npt.NDArray[np.int64]
_START, _TOKENS, _ROWS, _COLUMNS = range(4)  # columns of a row's images
_RANK, _BEGUN, _UNTIL, _PLACE = range(3, 7)  # columns of ``StepPlan.encodes``; the last begins the place of the pixels


class ImageEncoder(RunnerFeature):
    """The tower of ``model`` and the encoder cache, ``num_rows`` rows.

    A sum over ranks has at most ``sum_rows`` rows of the model's hidden size.
    """

    def __init__(
        self,
        model: LanguageModel,
        num_rows: int,
        communicator: Communicator,
        sum_rows: int,
        progress: RankProgress,
    ) -> None:
        self._tower = _tower_of(model)
        self._communicator, self._sum_rows, self._progress = communicator, sum_rows, progress
        weight = next(self._tower.parameters())
        self.cache = torch.zeros((num_rows, self._tower.width), dtype=weight.dtype, device=weight.device)
        self._images: dict[int, IntArray] = {}  # by row: start, tokens, rows, columns of each
        self._runs: dict[int, TowerRun] = {}  # this rank's that have begun, by the first row in the cache
        self._clock = SpanClock(is_async=weight.device.type == "cuda")

    def attach(self, hooks: RunnerHooks) -> None:
        hooks.apply.append(self.apply)
        hooks.must_launch.append(self.must_launch)
        hooks.around_model.append(self.around_model)
        hooks.take_model.append(self.take_model)
        hooks.report.append(self.report)

    def report(self) -> dict[str, Any]:
        return {"encode_s": self._clock.read()[0]}

    def take_model(self, model: LanguageModel) -> list[Attention]:
        self._tower = _tower_of(model)
        self._runs.clear()
        return []

    def apply(self, plan: StepPlan) -> None:
        for row in plan.released.tolist() if self._images else ():
            self._images.pop(row, None)
        if len(plan.images):
            for row in np.unique(plan.images[:, 0]).tolist():
                self._images[row] = plan.images[plan.images[:, 0] == row, 1:]
        if len(plan.encodes):
            with self._clock.span():
                self._encode(plan.encodes)
        else:
            self._runs.clear()

    def must_launch(self, plan: StepPlan) -> bool:
        return bool(self._images) and any(row in self._images for row in plan.prefill_rows.tolist())

    def around_model(self, step: PendingStep, inputs: StepInputs) -> AbstractContextManager[object]:
        return seeing(self.of_step(step.plan, inputs))

    def _encode(self, encodes: IntArray) -> None:
        """Each image on its rank, then the rows of those that have ended on all ranks; a collective."""
        self._progress.reach(RankPhase.ENCODE)
        ending = encodes[encodes[:, _UNTIL] == len(self._tower.stack)]
        counts = ending[:, 1] * ending[:, 2]
        ends = counts.cumsum()
        new = self.cache.new_zeros((int(counts.sum()), self.cache.shape[1]))
        places = {
            first: slice(end - count, end)
            for first, end, count in zip(ending[:, 0].tolist(), ends, counts, strict=True)
        }
        before, self._runs = self._runs, {}
        for encode in encodes[encodes[:, _RANK] == self._communicator.info.rank].tolist():
            first, begun, until = encode[0], encode[_BEGUN], encode[_UNTIL]
            run = before[first] if begun else self._begin(encode[_PLACE:])
            rows = run.advance(until - begun) if until > begun else None
            if rows is None:
                self._runs[first] = run
            else:
                new[places[first]] = rows
        self._progress.back(RankPhase.STEP_BEGIN)
        if len(new) and self._communicator.info.world_size > 1:
            for part in new.view(-1, self._tower.spec.hidden_size).split(self._sum_rows):
                self._communicator.all_reduce(part)
        for first, place in places.items():
            self.cache[first : first + place.stop - place.start] = new[place]

    def _begin(self, place: list[int]) -> TowerRun:
        return TowerRun(self._tower, torch.from_numpy(read_pixels(place)).to(self.cache.device))

    def of_step(self, plan: StepPlan, inputs: StepInputs, num_ahead: int = 0) -> StepImages | None:
        """Return the images of a step; None if it has no prompt with images.  With ``num_ahead`` 1 each row stands one
        token earlier, where a draft head reads the next token; that token has its own rotary position."""
        if not self.must_launch(plan):
            return None
        chunks = plan.prefill_tokens.astype(np.int64)
        ends = inputs.attention[0].host_seq_lens[len(plan.decode_rows) :].astype(np.int64)
        firsts = ends - chunks
        begins = len(plan.decode_rows) + chunks.cumsum() - chunks  # where each chunk begins among the step's tokens
        spans: list[ImageSpan] = []
        chunk_of = {row: index for index, row in enumerate(plan.prefill_rows.tolist())}
        places: list[_Positions] = [np.empty(0, dtype=np.int64)]
        sources: list[_Positions] = [np.empty(0, dtype=np.int64)]
        for row, start, cached in plan.image_rows.tolist():
            own, chunk = self._images[row], chunk_of[row]
            image = own[own[:, _START] == start][0]
            first, count = int(firsts[chunk]) + num_ahead, int(chunks[chunk])
            tokens, embeddings = rows_within(image, first, first + count)
            places.append(tokens - first + begins[chunk])
            sources.append(embeddings + cached)
            if self._tower.spec.is_bidirectional and len(tokens):
                begin, request = int(tokens[0] - first + begins[chunk]), len(plan.decode_rows) + chunk
                spans.append(ImageSpan(request, begin, len(tokens), int(tokens[-1]) + 1))
        turns = self._turns(plan, firsts, chunks) if self._tower.spec.turns_by_place else None
        arrays = [np.concatenate(places), np.concatenate(sources), *(() if turns is None else (turns,))]
        on_device = upload_all(arrays, self.cache.device)
        return StepImages(
            places=on_device[0],
            rows=self.cache.index_select(0, on_device[1]),
            rotary_positions=None if turns is None else _behind_decodes(inputs, on_device[2]),
            spans=tuple(spans),
        )

    def _turns(self, plan: StepPlan, firsts: _Positions, chunks: _Positions) -> _Positions:
        """Time, row and column of the tokens of the step's chunks (3, T)."""
        nothing: IntArray = np.empty((0, 4), dtype=np.int32)
        found = [
            turning_positions(self._images.get(row, nothing), first, first + count)
            for row, first, count in zip(plan.prefill_rows.tolist(), firsts.tolist(), chunks.tolist(), strict=True)
        ]
        return np.concatenate(found, axis=1)


def read_pixels(place: list[int]) -> npt.NDArray[np.uint8]:
    """Return the pixels (height, width, 3) at a ``place`` of ``StepPlan.encodes``: process, file, offset's low and
    high 31 bits, height, width."""
    pid, fd, low, high, height, width = place
    path, offset = f"/proc/{pid}/fd/{fd}", low + (high << 31)
    return np.fromfile(path, dtype=np.uint8, count=height * width * 3, offset=offset).reshape(height, width, 3)


def rows_within(image: IntArray, first: int, end: int) -> tuple[_Positions, _Positions]:
    """Return the tokens of ``image`` (start, tokens, rows, columns) from ``first`` to ``end`` that have an embedding,
    and which one each has.  A row of its grid may end with tokens of the text."""
    start, tokens, rows, columns = image.tolist()
    stride = tokens // rows
    places = np.arange(max(first, start), min(end, start + tokens), dtype=np.int64)
    row, column = np.divmod(places - start, stride)
    is_row = column < columns
    return places[is_row], (row * columns + column)[is_row]


def turning_positions(images: IntArray, first: int, end: int) -> _Positions:
    """Return time, row and column (3, end - first) of a prompt's tokens from ``first`` to ``end``.

    Those of text are equal, and go on after the larger of the rows and columns of the image before.  ``images`` are
    (start, tokens, rows, columns), in order.
    """
    found = np.tile(np.arange(first, end, dtype=np.int64), (3, 1))
    shift = 0
    for start, tokens, rows, columns in images.tolist():
        behind = start + tokens
        low, high = max(start, first), min(behind, end)
        if low < high:
            row, column = np.divmod(np.arange(low - start, high - start), columns)
            found[:, low - first : high - first] = start + shift + np.stack((np.zeros_like(row), row, column))
        moved = max(rows, columns) - tokens
        found[:, max(behind - first, 0) :] += moved
        shift += moved
    return found


def _behind_decodes(inputs: StepInputs, turns: torch.Tensor) -> torch.Tensor:
    """Time, row and column of all tokens (3, N); a decode's are equal."""
    own = inputs.rotary_positions[: inputs.layout.num_decodes]
    return torch.cat((own.expand(3, -1), turns), 1)


def _tower_of(model: LanguageModel) -> VisionTower:
    assert model.vision is not None, "the model has no tower"
    return model.vision
