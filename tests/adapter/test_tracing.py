"""Traces from vLLM's own manager: which requests are traced, what is written, and that the others are not touched."""

from __future__ import annotations

import gc

import pytest

from tests.adapter.test_draft_windows import NGRAM, window
from tests.adapter.test_manager import LAZILY, SCHEMA, Engine
from vllm_lazy_grammar.core.story import read

pytestmark = pytest.mark.vllm

TRACED = {**LAZILY, "grammar_trace": 1}


def engine_with(folder, speculative_config=None, **settings):
    config = {} if speculative_config is None else {"speculative_config": speculative_config}
    return Engine(additional_config={"lazy_grammar": {"trace_dir": str(folder), **settings}}, **config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def engine(folder):
    made = engine_with(folder)
    yield made
    made.manager.clear_backend()


def write(engine, request, text, reason=()):
    """Each token behind a row, as the scheduler does it."""
    for token in reason:
        request.append_output_token_ids([token])
    for token in engine.ids(text):
        engine.rows(request)
        request.append_output_token_ids([token])
        assert engine.manager.accept_tokens(request, [token])


def story(engine, folder, request):
    """What was written of a request, once the writing thread is done."""
    engine.manager.backend.tracing.files._worker.submit(lambda: None).result()
    (path,) = folder.glob(f"trace-*-{request.request_id}.jsonl")
    return read(path)


def test_a_request_that_asks_is_traced_and_one_that_does_not_has_the_plain_grammar(engine, folder):
    from vllm_lazy_grammar.adapter.grammar import LazyGrammar

    plain = engine.request(LAZILY, json=SCHEMA)
    assert type(plain.structured_output_request.grammar) is LazyGrammar
    traced = engine.request(TRACED, json=SCHEMA)
    write(engine, traced, 'Well, <x>{"a": 1}')
    engine.ready(traced).finish()
    head, *tokens, end = story(engine, folder, traced)
    assert head["triggers"] == ["word:<x>"]
    assert head["grammar"]["kind"] == "json"
    assert "prompt" not in head
    assert "".join(line["text"] for line in tokens) == 'Well, <x>{"a": 1}'
    assert tokens[0]["state"] == "awaiting"
    assert tokens[-1]["state"] == "finished"
    assert [e["trigger"] for line in tokens for e in line.get("events", ())] == ["word:<x>"]
    assert all(line["left"] > 0 for line in tokens)
    assert end["end"]["summary"].startswith("fired at token")
    assert end["end"]["compile_ms"] > 0


def test_a_request_that_is_dropped_is_told_as_far_as_it_came(engine, folder):
    request = engine.request(TRACED, json=SCHEMA)
    write(engine, request, "Well, <")
    request.structured_output_request.grammar = None
    gc.collect()
    *_, end = story(engine, folder, request)
    assert end["end"]["summary"] == "never fired"
    assert end["end"]["misses"][0]["text"] == "<"


def test_an_eager_request_is_traced_too(engine, folder):
    request = engine.request({"grammar_trace": 1}, json=SCHEMA)
    engine.ready(request)
    write(engine, request, '{"a": 1}')
    engine.ready(request).finish()
    head, *tokens, end = story(engine, folder, request)
    assert "triggers" not in head
    assert tokens[-1]["state"] == "finished"
    assert end["end"]["summary"] == "eager"


def test_tokens_before_those_of_the_grammar_are_told_as_reasoning(engine, folder):
    request = engine.request(TRACED, json=SCHEMA)
    write(engine, request, "Well", reason=engine.ids("<x> is what I think"))
    engine.ready(request).finish()
    _, *tokens, end = story(engine, folder, request)
    assert [line["state"] for line in tokens] == ["reasoning"] * (len(tokens) - 1) + ["awaiting"]
    assert end["end"]["misses"][0]["why"] == "it stands in the reasoning, which the gate does not see"


def test_a_token_that_ends_the_request_is_told(engine, folder):
    request = engine.request(TRACED, json=SCHEMA)
    write(engine, request, "<x>{")
    (token,) = engine.ids("!")
    request.append_output_token_ids([token])
    assert not engine.manager.accept_tokens(request, [token])
    *_, end = story(engine, folder, request)
    assert end["end"]["refused"] == {"token": token, "text": "!"}


def test_a_fault_of_the_notes_ends_the_notes_and_not_the_request(engine, folder, monkeypatch):
    request = engine.request(TRACED, json=SCHEMA)
    grammar = engine.ready(request)
    monkeypatch.setattr(grammar._notes.recorder, "took", lambda token: 1 / 0)
    write(engine, request, 'Well, <x>{"a": 1}')
    grammar.finish()
    engine.manager.backend.tracing.files._worker.submit(lambda: None).result()
    assert not list(folder.glob(f"trace-*-{request.request_id}.jsonl"))


def test_a_share_of_all_requests_is_traced_unasked_with_the_prompt_where_the_operator_wants_it(tmp_path):
    engine = engine_with(tmp_path, trace_rate=0.5, trace_prompt=True)
    asked = [engine.ready(engine.request(LAZILY, json=SCHEMA)) for _ in range(60)]
    traced = [grammar for grammar in asked if type(grammar).__name__ == "TracedGrammar"]
    assert 10 < len(traced) < 50
    request = engine.requests[traced[0].request_id]
    write(engine, request, "Well")
    traced[0].finish()
    assert story(engine, tmp_path, request)[0]["prompt"]
    engine.manager.clear_backend()


def test_drafts_are_told_with_the_tokens_that_came_of_them(tmp_path):
    engine = engine_with(tmp_path, speculative_config=NGRAM)
    request = engine.request(TRACED, json=SCHEMA)
    engine.ready(request).session._compile.join_rows()
    window(engine, request, [])
    assert engine.accept(request, "<x>")
    drafts = engine.manager.validate_tokens(request, [])
    assert len(drafts) > 2
    window(engine, request, drafts)
    sampled = [*drafts[:-1], *engine.ids('"')]  # the last one is not what the model wrote
    request.append_output_token_ids(sampled)
    assert engine.manager.accept_tokens(request, sampled)
    engine.ready(request).finish()
    _, *lines, end = story(engine, tmp_path, request)
    answered = lines[-len(sampled) :]
    assert [line["token"] for line in answered] == sampled
    assert [line.get("draft") for line in answered] == [*["grammar"] * (len(drafts) - 1), None]
    assert answered[-1]["instead_of"] == drafts[-1]
    assert all(line["left"] > 0 for line in answered)
    told = end["end"]["drafts"]
    assert told == {
        "offered": len(drafts),
        "accepted": len(drafts) - 1,
        "of_the_grammar": {"offered": len(drafts), "accepted": len(drafts) - 1},
    }
    engine.manager.clear_backend()


def test_where_no_folder_is_set_nothing_is_traced():
    engine = Engine()
    assert engine.manager.backend.tracing is None
    asked = engine.request(TRACED, json=SCHEMA)  # past a front end that would have refused it
    assert type(engine.ready(asked)).__name__ == "Ended"
    engine.manager.clear_backend()
