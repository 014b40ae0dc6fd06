"""Options from the command line and TOML files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.options import Options, adopt_world_size, parse_options
from tp_engine.options.flags import make_parser
from tp_engine.server.config import ServerConfig

TABLES = {"engine": EngineConfig, "server": ServerConfig}


def parse(*argv: str) -> Options:
    return parse_options("serve", "Serve a model.", TABLES, argv)


def engine(*argv: str) -> EngineConfig:
    return parse(*argv).build("engine", EngineConfig)


def server(*argv: str) -> ServerConfig:
    return parse(*argv).build("server", ServerConfig)


def test_nothing_given_is_the_dataclass_defaults() -> None:
    """Oracle: the dataclasses themselves, the only place of defaults."""
    assert engine() == EngineConfig()
    assert server() == ServerConfig()


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--block-size", "32"], "block_size", 32),
        (["--block-size=64"], "block_size", 64),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--enforce-eager"], "enforce_eager", True),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--kv-cache-memory-bytes", "2GiB"], "kv_cache_memory_bytes", 2 << 30),
        (["--dtype", "bfloat16"], "dtype", "bfloat16"),
        (["--max-model-len", "1024"], "max_model_len", 1024),
    ],
)
def test_flags_reach_their_fields(argv: list[str], field: str, value: object) -> None:
    """Oracle: the value as written."""
    assert getattr(engine(*argv), field) == value


def test_several_served_names() -> None:
    """Oracle: the names as written, from both sources."""
    assert server("--served-model-name", "a", "b").served_model_name == ("a", "b")


def test_a_flag_of_several_values_may_come_again() -> None:
    """Oracle: every value that was given, for each option that takes several, in the order of the command line."""
    tables = {"engine": EngineConfig, "server": ServerConfig}
    for name, kind in tables.items():
        for spec in dataclasses.fields(kind):
            flag, is_list = "--" + spec.name.replace("_", "-"), str(spec.type).startswith("tuple")
            if is_list or spec.metadata.get("numbers"):
                given = parse(flag, "1", flag, "2", "4", flag, '["8", "16"]').given[name][spec.name]
                assert [str(one) for one in given] == ["1", "2", "4", "8", "16"], spec.name
    assert server("--api-key", "a", "--api-key", "b").api_keys == ("a", "b")
    sizes = engine("--cudagraph-capture-sizes", "4", "--cudagraph-capture-sizes", "1,2").cudagraph_capture_sizes
    assert sizes == "4,1,2"
    assert server("--allowed-origins=*", "--allowed-origins", "http://a").allowed_origins == ("*", "http://a")


def test_a_yaml_file_that_names_a_flag_twice_is_refused(tmp_path: Path) -> None:
    """Oracle: as in TOML; the library would keep the last value alone, in both spellings of a name."""
    for again in ("api-key", "api_key"):
        path = tmp_path / "run.yaml"
        path.write_text(f"api-key: a\n{again}: b\n")
        with pytest.raises(ConfigError, match="'api_key' twice"):
            server("--config", str(path))


def test_every_field_is_a_flag_with_help() -> None:
    """Oracle: the dataclasses' fields."""
    text = make_parser("serve", "", TABLES).format_help()
    for kind in TABLES.values():
        for spec in dataclasses.fields(kind):
            assert "--" + spec.name.replace("_", "-") in text
            assert spec.metadata["help"]
    assert "(default: 2048)" in text


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_are_not_finite_are_refused(value: str) -> None:
    """Oracle: the dataclasses' fields: no time, share or size of an engine or a server is endless."""
    for kind in (EngineConfig, ServerConfig):
        for spec in dataclasses.fields(kind):
            if str(spec.type).startswith("float"):
                given: dict[str, Any] = {spec.name: float(value)}
                with pytest.raises(ConfigError, match=f"^{spec.name} is {value}"):
                    kind(**given)


