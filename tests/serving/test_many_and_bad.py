"""What one client asks for does not hold up another: slow compiles, hard grammars, clients that leave (cases Q1, B2, B3, T4, V2)."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import threading
import time

import openai
import pytest

from tests.serving.asking import (
    ASK_PERSON,
    PERSON,
    Said,
    all_at_once,
    chat,
    chat_args,
    is_person,
    streamed,
    wait_until_idle,
)
from tests.serving.servers import WISHES, lazy
from tests.serving.test_refusals import HARD
from tests.serving.wishes import spell, tokens

pytestmark = pytest.mark.server(WISHES)

STOP = 2
SPECIAL = range(17)
TAG = {"grammar": 'root ::= "<t>" [0-9] [0-9]'}
LONGEST_PAUSE = 10.0
"""Seconds between two tokens of a plain answer that would mean a stalled engine, on a machine that is busy with others' compiles."""

_fresh = itertools.count(1)


def slow_schema(keys=150):
    """A schema that takes seconds to compile and was never seen before."""
    new = next(_fresh)
    patterns = {
        f"k{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i % 40 + 2}}}{new}[0-9]{{{i % 17}}}x$"} for i in range(keys)
    }
    return {
        "type": "object",
        "properties": {f"new{new}": {"type": "integer"}, **patterns},
        "required": [f"new{new}", *patterns],
        "additionalProperties": False,
    }


class Listening(threading.Thread):
    """A streamed request, and when each of its tokens came."""

    def __init__(self, server, body, wishes=None, prompt="Say hi.", **options):
        super().__init__(daemon=True)
        self.times, self.text, self.error = [], "", None
        self._ask = functools.partial(self._listen, server, prompt, body, wishes, options)
        self.start()

    def _listen(self, server, prompt, body, wishes, options):
        create = server.client.chat.completions.create
        for chunk in create(**chat_args(prompt, body, wishes, options), stream=True):
            if chunk.choices and chunk.choices[0].delta.content:
                self.times.append(time.monotonic())
                self.text += chunk.choices[0].delta.content

    def run(self):
        try:
            self._ask()
        except openai.OpenAIError as error:
            self.error = error

    def done(self):
        self.join(180)
        assert not self.is_alive()
        assert self.error is None
        return self

    @property
    def longest_pause(self):
        return max(later - earlier for earlier, later in itertools.pairwise(self.times))


# -- compiles --------------------------------------------------------------------------------------------------------


def test_q1_a_lazy_request_behind_an_eager_ones_compile_does_not_wait(server):
    eager = Listening(server, lazy({"json": slow_schema()}), max_tokens=4)
    time.sleep(0.5)  # the eager one is ahead; vLLM does not tell when it has taken a request in
    lazily = Listening(server, lazy(TAG, "word:<t>"), wishes=[*tokens("so one two"), STOP]).done()
    eager.done()
    assert lazily.text == "so one two"
    assert lazily.times[-1] < eager.times[0]


def test_a_lazy_request_does_not_wait_for_its_own_compile_before_its_trigger(server):
    schema = slow_schema()
    eager = Listening(server, lazy({"json": schema}), max_tokens=4)
    time.sleep(0.5)
    lazily = Listening(server, lazy({"json": schema}, "word:{"), wishes=[*tokens("so one two three"), STOP]).done()
    eager.done()
    assert lazily.text == "so one two three"
    assert lazily.times[-1] < eager.times[0]


def test_a_trigger_that_fires_before_the_compile_is_done_holds_all_the_same(server):
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    schema = {"anyOf": [schema, slow_schema()]}
    said = streamed(
        server, "Say hi.", lazy({"json": schema}, "word:{"), wishes=[*tokens('{"a": "'), *spell("no")], max_tokens=24
    )
    assert json.loads(said.text) == {"a": "x"}


