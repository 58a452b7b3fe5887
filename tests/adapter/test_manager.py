"""The engine's side without a model: vLLM's own manager with our backend in front, driven as a scheduler drives it."""

from __future__ import annotations

import gc
import json
import re
import threading
import weakref
from concurrent.futures import Future
from contextlib import ExitStack

import numpy as np
import pytest

from tests.quiet import import_vllm
from vllm_lazy_grammar.core.rows import is_allowed

pytestmark = pytest.mark.vllm

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
LAZILY = {"grammar_triggers": ["word:<x>"], "grammar_start": "after"}


class Engine:
    """A manager over the demo model's tokenizer, or another's, and requests for it."""

    def __init__(self, backend="lazy", model=None, structured=None, **config):
        import_vllm()
        import vllm_lazy_grammar

        vllm_lazy_grammar.register()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine import core

        from tests.serving.models import demo_model

        outputs = {"backend": backend, **(structured or {})}
        args = EngineArgs(model=str(model or demo_model()), structured_outputs_config=outputs, **config)
        self.manager = core.StructuredOutputManager(args.create_engine_config())
        self.tokenizer = self.manager.tokenizer
        self.backend, self.requests = backend, {}

    def request(self, xargs=None, max_tokens=99, min_tokens=0, generation=None, **structured):
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.v1.request import Request

        params = StructuredOutputsParams(**structured)
        params._backend = self.backend
        sampling = SamplingParams(
            max_tokens=max_tokens, min_tokens=min_tokens, structured_outputs=params, extra_args=xargs
        )
        sampling.update_from_generation_config(generation or {}, self.tokenizer.eos_token_id)
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

    def compile_of(self, title):
        """The compile of the schema with this title."""
        (found,) = [c for key, c in self.manager.backend.store._table.items() if f'"{title}"' in key.source]
        return found

    def drained(self):
        """Wait until the worker has done everything; it has one thread."""
        self.manager.backend.worker.submit(lambda: None, 99).result()

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


@pytest.fixture
def told(monkeypatch):
    """The debug lines."""
    from vllm_lazy_grammar.adapter import grammar

    lines = []
    monkeypatch.setattr(grammar.logger, "debug", lambda text, *args: lines.append(text % args))
    return lines


def over(engine, request, told):
    """The one line that tells what became of the request."""
    request.structured_output_request.grammar.finish()
    (line,) = [line for line in told if line.startswith(f"Request {request.request_id} ")]
    return line


def test_a_request_whose_trigger_fired_before_the_compile_was_there_says_how_long_the_engine_waited(
    engine, told, monkeypatch
):
    with ExitStack() as stack:
        stack.enter_context(engine.manager.backend.worker.held())
        request = engine.request(LAZILY, json={**SCHEMA, "title": "waited for"})
        compile_ = engine.compile_of("waited for")
        result = compile_.result
        monkeypatch.setattr(compile_, "result", lambda: (stack.close(), result())[1])  # let go once the step waits
        assert engine.accept(request, "<x>")
        assert (engine.rows(request) != -1).any()
    line = over(engine, request, told)
    assert re.search(r"; compile [0-9.]+ ms by xgrammar, the engine waited [0-9.]+ ms for it$", line)
    assert not line.endswith("waited 0.0 ms for it")


def test_an_eager_request_says_that_its_compile_was_waited_for_outside_the_batch(engine, told):
    request = engine.request(json=SCHEMA)
    engine.ready(request)
    engine.rows(request)
    assert re.search(
        r" finished: eager; compile [0-9.]+ ms by xgrammar, outside the batch$", over(engine, request, told)
    )


def test_a_request_that_its_grammar_ended_says_why(engine, told, monkeypatch):
    request = engine.request(json=SCHEMA)
    grammar = engine.ready(request)

    def fail(_):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(grammar.session, "accept", fail)
    assert not engine.accept(request, "{")
    (line,) = [line for line in told if line.startswith(f"Request {request.request_id} ")]
    assert "RuntimeError: broken on purpose; compile " in line.partition(" finished: ended: ")[2]


