"""``tp-engine check --url`` against this project's own server, with the demo model and another checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.serving import WarmServer, warm_serving
from tp_engine.apps.check.report import CheckStatus
from tp_engine.apps.check.url_check import UrlCheck
from tp_engine.config import DEMO_MODEL

pytestmark = pytest.mark.slow

KEY = "sesame"


@pytest.fixture(scope="module")
def server() -> Iterator[WarmServer]:
    """The demo model on two ranks, in float32."""
    options = ("--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "256", "--api-key", KEY)
    with warm_serving(2, *options) as running:
        yield running


def test_our_server_is_right(server: WarmServer) -> None:
    """Oracle: transformers in float32, to 1e-4; nothing that the check asks for is missing here."""
    check = UrlCheck(url=server.url, api_key=KEY, model=str(DEMO_MODEL), dtype="float32", quick=True)
    report = check.run()
    assert {one.status for one in report.findings if one.name != "JSON by schema"} == {CheckStatus.RIGHT}, (
        report.as_text()
    )


def test_another_checkpoint_is_found(server: WarmServer, tmp_path: Path) -> None:
    """Oracle: one row of one weight is not the server's: prompts and answers are wrong, the tokens are right."""
    folder = tmp_path / "changed"
    shutil.copytree(DEMO_MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"][17] = torch.flip(
        weights["model.layers.2.mlp.down_proj.weight"][17], [0]
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    check = UrlCheck(url=server.url, api_key=KEY, model=str(folder), dtype="float32", quick=True)
    found = {one.name: one.status for one in check.run().findings}
    assert found["alone"] is found["chats"] is CheckStatus.WRONG and found["tokens"] is CheckStatus.RIGHT
