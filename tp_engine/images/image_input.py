"""An image of a prompt, as the engine gets it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """One image of a prompt: where its tokens stand, and where its pixels are.

    It takes the ``num_tokens`` places of the expanded prompt from ``start`` on: as many as its rows of embeddings, and
    those of the texts between rows that a family puts inside of an image.  ``grid`` is (rows, columns) of embeddings.
    ``digest`` (32 bytes) is a sha256 over the pixels, their size, and all else that changes the embeddings: equal
    digests mean equal embeddings.  The pixels, RGB of uint8 after the resize, (height, width, 3), begin ``offset``
    bytes into file ``fd`` of process ``pid``, an anonymous file that this process keeps open until the request ends.
    """

    start: int
    num_tokens: int
    grid: tuple[int, int]
    digest: bytes
    pid: int
    fd: int
    offset: int
    height: int
    width: int

    @property
    def num_rows(self) -> int:
        """Embeddings that the tower makes of it."""
        return self.grid[0] * self.grid[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of its pixels."""
        return self.height * self.width * 3
