"""How the command line prints a story: one line per token, what happened at it, and what came of it.

Invariants:
- Text of an answer is printed as text: nothing in it is read as markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from vllm_lazy_grammar.cli.follow import Refusal
    from vllm_lazy_grammar.core.story import Line
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

STYLES = {
    "reasoning": "magenta",
    "awaiting": "dim",
    "pending": "yellow",
    "inside": "cyan",
    "may end": "green",
    "finished": "bold green",
    "ended": "bold",
}
_SHOWN = 24


def tokens(console: Console, story: list[Line]) -> None:
    """A table of the answer's tokens."""
    table = Table(box=None, pad_edge=False)
    for name, side in (("#", "right"), ("byte", "right"), ("token", "right"), ("text", "left"), ("state", "left")):
        table.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    table.add_column("allowed", justify="right", no_wrap=True)
    table.add_column("what happened", overflow="fold")
    size = story[0]["vocabulary"]
    for line in story[1:-1]:
        left = line.get("left")
        table.add_row(
            str(line["n"]),
            str(line["byte"]),
            str(line["token"]),
            Text(repr(line["text"])),
            Text(line["state"], style=STYLES.get(line["state"], "")),
            "" if left is None else "all" if left == size else str(left),
            Text("; ".join(_happened(line))),
        )
    console.print(table)


def _happened(line: Line) -> Iterator[str]:
    for event in line.get("events", ()):
        yield told_event(event)
    if line.get("waited_ms"):
        yield f"waited {line['waited_ms']} ms for the compile"
    if line.get("draft"):
        yield f"drafted by the {line['draft']}"
    if "instead_of" in line:
        yield f"instead of the draft {line['instead_of']}"


def told_event(event: Line) -> str:
    """One thing that the gate did, in words."""
    if event["kind"] == "rearmed":
        return "the grammar is complete: the triggers wait anew"
    where = f"at byte {event['byte']}"
    replay = f"replayed {event['replay']!r}" if event["replay"] else "nothing to replay"
    if event["kind"] == "fired":
        return f"{event['trigger']} fires, the grammar begins {where}, {replay}"
    return f"{event['trigger']} appears, and the grammar refuses {event['replay']!r} {where}: prose"


def summary(console: Console, story: list[Line]) -> None:
    """What came of it, in a few lines."""
    end = story[-1]["end"]
    waited = f", the engine waited {end['waited_ms']} ms for it" if end["waited_ms"] else ", nobody waited for it"
    compiled = "not done" if end["compile_ms"] is None else f"{end['compile_ms']} ms{waited}"
    console.print(Text(f"{end['summary']}; {end['tokens']} tokens, now {end['state']}"))
    console.print(Text(f"compile {compiled}; masks {end['fill_ms']} ms"))
    drafts = end["drafts"]
    if drafts["offered"]:
        console.print(Text(f"drafts: {drafts['offered']} offered, {drafts['accepted']} accepted"))
    if "refused" in end:
        console.print(Text(f"refused: token {end['refused']['token']} {end['refused']['text']!r}", style="red"))
    misses(console, end["misses"])


def misses(console: Console, found: list[Line]) -> None:
    """How near the triggers came that did not fire."""
    for miss in found:
        what = f"{miss['text']!r} at byte {miss['byte']}: " if miss["byte"] is not None else ""
        console.print(Text(f"did not fire: {miss['trigger']}: {what}{miss['why']}", style="yellow"))


def refusal(console: Console, found: Refusal, vocabulary: Vocabulary) -> None:
    """Where an answer was refused, and what would have been allowed there."""
    what = "at the end" if found.token is None else f"token {found.token} {_shown(vocabulary, found.token)}"
    console.print(Text(f"refused at #{found.place}: {what}: {found.why}", style="bold red"))
    if found.allowed:
        shown = ", ".join(_shown(vocabulary, token) for token in found.allowed[:_SHOWN])
        more = f", and {len(found.allowed) - _SHOWN} more" if len(found.allowed) > _SHOWN else ""
        console.print(Text(f"allowed there ({len(found.allowed)}): {shown}{more}"))


def _shown(vocabulary: Vocabulary, token: int) -> str:
    return repr(vocabulary.piece(token).decode("utf-8", "backslashreplace"))
