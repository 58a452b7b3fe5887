"""The shortest legal way out, against every text there is, on the fake and on xgrammar."""

from __future__ import annotations

import itertools

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lazy_grammar.core.completion import GaveUp, NoWay, Way, completion
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.testing import SMALL_CALL, SMALL_TEXTS, FakeEngine, small_vocabulary

VOCABULARY = small_vocabulary()
ENGINES = {"fake": FakeEngine(VOCABULARY), "xgrammar": XgrammarEngine(VOCABULARY)}
MAX_BYTES = 6
TEXTS = ["".join(t) for n in range(MAX_BYTES + 1) for t in itertools.product("abc", repeat=n)]
PIECES = [text for text in SMALL_TEXTS if text and set(text) <= set("abc")]


def fewest(text):
    """In how few tokens the small vocabulary spells a text of a, b and c."""
    if not text:
        return 0
    return 1 + min(fewest(text[len(piece) :]) for piece in PIECES if text.startswith(piece))


def shortest(expression, written):
    """Tokens and bytes of the shortest way from `written`, by looking at every text; None where there is none."""
    pattern = regex.compile(expression)
    ways = [(fewest(text), len(text)) for text in TEXTS if pattern.fullmatch(written + text)]
    return min(ways, default=None)


def found(name, expression, written="", **options):
    matcher = ENGINES[name].compile(GrammarKey("regex", expression)).matcher()
    assert matcher.accept_bytes(written.encode())
    return matcher, completion(matcher, VOCABULARY, options.pop("max_bytes", MAX_BYTES), **options)


atoms = st.sampled_from(["a", "b", "c", "ab", "bc", "[ab]", "[abc]"])
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{3}", "{2,3}"])).map(lambda p: f"({p[0]}){p[1]}"),
    ),
    max_leaves=6,
)


@settings(max_examples=80)
@given(
    expression=expressions,
    written=st.sampled_from(["", "a", "b", "ab", "abc"]),
    name=st.sampled_from(["fake", "xgrammar"]),
)
def test_the_way_found_has_the_fewest_tokens_then_the_fewest_bytes_of_all_texts_there_are(expression, written, name):
    matcher = ENGINES[name].compile(GrammarKey("regex", expression)).matcher()
    if not matcher.accept_bytes(written.encode()):
        return
    outcome = completion(matcher, VOCABULARY, MAX_BYTES, effort=1_000_000)
    best = shortest(expression, written)
    if best is None:
        assert outcome == NoWay()
        return
    assert isinstance(outcome, Way)
    assert outcome.shortest
    assert (len(outcome.tokens), len(outcome.text)) == best
    assert all(matcher.accept(token) for token in outcome.tokens)
    assert matcher.is_completed()


@settings(max_examples=40)
@given(expression=expressions, name=st.sampled_from(["fake", "xgrammar"]))
def test_with_little_effort_what_is_found_is_legal_and_nothing_is_claimed_that_is_not_proven(expression, name):
    matcher, outcome = found(name, expression, effort=12)
    best = shortest(expression, "")
    if isinstance(outcome, NoWay):
        assert best is None
    if isinstance(outcome, Way):
        assert (len(outcome.tokens), len(outcome.text)) == best or not outcome.shortest
        assert all(matcher.accept(token) for token in outcome.tokens)
        assert matcher.is_completed()


@pytest.mark.parametrize("name", ENGINES)
def test_it_is_empty_where_the_text_may_end_already(name):
    assert found(name, "ab?", "a")[1] == Way((), b"", shortest=True)


@pytest.mark.parametrize("name", ENGINES)
def test_there_is_none_where_the_shortest_text_has_one_byte_too_many(name):
    assert found(name, "(abc){2}", max_bytes=5)[1] == NoWay()
    assert found(name, "(abc){2}", max_bytes=6)[1] == Way((4, 4), b"abcabc", shortest=True)


@pytest.mark.parametrize("name", ENGINES)
def test_fewer_tokens_come_before_fewer_bytes(name):
    assert found(name, "abc|ba")[1] == Way((4,), b"abc", shortest=True)


@pytest.mark.parametrize("name", ENGINES)
def test_places_that_allow_the_same_next_tokens_are_told_apart(name):
    assert found(name, "(ab){3}c|(ab){2}cccc", max_bytes=9)[1] == Way((3, 3, 4), b"abababc", shortest=True)


@pytest.mark.parametrize("name", ENGINES)
def test_it_moves_nothing(name):
    matcher, _ = found(name, "(ab)+c", "ab")
    assert matcher.steps == 1
    assert matcher.accept_bytes(b"c")


@pytest.mark.parametrize("name", ENGINES)
def test_a_half_character_is_finished(name):
    matcher = ENGINES[name].compile(GrammarKey("regex", "éa")).matcher()
    matcher.accept_bytes(b"\xc3")
    assert completion(matcher, VOCABULARY, 2) == Way((22, 0), b"\xa9a", shortest=True)


def test_a_special_token_that_the_grammar_names_is_a_step():
    matcher = ENGINES["xgrammar"].compile(GrammarKey("grammar", f'root ::= "a" Token({SMALL_CALL}) "b"')).matcher()
    assert completion(matcher, VOCABULARY, 8) == Way((0, SMALL_CALL, 1), b"a<call>b", shortest=True)
    assert completion(matcher, VOCABULARY, 7) == NoWay()


LETTERS = Vocabulary(
    [
        *(bytes((byte,)) for byte in range(256)),
        *(f"{a}{b}".encode() for a in "abcdefghij" for b in "abcdefghij"),
        b'"}',
    ],
    400,
)
LARGE = XgrammarEngine(LETTERS)


def test_out_of_a_string_where_hundreds_of_tokens_are_legal_a_way_is_found_but_not_called_the_shortest():
    schema = '{"type":"object","properties":{"x":{"type":"string"},"n":{"type":"integer"}},"required":["x","n"]}'
    matcher = LARGE.compile(GrammarKey("json", schema)).matcher()
    matcher.accept_bytes(b'{"x":"ab')
    outcome = completion(matcher, LETTERS, 40, effort=2_000)
    assert isinstance(outcome, Way)
    assert outcome.text == b'","n":0}'
    assert not outcome.shortest


def test_a_text_found_by_bytes_is_spelled_in_as_few_tokens_as_there_are():
    matcher = LARGE.compile(
        GrammarKey("json", '{"type":"object","properties":{"x":{"type":"string"}},"required":["x"]}')
    ).matcher()
    matcher.accept_bytes(b'{"x":"')
    outcome = completion(matcher, LETTERS, 40, effort=100)
    assert outcome == Way((LETTERS.token_of('"}'),), b'"}', shortest=False)


def test_giving_up_is_told_from_having_found_that_there_is_none():
    matcher = LARGE.compile(GrammarKey("regex", "[a-j]{30}!")).matcher()
    assert isinstance(completion(matcher, LETTERS, 40, effort=20), GaveUp)
    assert isinstance(completion(matcher, LETTERS, 12, effort=50), GaveUp)
    matcher.accept_bytes(b"a" * 30)
    assert completion(matcher, LETTERS, 0, effort=20) == NoWay()