def test_most_sequences_and_most_tokens_follow_each_other() -> None:
    """Oracle: vLLM's rule: of two limits that would contradict each other, the one that is not given follows."""
    for given, expected in (
        ([], (256, 2048)),
        (["--max-num-batched-tokens", "64"], (64, 64)),
        (["--max-num-batched-tokens", "8k"], (256, 8000)),
        (["--max-num-seqs", "3000"], (3000, 3000)),
    ):
        config = engine(*given)
        assert (config.max_num_seqs, config.max_num_batched_tokens) == expected
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 64; .* the 65 sequences: raise it, or lower"):
        engine("--max-num-batched-tokens", "64", "--max-num-seqs", "65")


def test_precedence(tmp_path: Path) -> None:
    """Oracle: command line over file over defaults, per key."""
    path = tmp_path / "run.toml"
    path.write_text(
        '[engine]\nblock_size = 32\nmax_num_seqs = 8\nkv_cache_memory_bytes = "512MiB"\n'
        '[server]\nport = 9000\nserved_model_name = ["x"]\n'
    )
    config = engine("--config", str(path), "--block-size", "64")
    assert (config.block_size, config.max_num_seqs, config.max_num_batched_tokens) == (64, 8, 2048)
    assert config.kv_cache_memory_bytes == 512 << 20
    assert server("--config", str(path)).served_model_name == ("x",)
    assert server("--config", str(path)).port == 9000


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--blok-size", "32"], ["--blok-size", "did you mean --block-size?"]),
        (["--blok-size=32"], ["--blok-size", "did you mean --block-size?"]),
        (["--zzz"], ["unknown option --zzz"]),
        (["model", "again"], ["unexpected argument 'again'"]),
        (["--block-size", "x"], ["--block-size", "'x'"]),
        (["--block-size", "24"], ["block_size is 24", "power of two"]),
        (["--dtype", "int4"], ["--dtype", "int4", "bfloat16"]),
        (["--kv-cache-memory-bytes", "many"], ["'many' is not a size"]),
        (["--port", "99999"], ["port is 99999", "65535"]),
        (["--shutdown-timeout-s", "60"], ["shutdown_timeout_s is 60", "torchrun"]),
        (["--metrics-prefix", "vllm:"], ["metrics_prefix is 'vllm:'", "such as tp_engine vllm"]),
        (["--metrics-prefix", "vllm", "vllm"], ["metrics_prefix is 'vllm vllm'", "different"]),
        (["--config", "/no/such.toml"], ["/no/such.toml", "No such file"]),
    ],
)
def test_refusals_name_value_and_remedy(argv: list[str], words: list[str]) -> None:
    """Oracle: the words in the ``ConfigError``."""
    with pytest.raises(ConfigError) as caught:
        options = parse(*argv)
        options.build("engine", EngineConfig)
        options.build("server", ServerConfig)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[engine]\nblok_size = 16\n", ["[engine]: unknown option blok_size", "did you mean block_size?"]),
        ("[motor]\nx = 1\n", ["unknown entry 'motor'", "[engine], [server]"]),
        ("engine = 3\n", ["must be a table"]),
        ("[engine\n", ["not valid TOML"]),
        ('[engine]\nblock_size = "16"\n', ["block_size is '16' of type str"]),
        ("[server]\nserved_model_name = [3]\n", ["served_model_name"]),
    ],
)
def test_toml_refusals(tmp_path: Path, text: str, words: list[str]) -> None:
    """Oracle: the words in the ``ConfigError``."""
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        options = parse("--config", str(path))
        options.build("engine", EngineConfig)
        options.build("server", ServerConfig)
    for word in words:
        assert word in str(caught.value)


def test_print_config_reads_back(tmp_path: Path) -> None:
    """Oracle: the printed configuration; the key is absent."""
    options = parse("--block-size", "64", "--api-key", "secret", "--served-model-name", 'a"b', "--print-config")
    config = options.build("engine", EngineConfig)
    options.build("server", ServerConfig)
    path = tmp_path / "printed.toml"
    path.write_text(options.effective_toml())
    assert options.print_config
    assert "secret" not in path.read_text()
    assert engine("--config", str(path)) == config
    assert server("--config", str(path)) == ServerConfig(served_model_name=('a"b',))


