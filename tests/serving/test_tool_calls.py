"""Tool calls on a running server (`spec/tool-calls.md`): what the model would write is wished for, what it may not write it can not.

The demo model speaks no family's format, so a family is its text here: vLLM's own parser of that family finds the calls.
"""

from __future__ import annotations

import functools
import json

import openai
import pytest

from tests.serving.asking import all_at_once
from tests.serving.calling import (
    NOTHING,
    TOOLS,
    WEATHER,
    RefusedError,
    ask,
    call,
    is_valid,
    is_weather,
    message_call,
    named,
    respond_call,
    streamed_call,
    tool,
)
from tests.serving.servers import HERMES, MODEL, calling
from tests.serving.wishes import spell, spelled_out, tokens

hermes = pytest.mark.server(HERMES)

STOP = 2
THINK, END_THINK, CALL = 8, 10, 11
"""Ids of `<think>`, `</think>` and `<tool_call>` in the `thinking` model."""

PROSE = "Well, let me see. "
CALL_TEXT = "<tool_call>"


def written(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


GET = written("get", "{}")
PARIS = written("get_weather", '{"city": "Paris", "days": 3}')


def wish(*texts):
    return [token for text in texts for token in spell(text)] + [STOP]


# -- auto ------------------------------------------------------------------------------------------------------------


@hermes
def test_c1_a_call_obeys_its_tools_schema_though_no_client_said_strict(server):
    wrong = written("get_weather", '{"city": "Paris", "days": "three"}')
    answer = call(server, wishes=wish(PROSE, wrong))
    assert answer.content.startswith(PROSE.rstrip())
    (found,) = answer.calls[:1]
    assert found[0] == "get_weather"
    assert is_weather(found[1]), found


@hermes
def test_a_valid_call_is_what_the_model_wrote_word_for_word(server):
    answer = call(server, wishes=wish(PROSE, PARIS))
    assert answer.calls == [("get_weather", '{"city": "Paris", "days": 3}')]
    assert (answer.content.strip(), answer.finish) == (PROSE.strip(), "tool_calls")


@hermes
def test_a_tool_that_the_request_does_not_have_can_not_be_called(server):
    answer = call(server, wishes=wish(written("delete_all", "{}")), max_tokens=220)
    assert answer.calls
    assert {name for name, _ in answer.calls} <= {"get", "get_weather"}


@hermes
def test_prose_is_what_it_is_without_tools_to_call(server):
    plain = call(server, "none", max_tokens=60)
    assert plain.content
    assert call(server, "auto", max_tokens=60) == plain


@hermes
def test_t7_prose_call_prose_call_stop(server):
    wrong = written("get_weather", '{"city": "Rome", "days": 30}')
    answer = call(server, wishes=wish(PROSE, GET, "\nAnd then ", wrong), max_tokens=260)
    assert answer.calls[0] == ("get", "{}")
    assert len(answer.calls) >= 2
    assert all(is_valid(each) for each in answer.calls)


@hermes
def test_the_turn_may_end_behind_a_call(server):
    assert call(server, wishes=wish(GET)).finish == "tool_calls"


@hermes
@pytest.mark.parametrize("quote", ["`", '"', "'"])
def test_t11_a_quoted_opener_is_prose(server, quote):
    text = f"Write {quote}<tool_call>{quote} before a call."
    assert call(server, wishes=wish(text)).content == text


@hermes
def test_c5_a_model_that_repeats_its_call_for_ever_gets_sixteen(server):
    again = tokens(GET + "\n")
    answer = call(server, wishes=again * 30, max_tokens=1200)
    assert answer.calls == [("get", "{}")] * 16
    assert answer.finish == "tool_calls"


@hermes
@pytest.mark.parametrize("choice", ["auto", "required", named("get")])
def test_c6_without_parallel_calls_there_is_one(server, choice):
    answer = call(server, choice, wishes=wish(GET, "\n", GET), parallel_tool_calls=False)
    assert answer.calls == [("get", "{}")]
    assert answer.finish in ("tool_calls", "stop")


@hermes
def test_c7_names_are_exactly_those_of_the_request(server):
    odd = 'a.b-c"é'
    tools = [tool("get", NOTHING), tool("get_weather", NOTHING), tool(odd, NOTHING)]
    for name in ("get", "get_weather", odd):
        spelled = json.dumps(name, ensure_ascii=False)[1:-1]
        answer = call(server, tools=tools, wishes=[*tokens(written(spelled, "{}")), STOP])
        assert answer.calls == [(name, "{}")]


@hermes
def test_w2_a_call_without_parameters_is_two_braces_and_the_end(server):
    blanks = written("get", "{" + "\n" * 60)
    answer = call(server, wishes=wish(blanks), max_tokens=200)
    assert answer.calls[0] == ("get", "{}")


# -- required and named ----------------------------------------------------------------------------------------------


@hermes
@pytest.mark.parametrize("choice", ["required", named("get_weather"), named("get")])
def test_a_call_that_must_come_comes_behind_free_prose_and_streams_as_it_is(server, choice):
    whole = call(server, choice)
    assert whole.content
    assert whole.calls
    assert all(is_valid(each) for each in whole.calls)
    if choice != "required":
        assert {name for name, _ in whole.calls} == {choice["function"]["name"]}
    parts = streamed_call(server, choice)
    assert (parts.calls, parts.content.strip()) == (whole.calls, whole.content.strip())


@hermes
def test_a_turn_that_owes_a_call_can_not_end_before_it_and_the_prose_is_that_of_auto(server):
    free = call(server, "auto", wishes=[*tokens(PROSE), STOP])
    assert free == (PROSE, [], "stop")
    owed = call(server, "required", wishes=[*tokens(PROSE), STOP])
    assert owed.content.startswith(PROSE)
    assert owed.calls
    assert all(is_valid(each) for each in owed.calls)


@hermes
def test_c4_prose_is_free_up_to_force_after_and_then_the_call_comes(server):
    prose = tokens("word " * 400)
    answer = call(server, named("get"), wishes=prose, max_tokens=512)
    assert answer.calls == [("get", "{}")]
    assert answer.content.rstrip() == ("word " * 200)[: len(answer.content.rstrip())]
    assert len(tokens(answer.content)) in range(126, 130)


@hermes
@pytest.mark.parametrize("choice", ["required", named("get_weather")])
@pytest.mark.parametrize("budget", [36, 50, 90])
def test_a_call_that_is_owed_fits_into_what_is_left(server, choice, budget):
    tools = [tool("get_weather")]
    answer = call(server, choice, tools, wishes=tokens("word " * 100), max_tokens=budget)
    assert all(is_weather(arguments) for _, arguments in answer.calls)
    assert answer.calls
    assert answer.finish in ("tool_calls", "stop")
    parts = streamed_call(server, choice, tools, wishes=tokens("word " * 100), max_tokens=budget)
    assert parts.calls
    assert all(is_weather(arguments) for _, arguments in parts.calls)


@hermes
def test_an_answer_that_goes_on_behind_the_call_that_was_owed_ends_with_the_budget(server):
    answer = call(server, "required", wishes=[*tokens(GET), *tokens(" word" * 100)], max_tokens=60)
    assert answer.calls == [("get", "{}")]
    assert answer.finish == "tool_calls"


@hermes
def test_no_call_is_begun_that_would_be_cut(server):
    answer = call(server, "auto", wishes=[*tokens("word " * 25), *tokens(PARIS)], max_tokens=40)
    assert answer.calls == []
    assert answer.content.startswith("word word")


@hermes
def test_a_second_call_of_a_named_function_needs_parallel_calls(server):
    twice = wish(GET, "\n", GET)
    assert call(server, named("get"), wishes=twice).calls == [("get", "{}")] * 2
    assert call(server, named("get"), wishes=twice, parallel_tool_calls=False).calls == [("get", "{}")]


@hermes
@pytest.mark.parametrize("stream", [False, True])
def test_c9_responses_and_messages_call_too(server, stream):
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get"}]}
    (found,) = respond_call(server, "required", stream=stream).calls
    assert is_valid(found)
    assert respond_call(server, {"type": "function", "name": "get"}, stream=stream).calls[0] == ("get", "{}")
    assert respond_call(server, allowed, stream=stream).calls[0] == ("get", "{}")
    assert is_valid(message_call(server, {"type": "any"}, stream=stream).calls[0])
    assert message_call(server, {"type": "tool", "name": "get"}, stream=stream).calls[0] == ("get", "{}")


# -- none, and formats -----------------------------------------------------------------------------------------------


@hermes
def test_c8_under_none_the_opener_can_not_be_written(server):
    answer = call(server, "none", wishes=wish(PROSE, PARIS))
    assert answer.content.startswith(PROSE + "<tool_call")
    assert "<tool_call>" not in answer.content
    assert (answer.calls, answer.finish) == ([], "stop")


@hermes
def test_c10_beside_a_format_there_is_a_call_or_an_answer_in_it(server):
    number = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": number}}
    answer = call(server, wishes=wish('{"n": 7}'), response_format=form)
    assert (answer.content, answer.calls, answer.finish) == ('{"n": 7}', [], "stop")
    answer = call(server, wishes=wish(PARIS), response_format=form)
    assert answer.calls == [("get_weather", '{"city": "Paris", "days": 3}')]
    prose = call(server, wishes=wish(PROSE), response_format=form)
    assert prose.calls or isinstance(json.loads(prose.content)["n"], int)


# -- mistakes --------------------------------------------------------------------------------------------------------


@hermes
@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_in_a_tool_is_a_400_that_names_it_and_nothing_else_is_lost(server, stream):
    broken = tool("bad_one", {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}})
    ask = streamed_call if stream else call
    for tools, says in (
        ([*TOOLS, broken], "'bad_one'"),
        ([*TOOLS, TOOLS[0]], "'get_weather'"),
        ([tool("", NOTHING)], "needs a name"),
        ([tool(f"t{i}", NOTHING) for i in range(2000)], "'t1024'"),
    ):
        with pytest.raises(openai.BadRequestError, match=says):
            ask(server, "required", tools)
    assert ask(server, "required", wishes=wish(GET)).calls[:1] == [("get", "{}")]


