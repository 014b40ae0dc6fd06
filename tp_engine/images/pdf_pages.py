"""Pages of PDFs as images, drawn where a file may take long, need much memory, or crash the library that draws it.

``read_sizes`` and ``draw`` are functions of isolated calls, with inputs as those of ``decoding.py``.  They need the
package pypdfium2, the extra ``pdf``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from tp_engine.errors import RequestError
from tp_engine.images.decoding import Size, call_parts, rgb_pixels, write_pixels

_SCALE = 2.0  # 144 dots per inch, at which a page of A4 has 1,190 x 1,684 pixels
_MOST_PIXELS = 1 << 24  # of a page; larger ones are drawn at a lower scale


def prepare(_text: str = "") -> None:
    """Import the library before the forks that use it."""
    import_module("pypdfium2")


def read_sizes(data: bytes) -> bytes:
    """Return ``[[height, width], ...]`` of the pages as they are drawn, as JSON; ``RequestError`` for more than
    ``max_pages``."""
    what, file = call_parts(data)
    with _opened(file) as document:
        count = len(document)
        if count > what["max_pages"]:
            raise RequestError(
                f"the PDF has {count:,} pages; at most {what['max_pages']:,} are taken, each as an image: send fewer, "
                "in parts (--limit-mm-per-prompt)"
            )
        sizes = [_drawn_size(document.get_page_size(number)) for number in range(count)]
    if not sizes:
        raise RequestError("the PDF has no page")
    return json.dumps(sizes).encode()


def draw(data: bytes, target: int) -> bytes:
    """Write the pixels of the page ``number`` at the ``offset`` of ``target``, in a ``Size``; returns the processor
    time that this took."""
    what, file = call_parts(data)
    with _opened(file) as document:
        page = document[what["number"]]
        width, height = page.get_size()
        image = page.render(scale=_scale(height, width), rev_byteorder=True, maybe_alpha=False).to_pil()
        pixels = rgb_pixels(image, None, Size(**what["size"]))
    return write_pixels(pixels, target, what["offset"])


def _scale(height: float, width: float) -> float:
    return float(min(_SCALE, (_MOST_PIXELS / max(height * width, 1.0)) ** 0.5))


def _drawn_size(page: tuple[float, float]) -> tuple[int, int]:
    width, height = page
    scale = _scale(height, width)
    return max(1, round(height * scale)), max(1, round(width * scale))


@contextlib.contextmanager
def _opened(file: bytes) -> Iterator[Any]:
    """The document; whatever the library raises about it becomes a ``RequestError``."""
    library: Any = import_module("pypdfium2")
    try:
        document = library.PdfDocument(file)
        try:
            yield document
        finally:
            document.close()
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # it has no errors of its own for all faults
        if "password" in str(error).lower():
            raise RequestError("the PDF has a password; send it without, or its pages as images") from None
        raise RequestError(f"the PDF is broken ({type(error).__name__}); send its pages as images") from None
