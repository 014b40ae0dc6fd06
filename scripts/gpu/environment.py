"""Print this host's GPUs, driver, versions, and missing packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from torch.utils.collect_env import get_pretty_env_info

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    """Print all of it."""
    print(get_pretty_env_info())
    if shutil.which("nvidia-smi"):
        for query in ((), ("topo", "-m")):
            subprocess.run(["nvidia-smi", *query], timeout=30, check=False)
    from lib.usable import gaps

    print(f"{len(os.sched_getaffinity(0))} cores; missing packages: {', '.join(gaps(['test'])) or 'none'}")


if __name__ == "__main__":
    main()
