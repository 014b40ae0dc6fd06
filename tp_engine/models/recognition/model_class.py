"""The class that a config.json names, made in three sizes.

::

    published   all layers and widths, on meta: no memory
    narrow      all layers, few heads and narrow: with weights; heads keep their size, windows are short
    hollow      the published width without layers: what is done before the first and after the last
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tp_engine.models.recognition.read_keys import read_keys
from tp_engine.models.recognition.record import FLOATS, NAME, register
from tp_engine.models.recognition.refusal import RefusalError

NARROW_VOCAB, NARROW_WINDOW = 128, 7
_WIDTH_UNIT, _INNER_UNIT = 32, 48
_MOST_LAYERS, _MOST_NUMBERS = 512, 1 << 28
_GAIN = 0.6  # small: with many layers, rounding errors grow as the model's own numbers do
# Names of the sizes that a narrow model changes, in any class.
_turn = threading.Lock()  # one model at a time is made without memory
_INNER = re.compile(r".*intermediate_size.*|ffn_dim|n_inner|ffn_hidden_size|dff")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k")


class ModelClass:
    """A causal class of the installed transformers, with the configuration that ``values`` make."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        import transformers
        from transformers.models.auto import modeling_auto

        register()
        name = values["architectures"][0]
        known = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        if name not in known or not hasattr(transformers, name):
            raise RefusalError(f"transformers {transformers.__version__} has no causal model class of this name")
        self.name, self._class = name, getattr(transformers, name)
        if getattr(self._class, "_is_stateful", False):
            raise RefusalError("it keeps a state other than keys and values")
        self._kind = self._class.config_class
        self._values = {key: value for key, value in values.items() if key != "quantization_config"}
        self.config = self._copy()
        if getattr(self.config, "is_encoder_decoder", False):
            raise RefusalError("it has an encoder")
        if self.config.get_text_config(decoder=True) is not self.config:
            raise RefusalError("it has parts beside its text part")
        if not 1 <= self.config.num_hidden_layers <= _MOST_LAYERS:
            raise RefusalError(f"it has {self.config.num_hidden_layers} layers")

    @property
    def max_position(self) -> int:
        """The positions that it was made for."""
        found = getattr(self.config, "max_position_embeddings", None)
        if type(found) is not int or not 16 <= found < 2**31:
            raise RefusalError(f"its configuration says max_position_embeddings {found}")
        return found

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends a text."""
        found = getattr(self.config, "eos_token_id", None)
        listed = found if isinstance(found, list) else [] if found is None else [found]
        return tuple(one for one in listed if type(one) is int)

    @property
    def known_keys(self) -> list[str]:
        """The keys of the config.json that the class reads."""
        return sorted(read_keys(self._class, self._kind).intersection(self._values))

    @property
    def values(self) -> dict[str, Any]:
        """Its config.json, without what it says of quantisation."""
        return dict(self._values)

    def published(self) -> Any:
        """On meta, with its buffers too."""
        with torch.device("meta"), _no_init():
            model = self._class._from_config(self._copy(), attn_implementation=NAME, dtype=torch.bfloat16).eval()
        most = max((buffer.numel() for buffer in model.buffers()), default=0)
        if most > _MOST_NUMBERS:
            raise RefusalError(f"one of its tables has {most} numbers; at most {_MOST_NUMBERS} are made")
        return model

    def narrow(self, head_dim: int, kv_heads: str, implementation: str, *, is_free: bool, unit: int = 2) -> Any:
        """With random weights: 2 ``unit`` heads of ``head_dim``, and as many KV heads, half of them, or one; the width
        is that of the heads, unless it ``is_free``.

        All these sizes grow with ``unit``.
        """
        config = self._copy()
        heads, count = 2 * unit, {"all": 2 * unit, "some": unit, "one": 1}[kv_heads]
        has_dim = "head_dim" in self._kind().to_dict() or getattr(config, "head_dim", None) is not None
        _set(config, "vocab_size", NARROW_VOCAB)
        _set(config, "num_attention_heads", heads)
        if hasattr(config, "num_key_value_heads"):
            _set(config, "num_key_value_heads", count)
        if has_dim and getattr(config, "head_dim", None) is None:
            config.head_dim = head_dim
        _set(config, "hidden_size", _WIDTH_UNIT * unit if has_dim and is_free else heads * head_dim)
        for name, value in list(config.to_dict().items()):
            if _INNER.fullmatch(name) and type(value) is int and value:
                setattr(config, name, _INNER_UNIT * unit)
        _few_experts(config)
        if isinstance(getattr(config, "sliding_window", None), int):
            config.sliding_window = NARROW_WINDOW
        _low_tokens(config)
        return filled(self._without_memory(config, implementation))

    def hollow(self, layers_path: str) -> Any:
        """Without layers, of the published width and 128 tokens."""
        config = self._copy()
        _set(config, "vocab_size", NARROW_VOCAB)
        _low_tokens(config)
        model = self._without_memory(config, NAME)
        parent, _, name = layers_path.rpartition(".")
        setattr(model.get_submodule(parent), name, nn.ModuleList())
        return filled(model)

    def without_layers_memory(self) -> Any:
        """Of the published width, for 128 tokens; its parameters on meta."""
        config = self._copy()
        _set(config, "vocab_size", NARROW_VOCAB)
        _low_tokens(config)
        return self._without_memory(config, NAME)

    def without_memory(self, implementation: str, dtype: torch.dtype) -> Any:
        """The class's model, its parameters on meta; buffers have their values."""
        return self._without_memory(self._copy(), implementation, dtype)

    def _without_memory(self, config: Any, implementation: str, dtype: torch.dtype = torch.float32) -> Any:
        with _parameters_on_meta(), _no_init():
            return self._class._from_config(config, attn_implementation=implementation, dtype=dtype).eval()

    def _copy(self) -> Any:
        return self._kind.from_dict(dict(self._values))


