"""The meaning of each ``url`` of a batch line: the body, its checks, and the prompts that answer it."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tp_engine.api.anthropic.protocol import MessagesBody
from tp_engine.api.batch_file.lines import BatchRequest
from tp_engine.api.bodies import Body, num_prompts, prepare_body
from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.cohere import CohereEmbedBody
from tp_engine.api.openai.errors import renamed
from tp_engine.api.openai.pooled import ClassifyBody, EmbeddingBody, PoolingBody, RerankBody, ScoreBody, check_pooled
from tp_engine.api.openai.protocol import ChatBody, CompletionBody, parse_body
from tp_engine.api.openai.requests import PreparedBody
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.api.openai.responses_api.requests import NAMES, chat_body
from tp_engine.api.openai.sampling import beam_search_params, chat_params, completion_params, listed_prompts
from tp_engine.api.openai.structured import named_refusal
from tp_engine.errors import RequestError
from tp_engine.grammar.compiler_process import CompilerProcess
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.requests.structured_outputs import PARAM, StructuredOutputsParams
from tp_engine.system.closing import Closing
from tp_engine.system.panics import panics_refused

_MAX_REMEMBERED = 256


class GrammarTrials(Closing):
    """Tries out the grammars of lines, recent ones once; ``timeout_s`` is the processor time of each."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process = CompilerProcess(None)
        self._words = lru_cache(maxsize=_MAX_REMEMBERED)(self._try_out)

    def check(self, params: SamplingParams) -> None:
        """Raise ``RequestError`` if the constraint of ``params`` cannot be used."""
        if params.structured_outputs is not None and (words := self._words(params.structured_outputs)):
            raise RequestError(words, param=PARAM)

    def close(self) -> None:
        """End the process that compiles."""
        self._process.close()

    def _try_out(self, constraint: StructuredOutputsParams) -> str:
        try:
            constraint.check_bounds()
            self._process.try_out(constraint, cpu_s=self._timeout_s)
        except RequestError as error:
            return str(error)
        return ""


ENDPOINTS: Mapping[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/score": ScoreBody,
    "/v1/rerank": RerankBody,
    "/v1/classify": ClassifyBody,
    "/v1/pooling": PoolingBody,
}


@panics_refused("the line cannot be checked")
def check_request(request: BatchRequest, model_names: Sequence[str], grammars: GrammarTrials) -> None:
    """Check all that does not need the model's tokenizer and limits; raises ``RequestError``."""
    body = _parse(request, model_names)
    if isinstance(body, ResponsesBody):
        chat = chat_body(body, takes_images=True)  # whether the model does is found out later
        try:
            _check_generation(chat, grammars)
        except RequestError as error:
            raise renamed(error, NAMES) from error
    elif isinstance(body, (ChatBody, CompletionBody)):
        _check_generation(body, grammars)
    else:
        assert not isinstance(body, (MessagesBody, CohereEmbedBody)), "no endpoint of batches"
        check_pooled(body)


@panics_refused("the line cannot be prepared")
def prepare_request(
    request: BatchRequest,
    processor: InputProcessor,
    model_names: Sequence[str],
    defaults: Mapping[str, Any],
    max_num_prompts: int | None = None,
) -> PreparedBody:
    """Make a request ready for the engine; raises ``RequestError``, also for more than ``max_num_prompts``.

    ``defaults`` are the model's own sampling parameters.
    """
    body = _parse(request, model_names)
    count, param = num_prompts(body)
    if max_num_prompts is not None and count > max_num_prompts:
        raise RequestError(f"the line has {count} prompts; at most {max_num_prompts} are taken in one", param=param)
    return prepare_body(body, processor, body.model or model_names[0], defaults)


def _parse(request: BatchRequest, model_names: Sequence[str]) -> Body:
    body = parse_body(ENDPOINTS[request.url], request.raw_body)
    if body.stream:
        raise RequestError("stream is true; a batch has no streams, leave it out", param="stream")
    if body.model and body.model not in model_names:
        raise RequestError(
            f"the model {body.model[:200]!r} does not exist; this job has {', '.join(model_names)} "
            "(--served-model-name gives it other names)",
            param="model",
            code="model_not_found",
        )
    return body


def _check_generation(body: ChatBody | CompletionBody, grammars: GrammarTrials) -> None:
    if isinstance(body, CompletionBody):
        listed_prompts("prompt", body.prompt)
    if body.use_beam_search:
        beam_search_params(body, context_tokens=1)
        return
    params = completion_params(body) if isinstance(body, CompletionBody) else chat_params(body)
    try:
        grammars.check(params)
    except RequestError as error:
        raise named_refusal(error, body) from None
