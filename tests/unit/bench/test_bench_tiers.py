"""The benchmark of tiers: a small run of every section, and what its command line refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_tiers import main, parse_arguments
from benchmarks.shapes import qwen3_config
from benchmarks.tiers.chats import ChatSet
from benchmarks.tiers.sharers import Sharers


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: bytes of a block by hand: 2 layers, K and V, 16 tokens, 2 heads of 16 floats; the benchmark itself checks
    that all blocks came from the host, or from disk after a restart, and gave the same token.  A tier changes no
    answer, moves nothing where all fits, and loads a shared prefix once; chats find with it what one pool of the summed
    size has."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = qwen3_config("qwen3-0.6b", "float32") | small | {"vocab_size": 300, "head_dim": 16, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"bos_token_id": 1, "num_key_value_heads": 2}))
    arguments = ["--model", str(tmp_path), "--dtype", "float32", "--tokens", "100", "--rounds", "2"]
    arguments += ["--kv-offloading-size", "0.01", "--engine-options", '{"load_format": "dummy"}']
    arguments += ["--runs", "1", "--chats", "12", "--shrink", "8", "--requests", "6", "--prefix-blocks", "8"]
    assert main([*arguments, "--plot", str(tmp_path / "tiers.svg")]) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    found = report["reload"]
    assert found["block_bytes"] == 2 * 2 * 16 * 2 * 16 * 4 and found["tokens"] == 100
    assert all(found[name] > 0 for name in ("block_computed_us", "block_reloaded_us", "first_token_ratio"))
    assert "a block of 8,192 bytes: computed" in printed
    assert all(
        report[name]["same_answers"] == 1.0 and report[name]["ratio"] > 0 for name in ("chats", "fits", "sharers")
    )
    chats = report["chats"]
    assert chats["chat_blocks"] == 12 * 7 and chats["pool_blocks"] == 21 and chats["host_blocks"] == 84
    assert chats["off_hit_percent"] < chats["on_hit_percent"] and abs(chats["hit_gap_points"]) < chats["goal_points"]
    assert report["fits"]["moved_bytes"] == 0
    assert report["sharers"]["loaded_blocks"] == 8 and "8 blocks loaded for 6 requests" in printed
    assert report["restart"]["ratio"] > 0 and "read from disk" in printed
    picture = ElementTree.parse(tmp_path / "tiers.svg").getroot()
    assert len(picture.findall("{http://www.w3.org/2000/svg}g")) == 3


def test_sizes_by_hand() -> None:
    """Oracle: 64 + 4 messages of 6 + 5 answers of 2 are 98 tokens, 7 blocks of 16; requests of 16 + 8 own tokens take 2
    blocks, beside a prefix of 8 blocks and 16 to spare."""
    chats = ChatSet(num_chats=12).shrunk(8)
    assert chats.final_tokens == 98 and chats.num_blocks(16) == 84
    assert Sharers(num_requests=6, prefix_blocks=8, block_size=16).num_blocks == 8 + 6 * 2 + 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--sections", "reload,nothing"],
            "--sections names nothing; choose among reload, chats, fits, sharers, restart",
        ),
        (["--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["--tokens", "16"], "--tokens is 16; a prompt must be longer than a block: at least 17"),
        (["--chats", "4"], "--chats is 4; the pool holds 1 of 4 chats: at least 8"),
    ],
)
def test_arguments_that_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the value, the rule and the remedy."""
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert message in capsys.readouterr().err
