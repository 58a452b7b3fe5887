"""The engine's side without a model: vLLM's own manager with our backend in front, driven as a scheduler drives it."""

from __future__ import annotations

import gc
import json
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from tests.quiet import import_vllm

pytestmark = pytest.mark.vllm

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
LAZILY = {"grammar_triggers": ["word:<x>"], "grammar_start": "after"}


class Engine:
    """A manager over the demo model's tokenizer, or another's, and requests for it."""

    def __init__(self, backend="lazy", model=None, **config):
        import_vllm()
        import vllm_lazy_grammar

        vllm_lazy_grammar.register()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine import core

        from tests.serving.models import demo_model

        structured = {"backend": backend, **config.pop("structured", {})}
        args = EngineArgs(model=str(model or demo_model()), structured_outputs_config=structured, **config)
        self.manager = core.StructuredOutputManager(args.create_engine_config())
        self.tokenizer = self.manager.tokenizer
        self.backend, self.requests = backend, {}

    def request(self, xargs=None, **structured):
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.v1.request import Request

        params = StructuredOutputsParams(**structured)
        params._backend = self.backend
        sampling = SamplingParams(max_tokens=99, structured_outputs=params, extra_args=xargs)
        sampling.update_from_generation_config({}, self.tokenizer.eos_token_id)
        request = Request(f"r{len(self.requests)}", [1], sampling, None)
        self.manager.grammar_init(request)
        self.requests[request.request_id] = request
        return request

    def ready(self, request):
        structured = request.structured_output_request
        pending = structured._grammar
        if isinstance(pending, Future):
            pending.exception(60)
        assert structured.is_grammar_ready
        return structured.grammar

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def accept(self, request, text):
        for token in self.ids(text):
            request.append_output_token_ids([token])
            if not self.manager.accept_tokens(request, [token]):
                return False
        return True

    def rows(self, *requests):
        found = self.manager.grammar_bitmask(self.requests, [r.request_id for r in requests], {})
        return np.array(found)


@pytest.fixture(scope="module")
def engine():
    made = Engine()
    yield made
    made.manager.clear_backend()


def test_a_lazy_requests_grammar_is_there_at_once_and_an_eager_ones_is_a_future(engine):
    lazy, eager = engine.request(LAZILY, json=SCHEMA), engine.request(json=SCHEMA)
    assert not isinstance(lazy.structured_output_request._grammar, Future)
    assert isinstance(eager.structured_output_request._grammar, Future)
    assert engine.ready(eager).session.phase.value in ("pending", "inside")


def test_rows_straight_from_the_sessions_equal_those_that_vllm_lays_out(engine):
    lazy, eager = engine.request(LAZILY, json=SCHEMA), engine.request(json=SCHEMA)
    engine.ready(eager)
    assert engine.accept(lazy, "Well, <x>")
    assert engine.accept(eager, '{"a"')
    fast = engine.rows(lazy, eager)
    assert engine.manager._is_plain
    engine.manager._is_plain = False
    try:
        slow = engine.rows(lazy, eager)
    finally:
        engine.manager._is_plain = True
    np.testing.assert_array_equal(fast, slow)
    assert (fast != -1).any()


def test_the_end_of_the_prompt_is_what_patterns_see_where_a_request_names_the_marker_that_begins_it(engine):
    pattern = {**LAZILY, "grammar_triggers": [r"pattern:^<\|im_start\|>(<x>)"]}
    without, within = (
        engine.request(pattern, json=SCHEMA),
        engine.request({**pattern, "grammar_context": "<|im_start|>"}, json=SCHEMA),
    )
    for request in (without, within):
        assert engine.accept(request, "<x>")
    sessions = [request.structured_output_request.grammar.session for request in (without, within)]
    assert [session.phase.value in ("pending", "inside") for session in sessions] == [False, True]


def test_eight_children_of_one_request_compile_once(engine):
    schema = {**SCHEMA, "title": "eight"}
    key_count = len(engine.manager.backend.store) if engine.manager.backend else 0
    grammars = [engine.request(LAZILY, json=schema) for _ in range(8)]
    assert len(engine.manager.backend.store) == key_count + 1
    assert len({id(g.structured_output_request.grammar.session) for g in grammars}) == 8


