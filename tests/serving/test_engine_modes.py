"""The same two requests, one lazy and one eager, in every way that vLLM runs an engine (issue: "end to end with").

Data and tensor parallel take long to start and stand under `long`.
"""

from __future__ import annotations

import functools
import re

import pytest

from tests.serving.asking import ASK_PERSON, PERSON, Said, all_at_once, chat, is_person, metric, wait_until_idle
from tests.serving.servers import (
    API_SERVERS_2,
    ASYNC,
    DATA_PARALLEL_2,
    TENSOR_PARALLEL_2,
    TIGHT,
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
    right_together(server, times=8)
    assert len(set(re.findall(r"ApiServer_(\d)", server.log()))) == 2


@pytest.mark.long
@pytest.mark.server(DATA_PARALLEL_2)
def test_with_data_parallel_2(server):
    right_together(server, times=8)
    assert len(set(re.findall(r"EngineCore_DP(\d)", server.log()))) == 2


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
