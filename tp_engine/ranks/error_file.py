"""torchrun's error file: where its summary of a failed job takes each rank's error from."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing.errors import get_error_handler


def record_error(error: BaseException) -> None:
    """Write ``error`` with its traceback to the file that torchrun gave this process; nothing without torchrun."""
    get_error_handler().record_exception(error)