# -- every endpoint --------------------------------------------------------------------------------------------------

everywhere = [
    pytest.mark.parametrize("endpoint", ["chat", "responses", "messages"]),
    pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"]),
]


def on_every_endpoint(test):
    for mark in everywhere:
        test = mark(test)
    return test


NUMBER = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
BROKEN = tool("bad_one", {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}})
STRICT = [{"type": "function", "function": {**each["function"], "strict": True}} for each in TOOLS]


@hermes
@on_every_endpoint
@pytest.mark.parametrize("tools", [TOOLS, STRICT], ids=["plain", "strict"])
def test_c1_a_call_obeys_its_tools_schema_on_every_endpoint(server, endpoint, stream, tools):
    wrong = written("get_weather", '{"city": "Paris", "days": "three"}')
    answer = ask(endpoint, server, "auto", tools, wish(PROSE, wrong), stream=stream)
    assert answer.content.startswith(PROSE.rstrip())
    assert answer.calls[0][0] == "get_weather"
    assert is_weather(answer.calls[0][1]), answer


@hermes
@on_every_endpoint
def test_c6_without_parallel_calls_there_is_one_on_every_endpoint(server, endpoint, stream):
    for choice in ("auto", "required"):
        for parallel, count in ((True, 2), (False, 1)):
            answer = ask(endpoint, server, choice, wishes=wish(GET, "\n", GET), stream=stream, parallel=parallel)
            assert answer.calls == [("get", "{}")] * count, (choice, answer)


