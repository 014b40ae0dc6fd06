"""Vision towers: transformers' classes, each behind the same door.

A tower encodes one image per call, so that what it gives does not depend on other images.  Every rank has the whole
tower, and encodes other images.  *A new family* is a class here, a row of ``_TOWERS``, and a reader in
``model_config/vision.py``.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from tp_engine.errors import ConfigError
from tp_engine.model_config.vision import VisionSpec
from tp_engine.models.made_in import MadeIn
from tp_engine.weights.source import Source, Span, as_stored, set_sources, whole

# Qwen2-VL's hidden_size is the text's; Gemma 4 12B has none.
_HIDDEN_SIZES = ("embed_dim", "hidden_size", "mm_embed_dim")


class VisionTower(nn.Module, ABC):
    """The vision part of a model.

    ``parts`` are its attributes, which checkpoints have below ``model.`` or not, ``below`` what may follow a part's
    name in them.  ``layers`` is the path of its layers, all alike, ``embeds`` that of what makes the patches of the
    first one, and ``between`` that of a list of modules that read what some of them give.
    """

    parts: ClassVar[tuple[str, ...]]
    below: ClassVar[tuple[str, ...]] = ("",)
    layers: ClassVar[str]
    embeds: ClassVar[str]
    between: ClassVar[str] = ""

    def __init__(self, spec: VisionSpec, config: Any) -> None:
        """``config`` is transformers' configuration of the whole model."""
        super().__init__()
        self.spec = spec
        sizes = (getattr(config.vision_config, name, None) for name in _HIDDEN_SIZES)
        self.hidden_size: int = next(filter(None, sizes))
        self.build(config)

    @abstractmethod
    def build(self, config: Any) -> None:
        """Make the ``parts``."""

    @abstractmethod
    def encode(self, image: torch.Tensor) -> torch.Tensor:
        """``image`` (3, height, width) float32, normalised -> its rows (n, width)."""

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Within this context only as many layers run as the peak of memory needs: one beside what the first has read
        and what others have left (DeepStack)."""
        path, _, name = self.layers.rpartition(".")
        owner = self.get_submodule(path)
        layers = getattr(owner, name)
        setattr(owner, name, layers[: max(2, 1 + self.spec.deep_layers)])
        try:
            yield
        finally:
            setattr(owner, name, layers)

    @property
    def stack(self) -> list[nn.Module]:
        """Its layers, from the first to the last."""
        return list(self.get_submodule(self.layers).children())

    def beside_layers(self) -> dict[str, nn.Module]:
        """Return the modules, by path, that run beside layers and take as long as some of them."""
        between = self.get_submodule(self.between).named_children() if self.spec.deep_layers else ()
        return {
            self.embeds: self.get_submodule(self.embeds),
            **{f"{self.between}.{name}": one for name, one in between},
        }

    def layer_work(self) -> tuple[float, float]:
        """Return the products of numbers of a layer: for each row of an image, and for each pair of its rows."""
        per_row = self.spec.merge**2
        weights = sum(one.numel() for one in self.stack[0].parameters() if one.dim() > 1)
        return weights * per_row, 2 * self.hidden_size * per_row**2

    @property
    def unfinished_bytes(self) -> int:
        """Memory of the largest image between two of its layers: pixels, patches, and what some layers left."""
        spec = self.spec
        of_row = spec.merge**2 * self.hidden_size + spec.deep_layers * spec.hidden_size
        return spec.most_rows * (3 * spec.cell**2 + of_row * self.dtype.itemsize)

    @property
    def width(self) -> int:
        """Elements of a row: those for the embedding, then those for each of the first layers (DeepStack)."""
        return self.spec.hidden_size * (1 + self.spec.deep_layers)

    @property
    def dtype(self) -> torch.dtype:
        """Type of its weights and rows."""
        return next(self.parameters()).dtype

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """``pixels`` (height, width, 3) uint8 -> rows (rows * columns, width), by the image's grid, row by row."""
        return self.encode(normalised(pixels, self.spec))

    def take_sources(self) -> None:
        """Say where each parameter's values are in a checkpoint."""
        for attribute in self.parts:
            _make_parameters_of_buffers(getattr(self, attribute))
            for name, parameter in getattr(self, attribute).named_parameters():
                parameter.requires_grad_(False)
                set_sources(parameter, *([one] for one in self.stored(attribute, name, tuple(parameter.shape))))

    def stored(self, attribute: str, name: str, shape: tuple[int, ...]) -> list[Source]:
        """Return where the values of a parameter of a part may be, in the ways in which checkpoints store them."""
        spans = whole(shape)
        return [
            Source(name=f"{above}{attribute}.{below}{name}", shape=shape, taken=spans, target=spans, is_spelled=False)
            for above in ("model.", "")
            for below in self.below
        ]


