"""Prompts with images, from each API's own form to the engine's request."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.images import data_url, file_of, image_info, image_part, image_tokenizer, picture
from tp_engine.api.anthropic.protocol import CountTokensBody, MessagesBody
from tp_engine.api.anthropic.requests import count_tokens
from tp_engine.api.bodies import has_image, prepare_body
from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.chat.options import ChatOptions
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.api.openai.pooled import TokenizeBody, tokenize
from tp_engine.api.openai.protocol import ChatBody
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.errors import RequestError
from tp_engine.requests.request import EngineRequest
from tp_engine.requests.sampling_params import SamplingParams

PICTURE = picture(96, 64)  # 2 x 3 cells
URL = data_url(PICTURE)
IMAGE_ID = image_tokenizer().convert_tokens_to_ids("<|image_pad|>")


def processor(**limits: Any) -> InputProcessor:
    return InputProcessor(image_info(**limits), image_tokenizer())


def prepared(body: Any, one: InputProcessor | None = None) -> EngineRequest:
    """The one request of a body."""
    (request,) = prepare_body(body, one or processor(), "m").requests
    return request


def chat(*parts: Any, role: str = "user", **fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": role, "content": list(parts)}], **fields})


def text(request: EngineRequest) -> str:
    """The prompt with each image as [N], its number of tokens."""
    pieces, behind = [], 0
    for image in request.images:
        pieces += [
            image_tokenizer().decode(request.prompt_token_ids[behind : image.start]),
            f"[{image.num_tokens}]",
        ]
        assert set(request.prompt_token_ids[image.start : image.start + image.num_tokens]) == {IMAGE_ID}
        behind = image.start + image.num_tokens
    return "".join([*pieces, image_tokenizer().decode(request.prompt_token_ids[behind:])])


def test_headers_alone_say_what_a_prompt_takes() -> None:
    """Oracle: the tokens of the whole file; half of it is read, as its header is there, and no pixel is.  What a header
    shows is refused."""
    body, cut = chat(image_part(PICTURE)), chat(image_part(file_of(PICTURE)[: len(file_of(PICTURE)) // 2]))
    checking = InputProcessor(image_info(), image_tokenizer(), reads_pixels=False)
    found = prepared(cut, checking)
    assert found.prompt_token_ids == prepared(body).prompt_token_ids and found.images == ()
    assert checking.images is not None and not checking.images.reader.seconds
    with pytest.raises(RequestError, match="truncated"):
        prepared(cut)
    with pytest.raises(RequestError, match="no image"):
        prepared(chat(image_part(b"GIF89a")), checking)


IN_CHAT = "<s>user: see <|vision_start|>[6]<|vision_end|> now</s><s>assistant:"


def test_a_chats_image_stands_in_its_place() -> None:
    """Oracle: the template's text by hand; two images are two, in the order of the parts."""
    part = {"type": "image_url", "image_url": URL}
    assert text(prepared(chat({"type": "text", "text": "see "}, part, " now"))) == IN_CHAT
    found = prepared(chat(image_part(picture(64, 64), detail="original"), image_part(PICTURE, detail="high")))
    assert text(found) == (
        "<s>user: <|vision_start|>[4]<|vision_end|><|vision_start|>[6]<|vision_end|></s><s>assistant:"
    )
    assert [image.grid for image in found.images] == [(2, 2), (2, 3)]
    assert len({image.fd for image in found.images}) == 1


def test_responses_and_messages_take_images_too() -> None:
    """Oracle: the same prompt as the chat's."""
    content = [
        {"type": "input_text", "text": "see "},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_text", "text": " now"},
    ]
    response = ResponsesBody.model_validate({"input": [{"role": "user", "content": content}]})
    blocks: list[Any] = [
        {"type": "text", "text": "see "},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}},
        {"type": "text", "text": " now"},
    ]
    message = MessagesBody.model_validate({"max_tokens": 9, "messages": [{"role": "user", "content": blocks}]})
    by_url = {**blocks[1], "source": {"type": "url", "url": URL}}
    other = MessagesBody.model_validate(
        {"max_tokens": 9, "messages": [{"role": "user", "content": [blocks[0], by_url, blocks[2]]}]}
    )
    for body in (response, message, other):
        assert text(prepared(body)) == IN_CHAT
        assert has_image(body)
    asked = CountTokensBody.model_validate({"messages": [{"role": "user", "content": blocks}]})
    assert count_tokens(asked, processor()) == {"input_tokens": len(prepared(message).prompt_token_ids)}


