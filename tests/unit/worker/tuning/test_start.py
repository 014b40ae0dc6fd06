"""The choices of a job: one table per host, one gather, one choice on all ranks."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import msgspec
import pytest
import torch

from tests.paged_batches import make_batch
from tests.unit.models.test_models import BACKENDS
from tp_engine.attention.base import AttentionShape
from tp_engine.attention.triton_backend import TritonBackend
from tp_engine.attention.triton_mla import TritonMLABackend
from tp_engine.config import EngineConfig
from tp_engine.distributed.collectives import SingleRank
from tp_engine.errors import ConfigError
from tp_engine.job.topology import RankInfo
from tp_engine.kernels.attention.index_keys import ChosenKeys
from tp_engine.kernels.attention.latent_candidates import LATENT_DECODES, LATENT_PROMPTS
from tp_engine.kernels.attention.paged_candidates import DECODES, PROMPTS
from tp_engine.kernels.candidates import MANY, Choice, Choices, Shape, key_of
from tp_engine.kernels.kv_cache.layer_kv import LayerKv
from tp_engine.kernels.quantization.int8_products import NAME
from tp_engine.layers.quantization import dense, quantised_products
from tp_engine.model_config import load_model_config
from tp_engine.models.causal_lm import build_model
from tp_engine.weights.loader import load_weights
from tp_engine.worker.effective_config import resolve
from tp_engine.worker.tuning import start, table
from tp_engine.worker.tuning.shapes import wanted_shapes
from tp_engine.worker.tuning.start import agreed_choices, choose_kernels, find_table, pinned_table
from tp_engine.worker.tuning.table import MOST_STARTS, NOT_REACHED, RIGHT, Tried, TunedShape, TunedTable, write_pinned
from tp_engine.worker.tuning.tuner import NoRightKernelError, WantedShape

CPU = torch.device("cpu")
SHAPE: dict[str, int | str] = {"in": 64, "out": 32, "type": "bfloat16"}
KEY = key_of(NAME, SHAPE)
OWN: Choice = ((4, "panels"), (MANY, "onednn"))
PANELS: Choice = ((MANY, "panels"),)
WANTED = [WantedShape(operation=NAME, shape=SHAPE, count=3)]


def found(choice: Choice = PANELS, *, device: str = "cpu A", **verdicts: str) -> TunedTable:
    """A host's table with one shape."""
    said = {"panels": RIGHT, "onednn": RIGHT, **verdicts}
    tried = tuple(Tried(candidate=name, verdict=verdict) for name, verdict in said.items())
    one = TunedShape(operation=NAME, shape=SHAPE, extent="quick", choice=choice, default=OWN, tried=tried)
    return TunedTable(device={"device": device}, shapes=(one,))


@dataclass
class Host:
    """One rank's end of a gather of threads; the number of gathers of all ranks."""

    info: RankInfo
    barrier: threading.Barrier
    parts: list[bytes]
    gathers: list[int] = field(default_factory=list)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        self.gathers.append(self.info.rank)
        self.parts[self.info.rank] = payload
        self.barrier.wait(20)
        return list(self.parts)


def on_ranks(finds: Sequence[Callable[[], TunedTable]], *, local_world_size: int) -> tuple[list[Choices], list[int]]:
    """The choices of each rank, whose hosts have ``local_world_size`` ranks, and the gathers."""
    count = len(finds)
    barrier, parts, gathers = threading.Barrier(count), [b""] * count, list[int]()

    def rank(number: int) -> Choices:
        info = RankInfo(
            rank=number,
            world_size=count,
            local_rank=number % local_world_size,
            local_world_size=local_world_size,
        )
        host = Host(info, barrier, parts, gathers)
        return agreed_choices(host, lambda _name, body: body(), finds[number], is_finder=info.local_rank == 0)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(rank, range(count))), gathers


def never() -> TunedTable:
    raise AssertionError("only the first rank of a host looks")


