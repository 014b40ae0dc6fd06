"""What a decoder class of transformers says of itself, and the ``ModelSpec`` that follows from it.  No torch.

The class is asked in a process of its own (``models/recognition/``), because that imports transformers and runs what a
config.json makes of it.  The answer is kept in a file, so that the next start asks nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from tp_engine.errors import shown
from tp_engine.model_config.class_modules import ClassModules
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import take_dtype
from tp_engine.model_config.mlp import ExpertsSpec, MlpSpec
from tp_engine.model_config.names import CheckpointNames
from tp_engine.model_config.quant_methods import read_quantization
from tp_engine.model_config.rope import RopeSpec
from tp_engine.model_config.spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec
from tp_engine.system import env
from tp_engine.system.child_process import start_child
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

_CHILD = "tp_engine.models.recognition.child"
_DEADLINE_S = 600.0
_POLL_S = 0.05
_LARGEST_ANSWER = 64 << 20


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
        """Return the same layer."""
        own = {name: getattr(spec, name) for name in cls.__dataclass_fields__}
        return cls(**own) if spec.experts is None else cls(**{**own, "mlp": None})

    @property
    def spec(self) -> LayerSpec:
        """The same layer."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "experts"}
        return LayerSpec(**{**own, "mlp": self.mlp or self.experts})


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedDecoder:
    """The answer of a class: fields of ``ModelSpec``, each kind of layer once, and the ``order`` of the layers.

    ``known_keys`` of config.json are those that its configuration class reads.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    kinds: tuple[AskedLayer, ...]
    order: tuple[int, ...]
    ropes: tuple[RopeSpec, ...]
    final_norm: NormSpec
    tie_word_embeddings: bool
    max_position: int
    eos_token_ids: tuple[int, ...]
    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None
    names: CheckpointNames
    known_keys: tuple[str, ...]

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
class AskedModules:
    """The answer of a class whose own modules run: fields of ``ModelSpec``, each kind of attention once, and the
    ``order`` of the calls.

    ``reason`` says why native layers do not run it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    kinds: tuple[AttentionSpec, ...]
    order: tuple[int, ...]
    tie_word_embeddings: bool
    max_position: int
    max_position_key: str
    eos_token_ids: tuple[int, ...]
    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None
    names: CheckpointNames
    known_keys: tuple[str, ...]
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
    keeps it from being served."""

    decoder: AskedDecoder | None = None
    modules: AskedModules | None = None
    problem: str = ""

    @property
    def way(self) -> Literal["recognised", "transformers", "refused"]:
        """How the class is served."""
        return "recognised" if self.decoder else "transformers" if self.modules else "refused"

    @property
    def found(self) -> AskedDecoder | AskedModules | None:
        """What is served, if it is."""
        return self.decoder or self.modules


def transformers_version() -> str:
    """Return that of the installed transformers."""
    return importlib.metadata.version("transformers")


def has_class(architecture: str) -> bool:
    """Return whether the installed transformers has a causal class of this name; it is not imported for that."""
    found = importlib.util.find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return False
    listed = Path(found.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py"
    try:
        text = listed.read_text(encoding="utf-8")
    except OSError:
        return False
    table = text.partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")[2].partition("MAPPING_NAMES =")[0]
    return re.fullmatch(r"\w{1,100}", architecture) is not None and f'"{architecture}"' in table


def asked_model(found: AskedDecoder | AskedModules, config: ConfigJson) -> ModelSpec:
    """Return the model that a class says it is, with what ``config`` alone says.  Raises ``ConfigError`` for keys that
    neither its class nor this engine reads."""
    config.skip("architectures", *found.known_keys)
    dtype = take_dtype(config)
    quantization = read_quantization(config)
    config.finish()
    return found.model(dtype=dtype, quantization=quantization, described_by="transformers", notes=(found.note,))


def ask(values: Mapping[str, Any]) -> ClassAnswer:
    """Return what the class says that a config.json of these ``values`` names: from a file, or from a child, for which
    other processes that ask the same wait."""
    file = _folder() / f"{_key(values)}.json"
    if (kept := _read(file)) is not None:
        return kept
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _ask_child(values)[0]
    with _turn(file.with_suffix(".lock")):
        if (kept := _read(file)) is not None:
            return kept
        answer, data = _ask_child(values)
        if data:
            _keep(file, data)
        return answer


def _folder() -> Path:
    return env.cache_dir() / "classes"


def _key(values: Mapping[str, Any]) -> str:
    """Of all that the answer depends on: the configuration, the programs that read it, and the code that asks."""
    versions = [importlib.metadata.version(name) for name in ("transformers", "torch")]
    digest = hashlib.sha256(json.dumps([values, versions], sort_keys=True, default=str).encode())
    models = Path(__file__).parents[1] / "models"
    for folder in ("recognition", "class_model"):
        for source in sorted((models / folder).glob("*.py")):
            digest.update(source.read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:32]


def _read(file: Path) -> ClassAnswer | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=ClassAnswer)
    except (OSError, msgspec.DecodeError):
        return None


def _keep(file: Path, data: bytes) -> None:
    """Write the file whole or not at all; a cache that cannot be written to is none."""
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
        part.write(data)
        part.close()
        os.replace(part.name, file)


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Within, no other process asks the same; each waits for ``_DEADLINE_S`` at most, and then asks too."""
    deadline = time.monotonic() + _DEADLINE_S
    with lock.open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
        yield


def _ask_child(values: Mapping[str, Any]) -> tuple[ClassAnswer, bytes]:
    """The answer, and its bytes if it may be kept: a child that ended without one may do better the next time."""
    logger.info("transformers' class %s is asked what it computes; this takes some seconds", values["architectures"][0])
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as words:
        child = start_child(
            _CHILD, json.dumps([output.fileno(), values]).encode(), pass_fds=[output.fileno()], output=words
        )
        try:
            code = child.wait(timeout=_DEADLINE_S)
        except subprocess.TimeoutExpired:
            return ClassAnswer(problem=f"it gave no answer within {_DEADLINE_S:.0f} s"), b""
        finally:
            child.kill()
            child.wait()
        data = os.pread(output.fileno(), _LARGEST_ANSWER, 0)
        if code == 0 and data:
            return msgspec.json.decode(data, type=ClassAnswer), data
        said = os.pread(words.fileno(), _LARGEST_ANSWER, 0).decode(errors="replace").strip().rpartition("\n")[2]
    return ClassAnswer(problem=f"the process that asked it ended with code {code}: {shown(said)}"), b""
