"""Options of vLLM and SGLang: accepted with a line in the log, translated, or refused with the truth."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tp_engine.apps.batch.config import BatchConfig
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.options import Options, parse_options
from tp_engine.options.flags import make_parser
from tp_engine.options.foreign import foreign_options, foreign_values
from tp_engine.options.intake import flag_of, take_options
from tp_engine.requests.structured_outputs import StructuredOutputsDefaults
from tp_engine.server.config import ServerConfig

OPTIONS, VALUES = foreign_options(), foreign_values()
SERVE: dict[str, type[Any]] = {"engine": EngineConfig, "server": ServerConfig}
BATCH: dict[str, type[Any]] = {"engine": EngineConfig, "batch": BatchConfig}
FLAG = re.compile(r"--[a-z][a-z-]+")
OF_TORCHRUN = {"--nnodes", "--node-rank"}


def parse(line: str) -> Options:
    options = parse_options("serve", "", SERVE, shlex.split(line))
    for name, kind in SERVE.items():
        options.build(name, kind)
    return options


def given(line: str) -> dict[str, Any]:
    return {name: value for table in parse(line).given.values() for name, value in table.items()}


def own_spellings(kind: type[Any]) -> set[str]:
    """The names of a configuration's options in Python, with those of other spellings of their flags."""
    found = set()
    for spec in dataclasses.fields(kind):
        flags = (*spec.metadata.get("flags", ()), *spec.metadata.get("negative_flags", ()))
        found |= {spec.name, *(flag.removeprefix("--").replace("-", "_") for flag in flags if flag.startswith("--"))}
    return found


def own_flags() -> set[str]:
    """Every flag of the launchers that ``--help`` shows."""
    actions = [action for tables in (SERVE, BATCH) for action in make_parser("serve", "", tables)._actions]
    return {flag for action in actions if action.help != argparse.SUPPRESS for flag in action.option_strings}


def test_no_foreign_option_is_an_option_of_this_engine() -> None:
    """Oracle: the fields and their other spellings; an option of the server alone may be accepted elsewhere."""
    names = {name for name in OPTIONS if "." not in name}
    assert names & own_spellings(EngineConfig) == set()
    of_servers = names & (own_spellings(ServerConfig) | own_spellings(BatchConfig))
    assert {name for name in of_servers if OPTIONS[name].is_refused or OPTIONS[name].become} == set()


def test_every_remedy_exists() -> None:
    """Oracle: the launchers' own flags, for each flag that a reason or a remedy names."""
    reasons = [row.reason for row in OPTIONS.values()]
    reasons += [value.reason for values in VALUES.values() for value in values]
    named = {flag for reason in reasons for flag in FLAG.findall(reason)}
    assert named - own_flags() - OF_TORCHRUN == set()
    assert all(row.reason for row in OPTIONS.values() if row.is_refused or row.become is None)