def test_tools_answer_with_images() -> None:
    """Oracle: an image in the place of the tool's answer, in all three APIs: agents look at screenshots so."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "view", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": "a "}, image_part(PICTURE)]},
    ]
    of_response = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "abcdefghi", "name": "view", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "abcdefghi",
            "output": [{"type": "input_text", "text": "a "}, {"type": "input_image", "image_url": URL}],
        },
    ]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}}
    answer = {"type": "tool_result", "tool_use_id": "abcdefghi", "content": [{"type": "text", "text": "a "}, block]}
    of_message = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "abcdefghi", "name": "view", "input": {}}]},
        {"role": "user", "content": [answer]},
    ]
    for body in (
        ChatBody.model_validate({"messages": messages}),
        ResponsesBody.model_validate({"input": of_response}),
        MessagesBody.model_validate({"messages": of_message, "max_tokens": 5}),
    ):
        found = text(prepared(body))
        assert found.endswith("<s>tool: a <|vision_start|>[6]<|vision_end|></s><s>assistant:"), found
        assert has_image(body)


def test_a_template_without_tools_images_shows_them_behind_the_answers() -> None:
    """Oracle: the prompt, by hand: the tools' texts stay, their images come with the user's next message, or in one of
    their own."""
    template = (
        "{% for message in messages %}<s>{{ message.role }}: {% if message.role == 'tool' %}"
        "{{ '(' + message.content + ')' }}{% elif message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{{ '<|image_pad|>' if part.type == 'image' else part.text }}{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    one = processor()
    one.chat = ChatFormat(image_tokenizer(), ChatOptions(chat_template=template))
    tool = {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "a"}, image_part(PICTURE)]}
    bare = {"role": "tool", "tool_call_id": "y", "content": [image_part(PICTURE)]}
    for behind, expected in (
        ([], "<s>tool: (a)<s>tool: ([image])<s>user: [6][6]"),
        ([{"role": "user", "content": "go"}], "<s>tool: (a)<s>tool: ([image])<s>user: [6][6]go"),
        ([{"role": "assistant", "content": "ok"}], "<s>tool: (a)<s>tool: ([image])<s>user: [6][6]<s>assistant: ok"),
    ):
        body = ChatBody.model_validate({"messages": [tool, bare, *behind]})
        assert text(prepared(body, one)) == expected


# What templates for Mistral's v13 do: tools' answers are texts, and users alternate with final answers.
ALTERNATING = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}[/INST]{% elif m.role == 'assistant' %}"
    "{% for c in m.tool_calls or [] %}[CALL]{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.content %}{{ m.content }}{% endif %}</s>"
    "{% elif m.role == 'tool' %}[RESULT]RESULT[/RESULT]{% endif %}{% endfor %}"
)
IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}}


def with_template(template: str) -> InputProcessor:
    one = processor()
    one.chat = ChatFormat(image_tokenizer(), ChatOptions(chat_template=template, tool_call_parser="hermes"))
    return one


def screenshot_bodies(behind: int) -> list[Any]:
    """A chat, a message and a response in which a tool answers with a text and an image; ``behind`` turns follow."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "view", "arguments": "{}"}}
    part = image_part(PICTURE)
    turns = [{"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Sure?"}][:behind]
    answer = {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": "a "}, part, "b", "c"]}
    result = [{"type": "text", "text": "a "}, IMAGE_BLOCK, {"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    output = [{"type": "input_text", "text": "a "}, {"type": "input_image", "image_url": URL}]
    output += [{"type": "input_text", "text": text} for text in "bc"]
    first = {"role": "user", "content": "look"}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "abcdefghi", "name": "view", "input": {}}]}
    tool = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "abcdefghi", "content": result}]}
    items = [
        {"type": "function_call", "call_id": "abcdefghi", "name": "view", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "abcdefghi", "output": output},
    ]
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [
        ChatBody.model_validate({"messages": [first, calling, answer, *turns]}),
        MessagesBody.model_validate({"messages": [first, use, tool, *turns], "max_tokens": 5}),
        ResponsesBody.model_validate({"input": [first, *items, *turns]}),
    ]


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ("{{ m.content | string }}", "a <|vision_start|>[6]<|vision_end|>b\nc"),
        (
            "{{ {'content': m.content | string, 'id': m.tool_call_id} | tojson }}",
            '{"content": "a <|vision_start|>[6]<|vision_end|>b\\nc", "id": "abcdefghi"}',
        ),
        ("{{ m.content[:4] }}", "a [i"),
    ],
)
@pytest.mark.parametrize("behind", [0, 2])
def test_a_tools_image_stands_in_its_text_where_users_must_alternate(result: str, shown: str, behind: int) -> None:
    """Oracle: what mistral-common writes, by hand: the image's tokens within the tool's answer, texts beside them.  A
    template that shows no whole text gets the note, and no conversation ends; in all three APIs, and turns later."""
    one = with_template(ALTERNATING.replace("RESULT[/", f"{result}[/"))
    turns = "A cat.</s>[INST]Sure?[/INST]" if behind else ""
    for body in screenshot_bodies(behind):
        found = prepared(body, one)
        assert text(found) == f"[INST]look[/INST][CALL]view{{}}</s>[RESULT]{shown}[/RESULT]{turns}"
        assert len(found.images) == shown.count("[6]")