@hermes
@on_every_endpoint
def test_c8_under_none_the_opener_can_not_be_written_on_any_endpoint(server, endpoint, stream):
    answer = ask(endpoint, server, "none", wishes=wish(PROSE, PARIS), stream=stream)
    assert answer.content.startswith(PROSE + "<tool_call")
    assert "<tool_call>" not in answer.content
    assert answer.calls == []


@hermes
@on_every_endpoint
def test_c10_beside_a_format_there_is_a_call_or_an_answer_in_it_on_every_endpoint(server, endpoint, stream):
    answer = ask(endpoint, server, "auto", wishes=wish('{"n": 7}'), stream=stream, schema=NUMBER)
    assert (answer.content, answer.calls) == ('{"n": 7}', [])
    answer = ask(endpoint, server, "auto", wishes=wish(PARIS), stream=stream, schema=NUMBER)
    assert answer.calls == [("get_weather", '{"city": "Paris", "days": 3}')]


@hermes
@on_every_endpoint
def test_a_mistake_in_a_tool_is_a_400_that_names_it_on_every_endpoint(server, endpoint, stream):
    with pytest.raises((openai.BadRequestError, RefusedError), match="bad_one") as caught:
        ask(endpoint, server, "required", [*TOOLS, BROKEN], stream=stream)
    assert 400 in (getattr(caught.value, "status_code", None), *caught.value.args[:1])


