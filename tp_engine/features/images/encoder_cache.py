"""Where images are in the encoder cache of the ranks."""

from collections import OrderedDict
from collections.abc import Collection, Iterable


class EncoderCache:
    """Which rows of the ranks' encoder cache, one tensor of ``num_rows`` on every rank, hold which image.

    An image takes neighbouring rows.  Where there is no room, the images go that were used longest ago.  No image is
    held for a request: one that a later chunk needs again, and that has gone, is encoded again.  So images never wait
    for each other, and one always fits, because none is larger than the cache.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._places: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_used(self) -> int:
        """Rows that hold an image."""
        return sum(count for _, count in self._places.values())

    def use(self, image: int) -> int | None:
        """Return the first row of an image, which counts as used now; None if it is not there."""
        place = self._places.get(image)
        if place is None:
            return None
        self._places.move_to_end(image)
        return place[0]

    def add(self, image: int, count: int, kept: Collection[int]) -> int | None:
        """Give ``count`` rows to an image that is not there, and return the first; None, and nothing has changed, if
        there is no room beside the images ``kept``."""
        assert image not in self._places, "an image is encoded once"
        if self._gap(count, (self._places[one] for one in kept)) is None:
            return None
        leaving = iter([one for one in self._places if one not in kept])
        while (first := self._gap(count, self._places.values())) is None:
            del self._places[next(leaving)]
        self._places[image] = first, count
        return first

    def drop(self, image: int) -> None:
        del self._places[image]

    def clear(self) -> None:
        """Forget all images."""
        self._places.clear()

    def check_integrity(self) -> None:
        """Assert that no two images share a row."""
        end = 0
        for first, count in sorted(self._places.values()):
            assert first >= end and count > 0, "two images share a row"
            end = first + count
        assert end <= self.num_rows

    def _gap(self, count: int, taken: Iterable[tuple[int, int]]) -> int | None:
        """The first of ``count`` free rows beside the places ``taken``."""
        end = 0
        for first, size in sorted(taken):
            if first - end >= count:
                return end
            end = first + size
        return end if self.num_rows - end >= count else None