def test_world_size_rules() -> None:
    """Oracle: torchrun's number of ranks is the tensor-parallel size."""
    given: dict[str, object] = {}
    adopt_world_size(given, 4)
    assert given == {"tensor_parallel_size": 4}
    adopt_world_size(given, 4)
    with pytest.raises(ConfigError, match="torchrun started 2 ranks"):
        adopt_world_size({"tensor_parallel_size": 4}, 2)
    alone: dict[str, object] = {"tensor_parallel_size": 4}
    adopt_world_size(alone, None)
    assert alone == {"tensor_parallel_size": 4}


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["my/model"], "model", "my/model"),
        (["my/model", "--model", "my/model"], "model", "my/model"),
        (["--served-model-name", "a", "b", "--model-path", "m"], "model", "m"),
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["--tp-size=4"], "tensor_parallel_size", 4),
        (["--max-model-len", "32k"], "max_model_len", 32_000),
        (["--max-model-len", "32K"], "max_model_len", 32_768),
        (["--context-length", "25.6k"], "max_model_len", 25_600),
        (["--max-num-batched-tokens", "1M"], "max_num_batched_tokens", 1 << 20),
        (["--chunked-prefill-size", "4096"], "max_num_batched_tokens", 4096),
        (["--mem-fraction-static", "0.8"], "gpu_memory_utilization", 0.8),
        (["--max-running-requests", "7"], "max_num_seqs", 7),
        (["--page-size", "32"], "block_size", 32),
        (["--disable-radix-cache"], "enable_prefix_caching", False),
        (["--disable-cuda-graph"], "enforce_eager", True),
        (["--random-seed", "5"], "seed", 5),
        (["--enable-chunked-prefill", "my/model", "--enable-metrics"], "model", "my/model"),
    ],
    ids=str,
)
def test_other_servers_spellings(argv: list[str], field: str, value: object) -> None:
    """Oracle: the option that the user meant."""
    assert getattr(engine(*argv), field) == value


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--api-key", "a", "b"], "api_key", ("a", "b")),
        (["--allowed-origins", '["*"]'], "allowed_origins", ("*",)),
        (["--shutdown-timeout", "5"], "shutdown_timeout_s", 5.0),
        (["--disable-log-requests"], "enable_log_requests", False),
        (["--enable-log-requests"], "enable_log_requests", True),
        (["--max-queued-requests", "9"], "max_num_queued_reqs", 9),
        (["--ssl-cert-reqs", "2", "--ssl-certfile", __file__, "--ssl-keyfile", __file__], "ssl_cert_reqs", 2),
    ],
    ids=str,
)
def test_spellings_of_server_options(argv: list[str], field: str, value: object) -> None:
    """Oracle: the option that the user meant."""
    assert getattr(server(*argv), field) == value


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["one", "--model", "two"], "given twice"),
        (["--schedule-policy", "lpm"], "--schedule-policy is not an option here: requests run in order"),
        (["--enable-metrics=1"], "--enable-metrics is '1'; it takes no value"),
        (["--pipeline-parallel-size=2"], "tensor parallelism alone"),
        (["--constrained-json-disable-any-whitespace"], "see --structured-outputs-config"),
        (["--max-model-len", "1.5K"], "is not a count"),
        (["--max-model-len", "many"], "is not a count"),
    ],
    ids=str,
)
def test_what_other_servers_have_and_this_one_has_not(argv: list[str], words: str) -> None:
    """Oracle: the reason in the ``ConfigError``."""
    with pytest.raises(ConfigError, match=words):
        parse(*argv)


def test_secrets_that_are_not_set_are_said_to_be_unset(tmp_path: Path) -> None:
    """Oracle: the printed file can be read back, also with counts as text."""
    options = parse("--max-model-len", "1k")
    options.build("engine", EngineConfig), options.build("server", ServerConfig)
    assert "# api_key is not set" in options.effective_toml()
    path = tmp_path / "run.toml"
    path.write_text('[engine]\nmax_model_len = "2K"\n[server]\napi_key = "x"\n')
    assert engine("--config", str(path)).max_model_len == 2048
    assert server("--config", str(path)).api_key == ("x",)
