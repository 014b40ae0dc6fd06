"""``python -m tp_engine.cpu.compiling``: have the kernels of this machine's processor before anything needs them.

What a wheel brings is found, anything else is compiled into the cache folder.  Without a compiler it says what that
costs, and ends with 0: PyTorch computes then.
"""

import sys
from collections.abc import Callable

from tp_engine.cpu.compiling.cache import compiled_library
from tp_engine.cpu.compiling.gcc import BuildError
from tp_engine.cpu.compiling.levels import NATIVE, best_level, processor_flags
from tp_engine.cpu.compiling.shipped import shipped_library
from tp_engine.job.progress import hearing_progress


def main() -> None:
    """Find or compile the library, and tell how far that is on standard error."""
    level = best_level(processor_flags()) or NATIVE
    try:
        with hearing_progress(_teller()):
            _ = shipped_library(level) or compiled_library(level)
    except (BuildError, RuntimeError) as error:
        print(
            f"[tp_engine] no native CPU kernels; PyTorch would compute, 2 to 4 times slower: {error}", file=sys.stderr
        )


def _teller() -> Callable[[str], None]:
    """Each text on a line of its own; on a terminal in the place of the one before."""
    end = "\r" if sys.stderr.isatty() else "\n"

    def tell(text: str) -> None:
        print(f"[tp_engine] {text}", end=end, file=sys.stderr, flush=True)

    return tell


if __name__ == "__main__":
    main()
