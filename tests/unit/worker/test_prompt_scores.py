"""Prompts are scored a bounded number of positions at a time, and the largest step scores as many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.simulated_ranks import run_ranks
from tests.unit.models.test_models import bind_caches
from tp_engine import LLM, RequestOutput, SamplingParams
from tp_engine.attention.registry import select_backend
from tp_engine.config import EngineConfig
from tp_engine.distributed.collectives import Communicator
from tp_engine.layers.embedding import ParallelLMHead
from tp_engine.models.causal_lm import build_model
from tp_engine.plan import TokenLogprobs
from tp_engine.sampling import logprobs
from tp_engine.worker.effective_config import resolve
from tp_engine.worker.results import prompt_scores
from tp_engine.worker.results.prompt_scores import empty_scores, positions_at_once, score_prompt
from tp_engine.worker.results.readback import Readback
from tp_engine.worker.trial_steps import run_largest_step

Checkpoint = Callable[..., Path]
CPU = torch.device("cpu")
VOCAB_SIZE = 20_011
PROMPTS = [[(31 * i) % VOCAB_SIZE for i in range(length)] for length in (150, 97, 3, 1)]


class HeadWatch:
    """The number of positions in every call of the output head and in every gathering of its logits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computed: list[int] = []
        self.gathered: list[int] = []
        forward, gather = ParallelLMHead.forward, ParallelLMHead.gather

        def watched_forward(head: ParallelLMHead, hidden: torch.Tensor) -> torch.Tensor:
            self.computed.append(len(hidden))
            return forward(head, hidden)

        def watched_gather(head: ParallelLMHead, local_logits: torch.Tensor) -> torch.Tensor | None:
            self.gathered.append(len(local_logits))
            return gather(head, local_logits)

        monkeypatch.setattr(ParallelLMHead, "forward", watched_forward)
        monkeypatch.setattr(ParallelLMHead, "gather", watched_gather)

    def forget(self) -> None:
        """Forget all calls so far."""
        self.computed.clear()
        self.gathered.clear()


def scored(llm: LLM) -> list[Any]:
    """The log-probabilities of all prompts, exact to the bit, and the tokens that follow."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=3)
    outputs: list[RequestOutput] = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(output.prompt_logprobs, output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("max_num_seqs", [3, 40])
def test_logits_of_prompts_are_bounded(
    checkpoint: Checkpoint, max_num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the same engine, scoring all positions at once, bit by bit; the bound is the one of the start."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": max_num_seqs, "max_model_len": 160}
    folder = str(checkpoint("qwen3", vocab_size=VOCAB_SIZE))
    watch = HeadWatch(monkeypatch)
    with LLM(folder, max_num_batched_tokens=300, num_gpu_blocks_override=40, **options) as llm:
        assert max(watch.computed) == max(watch.gathered) == positions_at_once(max_num_seqs)
        watch.forget()
        found = scored(llm)
        assert max(watch.computed) == max(watch.gathered) == positions_at_once(max_num_seqs) < 50
        assert sum(watch.gathered) == sum(len(prompt) - 1 for prompt in PROMPTS)
        watch.forget()
        monkeypatch.setattr(prompt_scores, "positions_at_once", lambda max_num_seqs: 1 << 20)
        llm.reset_prefix_cache()
        expected = scored(llm)
        assert max(watch.computed) == 149
    assert found == expected
    assert [len(places) for places, _ in found] == [len(prompt) for prompt in PROMPTS]


def on_ranks(folder: Path, world_size: int, body: Callable[[Any, Any, Any, Communicator], Any], **options: Any) -> Any:
    """Rank 0's result of ``body(model, backend, effective, communicator)``, with random weights of one seed."""

    def run(communicator: Communicator) -> Any:
        config = EngineConfig(model=str(folder), device="cpu", tensor_parallel_size=world_size, **options)
        effective = resolve(config)
        backend = select_backend("torch", effective.attention_needs)
        model = build_model(
            effective.model,
            communicator=communicator,
            dtype=torch.float32,
            device=CPU,
            backends=[backend],
            max_model_len=effective.max_model_len,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
        model.finish_loading()
        with torch.inference_mode():
            return body(model, backend, effective, communicator)

    return run_ranks(world_size, run)[0]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("num_positions", [1, 16, 17, 100])
def test_parts_of_a_prompt(checkpoint: Checkpoint, world_size: int, num_positions: int) -> None:
    """Oracle: log_softmax of the logits of all positions; rank 0 alone has a result."""
    generator = torch.Generator().manual_seed(num_positions)
    hidden = torch.randn(num_positions, 64, generator=generator)
    following = torch.randint(0, 101, (num_positions,), generator=generator, dtype=torch.int32)

    def body(model: Any, backend: Any, effective: Any, communicator: Communicator) -> tuple[Any, Any]:
        scores = score_prompt(model, hidden, following, 2, 16)
        assert (scores is None) == (communicator.info.rank > 0)
        return (None if scores is None else scores.to_host(Readback(1, hidden.device).fetch)()), model.compute_logits(
            hidden
        )

    found, logits = on_ranks(checkpoint("qwen3", vocab_size=101), world_size, body)
    assert isinstance(found, TokenLogprobs)
    wanted = logits.log_softmax(-1)
    own = wanted.gather(1, following[:, None].long())
    assert found.token_ids[:, 0].tolist() == following.tolist()
    torch.testing.assert_close(torch.from_numpy(found.logprobs[:, :1]), own)
    torch.testing.assert_close(torch.from_numpy(found.logprobs[:, 1:]), wanted.topk(2).values)
    assert found.ranks.tolist() == ((wanted > own).sum(-1) + 1).tolist()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("max_num_seqs", [2, 24])
def test_the_largest_step_scores_as_much_as_any_step(
    checkpoint: Checkpoint, world_size: int, max_num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the positions that ``score_prompt`` takes at once, gathered once and scored; all results are kept."""
    watch, held, widths = HeadWatch(monkeypatch), [], []
    score_chunk = logprobs._chunk_logprobs

    def watched_empty(*arguments: Any) -> Any:
        held.append(arguments[:3])
        return empty_scores(*arguments)

    def watched_chunk(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> Any:
        widths.append((logits.shape[1], k))
        return score_chunk(logits, token_ids, k)

    def largest_step(model: Any, backend: Any, effective: Any, communicator: Communicator) -> None:
        bind_caches(model.attention_layers)
        run_largest_step(model, [backend], effective, CPU, communicator)

    monkeypatch.setattr("tp_engine.worker.trial_steps.empty_scores", watched_empty)
    monkeypatch.setattr(logprobs, "_chunk_logprobs", watched_chunk)
    on_ranks(
        checkpoint("qwen3", vocab_size=101),
        world_size,
        largest_step,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=128,
        max_logprobs=7,
    )
    assert watch.computed == watch.gathered == [max(max_num_seqs, prompt_scores._LEAST_POSITIONS)] * world_size
    assert held == [(64, 101, 7)] * 2 * world_size
    assert set(widths) == {(101, 7)}


def test_positions_at_once() -> None:
    """Oracle: as many as are sampled, so that the start measures one size only; at least 16, because fewer are slow."""
    assert [positions_at_once(max_num_seqs) for max_num_seqs in (1, 15, 16, 17, 256)] == [16, 16, 16, 17, 256]
