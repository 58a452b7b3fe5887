"""Grammars on a Mistral model with a tekken tokenizer: dummy weights, so an answer is noise wherever it is free."""

from __future__ import annotations

import re

import pytest

from tests.oracles.vocabularies import tekken
from tests.serving.asking import PERSON, chat, chat_args, complete, is_person
from tests.serving.calling import call, is_valid, named, streamed_call
from tests.serving.servers import MISTRAL, lazy

pytestmark = pytest.mark.server(MISTRAL)


@pytest.mark.parametrize(
    ("structured", "allowed"),
    [
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
    ],
)
def test_an_eager_grammar_holds_with_tekken(server, structured, allowed):
    said = chat(server, "Hello", lazy(structured))
    assert re.fullmatch(allowed, said.text), said
    assert said.finish == "stop"


def test_an_eager_grammar_holds_where_tokens_are_halves_of_characters(server):
    """Told by the ids: vLLM's own text of a tekken answer has a replacement character for each half."""
    body = {**lazy({"grammar": 'root ::= "é" [a-c] "日本"'}), "return_token_ids": True}
    (choice,) = server.client.chat.completions.create(**chat_args("Hello", body, None, {})).choices
    assert re.fullmatch("é[a-c]日本", b"".join(map(tekken().piece, choice.token_ids)).decode())
    assert choice.finish_reason == "stop"


def test_a_json_schema_holds_with_tekken(server):
    schema = {**PERSON, "properties": {"name": {"enum": ["Bob", "Zoë"]}, "age": {"enum": [1, 2]}}}
    said = chat(server, "Hello", lazy({"json": schema}), max_tokens=128)
    assert is_person(said.text), said


def test_a_lazy_grammar_is_led_into_with_tekken(server):
    body = lazy({"grammar": 'root ::= "<é>" [0-9] [0-9]'}, "word:<é>", grammar_mandatory=1, grammar_force_after=4)
    for said in (chat(server, "Hello", body), complete(server, "Hello", body)):
        assert re.search(r"<é>[0-9]{2}\Z", said.text), said
        assert said.finish == "stop"


@pytest.mark.parametrize("choice", ["required", named("get_weather")])
@pytest.mark.parametrize("ask", [call, streamed_call])
def test_a_call_that_must_come_is_valid_with_tekken(server, choice, ask):
    answer = ask(server, choice)
    assert answer.calls, answer
    assert all(is_valid(each) for each in answer.calls), answer
