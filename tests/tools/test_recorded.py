"""Recorded outputs of real models and engines: every call fires its family's trigger, and is taken unless docs/families.md says why not."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jsonschema
import pytest

from tests.tools import recorded, stock, walking
from tests.tools.cases import ANY, choice_for, servable, tokens_of, vocabulary_of, with_types
from tests.tools.test_round_trips import tokenizer_of
from vllm_lazy_grammar.tools.choice import CallSettings
from vllm_lazy_grammar.tools.presets import catalogue

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "families.md"
ROW = re.compile(r"^\| `([\w-]+/[\w.-]+)` \| (\S[^|]*) \|$", re.MULTILINE)
CONTEXT = {"harmony": b"<|start|>assistant"}
MOST_EXCEPTIONS = 60

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(recorded.folder() is None, reason="the package canitoolcall is not installed"),
]


def with_calls():
    """Complete outputs in which somebody expects calls."""
    if recorded.folder() is None:
        return []
    return [f for f in recorded.fixtures() if recorded.calls_of(f) and "truncated" not in f["tags"]]


def obeys(fixture):
    schemas = {t["function"]["name"]: t["function"].get("parameters") or {} for t in fixture["tools"]}
    return all(
        name in schemas and jsonschema.Draft202012Validator(schemas[name]).is_valid(a)
        for name, a in recorded.calls_of(fixture)
    )


def followed(fixture, settings):
    """The walk of an output, with the end marker that recordings leave out where it is a stop token."""
    return _followed(fixture["id"], settings)


@functools.cache
def _followed(name, settings):
    fixture = next(f for f in recorded.fixtures() if f["id"] == name)
    family, text = recorded.family_of(fixture), recorded.answer_of(fixture)
    tools, vocabulary = servable(family, fixture["tools"]), vocabulary_of(family)
    choice = choice_for(family, tools, settings=settings)
    ending = catalogue().families[family].block.close[0] if family == "harmony" else ""
    return walking.follow(choice, vocabulary, tokens_of(vocabulary, text + ending), CONTEXT.get(family, b""))


def is_taken(walk):
    return walk.refused is None and (walk.complete or not walk.inside)


def exceptions():
    return dict(ROW.findall(DOCUMENT.read_text("utf-8")))


def unservable(fixture):
    called = {name for name, _ in recorded.calls_of(fixture)}
    kept = servable(recorded.family_of(fixture), fixture["tools"])
    return called - {tool["function"]["name"] for tool in kept}


def test_several_hundred_outputs_of_nine_families_hold_calls():
    assert len(with_calls()) > 300
    assert len({fixture["family"] for fixture in with_calls()}) == 9


def test_the_gate_fires_at_or_before_the_opening_of_every_recorded_call():
    for fixture in with_calls():
        if unservable(fixture):
            continue
        opening = recorded.opening_of(recorded.family_of(fixture), recorded.answer_of(fixture))
        walk = followed(fixture, CallSettings())
        assert walk.starts, fixture["id"]
        assert opening is not None, fixture["id"]
        assert walk.starts[0] <= opening, fixture["id"]


def test_every_recorded_call_that_obeys_its_schema_is_taken_or_explained():
    explained = exceptions()
    refused = {
        f["id"] for f in with_calls() if obeys(f) and (unservable(f) or not is_taken(followed(f, CallSettings())))
    }
    assert refused - set(explained) == set()
    assert set(explained) - refused == set(), "explained, yet taken"
    assert len(explained) < MOST_EXCEPTIONS


def test_a_call_that_is_refused_for_its_blanks_alone_is_taken_where_any_are_allowed():
    spelled = [f for f in with_calls() if "JSON spelled" in exceptions().get(f["id"], "")]
    assert len(spelled) > 3
    for fixture in spelled:
        assert is_taken(followed(fixture, ANY)), fixture["id"]


@pytest.mark.vllm
def test_the_gate_fires_in_every_output_in_which_the_stock_parser_finds_a_call():
    found = 0
    for fixture in recorded.fixtures():
        family, text = recorded.family_of(fixture), recorded.answer_of(fixture)
        parser = catalogue().families[family].parsers[0]
        tokenizer = tokenizer_of(family)
        if tokenizer is None or unservable(fixture) or "truncated" in fixture["tags"]:
            continue
        tools = servable(family, fixture["tools"])
        if not tools or not stock.whole(parser, tokenizer, with_types(tools), text)[1]:
            continue
        found += 1
        assert followed(fixture, CallSettings()).starts, fixture["id"]
    assert found > 200
