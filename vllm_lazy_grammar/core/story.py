"""A recorded answer as plain values: what a trace file holds, a page shows and the command line prints.

A story is a list of JSON objects: a head, one object per token, and an end. What they hold is written down in docs/tracing.md.

Invariants:
- Nothing of the prompt is in it unless it was handed over for that.
- `tell` needs what was recorded and what is immutable, so it runs on any thread.
- What `write` writes, `read` reads; a file that is no story is a RequestError.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vllm_lazy_grammar.core.misses import Misses, Region, Seen
from vllm_lazy_grammar.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from vllm_lazy_grammar.core.matcher import GrammarKey
    from vllm_lazy_grammar.core.recorder import Recorded, Step
    from vllm_lazy_grammar.core.trace import Event, Trace
    from vllm_lazy_grammar.core.triggers import Triggers
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

FORMAT = 1
_SOURCE = 4000
"""Characters of a grammar's source that are told."""

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Told:
    """What a story is made of besides what was recorded.

    Args:
        request_id: the request's.
        time: when it ended, ISO 8601.
        key: the grammar.
        triggers: what was waited for; None for an eager request.
        vocabulary: the model's.
        trace: what the gate did and what the rows cost.
        unseen: tokens of the answer before those that the session was offered: the reasoning.
        prompt: the prompt's tokens, where they shall be told.
    """

    request_id: str
    time: str
    key: GrammarKey
    triggers: Triggers | None
    vocabulary: Vocabulary
    trace: Trace
    unseen: tuple[int, ...] = ()
    prompt: tuple[int, ...] | None = None


def tell(told: Told, recorded: Recorded) -> list[Line]:
    """The story of one answer."""
    return [_head(told), *_tokens(told, recorded), _end(told, recorded)]


def _head(told: Told) -> Line:
    source = told.key.source
    head: Line = {
        "trace": FORMAT,
        "request": told.request_id,
        "time": told.time,
        "grammar": {"kind": told.key.kind, "source": source[:_SOURCE], "characters": len(source)},
        "vocabulary": told.vocabulary.size,
    }
    if told.triggers is not None:
        spec = told.triggers.spec
        head["triggers"] = [str(trigger) for trigger in spec.triggers]
        head["options"] = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name != "triggers"}
    if told.prompt is not None:
        head["prompt"] = text_of(b"".join(map(told.vocabulary.piece, told.prompt)))
    return head


def _tokens(told: Told, recorded: Recorded) -> Iterator[Line]:
    piece, byte, first, happened = told.vocabulary.piece, 0, len(told.unseen), _by_token(recorded.events)
    for n, token in enumerate(told.unseen):
        yield {"n": n, "byte": byte, "token": token, "text": text_of(piece(token)), "state": "reasoning"}
        byte += len(piece(token))
    for n, step in enumerate(recorded.steps):
        data = piece(step.token)
        line: Line = {"n": first + n, "byte": byte, "token": step.token, "text": text_of(data), "state": step.state}
        byte += len(data)
        events = [_event(event, byte) for event in happened.get(n, ())]
        yield {**line, **_fill(step), **_drafted(step), **({"events": events} if events else {})}


def _by_token(events: Iterable[Event]) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    for event in events:
        found.setdefault(event.token, []).append(event)
    return found


def _fill(step: Step) -> Line:
    if step.fill is None:
        return {}
    line: Line = {"left": step.fill.left, "fill_us": round(1e6 * (step.fill.seconds - step.fill.waited), 1)}
    return {**line, "waited_ms": round(1e3 * step.fill.waited, 3)} if step.fill.waited else line


def _drafted(step: Step) -> Line:
    line: Line = {"draft": step.draft} if step.draft else {}
    return {**line, "instead_of": step.instead_of} if step.instead_of is not None else line


