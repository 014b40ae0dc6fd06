"""Images as clients name them, and the bytes of their files.

::

    data:image/png;base64,...        always
    https://HOST/...                 only of hosts in --allowed-media-domains (``fetching.py``)
    file:///PATH                     only of regular files below --allowed-local-media-path
    an object of Pillow or numpy     from Python alone
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tp_engine.errors import RequestError, shown
from tp_engine.images.fetching import fetch
from tp_engine.images.settings import ImageSettings
from tp_engine.system.files import open_regular
from tp_engine.system.units import MIB

MAX_FILE_BYTES = 20 * MIB
"""Of an image that is fetched or read; a data URL is as large as its body may be."""
DETAILS = ("auto", "low", "medium", "high", "original")
WITH_PARTS = ("messages", "input", "content", "output", "outputs", "source")
"""Fields of requests, and of what is in them, that may have parts."""
# The kind of a part -> its fields that may have the image; those of "image" are transformers' own, and MCP's.
_KINDS = {
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "computer_screenshot": ("image_url",),
    "image_pil": ("image_pil",),
    "image": ("image", "url", "base64", "data"),
    "file": ("file_data",),
    "input_file": ("file_data", "file_url"),
}
_FILES = ("file", "input_file")
_WITH_IMAGES = frozenset({*_KINDS, "image_generation_call", "document"})  # the last two of responses and messages
_SPACES = " \t\n\f\r"  # what the URL standard calls ASCII whitespace
# Sizes of one image that parts have for Qwen's own tools.
_SIZES, _UNTAKEN_SIZES = ("min_pixels", "max_pixels"), ("resized_height", "resized_width")
# What encoders of URLs write for bytes of base64, and for line ends between them.
_ESCAPES = tuple(
    (f"%{ord(byte):{form}}".encode(), byte.encode()) for byte in "+/=" + _SPACES for form in ("02X", "02x")
)
# Objects of JSON, of which none is an image of Python's.
_NO_OBJECTS = (bytes, Mapping, list, bool, int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """One image of a request.  ``where`` names it in errors; ``content`` is a URL, or an object of Pillow or numpy.
    ``sizes`` are settings of the processor for this image alone, under the names of ``--mm-processor-kwargs``."""

    where: str
    content: Any
    detail: str = "auto"
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def refusal(self, reason: str, *, param: str = "messages") -> RequestError:
        """Return the error for this image."""
        return RequestError(f"{self.where}: {reason}", param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentSource(ImageSource):
    """A PDF of a request, whose pages become images (``documents.py``)."""


def has_image_part(value: object, depth: int = 8) -> bool:
    """Return whether messages, or items, have an image at most ``depth`` levels below."""
    if isinstance(value, Mapping):
        if _kind(value) in _WITH_IMAGES:
            return True
        value = [value.get(name) for name in WITH_PARTS]
    return isinstance(value, (list, tuple)) and depth > 0 and any(has_image_part(one, depth - 1) for one in value)


def is_image_part(part: object) -> bool:
    """Return whether a part of a message is an image."""
    return isinstance(part, ImageSource) or (isinstance(part, Mapping) and _kind(part) in _KINDS)


def is_document_part(part: object) -> bool:
    """Return whether a part of a message is a file, which may be a document."""
    return isinstance(part, DocumentSource) or (isinstance(part, Mapping) and _kind(part) in _FILES)


def _kind(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if kind is None and part.get("image_url") is not None:  # as in vLLM
        return "image_url"
    return kind if isinstance(kind, str) else ""


def _of_anthropic(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of the kind ``image``; one of Anthropic's form in transformers' form."""
    source = part.get("source")
    if not isinstance(source, Mapping) or source.get("type") not in ("base64", "url"):
        return part
    return {"type": "image", "data": source.get("data"), "url": source.get("url")}


def image_source(where: str, part: Mapping[str, Any] | ImageSource) -> ImageSource:
    """Return the image of a part for which ``is_image_part``; ``RequestError`` for one that names none."""
    if isinstance(part, ImageSource):
        return part
    kind = _kind(part)
    if kind == "image":
        part = _of_anthropic(part)
    if kind in _FILES:
        return _file_source(where, part["file"] if isinstance(part.get("file"), Mapping) else part)
    name = next((name for name in _KINDS[kind] if part.get(name) is not None), _KINDS[kind][0])
    given: Any = part.get(name)
    beside: Mapping[str, Any] = part
    if name == "image_url" and isinstance(given, Mapping):
        given, beside = given.get("url"), {**part, **given}
    detail: Any = beside.get("detail")
    takes_objects = kind == "image_pil" or name == "image"  # of Python alone: JSON has none
    if kind == "image_pil" and (given is None or isinstance(given, (str, *_NO_OBJECTS))):
        raise RequestError(f"{where}: image_pil must be an image of Pillow; send image_url", param="messages")
    if not isinstance(given, str) and (not takes_objects or given is None or isinstance(given, _NO_OBJECTS)):
        remedy = "; files by their id are not stored here" if part.get("file_id") is not None else ""
        names = " or ".join(map(repr, _KINDS[kind]))
        raise RequestError(
            f"{where} is a part of type {kind!r}, but has no URL in {names}: send data:image/png;base64,...{remedy}",
            param="messages",
        )
    if name in ("base64", "data") and given.lstrip()[:5].lower() != "data:":
        given = f"data:;base64,{given}"
    if part.get("uuid") is not None:
        raise RequestError(f"{where}: uuid names no image here; send the image itself", param="messages")
    if detail is None:
        detail = "auto"
    if detail not in DETAILS:
        raise RequestError(f"{where}: detail is {shown(detail)}; it must be {' or '.join(DETAILS)}", param="messages")
    for other in _UNTAKEN_SIZES:
        if beside.get(other) is not None:
            raise RequestError(
                f"{where}: {other} is not taken; send max_pixels, or the image in its size", param="messages"
            )
    sizes = {name: beside[name] for name in _SIZES if beside.get(name) is not None}
    return ImageSource(where=where, content=given, detail=detail, sizes=sizes)


