"""Files of all kinds, whole and broken, become pixels of RGB, or an error that names the image."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from tests.images import file_of, picture, pixels_of
from tp_engine.errors import RequestError
from tp_engine.images.decoding import call_data, read_header
from tp_engine.images.loading import open_bytes, open_object
from tp_engine.images.settings import MOST_PIXELS
from tp_engine.images.sources import ImageSource

SOURCE = ImageSource(where="messages[0].content[1]", content="data:")


def read(data: bytes, max_pixels: int = MOST_PIXELS) -> np.ndarray[Any, Any]:
    """The pixels of a file in its own size."""
    return pixels_of(open_bytes(SOURCE, data, max_pixels))


def chunk(kind: bytes, body: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def with_chunk(kind: bytes, body: bytes, *, last: bool = False) -> bytes:
    """A PNG of the picture with a chunk more, before its pixels or behind them."""
    data = file_of(picture())
    place = len(data) - 12 if last else data.index(b"IDAT") - 4
    return data[:place] + chunk(kind, body) + data[place:]


def png(width: int, height: int, rows: bytes, bits: int = 8, colours: int = 2) -> bytes:
    """A PNG of any stated size; ``rows`` are its filtered rows."""
    header = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows, 9)), chunk(b"IEND", b""))
    )


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_as_viewers_show_them(orientation: int, kind: str) -> None:
    """Oracle: the definition of EXIF's eight orientations, applied to the array; mlx-vlm, ollama and others forgot."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = np.asarray(picture(64, 48))
    shown = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: pixels.transpose(1, 0, 2)[:, ::-1],
        7: pixels.transpose(1, 0, 2)[::-1, ::-1],
        8: pixels.transpose(1, 0, 2)[::-1],
    }[orientation]
    options = {"lossless": True} if kind == "WEBP" else {}
    found = read(file_of(picture(64, 48), kind, exif=exif, **options))
    assert np.array_equal(found, shown)


def test_headers_of_a_png_alone_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: no pixel is decoded until they are asked for; Pillow decodes a PNG whose metadata it is asked for."""
    monkeypatch.setattr(PngImageFile, "load_prepare", lambda _: pytest.fail("it was decoded"))
    data = call_data({"max_pixels": MOST_PIXELS}, file_of(picture(64, 48)))
    assert json.loads(read_header(data)) == [48, 64, None]


def test_metadata_that_can_not_be_read_turns_nothing() -> None:
    """Oracle: the picture; its EXIF block is noise."""
    image = picture()
    assert np.array_equal(read(file_of(image, "PNG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff")), np.asarray(image))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_what_is_transparent_is_white(mode: str) -> None:
    """Oracle: white where alpha is 0, whatever colour hides there; the picture's colour where it is 255."""
    image = Image.new("RGBA", (4, 2), (9, 9, 9, 0))
    image.putpixel((3, 1), (50, 50, 50, 255))
    kind = "TIFF" if mode == "PA" else "PNG"
    found = (
        read(file_of(image.convert(mode), kind))
        if mode != "PA"
        else pixels_of(open_object(ImageSource(where="x", content=image.convert("PA")), 99))
    )
    assert (found[0] == 255).all() and abs(int(found[1, 3, 0]) - 50) < 8


def test_a_transparent_colour_of_a_palette_and_of_rgb_is_white() -> None:
    """Oracle: white; both files name one colour as transparent."""
    palette = picture().quantize(8)
    palette.putpixel((0, 0), 3)
    assert (read(file_of(palette, "PNG", transparency=3))[0, 0] == 255).all()
    plain = Image.new("RGB", (2, 1), (1, 2, 3))
    assert (read(file_of(plain, "PNG", transparency=(1, 2, 3))) == 255).all()


@pytest.mark.parametrize(
    ("kind", "mode", "options", "tolerance"),
    [
        ("JPEG", "CMYK", {"quality": 95}, 40),
        ("JPEG", "L", {}, 20),
        ("PNG", "1", {}, 0),
        ("PNG", "P", {}, 0),
        ("GIF", "P", {}, 0),
        ("BMP", "RGB", {}, 0),
        ("TIFF", "RGB", {}, 0),
        ("WEBP", "RGB", {"lossless": True}, 0),
        ("AVIF", "RGB", {"quality": 95}, 8),
        ("JPEG2000", "RGB", {}, 0),
    ],
)
def test_formats_and_colours_are_read(kind: str, mode: str, options: dict[str, Any], tolerance: int) -> None:
    """Oracle: Pillow's own conversion of the picture that was saved; JPEG loses a little."""
    image = picture(64, 48, mode)
    expected = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(read(file_of(image, kind, **options)).astype(int) - expected).mean() <= tolerance


