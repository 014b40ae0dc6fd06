"""From the bytes of a file, or an object of Pillow or numpy, to the pixels that a model sees.  Needs Pillow.

::

    bytes -> header: format, size -> decode -> RGB: alpha on white, 16 bits to 8 -> turn (EXIF) -> resize -> uint8
             `------------------- in processes that may die, by functions of decoding.py -------------------'

The header is checked before a pixel is decoded: a file of 100 kB can stand for a billion of them.  Of an animation the
first frame is read.  Objects of Pillow and numpy are of the user's own program, and are read in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeAlias

import numpy as np
from PIL import Image

from tp_engine.errors import RequestError
from tp_engine.images import decoding
from tp_engine.images.decoding import Size
from tp_engine.images.sources import ImageSource
from tp_engine.system.isolation.process import (
    CallError,
    CancelledCallError,
    IsolatedProcess,
    Limits,
    OutOfMemoryError,
    OutOfTimeError,
)
from tp_engine.system.units import MIB

MAX_CPU_S = 20.0
"""Processor time of decoding one image."""
_HEADER_LIMITS = Limits(cpu_s=2.0, memory_bytes=512 * MIB)
# Memory of a decode for each pixel: what decoders have beside the file's form, one with alpha, and RGB.
_BYTES_PER_PIXEL, _MEMORY_BYTES = 32, 256 * MIB
_BYTES_PER_DECODED = 20
_ANSWER_BYTES = 4096
MAX_CALLS = 64
"""At a time: slow ones hold up no others."""
_NICENESS = 5  # texts of others go first
_SVG = (b"<svg", b"<?xml")
_AREAS = {"low": 512 * 512, "medium": 1024 * 1024}  # pixels at most of an image with this ``detail``
_PROCESS = IsolatedProcess(prepare=(decoding.prepare, ""), max_calls=MAX_CALLS)

WritePixels: TypeAlias = Callable[[int, int, Size, float], float]
"""Writes pixels of a size into a file, at an offset, within seconds of processor time; how many it took."""


@dataclass(slots=True, kw_only=True)
class OpenedImage:
    """An image whose header has been read; ``height`` and ``width`` are those that a viewer shows.

    ``write`` decodes it anew each time, so that its pixels live no longer than they are used; ``RequestError`` for a
    broken file, and for one that takes too long.
    """

    source: ImageSource
    write: WritePixels
    height: int
    width: int

    @property
    def decode_bytes(self) -> int:
        """Memory that decoding takes: the file's form, one with alpha, and RGB."""
        return self.height * self.width * _BYTES_PER_DECODED

    @property
    def sizes(self) -> tuple[int, int]:
        """Height and width for the rules: less than those of the file where ``detail`` asks for it."""
        area = self.height * self.width
        scale = min(1.0, (_AREAS.get(self.source.detail, area) / area) ** 0.5)
        return max(1, int(self.height * scale)), max(1, int(self.width * scale))


def open_bytes(source: ImageSource, data: bytes, max_pixels: int) -> OpenedImage:
    """Read a file's header; ``RequestError`` for one that is no image, or has too many pixels."""
    if not data:
        raise source.refusal("the image is empty")
    if data.lstrip()[:5].lower().startswith(_SVG):
        raise source.refusal("SVG images are not taken; send it drawn, as PNG")
    found = call_isolated(_PROCESS, source, decoding.read_header, {"max_pixels": max_pixels}, data, _HEADER_LIMITS)
    height, width, orientation = json.loads(found)

    def write(target: int, offset: int, size: Size, cpu_s: float) -> float:
        limits = Limits(
            cpu_s=min(cpu_s, MAX_CPU_S),
            memory_bytes=_MEMORY_BYTES + height * width * _BYTES_PER_PIXEL + 2 * size.num_bytes,
            output_bytes=offset + size.num_bytes + _ANSWER_BYTES,
            niceness=_NICENESS,
        )
        what = {"orientation": orientation, "offset": offset, "size": asdict(size)}
        return float(json.loads(call_isolated(_PROCESS, source, decoding.decode, what, data, limits, target)))

    return OpenedImage(source=source, write=write, height=height, width=width)


def open_object(source: ImageSource, max_pixels: int) -> OpenedImage:
    """Take an image of Pillow, or an array (height, width, 3) of uint8; ``RequestError`` for anything else."""
    given = source.content
    if isinstance(given, np.ndarray):
        if given.dtype != np.uint8 or given.ndim != 3 or given.shape[2] != 3 or 0 in given.shape:
            raise source.refusal(
                f"an array of {given.dtype} with the shape {given.shape}; it must be uint8, (height, width, 3)"
            )
        given = Image.fromarray(given)
    if not isinstance(given, Image.Image):
        raise source.refusal(
            f"the image is of type {type(given).__name__}; it must be an image of Pillow, an array (height, width, 3) "
            "of uint8, or a URL such as data:image/png;base64,..."
        )
    image: Image.Image = given
    width, height = image.size
    if not 0 < width * height <= max_pixels:
        raise source.refusal(f"the image has {width} x {height} pixels; from 1 to {max_pixels:,} are taken")

    def write(target: int, offset: int, size: Size, _cpu_s: float) -> float:
        try:
            with decoding.refusing():
                os.pwrite(target, decoding.rgb_pixels(image, None, size), offset)
        except RequestError as error:
            raise source.refusal(str(error)) from None
        return 0.0

    return OpenedImage(source=source, write=write, height=height, width=width)


def call_isolated(
    process: IsolatedProcess,
    source: ImageSource,
    function: Callable[..., bytes],
    what: dict[str, object],
    file: bytes,
    limits: Limits,
    *descriptors: int,
) -> bytes:
    """Return the output of an isolated call for a file, whose errors get the image's name."""
    try:
        data = decoding.call_data(what, file)
        return bytes(process.call(function, data, limits, descriptors=descriptors).output)
    except RequestError as error:
        raise source.refusal(str(error)) from None
    except CancelledCallError:
        raise
    except (OutOfTimeError, OutOfMemoryError) as error:
        raise source.refusal(f"the image {error} to decode; send it smaller, as PNG or JPEG") from error
    except CallError as error:
        raise source.refusal("the image is broken: its decoder failed; send the whole file") from error
