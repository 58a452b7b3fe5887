"""What a client is told whose request the engine ends: the field, the value and the reason, in the error's body and in a stream's error event."""

from __future__ import annotations

import re
import time

import openai
import pytest

from tests.serving.asking import ASK_PERSON, PERSON, chat_args, is_person
from tests.serving.asking import chat as answer
from tests.serving.servers import MODEL, WISHES, lazy
from tests.serving.wishes import spell, tokens

pytestmark = pytest.mark.server(WISHES)

STOP = 2
RUNAWAY = "(?:a|aa)+b$"


def chat(server, body, wishes, **options):
    return server.client.chat.completions.create(**chat_args("Say hi.", body, wishes, options))


def complete(server, body, wishes, **options):
    body = {**body, "vllm_xargs": {**body.get("vllm_xargs", {}), "wishes": wishes}}
    options = {"max_tokens": 48, "temperature": 0, **options}
    return server.client.completions.create(model=MODEL, prompt="hi", extra_body=body, **options)


def respond(server, body, wishes):
    body = {**body, "vllm_xargs": {**body.get("vllm_xargs", {}), "wishes": wishes}}
    return server.client.responses.create(model=MODEL, input="hi", max_output_tokens=64, extra_body=body)


ENDED = {
    "a trigger pattern that runs away": (
        lazy({"regex": "a+"}, f"pattern:{RUNAWAY}", grammar_start="after"),
        [*spell("a" * 60), *tokens("!"), STOP],
        {"max_tokens": 64},
        ("vllm_xargs.grammar_triggers", RUNAWAY, "trigger_timeout_ms"),
    ),
    "a refused replay under on_reject error": (
        lazy({"regex": "<t>[0-9]{2}"}, "pattern:<t>.", grammar_on_reject="error"),
        [*tokens("so <t>"), *spell("x"), STOP],
        {},
        ("vllm_xargs.grammar_on_reject", "'error'", "<t>x"),
    ),
    "stop ids that leave no token": (
        {**lazy({"regex": "a"}), "stop_token_ids": sorted({*tokens("a")})},
        [-1],
        {},
        ("stop_token_ids", str(tokens("a")[0]), "no token is left"),
    ),
    "allowed ids that leave no token": (
        {**lazy({"regex": "[0-9]+"}), "allowed_token_ids": tokens("x")},
        [-1],
        {},
        ("allowed_token_ids", str(tokens("x")[0]), "leave no token"),
    ),
}


@pytest.mark.parametrize("ending", ENDED.values(), ids=ENDED.keys())
@pytest.mark.parametrize("call", [chat, complete])
def test_a_request_that_the_engine_ends_is_a_400_that_names_field_value_and_reason(server, call, ending):
    body, wishes, options, (field, value, reason) = ending
    with pytest.raises(openai.BadRequestError) as caught:
        call(server, body, wishes, **options)
    error = caught.value.body
    assert error["param"] == field
    assert error["type"] == "BadRequestError"
    assert value in error["message"]
    assert reason in error["message"]
    assert error["message"].startswith(f"{field}: ")
    assert is_person(answer(server, ASK_PERSON, lazy({"json": PERSON})).text)


@pytest.mark.parametrize("name", [name for name in ENDED if "allowed" not in name])  # which the Responses API has not
def test_the_responses_api_tells_the_same(server, name):
    body, wishes, _, (field, value, reason) = ENDED[name]
    with pytest.raises(openai.BadRequestError) as caught:
        respond(server, body, wishes)
    assert caught.value.body["param"] == field
    assert value in caught.value.body["message"]
    assert reason in caught.value.body["message"]


@pytest.mark.parametrize("ending", ENDED.values(), ids=ENDED.keys())
@pytest.mark.parametrize("call", [chat, complete])
def test_a_streams_error_event_names_field_value_and_reason_as_a_bad_request(server, call, ending):
    body, wishes, options, (field, value, reason) = ending
    with pytest.raises(openai.APIError) as caught:
        list(call(server, body, wishes, stream=True, **options))
    error = caught.value.body
    assert error["param"] == field
    assert error["type"] == "BadRequestError"
    assert error["code"] == 400
    assert value in error["message"]
    assert reason in error["message"]


def test_a_compile_that_fails_in_the_engine_is_a_400_too_for_eager_and_lazy_requests(server):
    grammar = {
        "grammar": 'root ::= other\nother ::= other "a"\n' + "# long enough to be only read by the front end\n" * 400
    }
    for call in (chat, complete):
        with pytest.raises(openai.BadRequestError, match="allows nothing") as caught:
            call(server, lazy(grammar), [-1])
        assert caught.value.body["param"] == "structured_outputs.grammar"
    with pytest.raises(openai.BadRequestError, match="allows nothing"):
        chat(server, lazy(grammar, "word:<t>", grammar_start="after"), tokens("so <t>x"))
    assert chat(server, lazy(grammar, "word:<t>", grammar_start="after"), [*tokens("so"), STOP]).choices


@pytest.mark.parametrize("ending", ENDED.values(), ids=ENDED.keys())
def test_the_log_has_one_line_of_ours_with_the_requests_id_field_and_value(server, ending):
    body, wishes, options, (field, value, _) = ending
    before = len(server.log())
    name = f"told-{time.monotonic_ns()}"
    with pytest.raises(openai.BadRequestError):
        chat(server, body, wishes, extra_headers={"X-Request-Id": name}, **options)
    (line,) = re.findall(r"Request .* is ended.*", server.log()[before:])
    assert re.match(rf"Request \S*{name}\S* is ended by its grammar: {re.escape(field)}: ", line), line
    assert value in line
