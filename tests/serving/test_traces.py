"""Traces of a running server: one file for a request that asks, none for one that does not."""

from __future__ import annotations

import time

import pytest

from tests.serving.asking import ASK_PERSON, PERSON, chat, chats, is_person
from tests.serving.servers import TRACED, TRACES, lazy
from tests.serving.wishes import tokens
from vllm_lazy_grammar.core.story import read

pytestmark = pytest.mark.server(TRACED)

PROSE = "Well, let me think. "


def written(*, files, seconds=20.0):
    """The stories that were written since the last look, once there are so many."""
    until = time.monotonic() + seconds
    while len(found := sorted(TRACES.glob("trace-*.jsonl"))) < files and time.monotonic() < until:
        time.sleep(0.1)
    stories = [read(path) for path in found]
    for path in found:
        path.unlink()
    assert len(stories) == files
    return stories


def text_of(story):
    return "".join(line["text"] for line in story[1:-1])


def test_a_request_that_asks_is_told_token_by_token_and_another_is_not(server):
    body = lazy({"json": PERSON}, "word:<answer>", grammar_start="after")
    chat(server, ASK_PERSON, body, wishes=PROSE + "<answer>")
    body["vllm_xargs"]["grammar_trace"] = 1
    said = chat(server, ASK_PERSON, body, wishes=PROSE + "<answer>")
    (story,) = written(files=1)
    head, *lines, end = story
    assert head["triggers"] == ["word:<answer>"]
    assert "prompt" not in head
    assert text_of(story).removesuffix("<|im_end|>") == said.text
    assert is_person(said.text.partition("<answer>")[2])
    (fired,) = [event for line in lines for event in line.get("events", ())]
    assert fired["byte"] >= len(PROSE + "<answer>")
    assert lines[0]["state"] == "awaiting"
    assert lines[-1]["state"] == "ended"
    assert all(0 < line["left"] <= head["vocabulary"] for line in lines)
    assert end["end"]["summary"].startswith("fired at token")


def test_a_request_whose_trigger_never_came_tells_the_nearest_miss(server):
    body = lazy({"json": PERSON}, "word:<answer>", grammar_start="after")
    body["vllm_xargs"]["grammar_trace"] = 1
    chat(server, ASK_PERSON, body, wishes=[*tokens(PROSE + "<answ!"), 2])
    (story,) = written(files=1)
    (miss,) = story[-1]["end"]["misses"]
    assert story[-1]["end"]["summary"] == "never fired"
    assert miss["text"] == "<answ"[: len(miss["text"])]
    assert miss["byte"] == len(PROSE)


def test_each_of_several_choices_and_an_eager_request_have_a_file_of_their_own(server):
    body = {"structured_outputs": {"json": PERSON}, "vllm_xargs": {"grammar_trace": 1}}
    said = chats(server, ASK_PERSON, body, n=2, temperature=1, seed=7)
    stories = written(files=2)
    assert sorted(text_of(story).removesuffix("<|im_end|>") for story in stories) == sorted(one.text for one in said)
    assert {story[-1]["end"]["summary"] for story in stories} == {"eager"}
