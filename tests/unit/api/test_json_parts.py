"""JSON in parts: the same text as at once, whatever its shape."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_engine.api import json_parts as parts
from tp_engine.api.json_parts import json_parts

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=6),
    max_leaves=40,
)


@given(VALUES)
def test_parts_make_the_whole(value: Any) -> None:
    """Oracle: msgspec at once; with small parts, so that they end at every kind of place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_PART", 4)
        assert b"".join(json_parts(value)) == msgspec.json.encode(value)


def test_parts_are_small() -> None:
    """Oracle: the bound; log-probabilities as answers have them, and a list and a mapping of plain values."""
    entry = {"logprob": -1.25, "rank": 1, "decoded_token": "word"}
    positions = [None, *({str(token): entry for token in range(21)} for _ in range(2000))]
    value = {"choices": [{"prompt_logprobs": positions}] * 2, "ids": list(range(50_000)), "usage": {}}
    found = list(json_parts(value))
    assert b"".join(found) == msgspec.json.encode(value)
    assert max(map(len, found)) < 1 << 17 and len(found) > 50
