"""The oracle's own reader of checkpoints: any weight in float32, quantised ones by the formulas of their formats.

It shares no code with the engine that it judges: from ``weights/`` and ``layers/quantization/`` it imports nothing.

::

    tensors of a quantised module                               the weight (out, in) that they stand for
    weight (8 bits), weight_scale or weight_scale_inv           code * scale
    weight (8 bits), weight_scale (bytes)                       code * 2 ** (scale - 127)       MXFP8
    weight (4-bit floats), weight_scale, weight_scale_2         code * scale * scale_2          ModelOpt's NVFP4
    weight (4-bit floats), weight_scale (bytes)                 code * 2 ** (scale - 127)       Quark's MXFP4
    weight_packed (words), weight_scale, weight_zero_point      (code - zero) * scale           compressed-tensors
    weight_packed (bytes), weight_scale, weight_global_scale    code * scale / global           NVFP4, MXFP4
    qweight, qzeros, scales, g_idx                              (code - zero) * scale           AWQ, GPTQ
    NAME_blocks, NAME_scales (a stack of experts)               code * 2 ** (scale - 127)       gpt-oss
    NAME (8 bits), NAME_scale_inv (a stack of experts)          code * scale                    transformers' FP8
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tp_engine.errors import WeightError
from tp_engine.model_config.checkpoint_files import weight_files
from tp_engine.system.closing import Closing

# The values of a 4-bit float (e2m1), by its code; bit 3 is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Where a word of AWQ has the value of each of its 8 columns.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_AWQ, _GPTQ_V2 = "awq", "gptq_v2"
_CODES = ("I8", "U8", "F8_E4M3", "F8_E5M2")
_DEFAULT_BLOCK = (128, 128)
# Tensors that belong to a quantised module, or to the KV cache: no weights of their own.
_BESIDE = (
    ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_zero_point", ".weight_shape", ".weight_g_idx",
    ".weight_global_scale", ".input_global_scale", ".input_scale", "activation_scale", ".output_scale", ".qzeros",
    ".scales", ".g_idx", ".k_scale", ".v_scale", ".q_scale", "_scales", "_proj_scale_inv",
)  # fmt: skip


class StoredWeights(Closing):
    """The weights of a checkpoint's folder by name, whatever their format; read one at a time.

    ``quantization`` is config.json's ``quantization_config``.  ``WeightError`` if a file cannot be read.
    """

    def __init__(self, folder: Path, quantization: Mapping[str, Any] | None = None) -> None:
        self._stack, self._files = ExitStack(), {}
        self._quantization = dict(quantization or {})
        for path in weight_files(folder):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: more than the process may map
                self._stack.close()
                raise WeightError(f"{path} cannot be read as safetensors: {error}") from error
            self._files.update(dict.fromkeys(file.keys(), file))
        self._stored = {
            _weight_of(name): name
            for name in self._files
            if not name.endswith(_BESIDE) or (name.endswith("_scales") and name[:-7] + "_blocks" not in self._files)
        }

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """All weights, as an unquantised checkpoint would name them."""
        return list(self._stored)

    def is_quantised(self, name: str) -> bool:
        """Whether the weight is computed of codes and scales."""
        stored = self._stored[name]
        return stored != name or self._type(stored) in _CODES

    def read(self, name: str) -> torch.Tensor:
        """The weight ``name`` in float32; integers as they are."""
        stored = self._stored[name]
        module = name.removesuffix(".weight")
        if stored.endswith("_blocks"):
            codes, scale = self._tensor(f"{name}_blocks"), self._need(f"{name}_scales")
            values = _e2m1(codes) * _power_of_two(scale).unsqueeze(-1)  # (experts, out, in / 32, 32)
            return values.flatten(-2).transpose(1, 2).contiguous()  # (experts, in, out), as transformers has them
        if stored.endswith(".qweight"):
            return self._awq_or_gptq(module)
        if stored.endswith(".weight_packed"):
            return self._packed(module)
        if stored.endswith(".weight") and self._type(stored) in _CODES:
            return self._plain(module)
        if f"{name}_scale_inv" in self._files:
            return self._stacked(name)
        tensor = self._tensor(stored)
        return tensor.float() if tensor.is_floating_point() else tensor

    def _stacked(self, name: str) -> torch.Tensor:
        """Experts (experts, out, in): each has blocks, a scale, or a scale for gate and one for up."""
        codes, scale = self._tensor(name).float(), self._need(f"{name}_scale_inv").float()
        if scale.numel() <= 2 * len(codes):
            of_rows = scale.reshape(len(codes), -1)
            return codes * of_rows.repeat_interleave(codes.shape[1] // of_rows.shape[1], 1).unsqueeze(-1)
        return torch.stack([one * self._spread(own, one.shape) for one, own in zip(codes, scale, strict=True)])

    def _type(self, name: str) -> str:
        return str(self._files[name].get_slice(name).get_dtype())

    def _tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def _find(self, *names: str) -> torch.Tensor | None:
        return next((self._tensor(name) for name in names if name in self._files), None)

    def _need(self, *names: str) -> torch.Tensor:
        found = self._find(*names)
        if found is None:
            raise WeightError(f"the checkpoint has no {names[0]}, which a module with codes needs")
        return found

    def _plain(self, module: str) -> torch.Tensor:
        codes = self._tensor(f"{module}.weight")
        scale = self._need(f"{module}.weight_scale", f"{module}.weight_scale_inv")
        if scale.dtype == torch.uint8:
            values = _e2m1(codes) if codes.dtype == torch.uint8 else codes.float()
            return values * _by_columns(_power_of_two(scale), values.shape[1])
        if codes.dtype == torch.uint8:
            whole = self._need(f"{module}.weight_scale_2").float()
            return _e2m1(codes) * _by_columns(scale.float(), 2 * codes.shape[1]) * whole
        values = codes.float()
        if scale.numel() == 1:
            return values * scale.float().reshape(())
        if scale.dim() < 2 and len(scale) != len(values):
            raise WeightError(
                f"{module} has {len(scale)} scales for {len(values)} rows; which rows share one is unknown"
            )
        return values * self._spread(scale.float().reshape(len(scale), -1), values.shape)

    def _spread(self, scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """A scale per block -> one per element; blocks at the edges may be smaller."""
        rows, columns = shape
        block = [1 if len(scale) == rows else rows, columns]
        if scale.shape[1] > 1:
            usual = self._block if len(scale) != rows else (1, -(-columns // scale.shape[1]))
            block = [usual[0], usual[1]]
        elif len(scale) not in (1, rows):
            block = [self._block[0], columns]
        return scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]

    @property
    def _block(self) -> tuple[int, int]:
        """Rows and columns of a scale's block, where a checkpoint has blocks."""
        groups = self._quantization.get("config_groups") or {}
        found = [one["weights"].get("block_structure") for one in groups.values() if one.get("weights")]
        rows, columns = next(
            (one for one in (self._quantization.get("weight_block_size"), *found) if one), _DEFAULT_BLOCK
        )
        return int(rows), int(columns)

    def _packed(self, module: str) -> torch.Tensor:
        codes, scale = self._tensor(f"{module}.weight_packed"), self._need(f"{module}.weight_scale")
        if codes.dtype == torch.uint8:
            values, whole = _e2m1(codes), self._find(f"{module}.weight_global_scale")
            scale = _power_of_two(scale) if scale.dtype == torch.uint8 else scale.float()
            scale = scale if whole is None else scale / whole.float().reshape(())
            return values * _by_columns(scale, values.shape[1])
        rows, columns = self._need(f"{module}.weight_shape").tolist()
        bits = 32 * codes.shape[1] // columns
        unpacked = _words(codes, bits)[:, :columns].float()
        zero, groups = self._find(f"{module}.weight_zero_point"), self._find(f"{module}.weight_g_idx")
        of_groups = float(1 << (bits - 1)) if zero is None else _words(zero.T, bits).T[:rows].float()
        if groups is not None:
            groups = groups.long()
            middle = of_groups if isinstance(of_groups, float) else of_groups[:, groups]
            return (unpacked - middle) * scale.float()[:, groups]
        middle = of_groups if isinstance(of_groups, float) else _by_columns(of_groups, columns)
        return (unpacked - middle) * _by_columns(scale.float(), columns)

    def _awq_or_gptq(self, module: str) -> torch.Tensor:
        words, scales = self._tensor(f"{module}.qweight"), self._need(f"{module}.scales").float()
        zeros = self._need(f"{module}.qzeros")
        if self._quantization.get("quant_method") == _AWQ:
            codes, middle = _words(words, 4), _words(zeros, 4)
            order = (
                torch.arange(codes.shape[1], dtype=torch.int64, device="cpu")
                .reshape(-1, 8)[:, list(_AWQ_PLACES)]
                .flatten()
            )
            codes, middle = codes[:, order], middle[:, order]
            groups = torch.arange(len(codes), dtype=torch.int64, device="cpu") // (len(codes) // len(scales))
        else:
            bits = 32 * zeros.shape[1] // scales.shape[1]
            codes, middle = _words(words.T, bits).T, _words(zeros, bits)
            if self._quantization.get("checkpoint_format") != _GPTQ_V2:
                middle = middle + 1
            stored = self._find(f"{module}.g_idx")
            groups = (
                torch.arange(len(codes), dtype=torch.int64, device="cpu") // -(-len(codes) // len(scales))
                if stored is None
                else stored.long()
            )
        return ((codes.float() - middle.float()[groups]) * scales[groups]).T.contiguous()


def _weight_of(stored: str) -> str:
    for suffix in (".qweight", ".weight_packed"):
        if stored.endswith(suffix):
            return stored.removesuffix(suffix) + ".weight"
    return stored.removesuffix("_blocks")


def _words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 (rows, n) -> int64 (rows, n * 32 / bits), a word's lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int64, device="cpu")
    return (words.long().unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    """uint8 (..., n) -> float32 (..., 2 n), the value of the low bits first."""
    values = torch.tensor(_E2M1 + tuple(-value for value in _E2M1), dtype=torch.float32, device="cpu")
    return torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], -1).flatten(-2)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    return torch.exp2(exponents.float() - 127)


def _by_columns(of_groups: torch.Tensor, columns: int) -> torch.Tensor:
    """(rows, groups) -> (rows, columns)."""
    return of_groups.repeat_interleave(-(-columns // of_groups.shape[1]), 1)[:, :columns]
