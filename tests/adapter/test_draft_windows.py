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
    """The rows of one step with these drafts; vLLM 0.33 has more, for as many drafts as there could be."""
    name = request.request_id
    return np.array(engine.manager.grammar_bitmask(engine.requests, [name], {name: drafts}))[: len(drafts) + 1]


def window_by_vllm(engine, request, drafts):
    """The same rows, by vLLM's own loop."""
    engine.manager._is_plain = False
    try:
        return window(engine, request, drafts)
    finally:
        engine.manager._is_plain = True


def allows(row, token):
    return bool(row[token // 32] >> (token % 32) & 1)


def test_s1_a_fence_in_the_drafts_of_json_is_trimmed_without_an_error(engine, errors):
    request = engine.request(json_object=True)
    engine.ready(request)
    assert engine.manager.validate_tokens(request, engine.ids("```json\n{")) == engine.ids("{")  # the grammar's own
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
    assert engine.manager.validate_tokens(request, drafts) == [*drafts, engine.tokenizer.eos_token_id]
    full = window(engine, request, drafts)
    few = window(engine, request, [*drafts[:2], -1, -1])
    np.testing.assert_array_equal(few[:3], full[:3])
    assert (few[3:] == -1).all()
    assert errors == []


@pytest.mark.parametrize("limits", [{}, {"min_tokens": 4}, {"max_tokens": 9}])
@pytest.mark.parametrize("xargs", [None, LAZILY, {**LAZILY, "grammar_mandatory": True}])
@pytest.mark.parametrize("padding", [[], [-1], [-1, -1, -1]])
def test_rows_straight_from_the_sessions_equal_those_that_vllm_lays_out(engine, errors, xargs, padding, limits):
    request = engine.request(xargs, json=SCHEMA, **limits)
    session = engine.ready(request).session
    session._compile.join_rows()
    assert engine.manager._is_plain
    for text in ("" if xargs is None else 'So <x>{"a"', '{"a": 1}', '{"a":', '"a"', "{"):
        drafts = engine.manager.validate_tokens(request, engine.ids(text))[:8]
        offered = [*drafts[: 8 - len(padding)], *padding]
        fast = window(engine, request, offered)
        slow = window_by_vllm(engine, request, offered)
        np.testing.assert_array_equal(fast, slow)
        assert len(fast) == len(offered) + 1
        if drafts:
            request.append_output_token_ids(drafts[:1])
            assert engine.manager.accept_tokens(request, drafts[:1])
        if session.is_terminated():
            break
    assert errors == []


def test_a_draft_that_the_grammar_refuses_leaves_the_rows_behind_it_as_they_are_before_it(engine):
    request = engine.request(json=SCHEMA)
    session = engine.ready(request).session
    drafts = [*engine.ids("{"), *engine.ids("b"), *engine.ids("b")]
    fast = window(engine, request, drafts)
    slow = window_by_vllm(engine, request, drafts)
    np.testing.assert_array_equal(fast, slow)
    assert session.num_offered == 0
    np.testing.assert_array_equal(fast[2], fast[1])


def test_an_eager_requests_windows_are_filled_at_once(engine, monkeypatch):
    request = engine.request(json=SCHEMA)
    session = engine.ready(request).session
    drafts = engine.ids('{"a": 1}')
    engine.rows(request)
    monkeypatch.setattr(session, "accept", None)
    monkeypatch.setattr(session, "fill", None)
    rows = window(engine, request, drafts)
    assert len(rows) == len(drafts) + 1
    assert allows(rows[-1], engine.tokenizer.eos_token_id)


def test_s5_a_turn_that_ends_inside_the_window_is_taken_back(engine, errors):
    request = engine.request(json=SCHEMA)
    engine.ready(request)
    assert engine.accept(request, '{"a": 1}')
    before = window(engine, request, [])
    end = engine.tokenizer.eos_token_id
    assert engine.manager.validate_tokens(request, [end, end]) == [end]
    rows = window(engine, request, [end])
    np.testing.assert_array_equal(rows[:1], before)
    assert (rows[1] == -1).all()
    np.testing.assert_array_equal(window(engine, request, []), before)
    assert errors == []


def test_a_fault_that_a_draft_led_to_is_forgotten_with_the_draft(engine, errors, monkeypatch):
    request = engine.request(json=SCHEMA)
    session = engine.ready(request).session
    fill = session.fill

    def fail(*args, **named):
        if session.num_offered == 1:
            raise RuntimeError("broken behind a draft")
        return fill(*args, **named)

    monkeypatch.setattr(session, "fill", fail)
    rows = window(engine, request, engine.ids("{"))
    assert (rows[0] != -1).any()
    assert (rows[1] == -1).all()
    np.testing.assert_array_equal(window(engine, request, []), rows[:1])
    assert errors == []


def test_a_lazy_request_fires_inside_the_window_and_is_free_again_after_it(engine, errors):
    request = engine.request(LAZILY, json=SCHEMA)
    engine.ready(request).session._compile.join_rows()
    drafts = engine.ids('So <x>{"a"')
    assert engine.manager.validate_tokens(request, drafts)[: len(drafts)] == drafts
    rows = window(engine, request, drafts)
    assert (rows[0] == -1).all()
    assert (rows[-1] != -1).any()
    assert (window(engine, request, []) == -1).all()
    assert errors == []


def test_what_the_grammar_knows_is_drafted_behind_what_the_proposer_offers(engine, errors):
    request = engine.request(json=SCHEMA)
    engine.ready(request)
    validate = engine.manager.validate_tokens
    assert engine.tokenizer.decode(validate(request, [])) == '{"a":'
    opening = engine.ids("{")
    assert validate(request, [*opening, *engine.ids("b")])[:1] == opening
    assert engine.tokenizer.decode(validate(request, [*opening, *engine.ids("b")])) == '{"a":'
    assert request.structured_output_request.grammar.session.num_offered == 0
    assert errors == []


def test_drafts_are_judged_by_what_the_model_wrote_and_told(engine):
    request = engine.request(json=SCHEMA)
    grammar = engine.ready(request)
    drafts = engine.manager.validate_tokens(request, [])
    request.append_output_token_ids(drafts[:2])
    assert engine.manager.accept_tokens(request, drafts[:2])
    assert (grammar.session.trace.drafts_offered, grammar.session.trace.drafts_accepted) == (len(drafts), 2)


def test_drafts_that_were_not_scheduled_are_not_counted_as_rejected(engine):
    request = engine.request(json=SCHEMA)
    grammar = engine.ready(request)
    proposed = engine.ids("{")
    drafts = engine.manager.validate_tokens(request, proposed)
    assert len(drafts) > 2
    engine.manager.grammar_bitmask(engine.requests, [request.request_id], {request.request_id: drafts[:2]})
    request.append_output_token_ids(drafts[:3])
    assert engine.manager.accept_tokens(request, drafts[:3])
    assert (grammar.session.drafts.offered, grammar.session.drafts.accepted) == (1, 1)
    drafts = engine.manager.validate_tokens(request, [])
    engine.manager.grammar_bitmask(engine.requests, [request.request_id], {})  # preempted meanwhile
    request.append_output_token_ids(drafts[:1])
    assert engine.manager.accept_tokens(request, drafts[:1])
    assert (grammar.session.drafts.offered, grammar.session.drafts.accepted) == (1, 1)


def test_a_request_that_may_write_no_more_is_drafted_nothing(engine):
    request = engine.request(json=SCHEMA)
    engine.ready(request)
    request.max_tokens = 3
    assert len(engine.manager.validate_tokens(request, [])) == 2
    request.max_tokens = 1
    assert engine.manager.validate_tokens(request, []) == []


def test_a_fault_while_drafting_ends_the_drafts_and_not_the_request(engine, errors, monkeypatch):
    request = engine.request(json=SCHEMA)
    grammar = engine.ready(request)

    def fail(*_):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(grammar.session.drafts, "tokens", fail)
    assert engine.manager.validate_tokens(request, []) == []
    assert errors == [f"Request {request.request_id} goes on without drafts: RuntimeError: broken on purpose"]
    assert engine.accept(request, '{"a"')
    assert engine.manager.validate_tokens(request, []) == []


def test_inside_reasoning_nothing_is_drafted(thinking):
    request = thinking.request(json=SCHEMA)
    thinking.ready(request)
    assert thinking.manager.validate_tokens(request, []) == []
    end = thinking.tokenizer.convert_tokens_to_ids("</think>")
    request.append_output_token_ids([end])
    assert thinking.manager.accept_tokens(request, [end])
    assert thinking.tokenizer.decode(thinking.manager.validate_tokens(request, [])) == '{"a":'


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scheduler_config.async_scheduling": True}, "async scheduling"),
        ({"use_v2_model_runner": True}, "V2 model runner"),
        ({"parallel_config.pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"speculative_config.method": "eagle"}, "'eagle'"),
        ({}, ""),
    ],
)
def test_where_the_worker_keeps_its_own_drafts_the_grammars_are_off_and_that_is_said_once(change, reason, monkeypatch):
    from types import SimpleNamespace

    from vllm_lazy_grammar.adapter import drafting

    lines = []
    monkeypatch.setattr(drafting.logger, "info", lambda text, *args: lines.append(text % args))
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=False),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        speculative_config=SimpleNamespace(method="ngram"),
        use_v2_model_runner=False,
        num_speculative_tokens=8,
    )
    for path, value in change.items():
        *folders, name = path.split(".")
        setattr(getattr(config, folders[0]) if folders else config, name, value)
    assert drafting.draft_room(config, wanted=True) == (0 if reason else 8)
    assert [reason in line for line in lines] == [True] * bool(reason)
    assert drafting.draft_room(config, wanted=False) == 0
