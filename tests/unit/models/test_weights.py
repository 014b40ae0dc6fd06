"""Loading is complete or it fails."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.model_config.test_model_config import llama
from tests.unit.models.test_shard import Somewhere, sources
from tp_engine.apps.check import stored
from tp_engine.apps.check.stored import StoredWeights
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.errors import ConfigError, WeightError
from tp_engine.job.topology import RankInfo
from tp_engine.model_config import load_model_config, padded_vocab_size, read_model
from tp_engine.model_config.names import CheckpointNames
from tp_engine.model_config.spec import ModelSpec
from tp_engine.models.causal_lm import build_model
from tp_engine.weights import checkpoint
from tp_engine.weights.checkpoint import Checkpoint
from tp_engine.weights.dummy import HALF_WIDTH, POOL_SIZE, DummyWeights
from tp_engine.weights.loader import load_weights
from tp_engine.weights.source import Source, Span, set_sources, whole
from tp_engine.weights.transfer import StagedCopy, for_each, num_threads_for

CONFIG = read_model(
    llama(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=50,
    )
)


def full_tensors(config: ModelSpec) -> dict[str, torch.Tensor]:
    """A whole random checkpoint."""
    generator = torch.Generator().manual_seed(5)
    shapes = {source.name: source.shape for found in sources(config, 0, 1).values() for source in found}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def empty_parameters(
    config: ModelSpec, info: RankInfo, dtype: torch.dtype = torch.float32
) -> dict[str, torch.nn.Parameter]:
    """Parameters of this rank's shapes, filled with a value that loading must overwrite."""
    model = build_model(
        config,
        communicator=Somewhere(info.rank, info.world_size),  # type: ignore[arg-type]
        dtype=dtype,
        device=torch.device("cpu"),
        backends=[TorchBackend()] * len(config.kv_layout.groups),
        max_model_len=16,
    )
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.fill_(torch.nan)
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


def of_experts(hidden_size: int, inner_size: int) -> ModelSpec:
    """The text part of a Qwen3-VL-MoE with 3 experts."""
    text = {
        "model_type": "qwen3_vl_moe_text",
        "hidden_size": hidden_size,
        "intermediate_size": 8,
        "moe_intermediate_size": inner_size,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "vocab_size": 20,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }
    return read_model(
        {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "text_config": text}
    )


@pytest.mark.parametrize(("hidden_size", "inner_size"), [(16, 8), (16, 16), (16, 24)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_square_stacks_of_experts_are_told_apart(
    hidden_size: int, inner_size: int, is_transposed: bool, tmp_path: Path
) -> None:
    """Oracle: each expert's gate, up and down: where one of the two stacks is square, the other has the order.  Stacks
    of both orders in one layer are refused."""
    config, info = of_experts(hidden_size, inner_size), RankInfo()
    rest = {name: one for name, one in full_tensors(config).items() if ".experts." not in name}
    torch.manual_seed(1)
    gates, downs = torch.randn(2, 3, 2 * inner_size, hidden_size), torch.randn(2, 3, hidden_size, inner_size)
    stacks = {}
    for layer in range(2):
        stored = (gates[layer].mT, downs[layer].mT) if is_transposed else (gates[layer], downs[layer])
        path = f"model.layers.{layer}.mlp.experts"
        stacks[f"{path}.gate_up_proj"], stacks[f"{path}.down_proj"] = (one.contiguous() for one in stored)
    save_file(rest | stacks, tmp_path / "model.safetensors")
    found = empty_parameters(config, info)
    load_weights(found, config, tmp_path, info=info)
    for layer in range(2):
        assert torch.equal(found[f"layers.{layer}.mlp.experts.gate_up"], gates[layer])
        assert torch.equal(found[f"layers.{layer}.mlp.experts.down"], downs[layer])
    if inner_size != 24:  # one stack is square, and goes with both orders of the other
        return
    name = "model.layers.0.mlp.experts.down_proj"
    stacks[name] = stacks[name].mT.contiguous()
    save_file(rest | stacks, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match="wrongly shaped"):
        load_weights(found, config, tmp_path, info=info)


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
    """Oracle: the direct path; here through staging buffers of the host, as to a GPU, into another type and with
    padding."""
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


def test_copies_wait_for_memory_that_kernels_may_still_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the side stream's orders, recorded by a stand-in: first of all it waits for the default stream."""
    orders: list[str] = []
    stream = SimpleNamespace(wait_stream=orders.append, synchronize=lambda: orders.append("synchronise"))
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: plain(*sizes, **options))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"default of {device}")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    target = torch.zeros(4)
    StagedCopy(torch.device("cuda", 1), room_bytes=1000)(torch.ones(4), target)
    assert orders == ["default of cuda:1", "synchronise"] and torch.equal(target, torch.ones(4))