def test_a_lazy_request_never_waits_behind_an_eager_one_whose_compile_is_held(engine):
    engine.ready(engine.request(json=SCHEMA))
    with engine.manager.backend.worker.held():
        eager = engine.request(json={**SCHEMA, "title": "held"})
        lazy = engine.request(LAZILY, json={**SCHEMA, "title": "held too"})
        assert not eager.structured_output_request.is_grammar_ready
        assert lazy.structured_output_request.is_grammar_ready
        assert (engine.rows(lazy) == -1).all()
        assert engine.accept(lazy, "free text")
    assert engine.ready(eager).session is not None


def test_an_aborted_compile_that_has_not_started_never_starts(engine):
    engine.ready(engine.request(json=SCHEMA))
    backend, compiled = engine.manager.backend, []
    original = backend.engine.compile
    backend.engine.compile = lambda key: (compiled.append(key.source), original(key))[1]
    try:
        with backend.worker.held():
            for xargs in (None, LAZILY):
                gone = engine.request(xargs, json={**SCHEMA, "title": f"gone {xargs}"})
                del engine.requests[gone.request_id], gone
                gc.collect()
            later = engine.request(json={**SCHEMA, "title": "later"})
        engine.ready(later)
    finally:
        backend.engine.compile = original
    assert [json.loads(source)["title"] for source in compiled] == ["later"]


def test_a_request_that_ends_gives_its_grammar_back_and_says_what_the_gate_did(engine, monkeypatch):
    from vllm_lazy_grammar.adapter import grammar

    lines = []
    monkeypatch.setattr(grammar.logger, "debug", lambda text, *args: lines.append(text % args))
    request = engine.request(LAZILY, json={**SCHEMA, "title": "told"})
    engine.accept(request, "So: <x>")
    engine.rows(request)
    name = request.request_id
    del engine.requests[name], request
    gc.collect()
    (line,) = [line for line in lines if line.startswith(f"Request {name} ")]
    assert "fired at token" in line
    assert "by word:<x>" in line
    assert "compile" in line


def test_the_end_of_a_request_is_told_although_vllm_still_holds_it(engine, monkeypatch):
    from vllm.v1.request import RequestStatus

    from vllm_lazy_grammar.adapter import grammar

    lines = []
    monkeypatch.setattr(grammar.logger, "debug", lambda text, *args: lines.append(text % args))
    request = engine.request(LAZILY, json=SCHEMA)
    engine.accept(request, "So")
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    engine.accept(request, " ")
    assert len([line for line in lines if f"Request {request.request_id} finished: never fired" in line]) == 1


def test_a_fault_inside_a_session_ends_that_request_alone(engine, monkeypatch):
    from vllm_lazy_grammar.adapter import grammar as module

    lines = []
    monkeypatch.setattr(module.logger, "error", lambda text, *args: lines.append(text % args))
    bad, good = engine.request(json=SCHEMA), engine.request(json=SCHEMA)
    grammar = engine.ready(bad)
    engine.ready(good)

    def fail(_):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(grammar.session, "fill", fail)
    rows = engine.rows(bad, good)
    assert (rows[0] == -1).all()
    assert (rows[1] != -1).any()
    assert not engine.accept(bad, "{")
    assert engine.accept(good, "{")
    assert lines == [f"Request {bad.request_id} is ended by its grammar: RuntimeError: broken on purpose"]


def test_a_grammar_that_can_not_be_compiled_fails_that_request_and_the_engine_serves_on(engine):
    bad = engine.request(grammar='root ::= "a"\nroot ::= "b"')
    assert isinstance(engine.ready(bad), Exception)
    good = engine.request(grammar='root ::= "a"')
    engine.ready(good)
    assert engine.accept(good, "a")


def test_what_requests_share_is_built_before_the_first_of_them_and_its_worker_starts_with_it():
    before = threading.active_count()
    made = Engine()
    assert made.manager.backend is not None
    assert threading.active_count() == before


def test_an_engine_with_another_backend_builds_nothing_of_ours():
    assert Engine("xgrammar").manager.backend is None
