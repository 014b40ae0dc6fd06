"""Images beside the other features of an engine: drafts, tiers, new weights, sleep, a rank that dies.

Oracle, unless a test says otherwise: the same prompts on an engine without the feature, which equals transformers
(``test_images.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.covers import covers
from tests.draft_heads import ReferenceHead, make_draft_head
from tests.image_models import VOCAB_SIZE, Oracle, Prompt, draw_pixels, make_image_model, pixel_files
from tests.mtp_heads import ReferenceMtp, make_mtp
from tests.ranks import image_job
from tests.ranks.test_images import cuts_images, make_prompts, run_cases, settings_of
from tests.services import stepping
from tp_engine import LLM, SamplingParams
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError, RankError
from tp_engine.features.images.feature import COUNTERS
from tp_engine.worker.effective_config import resolve

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_children")]

NUM_TOKENS = 16
IN_TEXTS = ("suffix", "ngram")  # methods that find drafts in texts
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 400,
    "block_size": 4,
    "num_gpu_blocks_override": 2000,
}
GREEDY = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a family's checkpoint, made once for each ``seed``."""
    made: dict[tuple[str, int], Path] = {}

    def get(name: str, seed: int = 0) -> Path:
        if (name, seed) not in made:
            made[name, seed] = make_image_model(tmp_path_factory.mktemp(name), name, seed=seed)
        return made[name, seed]

    return get


def error_of(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of log-probabilities in all rounds, of which each has the same tokens."""
    errors = [0.0]
    for own, others in zip(found["rounds"], expected["rounds"], strict=True):
        assert [one["tokens"] for one in own] == [one["tokens"] for one in others]
        for one, other in zip(own, others, strict=True):
            errors.append((torch.tensor(one["logprobs"]) - torch.tensor(other["logprobs"])).abs().max().item())
    return max(errors)


@pytest.mark.parametrize(
    ("name", "method", "world_size"),
    [
        ("qwen3.5-vision", "mtp", 1),
        ("qwen3.5-vision", "mtp", 2),
        ("qwen3-vl", "eagle3", 1),
        ("qwen3-vl", "eagle3", 2),
        ("gemma4-narrow", "suffix", 2),
        ("mistral3-vision", "ngram", 1),
    ],
)
@covers("text drafts", lambda name, method, world_size: [(name, world_size)] if method in IN_TEXTS else [])
@covers("draft heads", lambda name, method, world_size: [(name, world_size)] if method not in IN_TEXTS else [])
def test_drafts_change_no_token(
    name: str, method: str, world_size: int, image_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The encoder cache holds little more than one image: rows leave it between chunks, and heads draft meanwhile.
    In the second round answers of the first are drafts, with names of images before them.  A head's drafts are those of
    the head over whole texts and images, as transformers sees them."""
    folder = image_model(name)
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "max_step_rows": 24}
    if method == "mtp":
        folder = make_mtp(tmp_path / "mtp", folder)
    elif method == "eagle3":
        turning = {"type": "mrope", "mrope_section": [1, 1, 2]}
        places: dict[str, Any] = {"rope_scaling": turning} if world_size == 1 else {}
        head = make_draft_head(tmp_path / "head", vocab_size=VOCAB_SIZE, state_layers=(0, 1, 2), **places)
        speculation["model"] = str(head)
    options = {**settings_of(name)["chunked"], "model": str(folder), "max_num_seqs": 4}
    prompts = [*make_prompts(), *make_prompts()[:4]]
    case = {"prompts": prompts, "max_tokens": NUM_TOKENS, "num_rounds": 2}
    cases: list[dict[str, Any]] = [
        {**case, "options": {**options, "speculative_config": config}} for config in (None, json.dumps(speculation))
    ]
    plain, drafted = run_cases(world_size, cases, tmp_path)
    assert error_of(drafted, plain) < 1e-4
    assert drafted["num_drafted"] > 0  # how many depends on measured times
    if method in IN_TEXTS:
        return
    reference: Any = ReferenceMtp(folder) if method == "mtp" else ReferenceHead(head, folder)
    oracle, num_equal, num_seen = Oracle(folder, name), 0, 0
    with pixel_files(folder) as files:
        made = image_job.prompts_of(files, folder, prompts)
        for request, (tokens, drafts) in drafted["drafts"]:
            prompt = made[int(request)]
            if prompt.images and num_seen < 80:
                answer = tokens[len(prompt.ids) :]
                found = reference.drafts([*prompt.ids, *answer], len(drafts), oracle.insides(prompt, answer))
                num_seen, num_equal = num_seen + 1, num_equal + (found == drafts)
    assert num_equal >= 0.97 * num_seen > 20, (num_equal, num_seen)


