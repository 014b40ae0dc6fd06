"""Tiny models that take images, one of every family, and transformers' answers to prompts with images.

Weights are drawn wide and norms with noise: with others the logits hardly depend on an image.  Towers have the
peculiarities of their families: windows, several layers whose rows are added later, pooling.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tests.covers import made
from tp_engine.images.image_input import ImageInput
from tp_engine.images.rules import image_rules, read_processor
from tp_engine.kernels.kv_cache.layer_kv import dequantise, quantise
from tp_engine.model_config import load_model_config

VOCAB_SIZE, IMAGE, BREAK, END = 320, 300, 305, 306
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ImageFamily:
    """The names of transformers' configuration, model and image processor, and what differs from ``_TEXT``.

    ``has_masks_of_generate``: transformers' ``generate`` masks as the model's documentation says; without its masks
    ``forward`` lets tokens of images see later ones in layers without a window, too.
    """

    config: str
    model: str
    processor: str
    vision: dict[str, Any]
    text: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    needs: str = "mm_token_type_ids"
    has_masks_of_generate: bool = False


_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
_QWEN = {"depth": 4, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
_QWEN3 = {**_QWEN, "patch_size": 16, "num_position_embeddings": 64}
_AREAS = {"size": {"shortest_edge": 1024, "longest_edge": 16384}, "patch_size": 16, "temporal_patch_size": 2}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_HYBRID = {
    "head_dim": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5},
}
_SLIDING = ["sliding_attention"] * 3 + ["full_attention"]
_GEMMA4_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 256,
    "standardize": True,
}
_GEMMA4 = {
    "sliding_window": 24,
    "layer_types": _SLIDING,
    "use_bidirectional_attention": "vision",
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
}
_LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "head_dim": 8,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_PIL = "Qwen2VLImageProcessorPil"

IMAGE_FAMILIES: dict[str, ImageFamily] = {
    "qwen3.5-vision": ImageFamily(
        "Qwen3_5Config",
        "Qwen3_5ForConditionalGeneration",
        _PIL,
        vision={**_QWEN3, "deepstack_visual_indexes": []},
        text=_HYBRID,
        whole=_TOKENS,
        settings=_AREAS,
    ),
    "qwen2-vl": ImageFamily(
        "Qwen2VLConfig",
        "Qwen2VLForConditionalGeneration",
        _PIL,
        vision={"depth": 2, "embed_dim": 32, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
        text={"hidden_size": 128, "rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3]}},
        whole=_TOKENS,
        settings={**_AREAS, "patch_size": 14},
    ),
    "qwen2.5-vl": ImageFamily(
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        _PIL,
        vision={**_QWEN, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1, 3]},
        text={"hidden_size": 128, "rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3]}},
        whole=_TOKENS,
        settings={**_AREAS, "patch_size": 14},
    ),
    "qwen3-vl": ImageFamily(
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        _PIL,
        vision={**_QWEN3, "deepstack_visual_indexes": [0, 1, 2]},
        text={"rope_parameters": _MROPE},
        whole=_TOKENS,
        settings=_AREAS,
    ),
    "qwen3-vl-moe": ImageFamily(
        "Qwen3VLMoeConfig",
        "Qwen3VLMoeForConditionalGeneration",
        _PIL,
        vision={**_QWEN3, "deepstack_visual_indexes": [0, 1, 2]},
        text={**_EXPERTS, "rope_parameters": _MROPE},
        whole=_TOKENS,
        settings=_AREAS,
    ),
    "mistral3-vision": ImageFamily(
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        "PixtralImageProcessorPil",
        vision={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 16,
            "patch_size": 14,
            "image_size": 112,
            "hidden_act": "silu",
        },
        text={"model_type": "mistral", "sliding_window": None},
        whole={"image_token_index": IMAGE, "spatial_merge_size": 2},
        settings={"size": {"longest_edge": 112}, "patch_size": 28},
        needs="",
    ),
    "kimi-k2.5-vision": ImageFamily(
        "Kimi_K25Config",
        "Kimi_K25ForConditionalGeneration",
        "KimiProcessor",
        vision={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "pos_emb_height": 6,
            "pos_emb_width": 6,
        },
        text=_LATENT,
        whole={**_TOKENS, "projection_hidden_size": 32},
        settings={"max_patches": 64, "size": {"max_height": 12, "max_width": 12}},
        needs="",
    ),
    "gemma3-vision": ImageFamily(
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        "Gemma3ImageProcessorPil",
        vision={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 14,
            "image_size": 112,
        },
        text={"sliding_window": 24, "layer_types": _SLIDING, "query_pre_attn_scalar": 16},
        whole={"image_token_index": IMAGE, "boi_token_index": 302, "eoi_token_index": 303, "mm_tokens_per_image": 16},
        settings={"size": {"height": 112, "width": 112}},
        needs="token_type_ids",
    ),
    "gemma4-vision": ImageFamily(
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        "Gemma4ImageProcessorPil",
        vision=_GEMMA4_VISION,
        text=_GEMMA4,
        whole={"image_token_id": IMAGE, "boi_token_id": 302, "eoi_token_id": 303, "audio_config": None},
        settings={"max_soft_tokens": 70},
    ),
    "gemma4-moe-vision": ImageFamily(
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        "Gemma4ImageProcessorPil",
        vision=_GEMMA4_VISION,
        text={**_GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40},
        whole={"image_token_id": IMAGE, "boi_token_id": 302, "eoi_token_id": 303, "audio_config": None},
        settings={"max_soft_tokens": 70},
    ),
    "gemma4-e-vision": ImageFamily(
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        "Gemma4ImageProcessorPil",
        vision={**_GEMMA4_VISION, "use_clipped_linears": True},
        text={
            **_GEMMA4,
            "use_bidirectional_attention": None,
            "attention_k_eq_v": False,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "pad_token_id": 4,
        },
        whole={"image_token_id": IMAGE, "boi_token_id": 302, "eoi_token_id": 303, "audio_config": None},
        settings={"max_soft_tokens": 70},
    ),
    "gemma4-unified-vision": ImageFamily(
        "Gemma4UnifiedConfig",
        "Gemma4UnifiedForConditionalGeneration",
        "CellProcessor",
        vision={"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 80},
        text={**_GEMMA4, "model_type": "gemma4_unified_text"},
        whole={"image_token_id": IMAGE, "boi_token_id": 302, "eoi_token_id": 303, "audio_config": None},
        settings={"max_soft_tokens": 70},
        has_masks_of_generate=True,
    ),
    "gemma4-narrow": ImageFamily(  # a window that is shorter than an image
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        "Gemma4ImageProcessorPil",
        vision=_GEMMA4_VISION,
        text={**_GEMMA4, "sliding_window": 12},
        whole={"image_token_id": IMAGE, "boi_token_id": 302, "eoi_token_id": 303, "audio_config": None},
        settings={"max_soft_tokens": 70},
    ),
    "gemma4-causal": ImageFamily(
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        "Gemma4ImageProcessorPil",
        vision=_GEMMA4_VISION,
        text={**_GEMMA4, "use_bidirectional_attention": None},
        whole={"image_token_id": IMAGE, "boi_token_id": 302, "eoi_token_id": 303, "audio_config": None},
        settings={"max_soft_tokens": 70},
    ),
    "qwen3.5-moe-vision": ImageFamily(
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeForConditionalGeneration",
        _PIL,
        vision={**_QWEN3, "deepstack_visual_indexes": []},
        text={**_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 48},
        whole=_TOKENS,
        settings=_AREAS,
    ),
}


class KimiProcessor:
    """A processor for Kimi, whose class in transformers needs torchvision, for images that are resized already."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    @classmethod
    def from_pretrained(cls, _folder: Path) -> KimiProcessor:
        return cls()

    def to_json_string(self) -> str:
        return json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, **self._settings})

    def __call__(self, images: Sequence[Any], **_options: Any) -> dict[str, torch.Tensor]:
        patches, sizes = list[torch.Tensor](), list[list[int]]()
        for image in images:
            pixels = (torch.tensor(np.array(image)).permute(2, 0, 1).float() / 255 - 0.5) / 0.5
            cut = pixels.unfold(1, 14, 14).unfold(2, 14, 14)  # colours, rows, columns, 14, 14
            sizes.append([1, *cut.shape[1:3]])
            patches.append(cut.permute(1, 2, 0, 3, 4).flatten(0, 1))
        return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(sizes)}


