"""Images on their way through the tower: which layers of which image each rank runs in a step.

::

    step      1                 2                 3
    rank 0    A: layers 0-9     A: layers 10-19   A: layers 20-23 | C: all
    rank 1    B: all            -                 -

The unit of work is what a token of a prompt costs a rank; a rank gets no more of it in a step than a full chunk has,
but always one layer.  An image that fits into a step is encoded in one, whole.  Of the others a rank has one at a time,
which goes on in *every* plan until it has ended: a rank forgets those with which a plan does not go on.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from tp_engine.features.images.feature import ImageLimits
from tp_engine.images.image_input import ImageInput


@dataclass(slots=True)
class _Encode:
    """An image on ``rank``: ``num_done`` layers have run in plans that were made, ``num_next`` run in the next one."""

    image: ImageInput
    rank: int
    num_done: int = 0
    num_next: int = 0


class Encodes:
    """The images on their way, by name.  ``step_work`` bounds a rank's work in a step, and the rows of the images that
    a step finishes."""

    def __init__(self, limits: ImageLimits, step_work: int) -> None:
        self._limits, self._step_work = limits, step_work
        self._all: dict[int, _Encode] = {}
        self._loads = [0.0] * limits.num_ranks  # of the plan in the making
        self._num_rows = 0  # that it finishes

    def __len__(self) -> int:
        return len(self._all)

    @property
    def names(self) -> set[int]:
        """The names of all images on their way."""
        return {*self._all}

    @property
    def finishing(self) -> list[int]:
        """The images that the plan in the making finishes."""
        return [name for name in self._all if not self.is_unfinished(name)]

    def is_unfinished(self, name: int) -> bool:
        """Return whether an image is on its way, and still is behind the plan in the making."""
        one = self._all.get(name)
        return one is not None and one.num_done + one.num_next < self._limits.num_layers

    def would_cut(self, image: ImageInput) -> bool:
        """Return whether an image takes more than one step."""
        return self._work(image) * self._limits.num_layers > self._step_work

    def begin_step(self) -> list[int]:
        """Go on with what is half done; return the others, which are forgotten."""
        dropped = self.forget([name for name, one in self._all.items() if not one.num_done])
        self._loads = [0.0] * self._limits.num_ranks
        self._num_rows = 0
        for one in self._all.values():
            self._share(one)
        return dropped

    def free_rank(self, image: ImageInput) -> int | None:
        """Return the rank with the least work if it has time for an image: for all of it beside others, or for a part
        of it alone."""
        rank = min(range(len(self._loads)), key=self._loads.__getitem__)
        is_whole = self._loads[rank] + self._work(image) * self._limits.num_layers <= self._step_work
        is_too_much = self._num_rows > 0 and self._num_rows + image.num_rows > self._step_work
        if self._loads[rank] and not is_whole:
            return None
        return None if is_whole and is_too_much else rank

    def start(self, name: int, image: ImageInput, rank: int) -> None:
        """Begin an image on a rank that has time for it."""
        one = self._all[name] = _Encode(image, rank)
        self._share(one)

    def advance(self, place_of: Callable[[int], int | None]) -> list[tuple[int, ...]]:
        """Return the plan's ``encodes``: what runs counts as done.  ``place_of`` an image is its first row in the
        encoder cache."""
        found: list[tuple[int, ...]] = []
        for name, one in list(self._all.items()):
            image, until = one.image, one.num_done + one.num_next
            first = place_of(name)
            assert first is not None, "its rows are taken"
            low, high = image.offset & 0x7FFFFFFF, image.offset >> 31
            place = image.pid, image.fd, low, high, image.height, image.width
            found.append((first, *image.grid, one.rank, one.num_done, until, *place))
            one.num_done, one.num_next = until, 0
            if until == self._limits.num_layers:
                del self._all[name]
        return found

    def forget(self, names: Iterable[int]) -> list[int]:
        """Forget images; return those that were on their way."""
        return [name for name in names if self._all.pop(name, None) is not None]

    def forget_whole(self, used: Collection[int]) -> list[int]:
        """Forget the images that are not ``used`` and would be encoded in this step alone; return them."""
        unused = [name for name in self.finishing if name not in used and not self._all[name].num_done]
        return self.forget(unused)

    def clear(self) -> None:
        """Forget all."""
        self._all.clear()

    def _work(self, image: ImageInput) -> float:
        return self._limits.layer_work(image.num_rows)

    def _share(self, one: _Encode) -> None:
        """Give an image as many layers as its rank has time for, one at least if it has nothing else."""
        work, left = self._work(one.image), self._limits.num_layers - one.num_done
        room = self._step_work - self._loads[one.rank]
        count = min(left, max(int(room / work), 0 if self._loads[one.rank] else 1))
        if count == left and self._num_rows and self._num_rows + one.image.num_rows > self._step_work:
            count -= 1  # the rows of a step have their own bound
        self._loads[one.rank] += count * work
        self._num_rows += one.image.num_rows if count == left else 0
        one.num_next = count
