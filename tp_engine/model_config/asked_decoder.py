"""What a decoder class of transformers says of itself, and the ``ModelSpec`` that follows from it.  No torch.

``asking.py`` asks the class, and ``kept_answers.py`` keeps what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from tp_engine.model_config.class_modules import ClassModules
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import take_dtype
from tp_engine.model_config.installed_classes import transformers_version
from tp_engine.model_config.mlp import ExpertsSpec, MlpSpec
from tp_engine.model_config.names import CheckpointNames
from tp_engine.model_config.quant_methods import read_quantization
from tp_engine.model_config.rope import RopeSpec
from tp_engine.model_config.spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedLayer:
    """A ``LayerSpec`` of the kinds that are recognised."""

    attention: AttentionSpec
    mlp: MlpSpec | None
    experts: ExpertsSpec | None
    input_norm: NormSpec | None
    attention_out_norm: NormSpec | None
    mlp_norm: NormSpec | None
    mlp_out_norm: NormSpec | None
    is_parallel: bool
    residual_scale: float

    @classmethod
    def of(cls, spec: LayerSpec) -> Self:
        """Return the same layer; ``ValueError`` if it has what is not recognised."""
        own = {name: getattr(spec, name) for name in cls.__dataclass_fields__}
        made = cls(**own) if spec.experts is None else cls(**{**own, "mlp": None})
        if made.spec != spec:
            raise ValueError(f"a layer has more than an answer can say: {spec}")
        return made

    @property
    def spec(self) -> LayerSpec:
        """The same layer."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "experts"}
        return LayerSpec(**{**own, "mlp": self.mlp or self.experts})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What both kinds of answers say: fields of ``ModelSpec``, and the ``order`` of what is listed once by kind.

    ``known_keys`` of config.json are those that the class's configuration reads.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    order: tuple[int, ...]
    tie_word_embeddings: bool
    max_position: int
    eos_token_ids: tuple[int, ...]
    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None
    names: CheckpointNames
    known_keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedDecoder(_Asked):
    """The answer of a class that native layers run: each kind of layer once, and the ``order`` of the layers."""

    kinds: tuple[AskedLayer, ...]
    ropes: tuple[RopeSpec, ...]
    final_norm: NormSpec

    @classmethod
    def of_layers(cls, layers: Sequence[LayerSpec], **fields: Any) -> Self:
        """Return the decoder with these layers."""
        kinds = tuple(dict.fromkeys(map(AskedLayer.of, layers)))
        return cls(kinds=kinds, order=tuple(kinds.index(AskedLayer.of(one)) for one in layers), **fields)

    @property
    def note(self) -> str:
        """How it is run."""
        return (
            f"transformers {transformers_version()} describes this model: its class {self.architecture} was asked what "
            "it computes, and native layers gave the logits of a small model of the class"
        )

    def model(self, **changes: Any) -> ModelSpec:
        """Return the decoder as a ``ModelSpec``; ``changes`` are what only the files tell."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("kinds", "order", "known_keys"):
            del own[name]
        return ModelSpec(layers=tuple(self.kinds[index].spec for index in self.order), **{**own, **changes})


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedModules(_Asked):
    """The answer of a class whose own modules run: each kind of attention once, and the ``order`` of its calls.

    ``reason`` says why native layers do not run it.
    """

    kinds: tuple[AttentionSpec, ...]
    max_position_key: str
    modules: ClassModules
    reason: str = ""

    @property
    def note(self) -> str:
        """How it is run."""
        return (
            f"{self.architecture} is run by transformers' own modules, with this engine's attention, cache and linear "
            f"layers: slower than native layers, which do not run it, because {self.reason}"
        )

    def model(self, **changes: Any) -> ModelSpec:
        """Return the decoder as a ``ModelSpec``; ``changes`` are what only the files tell."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("kinds", "order", "known_keys", "reason"):
            del own[name]
        layers = tuple(LayerSpec(attention=self.kinds[index], mlp=None) for index in self.order)
        return ModelSpec(layers=layers, ropes=(), final_norm=None, **{**own, **changes})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassAnswer:
    """What the child says: a ``decoder`` of native layers, the ``modules`` that run the class, or the ``problem`` that
    keeps it from being served.

    It ``is_lasting`` if another start would be told the same: it does not come of a full disk, say.
    """

    decoder: AskedDecoder | None = None
    modules: AskedModules | None = None
    problem: str = ""
    is_lasting: bool = True

    @property
    def way(self) -> Literal["recognised", "transformers", "refused"]:
        """How the class is served."""
        return "recognised" if self.decoder else "transformers" if self.modules else "refused"

    @property
    def found(self) -> AskedDecoder | AskedModules | None:
        """What is served, if it is."""
        return self.decoder or self.modules


def asked_model(found: AskedDecoder | AskedModules, config: ConfigJson) -> ModelSpec:
    """Return the model that a class says it is, with what ``config`` alone says.  Raises ``ConfigError`` for keys that
    neither its class nor this engine reads."""
    config.skip("architectures", *found.known_keys)
    dtype = take_dtype(config)
    quantization = read_quantization(config)
    config.finish()
    return found.model(dtype=dtype, quantization=quantization, described_by="transformers", notes=(found.note,))
