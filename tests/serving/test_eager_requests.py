"""Eager requests: all that vLLM's own xgrammar backend takes is held from the first token on, whatever the model wishes for."""

from __future__ import annotations

import json
import re

import openai
import pytest

from tests.serving.asking import (
    ASK_PERSON,
    PERSON,
    Said,
    chat,
    chat_args,
    chats,
    complete,
    is_person,
    respond,
    streamed,
)
from tests.serving.servers import WISHES, lazy
from tests.serving.wishes import spell, tokens

pytestmark = pytest.mark.server(WISHES)

STOP = 2
PROSE = "No, I would rather write prose."
ONE_KEY = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
QUOTE = tokens('"')[0]
NEWLINES = {str(tokens(blank)[0]): 100 for blank in ("\n", "\n\n")}

TAGS = {
    "new form": {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<f>"],
            "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": ONE_KEY}, "end": "</f>"}],
        },
    },
    "old form": {"structures": [{"begin": "<f>", "schema": ONE_KEY, "end": "</f>"}], "triggers": ["<f>"]},
}


@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON)], ids=["object", "string"])
def test_a_json_schema_holds_from_the_first_token(server, schema):
    said = chat(server, ASK_PERSON, lazy({"json": schema}), wishes=PROSE)
    assert is_person(said.text), said
    assert said.finish == "stop"


def test_json_object_holds_to_an_object(server):
    said = chat(server, ASK_PERSON, lazy({"json_object": True}), wishes=[*tokens('[1] {"a": 1}'), 2])
    assert isinstance(json.loads(said.text), dict)


def test_a_response_format_is_an_eager_grammar(server):
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    assert is_person(chat(server, ASK_PERSON, {"response_format": wanted}, wishes=PROSE).text)
    text = chat(server, ASK_PERSON, {"response_format": {"type": "json_object"}}, wishes=[*tokens('{"a": 1}'), 2]).text
    assert json.loads(text) == {"a": 1}


@pytest.mark.parametrize(
    ("structured", "allowed"),
    [
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "yes" | "no" [0-9]'}, "yes|no[0-9]"),
        ({"grammar": 'start: "yes" | "no" DIGIT\nDIGIT: /[0-9]/'}, "yes|no[0-9]"),
    ],
    ids=["regex", "choice", "ebnf", "lark"],
)
def test_regex_choice_ebnf_and_lark_hold(server, structured, allowed):
    for said in (
        chat(server, "yes or no?", lazy(structured), wishes=PROSE),
        chat(server, "yes or no?", lazy(structured)),
        complete(server, "yes or no?", lazy(structured), wishes=PROSE),
    ):
        assert re.fullmatch(allowed, said.text), said
        assert said.finish == "stop"
    assert re.fullmatch(allowed, respond(server, "yes or no?", lazy(structured), wishes=PROSE))


@pytest.mark.parametrize("tag", TAGS.values(), ids=TAGS.keys())
def test_a_structural_tag_leaves_prose_free_and_holds_inside_the_tag(server, tag):
    said = chat(
        server,
        body=lazy({"structural_tag": json.dumps(tag)}),
        wishes=[*tokens("so <f>"), *spell("no"), *tokens(" JSON")],
    )
    prose, begin, rest = said.text.partition("<f>")
    held, end, _ = rest.partition("</f>")
    assert (prose, begin, end) == ("so ", "<f>", "</f>")
    assert json.loads(held) == {"a": "x"}


def test_each_of_n_choices_and_a_streamed_answer_obey(server):
    for said in chats(server, ASK_PERSON, lazy({"json": PERSON}), n=4, temperature=0.8):
        assert is_person(said.text), said
    assert streamed(server, ASK_PERSON, lazy({"json": PERSON})) == chat(server, ASK_PERSON, lazy({"json": PERSON}))


# -- stop ids --------------------------------------------------------------------------------------------------------


def test_e3_a_stop_id_that_spells_a_quote_can_not_end_the_answer_inside_a_string(server):
    wishes = [*tokens('{"name": "Bo'), QUOTE, QUOTE]
    said = chat(server, ASK_PERSON, {**lazy({"json": PERSON}), "stop_token_ids": [QUOTE]}, wishes=wishes)
    assert is_person(said.text), said
    assert said.text.startswith('{"name": "Bo')


def test_a_requests_own_stop_id_ends_the_answer_where_the_grammar_may_end(server):
    (bang,) = tokens("!")
    body = {**lazy({"regex": "[0-9]+"}), "stop_token_ids": [bang]}
    said = chat(server, body=body, wishes=[bang, *spell("12"), bang])
    assert re.fullmatch("[0-9]12", said.text), said  # it may not end before the first digit
    assert said.finish == "stop"
    said = chat(server, body=lazy({"regex": "[0-9]+"}), wishes=[*spell("12"), bang, 2])
    assert re.fullmatch("12[0-9]", said.text), said  # nobody named it a stop id: it is masked
    assert said.finish == "stop"


