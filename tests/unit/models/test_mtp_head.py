"""Heads for multi-token prediction: their logits on one rank and on several simulated ones, their tensors, refusals."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.mtp_heads import FAMILIES, ReferenceMtp, make_mtp
from tests.quantised.checkpoints import compress
from tests.simulated_ranks import run_ranks
from tests.tiers import slow_but
from tests.unit.models.test_models import BACKENDS, CPU, LENGTHS, bind_caches, prefill_metadata
from tp_engine import recommend
from tp_engine.apps.advice.question import Workload
from tp_engine.config import EngineConfig
from tp_engine.distributed.collectives import Communicator, SingleRank
from tp_engine.errors import ConfigError, WeightError
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.layers.attention import forward_context
from tp_engine.model_config import load_model_config
from tp_engine.model_config.kv_layout import MAX_GROUPS
from tp_engine.models.causal_lm import build_model
from tp_engine.models.language_model import LanguageModel
from tp_engine.weights.loader import load_weights
from tp_engine.worker.effective_config import resolve

VOCABULARY = 203
NAME = "model.safetensors"


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    """A checkpoint with a head for each family."""
    folder, made = tmp_path_factory.mktemp("mtp"), dict[str, Path]()

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_mtp(folder / family, checkpoint(family, **FAMILIES[family]))
        return made[family]

    return get


def build(folder: Path, communicator: Communicator) -> LanguageModel:
    """The model with its head, loaded."""
    spec, _ = load_model_config(str(folder))
    assert spec.stored_mtp is not None
    spec = spec.drafting_with(spec.stored_mtp)
    options: dict[str, Any] = {"communicator": communicator, "dtype": torch.float32, "device": CPU}
    model = build_model(spec, backends=BACKENDS, max_model_len=128, **options)
    load_weights(dict(model.named_parameters()), spec, folder, info=communicator.info)
    model.finish_loading()
    assert model.mtp is not None
    bind_caches([*model.attention_layers, *model.mtp.own_attention])
    return model


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(VOCABULARY, (length + 1,), generator=generator).tolist() for length in LENGTHS]


def logits(folder: Path, communicator: Communicator, wanted: torch.Tensor | None = None) -> torch.Tensor | None:
    """The head's logits behind all positions of ``texts``; the model's last layer is asked for the ``wanted`` only."""
    model = build(folder, communicator)
    assert model.mtp is not None
    ids, following = (
        torch.tensor([token for text in texts() for token in text[part]]) for part in (slice(-1), slice(1, None))
    )
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    states = model.mtp.new_states(len(ids))
    with torch.inference_mode(), forward_context([prefill_metadata(LENGTHS)] * MAX_GROUPS):
        model(ids.int(), positions, wanted, states)
        out, _ = model.mtp(following.int(), model.mtp.combine(states), positions)
        return model.mtp.lm_head.gather(model.mtp.lm_head(out))


def read_names(folder: Path, tensors: dict[str, torch.Tensor]) -> list[str]:
    """The names of the head's tensors in ``folder``."""
    return list(load_model_config(str(folder))[0].mtp_names(tensors))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_logits(family: str, world_size: int, heads: Callable[[str], Path]) -> None:
    """Oracle: transformers' head, within 1e-4, of all tokens although the model's outputs are wanted of one alone."""
    folder = heads(family)
    found = run_ranks(world_size, lambda communicator: logits(folder, communicator, torch.tensor([0])))[0]
    reference = ReferenceMtp(folder)
    expected = torch.cat([reference.logits(text) for text in texts()])
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3-next", "deepseek-v3"])
def test_a_quantised_head_with_a_plain_projection(family: str, heads: Callable[[str], Path], tmp_path: Path) -> None:
    """Oracle: transformers' head with the weights that the codes stand for; config.json does not list what is plain."""
    own, twin = tmp_path / "own", tmp_path / "twin"
    compress(heads(family), own, twin, "fp8-block", group=8, kept_modules=r".*\.(fc|eh_proj)")
    config = json.loads((own / "config.json").read_text())
    listed = config["quantization_config"]["modules_to_not_convert"]
    config["quantization_config"]["modules_to_not_convert"] = [
        name for name in listed if not name.endswith(("fc", "eh_proj"))
    ]
    assert len(config["quantization_config"]["modules_to_not_convert"]) < len(listed)
    (own / "config.json").write_text(json.dumps(config))
    found, reference = logits(own, SingleRank()), ReferenceMtp(twin)
    assert found is not None
    expected = torch.cat([reference.logits(text) for text in texts()])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", slow_but(["qwen3.5", "ernie4.5-moe"], FAMILIES))
