"""Files that are small and cost much: each is refused, or read, within limits, and the next one is read."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from tests.images import data_url, file_of, image_info, image_tokenizer, picture, pixels_of
from tests.unit.system.isolation import functions
from tp_engine.errors import RequestError
from tp_engine.images import decoding, loading, reader
from tp_engine.images.loading import open_bytes
from tp_engine.images.reader import ImageReader
from tp_engine.images.settings import MOST_PIXELS
from tp_engine.images.sources import ImageSource
from tp_engine.system.isolation.cancellation import Cancellation, cancelled_by
from tp_engine.system.isolation.process import CancelledCallError, Limits

DEADLINE_S = 100.0
SOURCE = ImageSource(where="messages[0].content[1]", content="data:")


def bmp_with_runs(width: int, height: int, body: bytes) -> bytes:
    """A BMP of 256 colours in the encoding by runs."""
    begin = 14 + 40 + 4 * 256
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(body), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", begin + len(body), 0, 0, begin) + header + bytes(4 * 256) + body


def rows_that_end(width: int, height: int) -> bytes:
    """One pixel in each row, whose rest Pillow fills up byte by byte, in Python."""
    return bmp_with_runs(width, height, b"\x01\x00\x00\x00" * height + b"\x00\x01")


def test_a_bmp_with_runs_may_have_few_pixels() -> None:
    """Oracle: the message for 26 kB that took a thread minutes; one of usual size is read."""
    with pytest.raises(RequestError, match="6300 x 6300 pixels; at most 2,796,202 are taken of a BMP with runs file"):
        open_bytes(SOURCE, rows_that_end(6300, 6300), MOST_PIXELS)
    assert pixels_of(open_bytes(SOURCE, rows_that_end(64, 64), MOST_PIXELS)).shape == (64, 64, 3)


def slow_file() -> bytes:
    return rows_that_end(1600, 1600)  # some 0.3 s


def test_a_decode_has_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the message; the next file is read."""
    monkeypatch.setattr(loading, "MAX_CPU_S", 0.02)
    with pytest.raises(RequestError, match=r"^messages\[0\].*takes more than 0.02 s to decode; send it smaller"):
        pixels_of(open_bytes(SOURCE, slow_file(), MOST_PIXELS))
    assert pixels_of(open_bytes(SOURCE, file_of(picture(9, 9)), MOST_PIXELS)).shape == (9, 9, 3)


def test_a_header_has_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the message; Pillow skips what stands before a JPEG's next marker byte by byte, in Python."""
    monkeypatch.setattr(loading, "_HEADER_LIMITS", Limits(cpu_s=0.05, memory_bytes=1 << 28))
    data = file_of(picture(), "JPEG")
    with pytest.raises(RequestError, match=r"^messages\[0\].*takes more than 0.05 s"):
        open_bytes(SOURCE, data[:2] + b"\xff\xe0\x00\x02" + bytes(3_000_000) + data[2:], MOST_PIXELS)


def test_a_decode_has_a_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the message."""
    monkeypatch.setattr(loading, "_MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(loading, "_BYTES_PER_PIXEL", 1)
    with pytest.raises(RequestError, match=r"^messages\[0\].*needs more than .* of memory to decode"):
        pixels_of(open_bytes(SOURCE, file_of(Image.new("RGB", (1500, 1500))), MOST_PIXELS))


def test_a_webp_whose_canvases_need_too_much_memory_is_not_called_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the remedy; the library has the canvases before a pixel is decoded, so the header is not read."""
    monkeypatch.setattr(loading, "_HEADER_LIMITS", Limits(cpu_s=2.0, memory_bytes=16 << 20))
    with pytest.raises(RequestError, match="the WebP image needs too much memory; send it smaller"):
        open_bytes(SOURCE, file_of(Image.new("RGB", (2000, 2000)), "WEBP", method=0), MOST_PIXELS)


def test_the_pixels_of_a_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the image that passes the limit is named, before a pixel is decoded."""
    monkeypatch.setattr(reader, "_MOST_PIXELS", 3 * 64 * 48)
    files = [ImageSource(where=f"image {number}", content=data_url(picture())) for number in range(4)]
    assert len(made().open(files[:3])) == 3
    with pytest.raises(RequestError, match=r"^image 3: the images up to this one have 12,288 pixels; at most 9,216"):
        made().open(files)


def test_the_time_of_a_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: an image is refused for what those before it took, and all memory comes back."""
    monkeypatch.setattr(reader, "_MOST_CPU_S", 1e-3)
    files = [ImageSource(where=f"image {n}", content=data_url(picture(400, 300))) for n in range(2)]
    one = made()
    with pytest.raises(RequestError, match=r"image [01]: (the images before it took|the image takes more than)"):
        one.stage(one.open(files), [0, 9])
    assert one.staged.used == 0


def test_a_decode_ends_when_nobody_waits_for_it() -> None:
    """Oracle: the call's error; the file alone would take longer than anybody waits."""
    opened = open_bytes(SOURCE, rows_that_end(1600, 1700), MOST_PIXELS)
    cancellation = Cancellation()
    timer = threading.Timer(0.05, cancellation.cancel)
    timer.start()
    with cancelled_by(cancellation), pytest.raises(CancelledCallError):
        pixels_of(opened)
    timer.join(DEADLINE_S)


def big_tiff_of_wrong_tags(number: int) -> bytes:
    """Pillow warns of each tag, in words of its own."""
    tags = b"".join(struct.pack("<HHQQ", 1000 + tag, 1, 9, 16 + 20 * number) for tag in range(number))
    return b"II" + struct.pack("<HHHQQ", 43, 8, 0, 16, number) + tags + struct.pack("<Q", 0)


MAKERS: dict[str, Callable[[], bytes]] = {
    "TIFF of wrong tags": lambda: big_tiff_of_wrong_tags(3000),
    "EXIF of wrong tags": lambda: file_of(picture(), "WEBP", exif=b"Exif\0\0" + big_tiff_of_wrong_tags(1000)),
    "broken TIFF": lambda: file_of(picture(), "TIFF", compression="tiff_lzw")[:-400],
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_decoders_warn_of_fills_no_log(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Oracle: nothing on standard error, by Pillow's warnings or by the C libraries below it."""
    for _ in range(2):
        try:
            pixels_of(open_bytes(SOURCE, MAKERS[kind](), MOST_PIXELS))
        except RequestError as error:
            assert str(error).startswith("messages[0].content[1]: the ")
    assert capfd.readouterr().err == ""


def test_a_decoder_that_crashes_is_an_error_of_its_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the message for a function that ends its process."""
    monkeypatch.setattr(decoding, "read_header", functions.crash)
    with pytest.raises(RequestError, match=r"^messages\[0\].content\[1\]: the image is broken: its decoder failed"):
        open_bytes(SOURCE, file_of(picture()), MOST_PIXELS)


def made(**limits: Any) -> ImageReader:
    settings = image_info(**limits).images
    assert settings is not None
    return ImageReader(settings, image_tokenizer(), waits=True)
