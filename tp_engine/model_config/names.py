"""How a checkpoint names its tensors, where it departs from the usual names.  No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNames:
    """How a checkpoint departs from the names ``model.*`` and ``lm_head.*``.

    ``spellings`` are the replacements of those two prefixes, tried in order.  Tensors whose names begin with one of
    ``skipped`` belong to parts that a text engine does not run.
    """

    spellings: tuple[tuple[str, str], ...] = (("model.", "lm_head."),)
    skipped: tuple[str, ...] = ()

    def spell(self, module: str) -> tuple[str, ...]:
        """All names that ``module``, a name in the usual spelling, may have, the usual one first."""
        found = dict.fromkeys((module, *(_spelled(module, one) for one in self.spellings)))
        return tuple(found)


def _spelled(module: str, spelling: tuple[str, str]) -> str:
    for usual, own in zip(("model.", "lm_head."), spelling, strict=True):
        if f"{module}.".startswith(usual):
            return (own + f"{module}.".removeprefix(usual)).removesuffix(".")
    return module


USUAL_NAMES = CheckpointNames()
LANGUAGE_MODEL_NAMES = CheckpointNames(
    spellings=(("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")),
    skipped=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
"""Of models with vision whose text part is ``language_model`` (Mistral 3, Gemma 3)."""
