"""A lazy grammar as a Python user writes it."""

from __future__ import annotations

import json

import pytest

from vllm_lazy_grammar import LazyGrammar, RequestError, Trigger, TriggerSpec

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_a_grammar_with_a_trigger_is_what_a_client_would_write_by_hand():
    grammar = LazyGrammar(json=SCHEMA, triggers=["word:<answer>"])
    assert grammar.extra_body() == {
        "structured_outputs": {"json": SCHEMA},
        "vllm_xargs": {"grammar_triggers": ["word:<answer>"]},
    }


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"json": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "[0-9]+"}, {"regex": "[0-9]+"}),
        ({"choice": ("yes", "no")}, {"choice": ["yes", "no"]}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"structural_tag": '{"type": "x"}'}, {"structural_tag": '{"type": "x"}'}),
    ],
)
def test_each_kind_of_grammar_is_sent_as_vllm_takes_it(given, sent):
    assert LazyGrammar(triggers=["word:x"], **given).structured_outputs() == sent


def test_a_structural_tag_given_as_a_dict_is_sent_as_text():
    sent = LazyGrammar(structural_tag={"type": "structural_tag"}, triggers=["word:x"]).structured_outputs()
    assert json.loads(sent["structural_tag"]) == {"type": "structural_tag"}


def test_options_are_sent_where_they_are_not_at_their_default_and_booleans_as_numbers():
    grammar = LazyGrammar(
        regex="a+",
        triggers=["word:a"],
        start="after",
        mandatory=True,
        force_after=8,
        rearm=True,
        max_activations=2,
        on_reject="disarm",
    )
    assert grammar.extra_args() == {
        "grammar_triggers": ["word:a"],
        "grammar_start": "after",
        "grammar_mandatory": 1,
        "grammar_force_after": 8,
        "grammar_rearm": 1,
        "grammar_max_activations": 2,
        "grammar_on_reject": "disarm",
    }
    assert LazyGrammar(regex="a+", triggers=["word:a"], on_reject="forbid").extra_args() == {
        "grammar_triggers": ["word:a"]
    }


def test_what_is_sent_is_json():
    body = LazyGrammar(json=SCHEMA, triggers=["word:a"], mandatory=True).extra_body()
    assert json.loads(json.dumps(body)) == body


def test_what_is_sent_parses_to_what_was_asked():
    grammar = LazyGrammar(regex="a+", triggers=[Trigger("word", "a"), "pattern:b"], mandatory=True, force_after=0)
    spec = TriggerSpec.parse(grammar.extra_args())
    assert spec == TriggerSpec((Trigger("word", "a"), Trigger("pattern", "b")), mandatory=True, force_after=0)


@pytest.mark.parametrize("given", [{}, {"regex": "a", "json": SCHEMA}, {"json_object": False}])
def test_exactly_one_kind_of_grammar_is_needed(given):
    with pytest.raises(RequestError, match="exactly one of json, json_object"):
        LazyGrammar(triggers=["word:a"], **given)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"triggers": []}, "grammar_triggers"),
        ({"triggers": "word:a"}, "grammar_triggers"),
        ({"triggers": ["wort:a"]}, "grammar_triggers[0]"),
        ({"triggers": ["word:"]}, "grammar_triggers[0]"),
        ({"triggers": ["word:a"], "start": "before"}, "grammar_start"),
        ({"triggers": ["word:a"], "force_after": 3}, "grammar_force_after"),
        ({"triggers": ["word:a"], "max_activations": 3}, "grammar_max_activations"),
        ({"triggers": ["word:a"], "on_reject": "shout"}, "grammar_on_reject"),
    ],
)
def test_what_the_server_would_refuse_is_refused_here_with_the_same_field(options, field):
    with pytest.raises(RequestError) as caught:
        LazyGrammar(regex="a+", **options)
    assert caught.value.field == f"vllm_xargs.{field}"
