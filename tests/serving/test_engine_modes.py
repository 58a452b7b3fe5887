"""The same two requests, one lazy and one eager, in every way that vLLM runs an engine (issue: "end to end with").

Data and tensor parallel take long to start and stand under `long`.
"""

from __future__ import annotations

import functools
import json
import re

import openai
import pytest

from tests.serving.asking import (
    ASK_PERSON,
    PERSON,
    Said,
    all_at_once,
    chat,
    is_person,
    metric,
    metrics,
    wait_until_idle,
)
from tests.serving.calling import ASK, TOOLS, named
from tests.serving.servers import (
    API_SERVERS_2,
    ASYNC,
    DATA_PARALLEL_2,
    MODEL,
    STOCK,
    TENSOR_PARALLEL_2,
    TIGHT,
    XGRAMMAR,
    Server,
    lazy,
)
from tests.serving.wishes import spell, tokens

STOP = 2
TAG = {"grammar": 'root ::= "<t>" [0-9] [0-9]'}
LONG_PROSE = tokens(" and so on" * 40)

tight = pytest.mark.server(TIGHT)


def eager(server):
    return chat(server, ASK_PERSON, lazy({"json": PERSON}), wishes="I write prose.")


def lazily(server, grammar=TAG):
    wishes = [*tokens("so "), *tokens("<t>"), *spell("ab"), STOP]
    return chat(server, body=lazy(grammar, "word:<t>"), wishes=wishes)


def assert_right(answers):
    """Answers of `eager` and `lazily`, in turn."""
    for said in answers[::2]:
        assert is_person(said.text), said
        assert said.finish == "stop"
    for said in answers[1::2]:
        assert re.fullmatch("so <t>[0-9]{2}", said.text), said
        assert said.finish == "stop"


def right_together(server, times=4):
    """Several of both at once."""
    jobs = [functools.partial(ask, server) for ask in (eager, lazily)] * times
    answers = all_at_once(jobs)
    assert [said for said in answers if not isinstance(said, Said)] == []
    assert_right(answers)


@pytest.mark.server(ASYNC)
def test_under_async_scheduling(server):
    right_together(server)
    assert eager(server) == eager(server)
    assert "lazy-grammar-tests: AsyncScheduler runs" in server.log()


@pytest.mark.server(API_SERVERS_2)
def test_with_two_api_servers(server):
    for number in range(2):
        before = len(server.log())
        with server.only_api_server(number):
            right_together(server, times=4)
        assert re.findall(r"\(ApiServer_(\d)\b.*Received request", server.log()[before:]) == [str(number)] * 8
    right_together(server, times=8)


@pytest.mark.long
@pytest.mark.server(DATA_PARALLEL_2)
def test_with_data_parallel_2(server):
    before = metrics(server, "request_success")
    right_together(server, times=8)
    served = {engine: count - before.get(engine, 0) for engine, count in metrics(server, "request_success").items()}
    assert served.keys() == {"0", "1"}
    assert min(served.values()) > 0
    assert sum(served.values()) == 16


@pytest.mark.long
@pytest.mark.server(TENSOR_PARALLEL_2)
def test_with_tensor_parallel_2(server):
    wanted = lazy(TAG, "word:<t>", grammar_mandatory=1, grammar_force_after=3)
    jobs = [functools.partial(chat, server, body=body) for body in (lazy({"regex": "[0-9]{5}"}), wanted)]
    eagerly, lazily = all_at_once(jobs)
    assert re.fullmatch("[0-9]{5}", eagerly.text), eagerly
    assert re.search(r"<t>[0-9]{2}\Z", lazily.text), lazily
    assert len(set(re.findall(r"Worker_TP(\d)", server.log()))) == 2


# -- chunked prefill, prefix caching, preemption, aborts -------------------------------------------------------------


@tight
def test_with_a_prompt_that_is_read_in_chunks(server):
    prompt = "Read this. " * 50 + ASK_PERSON
    said = chat(server, prompt, lazy({"json": PERSON}), wishes="I write prose.")
    assert is_person(said.text), said
    body = lazy(TAG, "word:<t>")
    said = chat(server, prompt + "!", body, wishes=[*tokens("so <t>"), *spell("ab"), STOP])
    assert re.fullmatch("so <t>[0-9]{2}", said.text), said
    assert "enable_chunked_prefill=True" in server.log()


@tight
def test_with_a_prompt_whose_prefix_is_cached(server):
    prompt = "Say something about the weather of today. " * 8 + ASK_PERSON
    first = chat(server, prompt, lazy({"json": PERSON}))
    hits = metric(server, "prefix_cache_hits")
    assert chat(server, prompt, lazy({"json": PERSON})) == first
    assert metric(server, "prefix_cache_hits") >= hits + 32
    assert is_person(first.text), first