def test_every_value_stands_for_one_that_exists() -> None:
    """Oracle: the choices of the field, or the field's own check."""
    fields = {spec.name: spec for kind in (EngineConfig, ServerConfig) for spec in dataclasses.fields(kind)}
    for name, values in VALUES.items():
        for means in filter(None, (value.means for value in values)):
            if choices := fields[name].metadata.get("choices"):
                assert means in choices, name
            else:
                pytest.fail(f"{name} has no choices: say here what it can be")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--task embed", {"convert": "embed"}),
        ("--task generate", {"convert": "none"}),
        ("--runner pooling", {"convert": "pooling"}),
        ("--runner pooling --convert classify", {"convert": "classify"}),
        ("--task classify", {"convert": "classify"}),
        ("--task reward", {"convert": "auto"}),
        ("--is-embedding", {"convert": "pooling"}),
        ("--device-ids 0 1", {"device_ids": ["0", "1"]}),
        ("--preferred-sampling-params.top_k 5", {"override_generation_config": {"top_k": 5}}),
        ("--fastapi-root-path /llm --log-level-http warning", {"root_path": "/llm", "uvicorn_log_level": "warning"}),
        ("--rope-scaling.rope_type yarn", {"hf_overrides": {"rope_scaling": {"rope_type": "yarn"}}}),
        ("--lora-paths a=/x b=/y", {"enable_lora": True, "lora_modules": ["a=/x", "b=/y"]}),
        ("""--lora-paths '{"lora_name": "a", "lora_path": "/x"}'""", {"enable_lora": True, "lora_modules": ["a=/x"]}),
        ("--ep-size 8", {"enable_expert_parallel": True}),
        ("-ep", {"enable_expert_parallel": True}),
        (
            "--cudagraph-capture-sizes 1 2 4 --block-size 32",
            {"cudagraph_capture_sizes": ["1", "2", "4"], "block_size": 32},
        ),
        ("-cc.cudagraph_mode none", {"enforce_eager": True}),
        ("--compilation-config.cudagraph_capture_sizes+ 1,2", {"cudagraph_capture_sizes": ["1", "2"]}),
        ("--cuda-graph-sizes 1 2", {"cudagraph_capture_sizes": ["1", "2"]}),
        ("-cc.mode 3 -O3", {}),
        ("-O0", {"enforce_eager": True}),
        ("--attention-config.backend FLASHINFER", {"attention_backend": "auto"}),
        ("--sampling-defaults openai", {"generation_config": "vllm"}),
        ("--disable-overlap-schedule", {"async_scheduling": False}),
        ("--dtype half --kv-cache-dtype fp8_e4m3", {"dtype": "float16", "kv_cache_dtype": "fp8"}),
        ("--attention-backend ROCM_AITER_FA", {"attention_backend": "auto"}),
        ("--attention-backend FLASH_ATTN", {"attention_backend": "flash_attn"}),
        ("--quantization AWQ_Marlin", {"quantization": "awq"}),
        ("--pipeline-parallel-size 1 -dp=1 --nnodes 1 --distributed-executor-backend mp", {}),
        ("--max-model-len auto", {"max_model_len": None}),
        ("--max-model-len -1", {"max_model_len": None}),
        ("--trust-remote-code=false --no-enable-eplb --cpu-offload-gb 0", {}),
    ],
)
def test_what_has_an_equal_is_translated(line: str, expected: dict[str, Any]) -> None:
    """Oracle: by hand, from what the two servers' documentations say of the option."""
    assert given(line) == expected


def test_sglangs_speculation_is_one_object() -> None:
    """Oracle: the object by hand; SGLang counts the token that is verified too among its draft tokens."""
    line = (
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path /head --speculative-num-steps 3 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    )
    assert parse(line).build("engine", EngineConfig) == EngineConfig(
        speculative_config={"num_speculative_tokens": 3, "model": "/head", "method": "eagle3"}  # type: ignore[arg-type]
    )
    for line in ("--speculative-algorithm NEXTN", "--speculative-algorithm EAGLE --speculative-eagle-topk 1"):
        built = parse(f"{line} --speculative-num-draft-tokens 3").build("engine", EngineConfig)
        assert built.speculative_config == SpeculativeConfig(method="mtp", num_speculative_tokens=2)
    with pytest.raises(ConfigError, match="choose one of ngram"):
        parse("--speculative-algorithm STANDALONE --speculative-draft-model-path /head")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-dp 8", "--data-parallel-size is not an option here: .*--tensor-parallel-size"),
        ("--nnodes 2", "torchrun --nnodes 2"),
        ("--headless", "torchrun"),
        ("--numa-bind", "--numa-bind.*ranks are bound to no node of memory; start the engine under numactl"),
        ("--numa-node 0 1", "under numactl, which binds all of them"),
        ("--distributed-executor-backend ray", "one process for each rank"),
        ("--task transcription", "--task: 'transcription' is none of auto, generate"),
        ("--task generate --convert embed", "--task sets --convert to 'none', and it is given as 'embed'"),
        ("--lora-paths a=/x --enable-lora --lora-modules b=/y", "give one of them"),
        ("--spec-tokens 3 --speculative-config.num_speculative_tokens 4", "give one of them"),
        ("--ep-size many", "--ep-size is 'many', which it cannot be"),
        ("--kv-cache-dtype fp8_e5m2", "e4m3"),
        ("--load-format gguf", "convert the checkpoint"),
        ("--quantization ascend", "leave it out"),
        ("--chat-template examples/tool_chat_template_llama3.1_json.jinja", "that file is vLLM's: give its path"),
        ("--hf-token secret-of-the-hub", "environment variable HF_TOKEN"),
        ("--speculative-eagle-topk 4", "set 1"),
        ("--speculative-config.rejection_sample_method fly", "draft tokens change no token"),
        ("--worker-cls mine.Worker", "no code that an option names"),
        ("--mamba-ssm-cache-dtype float16", "recurrent states are float32"),
        ("--default-chat-template-kwargs.enable_thinking false", "with each request"),
        ("--speculative-config.method", "--speculative-config.*: expected one argument"),
        ("--quantisation fp8", "did you mean --quantization"),
    ],
)
def test_what_would_be_something_else_is_refused(line: str, words: str) -> None:
    """Oracle: the words of the error, which name the option and the remedy, and no secret."""
    with pytest.raises(ConfigError, match=words) as caught:
        parse(line)
    assert "secret" not in str(caught.value)


