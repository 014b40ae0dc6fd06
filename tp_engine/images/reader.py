"""The images of a request, from what a client sent to what the engine gets.  Needs Pillow; safe in several threads.

::

    sources -> files -> headers: sizes, tokens -> (the prompt is made, and checked) -> pixels in shared memory, digests
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from tp_engine.errors import RequestError
from tp_engine.images.image_input import ImageInput
from tp_engine.images.loading import OpenedImage, open_bytes, open_object
from tp_engine.images.placeholders import Grid, Placeholders
from tp_engine.images.settings import ImageSettings
from tp_engine.images.sources import ImageSource, file_bytes
from tp_engine.images.staged import ALIGNMENT, ByteBudget, ImageMemory, StagedImage
from tp_engine.units import GIB, round_up

_DECODING_BYTES = 2 * GIB
_MOST_TIMES = 4096


class ImageReader:
    """Reads images for one model.

    ``waits``: pixels take no more than ``transport_bytes``, and a request waits for room; else, where one thread both
    reads images and drives the engine, nothing would ever make room.
    """

    def __init__(self, settings: ImageSettings, tokenizer: Any, *, waits: bool) -> None:
        self.settings = settings
        self.rules = settings.rules()
        self.placeholders = Placeholders(settings, tokenizer)
        self.staged = ByteBudget(settings.transport_bytes if waits else None, "images")
        self.seconds: deque[float] = deque(maxlen=_MOST_TIMES)
        """How long each request's images took, for those who observe."""
        self._decoding = ByteBudget(_DECODING_BYTES, "images that are decoded")
        salt = (settings.family, settings.cell, self.rules.mean, self.rules.std)
        self._salt = repr(salt).encode()

    def open(self, sources: Sequence[ImageSource]) -> list[OpenedImage]:
        """Fetch all files and read their headers; raises ``RequestError``."""
        most = self.settings.max_images
        if len(sources) > most:
            raise RequestError(
                f"At most {most} image(s) may be provided in one prompt; this one has {len(sources)} "
                "(--limit-mm-per-prompt)",
                param="messages",
            )
        return [self._open(source) for source in sources]

    def grids(self, images: Sequence[OpenedImage]) -> list[Grid]:
        """Return rows and columns of embeddings of each; ``RequestError`` for a shape that the model does not take."""
        return [self.rules.grid(*self._resized(one)) for one in images]

    def stage(self, images: Sequence[OpenedImage], starts: Sequence[int]) -> tuple[ImageInput, ...]:
        """Decode all and put their pixels into shared memory; ``starts`` are their places in the prompt."""
        sizes = [self._resized(one) for one in images]
        offsets = np.cumsum([0, *(round_up(3 * height * width, ALIGNMENT) for height, width in sizes)]).tolist()
        memory = ImageMemory(offsets[-1], self.staged)
        inputs = []
        for image, (height, width), start, offset in zip(images, sizes, starts, offsets, strict=False):
            with self._decoding.taken(image.decode_bytes):
                pixels = image.pixels(*self.rules.filled(*image.sizes), self.rules.resample)
                below, beside = height - pixels.shape[0], width - pixels.shape[1]
                if below or beside:
                    pixels = np.pad(pixels, ((0, below), (0, beside), (0, 0)))
                pixels = np.ascontiguousarray(pixels)
            data = memoryview(pixels.reshape(-1))  # type: ignore[arg-type]  # numpy says so from 3.12 on
            memory.write(offset, data)
            digest = hashlib.sha256(self._salt + repr((height, width)).encode())
            digest.update(data)
            grid = self.rules.grid(height, width)
            staged = StagedImage(
                start=start,
                num_tokens=self.placeholders.num_tokens(grid),
                grid=grid,
                digest=digest.digest(),
                pid=os.getpid(),
                fd=memory.fd,
                offset=offset,
                height=height,
                width=width,
            )
            inputs.append(memory.hold(staged))
        self.seconds.append(memory.end())
        return tuple(inputs)

    def _open(self, source: ImageSource) -> OpenedImage:
        limit = self.settings.max_pixels
        if isinstance(source.content, str):
            return open_bytes(source, file_bytes(source, self.settings), limit)
        return open_object(source, limit)

    def _resized(self, image: OpenedImage) -> tuple[int, int]:
        try:
            return self.rules.resized(*image.sizes)
        except RequestError as error:
            raise image.source.refusal(str(error)) from None
