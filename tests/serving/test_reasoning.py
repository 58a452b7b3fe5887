"""Grammars beside vLLM's reasoning parsers: the boundary is the parser's, its implicit ends included (cases T6a, T6b)."""

from __future__ import annotations

import json

import openai
import pytest

from tests.serving.asking import ASK_PERSON, PERSON, chat, chat_args, is_person, streamed
from tests.serving.servers import DEEPSEEK_R1, IN_REASONING, QWEN3, lazy
from tests.serving.wishes import spell, tokens

STOP = 2
THINK, END_THINK, CALL = 8, 10, 11
"""Ids of `<think>`, `</think>` and `<tool_call>` in the `thinking` model."""

DIGITS = {"grammar": "root ::= [0-9] [0-9]"}
ON_CALL = lazy(DIGITS, "token:<tool_call>", grammar_start="after")

deepseek_r1 = pytest.mark.server(DEEPSEEK_R1)
qwen3 = pytest.mark.server(QWEN3)
in_reasoning = pytest.mark.server(IN_REASONING)


def thinks(server, body, wishes, **options):
    """(reasoning, content, finish reason) of a chat request."""
    create = server.client.chat.completions.create
    (choice,) = create(**chat_args(ASK_PERSON, body, wishes, options)).choices
    return choice.message.reasoning or "", choice.message.content or "", choice.finish_reason


def is_call(content):
    """Whether the content ends with the call that DIGITS allow."""
    _, opener, digits = content.partition("<tool_call>")
    return opener and digits.isdigit() and len(digits) == 2


@deepseek_r1
def test_reasoning_is_free_and_the_grammar_holds_behind_it(server):
    wishes = [*tokens("Some thoughts."), END_THINK, *tokens("no JSON")]
    reasoning, content, finish = thinks(server, lazy({"json": PERSON}), wishes)
    assert (reasoning, finish) == ("Some thoughts.", "stop")
    assert is_person(content), content


@deepseek_r1
def test_t6a_a_trigger_inside_the_reasoning_is_a_mention_and_the_one_outside_fires(server):
    wishes = [*tokens("hm "), CALL, *spell("ab"), END_THINK, *tokens("so "), CALL, *spell("cd"), STOP]
    reasoning, content, finish = thinks(server, ON_CALL, wishes)
    assert (reasoning, finish) == ("hm <tool_call>ab", "stop")
    assert content[:14] == "so <tool_call>"
    assert content[14:].isdigit()
    assert len(content) == 16


@deepseek_r1
def test_t6a_holds_where_the_client_does_not_want_the_reasoning(server):
    wishes = [*tokens("hm "), CALL, *spell("ab"), END_THINK, *tokens("so "), CALL, *spell("cd"), STOP]
    _, content, _ = thinks(server, {**ON_CALL, "include_reasoning": False}, wishes)
    assert content[:14] == "so <tool_call>"
    assert content[14:].isdigit()
    assert len(content) == 16


@deepseek_r1
def test_a_word_trigger_on_the_reasonings_end_marker_is_observed(server):
    body = lazy(DIGITS, "word:</think>", grammar_start="after")
    reasoning, content, _ = thinks(server, body, [*tokens("hm"), END_THINK, *spell("ab")])
    assert reasoning == "hm"
    assert content.isdigit()


@deepseek_r1
@pytest.mark.parametrize("stream", [False, True])
def test_a_trigger_that_could_never_be_seen_is_a_400_that_names_it(server, stream):
    body = lazy(DIGITS, "word:so </think>", grammar_start="after")
    with pytest.raises(openai.BadRequestError, match="this could never be seen") as caught:
        server.client.chat.completions.create(**chat_args(ASK_PERSON, body, None, {}), stream=stream)
    assert caught.value.body["param"] == "vllm_xargs.grammar_triggers[0]"
    assert "word:so </think>" in caught.value.body["message"]