def test_a_grammar_is_compiled_once_for_all_of_n_choices(server):
    create = server.client.chat.completions.create
    body = lazy({"json": slow_schema(30)}, "word:{")
    answer = create(
        **chat_args("Say hi.", body, [*tokens("so {"), -1, -1], {"n": 8, "max_tokens": 4, "temperature": 1})
    )
    chat(server, max_tokens=1)
    told = re.findall(rf"Request \S*{answer.id}\S* finished: .*; compile (\S+ ms)", server.log())
    assert len(told) == 8
    assert len(set(told)) == 1


# -- clients that leave ----------------------------------------------------------------------------------------------


def test_b3_a_client_that_leaves_while_its_grammar_compiles_takes_nobody_with_it(server):
    impatient = server.client.with_options(timeout=0.7)
    for _ in range(12):  # more than there are workers (8), so that some compiles have not begun
        with pytest.raises(openai.APITimeoutError):
            impatient.chat.completions.create(**chat_args("Say hi.", lazy({"json": slow_schema(60)}), None, {}))
    assert chat(server, body=lazy(TAG, "word:<t>"), wishes=[*tokens("so <t>12"), STOP]) == Said("so <t>12", "stop")
    wait_until_idle(server)
    assert is_person(chat(server, ASK_PERSON, lazy({"json": PERSON})).text)


def test_b3_a_client_that_leaves_in_the_middle_of_its_answer_takes_nobody_with_it(server):
    create = server.client.chat.completions.create
    for body in (lazy({"regex": "[0-9]{400}"}), lazy({"regex": "[0-9]{400}"}, "pattern:[0-9]")):
        leaving = create(**chat_args("Count.", body, None, {"max_tokens": 400}), stream=True)
        next(iter(leaving))
        leaving.close()
    assert is_person(chat(server, ASK_PERSON, lazy({"json": PERSON})).text)
    wait_until_idle(server)


# -- hard grammars ---------------------------------------------------------------------------------------------------


def test_b2_hard_grammars_all_at_once_do_not_stop_a_plain_answer_or_the_health_check(server):
    plain = Listening(server, {}, prompt="Tell a long story.", max_tokens=200, extra_body={"ignore_eos": True})

    def hard(structured):
        with contextlib.suppress(openai.BadRequestError):  # refused or served: both are right here
            chat(server, body=lazy(structured), max_tokens=2)
        return server.is_healthy()

    assert set(all_at_once([functools.partial(hard, structured) for structured in HARD.values()])) == {True}
    assert plain.done().longest_pause < LONGEST_PAUSE


def test_t4_a_pattern_that_runs_away_ends_its_own_request_with_an_error_that_names_it(server):
    pattern = "(?:a|aa)+b$"
    body = lazy({"regex": "a+"}, f"pattern:{pattern}", grammar_start="after")
    plain = Listening(server, {}, prompt="Tell a story.", max_tokens=60)
    with pytest.raises(openai.BadRequestError, match="trigger_timeout_ms"):
        chat(server, body=body, wishes=[*spell("a" * 60), *tokens("!"), STOP], max_tokens=64)
    assert f"is ended by its grammar: vllm_xargs.grammar_triggers: trigger pattern {pattern!r}" in server.log()
    assert plain.done().text
    assert chat(server, body=lazy(TAG, "word:<t>"), wishes=[*tokens("so <t>12"), STOP]) == Said("so <t>12", "stop")


# -- special tokens --------------------------------------------------------------------------------------------------


def test_v2_no_special_token_is_written_into_an_open_json_string(server):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 60, "maxLength": 80}},
        "required": ["a"],
    }
    create = server.client.chat.completions.create
    for triggers in ([], ["word:{"]):
        body = {**lazy({"json": schema}, *triggers), "return_token_ids": True}
        answer = create(**chat_args("Say hi.", body, [*tokens('{"a": "b'), *SPECIAL], {"max_tokens": 80}))
        ids = answer.choices[0].token_ids
        assert answer.choices[0].message.content.startswith('{"a": "b')
        assert len(ids) > 22
        assert set(ids[:-1]) & set(SPECIAL) == set()
