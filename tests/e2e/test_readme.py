"""The README's Python example runs in the environment that its commands make; tests/unit/project has the rest."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

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