# Written as model cards and deployment guides write them, one for each kind of model, with their habits.
VENDOR_LINES = [
    "Qwen/Qwen3.5-27B --tensor-parallel-size 2 --max-model-len 262144 --reasoning-parser qwen3 --language-model-only "
    "--enable-auto-tool-choice --tool-call-parser qwen3_coder --mm-encoder-tp-mode data --enable-prefix-caching",
    "openai/gpt-oss-120b --tensor_parallel_size=4 --async-scheduling --kv-cache-dtype fp8 --stream-interval 20 "
    """--compilation-config '{"pass_config": {"fuse_allreduce_rms": true}}' --max-num-batched-tokens 8192""",
    "zai-org/GLM-4.6-FP8 -tp 8 --tool-call-parser glm45 --reasoning-parser glm45 --enable-auto-tool-choice "
    "--moe-backend triton --enable-expert-parallel --enable-eplb --gpu-memory-utilization 0.9",
    "mistralai/Ministral-3-8B-Instruct-2512 --tokenizer_mode mistral --config_format mistral --load_format mistral "
    """--limit-mm-per-prompt '{"image": 4}' --enable-auto-tool-choice --tool-call-parser mistral""",
    "google/gemma-4-31B-it --limit-mm-per-prompt.image 0 --chat-template examples/tool_chat_template_gemma4.jinja "
    "--attention-backend TRITON_ATTN --load-format fastsafetensors --enable-chunked-prefill",
    "deepseek-ai/DeepSeek-R1 --trust-remote-code --reasoning-parser deepseek_r1 --enable-expert-parallel "
    "--chat-template examples/tool_chat_template_deepseekr1.jinja",
    "MiniMaxAI/MiniMax-M2 --trust-remote-code --max-num-seqs 10240 --seed 42 --served-model-name m2 "
    "--tool-call-parser minimax_m2 --reasoning-parser minimax_m2 --enable-auto-tool-choice --port 8000",
    "meta-llama/Llama-3.3-70B-Instruct --quantization modelopt_fp4 --swap-space 16 --disable-log-requests "
    """--attention-config '{"use_trtllm_attention": true}' --speculative-config.method eagle3 """
    "--speculative-config.model some/head --speculative-config.num_speculative_tokens 3 "
    "--speculative-config.draft_tensor_parallel_size 1",
    "Qwen/Qwen3.6-35B-A3B --tensor-parallel-size 2 --speculative-config "
    """'{"method":"mtp","num_speculative_tokens":3,"moe_backend":"triton"}'""",
    "Qwen/Qwen3-Next-80B-A3B-Instruct --speculative-config "
    """'{"method":"qwen3_next_mtp","num_speculative_tokens":2}' """
    "--no-enable-chunked-prefill --tokenizer-mode auto --tensor-parallel-size 4",
    """baidu/ERNIE-4.5-21B-A3B-PT --speculative-config '{"method":"ernie_mtp","model":"baidu/ERNIE-4.5-21B-A3B-PT","""
    """"num_speculative_tokens":1}'""",
    "zai-org/GLM-4.5-FP8 --speculative-config.method mtp --speculative_config.num_speculative_tokens=1 -tp 4",
    """Qwen/Qwen3.8-27B --speculative-config '{"method":"qwen3_5_mtp","num_speculative_tokens":3,"""
    """"enforce_eager":true,"""
    """"draft_tensor_parallel_size":2,"quantization":"fp8","draft_sample_method":"probabilistic","""
    """"use_local_argmax_reduction":true}'""",
    "--model-path Qwen/Qwen3-32B --tp-size 8 --mem-fraction-static 0.85 --chunked-prefill-size 4096 --host 0.0.0.0 "
    "--attention-backend fa3 --enable-mixed-chunk --cuda-graph-max-bs 64 --enable-metrics --context-length 32768",
]


