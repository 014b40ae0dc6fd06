"""``hf_overrides``: what the user changes in config.json before it is read.  No torch."""

from collections.abc import Mapping
from typing import Any

from tp_engine.errors import ConfigError
from tp_engine.options.fields import json_object

OPTION = "hf_overrides"
REMEDY = (
    """keys of config.json can be changed, or removed by null, with --hf-overrides '{"KEY": VALUE}' """
    "(hf_overrides in Python)"
)
_SPELLINGS = (("rope_scaling", "rope_parameters"), ("torch_dtype", "dtype"))
_ROPE_KINDS = ("type", "rope_type")


def parse_overrides(given: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return the option's JSON object, with the keys that are null: these are removed.  Raises ``ConfigError``."""
    return json_object(OPTION, given, example="""'{"rope_theta": 1e6}'""", keeps_null=True)


def overridden(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with the changes of ``overrides``: an object changes the keys that it has, and any other value takes
    the place of the old one.  Null does so too: a key that is null counts as absent, or asks for no such part.  Two
    spellings of one key are the same key: an override changes the one that the file has.  Raises ``ConfigError``."""
    found = dict(values)
    for given, value in overrides.items():
        name = _spelled(given, found)
        old = found.get(name)
        if value is None and name == "rope_parameters" != given:
            raise ConfigError(
                f"{OPTION} removes {given}, but config.json has {name}, which holds rope_theta too: change its "
                'rope_type to "default", or remove it'
            )
        if isinstance(value, dict):
            if any(kind in value for kind in _ROPE_KINDS) and isinstance(old, dict):
                old = {key: one for key, one in old.items() if key not in _ROPE_KINDS}
            found[name] = overridden(old if isinstance(old, dict) else {}, value)
        else:
            found[name] = value
    theta, rope = overrides.get("rope_theta"), found.get("rope_parameters")
    if theta is not None and isinstance(rope, dict) and "rope_theta" in rope:  # which has precedence
        found["rope_parameters"] = {**rope, "rope_theta": theta}
    return found


def _spelled(name: str, values: Mapping[str, Any]) -> str:
    """The spelling of ``name`` in ``values``; itself if they have none."""
    for spellings in _SPELLINGS:
        if name in spellings and values.get(name) is None:
            return next((one for one in spellings if values.get(one) is not None), name)
    return name
