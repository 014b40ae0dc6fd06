"""Images in the scheduler: a fake worker reads the pixels, and its tokens depend on the rows that it finds in the
encoder cache, so a wrong image, row or place gives other tokens than the request alone."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from tests.unit.sched.scheduler_harness import (
    EOS,
    FakeRow,
    FakeWorker,
    Simulation,
    chain_hashes,
    expected_tokens,
    limits,
)
from tp_engine.errors import RequestError
from tp_engine.features.images.encoder_cache import EncoderCache
from tp_engine.features.images.feature import COUNTERS, LIMITS, ImageCounters, ImageLimits
from tp_engine.images.image_input import ImageInput
from tp_engine.plan import StepPlan, StepResult
from tp_engine.requests.request import EngineRequest, FinishReason
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.worker.image_encoder import read_pixels, rows_within, turning_positions

IMAGE, BREAK = 60, 61


@dataclass
class Album:
    """Images in one anonymous file; ``content`` has the token that stands for each row of each image."""

    fd: int
    size: int = 0
    content: dict[bytes, int] = field(default_factory=dict)

    def image(self, start: int, value: int, rows: int, columns: int, gap: int = 0) -> ImageInput:
        """An image whose rows of the grid end with ``gap`` tokens of text; ``value`` stands in all of its pixels."""
        pixels = np.full((rows, columns, 3), value, dtype=np.uint8)
        offset, self.size = self.size, self.size + pixels.nbytes
        os.pwrite(self.fd, pixels.tobytes(), offset)
        digest = hashlib.sha256(repr((rows, columns, value)).encode()).digest()
        self.content[digest] = 100 + value
        return ImageInput(
            start=start,
            num_tokens=rows * (columns + gap),
            grid=(rows, columns),
            digest=digest,
            pid=os.getpid(),
            fd=self.fd,
            offset=offset,
            height=rows,
            width=columns,
        )

    def prompt(self, *parts: list[int] | tuple[int, ...]) -> tuple[list[int], tuple[ImageInput, ...]]:
        """Texts (lists) and images (tuples for ``image``), one behind the other."""
        ids: list[int] = []
        images: list[ImageInput] = []
        for part in parts:
            if isinstance(part, tuple):
                image = self.image(len(ids), *part)
                images.append(image)
                gap = image.num_tokens // image.grid[0] - image.grid[1]
                ids += ([IMAGE] * image.grid[1] + [BREAK] * gap) * image.grid[0]
            else:
                ids += part
        return ids, tuple(images)


@pytest.fixture
def album() -> Iterator[Album]:
    """An empty one; its file is closed at the end."""
    found = Album(os.memfd_create("album"))
    yield found
    os.close(found.fd)


class ImageWorker(FakeWorker):
    """A worker whose rows hold what the encoder cache has where images stand."""

    num_layers = 1

    def execute(self, plan: StepPlan) -> StepResult:
        """Encode, and remember the images of new rows, before all else."""
        cache = self.__dict__.setdefault("cache", np.zeros(2048, dtype=np.int64))
        self.images = {**getattr(self, "images", {})}
        self._encode(plan, cache)
        for row in plan.released.tolist():
            self.images.pop(row, None)
        for row in {one.row for one in plan.admitted}:
            self.images[row] = plan.images[plan.images[:, 0] == row, 1:]
        self.of_plan = plan
        return super().execute(plan)

    def _encode(self, plan: StepPlan, cache: npt.NDArray[np.int64]) -> None:
        """Layers by layers, as ranks do: what a plan does not go on with is forgotten, and the pixels are read at the
        beginning alone."""
        before: dict[int, tuple[int, npt.NDArray[np.int64]]] = self.__dict__.setdefault("runs", {})
        runs: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}
        for first, rows, columns, _rank, begun, until, *place in plan.encodes.tolist():
            values = 100 + read_pixels(place)[:, :, 0].reshape(-1).astype(np.int64) if not begun else before[first][1]
            assert begun == (before[first][0] if begun else 0) <= until <= self.num_layers
            runs[first] = until, values
            if until == self.num_layers:
                cache[first : first + rows * columns] = values
                del runs[first]
        self.__dict__["runs"] = runs

    def _store(self, scheduled: list[tuple[int, int]]) -> None:
        """Tokens of images become what the cache has; those before them what K/V was made of."""
        found = {(row, start): first for row, start, first in self.of_plan.image_rows.tolist()}
        for number, count in scheduled:
            row = self.rows[number]
            if len(self.images.get(number, ())):
                self._fill(number, row, count, found)
            super()._store([(number, count)])  # a later row may share what this one stores

    def _fill(self, number: int, row: FakeRow, count: int, found: dict[tuple[int, int], int]) -> None:
        before = self.kv_token[self._slots(row, 0, 0)].tolist()
        row.token_ids[: row.computed] = before
        for image in self.images[number]:
            places, rows = rows_within(image, row.computed, row.computed + count)
            if len(places):
                values = self.__dict__["cache"][found[number, int(image[0])] + rows]
                for place, value in zip(places.tolist(), values.tolist(), strict=True):
                    row.token_ids[place] = value
        row.chain[:] = chain_hashes(row.token_ids, [])


class ImageSimulation(Simulation):
    """A simulation whose requests may have images of ``album``."""

    def __init__(self, given: SchedulerLimits, album: Album, *, ahead: int = 0) -> None:
        super().__init__(given, ahead=ahead)
        self.worker, self.album = ImageWorker(given), album
        found = LIMITS.get(given)
        self.worker.num_layers = 1 if found is None else found.num_layers

    def add_images(self, prompt: tuple[list[int], tuple[ImageInput, ...]], **params: object) -> EngineRequest:
        """Queue a request with images."""
        params.setdefault("seed", len(self.requests))
        request = EngineRequest(
            request_id=f"r{len(self.requests)}",
            prompt_token_ids=prompt[0],
            images=prompt[1],
            params=SamplingParams(**params),  # type: ignore[arg-type]
            eos_token_ids=(EOS,),
        )
        self.add_request(request)
        return request

    def expected(self, request: EngineRequest, index: int) -> tuple[list[int], FinishReason]:
        """What the fake model says of the request alone, with its images in their places."""
        ids = list(request.prompt_token_ids)
        for image in request.images:
            array = np.array((image.start, image.num_tokens, *image.grid), dtype=np.int32)
            for place in rows_within(array, 0, len(ids))[0].tolist():
                ids[place] = self.album.content[image.digest]
        params = request.params
        assert params.seed is not None and params.max_tokens is not None
        longest = min(self.limits.max_sequence_tokens, len(ids) + params.max_tokens)
        stop_ids = frozenset() if params.ignore_eos else frozenset({EOS})
        tokens = expected_tokens(ids, params.seed + index, longest, stop_ids, self.limits.windows)
        return tokens, FinishReason.STOP if tokens[-1] in stop_ids else FinishReason.LENGTH

    @property
    def counters(self) -> ImageCounters:
        """The scheduler's."""
        found = COUNTERS.get(self.scheduler.stats())
        assert found is not None
        return found


