"""Draft tokens from past answers.  Oracle: a search through all texts, in Python."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np

from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.features.speculation.proposer import Proposal
from tp_engine.features.speculation.suffix_proposer import SuffixProposer

DEPTH = 10


def ended(text: list[int], num_prompt_tokens: int = 0, salt: str = "") -> Any:
    """A sequence that has ended."""
    tokens = np.array(text, dtype=np.int32)
    return SimpleNamespace(token_ids=tokens, num_prompt_tokens=num_prompt_tokens, group=SimpleNamespace(cache_key=salt))


def source(bits: int = 12, **changes: Any) -> SuffixProposer:
    config = SpeculativeConfig(method="suffix", suffix_decoding_max_tree_depth=DEPTH, **changes)
    return SuffixProposer(config, bits)


def look(found: SuffixProposer, text: list[int], count: int = 4, salt: str = "") -> Proposal | None:
    """What is found in past answers."""
    draft_tokens = found.proposals(ended([], salt=salt), np.array(text, dtype=np.int32), count)
    return next((proposal for proposal in draft_tokens if proposal.source == "suffix"), None)


def tokens_of(proposal: Proposal | None) -> list[int]:
    return [] if proposal is None else proposal.tokens.tolist()


def search(texts: list[list[int]], query: list[int]) -> tuple[int, list[list[int]]]:
    """The longest match of the last tokens of ``query``, from 3 tokens on, and what follows at each such place."""
    best: tuple[int, list[list[int]]] = (0, [])
    for text in texts:
        for end in range(len(text)):
            matched = 0
            while matched < min(DEPTH, end + 1, len(query)) and text[end - matched] == query[-1 - matched]:
                matched += 1
            if matched >= max(3, best[0]):
                best = (matched, [*(best[1] if matched == best[0] else []), text[end + 1 :]])
    return best


def test_the_longest_match_and_its_likeliest_path() -> None:
    """Oracle: a search through the texts that are kept; of the tokens' shares the sum is the largest."""
    rng, found = random.Random(5), source(suffix_decoding_max_cached_requests=30)
    texts: list[list[int]] = []
    num_hits = num_shared = 0
    for _ in range(300):
        text = [rng.randrange(5) for _ in range(rng.randint(2, 24))]
        texts.append(text)
        found.learn(ended(text))
        kept = texts[-30:]
        query = [rng.randrange(5) for _ in range(6)] + rng.choice(kept)[: rng.randint(3, 24)]
        proposal = look(found, query)
        matched, behind = search(kept, query)
        if proposal is None:
            assert not any(behind)
            continue
        assert proposal.matched == matched
        path = proposal.tokens.tolist()
        ways = [way[: min(4, matched)] for way in behind]
        shares = [sum(sum(other[: i + 1] == way[: i + 1] for other in ways) for i in range(len(way))) for way in ways]
        likeliest = [way for way, share in zip(ways, shares, strict=True) if share == max(shares)]
        assert path in likeliest, (path, ways)
        num_hits += 1
        num_shared += len(behind) > 1
    assert num_hits > 50 and num_shared > 10


def test_what_is_kept_and_how_much_is_drafted() -> None:
    """By hand: the prompt's end and the answer; as many tokens as the match has, times the factor; rare ones not."""
    found = source(suffix_decoding_max_spec_factor=0.5, suffix_decoding_min_token_prob=0.4)
    found.learn(ended([*range(100, 140), 1, 2, 3, 4, 5, 6, 7, 8, 9], num_prompt_tokens=40))
    assert tokens_of(look(found, [*range(50), 138, 139, 1, 2, 3, 4, 5])) == [6, 7, 8]
    assert tokens_of(look(found, [*range(50), 137, 138, 139])) == [1]
    assert look(found, [*range(50), 101, 102, 103]) is None, "the prompt's begin is not kept"
    assert look(found, [*range(50), 7, 8, 9]) is None, "nothing follows"
    found.learn(ended([0, 0, 9, 9, 1, 2, 3, 50, 60]))
    found.learn(ended([0, 0, 8, 9, 1, 2, 3, 50, 70]))
    proposal = look(found, [60, 61, 62, 63, 64, 65, 9, 1, 2, 3])
    assert proposal is not None
    assert (proposal.tokens.tolist(), proposal.matched) == ([50, 70], 4), "of equal ones the newest"
    assert tokens_of(look(found, [60, 61, 62, 63, 64, 65, 66, 9, 9, 1, 2, 3], 1)) == [50]


def test_cache_keys_do_not_see_each_other() -> None:
    """By hand: another salt finds nothing, and its own texts later."""
    found = source()
    text = list(range(20))
    found.learn(ended(text, salt="a"))
    assert look(found, text[:12], salt="b") is None
    assert tokens_of(look(found, text[:12], salt="a")) == [12, 13, 14, 15]
    found.learn(ended([*text[:12], 7, 7, 7], salt="b"))
    assert tokens_of(look(found, text[:12], salt="b")) == [7, 7, 7]
    assert tokens_of(look(found, text[:12], salt="a")) == [12, 13, 14, 15]


def test_old_answers_go_and_long_ones_are_cut() -> None:
    """By hand: the number of requests, and the ring's size."""
    found = source(8, suffix_decoding_max_cached_requests=2)
    for first in (0, 100, 200):
        found.learn(ended(list(range(first, first + 20))))
    assert look(found, list(range(12))) is None
    assert len(tokens_of(look(found, list(range(100, 112))))) == 4
    found.learn(ended(list(range(1000, 3000))))
    assert look(found, list(range(1000, 1100))) is None
    assert tokens_of(look(found, list(range(2900, 2950)))) == [2950, 2951, 2952, 2953]
    assert look(found, list(range(100, 112))) is None
