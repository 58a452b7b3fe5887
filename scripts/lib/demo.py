"""The demo: a real server with `--guided-decoding-backend lazy`, three answers and a tool call in colour, then 20 requests with and without.

Invariants:
- The server is ended however the demo ends.
- It fails where an answer whose trigger fired, and which ended by itself, does not obey the schema, or a call does not; and where no trigger
  fired at all, since nothing would have been shown then.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from tests.serving.servers import DEMO, MODEL, Server, ServerError, lazy

MARKER = "<answer>"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "product": {"type": "string", "minLength": 1, "maxLength": 30},
        "sentiment": {"enum": ["positive", "negative", "mixed"]},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "reasons": {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": 40},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["product", "sentiment", "stars", "reasons"],
    "additionalProperties": False,
}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 30},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe", "Oceania"]},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "continent", "rivers"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 30},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
LAZILY = lazy({"json": SCHEMA}, f"word:{MARKER}", grammar_start="after")

SYSTEM = (
    "You read product reviews. First say in one short sentence what the customer feels. "
    f"Then write {MARKER} and a JSON object with the keys product, sentiment (positive, negative or mixed), "
    "stars (1 to 5) and reasons (a list of strings)."
)
EXAMPLE = "The kettle boils fast, but the lid broke after a week."
EXAMPLE_ANSWER = (
    f"The customer likes the speed but not the quality.\n{MARKER}"
    '{"product": "kettle", "sentiment": "mixed", "stars": 3, "reasons": ["boils fast", "lid broke"]}'
)
REVIEWS = (
    "These headphones sound wonderful and the battery lasts for days.",
    "The blender leaks, smells of burnt rubber and is far too loud.",
    "Lovely backpack, though one zip got stuck on the first trip.",
    "The lamp is bright, cheap and easy to set up.",
    "My new phone case cracked on day one. Never again.",
    "The keyboard feels great; I only wish that it had backlight.",
    "Terrible umbrella: it turned inside out in a light breeze.",
    "The tent kept us dry through two storms. Worth every cent.",
    "The coffee machine makes fine espresso but cleaning it is a pain.",
    "The running shoes are light and comfortable.",
    'The screen of this tablet is dim and the sound is "tinny", as my son says.',
    "A solid desk. The holes did not line up, and support sent new parts quickly.",
    "The toaster burns one side and leaves the other white.",
    "The guitar stays in tune and looks beautiful.",
    "The vacuum cleaner picks up everything, even cat hair.",
    "The watch stopped twice in a month, and the strap itches.",
    "Good book, bad translation.",
    "The chair arrived scratched, but it is very comfortable.",
    "The drone flies well; the app crashes all the time.",
    "The soap smells of roses and leaves my skin soft.",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: the text, and why it ended (`stop`, `length`)."""

    text: str
    finish: str

    @property
    def fired(self) -> bool:
        """Whether the marker was written: from there on the grammar holds."""
        return MARKER in self.text

    def complaint(self) -> str:
        """What is wrong with the JSON behind the marker; empty where it obeys the schema."""
        if not self.fired:
            return f"no {MARKER}"
        try:
            jsonschema.validate(json.loads(self.text.partition(MARKER)[2]), SCHEMA)
        except ValueError as error:
            return f"no JSON: {error}"
        except jsonschema.ValidationError as error:
            return f"against the schema: {error.message}"
        return ""