def _event(event: Event, end: int) -> Line:
    """`end` is where the token ends on which it happened: what is replayed ends there too."""
    line: Line = {"kind": event.kind}
    if event.trigger is not None:
        replay = b"".join(fed.data for fed in event.replay)
        line |= {"trigger": str(event.trigger), "byte": end - len(replay), "replay": text_of(replay)}
        line["replayed_tokens"] = [fed.token if fed.whole else text_of(fed.data) for fed in event.replay]
    return line


def _end(told: Told, recorded: Recorded) -> Line:
    trace = told.trace
    offered = recorded.drafts_offered
    accepted = [step.draft for step in recorded.steps if step.draft]
    end: Line = {
        "summary": trace.describe() + trace.describe_budget(),
        "state": recorded.steps[-1].state if recorded.steps else "pending" if told.triggers is None else "awaiting",
        "tokens": len(told.unseen) + len(recorded.steps),
        "left_out": recorded.left_out,
        "compile_ms": None if recorded.compile_seconds is None else round(1e3 * recorded.compile_seconds, 3),
        "waited_ms": round(1e3 * trace.joined_seconds, 3),
        "fill_ms": round(1e3 * sum(s.fill.seconds - s.fill.waited for s in recorded.steps if s.fill), 3),
        "drafts": {
            "offered": offered,
            "accepted": len(accepted),
            "of_the_grammar": {"offered": trace.drafts_offered, "accepted": trace.drafts_accepted},
        },
        "misses": [miss._asdict() for miss in _misses(told, recorded)],
    }
    if recorded.refused is not None:
        end["refused"] = {"token": recorded.refused, "text": text_of(told.vocabulary.piece(recorded.refused))}
    return {"end": end}


def _misses(told: Told, recorded: Recorded) -> Iterable[Any]:
    if told.triggers is None:
        return ()
    seen = [*_unseen(told), *_seen(recorded, told.vocabulary)]
    fired = frozenset(str(event.trigger) for event in recorded.events if event.kind == "fired")
    return Misses(told.triggers, told.vocabulary, seen).of_all_but(fired)


def _unseen(told: Told) -> Iterator[Seen]:
    return (Seen(token, told.vocabulary.piece(token), "reasoning") for token in told.unseen)


def _seen(recorded: Recorded, vocabulary: Vocabulary) -> Iterator[Seen]:
    events = _by_token(recorded.events)
    states = ["awaiting", *(step.state for step in recorded.steps)]
    for n, (before, _) in enumerate(pairwise(states)):
        step, here = recorded.steps[n], events.get(n, [])
        refused = frozenset(str(event.trigger) for event in here if event.kind == "refused")
        yield Seen(step.token, vocabulary.piece(step.token), _region(before, here), refused)


def _region(before: str, events: Sequence[Event]) -> Region:
    """Who read a token: the gate where it was open before it, or was opened by it."""
    kinds = {event.kind for event in events}
    opened = "rearmed" in kinds and before in ("may end", "finished")
    return "observed" if before == "awaiting" or opened or kinds & {"fired", "refused"} else "held"


def text_of(data: bytes) -> str:
    """Bytes as a person reads them; what is no whole character is written out."""
    return data.decode("utf-8", "backslashreplace")


# -- files ------------------------------------------------------------------------------------------------------------


def write(story: Iterable[Line]) -> str:
    """JSON lines."""
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in story)


def read(path: Path) -> list[Line]:
    """The story in a file.

    Raises:
        RequestError: the file can not be read, or is no trace of this format.
    """
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise RequestError("trace", str(path), f"this file can not be read as JSON lines: {error}") from error
    if not lines or not all(isinstance(line, dict) for line in lines) or lines[0].get("trace") != FORMAT:
        raise RequestError("trace", str(path), f"this is no trace of format {FORMAT}")
    if "end" not in lines[-1] or not all({"n", "token", "text", "state"} <= line.keys() for line in lines[1:-1]):
        raise RequestError("trace", str(path), "this trace is not whole")
    return lines