def test_a_debug_line_says_how_many_rows_were_warmed_of_those_asked_for(engine, told):
    engine.request(regex="warm[ab]")
    (compile_,) = [c for key, c in engine.manager.backend.store._table.items() if key.source == "warm[ab]"]
    assert compile_.join_rows() == compile_.warmed == 5
    assert [line for line in told if "warm[ab]" in line] == ["Grammar regex 'warm[ab]': 5 rows warmed of 5 asked for"]


def test_the_end_of_a_request_is_told_although_vllm_still_holds_it(engine, monkeypatch):
    from vllm.v1.request import RequestStatus

    from vllm_lazy_grammar.adapter import grammar

    lines = []
    monkeypatch.setattr(grammar.logger, "debug", lambda text, *args: lines.append(text % args))
    request = engine.request(LAZILY, json=SCHEMA)
    engine.accept(request, "So")
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    engine.accept(request, " ")
    told = [line for line in lines if f"Request {request.request_id} finished: never fired" in line]
    assert len(told) == 1
    assert " ms by xgrammar, " in told[0]


def test_the_end_of_a_request_tells_which_engine_took_its_grammar_and_why(engine, monkeypatch):
    from vllm_lazy_grammar.adapter import grammar

    lines = []
    monkeypatch.setattr(grammar.logger, "debug", lambda text, *args: lines.append(text % args))
    request = engine.request(json={"type": "integer", "multipleOf": 3})
    engine.ready(request).finish()
    assert " ms by llguidance, since xgrammar: xgrammar can not express multipleOf, " in lines[-1]


def test_a_fault_inside_a_session_ends_that_request_alone(engine, monkeypatch):
    from vllm_lazy_grammar.adapter import grammar as module

    lines = []
    monkeypatch.setattr(module.logger, "error", lambda text, *args: lines.append(text % args))
    bad, good = engine.request(json=SCHEMA), engine.request(json=SCHEMA)
    grammar = engine.ready(bad)
    engine.ready(good)

    def fail(*_, **__):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(grammar.session, "fill", fail)
    rows = engine.rows(bad, good)
    assert (rows[0] == -1).all()
    assert (rows[1] != -1).any()
    assert not engine.accept(bad, "{")
    assert engine.accept(good, "{")
    reason = "the request's grammar failed inside the server: RuntimeError: broken on purpose"
    assert lines == [f"Request {bad.request_id} is ended by its grammar: {reason}"]


TWICE = {"grammar": 'root ::= "a"\nroot ::= "b"'}


def heard(request):
    from vllm_lazy_grammar.adapter import faults

    return faults.heard(request.stop_reason)


def test_a_grammar_that_can_not_be_compiled_ends_that_request_with_the_reason_and_the_engine_serves_on(engine):
    bad, good = engine.request(**TWICE), engine.request(grammar='root ::= "a"')
    for request in (bad, good):
        engine.ready(request)
    assert (engine.rows(bad, good)[0] == -1).all()
    assert not engine.accept(bad, "a")
    assert heard(bad).field == "structured_outputs.grammar"
    assert heard(bad).message.startswith("structured_outputs.grammar: ")
    assert engine.accept(good, "a")
    assert good.stop_reason is None


def test_a_request_that_can_not_be_read_in_the_engine_is_ended_with_the_reason(engine):
    bad = engine.request({**LAZILY, "grammar_start": "before"}, json=SCHEMA)
    assert not engine.accept(bad, "a")
    assert heard(bad).field == "vllm_xargs.grammar_start"
    assert "before" in heard(bad).value


def test_a_fault_that_is_ours_names_no_field(engine, monkeypatch):
    request = engine.request(json=SCHEMA)

    def fail(_):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(engine.ready(request).session, "accept", fail)
    assert not engine.accept(request, "{")
    assert heard(request).field == ""
    assert "RuntimeError: broken on purpose" in heard(request).message