@pytest.mark.parametrize("triggers", [(), ("word:<t>",)], ids=["eager", "lazy"])
def test_e4_a_stop_id_that_is_also_the_grammars_end_marker_is_accepted_as_the_marker_and_the_turn_ends(
    server, triggers
):
    body = {**lazy({"grammar": 'root ::= "<t>" [0-9] [0-9] "<|im_end|>"'}, *triggers), "return_token_ids": True}
    wishes = [*spell("<t>"), STOP, STOP, STOP, *tokens(" and more")]
    (choice,) = server.client.chat.completions.create(**chat_args("Go.", body, wishes, {})).choices
    assert re.fullmatch("<t>[0-9]{2}", choice.message.content), choice
    assert choice.finish_reason == "stop"
    assert choice.token_ids.count(STOP) == 1
    assert choice.token_ids[-1] == STOP


# -- blanks ----------------------------------------------------------------------------------------------------------


def longest_blank(text):
    return max(len(run) for run in re.findall(r"\s*", text))


@pytest.mark.parametrize("triggers", [(), ("word:{",)], ids=["eager", "lazy"])
def test_w1_a_model_that_wants_newlines_for_ever_gets_twenty(server, triggers):
    said = chat(
        server, body=lazy({"json": ONE_KEY}, *triggers), wishes=tokens("{"), logit_bias=NEWLINES, max_tokens=160
    )
    assert json.loads(said.text) == {"a": "x"}
    assert longest_blank(said.text) == 20
    assert said.finish == "stop"


def test_w1_blanks_in_a_structural_tag_are_bounded_too(server):
    said = chat(
        server,
        body=lazy({"structural_tag": json.dumps(TAGS["new form"])}),
        wishes=[*tokens("so <f>"), *[-1] * 90, 2],
        logit_bias=NEWLINES,
        max_tokens=96,
    )
    held, end, _ = said.text.removeprefix("so <f>").partition("</f>")
    assert end, said
    assert json.loads(held) == {"a": "x"}
    assert longest_blank(held) == 20


def test_pretty_printing_passes(server):
    person = json.dumps({"name": "Bob", "age": 3}, indent=4)
    assert chat(server, ASK_PERSON, lazy({"json": PERSON}), wishes=[*tokens(person), 2]) == Said(person, "stop")


THREE = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("first", "second", "third")},
    "required": ["first", "second", "third"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("budget", [30, 40, 80])
def test_e1_an_answer_is_led_to_its_end_within_max_tokens(server, budget):
    said = chat(
        server, "Tell me a story.", lazy({"json": THREE}), wishes='{"first": "' + "word " * 100, max_tokens=budget
    )
    assert json.loads(said.text).keys() == {"first", "second", "third"}, said
    assert said.finish == "stop"
    assert (
        streamed(
            server, "Tell me a story.", lazy({"json": THREE}), wishes='{"first": "' + "word " * 100, max_tokens=budget
        )
        == said
    )


def test_an_answer_for_which_the_budget_is_too_small_is_cut_and_the_log_says_so(server):
    before = server.log().count("the shortest text that its grammar allows needs")
    assert chat(server, "Tell me.", lazy({"json": THREE}), max_tokens=6).finish == "length"
    assert server.log().count("the shortest text that its grammar allows needs") == before + 1


def test_e2_min_tokens_gives_way_where_the_grammar_leaves_nothing_but_the_end(server):
    body = {**lazy({"regex": "a{1,4}"}), "min_tokens": 20}
    assert chat(server, "Go.", body, wishes=[*tokens("a"), 2], max_tokens=30) == Said("aaaa", "stop")


def test_leading_out_beats_min_tokens(server):
    body = {**lazy({"json": THREE}), "min_tokens": 40}
    said = chat(server, "Tell me a story.", body, wishes='{"first": "' + "word " * 100, max_tokens=40)
    assert json.loads(said.text).keys() == {"first", "second", "third"}, said
    assert said.finish == "stop"


def test_behind_an_accepted_stop_id_nothing_is_masked_under_ignore_eos(server):
    body = {**lazy({"regex": "[0-9]{3}"}), "ignore_eos": True}
    said = chat(server, body=body, wishes=[*tokens("no"), -1, -1, STOP, *tokens("free text")], max_tokens=8)
    assert re.match("[0-9]{3}", said.text), said
    assert said.text[3:].startswith("free text")
    assert said.finish == "length"


def test_bad_words_keep_their_meaning_beside_a_grammar(server):
    body = {**lazy({"regex": "[ab]"}), "bad_words": ["a"]}
    assert chat(server, body=body, wishes=[*tokens("a"), STOP]) == Said("b", "stop")
    with pytest.raises(openai.BadRequestError, match="bad_words") as caught:
        chat(server, body={**lazy({"regex": "a"}), "bad_words": ["a"]})
    assert caught.value.body["param"] == "bad_words"


def test_below_min_tokens_a_lazy_requests_prose_goes_on(server):
    body = {**lazy({"json": ONE_KEY}, "word:<f>", grammar_start="after"), "min_tokens": 12}
    answer = server.client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": "Hi."}],
        max_tokens=20,
        temperature=0,
        extra_body={**body, "vllm_xargs": {**body["vllm_xargs"], "wishes": [2] * 20}},
    )
    assert answer.usage.completion_tokens == 13


def test_what_xgrammar_can_not_express_another_engine_holds(server):
    schema = {"type": "integer", "multipleOf": 7, "minimum": 100, "maximum": 999}
    said = chat(server, "Say a number.", lazy({"json": schema}))
    assert int(said.text) % 7 == 0, said
    assert said.finish == "stop"
