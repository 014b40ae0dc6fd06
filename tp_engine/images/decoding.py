"""Headers and pixels of files, read where a file may take long, need much memory, or crash the library that reads it.

::

    file -> header: format, size, scans -> ... -> RGB: alpha on white, 16 bits to 8 -> turn (EXIF) -> resize -> pixels

``read_header`` and ``decode`` are functions of isolated calls (``system/isolation/``).  Their input is a line of JSON,
which says what to do, and the file after it.  This module imports Pillow and nothing large, as each call runs in a
fork.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageFile, UnidentifiedImageError

from tp_engine.errors import RequestError

# Programs (EPS starts one) and formats that nobody sends stay closed.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000")
# A file's limit of pixels is the operator's over this: decoding takes as many times longer.
_SLOWNESS = {"JPEG2000": 16, "BMP with runs": 64}
_RUNS = "bmp_rle"  # Pillow's decoder of BMPs with runs, which is written in Python
_MOST_SCANNED = 1 << 31  # pixels times scans of a progressive JPEG, which may have hundreds
_SCAN = b"\xff\xda"
_ORIENTATION = 0x0112
_TURNS: dict[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_CHANGES_SIDES = range(5, 9)
# Pillow turns a TIFF itself.  It decodes a PNG to look for metadata after its pixels: needless, where there is none.
_PNG_METADATA = (b"eXIf", b"XML:com.adobe.xmp")


@dataclass(frozen=True, slots=True)
class Size:
    """What becomes of an image: ``height`` and ``width`` of its pixels, which stand in the upper left of a frame of
    ``frame_height`` and ``frame_width``, and how they are resampled."""

    height: int
    width: int
    frame_height: int
    frame_width: int
    resample: int

    @property
    def num_bytes(self) -> int:
        """Of the frame."""
        return 3 * self.frame_height * self.frame_width


def prepare(_text: str = "") -> None:
    """Import what reads the formats, before the forks that use it."""
    Image.init()


def call_data(what: dict[str, Any], file: bytes) -> bytes:
    """Return the input of one of the calls."""
    return json.dumps(what).encode() + b"\n" + file


def read_header(data: bytes) -> bytes:
    """Return ``[height, width, orientation]`` as JSON: the sides as shown by a viewer that turns the image by EXIF's
    ``orientation``.  ``RequestError`` for a file that is no image, or has more pixels than ``max_pixels``."""
    what, file = call_parts(data)
    with refusing():
        image = _open(file)
    kind = image.format or ""
    if any(tile[0] == _RUNS for tile in image.tile):
        kind = "BMP with runs"
    limit = what["max_pixels"] // _SLOWNESS.get(kind, 1)
    width, height = image.size
    if width * height > limit or not width * height:
        raise RequestError(
            f"the image has {width} x {height} pixels; at most {limit:,} are taken of a {kind} file: send it smaller "
            "(--max-image-pixels)"
        )
    if kind in ("JPEG", "MPO") and width * height * file.count(_SCAN) > _MOST_SCANNED:
        raise RequestError("the JPEG has more scans than an image of its size needs; send it as a baseline JPEG")
    orientation = None
    if kind not in ("PNG", "TIFF") or (kind == "PNG" and any(name in file for name in _PNG_METADATA)):
        with contextlib.suppress(Exception):  # metadata that cannot be read turns nothing
            orientation = image.getexif().get(_ORIENTATION)
    orientation = orientation if orientation in _TURNS else None
    if orientation in _CHANGES_SIDES:
        height, width = width, height
    return json.dumps([height, width, orientation]).encode()


def decode(data: bytes, target: int) -> bytes:
    """Write the pixels of a file of the known ``orientation`` at the ``offset`` of ``target``, in a ``Size``; returns
    the processor time that this took."""
    what, file = call_parts(data)
    with refusing():
        image = _open(file)
        pixels = rgb_pixels(image, what["orientation"], Size(**what["size"]))
    return write_pixels(pixels, target, what["offset"])


def write_pixels(pixels: bytes, target: int, offset: int) -> bytes:
    """Write at the ``offset`` of a file; return the processor time that this call has taken."""
    view = memoryview(pixels)
    while len(view):
        written = os.pwrite(target, view, offset)
        view, offset = view[written:], offset + written
    return json.dumps(time.process_time()).encode()


def rgb_pixels(image: Image.Image, orientation: int | None, size: Size) -> bytes:
    """Return the image in three channels of 8 bits; what is transparent becomes white, and the rest of the frame black.

    ``RequestError`` for pixels that cannot be shown, and whatever Pillow raises for a broken file.
    """
    image = _rgb(image)
    if orientation is not None:
        image = image.transpose(_TURNS[orientation])
    if image.size != (size.width, size.height):
        image = image.resize((size.width, size.height), resample=Image.Resampling(size.resample))
    if image.size != (size.frame_width, size.frame_height):
        frame = Image.new("RGB", (size.frame_width, size.frame_height))
        frame.paste(image, (0, 0))
        image = frame
    return image.tobytes()


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if image.mode in ("I", "F"):
        raise RequestError(f"pixels of the mode {image.mode} have no range that is known; send 8 bits a channel")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def call_parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return what an input of ``call_data`` is made of."""
    line, _, file = data.partition(b"\n")
    return json.loads(line), file


def _open(file: bytes) -> ImageFile.ImageFile:
    # The limit of pixels is checked here; Pillow's own, twice of what it warns of, stays an error.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Image.open(io.BytesIO(file), formats=_FORMATS)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Within, whatever Pillow raises about a file becomes a ``RequestError``; the file itself is never shown."""
    try:
        yield
    except RequestError:
        raise
    except Image.DecompressionBombError:
        raise RequestError("the image has too many pixels; send it smaller") from None
    except UnidentifiedImageError:
        raise RequestError("the file is no image that is known here; send PNG, JPEG, WebP or GIF") from None
    except MemoryError:
        raise
    except Exception as error:  # decoders raise whatever they like
        text = str(error).lower()
        if "could not create decoder" in text:  # the WebP library has canvases before a pixel is decoded
            raise RequestError("the WebP image needs too much memory; send it smaller, or as PNG or JPEG") from None
        if "max_text_" in text:  # Pillow's limits of what a PNG's texts and profiles unpack to
            raise RequestError("the PNG has too much metadata; send it without") from None
        reason = "the image is truncated" if "truncated" in text else f"the image is broken ({type(error).__name__})"
        raise RequestError(f"{reason}; send the whole file") from None
