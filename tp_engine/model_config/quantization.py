"""How a checkpoint's linear weights are quantised, as data, and which modules are.  No torch.

``quant_methods/`` reads it from ``quantization_config``.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from tp_engine.errors import ConfigError
from tp_engine.model_config.patterns import compile_pattern

Packing: TypeAlias = Literal[
    "plain", "mxfp8", "pack-quantized", "awq", "gptq", "gptq_v2",
    "mxfp4", "mxfp4-packed", "mxfp4-weight", "mxfp4-int8", "nvfp4", "modelopt-nvfp4",
]  # fmt: skip
CodeKind: TypeAlias = Literal["int4", "int8", "e4m3", "e2m1"]
Activations: TypeAlias = Literal["token", "tensor", "group"]
Blocks: TypeAlias = Literal["nvfp4", "mxfp4", "mxfp8"]

# Of weights of 8 bits: the makers', and transformers' (Devstral 2 and Ministral 3 in FP8, DeepSeek).
_SCALE_NAMES = ("weight_scale", "weight_scale_inv")

REGEX = "re:"
EVERY_MODULE = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """How one module's weight (N, K) is stored.

    ``layers/quantization/packings.py`` has the tensors of each ``packing``.  A scale covers ``group`` columns (None:
    all) of ``row_block`` rows (None: all).  ``has_zeros``: codes have zero points.  ``activations``: how the
    checkpoint's makers quantised the inputs: ``token`` a scale per token, found while running; ``group`` the same for
    each ``group`` columns of a token; ``tensor`` one stored scale; None: not to 8 bits.  ``input_blocks``: the format
    in blocks to which they rounded the inputs; None: to none.  ``scale_name`` is the suffix of the scales' tensor;
    ``order_name`` that of the groups of the columns, if these are not in order.
    """

    packing: Packing
    kind: CodeKind
    group: int | None = None
    row_block: int | None = 1
    has_zeros: bool = False
    activations: Activations | None = None
    input_blocks: Blocks | None = None
    scale_name: str = "weight_scale"
    order_name: str = ""

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return 4 if self.kind in ("int4", "e2m1") else 8

    @property
    def experts_block(self) -> int:
        """Inner elements of an expert that stay on one rank: blocks of MXFP4, which lie on disk as bytes."""
        return 32 if self.packing == "mxfp4" else 1

    @property
    def input_scale_name(self) -> str:
        """The suffix of the tensor with the inputs' stored scale: transformers' name goes with its weights' one."""
        return "activation_scale" if self.scale_name == _SCALE_NAMES[1] else "input_scale"

    def scaled_as(self, suffixes: Set[str]) -> WeightScheme:
        """Return the same; weights of 8 bits have the scales that are among the tensors' last parts ``suffixes``."""
        found = [name for name in _SCALE_NAMES if name in suffixes]
        takes_found = self.packing in ("plain", "mxfp8") and len(found) == 1
        return replace(self, scale_name=found[0]) if takes_found else self


