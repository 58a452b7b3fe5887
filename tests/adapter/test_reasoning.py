"""Which triggers could never be seen beside a reasoning parser; the parser here is a class of two texts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.quiet import import_quietly, import_vllm
from vllm_lazy_grammar.core.triggers import Triggers, TriggerSpec
from vllm_lazy_grammar.errors import RequestError
from vllm_lazy_grammar.testing import small_vocabulary

pytestmark = pytest.mark.vllm

ONE_TOKEN, MANY = "<call>", "done:"
"""The small vocabulary has the first as one token, the second not."""


@pytest.fixture
def reasoning():
    import_vllm()
    return import_quietly("vllm_lazy_grammar.adapter.reasoning")


def judged(reasoning, trigger, marker):
    vocabulary = small_vocabulary()
    triggers = Triggers.compile(TriggerSpec.parse({"grammar_triggers": [trigger]}), vocabulary, stop_ids=())
    reasoning.refuse_unseen(triggers, marker, vocabulary)


@pytest.mark.parametrize(
    ("trigger", "marker"),
    [("word:so <call>", ONE_TOKEN), ("word:\n<call>{", ONE_TOKEN), ("word:done:", MANY), ("word:done: {", MANY)],
)
def test_a_trigger_on_the_reasonings_end_marker_that_could_never_be_seen_is_refused(reasoning, trigger, marker):
    with pytest.raises(RequestError, match="could never be seen") as caught:
        judged(reasoning, trigger, marker)
    assert caught.value.field == "vllm_xargs.grammar_triggers[0]"
    assert caught.value.value == trigger


@pytest.mark.parametrize(
    ("trigger", "marker"),
    [
        ("word:<call>", ONE_TOKEN),
        ("word:<call>{", ONE_TOKEN),
        ("token:<call>", ONE_TOKEN),
        ("word:done", MANY),
        ("word:{", ONE_TOKEN),
        ("word:so <call>", ""),
    ],
)
def test_a_trigger_that_can_be_seen_is_not(reasoning, trigger, marker):
    judged(reasoning, trigger, marker)


def test_where_the_grammar_holds_in_the_reasoning_too_everything_is_seen(reasoning, monkeypatch):
    parser = SimpleNamespace(reasoning_end_str=ONE_TOKEN)
    monkeypatch.setattr(reasoning.ReasoningParserManager, "get_reasoning_parser", lambda _: lambda _: parser)
    config = SimpleNamespace(reasoning_parser="two-texts", enable_in_reasoning=False)
    assert reasoning.end_marker(config, "tokenizer of this test") == ONE_TOKEN
    config.enable_in_reasoning = True
    assert reasoning.end_marker(config, "tokenizer of this test") == ""
    assert reasoning.end_marker(SimpleNamespace(reasoning_parser="", enable_in_reasoning=False), None) == ""
