"""What a running server refuses: status 400 with field and value, the engine alive afterwards (cases T12, B1, B2, and the spec's list)."""

from __future__ import annotations

import openai
import pytest

from tests.serving.servers import LAZY, MODEL, lazy

pytestmark = pytest.mark.server(LAZY)

REGEX = {"regex": "<t>[0-9]+"}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}


def chat(server, body, **options):
    messages = [{"role": "user", "content": "Say hi."}]
    options = {"max_tokens": 4, "temperature": 0, **options}
    return server.client.chat.completions.create(model=MODEL, messages=messages, extra_body=body, **options)


def complete(server, body, **options):
    options = {"max_tokens": 4, "temperature": 0, **options}
    return server.client.completions.create(model=MODEL, prompt="hi", extra_body=body, **options)


def respond(server, body, **options):
    return server.client.responses.create(model=MODEL, input="hi", max_output_tokens=16, extra_body=body, **options)


def refused(call, server, body, **options):
    """The error of a request that is refused; the server serves the next one."""
    with pytest.raises(openai.BadRequestError) as caught:
        call(server, body, **options)
    assert chat(server, {}).choices[0].message.content
    return caught.value.body


@pytest.mark.parametrize("call", [chat, complete, respond])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("grammar", 'root ::= "a"'),
        ("grammar_lazy", True),
        ("grammar_triggers", [{"type": "word", "value": "<t>"}]),
    ],
)
def test_t12_llama_cpps_top_level_fields_are_a_400_that_names_vllm_xargs(server, call, field, value):
    error = refused(call, server, {field: value})
    assert error["param"] == field
    assert "vllm_xargs" in error["message"]
    assert repr(value) in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("grammar", 'root ::= "a"'),
        ("grammar_triggers", [{"type": "word", "value": "<t>"}]),
        ("structured_outputs", REGEX),
        ("response_format", {"type": "json_object"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_t12_the_messages_api_refuses_the_fields_that_it_would_drop(server, field, value, stream):
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": "Say hi."}], field: value, "stream": stream}
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.post("/messages", body={"model": MODEL, **body}, cast_to=object)
    message = caught.value.body["message"]
    assert message.startswith(f"{field}: is not read here")
    assert repr(value) in message


def test_the_messages_api_serves_what_has_none_of_them(server):
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Say hi."}]}
    assert server.client.post("/messages", body=body, cast_to=object)["content"]


@pytest.mark.parametrize(
    ("xargs", "field", "value"),
    [
        ({"grammar_triggers": ["wort:<t>"]}, "grammar_triggers[0]", "wort:<t>"),
        ({"grammar_triggers": ["word:<t>", "word:"]}, "grammar_triggers[1]", "word:"),
        ({"grammar_triggers": ["pattern:(<t>"]}, "grammar_triggers[0]", "pattern:(<t>"),
        ({"grammar_triggers": ["pattern:(?:<t>)*"]}, "grammar_triggers[0]", "pattern:(?:<t>)*"),
        ({"grammar_triggers": ["pattern:" + "(" * 2000 + "a" + ")" * 2000]}, "grammar_triggers[0]", "((((("),
        ({"grammar_triggers": ["token:two words"]}, "grammar_triggers[0]", "token:two words"),
        ({"grammar_triggers": ["token:999999"]}, "grammar_triggers[0]", "token:999999"),
        ({"grammar_triggers": ["token:-1"]}, "grammar_triggers[0]", "token:-1"),
        ({"grammar_triggers": ["token:<|im_end|>"]}, "grammar_triggers[0]", "token:<|im_end|>"),
        ({"grammar_triggers": []}, "grammar_triggers", "[]"),
        ({"grammar_triggers": ["word:<t>"], "grammar_start": "before"}, "grammar_start", "before"),
        ({"grammar_triggers": ["word:<t>"], "grammar_mandatory": 2}, "grammar_mandatory", "2"),
        ({"grammar_triggers": ["word:<t>"], "grammar_force_after": 3}, "grammar_force_after", "3"),
        ({"grammar_triggers": ["word:<t>"], "grammar_max_activations": 3}, "grammar_max_activations", "3"),
        ({"grammar_triggers": ["word:<t>"], "grammar_on_reject": "shout"}, "grammar_on_reject", "shout"),
        ({"grammar_triggers": ["word:<t>"], "grammar_triger": 1}, "grammar_triger", "1"),
        (
            {"grammar_triggers": ["pattern:<t>"], "grammar_mandatory": 1, "grammar_force_after": 3},
            "grammar_force_after",
            "3",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_the_spec_refuses_is_a_400_that_names_field_and_value(server, xargs, field, value):
    error = refused(chat, server, {"structured_outputs": REGEX, "vllm_xargs": xargs})
    assert error["param"] == f"vllm_xargs.{field}"
    assert value in error["message"]


def test_triggers_without_a_structured_output_are_a_400(server):
    error = refused(chat, server, {"vllm_xargs": {"grammar_triggers": ["word:<t>"]}})
    assert error["param"] == "vllm_xargs.grammar_triggers"
    assert "word:<t>" in error["message"]


def test_t5_a_grammar_that_can_never_take_the_triggers_text_is_a_400_at_once(server):
    body = lazy({"json": {"type": "object"}}, "word:</think>")
    error = refused(chat, server, body)
    assert error["param"] == "vllm_xargs.grammar_triggers[0]"
    assert "word:</think>" in error["message"]
    assert chat(server, lazy({"json": {"type": "object"}}, "word:</think>", grammar_start="after")).choices


@pytest.mark.parametrize("call", [chat, complete])
@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": REGEX},
        {"response_format": {"type": "json_object"}},
        lazy(REGEX, "word:<t>"),
        {"vllm_xargs": {"grammar_triggers": ["word:<t>"]}},
    ],
    ids=["structured_outputs", "response_format", "lazy", "triggers"],
)
def test_beam_search_with_a_grammar_or_triggers_is_a_400(server, call, body):
    assert "beam search" in refused(call, server, {**body, "use_beam_search": True})["message"]


def test_beam_search_with_tools_is_a_400(server):
    with pytest.raises(openai.BadRequestError, match="beam search"):
        chat(server, {"use_beam_search": True, "n": 2}, tools=[TOOL], tool_choice="auto")


def test_beam_search_without_a_grammar_is_served(server):
    assert len(chat(server, {"use_beam_search": True, "n": 2}).choices) == 2


def test_a_schema_that_no_engine_can_express_is_a_400_that_names_field_and_value(server):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    error = refused(chat, server, {"structured_outputs": {"json": schema}})
    assert error["param"] == "structured_outputs.json"
    assert "uniqueItems" in error["message"]


def nested_schema(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def repeated(levels):
    pattern = "a"
    for _ in range(levels):
        pattern = f"(?:{pattern}){{1,129}}"
    return pattern


BIG_SCHEMA = {
    "type": "object",
    "properties": {f"k{i}": {"type": "string", "enum": ["x" * 100] * 10} for i in range(5_000)},
}

HARD = {
    "quantifiers in quantifiers": {"regex": repeated(6)},
    "two thousand groups": {"regex": "(" * 2_000 + "a" + ")" * 2_000},
    "two hundred levels": {"json": nested_schema(200)},
    "five hundred levels": {"json": '{"type": "object", "properties": {"a": ' * 500 + "{}" + "}}" * 500},
    "five hundred lists": {"json": '{"enum": [' + "[" * 500 + "]" * 500 + "]}"},
    "five megabytes": {"json": BIG_SCHEMA},
    "a NUL in a grammar": {"grammar": 'root ::= "a\0b"'},
    "a NUL in a regex": {"regex": "a\0b"},
    "an undefined rule": {"grammar": "root ::= nothing"},
    "left recursion": {"grammar": 'root ::= root "a"'},
    "no JSON": {"json": "{"},
    "a wrong structural tag": {"structural_tag": '{"type": "nothing"}'},
}


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "lazy"])
@pytest.mark.parametrize("structured", HARD.values(), ids=HARD.keys())
def test_b2_a_hard_grammar_is_served_or_a_400_with_a_reason_and_the_engine_lives(server, structured, eager):
    body = lazy(structured) if eager else lazy(structured, "word:<t>", grammar_start="after")
    try:
        answer = chat(server, body)
    except openai.BadRequestError as error:
        assert error.body["message"]  # noqa: PT017 -- either outcome is right, a server's error is not
    else:
        assert answer.choices
    assert chat(server, {}).choices[0].message.content


def test_b1_a_grammar_that_defines_root_twice_is_a_400_and_the_engine_serves_the_next(server):
    assert chat(server, lazy({"grammar": 'root ::= "a" | "b"'})).choices[0].message.content in ("a", "b")
    with pytest.raises(openai.BadRequestError):
        chat(server, lazy({"grammar": 'root ::= "a"\nroot ::= "b"'}))
    assert chat(server, lazy({"grammar": 'root ::= "c" | "d"'})).choices[0].message.content in ("c", "d")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lazy(REGEX, "word:<t>", grammar_start="before"), r"vllm_xargs\.grammar_start"),
        (lazy(REGEX, "token:999999"), r"vllm_xargs\.grammar_triggers\[0\]"),
        (lazy({"regex": "("}), "regex"),
        ({"grammar_lazy": True}, "vllm_xargs"),
    ],
)
@pytest.mark.parametrize("call", [chat, complete, respond])
def test_a_streamed_request_is_refused_with_a_400_too_before_anything_is_streamed(server, call, body, message):
    with pytest.raises(openai.BadRequestError, match=message):
        call(server, body, stream=True)


def test_the_log_says_what_is_installed_and_set(server):
    assert "Lazy grammars are on: " in server.log()
    assert "prewarm=True" in server.log()
