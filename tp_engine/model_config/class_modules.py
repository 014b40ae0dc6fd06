"""A decoder that modules of transformers run, with this engine's attention, cache and linear layers.  No torch.

``models/class_model/`` runs it, and finds this description by asking the class.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassModules:
    """What a rank makes the model of: the class ``architecture`` of the installed transformers, with the ``config``,
    a JSON text.

    ``places`` has the module of each call of attention, in the order of the calls: each keeps keys and values of its
    own, and is a layer of the ``ModelSpec``.  ``body``, ``embedding`` and ``head`` are paths of modules; the body makes
    hidden states of token ids, and has the embedding within.  With ``splits`` the class's own plan for tensor
    parallelism is followed; otherwise each linear layer's rows are divided, and gathered behind it.
    """

    architecture: str
    config: str
    places: tuple[str, ...]
    body: str
    embedding: str
    head: str
    head_bias: bool = False
    splits: bool = False
