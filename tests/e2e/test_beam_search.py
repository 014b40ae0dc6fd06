"""Beam search of a batch on one rank: sequences and scores equal transformers', and beams share blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiers import fast_first
from tp_engine import LLM, BeamSearchOutput, BeamSearchParams, RequestError, SamplingParams

VOCAB = 203
WIDTH = 4
BLOCK = 4
PROMPTS = [[5, 9, 13, 7], list(range(20, 50)), [100, 3, 50], [7] * 17]
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 128, "block_size": BLOCK, "num_gpu_blocks_override": 400,
    "max_num_batched_tokens": 64, "max_num_seqs": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as engine:
        yield engine


@pytest.fixture(autouse=True)
def blocks_come_back(llm: LLM) -> Iterator[None]:
    """Check after each search that no block is in use: free + cached = all."""
    yield
    llm.engine.check_integrity()
    stats = llm.engine.stats()
    assert stats.num_used_blocks == 0 and stats.num_free_blocks + stats.num_cached_blocks == 400


@cache
def reference_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def transformers_beams(
    folder: Path, prompt: list[int], width: int, max_tokens: int, **options: Any
) -> list[tuple[list[int], float]]:
    """(generated tokens, sum of log-probabilities) of transformers' beam search, best first.

    transformers' score is the sum over the number of generated tokens (EOS included) to the power of the penalty.
    """
    ids = torch.tensor([prompt])
    out = reference_model(folder).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, num_beams=width,
        num_return_sequences=width, pad_token_id=0, return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    found = []
    for row, score, indices in zip(out.sequences, out.sequences_scores, out.beam_indices, strict=True):
        count = int((indices >= 0).sum())
        found.append((row[len(prompt) :][:count].tolist(), float(score) * count ** options["length_penalty"]))
    return found


def plain_beams(folder: Path, prompt: list[int], params: BeamSearchParams, eos: int) -> list[tuple[list[int], float]]:
    """vLLM's definition on transformers' logits: every candidate of every beam is scored; no cache, no early end."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    complete: list[tuple[list[int], float]] = []
    for _ in range(params.max_tokens):
        longer = []
        for tokens, total in live:
            with torch.inference_mode():
                logits = reference_model(folder)(torch.tensor([prompt + tokens])).logits[0, -1]
            scored = torch.log_softmax(logits, dim=-1).tolist()
            longer += [([*tokens, token], total + value) for token, value in enumerate(scored)]
            # A completion counts if its token is among the beam's 2 * width likeliest.
            if scored[eos] >= sorted(scored)[-2 * params.beam_width]:
                complete.append(([*tokens, eos], total + scored[eos]))
        others = [beam for beam in longer if beam[0][-1] != eos]
        live = sorted(others, key=lambda beam: -beam[1])[: params.beam_width]

    def score(beam: tuple[list[int], float]) -> float:
        length = len(prompt) + len(beam[0]) - (beam[0][-1] == eos)
        return beam[1] / math.pow(length, params.length_penalty)

    return sorted(complete + live, key=score, reverse=True)[: params.beam_width]


def assert_same(output: BeamSearchOutput, prompt: list[int], expected: list[tuple[list[int], float]]) -> None:
    assert [sequence.tokens for sequence in output.sequences] == [prompt + tokens for tokens, _ in expected]
    for sequence, (_, total) in zip(output.sequences, expected, strict=True):
        assert sequence.cum_logprob == pytest.approx(total, abs=2e-3)


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -2.0])
def test_beams_of_fixed_length_equal_transformers(llm: LLM, folder: Path, length_penalty: float) -> None:
    """Oracle: transformers generate(num_beams=4) without an EOS: all lengths are equal, so all definitions agree."""
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=12, ignore_eos=True, length_penalty=length_penalty)
    outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = transformers_beams(folder, prompt, WIDTH, 12, eos_token_id=None, length_penalty=length_penalty)
        assert_same(output, prompt, expected)
        assert {sequence.finish_reason for sequence in output.sequences} == {"length"}


