"""Loading is complete or it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.test_model_config import llama
from tp_engine.dist.rank import RankInfo
from tp_engine.errors import ConfigError, WeightError
from tp_engine.layers.embedding import padded_vocab_size
from tp_engine.model_config import ModelConfig, load_model_config
from tp_engine.weights.dummy import HALF_WIDTH, POOL_SIZE, DummyWeights
from tp_engine.weights.layout import Layout
from tp_engine.weights.loader import load_weights
from tp_engine.weights.shard import Shard, Split, shard_of
from tp_engine.weights.transfer import StagedCopy, for_each, num_threads_for

CONFIG = ModelConfig.from_dict(
    llama(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=50,
    )
)


def full_tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    """A whole random checkpoint."""
    generator = torch.Generator().manual_seed(5)
    placements = Layout(config, rank=0, world_size=1, vocab_rows=config.vocab_size).placements
    return {placement.name: torch.randn(placement.shape, generator=generator) for placement in placements}


def empty_parameters(
    config: ModelConfig, info: RankInfo, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Parameters of this rank's shapes, filled with a value that loading must overwrite."""
    rows = padded_vocab_size(config.vocab_size, info.world_size) // info.world_size
    parameters: dict[str, torch.Tensor] = {}
    for placement in Layout(config, rank=info.rank, world_size=info.world_size, vocab_rows=rows).placements:
        shape, shard = list(placement.shape), placement.shard
        shape[shard.dim] = shard.room
        old = parameters.get(placement.parameter)
        new = torch.full(shape, torch.nan, dtype=dtype)
        parameters[placement.parameter] = new if old is None else torch.cat((old, new))
    return parameters


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_rank_gets_its_rows(world_size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Oracle: slicing the whole tensors by hand; merged parameters are q, k, v and gate, up; padding is zero."""
    whole = full_tensors(CONFIG)
    save_file(whole, tmp_path / "model.safetensors")
    whole = {name: tensor.to(dtype) for name, tensor in whole.items()}
    for rank in range(world_size):
        info = RankInfo(rank=rank, world_size=world_size)
        found = empty_parameters(CONFIG, info, dtype)
        report = load_weights(found, CONFIG, tmp_path, info=info)
        assert report.num_tensors == len(whole) and report.seconds > 0
        if world_size == 1:
            assert report.bytes_read == sum(tensor.numel() * 4 for tensor in whole.values())
        head = 4  # head_dim
        kv = rank * 2 // world_size * head if world_size > 2 else rank * 2 * head // world_size
        kv_rows = slice(kv, kv + max(1, 2 // world_size) * head)
        part = slice(rank * 16 // world_size, (rank + 1) * 16 // world_size)
        names = [f"model.layers.1.self_attn.{letter}_proj.weight" for letter in "qkv"]
        expected = torch.cat((whole[names[0]][part], whole[names[1]][kv_rows], whole[names[2]][kv_rows]))
        assert torch.equal(found["layers.1.self_attn.qkv_proj.weight"], expected)
        output = whole["model.layers.1.self_attn.o_proj.weight"][:, part]
        assert torch.equal(found["layers.1.self_attn.o_proj.weight"], output)
        inner = slice(rank * 24 // world_size, (rank + 1) * 24 // world_size)
        gate, up = (whole[f"model.layers.0.mlp.{name}_proj.weight"][inner] for name in ("gate", "up"))
        assert torch.equal(found["layers.0.mlp.gate_up_proj.weight"], torch.cat((gate, up)))
        padded = torch.zeros(padded_vocab_size(50, world_size), 16, dtype=dtype)
        padded[:50] = whole["lm_head.weight"]
        assert torch.equal(found["lm_head.weight"], padded.chunk(world_size)[rank])


def test_sharded_files_equal_a_single_file(checkpoint: Callable[..., Path]) -> None:
    """Oracle: the same checkpoint in one file."""
    config, single = load_model_config(str(checkpoint("qwen3")))
    _, several = load_model_config(str(checkpoint("qwen3", max_shard_size="50KB")))
    assert len(list(several.glob("*.safetensors"))) > 1
    info = RankInfo()
    one, other = empty_parameters(config, info), empty_parameters(config, info)
    load_weights(one, config, single, info=info)
    load_weights(other, config, several, info=info)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_several_threads_load_what_one_loads(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the direct way; here through rooms of the host, as to a GPU, into another type and with padding."""
    config, folder = load_model_config(str(checkpoint("qwen3", max_shard_size="50KB")))
    info = RankInfo(rank=1, world_size=2)
    one, other = empty_parameters(config, info, torch.bfloat16), empty_parameters(config, info, torch.bfloat16)
    direct = load_weights(one, config, folder, info=info)
    monkeypatch.setattr("tp_engine.weights.loader.num_threads_for", lambda *_: 4)
    threaded = load_weights(other, config, folder, info=info)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (threaded.bytes_read, threaded.num_tensors) == (direct.bytes_read, direct.num_tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_goes_through_a_smaller_room(dtype: torch.dtype) -> None:
    """Oracle: the tensor itself; whole, as columns of a larger one, one-dimensional, and into another type."""
    copy = StagedCopy(torch.device("cpu"), room_bytes=1000)
    for values in (torch.randn(70, 12), torch.randn(70, 50)[:, 7:19], torch.randn(2345), torch.empty(0, 4)):
        source = values.to(dtype)
        same, wider = torch.full(values.shape, torch.nan, dtype=dtype), torch.empty(values.shape)
        copy(source, same)
        copy(source, wider)
        assert torch.equal(same, source) and torch.equal(wider, source.float())


def test_threads_raise_what_went_wrong() -> None:
    """Oracle: the failing item's own error; the sum otherwise.  One thread on CPUs, a share of the cores for a GPU."""
    cpu = torch.device("cpu")
    for num_threads in (1, 3):
        assert for_each(range(10), lambda item, _copy: item, cpu, num_threads) == 45
        with pytest.raises(WeightError, match="item 5"):
            for_each(range(10), fail_at_5, cpu, num_threads)
    assert num_threads_for(cpu, 1) == 1
    assert 1 <= num_threads_for(torch.device("cuda", 0), 1) <= 8 and num_threads_for(torch.device("cuda", 0), 999) == 1


def fail_at_5(item: int, _copy: object) -> int:
    """One bad item."""
    if item == 5:
        raise WeightError("item 5")
    return item


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        ("unexpected", r"unexpected: model\.layers\.0\.self_attn\.q_proj\.bias"),
        ("shape", r"wrongly shaped: model\.norm\.weight is \(17,\) instead of \(16,\)"),
        ("type", r"model\.norm\.weight is stored as torch\.int8"),
        ("layers", r"unexpected: .*layers\.2.* and 4 more"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change: str, message: str, tmp_path: Path) -> None:
    """Oracle: the error names the tensor that was tampered with."""
    tensors = full_tensors(CONFIG)
    if change == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif change == "unexpected":
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
    elif change == "shape":
        tensors["model.norm.weight"] = torch.zeros(17)
    elif change == "type":
        tensors["model.norm.weight"] = torch.zeros(16, dtype=torch.int8)
    else:
        layer = {name: tensor for name, tensor in tensors.items() if ".layers.1." in name}
        tensors |= {name.replace(".1.", ".2."): tensor.clone() for name, tensor in layer.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=message):
        load_weights(empty_parameters(CONFIG, RankInfo()), CONFIG, tmp_path, info=RankInfo())


def test_harmless_extras_are_skipped(tmp_path: Path) -> None:
    """Oracle: loading succeeds with the explicit exceptions present."""
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file(full_tensors(CONFIG) | extra, tmp_path / "model.safetensors")
    load_weights(empty_parameters(CONFIG, RankInfo()), CONFIG, tmp_path, info=RankInfo())


def test_broken_files(tmp_path: Path) -> None:
    """Oracle: each message says what is wrong with which file."""
    parameters = empty_parameters(CONFIG, RankInfo())

    def load() -> None:
        load_weights(parameters, CONFIG, tmp_path, info=RankInfo())

    with pytest.raises(ConfigError, match=r"no \*\.safetensors.*convert"):
        load()
    (tmp_path / "a.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(WeightError, match=r"a\.safetensors can not be read"):
        load()
    save_file(full_tensors(CONFIG), tmp_path / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(16)}, tmp_path / "b.safetensors")
    with pytest.raises(WeightError, match=r"model\.norm\.weight in more than one file"):
        load()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "c.safetensors"}}))
    with pytest.raises(WeightError, match=r"names c\.safetensors, which is not there"):
        load()
    index.write_text("[]")
    with pytest.raises(WeightError, match="not an index"):
        load()
    index.write_text(json.dumps({"weight_map": dict.fromkeys(full_tensors(CONFIG), "a.safetensors")}))
    load()
    assert torch.equal(parameters["norm.weight"], load_file(tmp_path / "a.safetensors")["model.norm.weight"])


