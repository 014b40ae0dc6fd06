"""What a classifier or a reward model has in place of text: its scores, and what they mean.  No torch."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

ScoreActivation: TypeAlias = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLinear:
    """One linear layer of a head: the module ``name`` of the checkpoint, with ``out_size`` rows."""

    name: str
    out_size: int
    has_bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierSpec:
    """How scores are made, one for each of ``labels``, and how probabilities are made of them (``activation``).

    Scores are what ``linears``, with a relu between them, make of a hidden state.  Without any they are the logits of
    the tokens ``answers`` as the next one, or, if it ``is_two_way``, the first of two such logits less the second.
    They are for the last token that is not ``pad_token_id``, or, if they are ``per_token``, for each token.
    """

    labels: tuple[str, ...]
    activation: ScoreActivation
    linears: tuple[HeadLinear, ...] = ()
    answers: tuple[str, ...] = ()
    is_two_way: bool = False
    per_token: bool = False
    pad_token_id: int | None = None


YES_OR_NO = ClassifierSpec(labels=("LABEL_0",), activation="sigmoid", answers=("yes", "no"), is_two_way=True)
"""Of Qwen3-Reranker: how much likelier yes is than no."""
