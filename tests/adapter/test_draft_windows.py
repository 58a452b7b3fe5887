"""Draft windows through vLLM's own manager: what it validates, fills and takes back, as its scheduler asks for it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.adapter.test_manager import LAZILY, SCHEMA, Engine
from tests.serving.models import thinking_model

pytestmark = pytest.mark.vllm

NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 3}
CALL = 'root ::= "<tool_call>{" [0-9]+ "}</tool_call>"'


@pytest.fixture(scope="module")
def engine():
    made = Engine(speculative_config=NGRAM)
    yield made
    made.manager.clear_backend()


@pytest.fixture(scope="module")
def thinking():
    folder = Path(tempfile.gettempdir()) / "lazy-grammar-tests-windows"
    made = Engine(
        model=thinking_model(folder), structured={"reasoning_parser": "deepseek_r1"}, speculative_config=NGRAM
    )
    yield made
    made.manager.clear_backend()


@pytest.fixture
def errors(monkeypatch):
    import logging

    lines = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def window(engine, request, drafts):
    """The rows of one step with these drafts."""
    name = request.request_id
    return np.array(engine.manager.grammar_bitmask(engine.requests, [name], {name: drafts}))


def allows(row, token):
    return bool(row[token // 32] >> (token % 32) & 1)


def test_s1_a_fence_in_the_drafts_of_json_is_trimmed_without_an_error(engine, errors):
    request = engine.request(json_object=True)
    engine.ready(request)
    assert engine.manager.validate_tokens(request, engine.ids("```json\n{")) == []
    assert engine.accept(request, "{")
    assert errors == []


def test_s2_what_follows_the_marker_in_the_same_window_is_constrained(thinking, errors):
    request = thinking.request({"grammar_triggers": ["word:<tool_call>"]}, grammar=CALL)
    thinking.ready(request).session._compile.join_rows()
    token = thinking.tokenizer.convert_tokens_to_ids
    assert thinking.accept(request, "Hm.")
    newline, digit = thinking.ids("\n"), thinking.ids("7")
    drafts = [*newline, token("</think>"), *newline, token("<tool_call>"), *thinking.ids("{"), *digit]
    assert thinking.manager.validate_tokens(request, drafts) == drafts
    assert thinking.manager.validate_tokens(request, [*drafts[:-1], *thinking.ids("a")]) == drafts[:-1]
    rows = window(thinking, request, drafts)
    behind = len(newline) * 2 + 2
    assert (rows[:behind] == -1).all()
    assert allows(rows[behind], thinking.ids("{")[0])
    assert not allows(rows[behind], digit[0])
    assert allows(rows[behind + 1], digit[0])
    assert not allows(rows[behind + 1], thinking.ids("a")[0])
    assert request.structured_output_request.grammar.session.num_offered == 0
    assert errors == []


def test_s4_rows_match_what_was_scheduled_where_less_was_than_was_validated(engine, errors):
    request = engine.request(json=SCHEMA)
    engine.ready(request)
    drafts = engine.ids('{"a": 1}')
    assert engine.manager.validate_tokens(request, drafts) == drafts
    full = window(engine, request, drafts)
    few = window(engine, request, [*drafts[:2], -1, -1])
    np.testing.assert_array_equal(few[:3], full[:3])
    assert (few[3:] == -1).all()
    assert errors == []


def test_s5_a_turn_that_ends_inside_the_window_is_taken_back(engine, errors):
    request = engine.request(json=SCHEMA)
    engine.ready(request)
    assert engine.accept(request, '{"a": 1}')
    before = engine.rows(request)
    end = engine.tokenizer.eos_token_id
    assert engine.manager.validate_tokens(request, [end, end]) == [end]
    rows = window(engine, request, [end])
    np.testing.assert_array_equal(rows[:1], before)
    assert (rows[1] == -1).all()
    np.testing.assert_array_equal(engine.rows(request), before)
    assert errors == []


def test_a_fault_that_a_draft_led_to_is_forgotten_with_the_draft(engine, errors, monkeypatch):
    request = engine.request(json=SCHEMA)
    session = engine.ready(request).session
    fill = session.fill

    def fail(row):
        if session.num_offered == 1:
            raise RuntimeError("broken behind a draft")
        return fill(row)

    monkeypatch.setattr(session, "fill", fail)
    rows = window(engine, request, engine.ids("{"))
    assert (rows[0] != -1).any()
    assert (rows[1] == -1).all()
    np.testing.assert_array_equal(engine.rows(request), rows[:1])
    assert errors == []


def test_a_lazy_request_fires_inside_the_window_and_is_free_again_after_it(engine, errors):
    request = engine.request(LAZILY, json=SCHEMA)
    engine.ready(request).session._compile.join_rows()
    drafts = engine.ids('So <x>{"a"')
    assert engine.manager.validate_tokens(request, drafts) == drafts
    rows = window(engine, request, drafts)
    assert (rows[0] == -1).all()
    assert (rows[-1] != -1).any()
    assert (engine.rows(request) == -1).all()
    assert errors == []
