"""The served model with what drafts its tokens, where that is a part of it.  No torch."""

from dataclasses import dataclass
from pathlib import Path

from tp_engine.errors import ConfigError
from tp_engine.features.speculation.options import CONFIG_NAME, SpeculativeConfig
from tp_engine.model_config.assistant import AssistantSpec, serves_assistants
from tp_engine.model_config.draft_head import DraftHeadSpec, load_draft_head
from tp_engine.model_config.spec import ModelSpec
from tp_engine.options.fields import as_json


@dataclass(frozen=True, kw_only=True)
class LocalHead:
    """A draft head, and the local folder that it comes from."""

    spec: DraftHeadSpec | AssistantSpec
    path: Path


def check_drafting(speculation: SpeculativeConfig | None, *, has_adapters: bool) -> None:
    """Raise ``ConfigError`` for a draft head beside adapters."""
    if has_adapters and speculation is not None and speculation.has_head:
        raise ConfigError(
            f"enable_lora is set, and {CONFIG_NAME} has a draft head, which does not know of adapters: leave one of "
            "them out, or set the method to suffix"
        )


def find_head(
    model: ModelSpec, speculation: SpeculativeConfig | None, *, name: str, folder: Path | None
) -> LocalHead | None:
    """Return the draft head with files of its own, if ``speculation`` asks for one beside ``model``, which the user
    calls ``name``, of this local ``folder``.

    Raises ``ConfigError`` if it does not suit the model.
    """
    if speculation is None or not (speculation.method == "eagle3" or has_assistant(model, speculation, name, folder)):
        return None
    assert speculation.model is not None, "the option has been checked"
    if any(one.latent is not None for one in model.attentions):
        raise ConfigError(
            f"{CONFIG_NAME} is {as_json(speculation)!r}, but this {model.architecture} keeps latents, and a draft "
            "head keeps keys and values beside the model's: set the method ngram or suffix"
        )
    if model.modules is not None:
        raise ConfigError(
            f"{CONFIG_NAME} is {as_json(speculation)!r}, but this {model.architecture} is run by transformers' own "
            "modules, which do not show a draft head what their layers read: set the method ngram or suffix"
        )
    spec, path = load_draft_head(speculation.model, model)
    return LocalHead(spec=spec, path=path)


def with_own_head(
    model: ModelSpec, speculation: SpeculativeConfig | None, *, name: str, folder: Path | None
) -> ModelSpec:
    """Return ``model``, which the user calls ``name``, of this local ``folder``, with its own head if ``speculation``
    lets it draft.

    Raises ``ConfigError`` if the model has no such head.
    """
    if speculation is None or speculation.method != "mtp" or has_assistant(model, speculation, name, folder):
        return model
    if model.stored_mtp is None:
        raise ConfigError(
            f"{CONFIG_NAME} is {as_json(speculation)!r}, but this {model.architecture} has no head for multi-token "
            "prediction that this engine runs, or its checkpoint, such as many quantised ones, was stored without it: "
            "set the method ngram or suffix without a model, leave the option out, or use a checkpoint with the head"
            + (", or name the model's assistant as the option's model" if serves_assistants(model) else "")
        )
    if not _is_own(speculation, name, folder):
        raise ConfigError(
            f"{CONFIG_NAME} has the model {speculation.model!r}, but with the method mtp the head is a part of the "
            f"served model's checkpoint, {name!r}: leave the model out, or set the method eagle3 for a head of its own"
        )
    return model.drafting_with(model.stored_mtp)


def has_assistant(model: ModelSpec, speculation: SpeculativeConfig, name: str, folder: Path | None) -> bool:
    """Return whether the option names an assistant beside ``model``, with files of its own (``assistant.py``)."""
    return speculation.method == "mtp" and serves_assistants(model) and not _is_own(speculation, name, folder)


def _is_own(speculation: SpeculativeConfig, name: str, folder: Path | None) -> bool:
    """Whether the option's model is the served one, or absent."""
    given = speculation.model
    if given in (None, name):
        return True
    return folder is not None and Path(given or "").expanduser().resolve() == folder.resolve()
