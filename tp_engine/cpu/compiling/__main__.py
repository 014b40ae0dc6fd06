"""``python -m tp_engine.cpu.compiling``: have the kernels of this machine's processor before anything needs them.

What a wheel brings is found, anything else is compiled into the cache folder.  Without a compiler it says what that
costs, and ends with 0: PyTorch computes then.
"""

import sys

from tp_engine.cpu.compiling.cache import BUILD_TIMEOUT_S, compiled_library
from tp_engine.cpu.compiling.gcc import BuildError
from tp_engine.cpu.compiling.levels import NATIVE, best_level, processor_flags
from tp_engine.cpu.compiling.shipped import is_shipped
from tp_engine.job.shown_progress import shown_progress
from tp_engine.system.log import configure_logging


def main() -> None:
    """Find or compile the library, and tell how far that is on standard error."""
    best = best_level(processor_flags())
    if best is not None and is_shipped(best):
        return
    configure_logging("kernels")
    try:
        with shown_progress():
            compiled_library(NATIVE, BUILD_TIMEOUT_S)
    except (BuildError, RuntimeError) as error:
        print(
            f"[tp_engine] no native CPU kernels; PyTorch would compute, 2 to 4 times slower: {error}", file=sys.stderr
        )


if __name__ == "__main__":
    main()
