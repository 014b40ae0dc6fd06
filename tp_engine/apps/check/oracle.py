"""The oracle: transformers' own layers, one at a time in memory, so that a model of any size runs on a small machine.

::

    1. transformers' model, its weights on no device ("meta")
    2. its own forward pass with empty layers: embeddings, and what it gives each layer (masks, rotations, ...)
    3. for each layer: load its weights, run all sequences through it, drop its weights
    4. its own forward pass with empty layers again, whose last returns the states of 3: norm and logits

So each family keeps its own code around the layers.  Weights come from ``stored.py`` in float32, quantised ones as the
numbers that they stand for.  Neither shares code with the engine, but for the rule on which files hold the weights.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.apps.check.rounding import Round, Rounding, keep
from tp_engine.apps.check.stored import StoredWeights
from tp_engine.errors import ConfigError, WeightError
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.families import named
from tp_engine.options.hf_overrides import overridden
from tp_engine.system.closing import Closing

_POSITIONS_AT_ONCE = 256  # positions with logits in memory at once
ROUTERS = ("gate", "router", "shared_expert_gate")
_NO_TEXT = ("vision", "visual", "audio", "image")
_MAX_NAMED = 3

EXACT = Rounding(dtype=torch.float32)
"""Float32 throughout."""

Floats: TypeAlias = npt.NDArray[np.float32]
Ids: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Query:
    """A sequence, and the token ids (n, m) whose log-probabilities after each of its n positions are wanted, if any;
    ``logits_from``: the first position after which all logits are wanted."""

    token_ids: Sequence[int]
    wanted: npt.NDArray[np.integer[Any]] | None = None
    logits_from: int | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities after each of the n positions of a sequence, in float32.

    ::

        next_logprobs (n - 1,)      of the token that follows
        best_logprobs (n,)          of the likeliest token
        wanted (n, m)               of the tokens that the query asks for; (n, 0) if it asks for none
        logits (k, vocabulary)      those after the last k positions, as the query asks
    """

    next_logprobs: Floats
    best_logprobs: Floats
    wanted: Floats
    logits: Floats


SeeLayer: TypeAlias = Callable[[int, Sequence[torch.Tensor]], Sequence[torch.Tensor] | None]
"""Gets a layer's number, and its outputs (n, hidden) for each sequence; number -1: the embeddings.  What it returns, if
anything, is what the next layer reads instead."""


def check_oracle_device(name: str) -> None:
    """Raise ``ConfigError`` unless torch can use the device ``name`` here; before engines run for minutes."""
    try:
        torch.empty(0, device=name, dtype=torch.float32)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ConfigError(
            f"oracle_device is {name!r}, which torch cannot use here ({reason}); give cpu, or a GPU that this machine "
            "has, such as cuda:0"
        ) from error


