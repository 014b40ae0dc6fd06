"""``python -m tp_engine.cli``: the command ``tp-engine``."""

import sys

from tp_engine.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
