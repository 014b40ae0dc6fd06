"""The command ``tp-engine``: it finds the subcommand and runs it; ``serve`` is here, the others are in ``apps/``."""