def test_threads_raise_what_went_wrong() -> None:
    """Oracle: the failing item's own error, otherwise the sum.  One thread on CPUs, a share of the cores for a GPU."""
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
    """Oracle: the error names the altered tensor."""
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


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_tensors_of_multi_token_prediction_are_not_read(prefix: str, tmp_path: Path) -> None:
    """Oracle: names of released checkpoints: Qwen3.5, ERNIE 4.5, DeepSeek-V3, GLM-4.5; the report names them."""
    spec = dataclasses.replace(
        CONFIG, names=CheckpointNames(spellings=(("model.", "lm_head."), ("model.language_model.", "lm_head.")))
    )
    tensors = {name.replace("model.", prefix): tensor for name, tensor in full_tensors(CONFIG).items()}
    layer = {name.replace(".1.", ".2."): one.clone() for name, one in tensors.items() if ".layers.1." in name}
    own = ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "model.mtp_block.0.mlp.up_proj.weight")
    extra = {name: torch.zeros(2) for name in (*own, "model.mtp_emb_norm.0.weight", f"{prefix}layers.2.eh_proj.weight")}
    save_file(tensors | layer | extra, tmp_path / "model.safetensors")
    report = load_weights(empty_parameters(spec, RankInfo()), spec, tmp_path, info=RankInfo())
    assert report.mtp_tensors == tuple(sorted({*layer, *extra})) and report.num_tensors == len(tensors)


@pytest.mark.parametrize(
    "reads", [lambda folder: Checkpoint(folder).__enter__(), StoredWeights], ids=["engine", "oracle"]
)
def test_a_file_that_can_not_be_mapped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reads: Callable[[Path], object]
) -> None:
    """Oracle: the file's name; safetensors raises RuntimeError for one that is larger than memory may map."""

    def no_room(*_arguments: object, **_named: object) -> None:
        raise RuntimeError("unable to mmap 141 GB")

    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    for module in (checkpoint, stored):
        monkeypatch.setattr(module, "safe_open", no_room)
    with pytest.raises(WeightError, match=r"model\.safetensors cannot be read as safetensors: unable to mmap"):
        reads(tmp_path)


def test_broken_files(tmp_path: Path) -> None:
    """Oracle: each message names the file and its fault."""
    parameters = empty_parameters(CONFIG, RankInfo())

    def load() -> None:
        load_weights(parameters, CONFIG, tmp_path, info=RankInfo())

    with pytest.raises(ConfigError, match=r"no \*\.safetensors.*convert"):
        load()
    (tmp_path / "a.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(WeightError, match=r"a\.safetensors cannot be read"):
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
    named = dict.fromkeys(full_tensors(CONFIG), "a.safetensors") | {"model.norm.weight": "b.safetensors"}
    index.write_text(json.dumps({"weight_map": named}))
    load()  # of two copies the one that the index names
    assert not parameters["norm.weight"].any()


def test_values_are_decoded_on_their_way(tmp_path: Path) -> None:
    """Oracle: the same by hand: a transposed part of a tensor of three dimensions, with zeros beside it; a whole
    one."""
    stored = torch.arange(2 * 6 * 4.0).view(2, 6, 4)
    codes = torch.randint(0, 255, (3, 5), dtype=torch.uint8)
    names = ("model.embed_tokens.weight", "model.codes")
    save_file({names[0]: stored, names[1]: codes}, tmp_path / "model.safetensors")
    experts = torch.nn.Parameter(torch.full((2, 4, 5), torch.nan), requires_grad=False)
    source = Source(
        name=names[0],
        shape=(2, 6, 4),
        taken=(Span(0, 2), Span(1, 3), Span(0, 4)),
        target=(Span(0, 2), Span(0, 4), Span(2, 3)),
        decode=lambda values: values.transpose(1, 2),
    )
    set_sources(experts, (source,))
    bytes_ = torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.uint8), requires_grad=False)
    set_sources(bytes_, (Source(name=names[1], shape=(3, 5), taken=whole((3, 5)), target=whole((3, 5))),))
    load_weights({"experts": experts, "codes": bytes_}, CONFIG, tmp_path, info=RankInfo())
    assert torch.equal(experts[:, :, 2:], stored[:, 1:4].transpose(1, 2)) and not experts[:, :, :2].any()
    assert torch.equal(bytes_, codes)
    set_sources(experts, (Source(name=names[1], shape=(3, 5), taken=whole((3, 5)), target=whole((3, 5))),))
    with pytest.raises(
        WeightError, match=r"model\.codes is stored as torch\.uint8, which cannot become torch\.float32"
    ):
        load_weights({"experts": experts}, CONFIG, tmp_path, info=RankInfo())


