"""Step cost: our part of a scheduler step beside vLLM's xgrammar backend, the same requests and tokens, in one process.

Told by the clock on the wall and by the process's own processor time (all of its threads): on a machine with other work the latter is steadier.
"""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from scripts.lib.bench.managers import Batch, manager, tokens_of
from scripts.lib.bench.stats import pairs, show, verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "kind": {"enum": ["note", "task", "event"]},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["title", "kind", "count", "tags", "place"],
}
VALUE = {
    "title": "A walk in the park, then coffee with Ann",
    "kind": "event",
    "count": 17,
    "tags": ["outdoors", "friends", "a rather longer tag than the others"],
    "place": {"street": "Long Road 5", "zip": "12345"},
}
BAR = 1.1
ROUNDS = 30


def run(name: str, model: Path) -> None:
    """Print the table for a model's vocabulary."""
    ours, theirs = manager(model, "lazy"), manager(model, "xgrammar")
    tokens = tokens_of(ours.tokenizer, VALUE)
    print(f"\nStep cost: {len(tokens)} steps of one JSON answer, {name}, us per request and step")
    print("| requests | ours, vLLM's xgrammar backend, ratio |\n| --- | --- |")
    for count in (1, 32, 256):
        rounds = ROUNDS if count < 256 else 10
        for clock, measured in ((time.perf_counter, ""), (time.process_time, ", processor time")):
            mine, stock, ratio = pairs(
                partial(_seconds, ours, "lazy", tokens, count, clock),
                partial(_seconds, theirs, "xgrammar", tokens, count, clock),
                rounds,
            )
            show(f"{count}{measured}", f"{mine} / {stock} / **{ratio}** ({verdict(ratio.value, BAR)})")
    _awaiting(ours, tokens)


def _seconds(
    manager_: Any, backend: str, tokens: list[int], count: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Microseconds per request and step."""
    batch = Batch(manager_, backend, {"json": SCHEMA}, count)
    gc.disable()
    begin = clock()
    for token in tokens:
        batch.step(token)
    spent = clock() - begin
    gc.enable()
    return spent / len(tokens) / count * 1e6


def _awaiting(ours: Any, tokens: list[int]) -> None:
    """Half of the requests awaiting, beside all inside."""

    def half() -> float:
        inside = Batch(ours, "lazy", {"json": SCHEMA}, 16)
        waiting = Batch(
            ours, "lazy", {"json": SCHEMA}, 16, {"grammar_triggers": ["word:<answer>"], "grammar_start": "after"}
        )
        both = {**{f"i{k}": r for k, r in inside.requests.items()}, **{f"w{k}": r for k, r in waiting.requests.items()}}
        inside.requests, inside.ids = both, list(both)
        begin = time.perf_counter()
        for token in tokens:
            inside.step(token)
        return (time.perf_counter() - begin) / len(tokens) / 32 * 1e6

    mine, full, ratio = pairs(half, lambda: _seconds(ours, "lazy", tokens, 32), ROUNDS)
    show(
        "32, half awaiting, beside all inside",
        f"{mine} / {full} / **{ratio}** ({verdict(ratio.value, 0.6)}, due with masks)",
    )