@pytest.mark.parametrize("line", VENDOR_LINES, ids=lambda line: line.split()[0])
def test_vendors_command_lines_start(line: str) -> None:
    """Oracle: the lines, in the spellings that vendors use; what is built is the complete configuration."""
    config = parse(line).build("engine", EngineConfig)
    assert config.model in line
    assert config.max_num_batched_tokens >= config.max_num_seqs


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tp_size": 2, "mem_fraction_static": 0.5}, {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}),
        ({"disable_radix_cache": True}, {"enable_prefix_caching": False}),
        ({"trust_remote_code": True, "swap_space": 4, "enable_sleep_mode": True, "disable_log_stats": True}, {}),
        ({"task": "score"}, {"convert": "classify"}),
        ({"lora_paths": {"a": "/x"}}, {"enable_lora": True, "lora_modules": ("a=/x",)}),
        ({"compilation_config": {"cudagraph_capture_sizes": [1, 2]}}, {"cudagraph_capture_sizes": "1,2"}),
        ({"compilation_config": 3, "seed": None, "max_num_seqs": None}, {}),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "moe_backend": "x"}},
            {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 5}'},
        ),
        ({"structured_outputs_config": {"backend": "auto"}}, {"structured_outputs_config": "{}"}),
        (
            {"cudagraph_capture_sizes": [1, 2, 4], "dtype": "Half"},
            {"cudagraph_capture_sizes": "1,2,4", "dtype": "float16"},
        ),
        ({"model": Path("/a/model"), "max_model_len": "32k"}, {"model": "/a/model", "max_model_len": 32_000}),
    ],
)
def test_python_and_toml_take_what_the_command_line_takes(
    options: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    """Oracle: the configuration by hand, from keywords and, where TOML has such values, from a file."""
    wanted = EngineConfig(**expected)
    assert EngineConfig(**take_options(options, [EngineConfig], where="LLM")) == wanted
    if any(value is None or isinstance(value, Path) for value in options.values()):
        return
    path = tmp_path / "run.toml"
    path.write_text("[engine]\n" + "".join(f"{name} = {toml(value)}\n" for name, value in options.items()))
    assert parse(f"--config {path}").build("engine", EngineConfig) == wanted


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(one)}" for name, one in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else repr(value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"tp_size": 2, "tensor_parallel_size": 4},
            "LLM: tp_size sets tensor_parallel_size to 2, and it is given as 4",
        ),
        ({"tensor_parallel": 2}, "LLM: unknown option tensor_parallel; did you mean tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "LLM: pipeline_parallel_size is not an option here"),
        ({"speculative_config": ["ngram"]}, "it must be a JSON object, as a mapping or as text"),
        ({"cudagraph_capture_sizes": 4}, "it must be whole numbers, as a list or as text"),
        ({"hf_token": "secret"}, "HF_TOKEN"),
        ({"numa_bind": True}, "LLM: numa_bind.*ranks are bound to no node of memory; start the engine under numactl"),
        ({"numa_bind_nodes": [0, 1]}, "under numactl, which binds all of them"),
    ],
)
def test_python_refuses_with_the_same_words(options: dict[str, Any], words: str) -> None:
    """Oracle: the words of the error."""
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**take_options(options, [EngineConfig], where="LLM"))


