"""The keys that nearly all config.json files share, and the parts of a ``ModelSpec`` that follow from them.

No torch.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.mlp import Activation, ActivationKind, ExpertsSpec, MlpSpec, RoutingRule
from tp_engine.model_config.quant_methods import read_quantization
from tp_engine.model_config.recurrent import RecurrentSpec
from tp_engine.model_config.rope import LAYER_TYPES, PLAIN, RopeRules, RopeSpec, read_rope
from tp_engine.model_config.spec import AttentionSpec, LayerSpec, ModelSpec, MtpSpec, NormSpec

DTYPES = ("float32", "bfloat16", "float16")
ASSUMED_DTYPE = "bfloat16"
"""The type of nearly all released weights, for a config.json that does not say one."""
# Names of transformers -> ours.
ACTIVATIONS: dict[str, ActivationKind] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


_DUAL_CHUNKS = "dual_chunk_attention_config: longer contexts are attended to in chunks, which is not supported here"
_YARN_POSITIONS = "original_max_position_embeddings times the factor of its yarn rotation"


class DecoderReader:
    """Takes the common keys of ``config``; a family's reader takes its own, then calls ``model``.

    ``defaults`` are the family's values for absent sizes, ``activations`` the names of those that it may have.
    """

    def __init__(
        self,
        config: ConfigJson,
        *,
        eps_key: str = "rms_norm_eps",
        eps: float = 1e-6,
        activation_key: str = "hidden_act",
        activation: str = "silu",
        activations: Mapping[str, ActivationKind] = ACTIVATIONS,
        defaults: Mapping[str, int] | None = None,
    ) -> None:
        self.config = config
        self._defaults = defaults or {}
        self.vocab_size = self._size("vocab_size")
        self.hidden_size = self._size("hidden_size")
        self.num_layers = self._size("num_hidden_layers")
        self.num_heads = self._size("num_attention_heads")
        self.num_kv_heads = self._read_kv_heads()
        self.head_dim = self._read_head_dim()
        self.inner_size = self._size("intermediate_size")
        self.max_position = self._size("max_position_embeddings")
        self.eps = config.take(eps_key, float, eps) or 0.0
        if self.eps < 0:
            raise ConfigError(f"{config.origin}: {eps_key} is {self.eps}; it must be at least 0")
        self.activation = self._read_activation(activation_key, activation, activations)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return the value of a key, which must be true or false."""
        return bool(self.config.take(name, bool, default))

    def number(self, name: str, default: float) -> float:
        """Return a number with a default."""
        value = self.config.take(name, float, default)
        assert value is not None
        return value

    def factor(self, name: str, default: float) -> float:
        """Return a number above zero, with a default."""
        value = self.number(name, default)
        if value <= 0:
            raise ConfigError(f"{self.config.origin}: {name} is {value}; it must be above 0")
        return value

    def cap(self, name: str, default: float | None = None) -> float | None:
        """Return a soft cap, above zero: ``default`` where it is absent; None, and null: there is none."""
        value = self.config.take(name, float, None if self.config.has(name) else default)
        if value is not None and value <= 0:
            raise ConfigError(f"{self.config.origin}: {name} is {value}; it must be above 0, or null for none")
        return value

    def norm(self, name: str, **changes: Any) -> NormSpec:
        """Return a norm with the model's epsilon; ``name`` is the checkpoint's."""
        return NormSpec(name=name, eps=self.eps, **changes)

    def attention(self, **changes: Any) -> AttentionSpec:
        """Attention with the model's sizes and the usual scale."""
        usual = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "scale": self.head_dim**-0.5,
        }
        return AttentionSpec(**{**usual, **changes})

    def mlp(self, **changes: Any) -> MlpSpec:
        """Return a gated MLP with the model's sizes and activation."""
        return MlpSpec(inner_size=self.inner_size, activation=self.activation, **changes)

    def experts(
        self, num_experts: int, rule: RoutingRule, *, inner_size: int | None = None, **changes: Any
    ) -> ExpertsSpec:
        """Experts with the model's activation, each of ``inner_size``, or of ``intermediate_size`` without it."""
        if not 1 <= rule.top_k <= num_experts:
            raise ConfigError(
                f"config.json: {rule.top_k} of {num_experts} experts are asked for; a token goes to at least 1 and at "
                "most all of them"
            )
        _check_groups(rule, num_experts)
        usual = {"inner_size": inner_size or self.inner_size, "activation": self.activation}
        return ExpertsSpec(num_experts=num_experts, rule=rule, **{**usual, **changes})

    def take_first(self, *names: str, default: int = 0) -> int:
        """Return the size with the spellings ``names``.  Raises ``ConfigError`` if two of them differ, and if there is
        none, unless there is a ``default``."""
        found = {name: self.config.take_positive(name, 0) for name in names}
        given = {name: value for name, value in found.items() if value}
        if len(set(given.values())) > 1:
            listed = ", ".join(f"{name} is {value}" for name, value in given.items())
            raise ConfigError(f"{self.config.origin}: {listed}; these are spellings of one key: give one of them")
        if given:
            return next(iter(given.values()))
        name = next(filter(self.config.has, names), names[0])
        return self.config.take_positive(name, default) if default else self.config.require_positive(name)

    def pre_norm_layer(
        self, attention: AttentionSpec | RecurrentSpec, mlp: MlpSpec | ExpertsSpec, **changes: Any
    ) -> LayerSpec:
        """Llama's layer: a norm before each block."""
        return LayerSpec(
            attention=attention,
            mlp=mlp,
            input_norm=self.norm("input_layernorm"),
            mlp_norm=self.norm("post_attention_layernorm"),
            **changes,
        )

    def next_token_layer(self, attention: AttentionSpec, mlp: MlpSpec | ExpertsSpec) -> MtpSpec:
        """DeepSeek-V3's head for multi-token prediction: the layer after the last, with tensors of its own."""
        path = f"model.layers.{self.num_layers}"
        return MtpSpec(
            path=path,
            layer=self.pre_norm_layer(attention, mlp),
            projection=f"{path}.eh_proj",
            embed_norm=self.norm(f"{path}.enorm"),
            hidden_norm=self.norm(f"{path}.hnorm"),
            final_norm=self.norm(f"{path}.shared_head.norm"),
        )

    def post_norm_layer(self, attention: AttentionSpec, mlp: MlpSpec) -> LayerSpec:
        """OLMo 2's layer: a norm on each block's output."""
        return LayerSpec(
            attention=attention,
            mlp=mlp,
            attention_out_norm=self.norm("post_attention_layernorm"),
            mlp_out_norm=self.norm("post_feedforward_layernorm"),
        )

    def rope(self, rules: RopeRules = PLAIN) -> RopeSpec:
        """Return the one rotation of the model."""
        return read_rope(self.config, head_dim=self.head_dim, max_position=self.max_position, rules=rules)

    def take_window(self, default: int | None = None) -> int | None:
        """``sliding_window``: visible keys, self included; ``default`` where it is absent, None where it is null."""
        window = self.config.take("sliding_window", int, None if self.config.has("sliding_window") else default)
        if window is not None and window <= 0:
            raise ConfigError(f"config.json: sliding_window is {window}; it must be positive, or null for none")
        return window

    def take_dual_chunks(self) -> dict[str, Any]:
        """Dual chunk attention (models with 1M positions) is dense attention up to the positions of the training, which
        bound what is served: changes for ``model``."""
        own = self.config.take_object("dual_chunk_attention_config")
        if own is None:
            return {}
        longest = own.require_positive("original_max_position_embeddings")
        own.skip("chunk_size", "local_size", "sparse_attention_config")
        own.skip("sparse_attention_enabled", "sparse_attention_threshold", "sparse_attention_last_q")
        own.finish_strictly()
        return {"max_position": longest, "max_position_key": _DUAL_CHUNKS} if longest < self.max_position else {}

    def take_attending(self, kinds: Mapping[str, bool], implied: list[str], *, may_be_none: bool = False) -> list[bool]:
        """Return which layers attend, at least one unless there ``may_be_none``: ``layer_types``, or ``implied`` where
        it is absent, of which ``kinds`` says whether a name's layers attend."""
        names = self.config.take("layer_types", list, implied) or []
        found = [kinds[name] for name in names if isinstance(name, str) and name in kinds]
        if len(found) == len(names) == self.num_layers and (may_be_none or any(found)):
            return found
        attending = " or ".join(name for name, attends in kinds.items() if attends)
        rest = "" if may_be_none else f", and {attending} for at least one"
        raise ConfigError(
            f"config.json: layer_types is {shown(names)}; it must name {' or '.join(kinds)} for each of the "
            f"{self.num_layers} layers{rest}"
        )

    def windows(
        self, window: int | None, is_windowed: Callable[[int], bool], *, is_free: bool = True
    ) -> tuple[int | None, ...]:
        """Return each layer's window: ``window`` for the layers that ``is_windowed`` selects, or as ``layer_types``
        says.

        ``layer_types`` may depart from ``is_windowed`` only if ``is_free``.
        """
        implied = tuple(window if is_windowed(index) else None for index in range(self.num_layers))
        types = self.config.take("layer_types", list)
        if types is None:
            return implied
        if len(types) != self.num_layers or not all(name in LAYER_TYPES for name in types):
            raise ConfigError(
                f"config.json: layer_types is {shown(types)}; it must name {' or '.join(LAYER_TYPES)} for each of the "
                f"{self.num_layers} layers"
            )
        if window is None and "sliding_attention" in types:
            raise ConfigError("config.json: layer_types asks for sliding_attention, but no sliding window is enabled")
        found = tuple(window if name == "sliding_attention" else None for name in types)
        if not is_free and found != implied:
            raise ConfigError(f"config.json: layer_types {shown(types)} is not supported for this architecture")
        return found

    def model(
        self,
        layers: tuple[LayerSpec, ...],
        ropes: tuple[RopeSpec, ...],
        *,
        tied: bool = False,
        eos: tuple[int, ...] = (),
        **changes: Any,
    ) -> ModelSpec:
        """Return the whole model; refuses keys that were not taken.

        ``tied`` and ``eos`` are transformers' defaults of ``tie_word_embeddings`` and ``eos_token_id``.
        """
        config, extended = self.config, max((rope.extends_to for rope in ropes), default=0)
        if extended > self.max_position:
            changes = {"max_position": extended, "max_position_key": _YARN_POSITIONS, **changes}
        usual = {
            "architecture": config.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "final_norm": self.norm("norm"),
            "tie_word_embeddings": self.flag("tie_word_embeddings", tied),
            "max_position": self.max_position,
            "dtype": take_dtype(config),
            "eos_token_ids": config.take_token_ids("eos_token_id") if config.has("eos_token_id") else eos,
            "quantization": read_quantization(config),
        }
        config.finish()
        spec = ModelSpec(layers=layers, ropes=ropes, **{**usual, **changes})
        own = (self.num_heads, self.num_kv_heads)
        self._check_heads({own, *((one.num_heads, one.num_kv_heads) for one in spec.attentions)})
        return spec

    def _size(self, name: str) -> int:
        default = self._defaults.get(name)
        return self.config.require_positive(name) if default is None else self.config.take_positive(name, default)

    def _read_kv_heads(self) -> int:
        """Null is one for each query head in every family, absence in those without a default of their own."""
        if self.config.peek("num_key_value_heads") is None and self.config.has("num_key_value_heads"):
            self.config.skip("num_key_value_heads")
            return self.num_heads
        usual = self._defaults.get("num_key_value_heads", self.num_heads)
        return self.config.take_positive("num_key_value_heads", usual)

    def _read_head_dim(self) -> int:
        own = self.config.take("head_dim", int) or self._defaults.get("head_dim")
        if own is None and self.hidden_size % self.num_heads:
            raise ConfigError(
                f"config.json: hidden_size is {self.hidden_size}; without a head_dim it must be a multiple of "
                f"num_attention_heads, {self.num_heads}"
            )
        if self.config.peek("head_dim") is None:
            return own or self.hidden_size // self.num_heads
        return self.config.require_positive("head_dim")

    def _read_activation(self, key: str, default: str, known: Mapping[str, ActivationKind]) -> Activation:
        name = self.config.take(key, str, default) or default
        if name not in known:
            raise ConfigError(f"config.json: {key} is {name!r}; this engine supports {', '.join(known)}")
        return Activation(known[name])

    def _check_heads(self, numbers: set[tuple[int, int]]) -> None:
        for num_heads, num_kv_heads in sorted(numbers):
            if num_heads % num_kv_heads:
                raise ConfigError(
                    f"config.json: num_attention_heads is {num_heads}; it must be a multiple of "
                    f"num_key_value_heads, {num_kv_heads}"
                )


def take_dtype(config: ConfigJson) -> str:
    """Return the checkpoint's type: ``dtype`` (transformers 5) or ``torch_dtype``."""
    classic = config.take("torch_dtype", str, ASSUMED_DTYPE)
    name = str(config.take("dtype", str, classic)).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype is {name!r}; this engine loads {', '.join(DTYPES)}")
    return name


def _check_groups(rule: RoutingRule, num_experts: int) -> None:
    """Raise ``ConfigError`` unless the experts are in equal groups, and those of the best groups are enough."""
    size, rest = divmod(num_experts, rule.num_groups)
    if rule.num_groups == 1:
        return
    if rest or size < rule.group_best or not 1 <= rule.top_groups <= rule.num_groups:
        raise ConfigError(
            f"config.json: n_group is {rule.num_groups} and topk_group is {rule.top_groups}; the {num_experts} experts "
            f"must be in equal groups of at least {rule.group_best}, of which some are chosen"
        )
    if rule.top_k > rule.top_groups * size:
        raise ConfigError(
            f"config.json: a token goes to {rule.top_k} experts, but the topk_group {rule.top_groups} best groups have "
            f"{rule.top_groups * size}"
        )