def test_the_first_spelling_with_an_embedding_is_taken(tmp_path: Path) -> None:
    """Oracle: the same tensors in the usual spelling; tensors of other parts are skipped, all others are refused."""
    names = CheckpointNames(
        spellings=(("model.", "lm_head."), ("model.language_model.", "text.lm_head.")), skipped=("model.visual.",)
    )
    spec = dataclasses.replace(CONFIG, names=names)
    tensors = full_tensors(CONFIG)
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else f"text.{name}": value
        for name, value in tensors.items()
    }
    folders = (tmp_path / "usual", tmp_path / "own")
    for folder, content in zip(folders, (tensors, renamed), strict=True):
        folder.mkdir()
        save_file(content | {"model.visual.patch": torch.zeros(3)}, folder / "model.safetensors")
    one, other = empty_parameters(spec, RankInfo()), empty_parameters(spec, RankInfo())
    load_weights(one, spec, folders[0], info=RankInfo())
    load_weights(other, spec, folders[1], info=RankInfo())
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(WeightError, match=r"unexpected: model\.visual\.patch"):
        load_weights(one, CONFIG, folders[0], info=RankInfo())


def test_dummy_parts_are_parts_of_one_tensor() -> None:
    """Oracle: the whole tensor, sliced; also if the pool is used several times, and if a row is larger than the
    pool."""
    shapes = {
        "model.w.weight": (POOL_SIZE // 1000 * 2 + 7, 1000),
        "model.b.bias": (64,),
        "model.experts": (2, POOL_SIZE // 1000 + 9, 1000),
    }

    def source(name: str, *taken: Span, init: float | None = None) -> Source:
        return Source(name=name, shape=shapes[name], taken=taken, target=taken, init=init)

    wholes = {name: source(name, *whole(shape)) for name, shape in shapes.items()}
    dummy = DummyWeights(wholes.values(), 3, dtype=torch.float32, device=torch.device("cpu"))
    for name, shape in shapes.items():
        all_of_it = dummy.read(name, wholes[name])
        assert all_of_it.shape == shape and all_of_it.abs().max() <= HALF_WIDTH
        for first in (Span(1, shape[0] - 1), Span(0, 1)):
            found = dummy.read(name, source(name, first, *whole(shape[1:])))
            assert torch.equal(found, all_of_it[first.start : first.start + first.size])
    weight = dummy.read("model.w.weight", wholes["model.w.weight"])
    rows, _ = whole(shapes["model.w.weight"])
    assert torch.equal(dummy.read("model.w.weight", source("model.w.weight", rows, Span(250, 250))), weight[:, 250:500])
    assert abs(weight.std().item() - 0.02) < 1e-4 and abs(weight.mean().item()) < 1e-4
    assert torch.equal(dummy.read("model.b.bias", source("model.b.bias", Span(0, 8), init=1.0)), torch.ones(8))
