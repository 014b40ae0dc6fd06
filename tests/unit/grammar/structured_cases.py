"""Random schemas and expressions for the tests of structured output, each with a function that judges its outputs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema

from tp_engine.requests.structured_outputs import StructuredOutputsParams

Judge = Callable[[str], bool]
Case = tuple[StructuredOutputsParams, Judge]

_WORDS = ("alpha", "beta", "naïve", "世界", "a b", 'quo"te', "back\\slash", "")


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose shortest outputs are short."""
    kinds = ["integer", "number", "string", "pattern", "boolean", "null", "enum", "const"]
    kinds += ["object", "array", "anyOf"] * 2 if depth else []
    match rng.choice(kinds):
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 9)}
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(("^[a-f]{1,4}$", "^(x|yy)*z$", "^\\d{3}-\\d{2}$"))}
        case "enum":
            return {"enum": rng.sample([*_WORDS, 1, 2.5, None, True], 3)}
        case "const":
            return {"const": rng.choice([*_WORDS, {"a": [1]}])}
        case "object":
            names = rng.sample(["a", "b", "c", "with space", "ü"], rng.randint(0, 3))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": [name for name in names if rng.random() < 0.7],
                "additionalProperties": False,
            }
        case "array":
            low = rng.randint(0, 2)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
        case kind:
            return {"type": kind}


def random_regex(rng: random.Random, depth: int = 2) -> str:
    """An expression with bounded outputs that Python and the library interpret alike."""
    atoms = ["a", "[b-e]", "\\d", "é", "世界", "[^a-z\\n]", "\\.", "(?:xy|z)"]
    parts = []
    for _ in range(rng.randint(1, 3)):
        atom = f"(?:{random_regex(rng, depth - 1)})" if depth and rng.random() < 0.3 else rng.choice(atoms)
        parts.append(atom + rng.choice(("", "", "?", "{1,3}", "{0,2}")))
    return "".join(parts) if rng.random() < 0.8 else "|".join(parts)


def cases(seed: int, count: int) -> list[Case]:
    """Schemas, expressions and choices in turn."""
    rng = random.Random(seed)
    found: list[Case] = []
    while len(found) < count:
        match len(found) % 5:
            case 0 | 1 | 2:
                found.append(schema_case(random_schema(rng), tight=rng.random() < 0.7))
            case 3:
                found.append(regex_case(random_regex(rng)))
            case _:
                found.append(choice_case(rng.sample([word for word in _WORDS if word], rng.randint(1, 4))))
    return found


def schema_case(schema: dict[str, Any], *, tight: bool = True) -> Case:
    """``jsonschema`` judges the outputs; ``tight`` allows no white space."""
    validator = jsonschema.Draft202012Validator(schema)

    def judge(text: str) -> bool:
        try:
            value = json.loads(text)
        except ValueError:
            return False
        return validator.is_valid(value) and (not tight or not re.search(r"[,:]\s*\n", text))

    return StructuredOutputsParams(json=schema, disable_any_whitespace=tight), judge


def regex_case(regex: str) -> Case:
    """Python's ``re`` judges the outputs."""
    return StructuredOutputsParams(regex=regex), lambda text: re.fullmatch(regex, text) is not None


def choice_case(choices: list[str]) -> Case:
    """The list judges the outputs."""
    return StructuredOutputsParams(choice=choices), lambda text: text in choices
