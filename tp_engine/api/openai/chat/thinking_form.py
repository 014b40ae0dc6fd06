"""How one chat template is told to think or not to think, found out once by rendering short conversations.

| variable of the template | on, off |
| --- | --- |
| `enable_thinking`, `thinking`, `reasoning` | true, false |
| `thinking_mode` | `enabled`, `disabled`; or `thinking`, `chat`; or `on`, `off` |
| `thinking_budget` | -1, 0 |
| `reasoning_effort`, `thinking_effort` | -; `none` or `no_think`, if the template has such a word |

Each variable that a request leaves out follows those that it sets, so that one template's name works with another
template.  A word of effort that the template refuses is replaced by the nearest one that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Pair: TypeAlias = tuple[Any, Any]
Prompts: TypeAlias = Callable[[Mapping[str, Any]], Sequence[str]]

# Every template gets these; the others only if the template writes different prompts for the two values of a pair.
_COMMON: Mapping[str, Pair] = {"enable_thinking": (True, False), "thinking": (True, False)}
_OTHERS: Mapping[str, tuple[Pair, ...]] = {
    "reasoning": ((True, False),),
    "thinking_mode": (("enabled", "disabled"), ("thinking", "chat"), ("on", "off")),
    "thinking_budget": ((-1, 0),),
}
_EFFORT_NAMES = ("reasoning_effort", "thinking_effort")
SWITCHES = frozenset({*_COMMON, *_OTHERS})
# From least to most.
_EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
_OFF_WORDS = ("none", "no_think")
_UNKNOWN_WORD = "qzxword"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingForm:
    """``switches``: the values of each variable for on and off.  ``effort``: the name of the variable for effort.

    ``words``: what stands for a word of effort that the template refuses; None: the variable is left out.
    ``off_word``: the word of effort that switches thinking off, if there is one.
    """

    switches: Mapping[str, Pair] = field(default_factory=lambda: _COMMON)
    effort: str = _EFFORT_NAMES[0]
    words: Mapping[str, str | None] = field(default_factory=dict)
    off_word: str | None = None

    @classmethod
    def of(cls, mentions: Callable[[str], bool], prompts: Prompts) -> ThinkingForm:
        """Probe a template, whose text ``mentions`` a word or not.

        ``prompts`` renders some conversations with variables; a prompt is empty if the template refuses them.
        """
        switches = dict(_COMMON)
        for name, pairs in _OTHERS.items():
            found = (one for one in pairs if _differ(prompts({name: one[0]}), prompts({name: one[1]})))
            if mentions(name) and (pair := next(found, None)) is not None:
                switches[name] = pair
        effort = next(filter(mentions, _EFFORT_NAMES), None)
        if effort is None:
            return cls(switches=switches)
        thinking = {name: on for name, (on, _) in switches.items()}
        words = (*_EFFORTS, *_OFF_WORDS, _UNKNOWN_WORD)
        written = {word: tuple(prompts({**thinking, effort: word})) for word in words}
        taken = [word for word in words if all(written[word])]
        return cls(
            switches=switches,
            effort=effort,
            words={word: _nearest(word, taken) for word in (*_EFFORTS, *_OFF_WORDS) if word not in taken},
            off_word=_off_word(written, taken),
        )

    def variables(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The variables ``given`` and those that follow from them, and whether they switch thinking off."""
        thinks = self._thinks(given)
        found = dict(given)
        if thinks is not None:
            found = {name: on if thinks else off for name, (on, off) in self.switches.items()} | found
        word = found.get(self.effort, found.get(_EFFORT_NAMES[0]))
        if thinks is False and self.off_word is not None:
            found[self.effort] = self.off_word
        elif isinstance(word, str):
            taken = None if thinks and word in _OFF_WORDS else self.words.get(word, word)
            found.pop(self.effort, None)
            found |= {} if taken is None else {self.effort: taken}
        return found, thinks is False

    def _thinks(self, given: Mapping[str, Any]) -> bool | None:
        """Whether the switches that are ``given`` ask for thinking; None if they leave it open.  Off has priority."""
        pairs = [(given[name], pair) for name, pair in self.switches.items() if name in given]
        chosen = [value == on for value, (on, off) in pairs if value in (on, off)]
        return all(chosen) if chosen else None


def switched_by(effort: object) -> bool | None:
    """Whether a word of effort asks for thinking or for none; None if it leaves that to the model."""
    if not isinstance(effort, str) or effort == _EFFORTS[0]:  # minimal: the model decides
        return None
    return effort not in _OFF_WORDS


def _differ(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether a template takes both values, and its prompts differ in more than the values themselves."""
    pairs = [(one, other) for one, other in zip(first, second, strict=True) if one and other]
    return any(one != other for one, other in pairs) and not any("True" in one for one, _ in pairs)


def _nearest(word: str, taken: Iterable[str]) -> str | None:
    """The word of effort among those ``taken`` that is nearest to ``word``; of two, the greater one."""
    known = [one for one in taken if one in _EFFORTS]
    if word not in _EFFORTS or not known:
        return None
    place = _EFFORTS.index(word)
    return min(known, key=lambda one: (abs(_EFFORTS.index(one) - place), -_EFFORTS.index(one)))


def _off_word(written: Mapping[str, tuple[str, ...]], taken: Sequence[str]) -> str | None:
    """The word by which the template switches thinking off.

    A template that refuses unknown words knows those that it takes.  One that takes any word may just print it, or
    treat all unknown words alike.
    """
    for word in _OFF_WORDS:
        others = [one for one in _EFFORTS[2:] if one in taken]
        printed = {one: tuple(text.replace(word, one) for text in written[word]) for one in others}
        is_known = all(written[one] not in (written[word], printed[one]) for one in others)
        if word in taken and (_UNKNOWN_WORD not in taken or is_known):
            return word
    return None