@tight
def test_with_requests_that_are_preempted(server):
    def long_lazy():
        body = lazy(TAG, "word:<t>")
        wishes = [*LONG_PROSE, *tokens("<t>"), *spell("ab"), STOP]
        return chat(server, body=body, wishes=wishes, max_tokens=200)

    def long_eager():
        return chat(server, "Count.", lazy({"regex": "[0-9]{120}"}), max_tokens=200)

    before = metric(server, "num_preemptions")
    answers = all_at_once([long_lazy, long_eager] * 3)
    assert metric(server, "num_preemptions") > before
    for said in answers[::2]:
        assert re.fullmatch(r"( and so on){40}<t>[0-9]{2}", said.text), said
    for said in answers[1::2]:
        assert re.fullmatch("[0-9]{120}", said.text), said


@tight
def test_a_client_that_leaves_while_it_is_answered_takes_nobody_with_it(server):
    body = lazy(TAG, "word:<t>", grammar_rearm=1)
    create = server.client.chat.completions.create
    for triggers in (["word:<t>"], []):
        leaving = create(
            model="model",
            messages=[{"role": "user", "content": "Count."}],
            stream=True,
            max_tokens=300,
            temperature=0,
            extra_body=body if triggers else lazy({"regex": "[0-9]{250}"}),
        )
        next(iter(leaving))
        leaving.close()
    right_together(server, times=2)
    wait_until_idle(server)


# -- other backends --------------------------------------------------------------------------------------------------

ASKED = {
    "JSON": {"extra_body": {"structured_outputs": {"json": PERSON}}},
    "a format": {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
    "a regular expression": {"extra_body": {"structured_outputs": {"regex": "[0-9]{5}"}}},
    "no grammar": {},
    "a wrong expression": {"extra_body": {"structured_outputs": {"regex": "("}}},
    "a wrong schema": {"extra_body": {"structured_outputs": {"json": {"type": "nothing"}}}},
    "a call if it wants": {"tools": TOOLS, "tool_choice": "auto"},
    "a call": {"tools": TOOLS, "tool_choice": "required"},
    "a named call": {"tools": TOOLS, "tool_choice": named("get_weather")},
    "no call": {"tools": TOOLS, "tool_choice": "none"},
    "a call that a stop string cuts": {"tools": TOOLS, "tool_choice": "required", "stop": ["name"]},
    "a field of another server's": {"extra_body": {"grammar_lazy": True}},
}


def _timeless(body):
    """An error without the time of day, which xgrammar writes into its messages."""
    return {**body, "message": re.sub(r"\[\d\d:\d\d:\d\d\] ", "", body["message"])}


def whole(server: Server, options):
    """All that an answer says, but what differs between any two of the same server."""
    body = {"return_token_ids": True, **options.get("extra_body", {})}
    options = {"max_tokens": 32, "temperature": 0, **options, "extra_body": body}
    messages = [{"role": "user", "content": ASK}]
    try:
        answer = server.client.chat.completions.create(model=MODEL, messages=messages, **options)
    except openai.APIStatusError as error:
        return error.status_code, _timeless(error.body)
    said = json.loads(answer.model_dump_json(exclude={"id", "created"}))
    for choice in said["choices"]:
        for made in choice["message"]["tool_calls"] or ():
            del made["id"]
    return said


def parts(server: Server, options):
    """The content, calls and finish reasons of a streamed answer, part by part; the error where one comes, before or within."""
    options = {"max_tokens": 32, "temperature": 0, **options}
    messages = [{"role": "user", "content": ASK}]
    try:
        chunks = list(server.client.chat.completions.create(model=MODEL, messages=messages, stream=True, **options))
    except openai.APIError as error:
        return getattr(error, "status_code", None), _timeless(error.body)
    return [
        (
            choice.delta.content,
            [(made.function.name, made.function.arguments) for made in choice.delta.tool_calls or ()],
            choice.finish_reason,
        )
        for chunk in chunks
        for choice in chunk.choices
    ]


@pytest.mark.server(XGRAMMAR, STOCK)
def test_another_backend_behaves_exactly_as_without_the_plugin(servers):
    with_plugin, without = servers
    with pytest.raises(openai.BadRequestError, match="is served by"):  # the plugin is there
        chat(with_plugin, body=lazy({"regex": "a"}, "word:<t>"))
    for name, options in ASKED.items():
        for outcome in (whole, parts):
            assert outcome(with_plugin, options) == outcome(without, options), name
