"""To which size each family of models resizes an image, and how many tokens the image takes then.  No torch.

The pixels are those of transformers' image processors, bit for bit: Pillow's filter, the same roundings.  An image of
``height`` x ``width`` pixels in a resized form is a grid of cells, one row of the tower's output each::

    rows, columns = height / cell, width / cell        cell = patch size * merged patches of a side

| family | resized to |
| --- | --- |
| Qwen2-VL to Qwen3-VL, Qwen3.5 | multiples of a cell nearest to the sides; the area lies within two limits |
| Gemma 3 | one size for all; the aspect ratio is lost |
| Gemma 4 | the largest multiples of a cell within a number of cells: small images grow |
| Mistral 3 | at most a length of the longer side, rounded up to cells |
| Kimi K2.5 | at most numbers of patches, in all and a side; black fills the last cells |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from tp_engine.errors import ConfigError, RequestError, did_you_mean, shown
from tp_engine.system.files import read_json
from tp_engine.system.units import round_up

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")

_TEKKEN = "tekken.json"
_CLIP = {"image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711)}
_HALF = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
_BILINEAR, _BICUBIC = 2, 3
_FILTERS = range(6)
_MOST_CELLS = 1 << 16
_MOST_PIXELS = 1 << 28
_LARGEST_RATIO = 200
_SOFT_TOKENS = (70, 140, 280, 560, 1120)
# What the towers expect in any case, and what a processor would do otherwise.
_FIXED = {
    "do_resize": True,
    "do_rescale": True,
    "do_center_crop": False,
    "do_pan_and_scan": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules(ABC):
    """One model's rules.

    ``cell`` is the side, in pixels, of what becomes one row of the tower's output.  ``resample`` is Pillow's number of
    a filter.  A resized pixel p of a channel becomes ``(float32(p / 255) - mean) / std``.  ``overridable`` are the
    settings of sizes, which ``--mm-processor-kwargs`` may change.
    """

    overridable: ClassVar[tuple[str, ...]] = ("size",)

    cell: int
    resample: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @classmethod
    @abstractmethod
    def of(cls, settings: Settings, **common: Any) -> Self:
        """Read a family's own settings."""

    @classmethod
    def respelled(cls, values: Mapping[str, Any], origin: str) -> dict[str, Any]:
        """Return a file's settings under transformers' names.  Raises ``ConfigError``."""
        return dict(values)

    @abstractmethod
    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width, multiples of ``cell``, of an image that has ``height`` x ``width`` pixels.

        ``RequestError`` for a shape that the family refuses.
        """

    def filled(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of what the image itself fills in its resized form, from the first row and column on; the
        rest is black."""
        return self.resized(height, width)

    @property
    @abstractmethod
    def largest(self) -> tuple[int, int]:
        """The resized height and width with the most rows of the tower's output."""

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of cells of a resized image."""
        return height // self.cell, width // self.cell

    def num_tokens(self, height: int, width: int) -> int:
        """Places in the prompt that a resized image takes."""
        rows, columns = self.grid(height, width)
        return rows * columns


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenRules(ImageRules):
    """Sides nearest to the image's; if the area is above ``max_pixels`` or below ``min_pixels``, both sides are scaled
    by the same factor, and rounded down, or up."""

    overridable: ClassVar[tuple[str, ...]] = ("size", "min_pixels", "max_pixels")

    min_pixels: int
    max_pixels: int

    @classmethod
    def of(cls, settings: Settings, **common: Any) -> Self:
        """Read the limits, which ``size`` calls edges, although they are areas."""
        size = settings.size("shortest_edge", "longest_edge")
        least = settings.pixels("min_pixels", size.get("shortest_edge", 56 * 56))
        most = settings.pixels("max_pixels", size.get("longest_edge", 28 * 28 * 1280))
        cell = common["cell"]
        if "max_pixels" in settings.asked and settings.asked.isdisjoint(("min_pixels", "size")):
            least = min(least, most)  # who asks for less than the file's least has not asked for that
        if not least <= most or most < cell * cell:
            raise settings.refusal(
                "size", {"shortest_edge": least, "longest_edge": most}, f"min <= max, and a cell has {cell * cell} px"
            )
        return cls(min_pixels=least, max_pixels=most, **common)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a resized image; ``RequestError`` where one side is over 200 times the other."""
        if max(height, width) > _LARGEST_RATIO * min(height, width):
            raise RequestError(
                f"an image has {width} x {height} pixels; this model takes none with a side above {_LARGEST_RATIO} "
                "times the other: crop it, or pad it"
            )
        cell = self.cell
        rows, columns = round(height / cell) * cell, round(width / cell) * cell
        if rows * columns > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            rows = max(cell, math.floor(height / scale / cell) * cell)
            columns = max(cell, math.floor(width / scale / cell) * cell)
        elif rows * columns < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * scale / cell) * cell for side in (height, width))
        return rows, columns

    @property
    def largest(self) -> tuple[int, int]:
        """The squarest form with the most cells."""
        return _largest(self.max_pixels // (self.cell * self.cell), self.cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRules(ImageRules):
    """One size for all images: Gemma 3's."""

    height: int
    width: int

    @classmethod
    def of(cls, settings: Settings, **common: Any) -> Self:
        """Read the one size."""
        size = settings.size("height", "width")
        height, width = size.get("height", 224), size.get("width", 224)
        if height % common["cell"] or width % common["cell"]:
            raise settings.refusal("size", size, f"multiples of {common['cell']}, the side of a cell of this tower")
        return cls(height=height, width=width, **common)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        return self.height, self.width

    @property
    def largest(self) -> tuple[int, int]:
        """The one size."""
        return self.height, self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftTokenRules(ImageRules):
    """The largest sides with at most ``max_tokens`` cells in the image's aspect ratio, rounded down: Gemma 4's."""

    overridable: ClassVar[tuple[str, ...]] = ("max_soft_tokens",)

    max_tokens: int

    @classmethod
    def of(cls, settings: Settings, **common: Any) -> Self:
        """Read the number of cells."""
        most = settings.whole("max_soft_tokens", 280)
        if most not in _SOFT_TOKENS:
            raise settings.refusal("max_soft_tokens", most, f"one of {_SOFT_TOKENS}")
        return cls(max_tokens=most, **common)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a resized image; where one side would be less than a cell, the other is at most as many
        cells as there may be."""
        cell = self.cell
        factor = math.sqrt(self.max_tokens * cell * cell / (height * width))
        rows, columns = math.floor(factor * height / cell), math.floor(factor * width / cell)
        if rows == 0:
            rows, columns = 1, min(width // height, self.max_tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.max_tokens), 1
        return rows * cell, columns * cell

    @property
    def largest(self) -> tuple[int, int]:
        """The squarest form with the most cells."""
        return _largest(self.max_tokens, self.cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestEdgeRules(ImageRules):
    """At most ``longest_edge`` pixels a side, rounded up to cells.

    Each row of cells ends with one more token: Mistral's ``[IMG_BREAK]``, after the last row ``[IMG_END]``.
    """

    longest_edge: int

    @classmethod
    def of(cls, settings: Settings, **common: Any) -> Self:
        """Read the longest side."""
        size = settings.size("longest_edge", "height", "width")
        if size.get("height") != size.get("width"):
            raise settings.refusal("size", size, "one length for both sides, such as {'longest_edge': 1540}")
        return cls(longest_edge=size.get("longest_edge", size.get("height", 1024)), **common)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a resized image."""
        ratio = max(height, width) / self.longest_edge
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        # 0 pixels, of a side much shorter than the other, make a cell too; transformers fails there
        rows, columns = (max(1, -(-side // self.cell)) for side in (height, width))
        return rows * self.cell, columns * self.cell

    def num_tokens(self, height: int, width: int) -> int:
        """Cells, and one token at the end of each row."""
        rows, columns = self.grid(height, width)
        return rows * (columns + 1)

    @property
    def largest(self) -> tuple[int, int]:
        """A square of the longest side."""
        return self.resized(self.longest_edge, self.longest_edge)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRules(ImageRules):
    """At most ``max_patches`` patches of ``patch`` pixels a side, and ``max_side`` of them a side; no image grows, and
    black fills the last cells: Kimi K2.5's.

    The hub's file has its settings below ``media_proc_cfg``, with other names.
    """

    overridable: ClassVar[tuple[str, ...]] = ("size", "max_patches")

    patch: int
    max_patches: int
    max_side: int

    @classmethod
    def respelled(cls, values: Mapping[str, Any], origin: str) -> dict[str, Any]:
        """Return the settings of ``media_proc_cfg``, if there are any; the file has no others of images then."""
        own = values.get("media_proc_cfg")
        if not isinstance(own, dict):
            return dict(values)
        if own.get("fixed_output_tokens") is not None:
            value = shown(own["fixed_output_tokens"])
            raise ConfigError(f"{origin}: fixed_output_tokens is {value}; it must be null: this engine counts tokens")
        names = {"in_patch_limit": "max_patches", "merge_kernel_size": "merge_size"}
        found: dict[str, Any] = {names.get(str(name), str(name)): value for name, value in own.items()}
        if (side := own.get("patch_limit_on_one_side")) is not None:
            found["size"] = {"max_height": side, "max_width": side}
        return found

    @classmethod
    def of(cls, settings: Settings, **common: Any) -> Self:
        """Read the limits, which are numbers of patches."""
        size = settings.size("max_height", "max_width")
        sides = size.get("max_height", 512), size.get("max_width", 512)
        if sides[0] != sides[1] or sides[0] > _MOST_CELLS:
            raise settings.refusal("size", size, f"one number for both sides, at most {_MOST_CELLS:,} patches")
        most, patch = settings.whole("max_patches", 16384), settings.whole("patch_size", 14)
        merge = settings.whole("merge_size", 2)
        if patch * merge != common["cell"]:
            rule = f"such that, times patch_size ({patch}), it gives the {common['cell']} px of config.json"
            raise settings.refusal("merge_size", merge, rule)
        return cls(patch=patch, max_patches=most, max_side=sides[0], **common)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the image and of what is black."""
        rows, columns = self.filled(height, width)
        return round_up(rows, self.cell), round_up(columns, self.cell)

    def filled(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the scaled image.  Whole patches are counted, before it is scaled."""
        rows, columns = (max(1, side // self.patch) for side in (height, width))
        longest = self.max_side * self.patch
        scale = min(1.0, math.sqrt(self.max_patches / (rows * columns)), longest / height, longest / width)
        height, width = (min(longest, max(1, int(side * scale))) for side in (height, width))
        return height, width

    @property
    def largest(self) -> tuple[int, int]:
        """The sides of the most cells: more than the limit of patches, which counts no patch that is cut."""
        longest, patch = self.max_side * self.patch, self.patch
        found = (0, 0)
        for height in range(self.cell, round_up(longest, self.cell) + 1, self.cell):
            # The last row of cells has a pixel at least, and each side has up to patch - 1 pixels that do not count.
            least = height - self.cell + 1 - (patch - 1)
            width = longest if least < 1 else min(longest, self.max_patches * patch**2 // least + patch - 1)
            found = max(found, (height, round_up(width, self.cell)), key=math.prod)
        return found


class Settings:
    """A processor's settings as a file has them, with the defaults of a family in transformers; ``origin`` is the
    file's name in errors.  ``asked`` are the names of those that override the file's."""

    def __init__(
        self, values: Mapping[str, Any], origin: str, defaults: Mapping[str, Any], asked: Collection[str] = ()
    ) -> None:
        self.asked = frozenset(asked)
        self._values = {**defaults, **{name: value for name, value in values.items() if value is not None}}
        self._origin = origin

    def refusal(self, name: str, value: object, rule: str) -> ConfigError:
        """Return the error for a value that breaks a rule."""
        return ConfigError(f"{self._origin}: {name} is {shown(value)}; it must be {rule}")

    def whole(self, name: str, default: int, most: int = _MOST_CELLS) -> int:
        """Return a whole number from 1 to ``most``."""
        value = self._values.get(name, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self.refusal(name, value, f"a whole number from 1 to {most:,}")
        return value

    def pixels(self, name: str, default: int) -> int:
        """Return an area in pixels."""
        return self.whole(name, default, _MOST_PIXELS)

    def size(self, *names: str) -> dict[str, int]:
        """Return the members ``names`` of ``size`` that are there, each a number of pixels."""
        found = self._values.get("size", {})
        if type(found) is int:
            found = {names[0]: found}
        if not isinstance(found, dict):
            raise self.refusal("size", found, f"an object with {', '.join(names)}")
        inner = Settings(found, f"{self._origin}: size", {})
        return {name: inner.pixels(name, 1) for name in names if found.get(name) is not None}

    def common(self, cell: int) -> dict[str, Any]:
        """Return the settings of all families; ``ConfigError`` for what none may have."""
        for name, only in _FIXED.items():
            if (value := self._values.get(name, only)) != only:
                raise self.refusal(name, value, f"{only}: this engine supports nothing else")
        factor = self._values.get("rescale_factor", 1 / 255)
        if not isinstance(factor, float) or not math.isclose(factor, 1 / 255):
            raise self.refusal("rescale_factor", factor, "1/255: this engine supports nothing else")
        resample = self._values.get("resample", _BICUBIC)
        if type(resample) is not int or resample not in _FILTERS:
            raise self.refusal("resample", resample, f"the number of one of Pillow's filters, 0 to {_FILTERS[-1]}")
        mean, std = (self._channels(name) for name in ("image_mean", "image_std"))
        if not self._values.get("do_normalize", True):
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        return {"cell": cell, "resample": resample, "mean": mean, "std": std}

    def _channels(self, name: str) -> tuple[float, float, float]:
        value = self._values[name]
        values = [value] * 3 if type(value) in (int, float) else value
        if (
            not isinstance(values, (list, tuple))
            or len(values) != 3
            or not all(type(one) in (int, float) and math.isfinite(one) for one in values)
            or (name == "image_std" and 0 in values)
        ):
            raise self.refusal(name, value, "three numbers, one per channel")
        first, second, third = (float(one) for one in values)
        return first, second, third


# VisionSpec.family -> its rules, and what transformers takes where a file says nothing.
_FAMILIES: dict[str, tuple[type[ImageRules], dict[str, Any]]] = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_5"), (QwenRules, _CLIP)),
    "gemma3": (FixedRules, {**_HALF, "resample": _BILINEAR}),
    **dict.fromkeys(
        ("gemma4", "gemma4_unified"),
        (SoftTokenRules, {"do_normalize": False, "image_mean": (0.0,) * 3, "image_std": (1.0,) * 3}),
    ),
    "kimi_k25": (PaddedRules, _HALF),
    "mistral3": (LongestEdgeRules, _CLIP),
}


def image_rules(
    family: str,
    processor: Mapping[str, Any],
    *,
    cell: int,
    overrides: Mapping[str, Any] | None = None,
    origin: str = PROCESSOR_FILES[1],
    asked_by: str = "--mm-processor-kwargs",
) -> ImageRules:
    """Return the rules of a model.

    ``family`` is that of ``VisionSpec``, ``processor`` the content of the file ``origin``
    (``read_processor``), ``cell`` the tower's patch size times the merged patches of a side, and ``overrides`` those
    that ``asked_by`` has.  ``ConfigError`` for a family without rules, and for settings that have no effect or that no
    tower could take.
    """
    if family not in _FAMILIES:
        raise ConfigError(f"images of {family} have no rules; those of {', '.join(_FAMILIES)} have")
    kind, defaults = _FAMILIES[family]
    known = kind.overridable
    for name in overrides or {}:
        if name not in known:
            raise ConfigError(
                f"{asked_by} has {shown(name)}; it may have {', '.join(known)}, for {family}"
                + did_you_mean(str(name), known)
            )
    values = kind.respelled(processor, origin)
    if overrides:
        values, origin = {**values, **overrides}, asked_by
        if "size" in overrides:  # it also stands for the file's older names
            values |= {name: overrides.get(name) for name in ("min_pixels", "max_pixels")}
    settings = Settings(values, origin, defaults, overrides or ())
    return kind.of(settings, **settings.common(cell))


def read_processor(folder: Path) -> tuple[dict[str, Any], str]:
    """Return a checkpoint's settings of its image processor, and the name of their file.

    Newer files have them in processor_config.json below ``image_processor``, Mistral's own in tekken.json.
    ``ConfigError`` where there is none.
    """
    for name in PROCESSOR_FILES:
        try:
            found = read_json(folder / name)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder / name} cannot be read: {error}") from error
        if name == PROCESSOR_FILES[0] and isinstance(found, dict):
            found = found.get("image_processor")
        if isinstance(found, dict):
            return found, name
    if (found := _read_tekken(folder)) is not None:
        return found, _TEKKEN
    raise ConfigError(
        f"{folder} has no {PROCESSOR_FILES[1]}, which says to which size this model resizes images: download it from "
        "the model's repository, or serve the text part alone with --limit-mm-per-prompt '{\"image\": 0}'"
    )


def has_processor(folder: Path) -> bool:
    """Return whether a checkpoint says to which size its images are resized."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES) or _read_tekken(folder) is not None


def _read_tekken(folder: Path) -> dict[str, Any] | None:
    """The longest side that a tokenizer of Mistral's names; None without one, and for one of text."""
    try:
        found = read_json(folder / _TEKKEN)
    except (OSError, ValueError):
        return None
    own = found.get("image") or found.get("multimodal") if isinstance(found, dict) else None
    longest = own.get("max_image_size") if isinstance(own, dict) else None
    return None if longest is None else {"size": {"longest_edge": longest}}


def _largest(num_cells: int, cell: int) -> tuple[int, int]:
    """The sides of the squarest rectangle with the most of ``num_cells`` cells."""
    side = math.isqrt(num_cells)
    rows = max(
        (rows for rows in range(side, 0, -1) if num_cells // rows <= _LARGEST_RATIO * rows),
        key=lambda rows: rows * (num_cells // rows),
    )
    return rows * cell, num_cells // rows * cell
