"""The compiled kernels in this process: the library and the signatures of its functions, or the reason for none."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from tp_engine import env
from tp_engine.cpu.kernels.build import BuildError, built_library
from tp_engine.cpu.kernels.layout import (
    Adapters,
    AttentionLayer,
    BlockCodes,
    ExpertPanels,
    QuantisedLayout,
    Routing,
    Step,
)
from tp_engine.cpu.kernels.self_check import disagreement
from tp_engine.cpu.kernels.tape import Recordable
from tp_engine.log import get_logger

_logger = get_logger(__name__)

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_DELTA = (*[_POINTER] * 4, _FLOAT, _POINTER, _POINTER, *[_INT] * 7, _POINTER, _INT, _POINTER, _INT)
_MAMBA = (*[_POINTER] * 7, *[_INT] * 7, _POINTER, _INT)
_CONV = (_POINTER, _POINTER, *[_INT] * 3, _POINTER, _INT)
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "paged_attention": (
        *(ctypes.POINTER(Step), ctypes.POINTER(AttentionLayer), *[_POINTER] * 4, *[_INT] * 3),
        *(_POINTER, _INT, _POINTER),
    ),
    "norm_rows": (*[_POINTER] * 4, *[_INT] * 3, *[_FLOAT] * 4, *[_INT] * 3),
    "add_scaled": (_POINTER, _POINTER, _INT, _FLOAT, _FLOAT, _INT, _INT),
    "copy_rows": (_POINTER, _POINTER, *[_INT] * 4),
    "gate_rows": (_POINTER, _POINTER, *[_INT] * 3, _FLOAT, _FLOAT, _INT, _INT),
    "cap_logits": (_POINTER, *[_INT] * 3, _FLOAT, _FLOAT, _INT, _INT),
    "qk_norm_rope_store": (_POINTER, _INT, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _FLOAT, _FLOAT, *[_INT] * 7),
    "prepare_latents": (_POINTER, _INT, _POINTER, _INT, *[_POINTER] * 4, _FLOAT, *[_INT] * 8),
    "absorb_w_uk": (_POINTER, _INT, _POINTER, _POINTER, *[_INT] * 8),
    "project_w_uv": (*[_POINTER] * 3, *[_INT] * 7),
    "store_expanded": (_POINTER, _POINTER, _INT, _POINTER, _POINTER, *[_INT] * 11),
    "prepare_index": (*[_POINTER] * 6, _FLOAT, *[_INT] * 5, _POINTER, *[_INT] * 3, _POINTER, *[_INT] * 2),
    "choose_keys": (
        *(_POINTER, _POINTER, _FLOAT, _POINTER, _INT, _INT, _POINTER, _INT, _POINTER, _POINTER, _POINTER, *[_INT] * 7),
    ),
    "head_squares": (_POINTER, _INT, _POINTER, *[_INT] * 6),
    "norm_width": (_POINTER, _INT, _POINTER, _POINTER, *[_INT] * 6, _FLOAT, _INT, _INT),
    "prepare_decodes": (
        *(_POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, *[_INT] * 4),
        *(_POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT, _POINTER, _POINTER),
    ),
    "advance_decodes": (*[_POINTER] * 3, _INT, _POINTER, _INT, _POINTER),
    "advance_drafts": (*[_POINTER] * 3, *[_INT] * 3, _POINTER, _POINTER),
    "embed": (*[_POINTER] * 3, *[_INT] * 4, _FLOAT, _INT),
    "best_tokens": (_POINTER, _INT, _POINTER, *[_INT] * 3),
    "packed_linear": (_POINTER, _INT, *[_POINTER] * 4, *[_INT] * 4, _FLOAT, _FLOAT, *[_INT] * 4),
    "quantised_linear": (
        *(ctypes.POINTER(QuantisedLayout), _POINTER, _INT, *[_POINTER] * 5, *[_INT] * 3, _FLOAT, _FLOAT, _INT, _INT),
    ),
    "route_tokens": (ctypes.POINTER(Routing), _POINTER, _INT, *[_POINTER] * 6, _INT, _INT),
    "widen_rows_to_float32": (_POINTER, _POINTER, *[_INT] * 3),
    "mix_experts": (ctypes.POINTER(ExpertPanels), *[_POINTER] * 5, _INT, _INT),
    "add_gated": (*[_POINTER] * 3, *[_INT] * 5),
    "experts_work_bytes": (ctypes.POINTER(ExpertPanels), _INT),
    "gated_delta_net_decode": (*_DELTA, *[_POINTER] * 3, *[_INT] * 3),
    "gated_delta_net_prefill": (*_DELTA, *[_POINTER] * 2, *[_INT] * 3),
    "sigmoid_gate": (_POINTER, _POINTER, *[_INT] * 5),
    "mamba2_decode": (*_MAMBA, *[_POINTER] * 3, *[_INT] * 3),
    "mamba2_prefill": (*_MAMBA, *[_POINTER] * 2, *[_INT] * 3),
    "group_squares": (_POINTER, _POINTER, *[_INT] * 4),
    "norm_groups": (*[_POINTER] * 4, *[_INT] * 4, _FLOAT, _INT, _INT),
    "short_conv_decode": (*_CONV, *[_POINTER] * 3, *[_INT] * 3),
    "short_conv_prefill": (*_CONV, *[_POINTER] * 2, *[_INT] * 3),
    "embed_panels": (*[_POINTER] * 3, *[_INT] * 4, _FLOAT, _INT, _INT),
    "pack_weight": (_POINTER, _POINTER, *[_INT] * 5),
    "pack_quantised": (ctypes.POINTER(QuantisedLayout), _POINTER, _POINTER, _INT, _POINTER, _POINTER, *[_INT] * 4),
    "quantised_panel_bytes": (ctypes.POINTER(QuantisedLayout),),
    "quantised_row_bytes": (ctypes.POINTER(QuantisedLayout), _INT),
    "panel_width": (),
    "vector_numbers": (),
    "pairs_columns": (_INT,),
    "max_group": (),
    "attention_lanes": (),
    "widens": (_INT,),
    "has_bfloat16_matrices": (),
    "quantise_rows": (*[_POINTER] * 3, *[_INT] * 4),
    "scale_rows": (*[_POINTER] * 4, *[_INT] * 4),
    "copy_blocks": (*[_POINTER] * 3, *[_INT] * 3),
    "encode_blocks": (ctypes.POINTER(BlockCodes), *[_POINTER] * 3, _INT),
    "decode_blocks": (ctypes.POINTER(BlockCodes), *[_POINTER] * 3, _INT),
    "add_adapters": (ctypes.POINTER(Adapters), _POINTER, _INT, *[_POINTER] * 4, *[_INT] * 3),
    "shared_all_reduce": (*[_POINTER] * 3, *[_INT] * 5),
    "shared_all_gather": (*[_POINTER] * 3, *[_INT] * 3),
    "run_tape": (_POINTER, _INT, _POINTER),
    "max_words": (),
}
_RESULTS = dict.fromkeys(("experts_work_bytes", "quantised_panel_bytes", "quantised_row_bytes"), _INT)
# A tape can not hold these functions.  Each of the others has a player, play_NAME.
_UNRECORDED = (
    "gated_delta_net_prefill", "mamba2_prefill", "short_conv_prefill", "store_expanded", "experts_work_bytes",
    "pack_weight", "pack_quantised", "quantised_panel_bytes", "quantised_row_bytes", "panel_width", "vector_numbers",
    "pairs_columns", "max_group", "attention_lanes", "widens", "has_bfloat16_matrices", "quantise_rows", "scale_rows",
    "copy_blocks", "encode_blocks", "decode_blocks", "add_adapters", "shared_all_reduce", "shared_all_gather",
    "run_tape", "max_words",
)  # fmt: skip


@cache
def native_library() -> ctypes.CDLL | None:
    """Return the kernels, compiled if need be; None, with one line in the log, if they are unavailable or switched
    off."""
    if not env.wants_native_kernels():
        _logger.info("native CPU kernels are switched off by TP_ENGINE_NATIVE")
        return None
    try:
        library = _load(built_library(_loaded_openmp()))
    except (RuntimeError, OSError, AttributeError) as error:  # RuntimeError: a BuildError, or no home folder
        _logger.warning("no native CPU kernels, PyTorch computes instead: %s", error)
        return None
    if found := disagreement(library):
        _logger.warning("no native CPU kernels, PyTorch computes instead: %s", found)
        return None
    return library


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, _RESULTS.get(name, ctypes.c_int)
        if name not in _UNRECORDED:
            setattr(library, name, Recordable(name, function, getattr(library, f"play_{name}")))
    return library


def _loaded_openmp() -> Path:
    """The OpenMP runtime that torch's own threads belong to."""
    assert torch.get_num_threads() > 0  # torch is loaded, and its runtime with it
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise BuildError(f"the loaded libraries can not be listed: {error}") from error
    paths = {Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    found = sorted(path for path in paths if path.name.startswith(("libgomp", "libomp", "libiomp5")))
    torch_root = Path(torch.__file__).parents[1]
    for path in found:
        if path.is_relative_to(torch_root):
            return path
    if not found:
        raise BuildError("torch has loaded no OpenMP runtime")
    return found[0]