def test_vllms_configuration_files(tmp_path: Path) -> None:
    """Oracle: the flags as on a command line, which has precedence."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: my/model\nmax-model-len: 32k\nkv_cache_dtype: fp8\nno-enable-prefix-caching: true\nport: 9000\n"
        "compilation-config: {pass_config: {fuse_attn_quant: true}}\nasync-scheduling: true\nblock-size: 32\n"
    )
    options = parse(f"--config {path} --block-size 64")
    assert options.build("server", ServerConfig).port == 9000
    assert options.build("engine", EngineConfig) == EngineConfig(
        model="my/model", max_model_len=32_000, kv_cache_dtype="fp8", enable_prefix_caching=False, block_size=64
    )
    for text, words in (
        ("- a", "must be a mapping of flags"),
        ("a: [", "not valid YAML"),
        ("blok-size: 1", "block_size"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            parse(f"--config {path}")


def test_help_on_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the lines by hand: options by their names, a section by its own, and those of other servers."""
    found = []
    for word in ("block_size", "trust-remote", "time limits", "nothing-of-the-kind"):
        with pytest.raises(SystemExit) as caught:
            parse(f"--help='{word}'")
        assert caught.value.code == 0
        found.append(capsys.readouterr().out)
    assert found[0].startswith("KV cache:\n  --block-size, --page-size N") and "--max-num-seqs" not in found[0]
    assert found[1].startswith("Of vLLM and SGLang:\n  --trust-remote-code: accepted: no code of a model is run")
    assert "--host-timeout-s" in found[2] and found[3].startswith("no option has 'nothing-of-the-kind'")


def test_each_reason_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: the lines by hand; options that ask for nothing have none.  The Python API logs them."""
    line = "--trust-remote-code --moe-backend triton --linear-backend x --task embed --enable-chunked-prefill -pp 1"
    assert parse(line).notes == [
        "--trust-remote-code: no code of a model is run: its family is built in, and its tokenizer is data",
        "--linear-backend, --moe-backend: kernels are the engine's own, chosen for the device",
        "--task embed: taken as --convert embed",
    ]
    with caplog.at_level(logging.INFO, logger="tp_engine"):
        take_options({"task": "embed", "trust_remote_code": False}, [EngineConfig], where="LLM")
    assert [record.getMessage() for record in caplog.records] == ["LLM: task embed: taken as convert embed"]


def test_every_option_has_a_flag() -> None:
    """Oracle: the parser; an option of the server's own may have the name."""
    known = make_parser("serve", "", SERVE)._option_string_actions
    assert [name for name in OPTIONS if "." not in name and flag_of(name) not in known] == []


@pytest.mark.parametrize(
    "line", ["-tp 2", "-tp=2", "--tensor-parallel-size=2", "--tensor_parallel_size 2", "--tp_size=2"]
)
def test_spellings_of_a_flag(line: str) -> None:
    """Oracle: the number as written."""
    assert given(line) == {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--speculative-config.method=ngram", SpeculativeConfig(method="ngram")),
        (
            "--speculative_config.method ngram -sc.max_step_rows 3",
            SpeculativeConfig(method="ngram", max_step_rows=3),
        ),
        (
            """--speculative-config '{"method": "suffix"}' -sc.max_step_rows 3""",
            SpeculativeConfig(method="suffix", max_step_rows=3),
        ),
        (
            "--structured-outputs-config.disable_any_whitespace True",
            StructuredOutputsDefaults(disable_any_whitespace=True),
        ),
        ("--override-generation-config.temperature 0.5", {"temperature": 0.5}),
    ],
)
def test_keys_of_a_json_flag_come_one_by_one(line: str, expected: object) -> None:
    """Oracle: the object by hand; all other options have their defaults."""
    options = parse(line)
    built = [*fields_of(options.build("engine", EngineConfig)), *fields_of(options.build("server", ServerConfig))]
    defaults = [*fields_of(EngineConfig()), *fields_of(ServerConfig())]
    assert [one for one, default in zip(built, defaults, strict=True) if one != default] == [expected]


def fields_of(config: Any) -> list[Any]:
    return [getattr(config, spec.name) for spec in dataclasses.fields(config)]
