"""Grammars over the tokens of small tokenizers: random outputs under the masks satisfy the constraint."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import llguidance
import numpy as np
import pytest

from tests.masks import fill
from tests.text_tokenizers import SlowByteTokenizer, byte_fallback_tokenizer, byte_level_tokenizer, metaspace_tokenizer
from tests.unit.grammar.structured_cases import Judge, cases, choice_case, regex_case, schema_case
from tp_engine.errors import RequestError
from tp_engine.grammar.compiler import GrammarCompiler, compile_grammar
from tp_engine.grammar.matcher import GrammarMatcher
from tp_engine.grammar.vocabulary import GrammarVocabulary, check_tokenizer, make_vocabulary
from tp_engine.plan import IntArray
from tp_engine.requests.structured_outputs import StructuredOutputsParams

EOS = 1
MAX_TOKENS = 400
TOKENIZERS = {"bytes": byte_level_tokenizer, "fallback": byte_fallback_tokenizer}
CASES = cases(1, 60)


def vocabulary_of(kind: str, vocab_size: int | None = None) -> GrammarVocabulary:
    tokenizer = TOKENIZERS[kind]()
    return make_vocabulary(tokenizer.backend_tokenizer.to_str(), vocab_size or len(tokenizer) + 9, (EOS,))


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def vocabulary(request: pytest.FixtureRequest) -> tuple[str, GrammarVocabulary]:
    return request.param, vocabulary_of(request.param)


def allowed(mask: IntArray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(matcher: GrammarMatcher, rng: random.Random, max_tokens: int = MAX_TOKENS) -> list[int]:
    """Random allowed tokens; EOS, where allowed, with a chance of a half; ends where no token is allowed."""
    tokens = list[int]()
    while not matcher.is_over:
        assert len(tokens) < max_tokens, "the grammar does not end"
        choices = allowed(fill([matcher])[0])
        token_id = EOS if EOS in choices and rng.random() < 0.5 else rng.choice(choices)
        assert matcher.accept(token_id) and matcher.error is None
        tokens.append(token_id)
    return tokens


def text_of(kind: str, tokens: list[int]) -> str:
    """The tokenizer's decoding; without a first token that marks the start of a text."""
    tokenizer = TOKENIZERS[kind]()
    tokens = [token_id for token_id in tokens if token_id != EOS]
    if kind == "bytes":
        return str(tokenizer.decode(tokens))
    start = tokenizer.encode("a", add_special_tokens=False)
    prefix = tokenizer.decode(start)
    return str(tokenizer.decode([*start, *tokens]))[len(prefix) :]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_output_is_what_was_asked_for(number: int, vocabulary: tuple[str, GrammarVocabulary]) -> None:
    """Oracle: ``jsonschema`` for schemas, ``re`` for expressions, the list for choices."""
    kind, tokens = vocabulary
    params, judge = CASES[number]
    compiled = compile_grammar(params, tokens)
    for seed in range(2):
        text = text_of(kind, walk(compiled.start(), random.Random(seed)))
        assert judge(text), (params, text)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_copies_change_nothing_and_forced_tokens_fit(number: int, vocabulary: tuple[str, GrammarVocabulary]) -> None:
    """Oracle: the matcher without copies: at each place of an output its mask is the same after a copy has gone another
    way; the copy accepts what is forced."""
    compiled, rng = compile_grammar(CASES[number][0], vocabulary[1]), random.Random(number)
    plain, asked = compiled.start(), compiled.start()
    for token_id in walk(compiled.start(), rng):
        other = asked.copy()
        for forced in asked.forced():
            assert not other.is_over and other.accept(forced)
        for _ in range(3):
            if not other.is_over:
                other.accept(rng.choice(allowed(fill([other])[0])))
        assert np.array_equal(fill([asked]), fill([plain])) and not asked.is_over
        assert asked.accept(token_id) == plain.accept(token_id) and asked.is_over == plain.is_over
    assert asked.is_over