class Oracle(Closing):
    """transformers' model of the checkpoint in ``folder``, on ``device``, in float32 or with the ``rounding`` of an
    engine.

    ``overrides`` are keys of config.json that differ.  ``ConfigError`` if transformers does not have the model.
    ``layers`` are transformers' decoder layers, without weights while they do not run; ``stored`` has the checkpoint's
    weights.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        rounding: Rounding = EXACT,
        device: str = "cpu",
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self._rounding, self._dtype, self._device = rounding, rounding.dtype, torch.device(device)
        config = overridden(_read_config(Path(folder)), overrides or {})
        self.quantization = config.pop("quantization_config", None)
        self.stored = StoredWeights(Path(folder), self.quantization)
        self._model = _empty_model(config, rounding)
        self._layers_name, self.layers = _decoder_layers(self._model)
        self._places = _Places(self._model, self.stored)
        self._has_second = False
        # A module outside of the layers is loaded when it first runs; one that never does, such as a tower, is not.
        inside = set(self.layers.modules())
        for name, module in self._model.named_modules():
            if module not in inside and any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(lambda one, _inputs, name=name: self._load_once(name, one))

    def close(self) -> None:
        """Close the files."""
        self.stored.close()

    @property
    def activation(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """That of the gate in the model's MLPs, or of up in those without one."""
        from transformers.activations import ACT2FN

        config = self._model.config.get_text_config()
        names = (getattr(config, key, None) for key in ("mlp_hidden_act", "hidden_activation", "hidden_act"))
        found: Callable[[torch.Tensor], torch.Tensor] = ACT2FN[next(filter(None, names), "silu")]
        return found

    @torch.inference_mode()
    def score_all(
        self,
        queries: Sequence[Query],
        *,
        see_layer: SeeLayer | None = None,
        note_layer: Callable[[], None] = lambda: None,
    ) -> list[Scores]:
        """Score all sequences; each layer is read once.  ``note_layer`` is called when a layer is done."""
        states, given = self._embed([query.token_ids for query in queries])
        carried: list[Any] = [None] * len(queries)
        self._see(see_layer, -1, states)
        for index in range(len(self.layers)):
            with self._loaded(index) as layer:
                for number, arguments in enumerate(given):
                    positional, named = arguments[index]
                    named = {key: carried[number] if value is _CARRIED else value for key, value in named.items()}
                    output = layer(states[number], *positional, **named)
                    states[number], carried[number] = output if isinstance(output, tuple) else (output, None)
            self._see(see_layer, index, states)
            note_layer()
        scores = [self._scores(query, state) for query, state in zip(queries, states, strict=True)]
        _drop(self._model)  # embedding and output head too: the twin, which runs next, has its own
        return scores

    def _see(self, see_layer: SeeLayer | None, index: int, states: list[torch.Tensor]) -> None:
        if see_layer is None:
            return
        changed = see_layer(index, [state[0] for state in states])
        if changed is not None:
            states[:] = [one.to(self._device, self._dtype).unsqueeze(0) for one in changed]

    @contextlib.contextmanager
    def _loaded(self, index: int) -> Iterator[torch.nn.Module]:
        """The layer with its weights, and without its stand-in."""
        layer = self.layers[index]
        forward = layer.__dict__.pop("forward")
        self._places.load(f"{self._layers_name}.{index}", self._dtype, self._device)
        hooks = self._round(layer)
        try:
            yield layer
        finally:
            for hook in hooks:
                hook.remove()
            _drop(layer)
            layer.forward = forward

    def _round(self, layer: torch.nn.Module) -> list[Any]:
        """Round the layer's weights, and from now on the rows that its linear layers get; returns the hooks."""
        weights, rows = self._rounding.weights, self._rounding.rows
        hooks = []
        for name, module in layer.named_modules():
            if name.endswith(ROUTERS):
                continue
            for own, value in module.named_parameters(recurse=False):
                if weights is not keep and value.dim() > 1:
                    setattr(module, own, torch.nn.Parameter(weights(value), requires_grad=False))
            if rows is not keep and isinstance(module, torch.nn.Linear):
                hooks.append(module.register_forward_pre_hook(lambda _module, inputs: (rows(inputs[0]),)))
        return hooks

    def _embed(self, sequences: Sequence[Sequence[int]]) -> tuple[list[torch.Tensor], list[list[_Arguments]]]:
        """The embeddings of each sequence (1, n, hidden), and what the model gives each layer."""
        states, given = [], []
        for token_ids in sequences:
            calls: list[_Arguments] = []
            found: list[torch.Tensor] = []

            def record(hidden: torch.Tensor, *positional: Any, **named: Any) -> torch.Tensor:
                found.append(hidden)  # noqa: B023 - called in this turn of the loop
                calls.append((positional, named))  # noqa: B023
                return hidden

            # A number instead of positions would cut what the last layers of Gemma 4 E2B get.
            self._run(token_ids, torch.tensor([len(token_ids) - 1], device=self._device, dtype=torch.int64), record)
            states.append(found[-len(self.layers)])
            given.append(calls[-len(self.layers) :])
        return states, given

    def _scores(self, query: Query, state: torch.Tensor) -> Scores:
        def last(hidden: torch.Tensor, *_positional: Any, **_named: Any) -> torch.Tensor:
            return state

        token_ids = torch.tensor(query.token_ids, device=self._device, dtype=torch.int64)
        wanted = np.empty((len(token_ids), 0), np.int64) if query.wanted is None else query.wanted
        asked = torch.as_tensor(np.asarray(wanted, np.int64), device=self._device, dtype=torch.int64)
        begin = len(token_ids) if query.logits_from is None else query.logits_from
        parts = []
        for first in range(0, len(token_ids), _POSITIONS_AT_ONCE):
            here = torch.arange(
                first, min(first + _POSITIONS_AT_ONCE, len(token_ids)), device=self._device, dtype=torch.int64
            )
            logits = self._run(query.token_ids, here, last)[0].to(torch.promote_types(self._dtype, torch.float32))
            found = logits.log_softmax(-1)
            following = token_ids[here[here < len(token_ids) - 1] + 1]
            of_following = found[: len(following)].gather(1, following[:, None])[:, 0]
            parts.append((of_following, found.amax(-1), found.gather(1, asked[here]), logits[here >= begin]))
        return Scores(*(torch.cat(one).cpu().numpy() for one in zip(*parts, strict=True)))

    def _run(self, token_ids: Sequence[int], kept: torch.Tensor, layer: _StandIn) -> torch.Tensor:
        """The model's own forward pass with ``layer`` instead of each layer: logits (1, positions, vocabulary).

        Some models take a second value from each layer, and give it to the next one.
        """
        for one in self.layers:
            one.forward = (lambda *given, **named: (layer(*given, **named), _CARRIED)) if self._has_second else layer
        ids = torch.tensor([list(token_ids)], device=self._device, dtype=torch.int64)
        try:
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits
        except ValueError:
            if self._has_second:
                raise
            self._has_second = True
            return self._run(token_ids, kept, layer)
        return logits

    def _load_once(self, name: str, module: torch.nn.Module) -> None:
        if any(value.is_meta for value in module.parameters(recurse=False)):
            self._places.load(name, self._dtype, self._device)
            if name.endswith("lm_head") and self._rounding.head is not keep:
                weight = self._rounding.head(module.get_parameter("weight"))
                module.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))


