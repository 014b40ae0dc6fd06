"""Short fingerprints of a checkpoint: equal folders have equal ones, wherever they lie and however they came there.

``checkpoint_fingerprint`` covers config.json, the names and sizes of the weights' files, and samples of their bytes:
the header with all names and shapes, and 16 places spread over the file.  So it costs some milliseconds, tells a
checkpoint from another of the same shape, and does not find a flipped bit: that is not its task.

``weights_fingerprint`` covers the weights alone, whatever the names of their files, with a page of each tensor: it
tells a checkpoint from one in which only some tensors were trained on.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Final

from tp_engine.system.files import open_regular

_NUM_PLACES: Final = 16
_PLACE_BYTES: Final = 4096
_MAX_HEADER_BYTES: Final = 1 << 24
_PATTERNS: Final = ("*.safetensors", "*.safetensors.index.json", "config.json")


def checkpoint_fingerprint(folder: Path) -> str:
    """16 hexadecimal digits for the checkpoint in ``folder``."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _PATTERNS for path in folder.glob(pattern)}, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open_regular(path) as file:
            if path.suffix == ".json":
                digest.update(file.read())
                continue
            start = file.read(8)
            digest.update(start + file.read(min(int.from_bytes(start, "little"), _MAX_HEADER_BYTES)))
            for place in range(_NUM_PLACES):
                file.seek(max(0, (size - _PLACE_BYTES) * place // (_NUM_PLACES - 1)))
                digest.update(file.read(_PLACE_BYTES))
    return digest.hexdigest()[:16]


def weights_fingerprint(folder: Path) -> str:
    """32 hexadecimal digits for the tensors in ``folder``."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(min(length, _MAX_HEADER_BYTES))
            digest.update(header)
            for name, entry in json.loads(header).items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    place = 8 + length + begin + max(0, (end - begin - _PLACE_BYTES) // 2)
                    digest.update(os.pread(file.fileno(), min(_PLACE_BYTES, end - begin), place))
    return digest.hexdigest()[:32]
