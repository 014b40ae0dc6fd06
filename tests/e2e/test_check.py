"""``tp-engine check`` finds each of fifteen planted faults and says where it is, and finds none in right set-ups.

Most faults are planted in a copy of the checkpoint that only the engine reads; the oracle reads the original
(``--reference``).  The others are planted in this process.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.chat_templates import QWEN_LIKE
from tests.quantised.checkpoints import compress
from tests.quantised.formats import FORMATS
from tests.tiers import slow_but
from tp_engine.api.llm import LLM
from tp_engine.api.openai.chat.options import ChatOptions
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.apps.check import golden
from tp_engine.apps.check.behaviour import timed
from tp_engine.apps.check.engine_check import EngineCheck
from tp_engine.apps.check.engine_subject import EngineSubject
from tp_engine.apps.check.report import CheckFinding, CheckReport, CheckStatus
from tp_engine.apps.check.set_ups import OTHERS
from tp_engine.attention.base import prepare_groups
from tp_engine.cli.main import main
from tp_engine.config import DEMO_MODEL
from tp_engine.engine.tokenizer import load_tokenizer
from tp_engine.layers.experts import Router
from tp_engine.worker.model_runner import ModelRunner

pytestmark = pytest.mark.usefixtures("warm_children")

VOCAB_SIZE, GROUP = 203, 32
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 200, "num_gpu_blocks_override": 256}


def check(folder: Path, reference: Path | None = None, **options: Any) -> CheckReport:
    """The report of a quick check of the engine on ``folder``."""
    given = {"model": str(folder), **OPTIONS, **options}
    report, _ = EngineCheck(options=given, quick=True, reference=None if reference is None else str(reference)).run()
    return report


def wrong(report: CheckReport) -> dict[str, CheckFinding]:
    """The findings that are not right, by name."""
    bad = (CheckStatus.WRONG, CheckStatus.NOT_CHECKED)
    return {one.name: one for one in report.findings if one.status in bad}


Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def copy_of(folder: Path, target: Path, edit: Edit) -> Path:
    """A copy of a checkpoint whose config.json and tensors ``edit`` has changed."""
    shutil.copytree(folder, target)
    config, tensors = json.loads((target / "config.json").read_text()), load_file(target / "model.safetensors")
    edit(config, tensors)
    (target / "config.json").write_text(json.dumps(config))
    save_file({name: one.contiguous() for name, one in tensors.items()}, target / "model.safetensors")
    return target


def set_key(*path: str, value: Any) -> Edit:
    def edit(config: dict[str, Any], _tensors: dict[str, torch.Tensor]) -> None:
        for key in path[:-1]:
            config = config[key]
        assert path[-1] in config and config[path[-1]] != value
        config[path[-1]] = value

    return edit


def change(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edit(_config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = how(tensors[name].clone())

    return edit


def exchange_experts(_config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for part in ("gate_proj", "up_proj", "down_proj"):
        names = [f"model.layers.0.mlp.experts.{number}.{part}.weight" for number in (0, 1)]
        tensors[names[0]], tensors[names[1]] = tensors[names[1]].clone(), tensors[names[0]].clone()


def tie_head(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["tie_word_embeddings"] = True
    del tensors["lm_head.weight"]


def roll_last_shard(weight: torch.Tensor) -> torch.Tensor:
    """The rows of rank 1 of 2, read from one row further on."""
    half = len(weight) // 2
    weight[half:] = weight[half:].roll(-1, 0)
    return weight


def corrupt_byte(weight: torch.Tensor) -> torch.Tensor:
    """The highest byte of one number, which holds its exponent."""
    weight.view(torch.uint8).view(-1)[4 * 77 + 3] ^= 0x04
    return weight


# Fault -> family, settings of the checkpoint, the edit, options of the engine, what is wrong, words of the place.
IN_FILES: dict[str, tuple[str, dict[str, Any], Edit, dict[str, Any], str, tuple[str, ...]]] = {
    "rope factor": (
        "qwen2", {}, set_key("rope_parameters", "factor", value=2.0), {}, "hidden states", ("layer 0", "attention")
    ),
    "experts exchanged": ("qwen3-moe", {}, exchange_experts, {}, "hidden states", ("layer 0", "experts")),
    "scale transposed": (
        "fp8-block", {}, change("model.layers.1.self_attn.q_proj.weight_scale_inv", lambda scale: scale.T), {},
        "linear layers", ("layer 1", "self_attn.q_proj", "rank 0"),
    ),
    "shard off by one row": (
        "llama", {}, change("model.layers.1.mlp.up_proj.weight", roll_last_shard), {"tensor_parallel_size": 2},
        "linear layers", ("layer 1", "mlp.up_proj", "rank 1"),
    ),
    "norm epsilon": ("llama", {}, set_key("rms_norm_eps", value=1e-3), {}, "hidden states", ("layer 0", "attention")),
    "tied head": (
        "llama", {"tie": False}, tie_head, {}, "norm and output head", ("output head (tied or not)",)
    ),
    "window off by one": (
        "mistral", {}, set_key("sliding_window", value=19), {}, "hidden states",
        ("layer 0", "attention", "position 19 "),
    ),
    "soft cap": (
        "gemma2", {}, set_key("attn_logit_softcapping", value=3.5), {}, "hidden states", ("layer 0", "attention")
    ),
    "dropped bias": (
        "qwen2", {}, change("model.layers.0.self_attn.v_proj.bias", torch.zeros_like), {}, "linear layers",
        ("layer 0", "self_attn.v_proj"),
    ),
    "corrupt byte": (
        "llama", {}, change("model.layers.1.mlp.down_proj.weight", corrupt_byte), {}, "linear layers",
        ("layer 1", "mlp.down_proj"),
    ),
    "EOS missing": ("llama", {}, set_key("eos_token_id", value=7), {}, "end of sequence", ("eos_token_id",)),
}  # fmt: skip


@pytest.fixture
def original(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """``original(family or format, ...)`` -> a checkpoint."""

    def get(name: str, **settings: Any) -> Path:
        if name not in FORMATS:
            return checkpoint(name, vocab_size=VOCAB_SIZE, **settings)
        group = GROUP if FORMATS[name].group == 128 else None
        compress(checkpoint("qwen3", vocab_size=VOCAB_SIZE), tmp_path / "own", tmp_path / "twin", name, group=group)
        return tmp_path / "own"

    return get


@pytest.mark.parametrize("fault", slow_but(["window off by one", "scale transposed"], IN_FILES))
def test_a_fault_in_the_files_is_found_and_named(fault: str, original: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: transformers on the original; the place is where the copy was changed."""
    name, settings, edit, options, finding, words = IN_FILES[fault]
    folder = original(name, **settings)
    broken = copy_of(folder, tmp_path / "broken", edit)
    generation = broken / "generation_config.json"
    if fault == "EOS missing" and generation.exists():
        generation.write_text(json.dumps({**json.loads(generation.read_text()), "eos_token_id": 7}))
    report = check(broken, folder, **options)
    found = wrong(report)
    assert report.exit_code == 1 and finding in found, report.as_text()
    assert all(word in f"{found[finding].place} " for word in words), report.as_text()
    assert found[finding].meaning and found[finding].remedy