@pytest.mark.parametrize("name", ["qwen3.5-vision", "gemma4-vision"])
def test_preempted_and_forked_images_of_other_families(
    name: str, image_model: Callable[..., Path], tmp_path: Path
) -> None:
    """A pool that holds little more than one prompt, and two answers of each."""
    ample = {"model": str(image_model(name)), "block_size": 4, "num_gpu_blocks_override": 2000}
    tight = {**ample, "num_gpu_blocks_override": 21 if cuts_images(name) else 112, "max_num_seqs": 8}
    tight["max_model_len"] = 80 if cuts_images(name) else 112
    tight["max_num_batched_tokens"] = 16 if cuts_images(name) else 90
    prompts = make_prompts()[:4] if cuts_images(name) else [make_prompts()[place] for place in (0, 1, 0)]
    case = {"prompts": [*prompts, *prompts, *prompts], "max_tokens": 24, "params": {"n": 2}, "num_rounds": 1}
    (expected,) = run_cases(1, [{**case, "options": ample}], tmp_path)
    (found,) = run_cases(2, [{**case, "options": tight}], tmp_path)
    assert found["num_preemptions"] > 0
    assert error_of(found, expected) < 1e-4


@pytest.mark.parametrize(("name", "world_size"), [("qwen3-vl", 2), ("gemma4-vision", 1)])
@covers("KV tiers", lambda world_size, name: [(name, world_size)])
def test_tiers_change_no_token(name: str, world_size: int, image_model: Callable[..., Path], tmp_path: Path) -> None:
    """A pool too small for all prompts, a host tier, and a directory that a second engine finds: names of images mean
    nothing to it, so it has hits in texts alone."""
    num_blocks = 60 if cuts_images(name) else 300
    options = {**settings_of(name)["chunked"], "model": str(image_model(name)), "num_gpu_blocks_override": num_blocks}
    options["max_model_len"] = 200
    host = {**options, "kv_offloading_size": 0.05}
    disk = {**host, "kv_disk_path": str(tmp_path / "kv"), "kv_disk_size": 0.05}
    image = {"seed": 0, "size": [40, 100]}
    prompts = [*make_prompts()[:2], make_prompts()[3], *([[5, one, 9] * 12, image, [7] * 8] for one in range(20, 30))]
    cases = [{"options": one, "prompts": prompts, "max_tokens": 5} for one in (options, host, disk, disk)]
    plain, with_host, first, second = run_cases(world_size, cases, tmp_path)
    for found in (with_host, first, second):
        assert error_of(found, plain) < 1e-4
    cached = [sum(one["cached"] for one in found["rounds"][1]) for found in (plain, with_host)]
    assert cached[1] > cached[0] and with_host["num_host_hit_tokens"] > 100
    assert with_host["num_encoded"] <= plain["num_encoded"]
    again = second["rounds"][0]
    assert second["num_disk_hit_tokens"] > 0 and all(one["cached"] <= 36 for one in again)


def encoded(llm: LLM) -> int:
    """Images that were encoded since the start."""
    images = COUNTERS.get(llm.engine.stats())
    assert images is not None
    return images.num_encoded


def run(llm: LLM, prompts: list[Prompt]) -> list[Any]:
    """Tokens and log-probabilities."""
    with stepping(llm) as engine:
        return [(one["tokens"], one["logprobs"]) for one in image_job.answers(engine, prompts, GREEDY)]