GRAMMARS: list[tuple[str, Judge]] = [
    ('start: "a" | "b" start', lambda text: text.endswith("a") and set(text[:-1]) <= {"b"}),
    ('root ::= "(" root ")" | "x"', lambda text: text.strip("()") == "x" and text.count("(") == text.count(")")),
    ('start: %json {"enum": ["p", "q"]} "!"', lambda text: text in ('"p"!', '"q"!')),
]


@pytest.mark.parametrize(("grammar", "judge"), GRAMMARS)
def test_grammars_in_both_notations(grammar: str, judge: Judge, vocabulary: tuple[str, GrammarVocabulary]) -> None:
    """Oracle: a few lines of Python."""
    kind, tokens = vocabulary
    compiled = compile_grammar(StructuredOutputsParams(grammar=grammar), tokens)
    for seed in range(3):
        text = text_of(kind, walk(compiled.start(), random.Random(seed)))
        assert judge(text), text


def test_any_object_and_whitespace() -> None:
    """Oracle: counts: between two tokens 8 blanks, or one line end and 20 blanks, and none where none is wanted."""
    tokens = vocabulary_of("bytes")
    blank, brace, line_end = byte_level_tokenizer().encode(" {\n", add_special_tokens=False)
    for tight, before, most in ((False, [], 8), (False, [line_end], 20), (True, [], 0)):
        params = StructuredOutputsParams(json_object=True, disable_any_whitespace=tight)
        matcher = compile_grammar(params, tokens).start()
        assert all(map(matcher.accept, [brace, *before]))
        count = 0
        while blank in allowed(fill([matcher])[0]):
            assert matcher.accept(blank)
            count += 1
        assert count == most
        assert line_end not in allowed(fill([matcher])[0])


@pytest.mark.parametrize(
    ("grammar", "most"),
    [
        ('start: %json {"type": "object"}', 8),
        ('// "\n# %json {\nstart: part "%json {}"\npart: %json\n{"type": "object", "title": "\\"}"}', 8),
        ('start: one | /\\/+/\none: %json{"x-guidance": {"whitespace_flexible": false}, "type": "object"}', 0),
    ],
)
def test_white_space_of_json_within_a_grammar(grammar: str, most: int) -> None:
    """Oracle: as for JSON alone, 8 blanks, unless the schema itself says otherwise; other text is as it was."""
    blank, brace = byte_level_tokenizer().encode(" {", add_special_tokens=False)
    matcher = compile_grammar(StructuredOutputsParams(grammar=grammar), vocabulary_of("bytes")).start()
    assert matcher.accept(brace)
    count = 0
    while blank in allowed(fill([matcher])[0]) and count < 100:
        assert matcher.accept(blank)
        count += 1
    assert count == most


def test_indented_json_fits() -> None:
    """Oracle: what ``json.dumps`` writes, compact and indented by blanks or tabs, with either line end."""
    tokens = vocabulary_of("bytes")
    compiled = compile_grammar(StructuredOutputsParams(json_object=True), tokens)
    value = {"a": {"b": [1, {"c": [True, None, "x"]}], "d": {}}}
    for indent in (None, 2, 4, "\t"):
        text = json.dumps(value, indent=indent)
        for spelled in (text, text.replace("\n", "\r\n"), json.dumps(value, separators=(",", ":"))):
            matcher = compiled.start()
            assert all(map(matcher.accept, byte_level_tokenizer().encode(spelled, add_special_tokens=False)))


def test_copies_are_independent_and_masks_are_the_same_in_parallel() -> None:
    """Oracle: each matcher's own mask; sequences of one request begin at the same place and then diverge."""
    tokens = vocabulary_of("bytes")
    compiled = compile_grammar(regex_case("[a-c]{2,9}x")[0], tokens)
    matchers, rng = [compiled.start() for _ in range(12)], random.Random(0)
    for _ in range(6):
        together = fill(matchers)
        assert together.dtype == np.int32 and together.shape == (len(matchers), tokens.num_words)
        for matcher, mask in zip(matchers, together, strict=True):
            assert np.array_equal(mask, fill([matcher])[0])
            if not matcher.is_over:
                assert matcher.accept(rng.choice(allowed(mask)))
    assert len({matcher._matcher.is_stopped() for matcher in matchers}) == 2


