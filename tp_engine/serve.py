"""``torchrun --nproc-per-node 8 -m tp_engine.serve``: the command ``tp-engine serve``."""

import sys

from tp_engine.cli.serve import main

if __name__ == "__main__":
    sys.exit(main())
