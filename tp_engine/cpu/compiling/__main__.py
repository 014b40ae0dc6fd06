"""``python -m tp_engine.cpu.compiling``: have the kernels of this machine's processor before anything needs them.

What a wheel brings is found, anything else is compiled into the cache folder.  Without a compiler it says what that
costs, and ends with 0: PyTorch computes then.
"""

import sys
import time
from collections.abc import Callable

from tp_engine.cpu.compiling.cache import compiled_library
from tp_engine.cpu.compiling.gcc import BuildError
from tp_engine.cpu.compiling.levels import NATIVE, best_level, processor_flags
from tp_engine.cpu.compiling.shipped import is_shipped
from tp_engine.job.progress import hearing_progress

_SAY_S = 10.0


def main() -> None:
    """Find or compile the library, and tell how far that is on standard error."""
    best = best_level(processor_flags())
    if best is not None and is_shipped(best):
        return
    try:
        with hearing_progress(_teller()):
            compiled_library(NATIVE)
    except (BuildError, RuntimeError) as error:
        print(
            f"[tp_engine] no native CPU kernels; PyTorch would compute, 2 to 4 times slower: {error}", file=sys.stderr
        )


def _teller() -> Callable[[str], None]:
    """Each text on a terminal in the place of the one before; elsewhere one in some seconds, on a line of its own."""
    is_terminal, said_s = sys.stderr.isatty(), 0.0

    def tell(text: str) -> None:
        nonlocal said_s
        if is_terminal or time.monotonic() > said_s + _SAY_S:
            said_s = time.monotonic()
            print(f"[tp_engine] {text}", end="\r" if is_terminal else "\n", file=sys.stderr, flush=True)

    return tell


if __name__ == "__main__":
    main()
