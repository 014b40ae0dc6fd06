"""Adapters on the ranks of a job: rank 0 generates with several in one batch, loads others meanwhile, and reports.

Rank 0 writes ``answers`` ([tokens, log-probabilities] of each prompt), ``reloaded``, ``refusal``, ``again`` and
``adapter_bytes``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tp_engine import LLM, LoRARequest, RequestError, SamplingParams
from tp_engine.requests.outputs import RequestOutput

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True)


def answer_of(output: RequestOutput) -> list[Any]:
    """The tokens and their log-probabilities."""
    sample = output.outputs[0]
    found = zip(sample.token_ids, sample.logprobs or (), strict=True)
    return [list(sample.token_ids), [at[token].logprob for token, at in found]]


def run(options: dict[str, Any], prompts: list[list[int]], folders: list[str], out: str) -> None:
    """Prompt i has the adapter in folder i, and the last prompt has none."""
    with LLM(**options) as llm:  # on ranks other than 0 it serves, and ends the process
        adapters = [LoRARequest(Path(folder).name, 1, folder) for folder in folders]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=[*adapters, None])
        report: dict[str, Any] = {"answers": [answer_of(output) for output in outputs]}
        changing = Path(out).with_suffix(".adapter")
        shutil.copytree(folders[0], changing)
        llm.load_lora_adapter("changing", str(changing))
        named = LoRARequest("changing")
        before = llm.generate(prompts[1], GREEDY, use_tqdm=False, lora_request=named)
        shutil.copytree(folders[1], changing, dirs_exist_ok=True)
        llm.load_lora_adapter("changing", str(changing), load_inplace=True)
        after = llm.generate(prompts[1], GREEDY, use_tqdm=False, lora_request=named)
        report["reloaded"] = [answer_of(before[0]), answer_of(after[0])]
        (changing / "adapter_model.safetensors").write_bytes(b"torn")
        try:
            llm.load_lora_adapter("changing", str(changing), load_inplace=True)
        except RequestError as error:
            report["refusal"] = str(error)
        again = llm.generate(prompts[1], GREEDY, use_tqdm=False, lora_request=named)
        report["again"] = answer_of(again[0])
        llm.engine.check_integrity()
        report["adapter_bytes"] = [rank.memory["adapters"] for rank in llm.engine.report().ranks]
    Path(out).write_text(json.dumps(report), encoding="utf-8")
