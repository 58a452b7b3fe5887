"""The examples of docs/examples on a running server: each client gets what it asked for, in the form that it reads.

The model has 135M parameters, so what an answer says has no sense: that it obeys its schema, and that the client took it, is what is held.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import pytest
from jsonschema import validate

from scripts.lib.demo_model import cache_folder
from tests.serving.servers import HERMES
from tests.serving.wishes import tokens

pytestmark = pytest.mark.server(HERMES)

STOP = 2
EXAMPLES = Path(__file__).resolve().parents[2] / "docs/examples"


@pytest.fixture
def example(server):
    """Runs the `main` of an example against the server; gives its module and what it returned."""

    def run(name, *more):
        spec = importlib.util.spec_from_file_location(f"docs_examples_{name}", EXAMPLES / f"{name}.py")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module, module.main(server.base_url, *more)

    return run


INSTRUCTOR = (
    "instructor==1.17.0",
    "distro==1.9.0",
    "jiter==0.14.0",
    "openai==3.3.0",
    "rich==14.3.4",
    "tenacity==9.2.1",
)


@pytest.fixture(scope="session")
def instructors_folder():
    """A folder that lays instructor over the installed packages, with the older `jiter` and `rich` that it wants; made once, in the cache folder."""
    made_of = f"{INSTRUCTOR} {sys.version_info[:2]}"
    folder = cache_folder() / f"instructor-{zlib.crc32(made_of.encode()):08x}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(dir=folder.parent, prefix="instructor-")
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", made, *INSTRUCTOR]
        subprocess.run(install, check=True)
        Path(made).rename(folder)
    return folder


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
    """Left to itself this model calls again and again, so its second turn is wished for; in the first the call is owed all the same."""
    wishes = [*tokens('{"take": "umbrella", "reason": "Rain."}'), STOP]
    module, result = example("agents_sdk", {"vllm_xargs": {"wishes": wishes}})
    assert result.final_output == module.Advice(take="umbrella", reason="Rain.")
    assert [item.type for item in result.new_items][-3:] == [
        "tool_call_item",
        "tool_call_output_item",
        "message_output_item",
    ]


def test_an_agent_whose_model_never_stops_calling_is_ended_by_the_sdk(example):
    """Each of its answers is a call that the SDK could read and run: it ends with the turns, and not with an error of a client or server."""
    from agents import MaxTurnsExceeded

    with pytest.raises(MaxTurnsExceeded):
        example("agents_sdk")


def test_instructor_reads_its_model_from_a_tool_call_and_from_json(server, instructors_folder):
    command = [sys.executable, str(EXAMPLES / "instructor_modes.py"), server.base_url]
    env = {**os.environ, "PYTHONPATH": str(instructors_folder)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    reviews = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reviews) == 2
    for review in reviews:
        assert review["sentiment"] in {"positive", "negative", "mixed"}
        assert review["stars"] in range(1, 6)


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