def test_each_changed_tensor_changes_the_logits(family: str, heads: Callable[[str], Path], tmp_path: Path) -> None:
    """Oracle: transformers' head with the same tensor changed, within the tolerance of ``test_logits``; its logits move
    by ten times that, so that test notices whichever tensor is misread."""
    source, folder = heads(family), tmp_path / family
    shutil.copytree(source, folder)
    tensors, reference = load_file(source / NAME), ReferenceMtp(source)
    names = read_names(source, tensors)
    assert len(names) > 10 and set(names) <= set(reference.tensors)
    before = torch.cat([reference.logits(text) for text in texts()])
    for name in names:
        # Index queries that are alike score 0 with many keys, and among equal scores transformers chooses any.
        changed = tensors[name].flip(0) + (0.0 if name.endswith("indexer.wq_b.weight") else 0.1)
        save_file({**tensors, name: changed}, folder / NAME, metadata={"format": "pt"})
        reference.tensors[name].copy_(changed)
        expected, found = torch.cat([reference.logits(text) for text in texts()]), logits(folder, SingleRank())
        reference.tensors[name].copy_(tensors[name])
        assert not torch.allclose(expected, before, rtol=1e-3, atol=1e-3), name
        assert found is not None
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=partial("{}: {}".format, name))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_lost_tensor_is_an_error(family: str, heads: Callable[[str], Path], tmp_path: Path) -> None:
    """By hand: whichever tensor of a head is not stored, or one too many, the start fails and names it."""
    source, folder = heads(family), tmp_path / family
    shutil.copytree(source, folder)
    spec, _ = load_model_config(str(source))
    assert spec.stored_mtp is not None
    spec, tensors = spec.drafting_with(spec.stored_mtp), load_file(source / NAME)
    options: dict[str, Any] = {"communicator": SingleRank(), "dtype": torch.float32, "device": CPU}
    parameters = dict(build_model(spec, backends=BACKENDS, max_model_len=128, **options).named_parameters())
    names = read_names(source, tensors)
    assert len(names) > 10
    for lost in names:
        save_file({name: one for name, one in tensors.items() if name != lost}, folder / NAME)
        with pytest.raises(WeightError, match=f"missing: {re.escape(lost)}"):
            load_weights(parameters, spec, folder, info=SingleRank().info)
    # A layer that shares its choice of keys may have an indexer that is not read.
    norm = min(name for name in names if name.endswith("norm.weight") and ".indexer." not in name)
    more = norm.replace("norm.weight", "other.weight")
    save_file({**tensors, more: torch.zeros(3)}, folder / NAME)
    with pytest.raises(WeightError, match=f"unexpected: {re.escape(more)}"):
        load_weights(parameters, spec, folder, info=SingleRank().info)


def test_copies_of_the_models_own_tensors_are_not_read(heads: Callable[[str], Path], tmp_path: Path) -> None:
    """By hand: DeepSeek-V3's checkpoints have the embedding and the output head a second time."""
    folder = tmp_path / "copies"
    shutil.copytree(heads("deepseek-v3"), folder)
    tensors = load_file(folder / NAME)
    path = next(name for name in tensors if name.endswith(".eh_proj.weight")).removesuffix("eh_proj.weight")
    copies = {f"{path}embed_tokens.weight": torch.zeros(3), f"{path}shared_head.head.weight": torch.zeros(3)}
    save_file({**tensors, **copies}, folder / NAME, metadata={"format": "pt"})
    assert build(folder, SingleRank()).mtp is not None