def test_dummy_parts_are_parts_of_one_tensor() -> None:
    """Oracle: the whole tensor, sliced; also where the pool is used several times."""
    shapes = {"model.w.weight": (POOL_SIZE // 1000 * 2 + 7, 1000), "model.norm.weight": (8,), "model.b.bias": (64,)}
    dummy = DummyWeights(shapes, 3, dtype=torch.float32, device=torch.device("cpu"))
    for name in ("model.w.weight", "model.b.bias"):
        shape = shapes[name]
        whole = dummy.read(name, shard_of(Split.WHOLE, shape, rank=0, world_size=1))
        assert whole.shape == shape and whole.abs().max() <= HALF_WIDTH
        for shard in (
            Shard(dim=0, start=5, size=shape[0] - 5, room=shape[0] - 5),
            Shard(dim=0, start=0, size=3, room=3),
        ):
            assert torch.equal(dummy.read(name, shard), whole[shard.start : shard.start + shard.size])
    whole = dummy.read("model.w.weight", shard_of(Split.WHOLE, shapes["model.w.weight"], rank=0, world_size=1))
    assert torch.equal(dummy.read("model.w.weight", Shard(dim=1, start=250, size=250, room=250)), whole[:, 250:500])
    assert abs(whole.std().item() - 0.02) < 1e-4 and abs(whole.mean().item()) < 1e-4
    assert torch.equal(dummy.read("model.norm.weight", Shard(dim=0, start=0, size=8, room=8)), torch.ones(8))