def review_messages(review: str) -> list[dict[str, str]]:
    """The conversation that asks about one review."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": EXAMPLE},
        {"role": "assistant", "content": EXAMPLE_ANSWER},
        {"role": "user", "content": review},
    ]


def ask(server: Server, messages: list[dict[str, str]], extra: dict[str, Any]) -> Answer:
    """One chat request; greedy, so that two runs say the same."""
    create: Any = server.client.chat.completions.create
    choice = create(model=MODEL, messages=messages, max_tokens=200, temperature=0, extra_body=extra).choices[0]
    return Answer(choice.message.content or "", choice.finish_reason)


def painted(text: str) -> str:
    """The constrained part, in colour on a terminal that wants it."""
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return text
    return f"\033[1;32m{text}\033[0m"


def say(text: str = "") -> None:
    """One line of the demo, at once."""
    print(text, flush=True)


def show(title: str, question: str, free: str, constrained: str) -> None:
    """One answer with its two parts."""
    say(f"\n{title}\n  user:  {question}")
    say("  model: " + (free + painted(constrained)).replace("\n", "\n         "))


def show_three(server: Server) -> None:
    """A trigger that fires after prose, one that never fires, an eager schema."""
    say("\nThe constrained part of each answer is green where this is a terminal.")
    answer = ask(server, review_messages(REVIEWS[3]), LAZILY)
    free, marker, constrained = answer.text.partition(MARKER)
    show(
        f"1. The trigger word:{MARKER} fires after prose; behind it the schema holds.",
        REVIEWS[3],
        free + marker,
        constrained,
    )

    question = "What is the capital of France?"
    answer = ask(server, [{"role": "user", "content": question}], LAZILY)
    show("2. The same grammar and trigger; the trigger never fires, nothing is constrained.", question, answer.text, "")

    question = "Describe Paris as JSON."
    answer = ask(server, [{"role": "user", "content": question}], lazy({"json": CITY}))
    show("3. No trigger: the schema holds from the first token.", question, "", answer.text)


def show_call(server: Server) -> str:
    """A tool call that must come, behind free prose. What is wrong with it; empty where nothing is."""
    question = "What will the weather be in Paris for the next 3 days?"
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
    create: Any = server.client.chat.completions.create
    messages = [{"role": "user", "content": question}]
    choice = create(
        model=MODEL, messages=messages, tools=[tool], tool_choice="required", max_tokens=200, temperature=0
    ).choices[0]
    calls = [f"{call.function.name}({call.function.arguments})" for call in choice.message.tool_calls or ()]
    title = "4. A tool call that must come (tool_choice required, not strict): prose is free, the call obeys the tool's schema."
    show(title, question, choice.message.content or "", "\n".join(["", *calls]))
    try:
        for call in choice.message.tool_calls or ():
            jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"the call is wrong: {error}"
    return "" if calls else "there is no call"


def compare(server: Server) -> tuple[list[Answer], list[Answer]]:
    """All reviews at once, unconstrained and lazy; the answers in the reviews' order."""
    say(f"\n5. {len(REVIEWS)} requests side by side, unconstrained and lazy, all at once:")
    jobs = [(review, extra) for extra in ({}, LAZILY) for review in REVIEWS]
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(ask, server, review_messages(review), extra) for review, extra in jobs]
        for done, _ in enumerate(as_completed(futures), 1):
            if done % 10 == 0:
                say(f"   {done} of {len(jobs)} answered")
        answers = [future.result() for future in futures]
    return answers[: len(REVIEWS)], answers[len(REVIEWS) :]


def verdict(answer: Answer) -> str:
    """`ok`, or what is wrong, cut to a column."""
    return (answer.complaint() or "ok")[:44]


def show_comparison(free: list[Answer], held: list[Answer]) -> None:
    """The table and the shares."""
    say(f"\n   {'unconstrained':<46}lazy")
    for one, other in zip(free, held, strict=True):
        say(f"   {verdict(one):<46}{verdict(other)}")
    for name, answers in (("unconstrained", free), ("lazy", held)):
        good = sum(not answer.complaint() for answer in answers)
        say(f"   {name}: {good} of {len(answers)} parse and obey the schema ({100 * good // len(answers)} %)")


def start(log_path: Path) -> Server:
    """The server, with its command line and the seconds it took."""
    say("$ vllm " + shlex.join(DEMO.command(DEMO.model_path(), 8000)[1:]))
    say("  starting (half a minute on two cores) ...")
    began = time.monotonic()
    try:
        server = Server.start(DEMO, log_path)
    except ServerError as error:
        raise SystemExit(f"the server did not start:\n{error}") from error
    say(f"  up after {time.monotonic() - began:.0f} s on port {server.port}")
    return server


def complaints(held: list[Answer]) -> list[str]:
    """What is wrong with the lazy answers; empty where some fired, and those of them that ended by themselves obey the schema."""
    if not any(answer.fired for answer in held):
        return [f"no lazy answer wrote {MARKER}, so no grammar held anything"]
    ended = [answer for answer in held if answer.fired and answer.finish == "stop"]
    return [f"{answer.complaint()}: {answer.text!r}" for answer in ended if answer.complaint()]


def main() -> int:
    """Run it; 0 where lazy answers fired, every one that fired and ended by itself obeys the schema, and the call its tool's."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended then too
    with tempfile.TemporaryDirectory(prefix="lazy-grammar-demo-") as folder:
        server = start(Path(folder) / "server.log")
        try:
            show_three(server)
            wrong = show_call(server)
            free, held = compare(server)
            show_comparison(free, held)
        finally:
            server.stop()
    broken = [*complaints(held), *([wrong] if wrong else [])]
    for each in broken:
        say(f"   BROKEN: {each}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
