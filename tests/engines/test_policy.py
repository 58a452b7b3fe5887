"""Which engine takes which grammar, what is told of it, and what is refused or relaxed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.engines import policy
from vllm_lazy_grammar.engines.policy import Choice, PolicyEngine
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.errors import GrammarError, SettingsError

BYTES = Vocabulary([bytes((byte,)) for byte in range(256)], 257)
XGRAMMAR = XgrammarEngine(BYTES)
INSTALLED = policy._installed()
TAG = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "a"}})
THIRDS = GrammarKey("json", '{"type": "integer", "multipleOf": 3}')
UNIQUE = GrammarKey("json", '{"type": "array", "items": {"type": "integer"}, "uniqueItems": true}')
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


@pytest.fixture
def told():
    return []


@pytest.fixture
def engine(told):
    return lambda name="auto", *, relax=False: PolicyEngine(XGRAMMAR, Choice(name, relax), told.append)


def takes(grammar, text):
    matcher = grammar.matcher()
    return matcher.accept_bytes(text.encode()) and matcher.is_completed()


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json", json.dumps(POINT)),
        ("json_object", ""),
        ("regex", "a+"),
        ("choice", '["a"]'),
        ("grammar", 'root ::= "a"'),
        ("grammar", 'start: "a"'),
        ("structural_tag", TAG),
    ],
)
def test_what_xgrammar_expresses_goes_to_xgrammar_and_nothing_is_told(engine, told, kind, source):
    key = GrammarKey(kind, source)
    assert engine().compile(key).origin == policy.check(key, Choice()) == "xgrammar"
    assert told == []


def test_a_schema_of_which_xgrammar_drops_something_goes_to_an_engine_that_obeys_it(engine, told):
    grammar = engine().compile(THIRDS)
    assert grammar.origin == "llguidance, since xgrammar: xgrammar can not express multipleOf"
    assert told == [f"A grammar (structured_outputs.json) goes to {grammar.origin}"]
    assert policy.check(THIRDS, Choice()) == "llguidance"
    assert (takes(grammar, "12"), takes(grammar, "13")) == (True, False)


def test_an_expression_that_xgrammar_reads_in_too_many_ways_goes_to_an_engine_that_reads_it_in_one():
    key = GrammarKey("regex", "((a+)+)+b")
    assert policy.check(key, Choice()) == "llguidance"
    with pytest.raises(GrammarError, match="too ambiguous"):
        policy.check(key, Choice("xgrammar"))


def test_an_expression_that_llguidance_would_give_up_on_the_way_is_refused_at_once():
    with pytest.raises(GrammarError, match="llguidance gives it up: "):
        policy.check(GrammarKey("regex", "([a-z]{1,129}){1,129}"), Choice("llguidance"))


def test_what_no_engine_expresses_is_refused_with_what_it_was(engine):
    for refuse in (engine().compile, lambda key: policy.check(key, Choice())):
        with pytest.raises(
            GrammarError,
            match=r"^structured_outputs\.json: xgrammar can not express uniqueItems; llguidance: Unimplemented keys: .*uniqueItems",
        ):
            refuse(UNIQUE)


def test_relaxed_it_is_served_without_and_what_was_dropped_is_told(engine, told):
    grammar = engine(relax=True).compile(UNIQUE)
    assert grammar.origin.startswith("xgrammar, relaxed, without uniqueItems, since ")
    assert told == [f"A grammar (structured_outputs.json) goes to {grammar.origin}"]
    assert takes(grammar, "[1, 1]")
    assert policy.check(UNIQUE, Choice(relax=True)) == "xgrammar, relaxed"


@pytest.mark.parametrize("name", [name for name in INSTALLED if name != "xgrammar"])
def test_a_pinned_engine_that_is_relaxed_names_what_it_dropped(engine, name):
    source = {"type": "object", "properties": {"a": {"type": "string", "format": "iban"}}, "required": ["a"]}
    grammar = engine(name, relax=True).compile(GrammarKey("json", json.dumps(source)))
    assert grammar.origin.startswith(f"{name}, relaxed, without ")
    assert "iban" in grammar.origin.partition(", since ")[0]
    assert takes(grammar, '{"a": "x"}')


def test_relaxing_changes_nothing_of_what_some_engine_expresses(engine):
    assert engine(relax=True).compile(THIRDS).origin.startswith("llguidance, since ")


def test_a_mistake_is_no_matter_of_engines_and_is_told_in_xgrammars_words_first():
    with pytest.raises(GrammarError) as alone:
        policy.check(GrammarKey("regex", "a("), Choice("xgrammar"))
    with pytest.raises(GrammarError) as all_of_them:
        policy.check(GrammarKey("regex", "a("), Choice())
    assert all_of_them.value.reason.startswith(alone.value.reason)


def test_a_bound_that_no_engine_may_exceed_is_told_once():
    with pytest.raises(GrammarError, match=r"^structured_outputs\.regex: must not hold a NUL character \(got"):
        policy.check(GrammarKey("regex", "a\0"), Choice())


@pytest.mark.parametrize("name", [name for name in INSTALLED if name != "xgrammar"])
def test_an_operator_pins_an_engine_and_tags_stay_with_xgrammar(engine, told, name):
    pinned = engine(name)
    assert pinned.compile(GrammarKey("regex", "a+")).origin == name
    assert pinned.compile(GrammarKey("structural_tag", TAG)).origin == "xgrammar"
    assert policy.check(GrammarKey("regex", "a+"), Choice(name)) == name
    with pytest.raises(GrammarError, match="EBNF"):
        pinned.compile(GrammarKey("grammar", 'root ::= "a"'))
    assert told == []


def test_an_engine_that_is_not_installed_can_not_be_pinned(monkeypatch, engine):
    monkeypatch.setattr(policy, "_installed", lambda: ("xgrammar",))
    with pytest.raises(SettingsError, match=r"pip install 'vllm-lazy-grammar\[glrmask\]'"):
        engine("glrmask")
    assert engine().compile(GrammarKey("regex", "a")).origin == "xgrammar"


def test_where_undeclared_properties_are_allowed_llguidance_comes_first_and_xgrammar_takes_what_it_can_not(engine):
    allowed = GrammarKey("json", json.dumps(POINT), undeclared=True)
    grammar = engine().compile(allowed)
    assert grammar.origin == "llguidance"
    assert takes(grammar, '{"x": 1, "y": 2}')
    one_of = {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}
    assert (
        engine()
        .compile(GrammarKey("json", json.dumps(one_of), undeclared=True))
        .origin.startswith("xgrammar, since llguidance: ")
    )


def test_an_engine_without_states_of_its_own_shows_xgrammars_so_that_endings_can_be_planned(engine):
    assert engine().compile(THIRDS).network() is not None
    assert engine("llguidance").compile(GrammarKey("regex", "a")).network() is None


@pytest.mark.parametrize("name", INSTALLED)
def test_whether_a_grammar_can_take_a_triggers_text_is_asked_of_its_engine(name):
    key, choice = GrammarKey("json", json.dumps(POINT)), Choice(name)
    assert policy.can_take(key, b'{"x', choice, budget_ms=20) is True
    assert policy.can_take(key, b"<t>", choice, budget_ms=20) is False


def test_the_row_of_a_grammar_is_its_engines(engine):
    row = np.zeros(BYTES.row_words, np.int32)
    engine().compile(THIRDS).matcher().fill(row)
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    assert set(b"0123456789") <= set(allowed.tolist()) <= set(b"-0123456789")