def test_a_refused_token_ends_the_output() -> None:
    tokens = vocabulary_of("bytes")
    matcher = compile_grammar(choice_case(["a"])[0], tokens).start()
    assert not matcher.accept(5)
    assert matcher.is_over and matcher.error is not None


@pytest.mark.parametrize("is_slow", [False, True])
def test_an_output_that_no_token_can_finish_is_an_error(is_slow: bool) -> None:
    """Oracle: the quote is a special token, which writes no text, and no other token writes one: what is there is not
    what was asked for, and must not look complete."""
    written = json.loads(byte_level_tokenizer().backend_tokenizer.to_str())
    quote = {"id": written["model"]["vocab"]['"'], "content": '"', "special": True, "normalized": False}
    written["added_tokens"].append({**quote, "single_word": False, "lstrip": False, "rstrip": False})
    matcher = compile_grammar(regex_case('a{1,2}"b')[0], make_vocabulary(json.dumps(written), 360, (EOS,))).start()
    if is_slow:
        matcher._pace.usual_s = 1.0
    for _ in range(5):
        if not matcher.accept(allowed(fill([matcher])[0])[0]):
            break
    assert matcher.is_over and "none of the model's tokens writes what must follow" in str(matcher.error)


def test_what_a_tokenizer_does_to_prompts_leaves_answers_alone() -> None:
    """Oracle: the list.  A space in front, truncation, padding and dropout are for prompts; the library tokenizes what
    a grammar forces, and would ask for tokens that do not fit."""
    written = json.loads(byte_level_tokenizer().backend_tokenizer.to_str())
    of_bytes = {**written["pre_tokenizer"], "add_prefix_space": True}
    digits = {"type": "Digits", "individual_digits": True}
    written["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [digits, {"type": "Sequence", "pretokenizers": [of_bytes]}],
    }
    written["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    written["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 2, "pad_type_id": 0,
        "pad_token": "<pad>",
    }  # fmt: skip
    written["model"]["dropout"] = 0.9
    params, judge = choice_case(["the quick brown fox", "12 stops"])
    compiled = compile_grammar(params, make_vocabulary(json.dumps(written), 360, (EOS,)))
    for seed in range(4):
        text = text_of("bytes", walk(compiled.start(), random.Random(seed)))
        assert judge(text), text


@pytest.mark.parametrize("regex", ["a{0,3}", "a*"])
def test_end_tokens(regex: str) -> None:
    """Oracle: an end token is allowed where the expression matches; with ``ignore_eos`` only where it is the only
    choice."""
    tokens = vocabulary_of("bytes")
    compiled = compile_grammar(regex_case(regex)[0], tokens)
    matcher, stubborn = compiled.start(), compiled.start(ignore_eos=True)
    assert EOS in allowed(fill([matcher])[0]) and EOS not in allowed(fill([stubborn])[0])
    assert matcher.accept(EOS) and matcher.is_over
    first = allowed(fill([stubborn])[0])[0]
    for _ in range(3):
        assert not stubborn.is_over and stubborn.accept(first)
    assert stubborn.is_over == (regex != "a*")