def filled(model: Any) -> Any:
    """``model`` with random values, which keep the numbers in range, for all of its parameters on meta."""
    if sum(value.numel() for value in model.parameters()) > _MOST_NUMBERS:
        raise RefusalError("its narrow twin is too large")
    generator = torch.Generator().manual_seed(0)
    for path, module in sorted(model.named_modules()):
        for name, value in sorted(module.named_parameters(recurse=False)):
            drawn = torch.randn(value.shape, generator=generator, **FLOATS)
            is_norm = "norm" in path or "norm" in name
            own = drawn * 0.3 + is_norm if value.dim() == 1 else drawn * (_GAIN / value.shape[-1] ** 0.5)
            setattr(module, name, nn.Parameter(own, requires_grad=False))
    stored = model.state_dict()
    for name, buffer in sorted(model.named_buffers()):
        if name in stored and buffer.is_floating_point():
            buffer.copy_(torch.randn(buffer.shape, generator=generator, **FLOATS) * 0.3)
    model.tie_weights()
    return model


def layers_path_of(model: Any) -> str:
    """The list of the layers: the outermost list with as many modules as its configuration says, or else the longest,
    as lists of experts may be longer."""
    lists = [(path, one) for path, one in model.named_modules() if isinstance(one, nn.ModuleList)]
    if not lists:
        raise RefusalError("it has no list of layers")
    said = model.config.num_hidden_layers
    most = said if any(len(one) == said for _, one in lists) else max(len(one) for _, one in lists)
    return str(next(path for path, one in lists if len(one) == most))


def _set(config: Any, name: str, value: int) -> None:
    if not hasattr(config, name):
        raise RefusalError(f"its configuration has no {name}")
    setattr(config, name, value)


def _few_experts(config: Any) -> None:
    """So many that choices and groups still matter."""
    sizes = {name: one for name in (*_EXPERTS, *_CHOSEN, "n_group") if type(one := getattr(config, name, None)) is int}
    chosen, groups = max([1, *(sizes.get(name, 1) for name in _CHOSEN)]), max(1, sizes.get("n_group", 1))
    few = groups * max(3, -(-2 * chosen // groups))
    for name in _EXPERTS:
        if name in sizes:
            setattr(config, name, min(sizes[name], few))


def _low_tokens(config: Any) -> None:
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(config, name, None) is not None:
            setattr(config, name, 0)


@contextlib.contextmanager
def _no_init() -> Iterator[None]:
    from transformers.initialization import no_init_weights

    with no_init_weights():
        yield


class _EmptyOnMeta(TorchFunctionMode):
    """Within, what has no values yet gets no memory, not even for a moment."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if func.__name__ == "empty" else {})})


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within, modules of this thread keep no memory for their parameters; buffers are as usual."""
    own = threading.get_ident()
    with _turn, _EmptyOnMeta():
        register = nn.Module.register_parameter

        def without_memory(self: nn.Module, name: str, value: nn.Parameter | None) -> None:
            if value is not None and threading.get_ident() == own:
                value = nn.Parameter(value.to("meta"), requires_grad=False)
            register(self, name, value)

        nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]