class _LinearPatches(nn.Module):
    """Patch embedding by a product: a convolution whose stride is its kernel does the same, slowly."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.proj = conv

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """``patches`` (n, elements) -> (n, hidden)."""
        return _by_product(self.proj, patches)


def _by_product(conv: nn.Module, patches: torch.Tensor) -> torch.Tensor:
    """What ``conv`` makes of ``patches`` (n, elements), each of its kernel's size -> (n, channels)."""
    weight, bias = conv.weight, conv.bias
    assert isinstance(weight, torch.Tensor) and (bias is None or isinstance(bias, torch.Tensor))
    return F.linear(patches.to(weight.dtype), weight.flatten(1), bias)


class _PatchProduct(nn.Module):
    """Stands for a convolution over an image whose stride is its kernel, with the names of its weights.  A convolution
    on a CPU takes memory of its own, several times that of the image."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``images`` (1, 3, height, width) -> (1, hidden, rows, columns)."""
        patch = self.weight.shape[2]
        embedded = _by_product(self, merged_patches(images[0], patch, 1, 1))
        return embedded.T.view(1, -1, images.shape[2] // patch, images.shape[3] // patch)


class QwenTower(VisionTower):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5."""

    parts, layers, embeds = ("visual",), "visual.blocks", "visual.patch_embed"
    between = "visual.deepstack_merger_list"

    def build(self, config: Any) -> None:
        self.visual = _from_config(config.vision_config)
        self.visual.patch_embed = _LinearPatches(self.visual.patch_embed.proj)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        taken = getattr(self.visual, "deepstack_visual_indexes", None)
        self.visual.deepstack_visual_indexes = list(range(self.spec.deep_layers))
        try:
            with super().shortened():
                yield
        finally:
            self.visual.deepstack_visual_indexes = taken

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        patches = merged_patches(image, spec.patch, spec.merge, spec.temporal_patch)
        sizes = [1, image.shape[1] // spec.patch, image.shape[2] // spec.patch]
        found = self.visual(
            patches.to(self.dtype), grid_thw=torch.tensor([sizes], device=image.device, dtype=torch.int64)
        )
        rows: torch.Tensor = found.pooler_output
        return torch.cat((rows, *found.deepstack_features), 1) if spec.deep_layers else rows


class PixtralTower(VisionTower):
    """Mistral 3: the projector merges patches."""

    parts, layers = ("vision_tower", "multi_modal_projector"), "vision_tower.transformer.layers"
    embeds = "vision_tower.patch_conv"

    def build(self, config: Any) -> None:
        from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector

        if config.vision_feature_layer != -1:
            raise ValueError(f"vision_feature_layer is {config.vision_feature_layer}, and must be -1, the last layer")
        self.vision_tower = _from_config(config.vision_config)
        self.vision_tower.config._attn_implementation = _without_mask()
        self.vision_tower.patch_conv = _PatchProduct(self.vision_tower.patch_conv)
        self.multi_modal_projector = Mistral3MultiModalProjector(config)

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        sizes = [tuple(image.shape[1:])]
        found = self.vision_tower(image.unsqueeze(0).to(self.dtype), image_sizes=sizes).last_hidden_state
        rows: torch.Tensor = self.multi_modal_projector(found.squeeze(0), sizes)
        return rows


class SiglipTower(VisionTower):
    """Gemma 3: images of one size; the projector averages patches."""

    parts, below = ("vision_tower", "multi_modal_projector"), ("vision_model.", "")
    layers, embeds = "vision_tower.encoder.layers", "vision_tower.embeddings"

    def build(self, config: Any) -> None:
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

        side = config.vision_config.image_size // config.vision_config.patch_size
        if side != self.spec.merge * round(config.mm_tokens_per_image**0.5):
            raise ValueError(f"{side} x {side} patches are no multiple of mm_tokens_per_image")
        config.vision_config.vision_use_head = False  # its output is not read
        self.vision_tower = _from_config(config.vision_config)
        embeddings = self.vision_tower.embeddings
        embeddings.patch_embedding = _PatchProduct(embeddings.patch_embedding)
        self.multi_modal_projector = Gemma3MultiModalProjector(config)

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        found = self.vision_tower(pixel_values=image.unsqueeze(0).to(self.dtype)).last_hidden_state
        rows: torch.Tensor = self.multi_modal_projector(found)[0]
        return rows


class _SquareMeans(nn.Module):
    """Means of ``merge`` x ``merge`` patches, in ``columns``, by a product for each row of squares.  transformers makes
    one product with a matrix of all squares and all patches, whose sums have the same order up to some 400 patches."""

    def __init__(self, merge: int) -> None:
        super().__init__()
        self.merge, self.columns = merge, 1

    def forward(self, hidden_states: torch.Tensor, **_given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden_states`` (1, patches, hidden), row by row -> (1, squares, hidden) float32, scaled, and that all are
        valid (1, squares)."""
        merge, columns, hidden = self.merge, self.columns, hidden_states.shape[-1]
        shares = torch.eye(columns, device=hidden_states.device, dtype=torch.float32) / merge**2
        shares = shares.repeat_interleave(merge, 1).repeat(1, merge)
        means = shares @ hidden_states.float().view(-1, merge * columns * merge, hidden)
        means = means.to(hidden_states.dtype).view(1, -1, hidden)
        return means.float() * hidden**0.5, means.new_ones(means.shape[:2], dtype=torch.bool)


class Gemma4Tower(VisionTower):
    """Gemma 4: patches have a column and a row; the tower pools them."""

    parts, layers = ("vision_tower", "embed_vision"), "vision_tower.encoder.layers"
    embeds = "vision_tower.patch_embedder"

    def build(self, config: Any) -> None:
        from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder

        self.vision_tower = _from_config(config.vision_config)
        self.vision_tower.pooler = _SquareMeans(self.spec.merge)
        self.embed_vision = Gemma4MultimodalEmbedder(config.vision_config, config.text_config)

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        patches, places = raster_patches(image, self.spec.patch)
        self.vision_tower.pooler.columns = image.shape[2] // self.spec.cell
        pooled = self.vision_tower(patches.unsqueeze(0), pixel_position_ids=places.unsqueeze(0)).last_hidden_state
        rows: torch.Tensor = self.embed_vision(inputs_embeds=pooled)
        return rows


class Gemma4CellTower(VisionTower):
    """Gemma 4 12B: norms and two products make a row of each cell.  The first product stands for the layers."""

    parts, layers, embeds = ("embed_vision",), "embed_vision.patch_dense", "embed_vision.patch_ln1"

    def build(self, config: Any) -> None:
        from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedVisionEmbedder

        self.embed_vision = Gemma4UnifiedVisionEmbedder(config.vision_config, config.text_config)

    @property
    def stack(self) -> list[nn.Module]:
        return [self.embed_vision.patch_dense]

    @contextmanager
    def shortened(self) -> Iterator[None]:
        yield

    def layer_work(self) -> tuple[float, float]:
        return sum(one.numel() for one in self.parameters() if one.dim() == 2), 0.0

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        cells, places = raster_patches(image, self.spec.cell)
        rows: torch.Tensor = self.embed_vision(cells.unsqueeze(0), places.unsqueeze(0)).pooler_output[0]
        return rows

    def stored(self, attribute: str, name: str, shape: tuple[int, ...]) -> list[Source]:
        """Return the names that transformers gives, then the hub's."""
        usual = super().stored(attribute, name, shape)
        of_projection = name.removeprefix("multimodal_embedder.")
        of_hub = f"vision_embedder.{name}" if of_projection == name else f"{attribute}.{of_projection}"
        return [*usual, replace(usual[0], name=f"model.{of_hub}")]


class _PlacedPatches(nn.Module):
    """Patch embedding by a product, and the embeddings of places."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.proj, self.pos_emb = embedding.proj, embedding.pos_emb

    def forward(self, patches: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        """``patches`` (n, elements) -> (n, hidden)."""
        found: torch.Tensor = self.pos_emb(_by_product(self.proj, patches), grid_thw)
        return found


class KimiTower(VisionTower):
    """Kimi K2.5: the hub's checkpoints have names of their own, and one tensor for queries, keys and values."""

    parts, layers = ("vision_tower", "mm_projector"), "vision_tower.layers"
    embeds = "vision_tower.patch_embed"
    _of_hub = MappingProxyType(
        {
            "layers": "encoder.blocks",
            "norm1": "norm0",
            "norm2": "norm1",
            "mlp.fc1": "mlp.fc0",
            "mlp.fc2": "mlp.fc1",
            "attn.q_proj": "wqkv",
            "attn.k_proj": "wqkv",
            "attn.v_proj": "wqkv",
            "attn.proj": "wo",
            "final_layernorm": "encoder.final_layernorm",
            "position_embeddings": "weight",
            "in_proj": "proj.0",
            "out_proj": "proj.2",
        }
    )

    def build(self, config: Any) -> None:
        from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25MultimodalProjection

        own = config.vision_config
        if own.pos_emb_height != own.pos_emb_width or config.projection_hidden_size != own.hidden_size:
            raise ValueError("pos_emb_height must be pos_emb_width, and projection_hidden_size hidden_size")
        self._num_heads = own.num_attention_heads
        self.vision_tower = _from_config(own)
        self.vision_tower.patch_embed = _PlacedPatches(self.vision_tower.patch_embed)
        self.mm_projector = Kimi_K25MultimodalProjection(config)

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        patch = self.spec.patch
        patches = merged_patches(image, patch, 1, 1)
        sizes = torch.tensor(
            [[1, image.shape[1] // patch, image.shape[2] // patch]], device=image.device, dtype=torch.int64
        )
        merged = self.vision_tower(patches.to(self.dtype), grid_thw=sizes).pooler_output
        rows: torch.Tensor = self.mm_projector(merged).squeeze(1)
        return rows

    def stored(self, attribute: str, name: str, shape: tuple[int, ...]) -> list[Source]:
        """Return the names that transformers gives, then the hub's."""
        words = "|".join(map(re.escape, self._of_hub))
        of_hub = re.sub(rf"\b({words})(?=\.|$)", lambda found: self._of_hub[found[0]], name)
        usual = super().stored(attribute, name, shape)
        hubs = replace(usual[0], name=f"{attribute}.{of_hub}")
        if (part := re.search(r"attn\.([qkv])_proj", name)) is not None:
            hubs = replace(
                hubs,
                shape=(3 * shape[0], *shape[1:]),
                taken=(Span("qkv".index(part[1]) * shape[0], shape[0]), *whole(shape[1:])),
                decode=as_stored if part[1] == "v" else partial(_halves_of_pairs, self._num_heads),
            )
        return [*usual, hubs]


def _halves_of_pairs(num_heads: int, values: torch.Tensor) -> torch.Tensor:
    """``values`` (rows, ...): in each head neighbours turn together -> those half a head apart do."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)


_TOWERS: dict[str, type[VisionTower]] = {
    "gemma3": SiglipTower,
    "gemma4": Gemma4Tower,
    "gemma4_unified": Gemma4CellTower,
    "kimi_k25": KimiTower,
    "mistral3": PixtralTower,
    "qwen2_5_vl": QwenTower,
    "qwen3_vl": QwenTower,
    "qwen3_5": QwenTower,
}


def build_tower(spec: VisionSpec, *, dtype: torch.dtype, device: torch.device) -> VisionTower:
    """Return the tower with weights that are not set yet.  Raises ``ConfigError`` if transformers refuses it."""
    from transformers import CONFIG_MAPPING
    from transformers.initialization import no_init_weights

    given = {**spec.whole, "vision_config": dict(spec.config)}
    try:
        config = CONFIG_MAPPING[given["model_type"]].from_dict(given)
        with MadeIn(dtype), torch.device(device), no_init_weights():
            tower = _TOWERS[spec.family](spec, config)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers raises whatever it likes
        raise ConfigError(
            f"config.json: transformers cannot make the vision part ({error}); serve the text part alone with "
            "--limit-mm-per-prompt '{\"image\": 0}'"
        ) from error
    tower.take_sources()
    return tower.eval()


def _make_parameters_of_buffers(part: nn.Module) -> None:
    """What checkpoints store is a parameter, and what they do not is a buffer."""
    for module in part.modules():
        stored = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        for name in stored:
            values = module._buffers.pop(name)
            assert values is not None
            module.register_parameter(name, nn.Parameter(values, requires_grad=False))


def _from_config(vision_config: Any) -> Any:
    """The tower of transformers, in the type of ``MadeIn``: given one, transformers would make it torch's default."""
    from transformers import AutoModel
    from transformers.models.qwen2_vl import modeling_qwen2_vl

    if vision_config.model_type == "qwen2_vl_vision":  # AutoModel does not know it
        return modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel._from_config(vision_config, dtype=None)
    return AutoModel.from_config(vision_config, dtype=None)


def _without_mask() -> str:
    """Return the name of an attention over one image: transformers makes a mask of patches x patches unless flash
    attention is asked for."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    name = "tp_engine_flash"
    AttentionInterface.register(name, partial(sdpa_attention_forward, is_causal=False))
    return name


def normalised(pixels: torch.Tensor, spec: VisionSpec) -> torch.Tensor:
    """``pixels`` (height, width, 3) uint8 -> (3, height, width) float32, by the mean and standard deviation of each
    colour."""
    mean, std = (torch.tensor(values, device=pixels.device, dtype=torch.float32) for values in (spec.mean, spec.std))
    levels = (torch.arange(256, dtype=torch.float64, device=pixels.device) * (1 / 255)).to(torch.float32)
    table = levels.sub(mean.unsqueeze(1)).div_(std.unsqueeze(1))  # (3, 256), since doing so for all pixels takes more
    found = table.new_empty((3, *pixels.shape[:2]))
    for colour, own in enumerate(table):
        torch.index_select(own, 0, pixels[:, :, colour].flatten().int(), out=found[colour].view(-1))
    return found


def merged_patches(image: torch.Tensor, patch: int, merge: int, frames: int) -> torch.Tensor:
    """``image`` (3, height, width) -> (patches, 3 * frames * patch * patch): those that are merged stand together, and
    each is repeated for every frame."""
    colours, height, width = image.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    cut = image.reshape(colours, rows, merge, patch, columns, merge, patch).permute(1, 4, 2, 5, 0, 3, 6)
    repeated = cut.unsqueeze(5).expand(-1, -1, -1, -1, -1, frames, -1, -1)
    return repeated.reshape(rows * columns * merge * merge, -1)


def raster_patches(image: torch.Tensor, patch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``image`` (3, height, width) -> patches (n, patch * patch * 3) row by row, and the column and row of each (n, 2)
    int64."""
    colours, height, width = image.shape
    rows, columns = height // patch, width // patch
    cut = image.reshape(colours, rows, patch, columns, patch).permute(1, 3, 2, 4, 0)
    grid = torch.meshgrid(
        *(torch.arange(size, device=image.device, dtype=torch.int64) for size in (rows, columns)), indexing="ij"
    )
    return cut.reshape(rows * columns, -1), torch.stack((grid[1].flatten(), grid[0].flatten()), 1)
