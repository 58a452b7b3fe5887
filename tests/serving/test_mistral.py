"""Grammars on a Mistral model with a tekken tokenizer: dummy weights, so an answer is noise wherever it is free."""

from __future__ import annotations

import re

import pytest

from tests.serving.asking import PERSON, chat, complete, is_person
from tests.serving.servers import MISTRAL, lazy

pytestmark = pytest.mark.server(MISTRAL)


@pytest.mark.parametrize(
    ("structured", "allowed"),
    [
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "é" [a-c] "日本"'}, "é[a-c]日本"),
    ],
)
def test_an_eager_grammar_holds_with_tekken(server, structured, allowed):
    said = chat(server, "Hello", lazy(structured))
    assert re.fullmatch(allowed, said.text), said
    assert said.finish == "stop"


def test_a_json_schema_holds_with_tekken(server):
    schema = {**PERSON, "properties": {"name": {"enum": ["Bob", "Zoë"]}, "age": {"enum": [1, 2]}}}
    said = chat(server, "Hello", lazy({"json": schema}), max_tokens=128)
    assert is_person(said.text), said


def test_a_lazy_grammar_is_led_into_with_tekken(server):
    body = lazy({"grammar": 'root ::= "<é>" [0-9] [0-9]'}, "word:<é>", grammar_mandatory=1, grammar_force_after=4)
    for said in (chat(server, "Hello", body), complete(server, "Hello", body)):
        assert re.search(r"<é>[0-9]{2}\Z", said.text), said
        assert said.finish == "stop"