def test_images_of_the_assistant_are_shown_or_stand_before_the_users_next_words() -> None:
    """Oracle: the prompts by hand, of a template that shows them and of one that does not; without a turn of the user
    behind them they have one of their own."""
    said = {"role": "assistant", "content": [{"type": "text", "text": "Here."}, image_part(PICTURE)]}
    asked = [{"role": "user", "content": "draw"}, said, {"role": "user", "content": "again"}]
    shown = text(prepared(ChatBody.model_validate({"messages": asked})))
    assert "<s>assistant: Here.<|vision_start|>[6]<|vision_end|></s><s>user: again</s>" in shown
    one = with_template(ALTERNATING)
    moved = text(prepared(ChatBody.model_validate({"messages": asked}), one))
    assert moved.endswith("Here.</s>[INST]<|vision_start|>[6]<|vision_end|>again[/INST]")
    alone = text(
        prepared(ChatBody.model_validate({"messages": [asked[0], said | {"content": [image_part(PICTURE)]}]}), one)
    )
    assert alone.endswith("[image]</s>[INST]<|vision_start|>[6]<|vision_end|>[/INST]")
    block = MessagesBody.model_validate(
        {"max_tokens": 5, "messages": [asked[0], {"role": "assistant", "content": [IMAGE_BLOCK]}, asked[2]]}
    )
    assert "assistant: <|vision_start|>[6]<|vision_end|></s>" in text(prepared(block))


def test_an_image_that_no_template_shows_is_refused_by_name() -> None:
    """Oracle: the place of the system's image, and what to do."""
    body = ChatBody.model_validate({"messages": [
        {"role": "system", "content": [{"type": "text", "text": "s"}, image_part(PICTURE)]},
        {"role": "user", "content": [image_part(PICTURE)]},
    ]})  # fmt: skip
    silent = ALTERNATING.replace(
        "{% elif m.role == 'tool' %}", "{% elif m.role == 'system' %}S{% elif m.role == 'tool' %}"
    )
    with pytest.raises(
        RequestError, match=r"messages\[0\].content\[1\]: the chat template does not show .* of 2 images"
    ):
        prepared(body, with_template(silent))


