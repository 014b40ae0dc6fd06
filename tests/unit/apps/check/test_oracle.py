"""The oracle runs transformers' layers one at a time: the same numbers as transformers' whole model, in less memory."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PretrainedConfig

from tests.families import FAMILIES
from tests.quantised.checkpoints import compress
from tests.quantised.formats import FORMATS
from tests.tiers import slow_but
from tests.tiny_models import make_config
from tp_engine.apps.check.oracle import Oracle, Query
from tp_engine.errors import ConfigError, WeightError

FAST = ("llama", "gemma4", "deepseek-v3", "glm-moe-dsa", "qwen3.5-moe-vision", "gpt-oss")
FAST_FORMATS = ("fp8-block", "awq", "nvfp4-modelopt", "mxfp4")
GROUP = 32
M_MMAP_THRESHOLD = -3  # of malloc.h
IDS = [5, 9, 17, 30, 8, 44, 101, 77, 3, 12, 60, 61, 62, 150, 99, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 180]


def by_transformers(folder: Path, name: str, ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities (n, vocabulary) of the whole model."""
    import transformers

    model = getattr(transformers, FAMILIES[name].model).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.tensor([list(ids)])).logits[0].log_softmax(-1)
    return found


def all_tokens(folder: Path, ids: Sequence[int]) -> Query:
    """The query for the log-probabilities of every token after each position."""
    config = json.loads((folder / "config.json").read_text())
    vocab_size = (config.get("text_config") or config)["vocab_size"]
    return Query(ids, np.tile(np.arange(vocab_size), (len(ids), 1)))


@pytest.mark.parametrize("name", slow_but(FAST, FAMILIES))
def test_layers_one_at_a_time_equal_the_whole_model(name: str, checkpoint: Callable[..., Path]) -> None:
    """Oracle: transformers' whole model, bit for bit; several sequences of different lengths at once."""
    folder = checkpoint(name)
    with Oracle(folder) as oracle:
        found = oracle.score_all([all_tokens(folder, IDS), all_tokens(folder, IDS[:7])])
    for ids, scores in zip((IDS, IDS[:7]), found, strict=True):
        expected = by_transformers(folder, name, ids).numpy()
        np.testing.assert_array_equal(scores.wanted, expected)
        np.testing.assert_array_equal(scores.best_logprobs, expected.max(-1))
        np.testing.assert_array_equal(scores.next_logprobs, expected[np.arange(len(ids) - 1), ids[1:]])


@pytest.mark.parametrize("name", slow_but(FAST_FORMATS, FORMATS))
def test_quantised_weights_are_the_numbers_that_they_stand_for(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: the float32 twin, whose numbers come from tests/quantised/numbers.py."""
    folder = checkpoint("gpt-oss", intermediate_size=288) if FORMATS[name].fused else checkpoint("qwen3")
    own, twin = tmp_path / "own", tmp_path / "twin"
    compress(folder, own, twin, name, group=GROUP if FORMATS[name].group == 128 else None)
    with Oracle(own) as oracle, Oracle(twin) as expected:
        found, known = (one.score_all([all_tokens(own, IDS)])[0].wanted for one in (oracle, expected))
        assert any(map(oracle.stored.is_quantised, oracle.stored.names))
    np.testing.assert_allclose(found, known, atol=1e-5, rtol=0)


def test_only_one_layer_is_in_memory(checkpoint: Callable[..., Path]) -> None:
    """Oracle: while a layer runs, it is the only one whose parameters have memory."""
    folder, loaded = checkpoint("llama", num_layers=6), []

    def count(_module: torch.nn.Module, _inputs: object) -> None:
        loaded.append([not next(one.parameters()).is_meta for one in oracle.layers].count(True))

    with Oracle(folder) as oracle:
        for layer in oracle.layers:
            layer.get_submodule("mlp").register_forward_pre_hook(count)
        oracle.score_all([Query(IDS)])
    assert loaded == [1] * 6


def anonymous_bytes() -> int:
    """This process's memory without files, which the kernel maps and drops as it likes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


def write_zeros(folder: Path, config: PretrainedConfig) -> None:
    """A checkpoint in bfloat16 whose zeros are a hole in the file, so that it takes no disk."""
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        tensors = LlamaForCausalLM(config).state_dict()
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.slow
def test_memory_does_not_grow_with_layers(tmp_path: Path) -> None:
    """Oracle: 80 layers, as Llama 3 70B has, are 1.3 GB in float32; from the fifth on, none adds to the memory."""
    config = make_config("llama", num_layers=80, hidden_size=512, intermediate_size=2048, tie=False)
    write_zeros(tmp_path, config)
    layer_bytes, seen = 4 * (4 * 512 * 512 + 3 * 512 * 2048), []
    # Matrices of so large a model are mapped one by one, and go back to the system at once; these would be too small.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 19)
    with Oracle(tmp_path) as oracle:
        oracle.score_all([Query(IDS)], note_layer=lambda: seen.append(anonymous_bytes()))
    assert len(seen) == 80 and max(seen) < seen[4] + 8 * layer_bytes


@pytest.mark.slow
def test_a_layer_of_70b_parameters_fits_into_24_gb(tmp_path: Path) -> None:
    """Oracle: Llama 3 70B's embedding, one of its layers and its output head, in float32, each a sixteenth of its size:
    what the whole model takes, because memory does not grow with layers (above)."""
    config = make_config(
        "llama", num_layers=1, hidden_size=2048, intermediate_size=7168, num_heads=16, num_kv_heads=2, tie=False
    )
    config.vocab_size, seen, before = 32_064, [], anonymous_bytes()
    write_zeros(tmp_path, config)
    with Oracle(tmp_path) as oracle:
        layer_bytes = 4 * sum(one.numel() for one in oracle.layers[0].parameters())
        for module in oracle.layers[0].modules():
            module.register_forward_hook(lambda *_: seen.append(anonymous_bytes() - before))
        scores = oracle.score_all([Query(IDS[:16])])[0]
    assert 16 * layer_bytes > 3.4e9 and 16 * max(seen) < 24e9
    np.testing.assert_allclose(scores.next_logprobs, -np.log(32_064), rtol=1e-5)


def test_wanted_tokens_and_replaced_states(checkpoint: Callable[..., Path]) -> None:
    """Oracle: the whole table of log-probabilities; states that are put back as they were change nothing."""
    folder = checkpoint("qwen3")
    wanted = np.array([[1, 2, 3]] * len(IDS))
    with Oracle(folder) as oracle:
        plain = oracle.score_all([all_tokens(folder, IDS)])[0]
        states: list[int] = []

        def see(index: int, found: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            states.append(index)
            return [one.clone() for one in found]

        again = oracle.score_all([Query(IDS, wanted)], see_layer=see)[0]
    assert states == [-1, 0, 1]
    np.testing.assert_array_equal(again.wanted, plain.wanted[:, 1:4])
    np.testing.assert_array_equal(again.next_logprobs, plain.next_logprobs)


def test_what_the_oracle_can_not_run_is_said(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: errors that name the architecture, and the missing weight."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with Oracle(folder) as oracle, pytest.raises(WeightError, match=r"layers\.1: mlp\.up_proj\.weight"):
        oracle.score_all([Query(IDS)])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"]}))
    with pytest.raises(ConfigError, match="NoSuchForCausalLM"):
        Oracle(folder)
    for number in ([1], 1.0, None, "much"):
        (folder / "config.json").write_text(json.dumps({**config, "rope_theta": {"__float__": number}}))
        with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
            Oracle(folder)
