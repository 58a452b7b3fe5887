"""How the tests on servers ask for tool calls, on each endpoint, and what comes back as plain values.

Invariants:
- Nothing here asserts; a test says what is right.
"""

from __future__ import annotations

import http.client
import json
from typing import Any, NamedTuple

from tests.serving.asking import wishing
from tests.serving.servers import MODEL, Server

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
ASK = "What is the weather in Paris for 3 days?"


class Answer(NamedTuple):
    """What the client sees: prose, the calls as (name, arguments as text), and why it ended."""

    content: str
    calls: list[tuple[str, str]]
    finish: str


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """A function tool of a chat request."""
    return {"type": "function", "function": {"name": name, "parameters": WEATHER if parameters is None else parameters}}


TOOLS = [tool("get_weather"), tool("get", NOTHING)]


def named(name: str) -> dict[str, Any]:
    """The ``tool_choice`` of a chat request that names a function."""
    return {"type": "function", "function": {"name": name}}


def _arguments(choice: Any, tools: Any, wishes: Any, prompt: str, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "tools": TOOLS if tools is None else tools,
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 160,
        "extra_body": wishing(None, wishes),
        **options,
    }


def call(
    server: Server, choice: Any = "auto", tools: Any = None, wishes: Any = None, *, prompt: str = ASK, **options: Any
) -> Answer:
    """A chat request with tools."""
    create: Any = server.client.chat.completions.create
    (answer,) = create(**_arguments(choice, tools, wishes, prompt, options)).choices
    calls = [(each.function.name, each.function.arguments) for each in answer.message.tool_calls or ()]
    return Answer(answer.message.content or "", calls, answer.finish_reason)


def streamed_call(
    server: Server, choice: Any = "auto", tools: Any = None, wishes: Any = None, *, prompt: str = ASK, **options: Any
) -> Answer:
    """The same, streamed and put together."""
    create: Any = server.client.chat.completions.create
    content, finish = "", ""
    calls: dict[int, list[str]] = {}
    for chunk in create(**_arguments(choice, tools, wishes, prompt, options), stream=True):
        for part in chunk.choices:
            content += part.delta.content or ""
            finish = part.finish_reason or finish
            for each in part.delta.tool_calls or ():
                found = calls.setdefault(each.index, ["", ""])
                found[0] += each.function.name or ""
                found[1] += each.function.arguments or ""
    return Answer(content, [(name, text) for name, text in calls.values()], finish)


def respond_call(server: Server, choice: Any, *, stream: bool = False) -> list[tuple[str, str]]:
    """A request to ``/v1/responses``: the calls of its answer."""
    flat = [{"type": "function", **each["function"]} for each in TOOLS]
    create: Any = server.client.responses.create
    answer = create(
        model=MODEL, input=ASK, tools=flat, tool_choice=choice, max_output_tokens=160, temperature=0, stream=stream
    )
    if stream:
        answer = list(answer)[-1].response
    return [(item.name, item.arguments) for item in answer.output if item.type == "function_call"]


def message_call(server: Server, choice: dict[str, Any], *, stream: bool = False) -> list[tuple[str, str]]:
    """A request to ``/v1/messages``: the calls of its answer."""
    tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
    body = {
        "model": MODEL,
        "max_tokens": 160,
        "temperature": 0,
        "tools": tools,
        "tool_choice": choice,
        "messages": [{"role": "user", "content": ASK}],
        "stream": stream,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request("POST", "/v1/messages", json.dumps(body), {"Content-Type": "application/json"})
    text = connection.getresponse().read().decode()
    connection.close()
    if stream:
        return _streamed_message(text)
    blocks = [block for block in json.loads(text)["content"] if block["type"] == "tool_use"]
    return [(block["name"], json.dumps(block["input"])) for block in blocks]


def _streamed_message(text: str) -> list[tuple[str, str]]:
    calls: dict[int, list[str]] = {}
    for line in text.splitlines():
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
        if event.get("type") == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls[event["index"]] = [event["content_block"]["name"], ""]
        elif event.get("type") == "content_block_delta" and event["index"] in calls:
            calls[event["index"]][1] += event["delta"].get("partial_json", "")
    return [(name, arguments) for name, arguments in calls.values()]


def is_weather(arguments: str) -> bool:
    """Whether they obey WEATHER; written out, so that one can check it by eye."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return False
    return (
        isinstance(found, dict)
        and found.keys() == {"city", "days"}
        and isinstance(found["city"], str)
        and len(found["city"]) <= 10
        and type(found["days"]) is int
        and 1 <= found["days"] <= 9
    )


def is_valid(answer_call: tuple[str, str]) -> bool:
    """Whether a call is of one of TOOLS and obeys it."""
    name, arguments = answer_call
    return is_weather(arguments) if name == "get_weather" else (name, arguments) == ("get", "{}")