def test_pictures_in_items_of_responses_reach_the_model() -> None:
    """Oracle: the prompts by hand: a computer's screenshot, what a server's tools drew, images of all roles."""
    data = URL.partition(",")[2]
    image = {"type": "input_image", "image_url": URL}
    shown = "<|vision_start|>[6]<|vision_end|>"

    def of(*items: Any) -> str:
        body = ResponsesBody.model_validate({"input": [*items, {"role": "user", "content": "go"}]})
        assert has_image(body)
        return text(prepared(body)).partition("<s>user: go")[0]

    call = {
        "type": "computer_call",
        "id": "cu",
        "call_id": "c",
        "action": {"type": "screenshot"},
        "status": "completed",
    }
    call["pending_safety_checks"] = []
    output = {
        "type": "computer_call_output",
        "call_id": "c",
        "output": {"type": "computer_screenshot", "image_url": URL},
    }
    assert of(call, output).endswith(f"<s>tool: {shown}</s>")
    for screen in ([output["output"]], {"image_url": URL}):
        assert of(call, {**output, "output": screen}).endswith(f"<s>tool: {shown}</s>")
    with pytest.raises(RequestError, match="no URL") as caught:
        of(call, {**output, "output": {"type": "computer_screenshot", "file_id": "f"}})
    assert caught.value.param == "input"
    drawn = {"type": "image_generation_call", "id": "ig", "status": "completed", "result": data}
    assert of(drawn) == f"<s>assistant: {shown}</s>"
    ran = {
        "type": "code_interpreter_call",
        "id": "ci",
        "outputs": [{"type": "logs", "logs": "x"}, {"type": "image", "url": URL}],
    }
    assert of(ran) == f"<s>assistant: x{shown}</s>"
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "x"}, image]}
    assert of(said) == f"<s>assistant: x{shown}</s>"
    for role in ("system", "developer"):
        with pytest.raises(RequestError, match="System message cannot contain images"):  # the template says so
            of({"role": role, "content": [{"type": "input_text", "text": "s"}, image]})


def test_images_in_documents_of_messages_reach_the_model() -> None:
    """Oracle: the prompts by hand, in a turn of the user and in a tool's answer; a model of text refuses the first."""
    inner = [{"type": "text", "text": "see "}, IMAGE_BLOCK]
    document = {"type": "document", "title": "T", "source": {"type": "content", "content": inner}}
    body = MessagesBody.model_validate({"max_tokens": 5, "messages": [{"role": "user", "content": [document]}]})
    assert has_image(body)
    assert text(prepared(body)).startswith("<s>user: Tsee <|vision_start|>[6]<|vision_end|></s>")
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document]}
    asked: list[Any] = [{"role": "user", "content": "x"}, use, {"role": "user", "content": [result]}]
    answered = MessagesBody.model_validate({"max_tokens": 5, "messages": asked})
    assert "see <|vision_start|>[6]<|vision_end|></s>" in text(prepared(answered))
    whole = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL}}
    sent = MessagesBody.model_validate({"max_tokens": 5, "messages": [{"role": "user", "content": [whole]}]})
    assert len(prepared(sent).images) == 1
    system = MessagesBody.model_validate({"max_tokens": 5, "system": [whole], "messages": asked[:1]})
    with pytest.raises(RequestError, match=r"system\[0\] is a block of type 'image'; it is not read there"):
        prepared(system)
    blind = InputProcessor(msgspec.structs.replace(image_info(), images=None), image_tokenizer())
    with pytest.raises(
        RequestError, match=r"source.content\[1\] is a block of type 'image'; this model reads text only"
    ):
        prepared(body, blind)
    assert "see \n[image omitted]" in text(prepared(answered, blind))