def test_vocabularies_of_other_sizes() -> None:
    """Oracle: masks have the model's size; tokens beyond the tokenizer's or the model's are never allowed."""
    num_tokens = len(byte_level_tokenizer())
    for vocab_size in (num_tokens, num_tokens + 100, 200):
        tokens = vocabulary_of("bytes", vocab_size)
        (mask,) = fill([compile_grammar(regex_case("(?s:.)*")[0], tokens).start()])
        assert len(mask) == -(-vocab_size // 32)
        assert max(allowed(mask)) < num_tokens and EOS in allowed(mask)


BAD: list[tuple[StructuredOutputsParams, str]] = [
    (StructuredOutputsParams(regex="("), "the regex cannot be used: .*unclosed group"),
    (StructuredOutputsParams(regex="a(?=b)"), "look-around"),
    (StructuredOutputsParams(json={"type": "strin"}), "the JSON schema cannot be used: Invalid type: strin"),
    (StructuredOutputsParams(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
    (StructuredOutputsParams(json={"$ref": "#"}), "no output fits it"),
    (StructuredOutputsParams(json={"$ref": "http://x/y"}), "http://x/y"),
    (StructuredOutputsParams(json="false"), "Unsatisfiable"),
    (StructuredOutputsParams(json={"type": "integer", "minimum": 5, "maximum": 2}), "minimum"),
    (StructuredOutputsParams(grammar="root ::= x"), "the grammar cannot be used: .*'x' not found"),
    (StructuredOutputsParams(grammar="nonsense"), "the grammar cannot be used"),
    (StructuredOutputsParams(json_object=True, whitespace_pattern="("), "the white space cannot be used"),
]


@pytest.mark.parametrize(("params", "text"), BAD)
def test_bad_constraints_are_refused_by_name(params: StructuredOutputsParams, text: str) -> None:
    """Oracle: the library's words."""
    with pytest.raises(RequestError, match=text) as caught:
        compile_grammar(params, vocabulary_of("bytes"))
    assert caught.value.param == "structured_outputs"


def test_tokenizers_that_the_library_can_not_know() -> None:
    with pytest.raises(RequestError, match="needs a tokenizer"):
        check_tokenizer(None)
    with pytest.raises(RequestError, match="fast tokenizer"):
        check_tokenizer(SlowByteTokenizer())
    with pytest.raises(RequestError, match="not supported with this model's tokenizer"):
        make_vocabulary(metaspace_tokenizer().backend_tokenizer.to_str(), 200, (EOS,))


def test_a_grammar_that_reaches_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: an error that names the limit; until then the mask allows tokens, afterwards only the end."""

    def few_states() -> Any:
        return llguidance.LLParserLimits(max_lexer_states=200, verbose_errors=False)

    monkeypatch.setattr("tp_engine.grammar.library.parser_limits", few_states)
    matcher = compile_grammar(StructuredOutputsParams(regex="(a|b)*c(a|b){400}d"), vocabulary_of("bytes")).start()
    rng, count = random.Random(0), 0
    while not matcher.is_over:
        choices = allowed(fill([matcher])[0])
        if matcher.error is not None:
            assert choices == [EOS] and not matcher.accept(EOS)
            break
        assert matcher.accept(rng.choice(choices))
        count += 1
    assert count > 10 and matcher.is_over and "too many states" in str(matcher.error)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the package to install, by name."""
    tokens = vocabulary_of("bytes")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'llguidance>=1\.9'"):
        compile_grammar(StructuredOutputsParams(regex="a"), tokens)


def test_objects_are_closed_unless_they_are_opened() -> None:
    """Oracle: ``jsonschema`` with the closed schema, on outputs of the open one; a request may open it."""
    tokens = vocabulary_of("bytes")
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    _, judge = schema_case({**schema, "additionalProperties": False})
    options: dict[str, Any] = {"json": schema, "disable_any_whitespace": True}
    comma = byte_level_tokenizer().encode('{"a":1,')
    for given in (None, True):
        closed = compile_grammar(StructuredOutputsParams(**options, disable_additional_properties=given), tokens)
        for seed in range(5):
            assert judge(text_of("bytes", walk(closed.start(), random.Random(seed))))
        assert not all(map(closed.start().accept, comma))
    opened = StructuredOutputsParams(**options, disable_additional_properties=False)
    assert all(map(compile_grammar(opened, tokens).start().accept, comma))


def test_the_last_grammars_are_remembered() -> None:
    """Oracle: the same object; after 32 other grammars, a new one."""
    compiler = GrammarCompiler(vocabulary_of("bytes"))
    first = StructuredOutputsParams(regex="first")
    assert compiler.known(first) is None
    compiled = compiler.compile(first)
    assert compiler.compile(StructuredOutputsParams(regex="first")) is compiled is compiler.known(first)
    for number in range(32):
        compiler.compile(StructuredOutputsParams(regex=f"a{number}"))
    assert compiler.known(first) is None
