"""Documents whose pages are images: PDFs, from each API's form to pixels."""

from __future__ import annotations

import base64
import io
import os
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.images import data_url, image_info, image_part, image_tokenizer, picture
from tp_engine.api.anthropic.protocol import CountTokensBody, MessagesBody
from tp_engine.api.anthropic.requests import count_tokens
from tp_engine.api.bodies import has_image, prepare_body
from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.protocol import ChatBody
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.errors import RequestError
from tp_engine.images.sources import DocumentSource, file_bytes
from tp_engine.requests.request import EngineRequest

PAGES = [picture(96, 64), picture(64, 96), Image.new("RGB", (64, 64), (200, 30, 30))]


def pdf_of(*pages: Image.Image, **options: Any) -> bytes:
    """A PDF with a picture on each page, one point a pixel, which covers it."""
    file = io.BytesIO()
    pages[0].save(file, "PDF", save_all=True, append_images=pages[1:], resolution=72, **options)
    return file.getvalue()


PDF = pdf_of(*PAGES)
B64 = base64.b64encode(PDF).decode()
URL = "data:application/pdf;base64," + B64
BLOCK = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": B64}}


def processor(**limits: Any) -> InputProcessor:
    return InputProcessor(image_info(**limits), image_tokenizer())


def request_of(body: Any, one: InputProcessor | None = None) -> EngineRequest:
    assert has_image(body)
    (request,) = prepare_body(body, one or processor(), "m").requests
    return request


def in_chat(*parts: Any, **message: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": "user", "content": list(parts), **message}]})


def in_response(*parts: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"input": [{"role": "user", "content": list(parts)}]})


def in_message(*blocks: Any) -> MessagesBody:
    return MessagesBody.model_validate({"max_tokens": 5, "messages": [{"role": "user", "content": list(blocks)}]})


def test_pages_of_a_pdf_are_images_in_all_three_apis() -> None:
    """Oracle: grids of twice the pages' points, by hand: 4 x 6 cells of 32 pixels, 6 x 4, 4 x 4; and one prompt."""
    file = {"filename": "a.pdf", "file_data": URL}
    found = [
        request_of(body)
        for body in (
            in_chat({"type": "file", "file": file}),
            in_chat({"type": "file", "file": {"file_data": B64}}),
            in_response({"type": "input_file", **file}),
            in_message(BLOCK),
            in_message({**BLOCK, "source": {"type": "url", "url": URL}}),
        )
    ]
    for request in found:
        assert [image.grid for image in request.images] == [(4, 6), (6, 4), (4, 4)]
        assert request.prompt_token_ids == found[0].prompt_token_ids
        assert [image.digest for image in request.images] == [image.digest for image in found[0].images]
    counted = count_tokens(
        CountTokensBody.model_validate({"messages": [{"role": "user", "content": [BLOCK]}]}), processor()
    )
    assert counted == {"input_tokens": len(found[0].prompt_token_ids)}


def test_pages_are_drawn_as_their_pictures() -> None:
    """Oracle: the picture on the page, at twice its size; JPEG within the PDF and the drawing change little."""
    for number, page in enumerate(PAGES):
        image = request_of(in_chat({"type": "file", "file": {"file_data": URL}})).images[number]
        drawn = os.pread(image.fd, image.num_bytes, image.offset)
        pixels = np.frombuffer(drawn, np.uint8).reshape(image.height, image.width, 3).astype(int)
        expected = np.asarray(page.resize((2 * page.width, 2 * page.height))).astype(int)
        assert np.abs(pixels - expected).mean() < 12
    assert request_of(in_chat(image_part(PAGES[0]))).images[0].grid == (2, 3)


def test_a_tools_pdf_and_titles_reach_the_model() -> None:
    """Oracle: the prompt by hand: Claude Code reads a PDF so; an image that is sent as a file is one image."""
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "read", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{**BLOCK, "title": "Report"}]}
    asked: list[Any] = [{"role": "user", "content": "x"}, use, {"role": "user", "content": [result]}]
    found = request_of(MessagesBody.model_validate({"max_tokens": 5, "messages": asked}))
    assert len(found.images) == 3
    before = image_tokenizer().decode(found.prompt_token_ids[: found.images[0].start])
    assert before.endswith("<s>tool: Report<|vision_start|>")
    for sent in (data_url(PAGES[0]), data_url(PAGES[0], "application/octet-stream"), data_url(PAGES[0])[22:]):
        png = in_chat({"type": "file", "file": {"filename": "a.png", "file_data": sent}})
        assert [image.grid for image in request_of(png).images] == [(2, 3)]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"file_data": "data:application/pdf;base64,JVBERi0="}, r"content\[0\]: the PDF is broken"),
        (
            {"file_data": data_url(PDF[: len(PDF) // 8], "application/pdf")},
            r"content\[0\]: the PDF (is broken|has no page)",
        ),
        ({"file_data": data_url(b"a,b", "application/pdf")}, "the file is no PDF"),
        ({"file_data": data_url(b"a,b", "text/csv")}, "a file of the type 'text/csv'; PDFs and images are read"),
        ({"file_data": data_url(pdf_of(*PAGES * 2), "application/pdf")}, "the PDF has 6 pages; at most 4 are taken"),
        ({"file_id": "file-1"}, "a file without 'file_data'.*by their id are not read"),
        ({}, "a file without 'file_data'"),
        ({"file_url": "https://example.com/a.pdf"}, "not fetched from other hosts"),
    ],
)
def test_what_is_no_readable_pdf_is_refused_by_name(file: dict[str, Any], message: str) -> None:
    """Oracle: the message has the place and the remedy; nothing stays in memory."""
    one = processor(max_images=4)
    with pytest.raises(RequestError, match=message):
        request_of(in_chat({"type": "file", "file": file}), one)
    assert one.images is not None and one.images.reader.staged.used == 0


def test_a_page_that_is_very_large_is_drawn_smaller() -> None:
    """Oracle: 16,777,216 pixels at most, by hand, for a page of 200 inches a side; its tokens are those of the model's
    largest image."""
    page = data_url(pdf_of(Image.new("1", (14400, 14400))), "application/pdf")
    one = processor(processor={"size": {"shortest_edge": 4096, "longest_edge": 65536}})
    request = request_of(in_chat({"type": "file", "file": {"file_data": page}}), one)
    assert [image.grid for image in request.images] == [(8, 8)]


def test_the_file_itself_is_that_of_the_url() -> None:
    """Oracle: the bytes."""
    settings = image_info().images
    assert settings is not None and file_bytes(DocumentSource(where="x", content=URL), settings) == PDF