def test_a_sampled_token_that_the_mask_refuses_is_our_fault_unless_the_request_left_no_other(engine, monkeypatch):
    from vllm_lazy_grammar.adapter import grammar

    lines = []
    monkeypatch.setattr(grammar.logger, "error", lambda text, *args: lines.append(text % args))
    ours, theirs, late = (engine.request(json=SCHEMA) for _ in range(3))
    theirs.sampling_params.allowed_token_ids = engine.ids("x")
    late.sampling_params.min_tokens = 50
    for request in (ours, theirs, late):
        engine.ready(request)
        engine.rows(request)
        assert not engine.accept(request, "x")
    assert (heard(ours).field, heard(late).field) == ("", "")
    assert heard(theirs).field == "allowed_token_ids"
    assert "leave no token" in heard(theirs).message
    (token,) = engine.ids("x")
    for request, line in zip((ours, theirs, late), lines, strict=True):
        assert line.startswith(f"Request {request.request_id} is ended by its grammar: {heard(request).message}; ")
        assert f"token {token} was offered at output token 0 (inside)" in line


def test_the_line_about_a_request_that_is_ended_has_its_id_field_and_value(engine, monkeypatch):
    from vllm_lazy_grammar.adapter import grammar

    lines = []
    monkeypatch.setattr(grammar.logger, "error", lambda text, *args: lines.append(text % args))
    runaway, refused = "(?:a|aa)+b$", {"grammar_triggers": ["pattern:<x>."], "grammar_on_reject": "error"}
    asked = {
        runaway: (engine.request({**LAZILY, "grammar_triggers": [f"pattern:{runaway}"]}, json=SCHEMA), "a" * 60 + "!"),
        "'error'": (engine.request(refused, regex="<x>[0-9]"), "<x>y"),
    }
    for (value, (request, text)), field in zip(asked.items(), ("grammar_triggers", "grammar_on_reject"), strict=True):
        engine.ready(request).session._compile.result()
        assert not engine.accept(request, text)
        (line,) = lines
        assert line.startswith(f"Request {request.request_id} is ended by its grammar: vllm_xargs.{field}: ")
        assert value in line
        lines.clear()


def ended_near_its_budget(engine, max_tokens, **fields):
    """What the client is told of a token that is refused once the row leads out of a string."""
    request = engine.request(json=NAMED, max_tokens=max_tokens)
    for field, value in fields.items():
        setattr(request.sampling_params, field, value)
    engine.ready(request).session._near_end.leading._prepared().get()
    for token in engine.ids('{"a":"'):
        request.append_output_token_ids([token])
        assert engine.manager.accept_tokens(request, [token])
    (letter,) = engine.ids("x")
    while is_allowed(engine.rows(request)[0], letter, engine.manager.backend.vocabulary.size):
        request.append_output_token_ids([letter])
        assert engine.manager.accept_tokens(request, [letter])
    request.append_output_token_ids([0])  # what is sampled where no token is left
    assert not engine.manager.accept_tokens(request, [0])
    return heard(request)


def test_stop_strings_change_no_row_since_they_are_matched_in_the_text(engine):
    plain, stopped = (engine.request(json=NAMED, max_tokens=12) for _ in range(2))
    stopped.sampling_params.stop = ['"}', "}"]
    for request in (plain, stopped):
        engine.ready(request).session._near_end.leading._prepared().get()
    for text in ('{"', "a", '":', '"', "x", '"}'):
        theirs, same = engine.rows(plain, stopped)
        np.testing.assert_array_equal(theirs, same)
        assert engine.accept(plain, text)
        assert engine.accept(stopped, text)
    assert (engine.rows(stopped) != 0).any()


NAMED = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def test_fields_that_leave_no_token_once_the_budget_leads_out_are_to_blame(engine):
    ends = [token for token, piece in enumerate(engine.manager.backend.vocabulary.pieces) if piece.startswith(b'"')]
    fault = ended_near_its_budget(engine, 20, allowed_token_ids=engine.ids('{"a":"xyz'))
    assert fault.field == "allowed_token_ids"
    assert "what is left of max_tokens" in fault.message
    fault = ended_near_its_budget(engine, 20, bad_words=['"'], _bad_words_token_ids=[[token] for token in ends])
    assert fault.field == "bad_words"
    assert ended_near_its_budget(engine, 20).field == ""
    assert ended_near_its_budget(engine, 20, logit_bias=dict.fromkeys(ends, -100.0)).field == ""


