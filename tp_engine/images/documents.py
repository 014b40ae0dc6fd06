"""Documents of requests whose pages are images: PDFs, with the extra ``pdf``.  Needs Pillow.

::

    DocumentSource -> the file's pages and their sizes -> an ImageSource for each -> ... -> OpenedImage -> pixels
                      `--------------- in processes that may die, by functions of pdf_pages.py ---------------'
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.util import find_spec

from tp_engine.images import pdf_pages
from tp_engine.images.decoding import Size
from tp_engine.images.loading import MAX_CALLS, MAX_CPU_S, OpenedImage, call_isolated
from tp_engine.images.settings import ImageSettings
from tp_engine.images.sources import DocumentSource, ImageSource, file_bytes
from tp_engine.system.isolation.process import IsolatedProcess, Limits
from tp_engine.system.units import MIB

_HEAD_BYTES = 1024  # where readers look for the mark of a PDF
# With what the files of images begin, some after four bytes: clients send them as files of no type.
_IMAGES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"II*\0", b"MM\0*", b"BM")
_BOXES = (b"ftypavif", b"jP  \r\n\x87\n")
_LIMITS = Limits(cpu_s=5.0, memory_bytes=1024 * MIB)
_PROCESS = IsolatedProcess(prepare=(pdf_pages.prepare, ""), max_calls=MAX_CALLS)


@dataclass(frozen=True, slots=True)
class PdfPage:
    """The page ``number`` of a file, and its size as it is drawn; the content of its ``ImageSource``."""

    file: bytes
    number: int
    height: int
    width: int


def reads_pdfs() -> bool:
    """Return whether the package that draws PDFs is installed."""
    return find_spec("pypdfium2") is not None


def read_pages(source: DocumentSource, settings: ImageSettings) -> list[ImageSource]:
    """Return the pages of a document as images, or the image that it is itself; ``RequestError`` for one that cannot
    be read, or has too many."""
    file = file_bytes(source, settings)
    if file.startswith(_IMAGES) or file[4:12] in _BOXES:
        return [ImageSource(where=source.where, content=source.content)]
    if not reads_pdfs():
        raise source.refusal(
            "PDFs are read with the package pypdfium2, which is not installed here (pip install 'tp-engine[pdf]'); "
            "send the pages as images, or their text"
        )
    if b"%PDF-" not in file[:_HEAD_BYTES]:
        raise source.refusal("the file is no PDF; PDFs and images are read, send others as text")
    what: dict[str, object] = {"max_pages": settings.max_images}
    sizes = json.loads(call_isolated(_PROCESS, source, pdf_pages.read_sizes, what, file, _LIMITS))
    return [
        ImageSource(where=f"{source.where}, page {number + 1}", content=PdfPage(file, number, height, width))
        for number, (height, width) in enumerate(sizes)
    ]


def open_page(source: ImageSource, page: PdfPage) -> OpenedImage:
    """Return the image of a page, which is drawn when its pixels are written."""

    def write(target: int, offset: int, size: Size, cpu_s: float) -> float:
        limits = Limits(
            cpu_s=min(cpu_s, MAX_CPU_S),
            memory_bytes=_LIMITS.memory_bytes + 2 * size.num_bytes,
            output_bytes=offset + size.num_bytes + 4096,
            niceness=5,
        )
        what: dict[str, object] = {"number": page.number, "offset": offset, "size": asdict(size)}
        return float(json.loads(call_isolated(_PROCESS, source, pdf_pages.draw, what, page.file, limits, target)))

    return OpenedImage(source=source, write=write, height=page.height, width=page.width)