# Tokens that many beams reach: used as the EOS, they end some beams early.
@pytest.mark.parametrize("eos", fast_first(1, [113, 25]))
def test_beams_that_end_equal_the_definition(checkpoint: Callable[..., Path], eos: int) -> None:
    """Oracles: vLLM's definition applied to transformers' logits, and transformers generate.

    Both agree on the live beams, but transformers drops an EOS that is not among the ``width`` best candidates of its
    round.  So each of its results is either among ours, or worse than all of ours (no length penalty, no early end).
    """
    folder = checkpoint("qwen3", vocab_size=VOCAB, eos_token_id=eos)
    lengths = set()
    with LLM(str(folder), **OPTIONS) as engine:
        for penalty in (1.0, 0.0, -2.0, 8.0):
            params = BeamSearchParams(beam_width=WIDTH, max_tokens=12, length_penalty=penalty)
            for prompt, output in zip(PROMPTS, engine.beam_search(PROMPTS, params), strict=True):
                assert_same(output, prompt, plain_beams(folder, prompt, params, eos))
                for sequence in output.sequences:
                    lengths.add(len(sequence.tokens) - len(prompt))
                    assert sequence.finish_reason == ("stop" if sequence.tokens[-1] == eos else "length")
        params = BeamSearchParams(beam_width=WIDTH, max_tokens=12, length_penalty=0.0)
        for prompt, output in zip(PROMPTS, engine.beam_search(PROMPTS, params), strict=True):
            theirs = transformers_beams(
                folder, prompt, WIDTH, 12, eos_token_id=eos, length_penalty=0.0, early_stopping="never"
            )
            ours = {tuple(sequence.tokens[len(prompt) :]): sequence.cum_logprob for sequence in output.sequences}
            better = [(tuple(tokens), total) for tokens, total in theirs if total > min(ours.values()) + 1e-4]
            assert all(ours[tokens] == pytest.approx(total, abs=2e-3) for tokens, total in better)
        engine.engine.check_integrity()
        assert engine.engine.stats().num_used_blocks == 0
    assert min(lengths) < 4 and max(lengths) == 12


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 16, 150])
def test_any_width(llm: LLM, folder: Path, width: int) -> None:
    """Oracle: transformers.  Width 1 is greedy; 32 candidates exceed max_logprobs, 300 the vocabulary."""
    output = llm.beam_search([PROMPTS[1]], BeamSearchParams(beam_width=width, max_tokens=4, ignore_eos=True))[0]
    expected = transformers_beams(folder, PROMPTS[1], max(width, 2), 4, eos_token_id=None, length_penalty=1.0)
    if width == 1:
        greedy = llm.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        assert output.sequences[0].tokens == PROMPTS[1] + greedy[0].outputs[0].token_ids
        assert len(output.sequences) == 1
    else:
        found = {tuple(one.tokens[len(PROMPTS[1]) :]): one.cum_logprob for one in output.sequences}
        assert len(found) == width
        for tokens, total in expected[: width // 2]:
            assert found[tuple(tokens)] == pytest.approx(total, abs=2e-3)
        ranked = [one.cum_logprob for one in output.sequences]
        assert ranked == sorted(ranked, reverse=True)
        assert ranked == pytest.approx([total for _, total in expected], abs=2e-3)


def test_logprobs_tell_how_the_sum_came_about(llm: LLM) -> None:
    """Oracle: the sequence's own sum; every position has at least the 2 * width likeliest tokens."""
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=6, ignore_eos=True)
    for sequence in llm.beam_search(PROMPTS[0], params)[0].sequences:
        chosen = sequence.tokens[len(PROMPTS[0]) :]
        values = [entry[token].logprob for entry, token in zip(sequence.logprobs, chosen, strict=True)]
        assert sum(values) == pytest.approx(sequence.cum_logprob, abs=1e-5)
        assert all(len(entry) == 2 * WIDTH for entry in sequence.logprobs)