@deepseek_r1
def test_tokens_of_the_reasoning_do_not_count_for_force_after(server):
    body = lazy(DIGITS, "token:<tool_call>", grammar_start="after", grammar_mandatory=1, grammar_force_after=3)
    thoughts, prose = (tokens("one two three four five six seven eight nine ten") for _ in range(2))
    reasoning, content, finish = thinks(server, body, [*thoughts, END_THINK, *prose])
    assert (len(thoughts), reasoning) == (10, "one two three four five six seven eight nine ten")
    assert content[:24] == "one two three<tool_call>"
    assert is_call(content), content
    assert finish == "stop"


@deepseek_r1
def test_mandatory_holds_during_reasoning(server):
    body = lazy(DIGITS, "token:<tool_call>", grammar_start="after", grammar_mandatory=1)
    assert thinks(server, ON_CALL, [STOP] * 8, max_tokens=8) == ("", "", "stop")
    reasoning, content, finish = thinks(server, body, [*tokens("hm"), *[STOP] * 8], max_tokens=24)
    assert reasoning.startswith("hm")
    assert is_call(content), content
    assert finish == "stop"


@deepseek_r1
@pytest.mark.parametrize("mandatory", [True, False])
def test_reasoning_ends_while_there_is_time_for_what_is_owed(server, mandatory):
    body = lazy(DIGITS, "token:<tool_call>", grammar_start="after", grammar_mandatory=1) if mandatory else {**DIGITS}
    reasoning, content, finish = thinks(server, body if mandatory else lazy(body), tokens("word " * 60), max_tokens=30)
    assert reasoning.startswith("word word")
    assert is_call(content) if mandatory else content.isdigit(), content
    assert finish == "stop"


@deepseek_r1
def test_disable_any_whitespace_leaves_no_blank_between_json_elements(server):
    person = {"name": "Bob", "age": 3}
    wishes = [END_THINK, *tokens(json.dumps(person, indent=1))]
    _, content, _ = thinks(server, lazy({"json": PERSON}), wishes, max_tokens=64)
    assert is_person(content), content
    assert content == json.dumps(json.loads(content), separators=(",", ":"), ensure_ascii=False)


@deepseek_r1
def test_a_streamed_answer_is_the_same_behind_reasoning(server):
    wishes = [*tokens("hm "), CALL, *spell("ab"), END_THINK, *tokens("so "), CALL, *spell("cd"), STOP]
    assert streamed(server, ASK_PERSON, ON_CALL, wishes) == chat(server, ASK_PERSON, ON_CALL, wishes)


@qwen3
def test_t6b_a_tool_call_inside_the_reasoning_ends_it_and_fires(server):
    _, content, finish = thinks(server, ON_CALL, [THINK, *tokens("hm "), CALL, *spell("ab"), STOP])
    assert finish == "stop"
    assert content.strip().removeprefix("<tool_call>").isdigit(), content


@qwen3
def test_t6b_behind_the_end_marker_a_tool_call_fires_too(server):
    _, content, _ = thinks(server, ON_CALL, [THINK, *tokens("hm"), END_THINK, *tokens("so "), CALL, *spell("ab"), STOP])
    assert content.startswith("so ")
    assert content.removeprefix("so ").removeprefix("<tool_call>").isdigit(), content


@in_reasoning
def test_enable_in_reasoning_holds_an_eager_grammar_from_the_first_token(server):
    reasoning, content, _ = thinks(server, lazy(DIGITS), [*spell("ab"), END_THINK])
    assert (reasoning + content).isdigit()


@in_reasoning
def test_enable_in_reasoning_lets_a_trigger_inside_the_reasoning_fire(server):
    reasoning, content, _ = thinks(server, ON_CALL, [*tokens("hm "), CALL, *spell("ab"), STOP])
    said = reasoning + content
    assert said[:14] == "hm <tool_call>"
    assert said[14:].isdigit()