def _file_source(where: str, file: Mapping[str, Any]) -> ImageSource:
    """A PDF, or an image that is sent as a file."""
    data, url = file.get("file_data"), file.get("file_url")
    if not isinstance(data, str) and not isinstance(url, str):
        remedy = "; files by their id are not read" if file.get("file_id") is not None else ""
        raise RequestError(
            f"{where} is a file without 'file_data': send data:application/pdf;base64,...{remedy}", param="messages"
        )
    if not isinstance(data, str):
        return DocumentSource(where=where, content=url)
    if data.lstrip()[:5].lower() != "data:":
        data = f"data:application/pdf;base64,{data}"
    media_type = data.lstrip()[5:105].partition(";")[0].partition(",")[0].strip().lower()
    if media_type.startswith("image/"):
        return ImageSource(where=where, content=data)
    if media_type not in ("application/pdf", "application/octet-stream", ""):
        raise RequestError(
            f"{where} is a file of the type {shown(media_type)}; PDFs and images are read, send others as text",
            param="messages",
        )
    return DocumentSource(where=where, content=data)


def file_bytes(source: ImageSource, settings: ImageSettings) -> bytes:
    """Return the bytes of the file that a URL names; ``RequestError`` for one that may not be read, or cannot."""
    url: str = source.content.lstrip(_SPACES)
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        return _data(source)
    if scheme == "file":
        return _local_file(source, settings.allowed_path)
    if scheme in ("http", "https"):
        if not settings.allowed_domains:
            raise source.refusal(
                "images are not fetched from other hosts; send the image as data:image/png;base64,..., or serve with "
                "--allowed-media-domains and the host's name"
            )
        try:
            return fetch(url, settings.allowed_domains, MAX_FILE_BYTES)
        except RequestError as error:
            raise source.refusal(str(error)) from None
    raise source.refusal("the URL of an image must begin with data:image/, such as data:image/png;base64,...")


def _data(source: ImageSource) -> bytes:
    """The file of a data URL, as browsers read one: percent-encoded or not, base64 with white space or without padding
    (the Fetch standard's forgiving-base64 decode).  A ``RequestError`` for anything else."""
    head, comma, body = source.content.partition(",")
    if not comma or not head.lower().rstrip().endswith(";base64"):
        raise source.refusal("a data URL must be data:image/png;base64, and the file in base64")
    try:
        data = body.encode("ascii")
        for escape, byte in _ESCAPES if b"%" in data else ():
            data = data.replace(escape, byte)
        data = data.translate(None, _SPACES.encode())
        if len(data) % 4 == 0:
            data = data.removesuffix(b"=").removesuffix(b"=")
        if data.endswith(b"="):
            raise ValueError("Incorrect padding")
        return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise source.refusal(f"the data URL is not valid base64 ({error})") from None


def _local_file(source: ImageSource, allowed: str | None) -> bytes:
    """A file below ``allowed``, also after all links are followed; the place is asked of the open file."""
    if allowed is None:
        raise source.refusal(
            "files are not read; send the image as data:image/png;base64,..., or serve with "
            "--allowed-local-media-path and a folder"
        )
    parts = urlsplit(source.content)
    path, root = Path(unquote(parts.path)), Path(allowed).expanduser().resolve()
    outside = source.refusal("the file is not below --allowed-local-media-path, or cannot be read")
    if parts.netloc not in ("", "localhost") or not path.is_absolute() or "\0" in str(path):
        raise outside
    try:
        resolved = path.resolve()
        if not resolved.is_relative_to(root):
            raise outside
        with open_regular(resolved, MAX_FILE_BYTES) as file:
            opened = Path(os.path.realpath(f"/proc/self/fd/{file.fileno()}"))
            if not opened.is_relative_to(root):
                raise outside
            return file.read(MAX_FILE_BYTES)
    except (OSError, RuntimeError, ValueError) as error:
        raise outside from error
