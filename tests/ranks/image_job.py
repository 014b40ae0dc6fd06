"""Run prompts with images on the ranks of a job, one engine after another; rank 0 writes what they gave.

A case is ``{"options": {...}, "prompts": [[part, ...], ...], "max_tokens": n, "params": {...}}``; a part is a list of
token ids, or ``{"size": [height, width], "seed": s}``, an image of that many pixels before its resize.  All prompts run
at once, twice: the second time their prefixes are cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.image_models import PixelFiles, Prompt, draw_pixels, pixel_files
from tests.kv_tiers import counts
from tests.ranks import draft_head_job, parity_job
from tests.services import engine_of, stepping
from tp_engine import LLM, SamplingParams
from tp_engine.engine.engine import Engine
from tp_engine.features.images import feature as images_feature
from tp_engine.features.speculation import feature as speculation
from tp_engine.requests.request import EngineRequest


def prompts_of(files: PixelFiles, folder: Path, prompts: Sequence[Sequence[Any]]) -> list[Prompt]:
    """The prompts that a case describes."""

    def part(one: Any) -> Any:
        if not isinstance(one, dict):
            return one
        height, width = one["size"]
        return draw_pixels(folder, height, width, one["seed"])

    return [files.prompt(map(part, parts)) for parts in prompts]


def answers(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams) -> list[dict[str, Any]]:
    """Tokens, log-probabilities and cached tokens of each prompt; all run at once, and each of its ``n`` is here."""
    found: list[dict[str, Any]] = [
        {"tokens": [[] for _ in range(params.n)], "logprobs": [[] for _ in range(params.n)], "cached": 0}
        for _ in prompts
    ]
    for number, prompt in enumerate(prompts):
        engine.add_request(
            EngineRequest(
                request_id=str(number), prompt_token_ids=prompt.ids, images=tuple(prompt.images), params=params
            )
        )
    while engine.has_unfinished:
        for delta in engine.step():
            assert delta.error is None, delta.error
            own = found[int(delta.request_id)]
            own["tokens"][delta.index] += delta.new_token_ids
            if delta.logprobs is not None:
                own["logprobs"][delta.index] += delta.logprobs.logprobs[:, 0].tolist()
            own["cached"] = max(own["cached"], delta.num_cached_tokens)
    return found


def run(llm: LLM, case: dict[str, Any]) -> dict[str, Any]:
    """What two rounds gave, and the engine's counters; afterwards the blocks must add up."""
    folder = Path(case["options"]["model"])
    params = SamplingParams(
        max_tokens=case["max_tokens"], temperature=0.0, ignore_eos=True, logprobs=1, **case.get("params", {})
    )
    engine, watched = engine_of(llm), draft_head_job.watch(llm)
    with pixel_files(folder) as files:
        prompts = prompts_of(files, folder, case["prompts"])
        with stepping(llm):
            rounds = [answers(engine, prompts, params) for _ in range(case.get("num_rounds", 2))]
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_used_blocks == 0
    images, drafts = images_feature.COUNTERS.of(stats), speculation.COUNTERS.of(stats)
    return {
        "rounds": rounds,
        "num_preemptions": stats.num_preemptions,
        "num_drafted": drafts.num_draft_tokens,
        **counts(stats, ("num_host_hit_tokens", "num_disk_hit_tokens")),
        "num_encoded": images.num_encoded,
        "num_queries": images.num_queries,
        "drafts": [] if watched is None else list(zip(watched.requests, watched.seen, strict=True)),
    }


def main(cases: Path, out: Path) -> None:
    """Run all cases."""
    parity_job.main(cases, out, run)
