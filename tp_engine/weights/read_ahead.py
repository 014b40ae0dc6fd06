"""Files of a network file system, read in their order ahead of the threads that copy from their pages.

Loading threads touch the pages of mapped files in the order of tensors, each rank those of its own slices.  A local
disk does not mind.  A network file system then gets many small requests at scattered places, and gives a small part of
its bandwidth (28 MiB/s were reported for NFS and Lustre).  So the ranks of a host read the files once from beginning to
end, each rank every n-th piece, and the pages are there when they are touched.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tp_engine.job.topology import RankInfo
from tp_engine.system.files import file_system_of
from tp_engine.system.log import get_logger
from tp_engine.system.units import MIB, format_gib

logger = get_logger(__name__)

_PIECE_BYTES = 16 * MIB
_THREADS = 4
_NETWORK = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "virtiofs", "wekafs"}
)


@contextmanager
def reading_ahead(files: Sequence[Path], info: RankInfo, free_bytes: int) -> Iterator[None]:
    """Read ``files`` in the background, together with the other ranks of this host, as long as the body runs.

    Does nothing for files of a local disk, and if they are larger than the host's ``free_bytes`` of memory: then pages
    would be dropped before they are touched.
    """
    far = [path for path in files if path.is_file() and is_far(file_system_of(path))]  # the loader tells of others
    num_bytes = sum(path.stat().st_size for path in far)
    if not far or num_bytes > free_bytes:
        yield
        return
    if not info.local_rank:
        logger.info("reading %s of %s ahead", format_gib(num_bytes), file_system_of(far[0]))
    reader = _FileReader(far, info)
    reader.start()
    try:
        yield
    finally:
        reader.stop()


def is_far(file_system: str) -> bool:
    """Return whether files of this kind (a name of ``/proc/filesystems``) come over a network, or may: those of FUSE
    are mostly buckets."""
    return file_system in _NETWORK or file_system.startswith("fuse.")


class _FileReader:
    """Threads that read this rank's pieces in the order of the files, and throw them away."""

    def __init__(self, files: Sequence[Path], info: RankInfo) -> None:
        pieces = [(path, start) for path in files for start in range(0, path.stat().st_size, _PIECE_BYTES)]
        self._pieces = iter(pieces[info.local_rank :: info.local_world_size])
        self._lock = threading.Lock()
        self._has_ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, name="read ahead", daemon=True) for _ in range(_THREADS)]

    def start(self) -> None:
        """Begin to read."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End after the pieces that are being read."""
        self._has_ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        room = bytearray(_PIECE_BYTES)
        while not self._has_ended.is_set():
            with self._lock:
                path, start = next(self._pieces, (None, 0))
            if path is None:
                return
            try:
                with path.open("rb", buffering=0) as file:
                    os.preadv(file.fileno(), [room], start)
            except OSError:  # whoever needs these bytes gets the error, with the tensor's name
                return