def test_two_ranks_of_a_host_have_the_first_one_s_choice(caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: the table of rank 0, which alone looks; each rank takes part in one gather, found or waiting.  The log
    has a word for all choices, which is another one where a choice differs."""
    with caplog.at_level(logging.INFO):
        choices, gathers = on_ranks([found, never], local_world_size=2)
    assert [one.found for one in choices] == [{KEY: PANELS}] * 2
    assert sorted(gathers) == [0, 1]
    word = choices[0].digest
    assert len(word) == 8 and f"choices of kernels: {word} (1 of 1 not the code's own)" in caplog.text
    assert Choices().digest == "own" != Choices({KEY: ((MANY, "onednn"),)}).digest != word


@pytest.mark.parametrize(
    ("other", "expected", "said"),
    [
        (found(), {KEY: PANELS}, ""),
        (found(OWN), {KEY: PANELS}, ""),  # slower there, but right: rank 0 decides
        (found(((MANY, "onednn"),), panels="it is wrong"), {KEY: ((MANY, "onednn"),)}, "is not right on all hosts"),
        (found(device="cpu B"), {}, "unlike devices"),
        (TunedTable(device={"device": "cpu A"}, shapes=()), {}, "is not right on all hosts"),
    ],
    ids=["the same", "another choice", "wrong there", "another device", "not known there"],
)
def test_hosts_that_differ_agree(
    other: TunedTable, expected: dict[str, Choice], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: by hand; two hosts of one rank each, whose tables differ."""
    with caplog.at_level(logging.WARNING):
        choices, _ = on_ranks([found, lambda: other], local_world_size=1)
    assert [one.found for one in choices] == [expected] * 2
    assert said in caplog.text and (said or not caplog.records)


def test_hosts_without_a_common_kernel_end_the_start() -> None:
    """Oracle: each host has one right candidate, and not the same."""
    one, other = found(PANELS, onednn="it is wrong"), found(((MANY, "onednn"),), panels="it is wrong")
    with pytest.raises(NoRightKernelError, match="is right on all hosts; --tune off"):
        start.agree([one, other])


def test_what_time_has_not_reached_is_the_code_s_own_choice() -> None:
    """Oracle: the verdicts; nothing else unproven is usable."""
    one = found(OWN, panels=NOT_REACHED, onednn=NOT_REACHED).shapes[0]
    assert one.is_usable(OWN) and not found(OWN, tiles=NOT_REACHED).shapes[0].is_usable(((MANY, "tiles"),))


@dataclass(kw_only=True)
class FakeTuner:
    """Finds that C is the fastest for everything."""

    asked: list[list[WantedShape]]
    extent: str

    def tune(self, wanted: Sequence[WantedShape], before: Mapping[str, TunedShape]) -> list[TunedShape]:
        self.asked.append(list(wanted))
        made = found().shapes[0]
        return [msgspec.structs.replace(made, shape=one.shape, extent=self.extent) for one in wanted]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[WantedShape]]:
    """What the tuner is asked for, on a machine with an empty cache."""
    monkeypatch.setenv("TP_ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    return []


def look(asked: list[list[WantedShape]], extent: Any = "quick", **options: Any) -> TunedTable:
    def make(**settings: Any) -> Any:
        return FakeTuner(asked=asked, extent=settings["extent"])

    return find_table(CPU, options.pop("wanted", WANTED), extent, make_tuner=make, **options)


def test_a_second_start_finds_the_first_one_s(asked: list[list[WantedShape]]) -> None:
    """Oracle: the tuner's calls; a full search needs more than a quick one has left, and serves it too."""
    first, second = look(asked), look(asked)
    assert first == second and len(asked) == 1
    assert first.shapes[0].choice == PANELS and first.shapes[0].count == 3
    look(asked, "full")
    look(asked, "quick")
    assert len(asked) == 2
    look(asked, again=True)
    other = WantedShape(operation=NAME, shape={**SHAPE, "out": 96})
    look(asked, wanted=[*WANTED, other])
    assert asked[2:] == [WANTED, [other]]


@pytest.mark.parametrize("verdict", [NOT_REACHED, "it gave no answer for 8 s"])
def test_what_is_left_open_is_tried_by_the_next_starts(asked: list[list[WantedShape]], verdict: str) -> None:
    """Oracle: the tuner's calls: four more starts, and no later one; a settled shape is not tried again."""
    other = WantedShape(operation=NAME, shape={**SHAPE, "out": 96})

    class Reaches(FakeTuner):
        def tune(self, wanted: Sequence[WantedShape], before: Mapping[str, TunedShape]) -> list[TunedShape]:
            made = super().tune(wanted, before)
            starts = [before[one.key].starts + 1 if one.key in before else 1 for one in made]
            late = tuple(Tried(candidate=name, verdict=verdict) for name in ("panels", "onednn"))
            return [
                msgspec.structs.replace(one, starts=count, tried=late if one.shape == other.shape else one.tried)
                for one, count in zip(made, starts, strict=True)
            ]

    def start() -> TunedTable:
        make: Any = lambda **_: Reaches(asked=asked, extent="quick")  # noqa: E731
        return find_table(CPU, [*WANTED, other], "quick", make_tuner=make)

    tables = [start() for _ in range(MOST_STARTS + 2)]
    assert asked == [[*WANTED, other], *[[other]] * (MOST_STARTS - 1)]
    assert [one.shapes[1].starts for one in tables] == [1, 2, 3, 4, 5, 5, 5]


def test_what_the_key_has(asked: list[list[WantedShape]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the tuner is asked again when the device, a version or the candidates' sources differ, and when a file is
    torn or names a candidate that is gone."""
    look(asked)
    facts = start.device_facts(CPU)
    for changed in ({"device": "another"}, {"torch": "0"}):
        monkeypatch.setattr(start, "device_facts", lambda _device, changed=changed: {**facts, **changed})
        look(asked)
    monkeypatch.setattr(start, "device_facts", lambda _device: facts)
    monkeypatch.setattr(table, "sources_digest", lambda _globs: "changed")
    look(asked)
    assert len(asked) == 4
    for file in (Path(os.environ["TP_ENGINE_CACHE_DIR"]) / "tuned").glob("*.json"):
        file.write_bytes(file.read_bytes()[:-20])
    look(asked)
    look(asked)
    assert len(asked) == 5
    for file in (Path(os.environ["TP_ENGINE_CACHE_DIR"]) / "tuned").glob("*.json"):
        file.write_bytes(file.read_bytes().replace(b'"panels"', b'"of old"'))
    look(asked)
    assert len(asked) == 6


def test_a_file_in_the_place_of_the_folder(asked: list[list[WantedShape]], caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: the choice is found and not kept, and the log says so, with the remedy."""
    Path(os.environ["TP_ENGINE_CACHE_DIR"]).write_text("a file")
    assert look(asked).shapes[0].choice == PANELS
    assert "is not kept" in caplog.text and "TP_ENGINE_CACHE_DIR" in caplog.text


def test_a_pinned_file(tmp_path: Path) -> None:
    """Oracle: what was written; another device, an unknown candidate and no file are refused with a remedy."""
    path, facts = tmp_path / "tuned.json", start.device_facts(CPU)
    made = msgspec.structs.replace(found(), device=facts)
    write_pinned(str(path), made)
    assert pinned_table(str(path), CPU) == made
    assert made.choices().of(NAME, SHAPE, CPU) == PANELS
    write_pinned(str(path), msgspec.structs.replace(made, device={**facts, "device": "another"}))
    with pytest.raises(ConfigError, match=r"were proven on device another.*tp-engine tune MODEL --to FILE"):
        pinned_table(str(path), CPU)
    write_pinned(str(path), msgspec.structs.replace(made, shapes=(found(((MANY, "of old"),)).shapes[0],)))
    with pytest.raises(ConfigError, match=f"takes of old for {KEY}, but there is no such kernel"):
        pinned_table(str(path), CPU)
    for text, message in (("{", "no file of choices"), (None, "cannot be read")):
        path.write_text(text) if text else path.unlink()
        with pytest.raises(ConfigError, match=message):
            resolve(EngineConfig(device="cpu", tuned=str(path)))


def test_options() -> None:
    """Oracle: the rules; on a CPU nothing is tried unless somebody asks, and no collective runs."""
    assert resolve(EngineConfig(device="cpu")).config.tune == "off"
    assert resolve(EngineConfig(device="cpu", tune="quick")).config.tune == "quick"
    with pytest.raises(ConfigError, match=r"tuned is 'a', whose choices are taken as they are, and tune is full"):
        EngineConfig(tuned="a", tune="full")
    with pytest.raises(ConfigError, match=r"tp_invariant is set, and tune is quick; .* leave tune out"):
        EngineConfig(tp_invariant=True, tune="quick")
    effective = resolve(EngineConfig(device="cpu"))
    nobody: Any = None
    assert choose_kernels(effective, nobody, CPU, nobody) == Choices()


def test_shapes_of_a_model(checkpoint: Callable[..., Path]) -> None:
    """Oracle: by hand; two layers of a Llama, on two ranks, each linear shape once."""
    options: dict[str, Any] = {"model": str(checkpoint("llama", num_layers=2)), "device": "cpu", "dtype": "bfloat16"}
    effective = resolve(EngineConfig(**options, quantization="int8", tensor_parallel_size=2))
    wanted = wanted_shapes(effective, "cpu")
    assert sum(one.count for one in wanted) == 4 * effective.model.num_layers
    assert all(one.operation == NAME and one.shape["type"] == "bfloat16" for one in wanted)
    assert wanted_shapes(resolve(EngineConfig(**options)), "cpu") == []


def test_operations_of_a_model_on_gpus(checkpoint: Callable[..., Path]) -> None:
    """Oracle: by hand, of what a layer's operations have candidates: attention of Triton's backend, prompts of layers
    with a state, and draws of several ranks; what the tuner is told is what the backend asks for."""
    folder = str(checkpoint("lfm2", num_layers=2, layer_types=["conv", "full_attention"]))
    effective = resolve(EngineConfig(model=folder, device="cpu", dtype="bfloat16", tensor_parallel_size=2))
    config = dataclasses.replace(effective.config, attention_backend="triton")
    on_gpus = dataclasses.replace(effective, config=config)
    wanted = {one.operation: one.shape for one in wanted_shapes(on_gpus, "cuda")}
    assert wanted.keys() == {DECODES, PROMPTS, "dense_linear", "short_conv_prefill", "draw_of_shares"}
    assert wanted["draw_of_shares"] == {"ranks": 2, "width": 64} and wanted["short_conv_prefill"]["taps"] == 3
    needs = effective.attention_needs
    own = wanted[DECODES]
    asked: list[str] = []

    class Asked(Choices):
        def of(self, name: str, shape: Any, device: torch.device) -> Choice:
            asked.append(key_of(name, shape))
            return super().of(name, shape, device)

    heads: dict[str, Any] = {
        "num_heads": int(own["heads"]),
        "num_kv_heads": int(own["kv_heads"]),
        "head_dim": int(own["dim"]),
    }
    shape = AttentionShape(**heads, scale=1.0)
    batch = make_batch([(1, 5), (3, 3)], shape, block_size=needs.block_size)
    backend = TritonBackend(choices=Asked())
    backend.prepare(batch.metadata)
    cache = LayerKv(batch.kv_cache.bfloat16())
    with patch.object(backend, "_store_kv"), patch("tp_engine.attention.triton_backend._Runs", Mock()):
        backend.forward(batch.query.bfloat16(), None, cache, batch.metadata, shape)
    assert {key_of(name, wanted[name]) for name in (DECODES, PROMPTS)} <= set(asked)


def test_latent_attention_on_gpus(checkpoint: Callable[..., Path]) -> None:
    """Oracle: the shapes that the backend asks for, in a step of decodes and a chunk, and in one that attends to chosen
    keys: the tuner is told of the same."""
    effective = resolve(EngineConfig(model=str(checkpoint("deepseek-v3.2")), device="cpu", dtype="bfloat16"))
    config = dataclasses.replace(effective.config, attention_backend="triton")
    wanted = wanted_shapes(dataclasses.replace(effective, config=config), "cuda")
    told = {one.key: one.shape for one in wanted if one.operation in (LATENT_DECODES, LATENT_PROMPTS)}
    own, top_k = next(one for one in told.values() if not one["chosen"]), effective.model.index_topk or 0
    row_dim, rank, heads = (int(own[name]) for name in ("dim", "rank", "heads"))
    shape = AttentionShape(num_heads=heads, num_kv_heads=1, head_dim=row_dim, scale=1.0, value_dim=rank)
    batch = make_batch([(1, 5), (3, 3)], shape, block_size=effective.attention_needs.block_size)
    asked: list[str] = []

    def note(name: str, shape: Shape, *_: object) -> Callable[..., None]:
        asked.append(key_of(name, shape))
        return lambda *inputs: None

    kv, query = LayerKv(batch.kv_cache[:1].bfloat16()), batch.query.bfloat16()
    backend = TritonMLABackend()
    backend.prepare(batch.metadata)
    chosen = ChosenKeys(torch.zeros(len(query), top_k, dtype=torch.int32), batch.metadata.seq_lens)
    with patch("tp_engine.attention.triton_mla.chosen_run", note):
        backend.forward(query, None, kv, batch.metadata, shape)
        backend.attend_to_chosen(query, kv, chosen, batch.metadata.block_table, shape)
        backend.forward(query, None, kv, batch.metadata, shape)  # asks for nothing again
    assert len(asked) == 3 and set(asked) == told.keys()


@pytest.mark.parametrize(
    ("quantization", "family"), [("fp8", "llama"), ("int4", "llama"), ("int4", "qwen3-moe"), (None, "qwen3-moe")]
)
def test_shapes_are_those_of_the_products(
    quantization: str | None, family: str, checkpoint: Callable[..., Path]
) -> None:
    """Oracle: the shapes of the loaded weights, for a model that is quantised online, as on a GPU, and for experts."""
    spec, folder = load_model_config(str(checkpoint(family)))
    effective = resolve(EngineConfig(model=str(folder), device="cpu", dtype="bfloat16", quantization=quantization))
    asked: list[str] = []

    class Asked(Choices):
        def of(self, name: str, shape: Any, device: torch.device) -> Choice:
            asked.append(key_of(name, shape))
            return super().of(name, shape, device)

    model = build_model(
        spec, communicator=SingleRank(), dtype=torch.bfloat16, device=CPU, backends=BACKENDS, max_model_len=32,
        quantization=quantization, choices=Asked(),
    )  # fmt: skip
    load_weights(dict(model.named_parameters()), spec, folder, info=RankInfo(), load_format="dummy")
    with (
        patch.object(quantised_products, "runs_triton", lambda _type: True),
        patch.object(dense, "runs_triton", lambda _type: True),
        patch.object(quantised_products, "native_library", lambda: None),
    ):
        model.finish_loading()
    wanted = wanted_shapes(effective, "cuda")
    assert {one.key for one in wanted} == set(asked) and sum(one.count for one in wanted) == len(asked)
    has_experts = any(one.operation == "experts" for one in wanted)
    assert has_experts == (family == "qwen3-moe") and (quantization is None) == all(
        key.startswith(("experts ", "dense_linear ")) for key in asked
    )
