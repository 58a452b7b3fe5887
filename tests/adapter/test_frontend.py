"""The judgement of requests, with vLLM's own SamplingParams and its own check; the engine here answers as the test says."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import threading
from types import SimpleNamespace

import pytest

from tests.quiet import import_quietly, import_vllm
from vllm_lazy_grammar import GrammarError, SettingsError
from vllm_lazy_grammar.settings import Settings
from vllm_lazy_grammar.testing import SMALL_CALL, SMALL_END, small_vocabulary

pytestmark = pytest.mark.vllm

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
WORD = {"grammar_triggers": ["word:<t>"]}


class ModelConfig:
    is_diffusion = False

    def get_vocab_size(self):
        return 40


class Engine:
    """Stands for `engines.policy` and for the vocabulary; remembers what it was asked."""

    XGRAMMAR = "xgrammar"

    def __init__(self):
        self.checked, self.tried = [], []
        self.error, self.takes, self.chosen = None, True, "xgrammar"

    def check(self, key, choice):
        self.checked.append(key)
        self.choice = choice
        if self.error is not None:
            raise self.error
        return self.chosen

    def can_take(self, key, data, choice, *, budget_ms):
        self.tried.append((data, budget_ms))
        return self.takes

    def vocabulary(self, tokenizer, size):
        assert size == 40
        return small_vocabulary()


@pytest.fixture
def frontend():
    import_vllm()
    return import_quietly("vllm_lazy_grammar.adapter.frontend")


@pytest.fixture(autouse=True)
def engine(frontend, monkeypatch):
    made = Engine()
    monkeypatch.setattr(frontend, "policy", made)
    monkeypatch.setattr(frontend, "xgrammar_vocabulary", made)
    monkeypatch.setattr(frontend, "_front_ends", {})
    return made


@pytest.fixture
def judge(frontend):
    """Judge a request with the real check of vLLM below; one engine configuration per test."""
    from vllm.sampling_params import SamplingParams

    model = ModelConfig()
    check = frontend.validating(SamplingParams._validate_structured_outputs)

    def run(params, backend="lazy", tokenizer=TOKENIZER, *, compact=False):
        check(params, model, SimpleNamespace(backend=backend, disable_any_whitespace=compact), tokenizer)
        return params

    run.model = model
    return run


TOKENIZER = SimpleNamespace(eos_token_id=SMALL_END)
CONFIG = SimpleNamespace(backend="lazy", disable_any_whitespace=False)


def asked(structured=None, xargs=None, **options):
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    given = None if structured is None else StructuredOutputsParams(**structured)
    return SamplingParams(structured_outputs=given, extra_args=xargs, **options)


def refused(match=None):
    from vllm.exceptions import VLLMValidationError

    return pytest.raises(VLLMValidationError, match=match)


@pytest.mark.parametrize(
    ("structured", "kind"),
    [
        ({"json": SCHEMA}, "json"),
        ({"json": '{"type": "object"}'}, "json"),
        ({"json_object": True}, "json_object"),
        ({"regex": "[ab]+"}, "regex"),
        ({"choice": ["yes", "no"]}, "choice"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"grammar": 'start: "a"'}, "grammar"),
        (
            {"structural_tag": '{"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}'},
            "structural_tag",
        ),
    ],
)
def test_what_vllms_xgrammar_backend_takes_is_taken_and_only_the_choice_of_backend_is_written(
    judge, engine, structured, kind
):
    params = asked(structured)
    before = copy.deepcopy(params)
    judge(params)
    assert [key.kind for key in engine.checked] == [kind]
    before.structured_outputs._backend = "lazy"
    assert params == before


def test_a_request_may_be_used_again(judge, engine):
    params = judge(asked({"choice": ["a", "b"]}, WORD))
    judge(params)
    assert params.structured_outputs.choice == ["a", "b"]
    assert params.structured_outputs._backend == "lazy"


def test_a_request_that_another_engine_chose_for_by_itself_may_be_used_again(judge):
    params = judge(asked({"regex": "a"}), backend="auto")
    assert params.structured_outputs._backend == "xgrammar"
    assert judge(params).structured_outputs._backend == "lazy"


def test_a_request_can_not_choose_its_backend(judge):
    params = asked({"regex": "a"})
    params.structured_outputs._backend = "guidance"
    with refused(r"structured_outputs\._backend.*'lazy'.*'guidance'"):
        judge(params)


def test_the_engines_disable_any_whitespace_is_part_of_the_key(judge, engine):
    judge(asked({"json": SCHEMA}), compact=True)
    assert engine.checked[0].compact


@pytest.mark.parametrize(
    "structured",
    [
        {"choice": []},
        {"grammar": " "},
        {"json": ""},
        {"json_object": False},
        {"structural_tag": ""},
        {"grammar": "root ::= ("},
    ],
)
def test_what_vllm_refuses_is_refused_in_its_words_with_field_and_value(judge, structured):
    from vllm.exceptions import VLLMValidationError

    def outcome(backend):
        with pytest.raises(VLLMValidationError) as caught:
            judge(asked(structured), backend=backend)
        return caught.value

    ours, theirs = outcome("lazy"), outcome("xgrammar")
    assert str(theirs) in str(ours)
    if "json_object" not in structured:
        ((kind, given),) = structured.items()
        source = given if isinstance(given, str) else json.dumps(given)
        assert ours.parameter == f"structured_outputs.{kind}"
        assert ours.value == repr(source)
        assert str(ours) == f"structured_outputs.{kind}: {theirs} (got {source!r})"


def test_a_schema_that_vllms_own_check_does_not_take_is_refused_with_field_and_value(judge):
    with refused(r"^structured_outputs\.json: .* not supported.*multipleOf") as caught:
        judge(asked({"json": {"type": "number", "multipleOf": 3}}))
    assert caught.value.parameter == "structured_outputs.json"


def test_what_another_engine_takes_is_not_shown_to_vllms_check(judge, engine):
    engine.chosen = "llguidance"
    judge(asked({"json": {"type": "number", "multipleOf": 3}}))


def test_the_operators_choices_reach_the_check_and_the_key(frontend, judge, engine):
    frontend._keep(
        frontend.Settings(engine="llguidance", relax=True, undeclared_properties="allow"), judge.model, CONFIG
    )
    judge(asked({"json": SCHEMA}))
    judge(asked({"regex": "a"}))
    assert (engine.choice.engine, engine.choice.relax) == ("llguidance", True)
    assert [key.undeclared for key in engine.checked] == [True, False]


def test_a_grammar_of_ours_is_known_again_where_undeclared_properties_are_allowed(frontend, judge):
    front_end = frontend._keep(frontend.Settings(undeclared_properties="allow"), judge.model, CONFIG)
    tag = '{"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}'
    front_end.vouch(frontend.grammar_key("structural_tag", tag, compact=False))
    assert front_end._is_made(front_end._grammar_key("structural_tag", tag))


def test_without_a_tokenizer_there_are_no_grammars(judge):
    with refused("skip_tokenizer_init"):
        judge(asked({"regex": "a"}, WORD), tokenizer=None)


def test_the_engines_own_limits_come_before_vllms_check(judge, engine):
    engine.error = GrammarError("structured_outputs.regex", "a", "is too long")
    with refused(r"structured_outputs\.regex: is too long") as caught:
        judge(asked({"regex": "("}))
    assert caught.value.parameter == "structured_outputs.regex"


def test_a_fault_inside_vllms_check_is_a_clients_error_too(frontend, engine):
    def faulty(self, *_):
        raise KeyError("triggers")

    with refused("structured_outputs: KeyError"):
        frontend.validating(faulty)(
            asked({"regex": "a"}),
            ModelConfig(),
            SimpleNamespace(backend="lazy", disable_any_whitespace=False),
            TOKENIZER,
        )


@pytest.mark.parametrize("backend", ["auto", "xgrammar", "guidance", "outlines"])
def test_other_backends_get_vllms_check_with_the_arguments_as_given(frontend, engine, backend):
    calls = []
    params, config = asked({"regex": "a"}, {"theirs": 1}), SimpleNamespace(backend=backend)
    model = ModelConfig()
    frontend.validating(lambda *args: calls.append(args))(params, model, config, TOKENIZER)
    assert len(calls) == 1
    assert all(got is given for got, given in zip(calls[0], (params, model, config, TOKENIZER), strict=True))
    assert engine.checked == []


@pytest.mark.parametrize("structured", [None, {"regex": "a"}])
def test_triggers_for_another_backend_are_refused_not_ignored(judge, structured):
    with refused(r"vllm_xargs\.grammar_triggers: .*--guided-decoding-backend lazy") as caught:
        judge(asked(structured, WORD), backend="xgrammar")
    assert caught.value.parameter == "vllm_xargs.grammar_triggers"


def test_triggers_without_a_structured_output_are_refused(judge):
    with refused(r"vllm_xargs\.grammar_triggers: there is no grammar.*word:<t>"):
        judge(asked(None, WORD))


def test_a_trace_is_refused_where_the_server_writes_none(judge):
    with refused(r"vllm_xargs\.grammar_trace: .*trace_dir names no folder"):
        judge(asked({"regex": "a"}, {"grammar_trace": 1}))
    with refused(r"vllm_xargs\.grammar_trace: this is a boolean.*'maybe'"):
        judge(asked({"regex": "a"}, {"grammar_trace": "maybe"}))
    judge(asked({"regex": "a"}, {"grammar_trace": 0}))


def test_a_trace_needs_a_grammar_where_the_server_writes_traces(frontend, engine, tmp_path):
    from vllm_lazy_grammar.errors import RequestError

    made = frontend.FrontEnd(Settings(trace_dir=str(tmp_path)), ModelConfig(), CONFIG)
    made.check(asked({"regex": "a"}, {"grammar_trace": 1}), TOKENIZER, lambda params: None)
    with pytest.raises(RequestError, match=r"grammar_trace: there is no grammar to trace"):
        made.check(asked(None, {"grammar_trace": 1}), TOKENIZER, lambda params: None)


def test_a_request_without_grammar_and_triggers_passes(judge, engine):
    params = asked(None, {"theirs": 1})
    judge(params)
    assert engine.checked == []


@pytest.mark.parametrize(
    ("xargs", "field"),
    [
        ({"grammar_triggers": []}, "grammar_triggers"),
        ({"grammar_triggers": ["wort:a"]}, r"grammar_triggers\[0\]"),
        ({"grammar_triggers": ["word:"]}, r"grammar_triggers\[0\]"),
        ({"grammar_triggers": ["word:a", "pattern:("]}, r"grammar_triggers\[1\]"),
        ({"grammar_triggers": ["pattern:a*"]}, r"grammar_triggers\[0\]"),
        ({"grammar_triggers": ["token:two words"]}, r"grammar_triggers\[0\]"),
        ({"grammar_triggers": ["token:40"]}, r"grammar_triggers\[0\]"),
        ({**WORD, "grammar_start": "before"}, "grammar_start"),
        ({**WORD, "grammar_force_after": 3}, "grammar_force_after"),
        ({**WORD, "grammar_lazy": 1}, "grammar_lazy"),
        ({"grammar_start": "after"}, "grammar_start"),
    ],
)
def test_what_the_spec_refuses_is_a_clients_error_that_names_the_field(judge, xargs, field):
    with refused(rf"vllm_xargs\.{field}: ") as caught:
        judge(asked({"regex": "a"}, xargs))
    assert caught.value.parameter == "vllm_xargs." + field.replace("\\", "")


@pytest.mark.parametrize(
    ("trigger", "options"),
    [
        (f"token:{SMALL_END}", {}),
        ("token:<call>", {"stop_token_ids": [SMALL_CALL]}),
        ("token:<call>", {"stop_token_ids": [SMALL_CALL], "ignore_eos": True}),
    ],
)
def test_a_stop_id_is_no_trigger(judge, trigger, options):
    with refused("ends the turn"):
        judge(asked({"regex": "a"}, {"grammar_triggers": [trigger]}, **options))


def test_the_end_of_a_turn_may_be_a_trigger_where_the_request_ignores_it(judge):
    judge(asked({"regex": "a"}, {"grammar_triggers": ["token:<end>"]}, ignore_eos=True))


def test_an_end_id_of_the_models_generation_config_is_a_stop_id(frontend, judge):
    frontend._keep(frontend.Settings(), judge.model, CONFIG, [SMALL_CALL])
    with refused("ends the turn"):
        judge(asked({"regex": "a"}, {"grammar_triggers": ["token:<call>"]}))


def test_a_grammar_that_can_never_take_the_triggers_text_is_refused(judge, engine):
    engine.takes = False
    with refused(r"vllm_xargs\.grammar_triggers\[1\]: the grammar can not begin .*'word:<t>'"):
        judge(asked({"regex": "a"}, {"grammar_triggers": ["pattern:b", "word:<t>"]}))
    assert engine.tried == [(b"<t>", 20.0)]


def test_a_check_that_took_too_long_refuses_nothing(judge, engine):
    engine.takes = None
    judge(asked({"regex": "a"}, WORD))
    assert engine.tried == [(b"<t>", 20.0)]


def test_the_text_of_a_trigger_is_not_tried_where_the_grammar_begins_behind_it(judge, engine):
    engine.takes = False
    judge(asked({"regex": "a"}, {**WORD, "grammar_start": "after"}))
    assert engine.tried == []


def test_a_token_triggers_piece_is_tried(judge, engine):
    judge(asked({"regex": "a"}, {"grammar_triggers": ["token:<call>"]}))
    assert [data for data, _ in engine.tried] == [b"<call>"]


def test_the_operators_limit_of_the_check_is_used(frontend, judge, engine):
    frontend._keep(frontend.Settings(frontend_check_ms=3.0), judge.model, CONFIG)
    judge(asked({"regex": "a"}, WORD))
    assert engine.tried == [(b"<t>", 3.0)]


def test_what_was_found_good_is_not_judged_again(judge, engine):
    for _ in range(2):
        judge(asked({"regex": "a"}, WORD))
    assert len(engine.checked) == len(engine.tried) == 1


@pytest.mark.parametrize(
    ("fields", "judged"),
    [
        (({"regex": "b"}, WORD), (2, 2)),
        (({"regex": "a"}, None), (1, 1)),
        (({"regex": "a"}, {**WORD, "grammar_rearm": 1}), (1, 2)),
    ],
)
def test_what_differs_is_judged_anew(judge, engine, fields, judged):
    judge(asked({"regex": "a"}, WORD))
    judge(asked(*fields))
    assert (len(engine.checked), len(engine.tried)) == judged


def test_triggers_are_judged_anew_where_other_ids_end_the_turn(judge, engine):
    judge(asked({"regex": "a"}, WORD))
    judge(asked({"regex": "a"}, WORD, stop_token_ids=[3]))
    assert (len(engine.checked), len(engine.tried)) == (1, 2)


def test_what_was_refused_is_judged_again(judge, engine):
    for _ in range(2):
        engine.error = GrammarError("structured_outputs.regex", "a", "no")
        with refused("no"):
            judge(asked({"regex": "a"}))
    engine.error = None
    judge(asked({"regex": "a"}))
    assert len(engine.checked) == 3


def test_what_is_remembered_is_bounded(frontend, judge, engine, monkeypatch):
    monkeypatch.setattr(frontend, "_REMEMBERED", 2)
    for pattern in "abca":
        judge(asked({"regex": pattern}))
    assert [key.source for key in engine.checked] == ["a", "b", "c", "a"]


def test_a_configuration_is_forgotten_with_its_engine(frontend, engine):
    model = ModelConfig()
    frontend._keep(frontend.Settings(), model, CONFIG)
    assert frontend.known_front_end(model) is not None
    del model
    gc.collect()
    assert frontend._front_ends == {}


def engine_config(model, backend="lazy", additional=None):
    structured = SimpleNamespace(backend=backend, disable_any_whitespace=False)
    return SimpleNamespace(
        model_config=model,
        structured_outputs_config=structured,
        additional_config=additional if additional is not None else {},
    )


def started(frontend, config, eos=None):
    processor = SimpleNamespace()

    def theirs(self, vllm_config, renderer=None):
        self.vllm_config = vllm_config
        self.generation_config_fields = {} if eos is None else {"eos_token_id": eos}

    frontend.starting(theirs)(processor, config, renderer="r")
    return processor


@pytest.mark.parametrize(("eos", "expected"), [(None, set()), (7, {7}), ([7, 9], {7, 9})])
def test_a_start_keeps_settings_and_end_ids_for_the_checks(frontend, eos, expected):
    model = ModelConfig()
    started(frontend, engine_config(model, additional={"lazy_grammar": {"frontend_check_ms": 1}}), eos)
    kept = frontend.known_front_end(model)
    assert kept.settings.frontend_check_ms == 1.0
    assert kept._eos_ids == expected


def test_a_start_of_another_backend_keeps_nothing(frontend):
    started(frontend, engine_config(ModelConfig(), "auto", {"lazy_grammar": "nonsense"}))
    assert frontend._front_ends == {}


def test_a_start_with_a_wrong_setting_fails(frontend):
    with pytest.raises(SettingsError, match="no such setting"):
        started(frontend, engine_config(ModelConfig(), additional={"lazy_grammar": {"prewarn": True}}))


def processed(frontend, backend, params, **options):
    def theirs(self, request_id, prompt, params, *, resumable=False):
        return request_id, params, resumable

    processor = SimpleNamespace(vllm_config=engine_config(ModelConfig(), backend))
    return frontend.processing(theirs)(processor, "r", "p", params, **options)


@pytest.mark.parametrize(("structured", "xargs"), [({"regex": "a"}, None), (None, WORD), ({"regex": "a"}, WORD)])
def test_a_grammar_in_a_streaming_input_session_is_refused(frontend, structured, xargs):
    with refused("whose input is streamed"):
        processed(frontend, "lazy", asked(structured, xargs), resumable=True)


@pytest.mark.parametrize(
    ("backend", "structured", "resumable"),
    [("lazy", None, True), ("lazy", {"regex": "a"}, False), ("xgrammar", {"regex": "a"}, True)],
)
def test_other_sessions_reach_vllm_as_given(frontend, backend, structured, resumable):
    params = asked(structured)
    assert processed(frontend, backend, params, resumable=resumable) == ("r", params, resumable)


def added(frontend, backend, params):
    """Through `add_request`, as the API server calls it; where the check ran, and what vLLM was given."""
    ran_on, calls = [], []

    class Params(SimpleNamespace):
        def _validate_structured_outputs(self, model_config, config, tokenizer):
            ran_on.append((threading.current_thread(), model_config, config, tokenizer))
            if self.error is not None:
                raise self.error

    async def theirs(*args, **kwargs):
        calls.append((args[1:], kwargs))
        return "queue"

    config = engine_config(ModelConfig(), backend)
    server = SimpleNamespace(
        vllm_config=config, model_config=config.model_config, input_processor=SimpleNamespace(tokenizer=TOKENIZER)
    )
    given = Params(error=None, **params)
    result = asyncio.run(frontend.adding(theirs)(server, "r", "p", given, priority=3))
    assert result == "queue"
    assert calls == [(("r", "p", given), {"priority": 3})]
    return ran_on, server


def test_a_grammar_is_judged_off_the_event_loop(frontend):
    (ran,), server = added(frontend, "lazy", {"structured_outputs": {"regex": "a"}})
    thread, *given = ran
    assert thread is not threading.main_thread()
    assert given == [server.model_config, server.vllm_config.structured_outputs_config, TOKENIZER]


@pytest.mark.parametrize(
    ("backend", "params"), [("lazy", {"structured_outputs": None}), ("lazy", {}), ("auto", {"structured_outputs": 1})]
)
def test_nothing_else_leaves_the_event_loop(frontend, backend, params):
    assert added(frontend, backend, params)[0] == []


def test_a_refusal_off_the_event_loop_reaches_the_client_and_vllm_is_not_asked(frontend, judge):
    async def theirs(*_):
        raise AssertionError("reached")

    def check(*_):
        raise GrammarError("structured_outputs.regex", "(", "no")

    config = engine_config(ModelConfig())
    server = SimpleNamespace(
        vllm_config=config, model_config=config.model_config, input_processor=SimpleNamespace(tokenizer=TOKENIZER)
    )
    params = SimpleNamespace(structured_outputs=1, _validate_structured_outputs=check)
    with pytest.raises(GrammarError):
        asyncio.run(frontend.adding(theirs)(server, "r", "p", params))


class Request(SimpleNamespace):
    """A request of the OpenAI API, as far as it is read."""

    model_extra = None
    vllm_xargs = None
    stop_token_ids = None
    ignore_eos = False

    def extract_structured_outputs(self):
        from vllm.sampling_params import StructuredOutputsParams

        given = getattr(self, "structured", None)
        return None if given is None else StructuredOutputsParams(**given)


def rendered(frontend, model, request):
    """Through the seam at a serving class; whether vLLM rendered."""
    calls = []

    async def theirs(self, request, previous=None):
        calls.append((request, previous))
        return "prompt"

    server = SimpleNamespace(model_config=model, renderer=SimpleNamespace(tokenizer=TOKENIZER))
    assert asyncio.run(frontend.rendering(theirs)(server, request, previous=3)) == "prompt"
    assert calls == [(request, 3)]


@pytest.fixture
def served(frontend, monkeypatch):
    """An engine with our backend, and the seam on SamplingParams."""
    from vllm.sampling_params import SamplingParams

    monkeypatch.setattr(
        SamplingParams, "_validate_structured_outputs", frontend.validating(SamplingParams._validate_structured_outputs)
    )
    model = ModelConfig()
    frontend._keep(frontend.Settings(), model, CONFIG)
    return model


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"structured": {"regex": "a"}, "vllm_xargs": {**WORD, "grammar_start": "x"}}, "vllm_xargs.grammar_start"),
        ({"vllm_xargs": WORD}, "vllm_xargs.grammar_triggers"),
        (
            {"structured": {"regex": "a"}, "vllm_xargs": {"grammar_triggers": ["token:40"]}},
            "vllm_xargs.grammar_triggers[0]",
        ),
        ({"model_extra": {"grammar_lazy": True}}, "grammar_lazy"),
        ({"structured": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
    ],
)
def test_a_request_is_refused_while_its_prompt_is_rendered_so_that_a_streamed_one_is_a_400(
    frontend, served, fields, parameter
):
    with refused() as caught:
        rendered(frontend, served, Request(**fields))
    assert caught.value.parameter == parameter


def test_a_request_that_was_judged_while_rendered_is_not_judged_again(frontend, served, engine):
    rendered(frontend, served, Request(structured={"regex": "a"}, vllm_xargs=WORD))
    params = asked({"regex": "a"}, WORD)
    params._validate_structured_outputs(served, CONFIG, TOKENIZER)
    assert (len(engine.checked), len(engine.tried)) == (1, 1)


def test_a_request_without_a_grammar_is_rendered_as_before(frontend, served, engine):
    rendered(frontend, served, Request(model_extra={"theirs": 1}))
    assert engine.checked == []


def test_with_another_backend_requests_are_rendered_as_before(frontend):
    rendered(frontend, ModelConfig(), Request(model_extra={"grammar_lazy": True}, vllm_xargs=WORD))
