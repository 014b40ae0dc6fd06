"""From the bytes of a file, or an object of Pillow or numpy, to the pixels that a model sees.  Needs Pillow.

::

    bytes -> header: format, size -> decode -> RGB: alpha on white, 16 bits to 8 -> turn (EXIF) -> resize -> uint8

The header is checked before a pixel is decoded: a file of 100 kB can stand for a billion of them.  Of an animation the
first frame is read.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from tp_engine.errors import RequestError
from tp_engine.images.sources import ImageSource

Pixels = npt.NDArray[np.uint8]

# Programs (EPS starts one) and formats that nobody sends stay closed.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000")
# A file's limit of pixels is the operator's over this: decoding takes as many times longer.
_SLOWNESS = {"JPEG2000": 16}
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
# Pillow turns a TIFF itself.  It decodes a PNG to look for metadata behind its pixels: needless, where there is none.
_PNG_METADATA = (b"eXIf", b"XML:com.adobe.xmp")
_SVG = (b"<svg", b"<?xml")
_AREAS = {"low": 512 * 512, "medium": 1024 * 1024}  # pixels at most of an image with this ``detail``

# The limit of pixels is checked here; Pillow's own, twice of what it warns of, stays an error.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@dataclass(slots=True, kw_only=True)
class OpenedImage:
    """An image whose header has been read; ``height`` and ``width`` are those that a viewer shows, who turns it
    by ``turn``.

    ``read`` gives the image; a file is opened anew, so that its pixels live no longer than they are used.
    """

    source: ImageSource
    read: Callable[[], Image.Image]
    height: int
    width: int
    turn: Image.Transpose | None = None

    @property
    def decode_bytes(self) -> int:
        """Memory that decoding takes at most: the file's form, one with alpha, and RGB."""
        return self.height * self.width * 12

    @property
    def sizes(self) -> tuple[int, int]:
        """Height and width for the rules: less than those of the file where ``detail`` asks for it."""
        area = self.height * self.width
        scale = min(1.0, (_AREAS.get(self.source.detail, area) / area) ** 0.5)
        return max(1, int(self.height * scale)), max(1, int(self.width * scale))

    def pixels(self, height: int, width: int, resample: int) -> Pixels:
        """Return the decoded image in this size, (height, width, 3); ``RequestError`` for a broken file."""
        with _named(self.source):
            image = _rgb(self.read(), self.source)
            if self.turn is not None:
                image = image.transpose(self.turn)
            if image.size != (width, height):
                image = image.resize((width, height), resample=Image.Resampling(resample))
            return np.asarray(image)


def open_bytes(source: ImageSource, data: bytes, max_pixels: int) -> OpenedImage:
    """Read a file's header; ``RequestError`` for one that is no image, or has too many pixels."""
    if not data:
        raise source.refusal("the image is empty")
    if data.lstrip()[:5].lower().startswith(_SVG):
        raise source.refusal("SVG images are not taken; send it drawn, as PNG")
    read = partial(_open, data)
    with _named(source):
        image = read()
    limit = max_pixels // _SLOWNESS.get(image.format or "", 1)
    width, height = image.size
    if width * height > limit or not width * height:
        raise source.refusal(
            f"the image has {width} x {height} pixels; at most {limit:,} are taken of a {image.format} file: send it "
            "smaller (--max-image-pixels)"
        )
    if image.format in ("JPEG", "MPO") and width * height * data.count(_SCAN) > _MOST_SCANNED:
        raise source.refusal("the JPEG has more scans than an image of its size needs; send it as a baseline JPEG")
    orientation = None
    if image.format not in ("PNG", "TIFF") or (image.format == "PNG" and any(name in data for name in _PNG_METADATA)):
        with contextlib.suppress(Exception):  # metadata that can not be read turns nothing
            orientation = image.getexif().get(_ORIENTATION)
    if orientation in _CHANGES_SIDES:
        height, width = width, height
    return OpenedImage(source=source, read=read, height=height, width=width, turn=_TURNS.get(orientation))


def _open(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=_FORMATS)


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
    return OpenedImage(source=source, read=lambda: image, height=height, width=width)


def _rgb(image: Image.Image, source: ImageSource) -> Image.Image:
    """Return three channels of 8 bits; what is transparent becomes white."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return Image.fromarray((np.asarray(image).astype(np.int32) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise source.refusal(f"pixels of the mode {image.mode} have no range that is known; send 8 bits a channel")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


@contextlib.contextmanager
def _named(source: ImageSource) -> Any:
    """Give whatever Pillow raises about a file the image's name; the file itself is never shown."""
    try:
        yield
    except RequestError:
        raise
    except Image.DecompressionBombError:
        raise source.refusal("the image has too many pixels; send it smaller") from None
    except UnidentifiedImageError:
        raise source.refusal("the file is no image that is known here; send PNG, JPEG, WebP or GIF") from None
    except Exception as error:  # decoders raise whatever they like
        text = str(error).lower()
        if "max_text_" in text:  # Pillow's limits of what a PNG's texts and profiles unpack to
            raise source.refusal("the PNG has too much metadata; send it without") from None
        reason = "the image is truncated" if "truncated" in text else f"the image is broken ({type(error).__name__})"
        raise source.refusal(f"{reason}; send the whole file") from None
