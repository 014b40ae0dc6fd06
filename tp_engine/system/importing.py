"""Imports of large libraries, in processes that are this package's own."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage within, and never search what is there in the end.

    torch's modules make objects by the hundred thousand that live as long as the process.  The collector would search
    them again and again while they are made: a fifth of the import's processor time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def collections_paused() -> Iterator[None]:
    """Collect no garbage within, for a large import in a program of somebody else's, whose objects stay as they are."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_main(module: str) -> int:
    """Call ``main`` of a module, for a process that ends with it; returns the exit code.

    What is left then is not searched for garbage either, which takes the interpreter a tenth of a start.
    """
    with without_collections():
        main: Callable[[], int] = import_module(module).main
    code = main()
    gc.freeze()
    return code