def test_images_of_messages_in_other_places_and_forms() -> None:
    """Oracle: the prompts by hand: what other tools found, search results, and the forms of OpenAI and MCP."""
    shown = "<|vision_start|>[6]<|vision_end|>"

    def of(*content: Any, role: str = "user") -> str:
        messages = [{"role": "user", "content": "a"}, {"role": role, "content": list(content)}]
        body = MessagesBody.model_validate(
            {"max_tokens": 5, "messages": [*messages, {"role": "user", "content": "go"}]}
        )
        assert has_image(body)
        return text(prepared(body))

    result: dict[str, Any] = {"type": "search_result", "title": "T", "source": "U", "content": [IMAGE_BLOCK]}
    assert f"T\nU{shown}" in of(result)
    mcp = {"type": "image", "data": URL.partition(",")[2], "mimeType": "image/png"}
    for inner in (result, image_part(PICTURE), mcp):
        assert shown in of({"type": "tool_result", "tool_use_id": "t", "content": [inner]})
    page = {"type": "document", "source": {"type": "content", "content": [IMAGE_BLOCK]}}
    fetched = {"type": "web_fetch_result", "content": page}
    assert shown in of({"type": "web_fetch_tool_result", "tool_use_id": "t", "content": fetched}, role="assistant")


def test_pdfs_without_their_package_are_refused_by_the_right_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the remedy, to a model that sees; a note in a tool's answer, which would else end the conversation."""
    monkeypatch.setattr("tp_engine.images.documents.find_spec", lambda _name: None)
    data = "data:application/pdf;base64,JVBERi0="
    part = {"type": "file", "file": {"filename": "a.pdf", "file_data": data}}
    block = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
    item = {"type": "input_file", "filename": "a.pdf", "file_data": data}
    for body in (
        chat(part),
        MessagesBody.model_validate({"max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}),
        ResponsesBody.model_validate({"input": [{"role": "user", "content": [item]}]}),
    ):
        with pytest.raises(RequestError, match=r"content\[0\]: PDFs are read with .*pip install 'tp-engine\[pdf\]'"):
            prepared(body)
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]}
    asked: list[Any] = [{"role": "user", "content": "x"}, use, result]
    body = MessagesBody.model_validate({"max_tokens": 5, "messages": asked})
    assert "<s>tool: [file omitted]</s>" in text(prepared(body))


def test_a_mark_that_a_user_writes_is_no_image() -> None:
    """Oracle: one image, behind the user's own mark; the prompt has the mark as a token, as texts always had."""
    found = prepared(chat({"type": "text", "text": "a <|image_pad|> b "}, image_part(PICTURE), "<|image_pad|>"))
    assert len(found.images) == 1 and found.prompt_token_ids.count(IMAGE_ID) == 8
    assert text(found).startswith("<s>user: a <|image_pad|> b <|vision_start|>[6]")
    tool = {"role": "tool", "tool_call_id": "x", "content": "log: <|vision_start|><|image_pad|><|vision_end|>"}
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": [image_part(PICTURE)]}, tool]})
    assert [image.start for image in prepared(body).images] == [text(prepared(body)).index("[6]") and 8]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (chat(image_part(b"GIF89a")), r"messages\[0\].content\[0\]: the (file is no image|image is)"),
        (chat(image_part(picture(2, 402))), r"messages\[0\].content\[0\]: an image has 2 x 402 pixels.*200 times"),
        (chat(*[image_part(picture(8, 8))] * 3), r"At most 2 image\(s\) may be provided in one prompt"),
        (chat(image_part(PICTURE), role="system"), "System message cannot contain images"),
        (
            ChatBody.model_validate({"messages": [{"role": "user", "content": "a", "images": ["x"]}]}),
            r"\[0\].images: images are parts",
        ),
        (chat({"type": "image", "image": {"path": "a.png"}}), "has no URL in 'image' or 'url' or 'base64'"),
        (chat(image_part(PICTURE), truncate_prompt_tokens=5), "truncate_prompt_tokens would cut images"),
        (chat(image_part(PICTURE), use_beam_search=True, n=2), "beam search of a prompt with images"),
        (chat({"type": "video_url", "video_url": {"url": URL}}), "'video_url'; only text"),
        (chat({"type": "image_embeds", "image_embeds": "abc"}), "'image_embeds'; only text"),
        (chat(image_part(PICTURE, detail="fine")), "detail is 'fine'"),
        (chat(image_part(picture(1024, 1024))), "maximum context length is 1024 tokens"),
    ],
)
def test_images_that_can_not_be_served_are_refused_by_name(body: ChatBody, message: str) -> None:
    """Oracle: the message; nothing stays in memory."""
    one = processor(max_images=2)
    with pytest.raises(RequestError, match=message):
        prepared(body, one)
    assert one.images is not None and one.images.reader.staged.used == 0