@pytest.mark.parametrize(("name", "world_size"), [("qwen3-vl", 1), ("gemma4-vision", 2)])
@covers("new weights", lambda world_size, name: [(name, world_size)])
def test_new_weights_are_the_towers_too(name: str, world_size: int, image_model: Callable[..., Path]) -> None:
    """Oracle: an engine that starts with the new weights, bit for bit, behind hits of the prefix cache as well; after a
    sleep, too.  Rows of the old tower are never used: all images are encoded again, and found afterwards."""
    first, second = (image_model(name, seed) for seed in (0, 9))
    options = {**OPTIONS, "tensor_parallel_size": world_size}
    with pixel_files(first) as files:
        prompts = image_job.prompts_of(files, first, make_prompts())
        with LLM(str(second), **options) as llm:
            expected = run(llm, prompts)
            num_images = encoded(llm)
            found_again = run(llm, prompts)
        with LLM(str(first), **options) as llm:
            before = run(llm, prompts)
            assert before != expected and encoded(llm) == num_images
            tensors = {key: one for path in second.glob("*.safetensors") for key, one in load_file(path).items()}
            llm.update_weights(tensors.items())
            assert run(llm, prompts) == expected and encoded(llm) == 2 * num_images
            assert run(llm, prompts) == found_again and encoded(llm) == 2 * num_images
            llm.sleep()
            llm.wake_up()
            assert run(llm, prompts) == expected
            llm.update_weights_from_disk(first)
            assert run(llm, prompts) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_while_it_encodes_ends_the_job(
    rank: int, image_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the error names the rank and what it did; no process and no file of pixels is left."""
    folder = image_model("qwen3.5-vision")
    monkeypatch.setenv("TP_ENGINE_FAULT", f"{rank}:encode:{'kill' if rank else 'raise'}")
    with pixel_files(folder) as files, LLM(str(folder), **OPTIONS, tensor_parallel_size=2) as llm:
        prompts = image_job.prompts_of(files, folder, make_prompts())
        text = "rank 1: .*in encode of step" if rank else "injected by TP_ENGINE_FAULT: rank 0 in encode"
        with pytest.raises(RankError if rank else RuntimeError, match=f"(?s){text}"):
            run(llm, prompts)


def test_a_chunk_holds_an_image_whose_tokens_see_each_other(image_model: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: transformers; room for an image beside a token of each other sequence, and for one token more.  With one
    token less the engine does not start, and says how much room it takes."""
    folder, num_seqs = image_model("gemma4-vision"), 4
    prompts = [[[9] * 5, {"seed": seed, "size": [64, 64]}, [8] * 7] for seed in range(3)]
    most = 70  # max_soft_tokens
    options: dict[str, Any] = {
        "model": str(folder), "block_size": 4, "num_gpu_blocks_override": 2000, "max_num_seqs": num_seqs,
    }  # fmt: skip
    rules = resolve(EngineConfig(**options, device="cpu", max_num_batched_tokens=num_seqs + most)).model.vision
    assert rules is not None
    room = num_seqs + rules.most_rows
    with pytest.raises(ConfigError, match=f"to at least {room}"):
        resolve(EngineConfig(**options, device="cpu", max_num_batched_tokens=room - 1))
    budgets = (room, room + 1)
    cases = [
        {"options": {**options, "max_num_batched_tokens": one}, "prompts": prompts, "max_tokens": 7} for one in budgets
    ]
    oracle = Oracle(folder, "gemma4-vision")
    with pixel_files(folder) as files:
        made = image_job.prompts_of(files, folder, prompts)
        for result in run_cases(1, cases, tmp_path):
            for prompt, one in zip(made, result["rounds"][0], strict=True):
                assert oracle.problem(prompt, one["tokens"][0], one["logprobs"][0]) is None


def test_each_turn_of_a_chat_adds_an_image(image_model: Callable[..., Path]) -> None:
    """Oracle: transformers; each turn finds what was there before, with its images, although three layers of four keep
    a state instead of keys, and each image is encoded once."""
    folder, name = image_model("qwen3.5-vision"), "qwen3.5-vision"
    oracle, parts, cached = Oracle(folder, name), list[Any](), list[int]()
    with pixel_files(folder) as files, LLM(str(folder), **OPTIONS) as llm:
        for turn in range(4):
            parts += [[20 + turn] * 9, draw_pixels(folder, 64, 64 + 32 * turn, turn), [7] * 6]
            prompt = files.prompt(parts)
            with stepping(llm) as engine:
                (one,) = image_job.answers(engine, [prompt], GREEDY)
            assert oracle.problem(prompt, one["tokens"][0], one["logprobs"][0]) is None
            parts.append(one["tokens"][0])
            cached.append(one["cached"])
            assert encoded(llm) == turn + 1
    assert cached[0] == 0 and all(second > first for first, second in pairwise(cached)), cached
