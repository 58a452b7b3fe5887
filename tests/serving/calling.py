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


def respond_call(
    server: Server, choice: Any, tools: Any = None, wishes: Any = None, *, stream: bool = False, **options: Any
) -> Answer:
    """A request to ``/v1/responses``, with tools as a chat request has them."""
    flat = [{"type": "function", **each["function"]} for each in (TOOLS if tools is None else tools)]
    create: Any = server.client.responses.create
    fixed = {"model": MODEL, "input": ASK, "tools": flat, "tool_choice": choice, "temperature": 0, "stream": stream}
    answer = create(**{"max_output_tokens": 160, **options, **fixed}, extra_body=wishing(None, wishes))
    if stream:
        answer = list(answer)[-1].response
    calls = [(item.name, item.arguments) for item in answer.output if item.type == "function_call"]
    return Answer(answer.output_text, calls, answer.status)


def message_call(
    server: Server, choice: Any, tools: Any = None, wishes: Any = None, *, stream: bool = False, **options: Any
) -> Answer:
    """A request to ``/v1/messages``, with tools as a chat request has them. BadRequestError where it is refused."""
    flat = [_message_tool(each["function"]) for each in (TOOLS if tools is None else tools)]
    fixed = {"model": MODEL, "tools": flat, "tool_choice": choice, "stream": stream}
    body = {"max_tokens": 160, "temperature": 0, "messages": [{"role": "user", "content": ASK}], **options, **fixed}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request("POST", "/v1/messages", json.dumps(wishing(body, wishes)), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    if response.status != http.client.OK:
        raise RefusedError(response.status, text)
    return _streamed_message(text) if stream else _message(json.loads(text))


class RefusedError(Exception):
    """A request to ``/v1/messages`` that was not served: its status and its body."""


def _message_tool(function: dict[str, Any]) -> dict[str, Any]:
    strict = {"strict": function["strict"]} if "strict" in function else {}
    return {"name": function["name"], "input_schema": function["parameters"], **strict}


def _message(message: dict[str, Any]) -> Answer:
    blocks = message["content"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
    return Answer(text, calls, message["stop_reason"])


def _streamed_message(text: str) -> Answer:
    calls: dict[int, list[str]] = {}
    content, finish = "", ""
    for line in text.splitlines():
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
        delta = event.get("delta", {})
        finish = delta.get("stop_reason") or finish
        content += delta.get("text") or ""
        if event.get("type") == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls[event["index"]] = [event["content_block"]["name"], ""]
        elif event.get("type") == "content_block_delta" and event["index"] in calls:
            calls[event["index"]][1] += delta.get("partial_json") or ""
    return Answer(content, [(name, arguments) for name, arguments in calls.values()], finish)


def ask(
    endpoint: str,
    server: Server,
    choice: str,
    tools: Any = None,
    wishes: Any = None,
    *,
    stream: bool,
    parallel: bool = True,
    schema: dict[str, Any] | None = None,
) -> Answer:
    """The same request to ``chat``, ``responses`` or ``messages``, as a client of each writes it.

    Args:
        choice: ``auto``, ``required`` or ``none``.
        parallel: several calls may be made.
        schema: of the answer, where one is asked for.
    """
    if endpoint == "chat":
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
        options: dict[str, Any] = {"parallel_tool_calls": parallel, **({"response_format": form} if schema else {})}
        return (streamed_call if stream else call)(server, choice, tools, wishes, **options)
    if endpoint == "responses":
        text = {"text": {"format": {"type": "json_schema", "name": "form", "schema": schema}}} if schema else {}
        return respond_call(server, choice, tools, wishes, stream=stream, parallel_tool_calls=parallel, **text)
    chosen = {"type": {"required": "any"}.get(choice, choice), "disable_parallel_tool_use": not parallel}
    config = {"output_config": {"format": {"type": "json_schema", "schema": schema}}} if schema else {}
    return message_call(server, chosen, tools, wishes, stream=stream, **config)


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