def test_a_model_of_text_refuses_images_as_before() -> None:
    """Oracle: the part's type in the message; a tool's picture becomes a note, so that its conversation goes on."""
    info = msgspec.structs.replace(image_info(), images=None)
    one = InputProcessor(info, image_tokenizer())
    with pytest.raises(RequestError, match="type 'image_url'; only text is supported"):
        prepared(chat(image_part(PICTURE)), one)
    with pytest.raises(RequestError, match="served without a tokenizer, which images need"):
        prompt = {"prompt_token_ids": [IMAGE_ID], "multi_modal_data": {"image": PICTURE}}
        InputProcessor(image_info(), None).process(prompt, SamplingParams(), request_id="r")
    with pytest.raises(RequestError, match="served as text alone; leave multi_modal_data out"):
        one.process({"prompt": "x", "multi_modal_data": {"image": PICTURE}}, SamplingParams(), request_id="r")
    tool = {"role": "tool", "tool_call_id": "x", "content": [image_part(PICTURE)]}
    assert "[image omitted]" in text(prepared(ChatBody.model_validate({"messages": [tool]}), one))


def test_tokens_of_images_are_counted_without_their_pixels() -> None:
    """Oracle: the request's own tokens; a file that ends behind its header has the size all the same."""
    body = {"messages": [{"role": "user", "content": [image_part(PICTURE)]}]}
    found = tokenize(TokenizeBody.model_validate(body), processor())
    assert found["tokens"] == prepared(ChatBody.model_validate(body)).prompt_token_ids
    half = image_part(file_of(PICTURE)[:60])
    assert tokenize(TokenizeBody.model_validate({"messages": [{"role": "user", "content": [half]}]}), processor())[
        "count"
    ] == len(found["tokens"])


def process(prompt: Any, **limits: Any) -> EngineRequest:
    return processor(**limits).process(prompt, SamplingParams(max_tokens=3), request_id="r")


