"""The examples of docs/examples on a running server: each client gets what it asked for, in the form that it reads.

The model has 135M parameters, so what an answer says has no sense: that it obeys its schema, and that the client took it, is what is held.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from jsonschema import validate

from tests.serving.servers import HERMES

pytestmark = pytest.mark.server(HERMES)

EXAMPLES = Path(__file__).resolve().parents[2] / "docs/examples"


@pytest.fixture
def example(server):
    """Runs the `main` of an example against the server; gives its module and what it returned."""

    def run(name):
        spec = importlib.util.spec_from_file_location(f"docs_examples_{name}", EXAMPLES / f"{name}.py")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module, module.main(server.base_url)

    return run


def test_the_openai_client_gets_prose_and_then_json(example):
    module, text = example("lazy_json")
    prose, _, answer = text.partition("<answer>")
    assert prose
    validate(json.loads(answer), module.REVIEW)


def test_the_openai_client_calls_a_tool_and_answers_with_its_result(example):
    module, messages = example("openai_tools")
    _, called, *results, answer = messages
    (schema,) = (tool["function"]["parameters"] for tool in module.TOOLS)
    for call in called["tool_calls"]:
        validate(json.loads(call["function"]["arguments"]), schema)
    assert [each["tool_call_id"] for each in results] == [call["id"] for call in called["tool_calls"]]
    assert answer["role"] == "assistant"
    assert not answer.get("tool_calls")


def test_the_agents_sdk_sends_tools_and_an_output_type_together(example):
    module, result = example("agents_sdk")
    assert isinstance(result.final_output, module.Advice)
    kinds = [item.type for item in result.new_items]
    assert kinds.index("tool_call_item") < kinds.index("tool_call_output_item") < kinds.index("message_output_item")


def test_instructor_reads_its_model_from_a_tool_call_and_from_json(example):
    module, reviews = example("instructor_modes")
    assert [type(review) for review in reviews] == [module.Review] * 2


def test_pydantic_ai_reads_its_output_from_a_tool_call_and_from_json(example):
    module, reviews = example("pydantic_ai_agent")
    assert [type(review) for review in reviews] == [module.Review] * 2


def test_the_anthropic_client_reads_a_call_whole_and_streamed(example):
    module, messages = example("anthropic_messages")
    for message in messages:
        calls = [block for block in message.content if block.type == "tool_use"]
        assert calls
        assert message.stop_reason == "tool_use"
        for call in calls:
            validate(call.input, module.TOOLS[0]["input_schema"])
