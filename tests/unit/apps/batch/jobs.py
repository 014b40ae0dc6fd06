"""A batch job of forty lines, some of them bad, and the check of its results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tp_engine.api.batch_file.lines import line_number
from tp_engine.apps.batch.config import BatchConfig
from tp_engine.apps.batch.run import run_job
from tp_engine.apps.batch.summary import BatchSummary
from tp_engine.config import EngineConfig

NUM_LINES = 40
ENGINE = EngineConfig(device="cpu", max_num_seqs=4)


def completion(custom_id: Any, prompt: Any, **fields: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 50, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


def run(source: Path, target: Path | str, stop: Callable[[], bool] = lambda: False, **options: Any) -> BatchSummary:
    return run_job(ENGINE, BatchConfig(input_file=str(source), output_file=str(target), **options), stop_requested=stop)


def results_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


ERRORS = {
    6: "invalid_json_line",
    10: "duplicate_custom_id",
    12: None,
    18: "context_length_exceeded",
    21: "model_not_found",
}


def check_all_there(*paths: Path) -> None:
    """Every line has exactly one result, the right one."""
    written = [result for path in paths for result in results_of(path)]
    results = {line_number(result["id"]): result for result in written}
    assert len(results) == len(written) == NUM_LINES
    assert {number: result["error"]["code"] for number, result in results.items() if result["error"]} == ERRORS
    assert results[6]["response"] is None and results[12]["response"]["status_code"] == 400
    assert "of line 4" in results[10]["error"]["message"]
    for number in range(NUM_LINES):
        result = results[number + 1]
        if number + 1 not in (*ERRORS, 14):
            assert result["custom_id"] == f"id-{number}" and result["response"]["status_code"] == 200
            text = result["response"]["body"]["choices"][0]["text"]
            assert text == ("x" + "ab" * (number % 7) if number % 7 else "x" * 50)
    choices = results[14]["response"]["body"]["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "one"), (1, "one"), (2, "two"), (3, "two")]