@hermes
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_c5_and_c7_hold_in_a_stream_too(server, stream):
    asked = streamed_call if stream else call
    assert asked(server, wishes=tokens(GET + "\n") * 30, max_tokens=1200).calls == [("get", "{}")] * 16
    odd = "a.b-cé"  # vLLM's parser of this family ends a streamed name at an escaped quotation mark
    tools = [tool("get", NOTHING), tool(odd, NOTHING)]
    assert asked(server, tools=tools, wishes=[*tokens(written(odd, "{}")), STOP]).calls == [(odd, "{}")]


# -- stop strings, and the finish reason -----------------------------------------------------------------------------


@hermes
@pytest.mark.parametrize("asked", [call, streamed_call])
@pytest.mark.parametrize("choice", ["auto", "required", named("get")])
def test_an_answer_that_a_stop_string_cuts_before_its_call_claims_none(server, choice, asked):
    answer = asked(server, choice, wishes=[*tokens(PROSE), STOP], stop=["me"])
    assert answer == ("Well, let ", [], "stop")


@hermes
@pytest.mark.parametrize("asked", [call, streamed_call])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_an_answer_that_a_stop_string_cuts_inside_its_second_call_does_not_claim_to_end_with_calls(
    server, choice, asked
):
    answer = asked(server, choice, wishes=wish(GET, "\n", PARIS), stop=["Par"])
    assert "Par" not in answer.content + str(answer.calls)
    assert answer.finish == "stop"
    assert asked(server, choice, wishes=wish(GET, "\n", PARIS), stop=["Rome"]).finish == "tool_calls"


@hermes
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_messages_api_says_which_stop_string_cut_an_answer_before_its_call(server, stream):
    wishes = [*tokens(PROSE), STOP]
    answer = message_call(server, {"type": "any"}, wishes=wishes, stream=stream, stop_sequences=["me"])
    assert answer == ("Well, let ", [], "stop_sequence")


# -- the prose of auto and of required -------------------------------------------------------------------------------

PROMPTS = [
    *(f"Say hello to {name}." for name in ("Ann", "Bob", "Cleo", "Dan", "Eve")),
    *(f"What is {n} plus {n}? One word." for n in range(1, 6)),
    *(f"Name one {kind}. Only its name." for kind in ("colour", "city", "animal", "fruit", "river")),
    *(f"Translate '{word}' into French, nothing else." for word in ("dog", "cat", "house", "bread", "water")),
]


@hermes
def test_the_answer_up_to_the_trigger_is_what_it_would_have_been_under_auto(server):
    """Auto has 40 tokens in which to end by itself; required 60 of prose, the half of its budget, before the call is led into."""

    def ids(choice, max_tokens, prompt):
        create = server.client.chat.completions.create
        messages = [{"role": "user", "content": prompt}]
        options = {"max_tokens": max_tokens, "temperature": 0, "extra_body": {"return_token_ids": True}}
        answer = create(model=MODEL, messages=messages, tools=TOOLS, tool_choice=choice, **options)
        return answer.choices[0].token_ids

    free = dict(zip(PROMPTS, all_at_once([functools.partial(ids, "auto", 40, p) for p in PROMPTS]), strict=True))
    ended = {p: found[:-1] for p, found in free.items() if found[-1] == STOP and CALL_TEXT not in spelled_out(found)}
    owed = all_at_once([functools.partial(ids, "required", 120, prompt) for prompt in ended])
    for (prompt, prose), found in zip(ended.items(), owed, strict=True):
        assert found[: len(prose)] == prose, prompt
        assert CALL_TEXT in spelled_out(found[len(prose) :]), prompt
    assert len(ended) >= 10