class CellProcessor:
    """A processor for Gemma 4 12B, whose class in transformers needs torchvision: Gemma 4's, whose patches of 16 pixels
    it joins to cells of 48."""

    def __init__(self, inner: Any = None, **settings: Any) -> None:
        import transformers

        self._inner = inner or transformers.Gemma4ImageProcessorPil(**settings)

    @classmethod
    def from_pretrained(cls, folder: Path) -> CellProcessor:
        import transformers

        return cls(transformers.Gemma4ImageProcessorPil.from_pretrained(folder))

    def to_json_string(self) -> str:
        text: str = self._inner.to_json_string()
        return text

    def __call__(self, images: Sequence[Any], **_options: Any) -> dict[str, torch.Tensor]:
        given = self._inner(images, return_tensors="pt")
        most = int(given["num_soft_tokens_per_image"].max())
        cells, places = torch.zeros(len(images), most, 48 * 48 * 3), torch.full((len(images), most, 2), -1)
        for image, (patches, at) in enumerate(zip(given["pixel_values"], given["image_position_ids"], strict=True)):
            at = at[at[:, 0] >= 0]
            columns, rows = (at.max(0).values + 1).tolist()
            pixels = (
                patches[: len(at)].view(rows, columns, 16, 16, 3).transpose(1, 2).reshape(rows * 16, columns * 16, 3)
            )
            for row in range(rows // 3):
                for column in range(columns // 3):
                    index = row * (columns // 3) + column
                    cells[image, index] = pixels[row * 48 : row * 48 + 48, column * 48 : column * 48 + 48].flatten()
                    places[image, index] = torch.tensor([column, row])
        return {"pixel_values": cells, "image_position_ids": places}


def _processor_class(name: str) -> Any:
    import transformers

    own = {"KimiProcessor": KimiProcessor, "CellProcessor": CellProcessor}
    return own[name] if name in own else getattr(transformers, name)


def image_config(name: str, whole: dict[str, int] | None = None, vision: Any = None, **text: Any) -> Any:
    """transformers' configuration; ``text`` changes the text part, ``vision`` the other, ``whole`` images' tokens."""
    import transformers

    made.add(name)
    family = IMAGE_FAMILIES[name]
    settings = {**_TEXT, **family.text, **text}
    if family.config.startswith("Qwen2"):
        del settings["head_dim"]  # this configuration has no such option
    hidden = family.text.get("hidden_size", _TEXT["hidden_size"])
    tower = {**family.vision, **(vision or {})}
    config = getattr(transformers, family.config)(
        text_config=settings,
        vision_config={"out_hidden_size": hidden, **tower} if "depth" in tower else tower,
        tie_word_embeddings=False,
        **{**family.whole, **(whole or {})},
    )
    config.dtype, config.architectures = "float32", [family.model]
    return config


def make_image_model(folder: Path, name: str, seed: int = 0, whole: dict[str, int] | None = None, **text: Any) -> Path:
    """Write config.json, preprocessor_config.json and weights into ``folder``; the rest as for ``image_config``."""
    import transformers

    family, config = IMAGE_FAMILIES[name], image_config(name, whole, **text)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, family.model)(config)
        for key, values in model.state_dict(keep_vars=True).items():
            if values.is_floating_point() and "inv_freq" not in key:
                if key.endswith(("put_min", "put_max")):  # bounds of a tower's linear layers, which some values reach
                    values.fill_(-0.5 if key.endswith("min") else 0.5)
                elif values.dim() > 1:
                    values.normal_(0.0, 0.08)
                else:
                    values.add_(torch.randn_like(values), alpha=0.1)
            if key.endswith("A_log"):
                values.sub_(3.0)
        model.lm_head.weight.mul_(6.0)
        model.lm_head.weight[
            min((whole or {"": IMAGE}).values()) :
        ].zero_()  # a generated placeholder is no image, and transformers refuses it
    model.save_pretrained(folder, save_original_format=not name.startswith("kimi"))
    processor = _processor_class(family.processor)(**family.settings)
    written = {**json.loads(processor.to_json_string()), **family.settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(written))
    return folder


_KIMI_NAMES = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.layers.": "vision_tower.encoder.blocks.",
    "model.vision_tower.final_layernorm.": "vision_tower.encoder.final_layernorm.",
    "model.vision_tower.": "vision_tower.",
    "model.mm_projector.in_proj.": "mm_projector.proj.0.",
    "model.mm_projector.out_proj.": "mm_projector.proj.2.",
    "model.mm_projector.": "mm_projector.",
}
_KIMI_MODULES = {
    "norm1": "norm0", "norm2": "norm1", "mlp.fc1": "mlp.fc0", "mlp.fc2": "mlp.fc1", "attn.proj": "wo",
    "pos_emb.position_embeddings": "pos_emb.weight",
}  # fmt: skip


def write_hub_form_of_kimi(source: Path, folder: Path) -> Path:
    """Write the model in ``source`` in the form of Kimi K2.5 on the hub: its names, keys of config.json and processor's
    file, one tensor for queries, keys and values of the tower, and one for each expert's products."""
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    vision, tensors = config["vision_config"], load_file(source / "model.safetensors")
    heads, found, parts = vision["num_attention_heads"], dict[str, torch.Tensor](), dict[str, list[torch.Tensor]]()
    for name, values in tensors.items():
        begin = next(one for one in _KIMI_NAMES if name.startswith(one))
        own = _KIMI_NAMES[begin] + name.removeprefix(begin)
        if begin.startswith("model.vision"):
            module = next((one for one in _KIMI_MODULES if f".{one}" in own), "")
            own = own.replace(f".{module}", f".{_KIMI_MODULES.get(module, '')}") if module else own
        if (fused := re.sub(r"attn\.[qkv]_proj", "wqkv", own)) != own:
            if ".v_proj" not in own:  # from halves that rotate together to neighbours that do
                values = values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
            parts.setdefault(fused, [values] * 3)["qkv".index(own[own.index("attn.") + 5])] = values
        elif ".experts." in own:
            products = {"gate_proj": 0, "up_proj": 1} if own.endswith("gate_up_proj") else {"down_proj": 0}
            for number, expert in enumerate(values):
                for product, rows in zip(products, expert.chunk(len(products)), strict=True):
                    found[f"{own.rpartition('.')[0]}.{number}.{product}.weight"] = rows.contiguous()
        else:
            found[own] = values
    found |= {name: torch.cat(three) for name, three in parts.items()}
    keys = {"hidden_size": "vt_hidden_size", "intermediate_size": "vt_intermediate_size"}
    keys |= {"num_hidden_layers": "vt_num_hidden_layers", "num_attention_heads": "vt_num_attention_heads"}
    keys |= {f"pos_emb_{one}": f"init_pos_emb_{one}" for one in ("height", "width", "time")}
    outer = {"image_token_id": "media_placeholder_token_id"}
    hub = {outer.get(name, name): value for name, value in config.items() if not name.startswith("projection")}
    hub |= {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "video_placeholder": "<|video|>",
        "ignore_index": -100,
    }
    own_vision = {new: vision[name] for name, new in keys.items()}
    own_vision |= {"_attn_implementation": "flash_attention_2", "model_type": "", "patch_size": 14}
    own_vision |= {"mm_hidden_size": config["projection_hidden_size"], "projector_ln_eps": 1e-5}
    own_vision |= {"merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mm_projector_type": "patchmerger"}
    folder.mkdir()
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    hub["text_config"] = {**hub["text_config"], "model_type": "kimi_k2"}
    (folder / "config.json").write_text(json.dumps({**hub, "vision_config": own_vision}))
    settings = json.loads((source / "preprocessor_config.json").read_text())
    limits = {"in_patch_limit": settings["max_patches"], "patch_limit_on_one_side": settings["size"]["max_height"]}
    limits |= {name: settings[name] for name in ("image_mean", "image_std")}
    limits |= {"patch_size": 14, "merge_kernel_size": 2, "fixed_output_tokens": None, "sample_fps": 2.0}
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": limits}))
    return folder


def draw_pixels(folder: Path, height: int, width: int, seed: int) -> Pixels:
    """Noise of the size to which an image of ``height`` x ``width`` pixels is resized."""
    spec = load_model_config(str(folder))[0]
    assert spec.vision is not None
    settings, _ = read_processor(folder)
    size = image_rules(spec.vision.family, settings, cell=spec.vision.cell).resized(height, width)
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


@dataclass
class Prompt:
    """Token ids with placeholders, and the images that stand there, in order."""

    ids: list[int]
    pixels: list[Pixels] = field(default_factory=list)
    images: list[ImageInput] = field(default_factory=list)


class PixelFiles:
    """Pixels in anonymous files, as the process that reads images keeps them; ``prompt`` makes prompts of them."""

    def __init__(self, folder: Path) -> None:
        spec = load_model_config(str(folder))[0]
        assert spec.vision is not None
        self._vision = spec.vision
        self.open: list[int] = []

    def prompt(self, parts: Iterable[Sequence[int] | Pixels]) -> Prompt:
        """Texts as token ids, and images, one after the other."""
        found = Prompt([])
        for part in parts:
            if isinstance(part, np.ndarray):
                self._add(found, part)
            else:
                found.ids += list(part)
        return found

    def _add(self, prompt: Prompt, pixels: Pixels) -> None:
        height, width = pixels.shape[:2]
        rows, columns = height // self._vision.cell, width // self._vision.cell
        ids = [IMAGE] * (rows * columns)
        if self._vision.family == "mistral3":
            ids = ([IMAGE] * columns + [BREAK]) * rows
            ids[-1] = END
        fd = os.memfd_create("pixels", os.MFD_CLOEXEC)
        self.open.append(fd)
        os.write(fd, b"\0" * 64 + pixels.tobytes())
        prompt.images.append(
            ImageInput(
                start=len(prompt.ids),
                num_tokens=len(ids),
                grid=(rows, columns),
                digest=digest_of(pixels),
                pid=os.getpid(),
                fd=fd,
                offset=64,
                height=height,
                width=width,
            )
        )
        prompt.ids += ids
        prompt.pixels.append(pixels)

    def close(self) -> None:
        """Close all files."""
        while self.open:
            os.close(self.open.pop())


@contextlib.contextmanager
def pixel_files(folder: Path) -> Iterator[PixelFiles]:
    """Files that are closed at the end."""
    files = PixelFiles(folder)
    try:
        yield files
    finally:
        files.close()


def digest_of(pixels: Pixels) -> bytes:
    """What stands for an image's content."""
    import hashlib

    return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()


def _attend_to_quantised(dtype: torch.dtype) -> str:
    """Make transformers' attention over keys and values that were stored in 8 bits ``dtype``; returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> Any:
        key, value = (dequantise(*quantise(states, dtype)) for states in (key, value))
        return sdpa_attention_forward(module, query, key, value, *rest, **named)

    name = f"quantised_{dtype}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


class Insides(NamedTuple):
    """For n tokens: their embeddings (n, hidden), images' rows among them, and their rotary positions (3, n) in time,
    row and column; the inputs of all layers, and the normalised outputs of the last, each (n, hidden)."""

    embeddings: torch.Tensor
    positions: torch.Tensor
    states: list[torch.Tensor]
    out: torch.Tensor


class Oracle:
    """transformers' model, with the processor that works by Pillow; its text part may keep K/V in ``kv_dtype``."""

    def __init__(
        self, folder: Path, name: str, image_token_id: int = IMAGE, kv_dtype: torch.dtype | None = None
    ) -> None:
        import transformers

        self._family, self._token = IMAGE_FAMILIES[name], image_token_id
        model = getattr(transformers, self._family.model).from_pretrained(folder, dtype=torch.float32)
        self._model: Any = model.eval()
        self._processor = _processor_class(self._family.processor).from_pretrained(folder)
        if kv_dtype is not None:
            self._model.set_attn_implementation({"text_config": _attend_to_quantised(kv_dtype)})

    @torch.inference_mode()
    def logprobs(self, prompt: Prompt, answer: Sequence[int]) -> torch.Tensor:
        """Log-probabilities (tokens, vocabulary) at each position of an answer, given what precedes it."""
        logits = self._run(prompt, answer).logits[0, len(prompt.ids) - 1 : -1]
        found: torch.Tensor = logits.float().log_softmax(-1)
        return found

    @torch.inference_mode()
    def insides(self, prompt: Prompt, answer: Sequence[int]) -> Insides:
        """The inputs and outputs of the text part for a prompt and its answer."""
        decoder, seen = self._model.get_decoder(), dict[Any, Any]()
        hooks = [
            decoder.register_forward_pre_hook(lambda _, args, given: seen.update(given), with_kwargs=True),
            decoder.register_forward_hook(lambda _, args, out: seen.update(out=out.last_hidden_state[0])),
        ]
        for index, layer in enumerate(decoder.layers):
            hooks.append(layer.register_forward_pre_hook(lambda _, args, index=index: seen.update({index: args[0][0]})))
        self._run(prompt, answer)
        for hook in hooks:
            hook.remove()
        states = [seen[index] for index in range(len(decoder.layers))]
        return Insides(seen["inputs_embeds"][0], seen["position_ids"][-3:, 0], states, seen["out"])

    def _run(self, prompt: Prompt, answer: Sequence[int]) -> Any:
        from PIL import Image

        ids = torch.tensor([[*prompt.ids, *answer]])
        given: dict[str, Any] = {}
        if prompt.pixels:
            given = dict(self._processor([Image.fromarray(one) for one in prompt.pixels], return_tensors="pt"))
            given.pop("num_soft_tokens_per_image", None)
        if self._family.needs and (prompt.pixels or self._family.needs == "token_type_ids"):
            given[self._family.needs] = (ids == self._token).to(torch.int64)
            given[self._family.needs][:, len(prompt.ids) :] = 0
        if self._family.has_masks_of_generate:
            given["attention_mask"] = self._model.create_masks_for_generate(
                config=self._model.config,
                inputs_embeds=torch.zeros(*ids.shape, 1),
                attention_mask=None,
                past_key_values=None,
                position_ids=torch.arange(ids.shape[1])[None],
                mm_token_type_ids=given.get(self._family.needs),
            )
        if hasattr(self._model.model, "rope_deltas"):
            self._model.model.rope_deltas = None
        return self._model(input_ids=ids, **given)

    def problem(self, prompt: Prompt, answer: Sequence[int], logprobs: Sequence[float]) -> str | None:
        """How an answer with its log-probabilities differs from greedy decoding; None if it does not."""
        expected = self.logprobs(prompt, answer)
        best = expected.argmax(-1).tolist()
        if best != list(answer):
            return f"{list(answer)} instead of {best}"
        error = (expected.max(-1).values - torch.tensor(logprobs)).abs().max().item()
        return f"log-probabilities off by {error:.1e}" if error > 1e-4 else None