def test_a_template_without_a_blank_is_found(tmp_path: Path) -> None:
    """Oracle: transformers' apply_chat_template on the demo model's own template."""
    broken = tmp_path / "broken"
    shutil.copytree(DEMO_MODEL, broken)
    path = next(one for one in (broken / "chat_template.jinja", broken / "tokenizer_config.json") if one.exists())
    text = path.read_text()
    changed = text.replace("'user\\n'", "'user'").replace("+ '\\n' +", "+") if path.suffix == ".jinja" else text
    if changed == text:
        changed = text.replace("\\n", "", 1)
    assert changed != text
    path.write_text(changed)
    found = wrong(check(broken, Path(DEMO_MODEL), max_model_len=400, num_gpu_blocks_override=400))
    assert "chat template" in found and "position" in found["chat template"].place


@pytest.mark.parametrize(
    ("parser", "status", "said"),
    [
        ("hermes", CheckStatus.RIGHT, "its result is shown"),
        ("pythonic", CheckStatus.WRONG, "the parser finds []"),
    ],
)
@pytest.mark.slow
def test_the_tool_round_trip_runs_where_the_template_has_tools(
    parser: str, status: CheckStatus, said: str, tmp_path: Path
) -> None:
    """Oracle: transformers' apply_chat_template with tools, a call and its result; the call, read back."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "chat_template.jinja").write_text(QWEN_LIKE)
    with LLM(str(folder), **{**OPTIONS, "max_model_len": 1024}) as llm:
        llm.input_processor.chat = ChatFormat(llm.get_tokenizer(), ChatOptions(tool_call_parser=parser))
        [found] = timed("tool round trip", EngineSubject(llm).check_tools, load_tokenizer(str(folder)))
    assert found.status is status and said in found.detail
    assert (found.place == "tool-call parser") == (status is CheckStatus.WRONG)


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[ModelRunner]:
    """The runners of this process, the latest one last."""
    made: list[ModelRunner] = []
    init = ModelRunner.__init__

    def noted(self: ModelRunner, **parts: Any) -> None:
        init(self, **parts)
        made.append(self)

    monkeypatch.setattr(ModelRunner, "__init__", noted)
    return made


@pytest.mark.slow
def test_mixed_up_keys_and_values_are_found(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: transformers; requests that run alone are right, and batches are not."""

    def mixed(backends: Any, metadata: Any) -> None:
        for group in metadata:
            if len(group.block_table) > 1:
                group.block_table[[0, 1]] = group.block_table[[1, 0]].clone()
        prepare_groups(backends, metadata)

    monkeypatch.setattr("tp_engine.worker.model_runner.prepare_groups", mixed)
    report = check(checkpoint("llama", vocab_size=VOCAB_SIZE), enforce_eager=True)
    found = wrong(report)
    assert "in a batch" in found and "alone" not in found and "hidden states" not in found, report.as_text()
    assert "prompt" in found["in a batch"].place