def test_a_field_that_leaves_no_token_behind_another_is_to_blame_and_a_word_is_only_where_it_was_begun(engine):
    (letter,) = engine.ids("x")
    ends = [token for token, piece in enumerate(engine.manager.backend.vocabulary.pieces) if piece.startswith(b'"')]
    both = {"allowed_token_ids": [*ends, *engine.ids('{"a":"xyz')], "bad_words": ["-"]}
    words = [[letter, token] for token in ends]
    assert ended_near_its_budget(engine, 20, **both, _bad_words_token_ids=words).field == "bad_words"
    elsewhere = [[*engine.ids("y"), token] for token in ends]
    assert ended_near_its_budget(engine, 20, **both, _bad_words_token_ids=elsewhere).field == ""


def test_any_other_stop_reason_is_none_of_ours():
    from vllm_lazy_grammar.adapter import faults

    assert [faults.heard(reason) for reason in (None, 2, "repetition_detected", "{}")] == [None] * 4
    fault = faults.Fault("a: b (got 'c')", "a", "'c'")
    assert faults.heard(fault.as_stop_reason()) == fault


def test_what_requests_share_is_built_before_the_first_of_them_and_its_worker_starts_with_it():
    before = threading.active_count()
    made = Engine()
    assert made.manager.backend is not None
    assert threading.active_count() == before


def test_an_engine_with_another_backend_builds_nothing_of_ours():
    assert Engine("xgrammar").manager.backend is None


# -- what requests leave, settings, stop ids ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone():
    """With one thread on its worker, so that it can be waited for; and every setting that the engine's side reads."""
    made = Engine(additional_config={"lazy_grammar": SET})
    yield made
    made.manager.clear_backend()


SET = {
    "whitespace_bound": 3,
    "prewarm_top_k": 2,
    "grammar_cache_mb": 7,
    "row_cache_mb": 2,
    "trigger_timeout_ms": 11,
    "threads": 1,
}


@pytest.mark.parametrize("xargs", [None, LAZILY])
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_b3_an_abort_before_during_or_after_the_compile_leaves_nothing(alone, monkeypatch, xargs, when):
    backend, title = alone.manager.backend, f"{when} {xargs is None}"
    begun, go = threading.Event(), threading.Event()
    original = backend.engine.compile
    monkeypatch.setattr(backend.engine, "compile", lambda key: (begun.set(), go.wait(60), original(key))[2])
    with ExitStack() as stack:
        if when == "before":
            stack.enter_context(backend.worker.held())
        request = alone.request(xargs, json={**SCHEMA, "title": title})
        compile_ = alone.compile_of(title)
        if when != "before":
            assert begun.wait(60)
        if when == "after":
            go.set()
            alone.drained()
            assert alone.ready(request).session is not None
        kept = [weakref.ref(request), weakref.ref(request.structured_output_request._grammar)]
        del alone.requests[request.request_id], request
        gc.collect()
        assert compile_.holders == 0
    go.set()
    alone.drained()
    gc.collect()
    assert (compile_.holders, [ref() for ref in kept]) == (0, [None, None])
    assert begun.is_set() == (when != "before")


def test_every_setting_of_the_engines_side_reaches_what_it_sets(alone):
    backend = alone.manager.backend
    assert backend.bound.bound == SET["whitespace_bound"]
    assert (backend.store.top_k, backend.store._limit) == (SET["prewarm_top_k"], SET["grammar_cache_mb"] << 20)
    assert backend.rows.limit_bytes == SET["row_cache_mb"] << 20
    assert backend.worker._threads == SET["threads"]
    session = alone.request(LAZILY, json=SCHEMA).structured_output_request.grammar.session
    assert session._walk.gate._timeout_s == SET["trigger_timeout_ms"] / 1000