def test_prompts_of_python_have_their_images_beside_them() -> None:
    """Oracle: one prompt in four forms: text, marks as ids, ids that are expanded, arrays."""
    mark, array = "<|vision_start|><|image_pad|><|vision_end|>", np.asarray(PICTURE)
    first = process({"prompt": f"see {mark} {mark}", "multi_modal_data": {"image": [PICTURE, URL]}})
    assert text(first) == "see <|vision_start|>[6]<|vision_end|> <|vision_start|>[6]<|vision_end|>"
    assert first.images[0].digest == first.images[1].digest
    ids = image_tokenizer().encode(f"see {mark} {mark}", add_special_tokens=False)
    for given in (ids, np.array(ids), torch.tensor(ids), deque(ids), first.prompt_token_ids):
        again = process({"prompt_token_ids": given, "multi_modal_data": {"image": [array, PICTURE]}})
        assert again.prompt_token_ids == first.prompt_token_ids
        assert [image.start for image in again.images] == [image.start for image in first.images]
    one: dict[str, Any] = {"prompt": mark, "multi_modal_data": {"image": PICTURE}}
    assert len(process(one).images) == 1
    salted = process({**one, "cache_salt": "s", "id": 7})  # keys of the caller's own are ignored
    assert (len(salted.images), salted.params.cache_salt) == (1, "s")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "no mark", "multi_modal_data": {"image": PICTURE}}, r"has 0 marks .* for 1 images"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": PICTURE}}, r"has 0 marks .* for 1 images"),
        ({"prompt": "x", "multi_modal_data": {"video": 1}}, "must be {'image'"),
        ({"prompt": "x", "multi_modal_data": {"image": PICTURE, "video": [1]}}, "must be {'image'"),
        ({"prompt": "x", "multi_modal_data": "a"}, "multi_modal_data is 'a'"),
        ({"prompt": "x", "multi_modal_data": {"image": [None]}}, "has 0 marks"),
        ({"multi_modal_data": {"image": PICTURE}}, "give either 'prompt' or 'prompt_token_ids'"),
        ({"prompt": "x", "multi_modal_data": {"image": PICTURE}, "multi_modal_uuids": {"image": ["a"]}}, "uuids"),
        ({"prompt": "<|image_pad|>", "multi_modal_data": {"image": PICTURE}, "mm_processor_kwargs": 7}, "_kwargs is 7"),
        ({"prompt": "<|image_pad|>", "multi_modal_data": {"image": "/etc/passwd"}}, "must begin with data:image/"),
        ({"prompt": "<|image_pad|>", "multi_modal_data": {"image": 7}}, "image 0: the image is of type int"),
    ],
)
def test_prompts_of_python_that_fit_no_image_are_refused(prompt: Any, message: str) -> None:
    """Oracle: the message has both numbers, or the form that is taken."""
    with pytest.raises(RequestError, match=message):
        process(prompt)


@pytest.mark.parametrize(
    "data", [None, {}, {"image": None}, {"image": []}, {"image": [], "video": []}, {"video": None}, {"image": ()}]
)
def test_empty_multi_modal_data_is_none(data: Any) -> None:
    """Oracle: the same tokens without it, on a model that sees and on one of text: RL's rows all have the field."""
    blind = InputProcessor(msgspec.structs.replace(image_info(), images=None), image_tokenizer())
    for one in (processor(), blind):
        for prompt in ({"prompt": "plain"}, {"prompt_token_ids": [5, 6]}):
            plain = one.process(prompt, SamplingParams(max_tokens=3), request_id="r")
            given = {**prompt, "multi_modal_data": data, "mm_processor_kwargs": {"max_pixels": 4096}}
            found = one.process(given, SamplingParams(max_tokens=3), request_id="r")
            assert found.prompt_token_ids == plain.prompt_token_ids and found.images == ()
    both = process({"prompt": "<|image_pad|>", "multi_modal_data": {"image": PICTURE, "video": [], "audio": None}})
    assert len(both.images) == 1


BIG = picture(256, 256)  # 64 cells


def sized(one: InputProcessor | None = None, part: Any = None, **sizes: Any) -> list[EngineRequest]:
    """Requests with one image in the size that is asked for, in each way in which it can be."""
    one = one or processor()
    part = part or image_part(BIG)
    content: list[Any] = [part]
    item = {"type": "input_image", "image_url": part["image_url"], **{k: v for k, v in part.items() if "_pixels" in k}}
    found = [
        prepared(chat(*content, mm_processor_kwargs=sizes), one),
        prepared(
            ResponsesBody.model_validate(
                {"input": [{"role": "user", "content": [item]}], "mm_processor_kwargs": sizes}
            ),
            one,
        ),
        one.process(
            one.chat_prompt([{"role": "user", "content": content}], mm_processor_kwargs=sizes),
            SamplingParams(),
            request_id="r",
        ),
    ]
    body = {"messages": [{"role": "user", "content": content}], "mm_processor_kwargs": sizes}
    assert tokenize(TokenizeBody.model_validate(body), one)["tokens"] == found[0].prompt_token_ids
    return found