@pytest.mark.slow
def test_a_stale_prefix_block_is_found(checkpoint: Callable[..., Path], runners: list[ModelRunner]) -> None:
    """Oracle: transformers; only requests with a cached prefix are wrong."""

    def spoil(text: str) -> None:
        if text == "cached prefix":
            for memory in runners[-1].kv_memory:
                memory.zero_()

    options = {"model": str(checkpoint("llama", vocab_size=VOCAB_SIZE)), **OPTIONS}
    report, _ = EngineCheck(options=options, quick=True, note=spoil).run()
    assert set(wrong(report)) == {"cached prefix"}, report.as_text()


@pytest.mark.slow
def test_a_router_in_another_type_is_found(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: transformers, which routes in float32 whatever the model's type is."""
    init = Router.__init__

    def narrow(self: Router, spec: Any, *arguments: Any, **named: Any) -> None:
        assert spec.routes_in_float32
        init(self, replace(spec, routes_in_float32=False), *arguments, **named)

    folder = checkpoint("deepseek-v3", vocab_size=VOCAB_SIZE)
    assert not wrong(check(folder, dtype="bfloat16"))
    monkeypatch.setattr(Router, "__init__", narrow)
    found = wrong(check(folder, dtype="bfloat16"))
    assert "mlp.gate" in found["linear layers"].place


# Family or format, type, ranks; the options beside them.
RIGHT: list[tuple[str, str, int, dict[str, Any]]] = [
    ("llama", "float32", 1, {}),
    ("llama", "bfloat16", 2, {}),
    ("mistral", "bfloat16", 1, {}),
    ("qwen2", "float32", 2, {}),
    ("qwen3", "float16", 1, {}),
    ("phi4-mini", "float32", 1, {}),
    ("gemma2", "bfloat16", 1, {}),
    ("gemma3-vision", "float32", 1, {}),
    ("gemma4", "bfloat16", 1, {}),
    ("gemma4-experts", "float32", 2, {}),
    ("olmo2", "bfloat16", 1, {}),
    ("granite", "float32", 1, {}),
    ("glm4", "bfloat16", 1, {}),
    ("cohere2", "float32", 1, {}),
    ("qwen3-moe", "float32", 2, {}),
    ("mixtral", "bfloat16", 1, {}),
    ("deepseek-v3", "float32", 2, {}),
    ("deepseek-v2", "bfloat16", 1, {}),
    ("gpt-oss", "float32", 1, {}),
    ("qwen3-next", "float32", 1, {}),
    ("qwen3.5", "bfloat16", 1, {}),
    ("nemotron-h", "float32", 2, {}),
    ("granite4", "float32", 1, {}),
    ("fp8-block", "bfloat16", 2, {}),
    ("fp8-channel", "float32", 1, {}),
    ("modelopt-fp8", "bfloat16", 1, {}),
    ("awq", "bfloat16", 1, {}),
    ("gptq", "float32", 2, {}),
    ("pack-quantized", "bfloat16", 1, {}),
    ("nvfp4-modelopt", "bfloat16", 1, {}),
    ("nvfp4-modelopt", "bfloat16", 1, {"round_activations": True}),
    ("quark-mxfp4", "float32", 2, {"round_activations": True}),
    ("mxfp8-quantized", "bfloat16", 1, {"round_activations": True}),
    ("mxfp4-pack-quantized", "float32", 1, {}),
    ("w8a8-int8", "bfloat16", 1, {}),
    ("llama", "bfloat16", 1, {"quantization": "int8"}),
    ("llama", "bfloat16", 1, {"quantization": "int4"}),
    ("llama", "bfloat16", 1, {"quantization": "fp8"}),
    ("qwen3", "bfloat16", 1, {"kv_cache_dtype": "fp8"}),
    ("qwen3", "float32", 1, {"kv_cache_dtype": "int8"}),
]


@pytest.mark.parametrize(
    ("name", "dtype", "ranks", "more"),
    slow_but(RIGHT[:1], RIGHT),
    ids=lambda value: "-".join(f"{key}={one}" for key, one in value.items()) if isinstance(value, dict) else str(value),
)
def test_a_right_set_up_gives_no_alarm(
    name: str, dtype: str, ranks: int, more: dict[str, Any], original: Callable[..., Path]
) -> None:
    """Oracle: transformers, in float32 and with the engine's rounding."""
    report = check(original(name), dtype=dtype, tensor_parallel_size=ranks, **more)
    assert report.exit_code == 0, report.as_text()


@pytest.mark.slow
def test_a_full_check_runs_each_set_up(checkpoint: Callable[..., Path]) -> None:
    """Oracle: transformers in float32; each set-up came about, in engines of their own and on one rank and two."""
    options = {"model": str(checkpoint("llama", vocab_size=VOCAB_SIZE)), **OPTIONS, "tensor_parallel_size": 2}
    report, _ = EngineCheck(options=options).run()
    found = {one.name: one.status for one in report.findings}
    assert report.exit_code == 0 and {found[name] for name in OTHERS} == {CheckStatus.RIGHT}, report.as_text()


@pytest.fixture
def tiny(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", vocab_size=VOCAB_SIZE)


def command(folder: Path, *more: str) -> int:
    options = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "200", "--quick"]
    return main(["check", str(folder), *options, "--num-gpu-blocks-override", "256", *more])


@pytest.mark.slow
def test_the_command_writes_a_golden_file_and_compares_with_it(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the same machine's answers, then those of a model with one corrupt byte."""
    record, junit = tmp_path / "golden.json", tmp_path / "results" / "new" / "junit.xml"  # folders are made
    assert command(tiny, "--record", str(record), "--junit", str(junit)) == 0
    assert {"torch", "cpu"} <= json.loads(record.read_text())["environment"].keys()
    suite = ElementTree.parse(junit).getroot()[0]
    assert suite.get("failures") == suite.get("errors") == "0" and int(suite.get("tests", "0")) > 8
    capsys.readouterr()
    assert command(tiny, "--against", str(record), "--json") == 0
    found = {one["name"]: one["status"] for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["golden"] == found["golden files"] == "right"
    broken = copy_of(tiny, tmp_path / "broken", change("model.layers.1.mlp.down_proj.weight", corrupt_byte))
    assert command(broken, "--against", str(record), "--json") == 1
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["golden"]["status"] == found["golden files"]["status"] == "wrong"
    assert found["golden files"]["place"] == "model.safetensors" and "prompt" in found["golden"]["place"]


@pytest.mark.slow
def test_bisect_names_the_option(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: a fault that only the prefix cache has."""
    from tp_engine.apps.check import observed

    ask = observed._ask

    def spoilt(llm: Any, prompts: Any, max_tokens: int) -> Any:
        answers = ask(llm, prompts, max_tokens)
        return [replace(one, logprobs=one.logprobs - (0.5 if one.num_cached_tokens else 0)) for one in answers]

    monkeypatch.setattr(observed, "_ask", spoilt)
    assert command(tiny, "--bisect") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "with --no-enable-prefix-caching these are right, or do not occur: cached prefix" in said
    assert "--enforce-eager changes nothing" in said


def test_what_can_not_be_checked_has_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the exit code and the reason."""
    bad = tmp_path / "golden.json"
    bad.write_text('{"format": 1}')
    assert command(Path(DEMO_MODEL), "--against", str(bad)) == 2
    assert "golden" in capsys.readouterr().err
    assert command(tmp_path / "nothing") == 2
    assert command(Path(DEMO_MODEL), "--junit", str(bad / "file.xml")) == 2
    assert "its folder cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_a_device_that_the_oracle_does_not_have_is_said_first(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: exit code 2 and the remedy, before an engine starts; a server that is not there is not asked."""
    for more in ([], ["--url", "http://127.0.0.1:9"]):
        assert main(["check", str(DEMO_MODEL), "--oracle-device", device, *more]) == 2
        said = capsys.readouterr().err
        assert device in said and "such as cuda:0" in said


def test_golden_answers_may_differ_by_a_near_tie(tiny: Path, tmp_path: Path) -> None:
    """Oracle: two tokens whose log-probabilities are closer than the bound are both right."""
    import numpy as np

    from tp_engine.apps.check.answers import Answer
    from tp_engine.apps.check.prompts import CheckPrompt

    def answer(token: int, other: int, gap: float) -> Answer:
        alternatives, logprobs = np.array([[1, 9], [token, other], [-1, -1]]), np.zeros((3, 2), np.float32)
        logprobs[1] = -1.0, -1.0 - gap
        return Answer(CheckPrompt("p", (5, 1)), (token,), alternatives, logprobs)

    path = tmp_path / "golden.json"
    path.write_text(golden.golden_content("m", tiny, [answer(3, 4, 0.0)], bound=0.01, environment={}, options={}))
    for gap, expected in ((0.005, CheckStatus.RIGHT), (0.5, CheckStatus.WRONG)):
        found = list(golden.compare(golden.read_golden(path), tiny, [answer(4, 3, gap)], bound=0.01, environment={}))
        assert [one.status for one in found] == [CheckStatus.RIGHT, expected]