# -- other families --------------------------------------------------------------------------------------------------

CITIES = {**WEATHER, "properties": {**WEATHER["properties"], "city": {"enum": ["Paris", "Rome"]}}}
"""What every family can hold a call to: minimax_m3's format counts no characters (such a tool is a 400 that names it)."""

FAMILIES = ("qwen3_coder", "gemma4", "minimax_m3", "granite4")


def _family(parser):
    """Each needs a server of its own: one is started in CI, the others by `scripts/test --long`."""
    marks = [pytest.mark.server(calling(parser)), *([] if parser == FAMILIES[0] else [pytest.mark.long])]
    return pytest.param(parser, marks=marks)


@pytest.mark.parametrize("parser", [_family(name) for name in FAMILIES])
@pytest.mark.parametrize("choice", ["required", named("get_weather")])
def test_c2_hello_under_required_is_a_valid_call_that_the_familys_parser_gives_back(server, parser, choice):
    tools = [tool("get_weather", CITIES), tool("get", NOTHING)]
    answer = call(server, choice, tools, prompt="hello", max_tokens=256)
    assert answer.calls, answer
    assert all(is_valid(each) for each in answer.calls), answer
    parts = streamed_call(server, choice, tools, prompt="hello", max_tokens=256)
    assert [(name, json.loads(text)) for name, text in parts.calls] == [(n, json.loads(t)) for n, t in answer.calls]


THINKING = calling("qwen3_coder", "thinking", "--reasoning-parser", "qwen3")
thinking = pytest.mark.server(THINKING)
CODER = [
    "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n",
    "\n</parameter>\n</function>\n</tool_call>",
]


@thinking
def test_c3_a_turn_that_owes_a_call_can_not_end_inside_its_reasoning(server):
    wishes = [THINK, *tokens("hm "), STOP, STOP, END_THINK, *tokens("So: "), STOP]
    answer = call(server, "required", wishes=wishes, max_tokens=256)
    assert answer.calls
    assert all(is_valid(each) for each in answer.calls)


@thinking
def test_t6b_a_call_inside_the_reasoning_ends_it_and_obeys_the_schema(server):
    wishes = [THINK, *tokens("hm "), CALL, *spell("\n" + CODER[0] + "many" + CODER[1]), STOP]
    answer = call(server, wishes=wishes, max_tokens=200)
    assert answer.calls[0][0] == "get_weather"
    assert is_weather(answer.calls[0][1]), answer


@thinking
@on_every_endpoint
def test_behind_the_reasoning_a_call_is_found_on_every_endpoint(server, endpoint, stream):
    wishes = [THINK, *tokens("hm "), END_THINK, *tokens("So: "), CALL, *spell("\n" + CODER[0] + "30" + CODER[1]), STOP]
    answer = ask(endpoint, server, "auto", wishes=wishes, stream=stream)
    # Where several tokens come in one part of a stream, vLLM's parser of this family takes a piece of the opener for prose.
    assert answer.content.strip() == "So:" or (stream and answer.content.startswith("So:"))
    assert [name for name, _ in answer.calls[:1]] == ["get_weather"]
    assert is_weather(answer.calls[0][1]), answer


@thinking
def test_behind_the_reasoning_a_call_is_found_whole_and_streamed(server):
    wishes = [THINK, *tokens("hm "), END_THINK, *tokens("So: "), CALL, *spell("\n" + CODER[0] + "3" + CODER[1]), STOP]
    whole, parts = call(server, wishes=wishes), streamed_call(server, wishes=wishes)
    assert [(name, json.loads(text)) for name, text in whole.calls] == [("get_weather", {"city": "Rome", "days": 3})]
    assert [(name, json.loads(text)) for name, text in parts.calls] == [("get_weather", {"city": "Rome", "days": 3})]
    assert whole.content.strip() == parts.content.strip() == "So:"
