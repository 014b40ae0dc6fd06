"""From a chat body to its prompt, and to what must be found in the answer."""

from dataclasses import replace
from typing import Any

from tp_engine.api.image_prompts import with_sizes
from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.chat.parser import ChatParsing
from tp_engine.api.openai.chat.prompt import ChatPrompt
from tp_engine.api.openai.chat.thinking_form import SWITCHES, switched_by
from tp_engine.api.openai.protocol import ChatBody
from tp_engine.api.openai.reasoning import Beginning, ReasoningFormat
from tp_engine.api.openai.sampling import max_output_tokens
from tp_engine.api.openai.tools.forced_constraint import forced_grammar
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.api.openai.tools.token_writing import TokenWriting, writing_of
from tp_engine.errors import RequestError
from tp_engine.grammar.vocabulary import check_tokenizer
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.requests.structured_outputs import StructuredOutputsParams
from tp_engine.system.log import get_logger, warn_once

logger = get_logger(__name__)

# Fields of a body that the template gets under the same names.
_TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "documents")
# Fields that ``chat_template_kwargs`` may not have.
_NOT_IN_KWARGS = ("messages", "tools", *_TEMPLATE_FIELDS)


def chat_prompt(body: ChatBody, processor: InputProcessor) -> ChatPrompt:
    """The prompt of a chat as text; raises ``RequestError``."""
    if len(body.messages) > processor.max_model_len:  # too many to render
        raise RequestError(
            f"there are {len(body.messages)} messages; the model's context has {processor.max_model_len} tokens",
            param="messages",
            code="context_length_exceeded",
        )
    if body.chat_template is not None or "chat_template" in (body.chat_template_kwargs or {}):
        # a template is a program: only the operator chooses it
        param = "chat_template" if body.chat_template is not None else "chat_template_kwargs"
        raise RequestError("chat_template is not taken from requests; serve with --chat-template", param=param)
    if wrong := sorted((body.chat_template_kwargs or {}).keys() & set(_NOT_IN_KWARGS)):
        raise RequestError(
            f"chat_template_kwargs has {wrong[0]}; give it as a field of the body", param="chat_template_kwargs"
        )
    options = _template_options(body)
    tools = ToolRequest.of(body)
    if tools is not None:
        options["tools"] = [dict(tool) for tool in tools.tools]
    messages = body.messages if processor.images is None else processor.images.with_pages(body.messages)
    chat = processor.chat.render(messages, options, adapts_calls=True, image_marker=processor.image_marker)
    return replace(chat, images=tuple(with_sizes(chat.images, body.mm_processor_kwargs)))


def _template_options(body: ChatBody) -> dict[str, Any]:
    """The template's variables that the body sets, without the conversation and its tools.

    Of several ways to ask for thinking, ``chat_template_kwargs`` take precedence over switches among the fields, and
    these over the effort.
    """
    options = dict(body.chat_template_kwargs or {})
    options |= {name: value for name in _TEMPLATE_FIELDS if (value := getattr(body, name)) is not None}
    if body.effort is not None:
        options["reasoning_effort"] = body.effort
    thinks = switched_by(options.get("reasoning_effort")) if body.thinks is None else body.thinks
    if thinks is not None and options.keys().isdisjoint(SWITCHES):
        options |= {"enable_thinking": thinks, "thinking": thinks} | ({} if thinks else {"reasoning_effort": "none"})
    if body.budget is not None:
        options.setdefault("thinking_budget", body.budget)
    return options


def chat_parsing(
    body: ChatBody, prompt: ChatPrompt, processor: InputProcessor, *, constrained: bool = False
) -> ChatParsing | None:
    """What to find in the answer's text; None for a plain answer.  Raises ``RequestError``.

    ``constrained``: a grammar decides what the answer is.
    """
    tools, reasoning, tool_format = ToolRequest.of(body), processor.chat.reasoning_format, processor.chat.tool_format
    if tools is not None and tools.choice == "auto" and tool_format is None:
        raise RequestError(
            "the format of this model's tool calls is not known, so tools with tool_choice auto need a server started "
            "with --tool-call-parser and the name of the format; set tool_choice to required or to a function, which "
            "needs no format, or leave tools out",
            param="tools",
        )
    message = next((one.message for one in (reasoning, tool_format) if one is not None and one.message), None)
    budget = _budget(body, processor)
    if tools is None and reasoning is None and message is None:
        return None
    begins, form, forced = _beginning(prompt, reasoning), message or tool_format, None
    if tools is not None and form is not None:
        writing, like = writing_of(processor.tokenizer), processor.structured_defaults.probe()
        forced = forced_grammar(tools, form, writing, like, thinks=begins is not Beginning.ANSWER)
    return ChatParsing(
        tools=tools,
        tool_format=tool_format,
        reasoning=reasoning,
        begins=begins,
        constrained=constrained,
        may_call=constrained and tools is not None and tools.choice == "auto" and body.response_format is not None,
        message=message,
        prompt=prompt.text,
        forced=forced,
        include_reasoning=body.include_reasoning is not False,
        reasoning_tokens=None if reasoning is None else reasoning.tokens(processor.tokenizer),
        budget=budget,
    )