def image_limits(num_rows: int = 40, num_ranks: int = 1, **changes: object) -> SchedulerLimits:
    """Small limits with an encoder cache."""
    images = ImageLimits(num_rows=num_rows, token_id=IMAGE, num_ranks=num_ranks)
    return limits(**{"num_blocks": 64, "max_model_len": 128, "images": images, **changes})


@pytest.mark.parametrize(
    ("budget", "num_rows", "num_ahead"), [(1, 40, 0), (3, 40, 0), (7, 40, 1), (64, 40, 1), (3, 8, 1)]
)
def test_every_chunk_has_the_rows_of_its_images(album: Album, budget: int, num_rows: int, num_ahead: int) -> None:
    """Oracle: the fake model, with images at every place of a chunk's border, rows that end with text, equal images.  A
    draft head reads one token more, also where two neighbours have no room beside each other."""
    images = ImageLimits(num_rows=num_rows, token_id=IMAGE, num_ahead=num_ahead)
    simulation = ImageSimulation(image_limits(max_num_batched_tokens=budget, images=images), album)
    texts = [[3] * count for count in range(1, 8)]
    for text in texts:
        simulation.add_images(album.prompt(text, (1, 2, 3), [5], (2, 2, 3), (3, 4, 2, 1), [6]), max_tokens=4)
    simulation.add_images(album.prompt((1, 2, 3), [4], (1, 2, 3), (2, 2, 3), (5, 2, 3)), max_tokens=4)
    simulation.run()
    assert simulation.counters.num_encoded <= simulation.counters.num_queries