def test_16_bits_keep_their_range() -> None:
    """Oracle: the upper eight bits; Pillow's conversion would clip all above 255 to white."""
    grey = np.array([[0, 256, 32768, 65535]], np.uint16)
    assert read(file_of(Image.fromarray(grey)))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_interlaced_files_pages_and_large_metadata_are_read() -> None:
    """Oracle: the pixels: an interlaced PNG of one grey, by hand; the first page of a TIFF; a profile of 1 MB."""
    passes = ((1, 1), (1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4))  # width and height of each
    rows = b"".join((b"\0" + bytes([77]) * width) * height for width, height in passes)
    header = struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 1)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    assert (read(b"\x89PNG\r\n\x1a\n" + parts) == np.full((8, 8, 3), 77)).all()
    image = picture()
    pages = file_of(image, "TIFF", save_all=True, append_images=[Image.new("RGB", (99, 99))])
    for data in (pages, file_of(image, "PNG", icc_profile=bytes(1 << 20))):
        assert np.array_equal(read(data), np.asarray(image))


def test_floats_without_a_range_are_refused() -> None:
    """Oracle: the message; a conversion would give black."""
    with pytest.raises(RequestError, match="mode F have no range"):
        read(file_of(Image.fromarray(np.full((4, 4), 0.5, np.float32)), "TIFF"))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_of_an_animation_is_read(kind: str) -> None:
    """Oracle: the first of two frames."""
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert (read(data)[0, 0] == (255, 0, 0)).all()


def test_one_pixel_and_long_strips_are_read() -> None:
    """Oracle: the sizes."""
    assert read(file_of(Image.new("RGB", (1, 1), (1, 2, 3)))).tolist() == [[[1, 2, 3]]]
    assert read(file_of(Image.new("L", (20_000, 1)))).shape == (1, 20_000, 3)


BOMB = zlib.compress(bytes(9 << 20), 9)  # 9 kB that unpack to 9 MiB
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "the image is empty"),
    "text": (lambda: b"hello, I am no image", "no image that is known"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG images are not taken; send it drawn, as PNG"),
    "xml": (lambda: b" <?xml version='1.0'?><svg/>", "SVG images"),
    "eps": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image that is known"),
    "truncated jpeg": (lambda: file_of(picture(200, 200), "JPEG")[:-900], "truncated"),
    "truncated png": (lambda: file_of(picture(200, 200))[:-900], "truncated|broken"),
    "header alone": (lambda: file_of(picture())[:20], "no image that is known|broken|truncated"),
    "broken png": (lambda: file_of(picture()).replace(b"IDAT", b"JDAT"), "broken|truncated|no image"),
    "bomb": (lambda: png(30_000, 30_000, b"\0" * 90_000), "too many pixels|30000 x 30000"),
    "bomb of text": (lambda: with_chunk(b"zTXt", b"key\0\0" + BOMB), "too much metadata; send it without"),
    "bomb of text behind": (
        lambda: with_chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + BOMB, last=True),
        "too much metadata",
    ),
    "bomb of a profile": (lambda: with_chunk(b"iCCP", b"key\0\0" + BOMB), "too much metadata"),
    "lying header": (lambda: png(5000, 5000, b"\0" * 9000), "truncated|broken"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_by_name(name: str) -> None:
    """Oracle: the message names the image and the reason, and shows nothing of the file."""
    make, message = BAD[name]
    with pytest.raises(RequestError, match=message) as caught:
        read(make())
    text = str(caught.value)
    assert text.startswith("messages[0].content[1]: ") and "object at" not in text and len(text) < 300
    assert caught.value.param == "messages"


def test_a_jpeg_of_many_scans_is_refused() -> None:
    """Oracle: the message; each scan would be decoded over all pixels, for minutes."""
    data = file_of(Image.new("L", (5000, 5000)), "JPEG", progressive=True)
    scan = data[data.index(b"\xff\xda") : -2]
    with pytest.raises(RequestError, match="more scans than an image of its size needs"):
        read(data[:-2] + scan * 99 + data[-2:])


def test_the_operators_limit_holds_before_a_pixel_is_decoded() -> None:
    """Oracle: the header alone is enough for the refusal: the file ends behind it."""
    with pytest.raises(RequestError, match="64 x 48 pixels; at most 3,071"):
        open_bytes(SOURCE, file_of(picture(64, 48))[:60], 64 * 48 - 1)


def test_objects_of_python_are_taken_or_refused() -> None:
    """Oracle: the same pixels from Pillow and from numpy; other types are named."""
    image = picture()
    for given in (image, np.asarray(image)):
        opened = open_object(ImageSource(where="image 0", content=given), 1 << 20)
        assert np.array_equal(pixels_of(opened), np.asarray(image))
    for wrong, message in ((np.zeros((3, 4, 4), np.uint8), r"shape \(3, 4, 4\)"), (7, "type int"), (io, "type module")):
        with pytest.raises(RequestError, match=message):
            open_object(ImageSource(where="image 0", content=wrong), 1 << 20)


def test_low_and_medium_detail_lower_the_size_for_the_rules_alone() -> None:
    """Oracle: an area of 512 x 512, or of 1,024 x 1,024, at most, by hand; small images stay."""
    for detail, size, expected in (
        ("low", (1024, 512), (724, 362)),
        ("medium", (4096, 1024), (2048, 512)),
        ("low", (100, 100), (100, 100)),
        ("high", (1024, 512), (1024, 512)),
    ):
        opened = open_object(ImageSource(where="x", content=Image.new("RGB", size), detail=detail), 1 << 30)
        assert opened.sizes == expected[::-1]