def test_the_settings_bound_blanks_and_rows_that_are_made_ahead(alone):
    request = alone.request(json={**SCHEMA, "title": "bounded"})
    alone.ready(request)
    assert alone.compile_of("bounded").join_rows() == SET["prewarm_top_k"]
    blanks = {
        token for token, piece in enumerate(alone.manager.backend.vocabulary.pieces) if piece and not piece.strip()
    }
    assert alone.accept(request, "{ ")
    assert blanks & allowed(alone, request)
    assert alone.accept(request, " ")
    assert alone.accept(request, " ")
    assert not blanks & allowed(alone, request)


def test_without_prewarm_no_row_is_made_ahead():
    made = Engine(additional_config={"lazy_grammar": {"prewarm": False}})
    try:
        made.ready(made.request(json={**SCHEMA, "title": "cold"}))
        assert made.compile_of("cold").join_rows() == 0
        assert len(made.manager.backend.rows) == 0
    finally:
        made.manager.clear_backend()


def test_the_generation_configs_stop_ids_are_masked_inside_and_allowed_where_it_may_end(engine):
    (other,) = engine.ids("x")
    both = {engine.tokenizer.eos_token_id, other}
    plain, request = (engine.request(regex="a[xy]?b", generation=g) for g in (None, {"eos_token_id": sorted(both)}))
    for each in (plain, request):
        engine.ready(each)
        assert engine.accept(each, "a")
    assert other in allowed(engine, plain)
    assert not both & allowed(engine, request)
    assert engine.accept(request, "b")
    assert allowed(engine, request) == both


def test_what_may_begin_an_answer_is_asked_while_the_grammar_compiles_and_a_trigger_may(engine):
    from vllm_lazy_grammar.adapter.manager import make_manager

    class Newer:
        """As vLLM 0.33 asks."""

        def _masked_reasoning_ends(self, request):
            grammar = request.structured_output_request.grammar
            return tuple(token for token in self.ends if not grammar.validate_tokens([token]))

    manager = object.__new__(make_manager(Newer))
    trigger, other = engine.tokenizer.convert_tokens_to_ids(["<|im_start|>", "a"])
    manager.ends = (trigger, other)
    with engine.manager.backend.worker.held():
        request = engine.request(
            {**LAZILY, "grammar_triggers": [f"token:{trigger}"]}, json={**SCHEMA, "title": "asked"}
        )
        grammar = request.structured_output_request.grammar
        assert manager._masked_reasoning_ends(request) == ()
        assert grammar.validate_tokens([trigger]) == []
        assert grammar.session.trace.joined_seconds == 0


# -- the budget --------------------------------------------------------------------------------------------------------


def allowed(engine, request):
    """The ids that the request's next row allows."""
    row = engine.rows(request)[0]
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def written(engine, request, steps):
    """Let the request write, always the longest text that its row allows; the whole answer, and whether it ended in time."""
    pieces = engine.manager.backend.vocabulary.pieces
    session = engine.ready(request).session
    for _ in range(steps):
        token = max(allowed(engine, request), key=lambda token: (len(pieces[token]), token))
        request.append_output_token_ids([token])
        assert engine.manager.accept_tokens(request, [token])
        if session.is_terminated():
            break
    return engine.tokenizer.decode(request.output_token_ids, skip_special_tokens=True), session.is_terminated()


THREE = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("first", "second", "third")},
    "required": ["first", "second", "third"],
    "additionalProperties": False,
}


def test_e1_an_answer_with_three_strings_fits_into_forty_tokens(engine):
    text, ended = written(engine, engine.request(json=THREE, max_tokens=40), 40)
    assert ended
    assert json.loads(text).keys() == {"first", "second", "third"}


@pytest.mark.parametrize("plain", [True, False])
def test_the_budget_is_what_the_context_leaves_where_that_is_less(plain):
    made = Engine(max_model_len=64)
    try:
        request = made.request(json=THREE, max_tokens=1000)
        made.ready(request)
        made.manager._is_plain = plain
        text, ended = written(made, request, 63)
    finally:
        made.manager.clear_backend()
    assert ended
    assert json.loads(text).keys() == {"first", "second", "third"}