@pytest.mark.parametrize("room", [6, 7, 13])
def test_no_chunk_cuts_an_image_whose_tokens_see_each_other(
    album: Album, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the fake model, and each chunk's end; a step has room for the largest image and 4 decodes, or more."""
    fill, ends = ImageWorker._fill, list[int]()

    def check(worker: ImageWorker, number: int, row: FakeRow, count: int, found: dict[tuple[int, int], int]) -> None:
        end = row.computed + count
        assert not any(start < end < start + tokens for start, tokens, *_ in worker.images[number].tolist())
        ends.append(end)
        fill(worker, number, row, count, found)

    monkeypatch.setattr(ImageWorker, "_fill", check)
    images = ImageLimits(num_rows=40, token_id=IMAGE, is_bidirectional=True)
    given = image_limits(max_num_batched_tokens=4 + room, max_num_seqs=4, images=images, least_chunk_tokens=6)
    simulation = ImageSimulation(given, album)
    for length in range(1, 9):
        simulation.add_images(album.prompt([3] * length, (1, 2, 3), [5], (2, 2, 2), (3, 2, 3), [6]), max_tokens=9)
    simulation.run()
    assert len(ends) > 8


def test_equal_images_are_hits_and_others_never_are(album: Album) -> None:
    """Oracle: cached tokens and encoded images, counted by hand; blocks of 4."""
    simulation = ImageSimulation(image_limits(), album)

    def cached_after(value: int, **params: object) -> tuple[int, int]:
        request = simulation.add_images(album.prompt([9] * 5, (value, 2, 3), [8] * 6), max_tokens=2, **params)
        simulation.run()
        delta = simulation.outputs[request.request_id, 0].deltas[0]
        return delta.num_cached_tokens, simulation.counters.num_encoded

    assert cached_after(1) == (0, 1)
    assert cached_after(1) == (16, 1)  # all full blocks but that of the last token
    assert cached_after(2) == (4, 2)  # the block before the image
    assert cached_after(1, cache_salt="other") == (0, 3)
    simulation.scheduler.renew_cache_keys()
    assert cached_after(1) == (0, 4)


def test_embeddings_are_forgotten_at_any_time(album: Album) -> None:
    """Oracle: the fake model; the cache is emptied between an image's chunks, with and without a plan in flight."""
    for ahead in (0, 1):
        simulation = ImageSimulation(image_limits(max_num_batched_tokens=4), album, ahead=ahead)
        for _ in range(3):
            simulation.add_images(album.prompt([9] * 3, (1, 2, 5), [8], (2, 3, 2), [7]), max_tokens=3)
        for _ in range(30):
            simulation.scheduler.reset_mm_cache()
            simulation.scheduler.check_integrity()
            simulation.step()
        simulation.run()
        assert simulation.counters.num_encoded > 2


def test_large_images_wait_for_room_and_go_to_the_least_loaded_rank(album: Album) -> None:
    """Oracle: no more rows than a step may encode; 4 images of unequal size on 2 ranks."""
    simulation = ImageSimulation(image_limits(num_rows=64, num_ranks=2, max_num_batched_tokens=64), album)
    simulation.add_images(album.prompt([1], (1, 4, 4), [1], (2, 2, 4), [1], (3, 2, 3), [1], (4, 1, 2)), max_tokens=1)
    simulation.run()
    (encodes,) = [plan.encodes for plan in simulation.plans if len(plan.encodes)]
    assert (encodes[:, 1] * encodes[:, 2]).tolist() == [16, 8, 6, 2]
    assert encodes[:, 3].tolist() == [0, 1, 1, 1]
    many = ImageSimulation(image_limits(num_rows=20, max_num_batched_tokens=16), album)
    for value in range(6):
        many.add_images(album.prompt([value], (value, 3, 4)), max_tokens=1)
    many.run()
    assert [int((plan.encodes[:, 1] * plan.encodes[:, 2]).sum()) for plan in many.plans if len(plan.encodes)] == [
        12
    ] * 6


def cut_limits(num_ranks: int = 1) -> SchedulerLimits:
    """A tower of 10 layers, each of which costs as much as 2 tokens for each row of an image; a step has 20."""
    images = ImageLimits(num_rows=40, token_id=IMAGE, num_ranks=num_ranks, num_layers=10, row_work=2)
    return image_limits(max_num_batched_tokens=20, images=images)


def layers_of(plan: StepPlan, rank: int = 0) -> list[tuple[int, int]]:
    """Rows and layers of each image that a rank has in a step."""
    own = plan.encodes[plan.encodes[:, 3] == rank]
    return list(zip((own[:, 1] * own[:, 2]).tolist(), (own[:, 5] - own[:, 4]).tolist(), strict=True))


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_image_never_holds_up_a_text_for_longer_than_a_chunk(album: Album, ahead: int) -> None:
    """Oracle: the layers of each step, by hand, and a text that gets a token in every step meanwhile."""
    simulation = ImageSimulation(cut_limits(), album, ahead=ahead)
    text = simulation.add([1, 2, 3], max_tokens=40, ignore_eos=True)
    for _ in range(4):
        simulation.step()
    simulation.add_images(album.prompt([1, 2], (1, 1, 4), [7]), max_tokens=2)
    simulation.add_images(album.prompt([1, 2], (2, 3, 8), [7]), max_tokens=2)
    simulation.run()
    encoding = [plan for plan in simulation.plans if len(plan.encodes)]
    found = [layers_of(plan) for plan in encoding]
    # 8 a layer: 2 of 20 each step, 5 steps; 48 a layer: one, alone, which is more than a chunk but cannot be cut
    assert found == [[(4, 2)]] * 5 + [[(24, 1)]] * 10
    assert all(len(plan.decode_rows) for plan in encoding)
    assert text.request_id in simulation.requests


@pytest.mark.parametrize(("budget", "layers"), [(512, [8, 8, 8]), (64, [1] * 24), (2048, [24])])
def test_a_picture_of_a_megapixel_beside_a_text(album: Album, budget: int, layers: list[int]) -> None:
    """Oracle: Qwen3-VL-2B's sizes by hand: a layer of 12.6 M weights meets 4,096 patches, and each pair of them 2,048
    times, beside 1.41 G weights that a token of a prompt meets: 61 tokens a layer.  The text's longest gap is a step
    whose work is that of a full chunk at most."""
    row_work, pair_work = 4 * 12 * 1024**2 / 1.41e9, 16 * 2 * 1024 / 1.41e9
    images = ImageLimits(num_rows=2048, token_id=IMAGE, num_layers=24, row_work=row_work, pair_work=pair_work)
    assert 60 < images.layer_work(1024) < 62
    given = limits(num_blocks=600, max_model_len=1200, max_num_batched_tokens=budget, images=images)
    simulation = ImageSimulation(given, album)
    simulation.add([1, 2, 3], max_tokens=60, ignore_eos=True)
    for _ in range(4):
        simulation.step()
    simulation.add_images(album.prompt([1, 2], (1, 32, 32), [7]), max_tokens=2)
    simulation.run()
    encoding = [plan for plan in simulation.plans if len(plan.encodes)]
    assert [count for plan in encoding for _, count in layers_of(plan)] == layers
    assert all(len(plan.decode_rows) for plan in encoding)
    assert max(layers) * images.layer_work(1024) <= budget


def test_large_images_go_through_the_tower_on_all_ranks_at_once(album: Album) -> None:
    """Oracle: by hand: one prompt's images on two ranks, a small one whole beside the end of a large one."""
    simulation = ImageSimulation(cut_limits(num_ranks=2), album)
    simulation.add_images(album.prompt((1, 1, 4), [5], (2, 1, 5), [5], (3, 1, 1)), max_tokens=1)
    simulation.run()
    encoding = [plan for plan in simulation.plans if len(plan.encodes)]
    assert [layers_of(plan, 0) for plan in encoding] == [[(4, 2)]] * 5 + [[(1, 10)]]
    assert [layers_of(plan, 1) for plan in encoding] == [[(5, 2)]] * 5 + [[]]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_half_done_image_is_forgotten_with_its_last_request(album: Album, ahead: int) -> None:
    """Oracle: the plans: no layer of it runs behind an abort, unless another prompt has the same image."""
    simulation = ImageSimulation(cut_limits(), album, ahead=ahead)
    text = simulation.add([1, 2, 3], max_tokens=60, ignore_eos=True)
    one, two = (simulation.add_images(album.prompt([5, value], (1, 2, 5), [7]), max_tokens=1) for value in (1, 2))
    for _ in range(2):
        simulation.step()
    simulation.abort(one.request_id)
    planned = len(simulation.plans)
    for _ in range(2):
        simulation.step()
    assert all(len(plan.encodes) for plan in simulation.plans[planned:])
    simulation.abort(two.request_id)
    simulation.scheduler.check_integrity()
    planned = len(simulation.plans)
    for _ in range(3):
        simulation.step()
    assert not any(len(plan.encodes) for plan in simulation.plans[planned:]) and simulation.counters.num_rows_used == 0
    simulation.abort(text.request_id)
    again = simulation.add_images(album.prompt([5, 3], (1, 1, 4), [7]), max_tokens=1)
    simulation.run()
    assert simulation.counters.num_encoded == 1 and again.request_id in simulation.requests


def test_a_text_request_has_no_bytes_for_images(album: Album) -> None:
    """Oracle: the plans of an engine that takes images, and of one that does not."""
    from tp_engine.ipc.plan_codec import encode_plan

    found = []
    for given in (image_limits(), limits(num_blocks=64, max_model_len=128)):
        simulation = ImageSimulation(given, album)
        simulation.add([1, 2, 3, 4, 5], max_tokens=6)
        simulation.run()
        found.append([encode_plan(plan) for plan in simulation.plans])
    assert found[0] == found[1]


@pytest.mark.parametrize("num_layers", [1, 5])
@pytest.mark.parametrize("seed", range(4))
def test_random_requests_with_images(album: Album, seed: int, num_layers: int) -> None:
    """Oracle: the fake model; few blocks (preemptions), a small encoder cache (rows leave between two chunks), forks,
    aborts, plans ahead; images that take several steps."""
    rng = random.Random(seed)
    given = image_limits(
        images=ImageLimits(num_rows=14, token_id=IMAGE, num_ranks=1 + seed % 3, num_layers=num_layers, row_work=0.7),
        num_blocks=rng.choice((16, 40)),
        max_model_len=48,
        max_num_batched_tokens=rng.choice((5, 9, 16)),
        has_states=seed == 3,
        num_snapshots=3 if seed == 3 else 0,
    )
    simulation = ImageSimulation(given, album, ahead=seed % 2)
    for _ in range(150):
        if rng.random() < 0.3:
            parts: list[list[int] | tuple[int, ...]] = [[rng.randrange(3)] * rng.randrange(7)]
            for _ in range(rng.randrange(3)):
                parts += [(rng.randrange(3), rng.choice((1, 2, 3)), rng.choice((2, 4)), rng.randrange(2)), [2, 3]]
            prompt = album.prompt(*parts, [1])
            salt = rng.choice((None, None, "a"))
            simulation.add_images(prompt, max_tokens=rng.randint(1, 9), n=rng.choice((1, 1, 3)), cache_salt=salt)
        elif rng.random() < 0.05 and simulation.requests:
            simulation.abort(rng.choice(list(simulation.requests)))
        simulation.step()
    simulation.run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (4, 2)}, "has 8 embeddings, and takes 6 places"),
        ({"start": 0}, "placeholder"),
        ({"start": 4}, "beyond the prompt"),
        ({"digest": b""}, "grid"),
        ({"fd": 999_999}, "gone"),
        ({"offset": 1 << 40}, "gone"),
    ],
)
def test_what_does_not_fit_is_refused(album: Album, change: dict[str, object], message: str) -> None:
    """Oracle: an error for the request alone; the scheduler goes on."""
    from dataclasses import replace

    simulation = ImageSimulation(image_limits(), album)
    ids, (image,) = album.prompt([1], (1, 2, 3))
    with pytest.raises(RequestError, match=message):
        simulation.add_images((ids, (replace(image, **change),)))  # type: ignore[arg-type]
    simulation.add_images(album.prompt([1], (1, 2, 3)), max_tokens=1)
    simulation.run()


