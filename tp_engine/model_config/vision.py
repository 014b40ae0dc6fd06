"""The vision part of a model, as far as text, rules and plans need to know it.  No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from tp_engine.model_config.config_json import ConfigJson

_Numbers: TypeAlias = tuple[float, float, float]
_MOST = {"hidden_size": 2**16, "intermediate_size": 2**20, "num_hidden_layers": 512, "depth": 512}
# The hub's names of Kimi's keys -> those of transformers, in the vision part and beside it.
_OF_KIMI = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_hidden_layers": "num_hidden_layers",
    "vt_num_attention_heads": "num_attention_heads",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
}
_OF_KIMIS_PROJECTOR = {"mm_hidden_size": "projection_hidden_size", "projector_ln_eps": "projection_layer_norm_eps"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """How a model sees images.

    ``family`` names the rules of its sizes and its tower.  An image is cut into patches of ``patch`` pixels a side, and
    ``merge`` x ``merge`` of them make one row of ``hidden_size`` elements, the text part's, at the place of one
    ``image_token_id``; each patch is repeated ``temporal_patch`` times, as if the image were that many frames.  Pixels
    from 0 to 1 are normalised by ``mean`` and ``std``, per colour.  The tokens ``start_token_id`` and ``end_token_id``,
    if config.json names them, stand around an image as text.

    ``turns_by_place``: tokens of an image turn by time, row and column (``RopeSpec.sections``), and text goes on after
    the larger of its rows and columns.  ``deep_layers``: how many further rows of an image are added after the first
    layers of the text part (DeepStack).  ``is_bidirectional``: tokens of an image see all of it, so that no chunk may
    cut it.  ``largest``: height and width of the image with the most rows.  The start takes it, ``mean`` and ``std``
    from the processor's settings (``images/rules.py``).  ``config`` is the object ``vision_config`` of config.json,
    ``whole`` all of the file, for what a family keeps elsewhere; both with transformers' names.
    """

    family: str
    image_token_id: int
    hidden_size: int
    patch: int
    merge: int
    temporal_patch: int = 1
    mean: _Numbers = (0.5, 0.5, 0.5)
    std: _Numbers = (0.5, 0.5, 0.5)
    start_token_id: int | None = None
    end_token_id: int | None = None
    turns_by_place: bool = False
    deep_layers: int = 0
    is_bidirectional: bool = False
    largest: tuple[int, int] = (0, 0)
    config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    whole: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), hash=False, compare=False)

    @property
    def cell(self) -> int:
        """Pixels a side of what becomes one row."""
        return self.patch * self.merge

    @property
    def is_served(self) -> bool:
        """Whether an engine takes images: it has been told how large they may be."""
        return self.most_rows > 0

    @property
    def most_rows(self) -> int:
        """Rows of the largest image."""
        height, width = self.largest
        return height * width // self.cell**2


def read_vision(config: ConfigJson, hidden_size: int) -> VisionSpec | None:
    """Return the vision part of the model that ``config`` describes, whose text part has ``hidden_size``.

    None: it has none that this engine knows, or no token for images.  Raises ``ConfigError`` for what is wrong in it.
    """
    read = _FAMILIES.get(config.architecture)
    own, token = config.peek("vision_config"), config.take_either(int, *_IMAGE_TOKENS)
    if read is None or not isinstance(own, dict) or token is None:
        return None
    family, rest = read
    vision = config.below(own, "vision_config")
    _check_sizes(vision)
    whole = {name: config.peek(name) for name in config.names}
    known: dict[str, Any] = {"family": family, "image_token_id": token, "hidden_size": hidden_size}
    return VisionSpec(**{**known, "config": own, "whole": whole, **rest(config, vision)})


def _check_sizes(vision: ConfigJson) -> None:
    """Refuse sizes by which a tower would be counted or made, and which none has."""
    for name in vision.names:
        value, most = vision.peek(name), _MOST.get(_OF_KIMI.get(name, name))
        if most is not None and value is not None and not (type(value) is int and 1 <= value <= most):
            rule = f"it must be a whole number from 1 to {most:,}"
            raise vision.refusal(name, value, rule, "take the model's own config.json")


def _qwen(config: ConfigJson, vision: ConfigJson, patch: int = 16) -> dict[str, Any]:
    """Qwen2.5-VL and later: three positions per token, two frames per patch."""
    return {
        "start_token_id": config.take("vision_start_token_id", int),
        "end_token_id": config.take("vision_end_token_id", int),
        "patch": vision.take_positive("patch_size", patch),
        "merge": vision.take_positive("spatial_merge_size", 2),
        "temporal_patch": vision.take_positive("temporal_patch_size", 2),
        "turns_by_place": True,
        "deep_layers": len(vision.take("deepstack_visual_indexes", list, []) or []),
    }


def _qwen2_5(config: ConfigJson, vision: ConfigJson) -> dict[str, Any]:
    return {**_qwen(config, vision, patch=14), "deep_layers": 0}


def _mistral3(config: ConfigJson, vision: ConfigJson) -> dict[str, Any]:
    """Rows of an image end with a token of the text."""
    return {
        "patch": vision.take_positive("patch_size", 14),
        "merge": config.take_positive("spatial_merge_size", 2),
    }


def _gemma3(config: ConfigJson, vision: ConfigJson) -> dict[str, Any]:
    """One size for all images; the patches of a square are averaged."""
    patch, side = vision.take_positive("patch_size", 14), vision.take_positive("image_size", 896)
    rows = round(config.take_positive("mm_tokens_per_image", 256) ** 0.5)
    return {
        "start_token_id": config.take("boi_token_index", int),
        "end_token_id": config.take("eoi_token_index", int),
        "patch": patch,
        "merge": max(1, side // patch // rows),
        "is_bidirectional": True,
    }


def _gemma4(config: ConfigJson, vision: ConfigJson) -> dict[str, Any]:
    """The tower itself maps pixels to -1 ... 1; bidirectional only where config.json says so."""
    inner = config.peek("text_config")
    way = inner.get("use_bidirectional_attention") if isinstance(inner, dict) else None
    return {
        "start_token_id": config.take("boi_token_id", int),
        "end_token_id": config.take("eoi_token_id", int),
        "patch": vision.take_positive("patch_size", 16),
        "merge": vision.take_positive("pooling_kernel_size", 3),
        "is_bidirectional": way == "vision",
    }


def _gemma4_unified(config: ConfigJson, vision: ConfigJson) -> dict[str, Any]:
    """Bidirectional unless config.json says otherwise."""
    inner = config.peek("text_config")
    says = isinstance(inner, dict) and "use_bidirectional_attention" in inner
    return {**_gemma4(config, vision), **({} if says else {"is_bidirectional": True})}


def _kimi(config: ConfigJson, vision: ConfigJson) -> dict[str, Any]:
    """The hub's file keeps the projector's sizes in the vision part, under names of its own like the others."""
    for name, only in (
        ("pos_emb_type", "divided_fixed"), ("merge_type", "sd2_tpool"),
        ("mm_projector_type", "patchmerger"), ("projector_hidden_act", "gelu"),
    ):  # fmt: skip
        vision.expect(name, str, only)
    rows, columns = vision.take_block("merge_kernel_size") or (2, 2)
    if rows != columns:
        raise vision.refusal("merge_kernel_size", [rows, columns], "both must be equal", "use another model")
    values = {name: vision.peek(name) for name in vision.names}
    own = {_OF_KIMI.get(name, name): value for name, value in values.items() if name != "_attn_implementation"}
    projector = {new: values[name] for name, new in _OF_KIMIS_PROJECTOR.items() if values.get(name) is not None}
    return {
        "patch": vision.take_positive("patch_size", 14),
        "merge": rows,
        "config": own,
        "whole": {**{name: config.peek(name) for name in config.names}, **projector},
    }


_IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id")
_FAMILIES: dict[str, tuple[str, Callable[[ConfigJson, ConfigJson], dict[str, Any]]]] = {
    "Qwen2VLForConditionalGeneration": ("qwen2_5_vl", _qwen2_5),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", _qwen2_5),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", _qwen),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl", _qwen),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", _qwen),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5", _qwen),
    "Mistral3ForConditionalGeneration": ("mistral3", _mistral3),
    "Gemma3ForConditionalGeneration": ("gemma3", _gemma3),
    "Gemma4ForConditionalGeneration": ("gemma4", _gemma4),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified", _gemma4_unified),
    "KimiK25ForConditionalGeneration": ("kimi_k25", _kimi),
    "Kimi_K25ForConditionalGeneration": ("kimi_k25", _kimi),
}
"""By architecture: the family's name, and the reader of what differs."""