def test_a_request_asks_for_the_size_of_its_images() -> None:
    """Oracle: the grids by hand, 32 pixels a cell; another size is another image to the caches, the same is the same.
    A part's own size goes before its request's, and that before the engine's."""
    engines = processor(overrides={"max_pixels": 128 * 128})
    for one, part, sizes, grid in (
        (None, None, {}, (8, 8)),
        (None, None, {"max_pixels": 128 * 128}, (4, 4)),
        (None, None, {"max_pixels": 32 * 32}, (1, 1)),  # less than the file's least
        (None, None, {"size": {"longest_edge": 64 * 64, "shortest_edge": 1024}}, (2, 2)),
        (None, None, {"min_pixels": 512 * 512}, (16, 16)),
        (None, image_part(BIG) | {"max_pixels": 64 * 64}, {"max_pixels": 128 * 128}, (2, 2)),
        (None, image_part(BIG, max_pixels=64 * 64), {}, (2, 2)),
        (engines, None, {}, (4, 4)),
        (engines, None, {"max_pixels": 64 * 64}, (2, 2)),
        (engines, None, {"size": {"longest_edge": 64 * 64, "shortest_edge": 1024}}, (2, 2)),
    ):
        requests = sized(one, part, **sizes)
        assert [image.grid for request in requests for image in request.images] == [grid] * 3
    prompt = {"prompt": "<|image_pad|>", "multi_modal_data": {"image": BIG}}
    small, large = (process({**prompt, "mm_processor_kwargs": sizes}) for sizes in ({"max_pixels": 128 * 128}, {}))
    assert small.images[0].grid == (4, 4) and small.images[0].digest != large.images[0].digest
    assert (
        process({**prompt, "mm_processor_kwargs": {"max_pixels": 1 << 20}}).images[0].digest == large.images[0].digest
    )


def test_soft_tokens_of_a_request() -> None:
    """Oracle: Gemma 4's own numbers; the engine's are the most, since the start measures their memory."""
    gemma: dict[str, Any] = {"processor": {"size": None, "max_soft_tokens": 280}, "family": "gemma4"}
    one = InputProcessor(image_info(**gemma), image_tokenizer())
    for asked, most in ((70, 70), (280, 280)):
        assert most * 0.8 < sized(one, max_soft_tokens=asked)[0].images[0].num_rows <= most
    with pytest.raises(RequestError, match=r"content\[0\]: the image takes 1,089 tokens at the size .* at most 280"):
        sized(one, max_soft_tokens=1120)


@pytest.mark.parametrize(
    ("part", "sizes", "message"),
    [
        (image_part(BIG), {"fps": 1}, "mm_processor_kwargs has 'fps'; it may have size, min_pixels, max_pixels"),
        (image_part(BIG), {"max_pixels": "1"}, "mm_processor_kwargs: max_pixels is '1'; it must be a whole number"),
        (image_part(BIG), {"max_pixels": 9}, "mm_processor_kwargs: size is .* a cell has 1024 px"),
        (image_part(BIG), {"min_pixels": 1 << 22, "max_pixels": 1 << 22}, "takes 4,096 tokens .* at most 1,024"),
        (image_part(BIG) | {"max_pixels": [1]}, {}, r"content\[0\]: mm_processor_kwargs: max_pixels is \[1\]"),
        (image_part(BIG) | {"resized_height": 64}, {}, "resized_height is not taken; send max_pixels"),
    ],
)
def test_sizes_that_can_not_be_are_refused_by_name(part: Any, sizes: dict[str, Any], message: str) -> None:
    """Oracle: the message has the place, the value and the rule."""
    with pytest.raises(RequestError, match=message):
        prepared(chat(part, mm_processor_kwargs=sizes))


def test_a_chat_of_python_takes_pillows_images() -> None:
    """Oracle: the same request as from a data URL."""
    one = processor()
    for part in ({"type": "image_pil", "image_pil": PICTURE}, {"type": "image", "image": PICTURE}):
        content = [{"type": "text", "text": "see "}, part, " now"]
        request = one.process(one.chat_prompt([{"role": "user", "content": content}]), SamplingParams(), request_id="r")
        assert text(request) == IN_CHAT
