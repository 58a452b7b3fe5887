"""How the tests on servers ask: short greedy requests, answers as plain values.

Invariants:
- Nothing here asserts; a test says what is right.
- Every request names its own small `max_tokens`: an answer that runs on costs seconds, not minutes.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from tests.serving.servers import MODEL, Server
from tests.serving.wishes import tokens

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
"""A schema whose answers are short."""

ASK_PERSON = "Give me a person as JSON."


class Said(NamedTuple):
    """An answer: what the client sees, and why it ended."""

    text: str
    finish: str


def wishing(body: dict[str, Any] | None, wishes: str | list[int] | None) -> dict[str, Any]:
    """The body with what the model shall wish for."""
    body = dict(body or {})
    if wishes is not None:
        ids = tokens(wishes) if isinstance(wishes, str) else wishes
        body["vllm_xargs"] = {**body.get("vllm_xargs", {}), "wishes": ids}
    return body


def chat_args(prompt: str, body: dict[str, Any] | None, wishes: str | list[int] | None, options: Any) -> dict[str, Any]:
    """The arguments of a chat request."""
    messages = [{"role": "user", "content": prompt}]
    fixed = {"model": MODEL, "messages": messages, "extra_body": wishing(body, wishes)}
    return {"max_tokens": 48, "temperature": 0, **options, **fixed}


def chats(server: Server, prompt: str, body: Any = None, wishes: Any = None, **options: Any) -> list[Said]:
    """All choices of a chat request."""
    create: Any = server.client.chat.completions.create
    answer = create(**chat_args(prompt, body, wishes, options))
    return [Said(choice.message.content or "", choice.finish_reason) for choice in answer.choices]


def chat(server: Server, prompt: str = "Say hi.", body: Any = None, wishes: Any = None, **options: Any) -> Said:
    """The one choice of a chat request."""
    (said,) = chats(server, prompt, body, wishes, **options)
    return said


def streamed(server: Server, prompt: str, body: Any = None, wishes: Any = None, **options: Any) -> Said:
    """The same request, streamed and put together."""
    create: Any = server.client.chat.completions.create
    parts, finish = [], ""
    for chunk in create(**chat_args(prompt, body, wishes, options), stream=True):
        for choice in chunk.choices:
            parts.append(choice.delta.content or "")
            finish = choice.finish_reason or finish
    return Said("".join(parts), finish)


def complete(server: Server, prompt: str, body: Any = None, wishes: Any = None, **options: Any) -> Said:
    """A request to ``/v1/completions``."""
    create: Any = server.client.completions.create
    options = {"max_tokens": 48, "temperature": 0, **options}
    (choice,) = create(model=MODEL, prompt=prompt, extra_body=wishing(body, wishes), **options).choices
    return Said(choice.text, choice.finish_reason)


def respond(server: Server, prompt: str, body: Any = None, wishes: Any = None) -> str:
    """A request to ``/v1/responses``; its text."""
    create: Any = server.client.responses.create
    text: str = create(
        model=MODEL, input=prompt, max_output_tokens=48, temperature=0, extra_body=wishing(body, wishes)
    ).output_text
    return text


def all_at_once(jobs: list[Any]) -> list[Any]:
    """What each job returns, all of them started together; an exception is returned as itself."""

    def run(job: Any) -> Any:
        try:
            return job()
        except Exception as error:  # noqa: BLE001 -- handed to the test, which says which one is right
            return error

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


def is_person(text: str) -> bool:
    """Whether the text is JSON that obeys PERSON; written out, so that one can check it by eye."""
    try:
        person = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(person, dict)
        and person.keys() == {"name", "age"}
        and isinstance(person["name"], str)
        and len(person["name"]) <= 8
        and isinstance(person["age"], int)
        and 0 <= person["age"] <= 99
    )


def metric(server: Server, name: str) -> float:
    """A counter or gauge of vLLM's, summed over all engines."""
    return sum(metrics(server, name).values())


def metrics(server: Server, name: str) -> dict[str, float]:
    """The same of each engine, by its number. LookupError where there is no such counter."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found: dict[str, float] = {}
    for labels, value in re.findall(rf"^vllm:{name}(?:_total)?{{([^}}]*)}} (\S+)$", text, re.MULTILINE):
        (engine,) = re.findall(r'engine="(\d+)"', labels)
        found[engine] = found.get(engine, 0.0) + float(value)
    if not found:
        raise LookupError(f"/metrics has nothing named vllm:{name}")
    return found


def wait_until_idle(server: Server, seconds: float = 120) -> None:
    """Return once no request runs or waits. TimeoutError where that takes longer."""
    deadline = time.monotonic() + seconds
    while metric(server, "num_requests_running") + metric(server, "num_requests_waiting"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"requests still run or wait after {seconds} s")
        time.sleep(0.2)