_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
_StandIn: TypeAlias = Callable[..., torch.Tensor]
_CARRIED = object()  # stands for the second value of the layer before


class _Places:
    """Which stored weights make the parameters of each of the model's modules, by transformers' own rules."""

    def __init__(self, model: Any, stored: StoredWeights) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        self._model, self._stored = model, stored
        self._rules = get_model_conversion_mapping(model) + _stacking(model)
        renamings = [rule for rule in self._rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in self._rules if isinstance(rule, WeightConverter)]
        empty = model.state_dict()

        def target(name: str) -> str:
            # As transformers' loader does: a name that is the model's own already is not renamed to one that is not.
            found: str = rename_source_key(name, renamings, converters, model.base_model_prefix, empty)[0]
            return name if found not in empty and name in empty else found

        self._target = {name: target(name) for name in stored.names}

    def load(self, module_name: str, dtype: torch.dtype, device: torch.device) -> None:
        """Load all parameters below a module.  ``WeightError`` names those that the checkpoint does not have."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        module = self._model.get_submodule(module_name)
        tied = self._tied(module_name, module)
        inside = [name for name, target in self._target.items() if target.startswith(module_name + ".")]
        values = {name: self._stored.read(name) for name in inside}
        values |= {name: self._stored.read(name) for name in tied.values()}
        with _quiet():
            plan = self._model._get_dtype_plan(dtype)
            options = LoadStateDictConfig(
                dtype=dtype, device_map={"": device}, weight_mapping=self._rules, dtype_plan=plan
            )
            convert_and_load_state_dict_in_model(self._model, values, options)
        for parameter, source in tied.items():
            owner, _, own_name = parameter.rpartition(".")
            value = values[source].to(device, dtype)
            setattr(self._model.get_submodule(owner), own_name, torch.nn.Parameter(value, requires_grad=False))
        missing = [name for name, value in module.named_parameters() if value.is_meta]
        if missing:
            raise WeightError(
                f"the checkpoint has no weights for {module_name}: {', '.join(missing[:_MAX_NAMED])}, as transformers "
                "names them"
            )

    def _tied(self, module_name: str, module: torch.nn.Module) -> dict[str, str]:
        """Parameters of the module that are tied to others, and the stored weight of these."""
        ties: Mapping[str, str] = self._model.all_tied_weights_keys
        own = {f"{module_name}.{name}" for name, _ in module.named_parameters(recurse=False)}
        stored = {target: name for name, target in self._target.items()}
        return {
            name: stored[ties[name]] for name in own if name in ties and name not in stored and ties[name] in stored
        }


def _stacking(model: Any) -> list[Any]:
    """Rules that stack the modules of each expert, which compressors write, for models that are stored stacked."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

    gate, up, down = (f"experts.*.{name}_proj.weight" for name in ("gate", "up", "down"))
    of_gate_and_up = [MergeModulelist(dim=0), Concatenate(dim=1)]
    is_below_moe = any(".moe.experts." in name for name in model.state_dict())
    return [
        *([] if is_below_moe else [WeightRenaming(r"\.moe\.experts\.", ".experts.")]),
        WeightConverter([gate, up], "experts.gate_up_proj", operations=of_gate_and_up),
        WeightConverter([down], "experts.down_proj", operations=[MergeModulelist(dim=0)]),
    ]


