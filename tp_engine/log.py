"""Logging: one format, on standard error, with the rank in every line."""

from __future__ import annotations

import logging
import sys

from tp_engine import env

_ROOT = "tp_engine"


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; pass ``__name__``."""
    return logging.getLogger(name)


def configure_logging(process: str) -> None:
    """Write this library's log to standard error, each line marked with ``process`` (such as ``rank 0``).

    Only launchers and the processes that we start call this: a library leaves the root logger alone.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [{process}] %(message)s", "%H:%M:%S"))
    logger = logging.getLogger(_ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(env.log_level())
    logger.propagate = False