def test_beams_share_their_blocks(llm: LLM) -> None:
    """Oracle: arithmetic.  All beams and rounds share one prompt of 16 full blocks and 2 tokens.  Each beam computes
    one token a round, because it begins with a copy of its parent's last block."""
    prompt, num_rounds = [(17 * i) % 200 + 3 for i in range(16 * BLOCK + 2)], 12
    assert llm.reset_prefix_cache()
    before = llm.engine.stats()
    llm.beam_search([prompt], BeamSearchParams(beam_width=WIDTH, max_tokens=num_rounds, ignore_eos=True))
    after = llm.engine.stats()
    num_asked = after.num_prefix_query_tokens - before.num_prefix_query_tokens
    num_computed = num_asked - (after.num_prefix_hit_tokens - before.num_prefix_hit_tokens)
    assert num_asked == len(prompt) + WIDTH * sum(len(prompt) + i for i in range(1, num_rounds))
    assert num_computed == len(prompt) + WIDTH * (num_rounds - 1)
    assert 16 < after.num_cached_blocks <= 16 + WIDTH * num_rounds


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 18},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 3, "max_num_batched_tokens": 16},
    ],
)
def test_small_engines_find_the_same(llm: LLM, folder: Path, options: dict[str, Any]) -> None:
    """Oracle: the large engine.  A pool for one prompt's beams at a time; no prefix cache; fewer rows than beams."""
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=10, ignore_eos=True)
    expected = [[one.tokens for one in output.sequences] for output in llm.beam_search(PROMPTS, params)]
    with LLM(str(folder), **{**OPTIONS, "max_model_len": 64, **options}) as small:
        found = [[one.tokens for one in output.sequences] for output in small.beam_search(PROMPTS, params)]
        assert found == expected
        limited = small.beam_search(PROMPTS, params, concurrency_limit=1)
        assert [[one.tokens for one in output.sequences] for output in limited] == expected
        small.engine.check_integrity()
        assert small.engine.stats().num_used_blocks == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"max_model_len": 40}, {"max_model_len": 64, "num_gpu_blocks_override": 9}])
def test_the_context_ends_a_search(folder: Path, options: dict[str, Any]) -> None:
    """Oracle: arithmetic.  The context's 40 tokens, or the pool's 36 and a last one that needs no slot."""
    with LLM(str(folder), **{**OPTIONS, **options}) as small:
        output = small.beam_search(PROMPTS[1], BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True))[0]
    longest = 40 if options["max_model_len"] == 40 else 37
    assert [len(one.tokens) for one in output.sequences] == [longest, longest]
    assert all(one.finish_reason == "length" for one in output.sequences)


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ([PROMPTS[0], []], {}, "empty"),
        ([PROMPTS[0], [VOCAB]], {}, "202"),
        ([PROMPTS[0]], {"beam_width": 0}, "beam_width is 0"),
        ([PROMPTS[0]], {"beam_width": 1000}, "from 1 to 256"),
        ([PROMPTS[0]], {"max_tokens": 0}, "max_tokens is 0"),
        ([PROMPTS[0]], {"length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_what_is_refused(llm: LLM, prompts: list[list[int]], params: dict[str, Any], words: str) -> None:
    """Oracle: the error names the value and the rule; nothing has run."""
    before = llm.engine.stats()
    with pytest.raises(RequestError, match=words):
        llm.beam_search(prompts, BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **params}))
    assert llm.engine.stats() == before


@pytest.mark.slow
def test_text_of_the_demo_model() -> None:
    """Oracles: arithmetic and the tokenizer; the text is that of all tokens, with the EOS only if requested."""
    params: dict[str, Any] = {"beam_width": 3, "max_tokens": 8}
    with LLM(device="cpu", num_gpu_blocks_override=64, max_model_len=128) as demo:
        prompt = {"prompt_token_ids": demo.input_processor.chat_token_ids([{"role": "user", "content": "12+34="}])}
        hidden, shown = (
            demo.beam_search(prompt, BeamSearchParams(include_stop_str_in_output=flag, **params))[0].sequences
            for flag in (False, True)
        )
        tokenizer = demo.input_processor.tokenizer
        assert tokenizer is not None
        decode = tokenizer.decode
    assert hidden[0].finish_reason == "stop" and hidden[0].text.endswith("46")
    for without, with_eos in zip(hidden, shown, strict=True):
        ends = without.finish_reason == "stop"
        assert with_eos.text == decode(with_eos.tokens)
        assert without.text == decode(without.tokens[: len(without.tokens) - ends])