def _budget(body: ChatBody, processor: InputProcessor) -> int | None:
    """The number of tokens of reasoning that the body allows, if less than its answer may have."""
    asked, reasoning, most = body.budget, processor.chat.reasoning_format, max_output_tokens(body)
    if asked is None or asked >= min(processor.max_model_len, most or processor.max_model_len):
        return None
    if reasoning is None:
        why = "no format of this model's reasoning is known"
    elif not reasoning.limits(writing_of(processor.tokenizer)):
        why = "its marks are not one token each"
    else:
        try:
            check_tokenizer(processor.tokenizer)
            return asked
        except RequestError as error:  # a grammar enforces it
            why = str(error)
    if body.thinking_token_budget == asked:
        raise RequestError(
            f"thinking_token_budget is {asked}, but the reasoning of this model cannot be limited: {why}; limit the "
            "whole answer with max_tokens, or set reasoning_effort",
            param="thinking_token_budget",
        )
    warn_once(logger, "a budget of thinking is not kept: %s", why)
    return None


def parsed_params(params: SamplingParams, parsing: ChatParsing | None, processor: InputProcessor) -> SamplingParams:
    """``params`` for a text that will be parsed: it shows marks, and a constraint begins after reasoning."""
    if parsing is None:
        return params
    writing = writing_of(processor.tokenizer)
    if any(map(writing.is_special, _marks(parsing))):
        params = replace(params, skip_special_tokens=False)
    if parsing.message is not None and not params.ignore_eos:  # not all models list them among their EOS tokens
        stops = [token_id for mark in parsing.message.stops if (token_id := writing.special_id(mark)) is not None]
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *stops))
    if params.structured_outputs is not None:
        constraint = processor.structured_defaults.complete(params.structured_outputs)
        params = replace(params, structured_outputs=_behind_reasoning(constraint, parsing, writing))
    elif parsing.budget is not None and parsing.reasoning is not None:
        grammar = parsing.reasoning.limited(writing, parsing.begins, parsing.budget)
        if grammar is not None:
            params = replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar))
    return params


def _marks(parsing: ChatParsing) -> tuple[str, ...]:
    """The marks to be found, which texts leave out by default if they are special tokens."""
    if parsing.message is not None:
        return parsing.message.marks
    marks = () if parsing.reasoning is None else (*parsing.reasoning.opens, *parsing.reasoning.closes)
    calls, tools = parsing.tool_format, parsing.tools
    if tools is not None and calls is not None and (tools.choice == "auto" or parsing.forced is not None):
        marks += calls.marks
    return marks


def _behind_reasoning(
    constraint: StructuredOutputsParams, parsing: ChatParsing, writing: TokenWriting
) -> StructuredOutputsParams:
    """``constraint`` for a text that may begin with reasoning, in the model's own format."""
    message, thinks = parsing.message, parsing.begins is not Beginning.ANSWER
    if message is not None:
        if parsing.forced is not None:
            return StructuredOutputsParams(grammar=parsing.forced)
        if message.new_parser(None, parsing.prompt).in_answer:
            return constraint
        return replace(constraint, preamble=message.preamble(writing, thinks, parsing.may_call))
    if parsing.forced is not None:
        constraint = StructuredOutputsParams(grammar=parsing.forced)
    reasoning, answer, calls = parsing.reasoning, "@answer", ""
    if parsing.may_call and parsing.tool_format is not None and parsing.tool_format.opens:
        opens = " | ".join(map(writing.mark, parsing.tool_format.opens))
        answer, calls = "(@answer | calls)", f"calls: ({opens}) rest\n"
        calls += writing.any_text("rest", *parsing.tool_format.marks) + "\n"
    preamble = None if reasoning is None else reasoning.preamble(writing, parsing.begins, parsing.budget, answer)
    if calls:
        preamble = (preamble or f"start: {answer}\n") + calls
    return replace(constraint, preamble=preamble)


def _beginning(prompt: ChatPrompt, reasoning: ReasoningFormat | None) -> Beginning:
    if reasoning is None:
        return Beginning.ANSWER if prompt.thinking_disabled else Beginning.EITHER
    return reasoning.beginning(prompt.text, continued=prompt.continued, thinking_disabled=prompt.thinking_disabled)