def test_without_the_budget_an_answer_is_cut():
    made = Engine(additional_config={"lazy_grammar": {"budget": False}})
    try:
        text, ended = written(made, made.request(json=THREE, max_tokens=40), 40)
    finally:
        made.manager.clear_backend()
    assert not ended
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(text)


def test_a_budget_in_which_no_answer_fits_is_told_once(engine, monkeypatch):
    from vllm_lazy_grammar.adapter import grammar

    lines = []
    monkeypatch.setattr(grammar.logger, "info", lambda text, *args: lines.append(text % args))
    request = engine.request(json=THREE, max_tokens=5)
    _, ended = written(engine, request, 5)
    assert not ended
    (line,) = lines
    assert line.startswith(f"Request {request.request_id}: the shortest text")
    assert "5 are left" in line


def test_e2_below_min_tokens_stop_ids_are_masked_while_anything_else_is_legal_and_then_it_ends(engine):
    eos = engine.tokenizer.eos_token_id
    request = engine.request(regex="a{1,3}", min_tokens=50)
    engine.ready(request)
    for left in range(3, 0, -1):
        assert eos not in allowed(engine, request), left
        assert engine.accept(request, "a")
    assert allowed(engine, request) == {eos}
    assert request.sampling_params.min_tokens == 0


def test_min_tokens_holds_while_a_trigger_is_awaited(engine):
    eos = engine.tokenizer.eos_token_id
    request = engine.request(LAZILY, json=SCHEMA, min_tokens=2)
    assert eos not in allowed(engine, request)
    assert engine.accept(request, "ab")
    while request.num_output_tokens < 2:
        engine.accept(request, "a")
    assert eos in allowed(engine, request)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    from tests.serving.models import thinking_model

    model = thinking_model(tmp_path_factory.mktemp("models") / "thinking")
    made = Engine(model=model, structured={"reasoning_parser": "deepseek_r1"})
    yield made
    made.manager.clear_backend()


CALL = {"grammar_triggers": ["word:<tool_call>"], "grammar_start": "after"}


@pytest.mark.parametrize(("xargs", "ends"), [(None, True), ({**CALL, "grammar_mandatory": 1}, True), (CALL, False)])
def test_reasoning_ends_while_there_is_time_for_what_is_owed(thinking, xargs, ends):
    (end,) = thinking.ids("</think>")
    request = thinking.request(xargs, json=SCHEMA, max_tokens=40)
    session = thinking.ready(request).session
    session._compile.result()
    for _ in range(40):
        found = allowed(thinking, request)
        if found == {end}:
            break
        assert thinking.accept(request, "hm"[0])
    assert (found == {end}) is ends
    if ends:
        assert thinking.accept(request, "</think>")
        text, ended = written(thinking, request, 40 - request.num_output_tokens)
        assert ended, text
        assert json.loads(text.rpartition("</think>")[2].rpartition("<tool_call>")[2])["a"] in (1, 2)


def test_neither_the_reasoning_nor_its_end_counts_for_force_after(thinking):
    options = {"grammar_mandatory": 1, "grammar_force_after": 2}
    request = thinking.request({**CALL, **options}, json=SCHEMA, max_tokens=2000)
    thinking.ready(request).session._compile.result()
    assert thinking.accept(request, "hm hm hm")
    assert thinking.accept(request, "</think>")
    (word,) = thinking.ids("hm")
    for _ in range(2):
        assert word in allowed(thinking, request)
        request.append_output_token_ids([word])
        assert thinking.manager.accept_tokens(request, [word])
    assert word not in allowed(thinking, request)


def test_a_marker_of_several_tokens_goes_on_from_what_is_written():
    from vllm_lazy_grammar.adapter.grammar import Reasoning

    reasoning = Reasoning((7, 7, 8), (1, 7, 7, 2))
    assert [reasoning.next_of_end(place) for place in range(5)] == [7, 7, 7, 8, 7]
