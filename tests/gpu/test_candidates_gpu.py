"""Engines with other kernels than the code's own choice, which a start may take: small, without a search for times.

What proves each candidate by itself is among the kernels' cases (``kernel_cases_candidates``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tp_engine import LLM, SamplingParams
from tp_engine.config import EngineConfig
from tp_engine.distributed.fused_norm import FUSED_NORMS, FlashInferFusedNorm, FusedSizes, TritonFusedNorm
from tp_engine.kernels.attention.prompt_packages import PACKAGES
from tp_engine.kernels.candidates import MANY, Choice, operation
from tp_engine.worker.effective_config import resolve
from tp_engine.worker.tuning import fused_norm, start
from tp_engine.worker.tuning.fused_norm import KeptChoice
from tp_engine.worker.tuning.shapes import wanted_shapes
from tp_engine.worker.tuning.start import device_facts
from tp_engine.worker.tuning.table import RIGHT, Tried, TunedShape, TunedTable, write_pinned
from tp_engine.worker.tuning.tuner import WantedShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Checkpoint = Callable[..., Path]
# One layer of each kind, and steps of few rows: an interpreter runs these kernels, too.
_ONE_LAYER: dict[str, Any] = {
    "num_layers": 1, "vocab_size": 101, "hidden_size": 128, "intermediate_size": 128, "num_heads": 4,
}  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {**_ONE_LAYER, "num_kv_heads": 2},
    "deepseek-v3": {"num_layers": 2, "vocab_size": 101},
    "qwen3.5": {
        "num_layers": 2, "vocab_size": 101, "intermediate_size": 64,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3-moe": {"num_layers": 2, "vocab_size": 101, "hidden_size": 128},
}  # fmt: skip
_OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 160, "max_num_seqs": 2, "max_num_batched_tokens": 144,
    "num_gpu_blocks_override": 32,
}  # fmt: skip
_PROMPTS = [[7 * place % 97 for place in range(135)], [5, 9, 13]]  # long enough for the expanded form of latents
_FEW = 16  # rows of all steps of two ranks
_GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
_PACKAGES = {one.name for one in PACKAGES}


def generated(folder: Path, prompts: list[list[int]] = _PROMPTS, **options: Any) -> list[list[int]]:
    """The token ids of an engine that is closed then."""
    with LLM(str(folder), **(_OPTIONS | options)) as llm:
        outputs = llm.generate(prompts, _GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def pinned(path: Path, folder: Path, **options: Any) -> list[str]:
    """Write a candidate of each operation of the model as a file of choices; return those that are not the code's."""
    device = torch.device("cuda", 0)
    effective = resolve(EngineConfig(model=str(folder), device="cuda", **(_OPTIONS | options)))
    shapes = [other_choice(one, device) for one in wanted_shapes(effective, "cuda")]
    write_pinned(str(path), TunedTable(device=device_facts(device), shapes=tuple(shapes)))
    return [one.operation for one in shapes if one.choice != one.default]


def other_choice(one: WantedShape, device: torch.device) -> TunedShape:
    """The last candidate for a shape that takes any number of rows, but the code's own choice and a package's: where
    plain PyTorch is the code's own, it is our kernel."""
    table = operation(one.operation)
    default: Choice = table.default(one.shape, device)
    own = {name for _, name in default}
    names = [
        candidate.name
        for candidate in table.candidates
        if candidate.name not in own | _PACKAGES
        and candidate.twin is None  # it rounds what others do not
        and (candidate.least_rows, candidate.most_rows) == (1, MANY)
        and candidate.why_not(one.shape, device) is None
    ]
    choice: Choice = ((MANY, names[-1]),) if names else default
    tried = tuple(Tried(candidate=name, verdict=RIGHT) for _, name in choice)
    return TunedShape(
        operation=one.operation, shape=one.shape, extent="quick", choice=choice, default=default, tried=tried
    )


@pytest.mark.parametrize("family", _FAMILIES)
def test_other_kernels_give_the_same_tokens(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Oracle: the same model on the CPU, in fp32; a candidate of each operation that has others."""
    folder, file = checkpoint(family, **_FAMILIES[family]), tmp_path / "tuned.json"
    taken = pinned(file, folder)
    assert taken
    on_cpu = generated(folder, device="cpu")
    assert generated(folder, device="cuda", tuned=str(file)) == on_cpu


@pytest.mark.parametrize("name", FUSED_NORMS)
def test_ranks_on_one_gpu_prove_a_sum_with_a_norm(
    name: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: one rank on the CPU, in fp32; nothing is refused.  Two ranks share the GPU: they prove the kernel of this
    row and take it for the sums of all steps, whatever its time; of other operations nothing is tried."""
    sizes = FusedSizes(rank=0, world_size=2, group=None, max_rows=_FEW, size=128, dtype=torch.float32)
    if (reason := FUSED_NORMS[name].why_not(sizes)) is not None:
        pytest.skip(reason)
    folder, prompts = checkpoint("qwen3", **_FAMILIES["qwen3"]), [[5, 9, 13], [7, 3]]
    on_cpu = generated(folder, prompts, device="cpu")
    monkeypatch.setattr(start, "wanted_shapes", lambda *_: [])
    monkeypatch.setattr(KeptChoice, "read", lambda self: msgspec.json.encode((name, _FEW)))
    refused: list[str] = []
    monkeypatch.setattr(fused_norm.logger, "warning", lambda text, *words: refused.append(text % words))
    rows: list[int] = []
    for kind in (FlashInferFusedNorm, TritonFusedNorm):

        def noted(self: Any, part: torch.Tensor, *rest: Any, run: Any = kind.__call__) -> torch.Tensor:
            rows.append(len(part))
            result: torch.Tensor = run(self, part, *rest)
            return result

        monkeypatch.setattr(kind, "__call__", noted)
    options: dict[str, Any] = {
        "max_num_batched_tokens": _FEW, "tensor_parallel_size": 2, "device_ids": "0,0", "tune": "quick",
        "all_reduce_backend": "symm_mem",
    }  # fmt: skip
    assert generated(folder, prompts, device="cuda", **options) == on_cpu
    num_proofs = rows.index(_FEW) + 2
    assert not refused and len(rows) > num_proofs, (refused, rows)
