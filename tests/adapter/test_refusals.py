"""What is refused instead of being ignored, on vLLM's own request classes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.quiet import import_quietly, import_vllm
from vllm_lazy_grammar import RequestError, SettingsError

pytestmark = pytest.mark.vllm

XARGS = {"grammar_triggers": ["word:<a>"]}
REGEX = {"regex": "a+"}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}


@pytest.fixture(autouse=True)
def refusals():
    import_vllm()
    return import_quietly("vllm_lazy_grammar.adapter.refusals")


def chat(**fields):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hi"}], **fields)


def completion(**fields):
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    return CompletionRequest(model="m", prompt="hi", **fields)


def responses(**fields):
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    return ResponsesRequest(model="m", input="hi", **fields)


def refused():
    from vllm.exceptions import VLLMValidationError

    return pytest.raises(VLLMValidationError)


@pytest.mark.parametrize("request_of", [chat, completion, responses])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("grammar", 'root ::= "a"'),
        ("grammar_lazy", True),
        ("grammar_triggers", [{"type": "word", "value": "<a>"}]),
        ("grammar_start", "after"),
    ],
)
def test_llama_cpps_top_level_fields_are_refused_with_a_message_that_names_vllm_xargs(
    refusals, request_of, field, value
):
    with pytest.raises(RequestError, match="vllm_xargs") as caught:
        refusals.refuse_ignored(request_of(**{field: value}))
    assert (caught.value.field, caught.value.value) == (field, value)


@pytest.mark.parametrize("request_of", [chat, completion, responses])
def test_other_fields_that_vllm_does_not_know_stay_ignored(refusals, request_of):
    assert refusals.refuse_ignored(request_of(something_else=1, vllm_xargs=XARGS, structured_outputs=REGEX)) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"structured_outputs": REGEX}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"vllm_xargs": XARGS}, "vllm_xargs.grammar_triggers"),
        ({"grammar_lazy": True}, "grammar_lazy"),
    ],
)
@pytest.mark.parametrize("request_of", [chat, completion])
def test_beam_search_with_a_grammar_or_triggers_is_refused(refusals, request_of, fields, field):
    with pytest.raises(RequestError) as caught:
        refusals.refuse_ignored(request_of(use_beam_search=True, **fields))
    assert caught.value.field == field


def test_beam_search_with_tools_is_refused(refusals):
    with pytest.raises(RequestError) as caught:
        refusals.refuse_ignored(chat(use_beam_search=True, tools=[TOOL], tool_choice="auto"))
    assert caught.value.field == "tools"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"vllm_xargs": {"theirs": 1}},
        {"tools": [TOOL], "tool_choice": "none"},
    ],
)
def test_beam_search_without_a_grammar_is_served_as_before(refusals, fields):
    assert refusals.refuse_ignored(chat(use_beam_search=True, n=2, **fields)) is None


def engine(backend, **config):
    return SimpleNamespace(structured_outputs_config=SimpleNamespace(backend=backend), **config)


def offline(refusals, backend, structured_outputs):
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=engine(backend)))
    params = SimpleNamespace(structured_outputs=structured_outputs)
    return refusals.beam_search(lambda *args, **kwargs: (args[1:], kwargs))(llm, ["p"], params, use_tqdm=True)


def test_offline_beam_search_with_a_lazy_grammar_is_refused(refusals):
    with refused() as caught:
        offline(refusals, "lazy", REGEX)
    assert caught.value.parameter == "structured_outputs"


@pytest.mark.parametrize(("backend", "structured"), [("lazy", None), ("xgrammar", REGEX)])
def test_other_offline_beam_searches_reach_vllm_as_given(refusals, backend, structured):
    (prompts, params), kwargs = offline(refusals, backend, structured)
    assert (prompts, params.structured_outputs, kwargs) == (["p"], structured, {"use_tqdm": True})


def start(refusals, config):
    return refusals.creating_config(lambda self, *args: config)(object())


def test_a_start_with_a_wrong_setting_is_refused(refusals):
    with pytest.raises(SettingsError, match=r"additional_config\.lazy_grammar\.prewarm"):
        start(refusals, engine("lazy", additional_config={"lazy_grammar": {"prewarm": "yes"}}))


def test_a_start_with_the_rust_front_end_is_refused(refusals, monkeypatch):
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(SettingsError, match="VLLM_USE_RUST_FRONTEND"):
        start(refusals, engine("lazy", additional_config={}))


def test_a_lazy_start_says_what_is_installed_and_set(refusals, monkeypatch):
    lines = []
    monkeypatch.setattr(refusals.logger, "info", lambda text, *args: lines.append(text % args))
    lazy = engine("lazy", additional_config={"lazy_grammar": {"prewarm_top_k": 7}})
    refusals.creating_config(lambda self: lazy, installed=lambda: ["a", "b"])(object())
    (line,) = lines
    assert "2 names" in line
    assert "prewarm_top_k=7" in line


def test_any_other_start_gets_its_configuration(refusals, monkeypatch):
    lazy = engine("lazy", additional_config={})
    assert start(refusals, lazy) is lazy
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    other = engine("auto", additional_config={"lazy_grammar": {"prewarm": "yes"}})
    assert start(refusals, other) is other


def test_an_error_of_a_request_becomes_vllms_with_field_and_value_and_a_long_value_is_cut():
    from vllm_lazy_grammar.adapter.client_errors import as_client_errors

    with refused() as caught, as_client_errors():
        raise RequestError("vllm_xargs.grammar_start", "x" * 5_000, "this is one of trigger, after")
    assert caught.value.parameter == "vllm_xargs.grammar_start"
    text = str(caught.value)
    assert text.startswith("vllm_xargs.grammar_start: this is one of trigger, after (got 'xxx")
    assert len(text) < 400
