"""The benchmark of codecs: a small run, and its measures by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch
from bench_codecs import default_codecs, main
from benchmarks.codecs.answers import compare


def test_a_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: bytes of a block by hand: 4 layers, K and V, 16 tokens, 4 heads of 32; errors of 8 bits, and larger ones
    of fewer coordinates; the benchmark itself checks that the prompt came back."""
    arguments = ["--models", "demo", "--codecs", "int8,pca:8", "--tokens", "160", "--prompts", "1", "--endings", "2"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    rows = json.loads(printed.splitlines()[-1])["models"]["demo"]
    int8, pca = rows["int8"], rows["pca:8"]
    assert int8["blob_bytes"] == 4 * 2 * 16 * 4 * (32 + 2) and pca["blob_bytes"] == 4 * 2 * 16 * 4 * (8 + 2)
    assert 0.002 < int8["key_error"] < 0.01 < 0.2 < pca["value_error"] < pca["largest_error"] <= 1.5
    assert int8["refused_at_0.25"] == 0 and pca["refused_at_0.25"] == 1
    assert int8["largest_logprob_error"] < pca["largest_logprob_error"]
    assert "| `pca:8` | 5,120 | 6.40x |" in printed


def test_errors_by_hand() -> None:
    """Oracle: two tokens whose probabilities change from 0.75 and 0.25 to 0.5 each."""
    exact, found = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    errors = compare(found, exact)
    assert errors["likeliest_error"] == pytest.approx(math.log(1.5), abs=1e-4)
    assert errors["largest_logprob_error"] == pytest.approx(math.log(2), abs=1e-4)
    assert errors["mean_divergence"] == pytest.approx(0.75 * math.log(1.5) - 0.25 * math.log(2), abs=1e-4)
    assert default_codecs(64)[:4] == ["int8", "fp8", "pca:64", "pca:56"]