@dataclass(frozen=True, kw_only=True)
class QuantizationSpec:
    """A checkpoint's quantisation.

    ``method`` is the name in errors and logs.  ``rules`` are pairs of a pattern for modules' names and their scheme
    (None: not quantised); the first one that matches holds, and a module that none matches is not quantised::

        re:...         a regular expression for the beginning of the name
        with * ? [     a pattern of the shell for the name or for the first of its parts: a.*.b matches a.0.b.c
        any other      consecutive parts of the name: b.c and b.c. match a.b.c.d, not a.b.cd

    With ``rounds_inputs``, schemes have their ``input_blocks``; otherwise inputs stay as they are.

    ``skipped`` are the last parts of names of tensors that may be left unread.  ``has_kv_scales``: the checkpoint has
    scales for an fp8 KV cache.  ``is_found_by_tensors``: the rules may name too many modules; a module whose tensors
    are those of an unquantised one is not quantised.
    """

    method: str
    rules: tuple[tuple[str, WeightScheme | None], ...]
    skipped: tuple[str, ...] = ()
    has_kv_scales: bool = False
    is_found_by_tensors: bool = False
    rounds_inputs: bool = False

    def scheme_of(self, *names: str) -> WeightScheme | None:
        """Return the scheme of a module, by any of its ``names`` (usual spelling, checkpoint's spelling)."""
        index = min(self._matcher.first(name) for name in names)
        scheme = self.rules[index][1] if index < len(self.rules) else None
        if scheme is None or scheme.input_blocks is None or self.rounds_inputs:
            return scheme
        return replace(scheme, input_blocks=None)

    def with_rounded_inputs(self) -> QuantizationSpec:
        """Return the same, whose inputs are rounded to the blocks that it declares.

        Raises ``ConfigError`` if it declares none.
        """
        if all(scheme is None or scheme.input_blocks is None for _, scheme in self.rules):
            raise ConfigError(
                f"round_activations is set, but the checkpoint ({self.method}) does not say that activations are "
                "NVFP4, MXFP4 or MXFP8; leave round_activations out"
            )
        return replace(self, rounds_inputs=True)

    def scheme_of_parts(self, parts: Sequence[Sequence[str]]) -> WeightScheme | None:
        """Return the scheme that the ``parts`` of one product share, each given by its names.

        Raises ``ConfigError`` if two differ.
        """
        first, *others = parts
        scheme = self.scheme_of(*first)
        for part in others:
            if (other := self.scheme_of(*part)) != scheme:
                raise ConfigError(
                    f"config.json: quantization_config stores {first[0]} {_described(scheme)} and {part[0]} "
                    f"{_described(other)}; they are parts of one product, which is quantised as a whole or not at "
                    "all: use a checkpoint that quantises, or ignores, all its parts alike"
                )
        return scheme

    def found_among(self, names: Set[str]) -> QuantizationSpec:
        """Return the same with the scales that are among the tensors ``names``; if it ``is_found_by_tensors``, without
        the modules that are plain there."""
        suffixes = {name.rpartition(".")[2] for name in names}
        rules = tuple((pattern, None if one is None else one.scaled_as(suffixes)) for pattern, one in self.rules)
        found = replace(self, rules=rules)
        return found.without(plain_modules(names)) if self.is_found_by_tensors else found

    def without(self, modules: Sequence[str]) -> QuantizationSpec:
        """Return the same, without these ``modules``, which are not quantised."""
        return replace(self, rules=tuple((module, None) for module in modules) + self.rules)

    @cached_property
    def _matcher(self) -> _Matcher:
        return _Matcher([pattern for pattern, _ in self.rules])


def plain_modules(names: Set[str]) -> tuple[str, ...]:
    """Return the modules that have a plain weight among the tensors ``names``: a quantised one has codes or scales."""
    modules = sorted(name.removesuffix(".weight") for name in names if name.endswith(".weight"))
    marks = ("qweight", "weight_scale", "weight_scale_inv", "scale")
    return tuple(one for one in modules if not any(f"{one}.{mark}" in names for mark in marks))


class _Matcher:
    """Finds the first of ``patterns`` that matches a name."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._num_patterns = len(patterns)
        self._plain: dict[str, int] = {}
        self._regexes: list[tuple[int, re.Pattern[str]]] = []
        self._found: dict[str, int] = {}
        for index, pattern in enumerate(patterns):
            if pattern.startswith(REGEX):
                self._regexes.append((index, compile_pattern(pattern.removeprefix(REGEX), "quantization_config")))
            elif any(mark in pattern for mark in "*?["):
                whole = fnmatch.translate(pattern)
                self._regexes.append((index, re.compile(f"{whole}|{fnmatch.translate(pattern + '.*')}")))
            else:
                self._plain.setdefault(pattern.strip("."), index)
        self._lengths = sorted({name.count(".") + 1 for name in self._plain})

    def first(self, name: str) -> int:
        """Return the pattern's index; the number of patterns if none matches."""
        index = self._found.get(name)
        if index is None:
            index = self._found[name] = self._search(name)
        return index

    def _search(self, name: str) -> int:
        segments = name.split(".")
        runs = (
            ".".join(segments[start : start + length])
            for length in self._lengths
            for start in range(len(segments) - length + 1)
        )
        best = min((self._plain.get(run, self._num_patterns) for run in runs), default=self._num_patterns)
        for index, regex in self._regexes:
            if index >= best:
                break
            if regex.match(name):
                return index
        return best


def _described(scheme: WeightScheme | None) -> str:
    if scheme is None:
        return "unquantised"
    group = "" if scheme.group is None else f" in groups of {scheme.group}"
    return f"as {scheme.kind}{group} ({scheme.packing})"
