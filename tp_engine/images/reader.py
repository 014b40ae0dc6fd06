"""The images of a request, from what a client sent to what the engine gets.  Needs Pillow; safe in several threads.

::

    sources -> files -> headers: sizes, tokens -> (the prompt is made, and checked) -> pixels in shared memory, digests
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from tp_engine.errors import ConfigError, RequestError
from tp_engine.images.decoding import Size
from tp_engine.images.documents import PdfPage, open_page, read_pages, reads_pdfs
from tp_engine.images.image_input import ImageInput
from tp_engine.images.loading import OpenedImage, open_bytes, open_object
from tp_engine.images.placeholders import Grid, Placeholders
from tp_engine.images.rules import ImageRules
from tp_engine.images.settings import MOST_PIXELS, ImageSettings
from tp_engine.images.sources import DocumentSource, ImageSource, file_bytes
from tp_engine.images.staged import ALIGNMENT, ByteBudget, ImageMemory, StagedImage
from tp_engine.system.units import GIB, MIB, round_up

# Of decodes beyond a size at which all threads together take as much.
_DECODING_BYTES, _SMALL_DECODE = 2 * GIB, 64 * MIB
_MOST_TIMES = 4096
# Of all images of a request: pixels of their files, and processor time to decode them.
_MOST_PIXELS = 4 * MOST_PIXELS
_MOST_CPU_S = 60.0


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
        self._most_rows = math.prod(self.rules.grid(*self.rules.largest))
        self._decoding = ByteBudget(_DECODING_BYTES, "images that are decoded")
        self.reads_pdfs = reads_pdfs()
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
        opened, num_pixels = [], 0
        for source in sources:
            opened.append(image := self._open(source))
            num_pixels += image.height * image.width
            if num_pixels > _MOST_PIXELS:
                raise source.refusal(
                    f"the images up to this one have {num_pixels:,} pixels; at most {_MOST_PIXELS:,} are taken in a "
                    "request: send them smaller"
                )
        return opened

    def pages(self, source: DocumentSource) -> list[ImageSource]:
        """Return the pages of a document as images; raises ``RequestError``."""
        return read_pages(source, self.settings)

    def grids(self, images: Sequence[OpenedImage]) -> list[Grid]:
        """Return rows and columns of embeddings of each; ``RequestError`` for a shape that the model does not take."""
        return [self.rules.grid(*self._sized(one)[1]) for one in images]

    def stage(self, images: Sequence[OpenedImage], starts: Sequence[int]) -> tuple[ImageInput, ...]:
        """Decode all and put their pixels into shared memory; ``starts`` are their places in the prompt."""
        sized = [self._sized(one) for one in images]
        offsets = np.cumsum([0, *(round_up(3 * height * width, ALIGNMENT) for _, (height, width) in sized)]).tolist()
        memory = ImageMemory(offsets[-1], self.staged)
        inputs, left_s = [], _MOST_CPU_S
        for image, (rules, (height, width)), start, offset in zip(images, sized, starts, offsets, strict=False):
            filled = rules.filled(*image.sizes)
            size = Size(*filled, frame_height=height, frame_width=width, resample=rules.resample)
            if left_s <= 0:
                raise image.source.refusal(f"the images before it took {_MOST_CPU_S:g} s to decode; send fewer")
            is_small = image.decode_bytes <= _SMALL_DECODE
            with contextlib.nullcontext() if is_small else self._decoding.taken(image.decode_bytes):
                left_s -= image.write(memory.fd, offset, size, left_s)
            digest = hashlib.sha256(self._salt + repr((height, width)).encode())
            digest.update(memory.content(offset, size.num_bytes))
            grid = rules.grid(height, width)
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
        if isinstance(source.content, PdfPage):
            return open_page(source, source.content)
        if isinstance(source.content, str):
            return open_bytes(source, file_bytes(source, self.settings), limit)
        return open_object(source, limit)

    def _sized(self, image: OpenedImage) -> tuple[ImageRules, tuple[int, int]]:
        """The rules of an image, and its height and width by these.  The start has measured the largest image of the
        engine's own rules, so none may have more rows of embeddings."""
        asked = image.source.sizes
        try:
            rules = self.settings.rules(asked) if asked else self.rules
            resized = rules.resized(*image.sizes)
        except ConfigError as error:
            raise image.source.refusal(str(error), param="mm_processor_kwargs") from None
        except RequestError as error:
            raise image.source.refusal(str(error)) from None
        if (num_rows := math.prod(rules.grid(*resized))) > self._most_rows:
            raise image.source.refusal(
                f"the image takes {num_rows:,} tokens at the size that is asked for; this engine takes at most "
                f"{self._most_rows:,}: ask for less, or start it with --mm-processor-kwargs and this size",
                param="mm_processor_kwargs",
            )
        return rules, resized
