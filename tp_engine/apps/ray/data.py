"""Ray Data: a column of prompts in, columns of completions out; one engine per actor (extra: ray)."""

from __future__ import annotations

from typing import Any

from tp_engine.api.llm import LLM
from tp_engine.requests.sampling_params import SamplingParams


class Generate:
    """For ``Dataset.map_batches``, in actors with the options of ``ray_actor_options``.

    ``engine`` are fields of ``EngineConfig``, ``sampling`` of ``SamplingParams``.  The column ``prompt_column`` holds
    text, lists of token ids, or conversations; the result has the columns ``generated_text``, ``finish_reason`` and
    ``num_generated_tokens`` beside the others.
    """

    def __init__(
        self, engine: dict[str, Any], sampling: dict[str, Any] | None = None, prompt_column: str = "prompt"
    ) -> None:
        self._llm = LLM(**engine)
        self._params = SamplingParams(**(sampling or {}))
        self._column = prompt_column

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Complete the prompts of a batch.  ``RequestError`` for a bad prompt, before any prompt runs."""
        prompts = [prompt.tolist() if hasattr(prompt, "tolist") else prompt for prompt in batch[self._column]]
        is_chat = isinstance(prompts[0], list) and isinstance(prompts[0][0], dict)
        run = self._llm.chat if is_chat else self._llm.generate
        answers = [output.outputs[0] for output in run(prompts, self._params, use_tqdm=False)]
        return {
            **batch,
            "generated_text": [answer.text for answer in answers],
            "finish_reason": [answer.finish_reason for answer in answers],
            "num_generated_tokens": [len(answer.token_ids) for answer in answers],
        }
