"""How a checkpoint names its tensors, where it departs from the usual names.  No torch."""

import re
from collections.abc import Collection
from dataclasses import dataclass

_INNER = re.compile(r"mtp[._]|layers\.(?P<layer>\d{1,6})\.(?P<rest>.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNames:
    """How a checkpoint departs from the names ``model.*`` and ``lm_head.*``.

    ``spellings`` are the replacements of those two prefixes, tried in order.  Within a layer, modules with a usual name
    (``self_attn.o_proj``) may have another one: ``renamed``, pairs of both; ``outside`` has those of what stands beside
    the layers, how a name begins once its prefix is replaced.  Tensors whose names begin with one of ``skipped``
    belong to parts that a text engine does not run.
    """

    spellings: tuple[tuple[str, str], ...] = (("model.", "lm_head."),)
    renamed: tuple[tuple[str, str], ...] = ()
    outside: tuple[tuple[str, str], ...] = ()
    skipped: tuple[str, ...] = ()

    def mtp_names(self, names: Collection[str], num_layers: int) -> set[str]:
        """Return the tensors of multi-token prediction among ``names``: they begin with ``mtp``, or are in a layer
        after the last of ``num_layers`` that has tensors which no other layer has.

        A further layer like the others is not of multi-token prediction: config.json is another model's.
        """
        prefixes = ("", "model.", *(model for model, _ in self.spellings))
        found: set[str] = set()
        layers: dict[int, dict[str, str]] = {}
        for name in names:
            inner = next(filter(None, (_INNER.match(name.removeprefix(prefix)) for prefix in prefixes)), None)
            if inner is not None and inner["layer"] is None:
                found.add(name)
            elif inner is not None:
                layers.setdefault(int(inner["layer"]), {})[name] = inner["rest"]
        usual = {rest for index, own in layers.items() if index < num_layers for rest in own.values()}
        further = [own for index, own in layers.items() if index >= num_layers]
        return found.union(*(own for own in further if not usual.issuperset(own.values())))

    def spell(self, module: str) -> tuple[str, ...]:
        """Return all names that ``module``, a name in the usual spelling, may have, the usual one first."""
        found = dict.fromkeys((module, *(self.spelled(module, one) for one in self.spellings)))
        return tuple(found)

    def spelled(self, name: str, spelling: tuple[str, str]) -> str:
        """Return how a checkpoint with this one of the ``spellings`` calls ``name``, a module or a tensor."""
        found = f"{name}."
        for usual, own in self.renamed:
            found = found.replace(f".{usual}.", f".{own}.")
        for usual, own in zip(("model.", "lm_head."), spelling, strict=True):
            if found.startswith(usual):
                found = own + found.removeprefix(usual)
                for begin, other in self.outside:
                    found = other + found.removeprefix(begin) if found.startswith(begin) else found
                return found.removesuffix(".")
        return found.removesuffix(".")


USUAL_NAMES = CheckpointNames()
LANGUAGE_MODEL_NAMES = CheckpointNames(
    spellings=(("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")),
    skipped=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
"""Of models with vision whose text part is ``language_model`` (Mistral 3, Gemma 3)."""