@pytest.mark.parametrize("family", ["qwen3.5", "deepseek-v3"])
def test_a_recommendation_counts_the_head(family: str, heads: Callable[[str], Path]) -> None:
    """Oracle: the head's tensors in the checkpoint, the layout of the KV cache, and by hand a state per draft row."""
    folder, question = heads(family), dict[str, Any](device_memory="2GiB", dtype="float32", tensor_parallel_size=1)
    question["workload"] = Workload(name="short", prompt=64, output=64, longest=256)
    speculation = {"method": "mtp", "num_speculative_tokens": 2, "max_step_rows": 9}
    drafting = recommend(str(folder), speculative_config=speculation, **question)
    lookup = recommend(str(folder), speculative_config='{"max_step_rows": 9}', **question)
    plain, tensors = recommend(str(folder), **question), load_file(folder / NAME)
    assert plain.fits and lookup.fits and drafting.fits
    own = sum(tensors[name].numel() * 4 for name in load_model_config(str(folder))[0].mtp_names(tensors))
    assert drafting.weight_bytes - plain.weight_bytes == own and lookup.weight_bytes == plain.weight_bytes
    effective = resolve(
        EngineConfig(model=str(folder), device="cpu", speculative_config=SpeculativeConfig.of(speculation))
    )
    layout = effective.model.kv_layout_on(1)
    assert (
        drafting.block_bytes == layout.block_bytes(drafting.block_size, 4) and lookup.block_bytes == plain.block_bytes
    )
    assert drafting.bytes_per_token > plain.bytes_per_token and drafting.activation_bytes > plain.activation_bytes
    if layout.states is not None:
        assert lookup.max_num_seqs == plain.max_num_seqs
        assert lookup.state_bytes - plain.state_bytes == 8 * layout.states.slot_bytes
    assert json.loads(drafting.options["speculative_config"]) == speculation
    assert drafting.command is not None
    words = shlex.split(drafting.command)
    assert json.loads(words[words.index("--speculative-config") + 1]) == speculation
    with pytest.raises(ConfigError, match=r"of a draft head with files of its own .* lower gpu_memory_utilization"):
        recommend(str(folder), speculative_config={"method": "eagle3", "model": "a/head"}, **question)


def test_refusals(heads: Callable[[str], Path], checkpoint: Callable[..., Path]) -> None:
    """By hand: what is asked for, why it is not there, and what to do instead."""

    def config(folder: Path, text: str, **options: Any) -> EngineConfig:
        return EngineConfig(model=str(folder), device="cpu", speculative_config=SpeculativeConfig.of(text), **options)

    folder = heads("qwen3.5")
    for text in ('{"method": "mtp"}', f'{{"method": "qwen3_5_mtp", "model": "{folder}", "num_speculative_tokens": 2}}'):
        model = resolve(config(folder, text)).model
        assert model.mtp is not None and model.beside == model.mtp.kv_kind
    assert resolve(config(folder, "{}")).model.mtp is None
    for other in ("qwen3.5", "llama"):
        with pytest.raises(ConfigError, match=r"no head for multi-token prediction .* set the method ngram or suffix"):
            resolve(config(checkpoint(other), '{"method": "mtp"}'))
    assistant = '{"method": "gemma4_mtp", "model": "google/gemma-4-31B-it-assistant"}'
    with pytest.raises(ConfigError, match=r"31B-it-assistant.*no head .* ngram or suffix without a model, leave"):
        resolve(config(checkpoint("llama"), assistant))
    with pytest.raises(ConfigError, match=r"has the model 'a/head', but with the method mtp the head is a part of"):
        resolve(config(folder, '{"method": "mtp", "model": "a/head"}'))
    with pytest.raises(ConfigError, match="has a draft head, which does not know of adapters"):
        resolve(config(folder, '{"method": "mtp"}', enable_lora=True))