def _drop(module: torch.nn.Module) -> None:
    for part in module.modules():
        for name, value in list(part.named_parameters(recurse=False)):
            setattr(part, name, torch.nn.Parameter(value.to("meta"), requires_grad=False))


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        text_of_file = (folder / "config.json").read_text(encoding="utf-8")
        config: dict[str, Any] = json.loads(text_of_file, object_hook=_number_or_object)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}/config.json cannot be read: {error}") from error
    text = config.get("text_config")
    if isinstance(text, dict) and "quantization_config" in text:
        config["quantization_config"] = text.pop("quantization_config")
    return config


def _number_or_object(value: dict[str, Any]) -> Any:
    """The number of transformers' notation for those that JSON does not have: ``{"__float__": "Infinity"}``."""
    if value.keys() != {"__float__"}:
        return value
    number = value["__float__"]
    if not isinstance(number, str):
        raise ValueError(f'"__float__" is {number!r}, and must be a string')
    return float(number)


def _empty_model(config: dict[str, Any], rounding: Rounding) -> Any:
    """transformers' model without weights; its buffers have their values."""
    import transformers
    from transformers.initialization import no_init_weights

    architecture = named(ConfigJson(config)).architecture
    kind = getattr(transformers, architecture, None)
    if kind is None:
        raise ConfigError(
            f"config.json names the architecture {architecture}, which transformers {transformers.__version__} does "
            "not have"
        )
    known = kind.config_class.from_dict(config)
    if known.model_type == "nemotron_h":
        known.time_step_min = 1e-30  # a bound of the training, which transformers has in prompts alone
    known._attn_implementation = _attention_with(rounding.cache) if kind._supports_sdpa else "eager"
    if rounding.dtype is torch.float64:
        known._experts_implementation = "eager"  # torch's grouped products have no float64
    before = torch.get_default_dtype()
    torch.set_default_dtype(rounding.dtype)
    try:
        with no_init_weights(), _parameters_on_meta(), _quiet():
            model = kind(known)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def _attention_with(cache: Round) -> str:
    """The name of an attention that rounds keys and values."""
    if cache is keep:
        return "sdpa"
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def attend(module: Any, query: Any, key: Any, value: Any, *positional: Any, **named: Any) -> Any:
        return sdpa_attention_forward(module, query, cache(key), cache(value), *positional, **named)

    name = f"sdpa_{getattr(cache, '__name__', 'rounded')}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return name


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within this context, modules keep no memory for their parameters; buffers are as usual."""
    register = torch.nn.Module.register_parameter

    def without_memory(self: torch.nn.Module, name: str, value: torch.nn.Parameter | None) -> None:
        register(self, name, value if value is None else torch.nn.Parameter(value.to("meta"), requires_grad=False))

    torch.nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and warnings."""
    from transformers.utils import logging as of_transformers

    bars, level = of_transformers.is_progress_bar_enabled(), of_transformers.get_verbosity()
    of_transformers.disable_progress_bar()
    of_transformers.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        of_transformers.set_verbosity(level)
        if bars:
            of_transformers.enable_progress_bar()


def _decoder_layers(model: Any) -> tuple[str, torch.nn.ModuleList]:
    """The list of the decoder's layers, with its name."""
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        is_list = isinstance(module, torch.nn.ModuleList) and len(module) == count and name.endswith("layers")
        if is_list and not any(part in name for part in _NO_TEXT):
            return name, module
    raise ConfigError(f"{type(model).__name__} has no list of {count} decoder layers; the oracle cannot run it")
