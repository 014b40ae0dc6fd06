"""The README: its Python example runs in the environment that its commands make, and its figures are measured."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tp_engine.model_config.families import families

ROOT = Path(__file__).resolve().parents[2]


def test_the_python_example_runs(tmp_path: Path, plain_environment: dict[str, str]) -> None:
    """Oracle: the comment beside the printed line."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_job.py").write_text(example, encoding="utf-8")
    job = subprocess.run(
        ["python", str(tmp_path / "my_job.py")],
        capture_output=True, text=True, timeout=340, cwd=tmp_path, env=plain_environment,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr[-3000:]
    assert job.stdout.splitlines()[0].strip() == "1 3 4"


def test_its_figures_stand_in_their_pages() -> None:
    """Oracle: the readers' list of architectures; the rows of docs/benchmarks/engines.md for the machine and the day
    that the README names; the values of docs/benchmarks/gpu.json."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(\d+) architectures", text)) == {str(len(families()))}
    page = (ROOT / "docs" / "benchmarks" / "engines.md").read_text(encoding="utf-8")
    assert "Zen 4" in text and "2026-11-22" in text
    measured = page[page.index("Zen 4, 2026-11-22") :]
    factors = re.findall(r"[\d.]+x", measured[measured.index("To vLLM the latency is") :])
    told = [line.strip("| ").split(" | ")[1:] for line in re.findall(r"(?m)^\| (?:one|32) requests? .*", text)]
    for column, (model, place) in enumerate({"A, bf16": 0, "B, bf16": 1, "C, fp32": 3}.items()):
        row = next(line for line in measured.splitlines() if line.startswith(f"| {model}")).strip("| ").split(" | ")
        several = [f"{row[at]}, {row[at + 1].split('(')[1].strip(')')}" for at in (5, 7)]
        assert [line[column] for line in told] == [f"{row[1].split()[0]}, {factors[place]}", *several]
    sections = json.loads((ROOT / "docs" / "benchmarks" / "gpu.json").read_text(encoding="utf-8"))
    values = {figure["value"] for section in sections for figure in section["figures"]}
    assert {25_184, 9_744, 4.3, 0.82, 8.3} <= values
    assert all(words in text for words in ("25,184", "9,744", "4.3 ms", "82 %", "waits 8 microseconds"))
