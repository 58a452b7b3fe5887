"""The finish reason of a chat choice: the classes are vLLM's own, as its serving class makes them."""

from __future__ import annotations

import pytest

from tests.quiet import import_quietly, import_vllm

pytestmark = pytest.mark.vllm

CALL = {"function": {"name": "get", "arguments": "{}"}}


@pytest.fixture(params=[True, False], ids=["whole", "streamed"])
def choice(request, monkeypatch):
    """Make a choice, of either class, with what its part of the answer is."""
    import_vllm()
    finish = import_quietly("vllm_lazy_grammar.adapter.finish")
    protocol = import_quietly("vllm.entrypoints.openai.chat_completion.protocol")
    monkeypatch.setattr(finish, "serves_here", lambda: make.ours)
    name = "ChatCompletionResponseChoice" if request.param else "ChatCompletionResponseStreamChoice"
    part = "message" if request.param else "delta"

    def make(calls=(), **fields):
        held = {"role": "assistant", "content": "so", "tool_calls": list(calls)}
        return finish.choosing(getattr(protocol, name))(index=0, **{part: held}, **fields)

    make.ours, make.whole = True, request.param
    return make


def test_an_answer_that_ends_with_its_call_says_so(choice):
    for stop in (None, 2):
        assert choice([CALL] if choice.whole else (), finish_reason="tool_calls", stop_reason=stop).finish_reason == (
            "tool_calls"
        )


def test_an_answer_that_a_stop_string_cut_claims_no_calls(choice):
    made = choice([CALL] if choice.whole else (), finish_reason="tool_calls", stop_reason="###")
    assert (made.finish_reason, made.stop_reason) == ("stop", "###")


def test_a_whole_answer_without_a_call_claims_none(choice):
    made = choice(finish_reason="tool_calls", stop_reason=None)
    assert made.finish_reason == (
        "stop" if choice.whole else "tool_calls"
    )  # a stream's last part says nothing of those before


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_any_other_reason_stays(choice, reason):
    assert choice(finish_reason=reason, stop_reason="###").finish_reason == reason


def test_another_backends_choices_are_vllms(choice):
    choice.ours = False
    assert choice(finish_reason="tool_calls", stop_reason="###").finish_reason == "tool_calls"
