"""Lazy requests on a running server: prose passes, a trigger fires, and from there on the grammar holds (`spec/triggers.md`).

What the model would write is given as wishes (`wishes.py`), so every answer here can be read off the test.
"""

from __future__ import annotations

import functools
import json
import time

import openai
import pytest

from tests.serving.asking import (
    ASK_PERSON,
    PERSON,
    Said,
    all_at_once,
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
from vllm_lazy_grammar import LazyGrammar

pytestmark = pytest.mark.server(WISHES)

STOP = 2
"""The demo model's `<|im_end|>`."""

REPO_NAME = 3
"""A special token, `<repo_name>`, that the client never sees."""

TAG = {"grammar": 'root ::= "<t>" [0-9] [0-9]'}
DIGITS = {"grammar": "root ::= [0-9] [0-9]"}
PROSE = "Well, let me think. "


def wish(text, *, stop=True):
    return tokens(text) + [STOP] * stop


# -- triggers --------------------------------------------------------------------------------------------------------


def test_a_word_fires_after_prose_and_the_rest_obeys_the_schema(server):
    body = lazy({"json": PERSON}, "word:<answer>", grammar_start="after")
    said = chat(server, ASK_PERSON, body, wishes=PROSE + "<answer>no JSON at all")
    prose, marker, rest = said.text.partition("<answer>")
    assert (prose, marker, said.finish) == (PROSE, "<answer>", "stop")
    assert is_person(rest), rest


def test_the_models_own_json_is_held_from_its_opening_brace(server):
    said = chat(server, ASK_PERSON, lazy({"json": PERSON}, "word:{"), wishes="Sure: {")
    assert said.text.startswith("Sure: {")
    assert is_person(said.text.removeprefix("Sure: ")), said


def test_the_same_grammar_without_a_trigger_dies_on_the_prose_that_the_lazy_one_lets_pass(server):
    lazily = chat(server, body=lazy(TAG, "word:<t>"), wishes=wish(PROSE + "<t>ab"))
    eagerly = chat(server, body=lazy(TAG), wishes=wish(PROSE + "<t>ab"))
    assert lazily.text[: len(PROSE)] == PROSE
    assert eagerly.text[:3] == "<t>"
    for text in (lazily.text.removeprefix(PROSE), eagerly.text):
        assert len(text) == 5
        assert text[3:].isdigit()


def test_a_trigger_that_never_fires_leaves_the_answer_as_it_is_without_a_grammar(server):
    question = "What is the capital of France?"
    plain = chat(server, question, max_tokens=32)
    assert chat(server, question, lazy({"json": PERSON}, "word:{"), max_tokens=32) == plain
    assert plain.text


def test_a_pattern_fires_and_the_replay_begins_at_its_group(server):
    body = lazy(TAG, r"pattern:\s(<t>)")
    said = chat(server, body=body, wishes=wish("a<t>b <t>cd"))
    assert said.text[:8] == "a<t>b <t"
    assert said.text[9:].isdigit()
    assert len(said.text) == 11


def test_a_full_pattern_is_held_against_the_whole_answer(server):
    body = lazy(TAG, "pattern_full:(?:ok )(<t>)")
    assert chat(server, body=body, wishes=wish("so ok <t>ab")) == Said("so ok <t>ab", "stop")
    assert chat(server, body=body, wishes=wish("ok <t>ab")).text[6:].isdigit()


@pytest.mark.parametrize("trigger", ["token:3", "token:<repo_name>"])
def test_a_token_trigger_is_that_id_and_never_its_spelling(server, trigger):
    body = lazy(DIGITS, trigger, grammar_start="after")
    fired = chat(server, body=body, wishes=[*tokens("x "), REPO_NAME, *tokens("ab")])
    assert fired.text[:2] == "x "
    assert fired.text[2:].strip().isdigit()
    spelt = [*tokens("<"), *tokens("repo_name>ab"), STOP]
    assert REPO_NAME not in spelt
    assert chat(server, body=body, wishes=spelt) == Said("<repo_name>ab", "stop")


def test_a_trigger_split_over_tokens_that_overlap_it_fires(server):
    token = tokens(" <")
    assert len(token) == 1
    said = chat(server, body=lazy(TAG, "word:<t>"), wishes=[*tokens("a"), *token, *tokens("t"), *tokens(">1"), STOP])
    assert said.text[:6] == "a <t>1"
    assert said.text[6:].isdigit()
    assert len(said.text) == 7


@pytest.mark.parametrize(
    "trigger",
    [
        '{"type": "word", "value": "<t>"}',
        '{"type": 1, "value": "<t>"}',
    ],
)
def test_llama_cpps_trigger_objects_are_taken_as_json_text(server, trigger):
    said = chat(server, body=lazy(TAG, trigger), wishes=wish("so <t>ab"))
    assert said.text[:6] == "so <t>"
    assert said.text[6:].isdigit()


def test_a_list_of_them_is_taken_as_one_json_text(server):
    listed = json.dumps([{"type": "word", "value": "<t>"}, {"type": "pattern", "value": "<never>"}])
    said = chat(server, body=lazy(TAG, grammar_triggers=listed), wishes=wish("so <t>ab"))
    assert said.text[:6] == "so <t>"
    assert said.text[6:].isdigit()


# -- options ---------------------------------------------------------------------------------------------------------


def test_start_after_begins_the_grammar_behind_the_whole_match(server):
    said = chat(server, body=lazy(DIGITS, "word:<t>", grammar_start="after"), wishes=wish("so <t>ab"))
    assert said.text[:6] == "so <t>"
    assert said.text[6:].isdigit()


def test_t5_a_grammar_begins_behind_a_think_marker(server):
    said = chat(server, body=lazy(DIGITS, "word:</think>", grammar_start="after"), wishes="hm hm</think>ab")
    assert said.text.startswith("hm hm</think>")
    assert said.text.removeprefix("hm hm</think>").isdigit()


def test_a_mandatory_turn_does_not_end_before_the_trigger(server):
    ends = chat(server, body=lazy(TAG, "word:<t>"), wishes=[STOP], max_tokens=8)
    assert ends == Said("", "stop")
    stays = chat(server, body=lazy(TAG, "word:<t>", grammar_mandatory=1), wishes=[STOP] * 12, max_tokens=12)
    _, marker, rest = stays.text.partition("<t>")
    assert (marker, stays.finish) == ("<t>", "stop")
    assert rest.isdigit()


def test_a_mandatory_turn_whose_trigger_can_not_be_forced_ends_with_length(server):
    body = lazy(TAG, "pattern:<t>+", grammar_mandatory=1)
    said = chat(server, body=body, wishes=[STOP] * 12, max_tokens=12)
    assert said.finish == "length"
    assert "<t>" not in said.text
    assert chat(server, body=lazy(TAG, "pattern:<t>+"), wishes=[STOP] * 12, max_tokens=12) == Said("", "stop")


def test_force_after_leads_into_the_trigger(server):
    body = lazy(TAG, "word:<t>", grammar_mandatory=1, grammar_force_after=5)
    wishes = tokens("one two three four five six seven eight nine ten")
    assert len(wishes) == 10
    said = chat(server, body=body, wishes=wishes)
    free, marker, rest = said.text.partition("<t>")
    assert (free, marker, said.finish) == ("one two three four five", "<t>", "stop")
    assert rest.isdigit()


def test_force_after_goes_on_from_what_is_already_written(server):
    body = lazy(TAG, "word:<t>", grammar_mandatory=1, grammar_force_after=3)
    said = chat(server, body=body, wishes=[*tokens("a"), *tokens("<"), *tokens("t"), *tokens(" rest")])
    assert said.text[:4] == "a<t>"
    assert said.text[4:].isdigit()


def test_t7_rearm_holds_both_calls_and_leaves_the_prose_between_them_free(server):
    text = "one <t>12 two <t>34 three"
    body = lazy(TAG, "word:<t>", grammar_rearm=1)
    assert chat(server, body=body, wishes=wish(text)) == Said(text, "stop")
    no_digits = [*tokens("one <t>"), *spell("ab"), *tokens(" two <t>"), *spell("cd"), *wish(" three")]
    held = chat(server, body=body, wishes=no_digits).text
    first, second = held.split(" two ")
    assert first[:7] == "one <t>"
    assert first[7:].isdigit()
    assert second[:3] == "<t>"
    assert second[3:5].isdigit()
    assert second[5:] == " three"


def test_r1_where_the_grammar_may_end_the_next_token_belongs_to_it_if_it_takes_it(server):
    body = lazy({"grammar": 'root ::= "<t>" [0-9]+'}, "word:<t>", grammar_rearm=1)
    assert chat(server, body=body, wishes=wish("<t>12x<t>3y")) == Said("<t>12x<t>3y", "stop")


def test_max_activations_leaves_only_the_end_after_the_last(server):
    body = lazy(TAG, "word:<t>", grammar_rearm=1, grammar_max_activations=1)
    assert chat(server, body=body, wishes=wish("one <t>12 two")) == Said("one <t>12", "stop")


def test_without_rearm_the_turn_ends_with_the_grammar(server):
    assert chat(server, body=lazy(TAG, "word:<t>"), wishes=wish("one <t>12 two")) == Said("one <t>12", "stop")


def test_t1_forbid_masks_a_token_whose_tail_the_grammar_refuses(server):
    (empty_object,) = tokens("{}")
    said = chat(server, body=lazy({"json": PERSON}, "word:{"), wishes=[empty_object, *tokens("{")], max_tokens=48)
    assert not said.text.startswith("{}")
    assert "{}" not in said.text


def test_t1_disarm_takes_it_for_prose_and_goes_on_waiting(server):
    body = lazy({"json": PERSON}, "word:{", grammar_on_reject="disarm")
    said = chat(server, ASK_PERSON, body, wishes="so {} and {")
    assert said.text.startswith("so {} and {")
    assert is_person(said.text.removeprefix("so {} and ")), said


def test_t1_error_ends_that_request_alone(server):
    body = lazy({"json": PERSON}, "word:{", grammar_on_reject="error")
    (empty_object,) = tokens("{}")
    failing = functools.partial(chat, server, ASK_PERSON, body, wishes=[*tokens("so "), empty_object])
    others = [functools.partial(chat, server, body=lazy(TAG, "word:<t>"), wishes=wish("so <t>12")) for _ in range(3)]
    failed, *rest = all_at_once([failing, *others])
    assert isinstance(failed, openai.BadRequestError)
    assert "vllm_xargs.grammar_on_reject" in str(failed)
    assert rest == [Said("so <t>12", "stop")] * 3
    assert "grammar_on_reject=error: the grammar refuses b'{}'" in server.log()


# -- ways of asking --------------------------------------------------------------------------------------------------


def test_each_of_n_choices_has_its_own_gate(server):
    body = lazy(TAG, "word:<t>")
    answers = chats(server, "Tell a story.", body, wishes=wish("so <t>ab"), n=4, temperature=0.8)
    assert len(answers) == 4
    for said in answers:
        assert said.text[:6] == "so <t>"
        assert said.text[6:].isdigit()
        assert len(said.text) == 8
        assert said.finish == "stop"


@pytest.mark.parametrize(
    ("body", "wishes"),
    [
        (lazy(TAG, "word:<t>"), wish("so <t>ab")),
        (lazy({"json": PERSON}, "word:{"), tokens("Sure: {")),
        (lazy({"json": PERSON}), None),
        (lazy(TAG, "word:<t>", grammar_rearm=1), wish("one <t>ab two <t>cd three")),
    ],
    ids=["word", "json", "eager", "rearm"],
)
def test_a_streamed_answer_is_the_same(server, body, wishes):
    assert streamed(server, ASK_PERSON, body, wishes) == chat(server, ASK_PERSON, body, wishes)


def test_completions_and_responses_take_lazy_grammars_too(server):
    body = lazy(DIGITS, "word:<t>", grammar_start="after")
    for text in (
        complete(server, "Once", body, wishes=wish("so <t>ab")).text,
        respond(server, "Say hi.", body, wishes=wish("so <t>ab")),
    ):
        assert text[:6] == "so <t>"
        assert text[6:].isdigit()


def test_the_typed_class_sends_what_a_client_writes_by_hand(server):
    grammar = LazyGrammar(json=PERSON, triggers=["word:<answer>"], start="after", rearm=True, max_activations=1)
    assert grammar.extra_body() == lazy(
        {"json": PERSON}, "word:<answer>", grammar_start="after", grammar_rearm=1, grammar_max_activations=1
    )
    said = chat(server, ASK_PERSON, grammar.extra_body(), wishes="so <answer>no")
    assert is_person(said.text.removeprefix("so <answer>")), said


def test_thirty_two_at_once_mixed_with_plain_and_eager_requests(server):
    plain = functools.partial(chat, server, "What is the capital of France?", max_tokens=24)
    eager = functools.partial(chat, server, ASK_PERSON, lazy({"json": PERSON}))
    lazily = functools.partial(chat, server, ASK_PERSON, lazy({"json": PERSON}, "word:{"), wishes="Sure: {")
    never = functools.partial(chat, server, "What is the capital of France?", lazy(TAG, "word:<t>"), max_tokens=24)
    alone = [job() for job in (plain, eager, lazily, never)]
    assert all_at_once([plain, eager, lazily, never] * 8) == alone * 8
    assert is_person(alone[1].text)
    assert is_person(alone[2].text.removeprefix("Sure: "))


# -- what is logged --------------------------------------------------------------------------------------------------


def line_about(server, body, wishes):
    """Our debug line about a request; another request follows, so that one whose client left is let go of by vLLM too."""
    create = server.client.chat.completions.create
    answer = create(**chat_args("Say hi.", body, wish(wishes), {"max_tokens": 12}))
    chat(server, max_tokens=1)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for line in server.log().splitlines():
            if f"Request {answer.id}" in line and " finished: " in line:
                return line.partition(" finished: ")[2]
        time.sleep(0.1)
    return None


@pytest.mark.parametrize(
    ("trigger", "wishes", "story"),
    [
        ("word:<t>", "so <t>12", "fired at token 3 by word:<t>; compile "),
        ("word:<never>", "so", "never fired; compile "),
    ],
)
def test_one_debug_line_per_request_says_what_the_gate_did_and_how_long_its_compile_took(
    server, trigger, wishes, story
):
    line = line_about(server, lazy({"grammar": 'root ::= ("<t>" | "<never>") [0-9] [0-9]'}, trigger), wishes)
    assert line.startswith(story)
    assert line.endswith(" ms by xgrammar, nobody waited for it")


def test_the_debug_line_of_a_disarmed_request_names_the_trigger(server):
    body = lazy({"grammar": 'root ::= "{" [0-9]'}, "word:{", grammar_on_reject="disarm")
    line = line_about(server, body, "so {}")
    assert line.startswith("disarmed at token 1: the grammar refuses what follows word:{; compile ")


def test_json_that_is_wished_for_whole_is_left_as_it_is(server):
    person = json.dumps({"name": "Bob", "age": 3})
    said = chat(server, ASK_PERSON, lazy({"json": PERSON}, "word:{"), wishes=wish("Here: " + person))
    assert said == Said("Here: " + person, "stop")