def test_a_larger_image_than_the_cache_is_refused(album: Album) -> None:
    """Oracle: both numbers in the error."""
    simulation = ImageSimulation(image_limits(num_rows=5), album)
    with pytest.raises(RequestError, match="takes 6 rows of the encoder cache, which has 5"):
        simulation.add_images(album.prompt([1], (1, 2, 3)))


def test_pixels_are_held_until_the_last_step_has_read_them(album: Album) -> None:
    """Oracle: this process's open files; the sender closes its own at once, and the request is aborted while a plan
    that encodes its image is in flight."""
    before = len(os.listdir("/proc/self/fd"))
    simulation = ImageSimulation(image_limits(), album, ahead=1)
    fd = os.memfd_create("sender")
    other = Album(fd)
    prompt = other.prompt([1], (1, 2, 3))
    simulation.album.content |= other.content
    request = simulation.add_images(prompt, max_tokens=5)
    os.close(fd)
    plan = simulation.scheduler.schedule()
    assert plan is not None and len(plan.encodes) == 1
    simulation.in_flight.append(plan)
    simulation.abort(request.request_id)
    simulation.drain()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_encoder_cache_against_a_list() -> None:
    """Oracle: a list of rows; images that were used longest ago leave, pinned ones never do."""
    rng, cache = random.Random(1), EncoderCache(20)
    rows: list[int | None] = [None] * 20
    for number in range(300):
        pinned = {one for one in rng.sample(range(max(number, 1)), min(number, 2)) if cache.use(one) is not None}
        count = rng.randint(1, 9)
        first = cache.add(number, count, pinned)
        cache.check_integrity()
        assert all(cache.use(one) is not None for one in pinned)
        if first is None:
            gaps = [-1, *(place for place, one in enumerate(rows) if one in pinned), 20]
            assert max(end - start - 1 for start, end in pairwise(gaps)) < count
            continue
        rows[first : first + count] = [number] * count
        rows = [one if one is not None and cache.use(one) is not None else None for one in rows]
    cache.clear()
    assert cache.num_used == len(cache) == 0 and cache.add(-1, 20, set()) == 0


def test_positions_of_an_image_by_hand() -> None:
    """Oracle: transformers' rule, written out: 4 tokens of text, an image of 2 x 3, text; and any part of it."""
    images: npt.NDArray[np.int32] = np.array([[4, 6, 2, 3], [11, 4, 4, 1]], dtype=np.int32)
    whole = [
        [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 7, 8, 8, 8, 8, 12, 13],
        [0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 7, 8, 9, 10, 11, 12, 13],
        [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 8, 8, 8, 12, 13],
    ]
    find: Callable[[int, int], list[list[int]]] = lambda first, end: turning_positions(images, first, end).tolist()  # noqa: E731
    for first in range(17):
        for end in range(first + 1, 18):
            assert find(first, end) == [axis[first:end] for axis in whole]
