"""What metrics cost: a scheduler's step, and the end of a request, of an engine that counts and of one that does not; in one process."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from scripts.lib.bench.managers import Batch, manager, tokens_of
from scripts.lib.bench.stats import pairs, show, verdict
from scripts.lib.bench.steps import SCHEMA, VALUE, _seconds

if TYPE_CHECKING:
    from pathlib import Path

COUNT, ROUNDS, BAR = 32, 40, 1.02
_LAZILY = {"grammar_triggers": ["word:<answer>"], "grammar_start": "after"}


def run(model: Path) -> None:
    """Print the table."""
    counting, silent = (manager(model, "lazy", additional_config=_settings(metrics=on)) for on in (True, False))
    tokens = tokens_of(counting.tokenizer, VALUE)
    print(f"\nMetrics: {COUNT} requests, us per request")
    print("| what | with metrics / without / ratio |\n| --- | --- |")
    mine, theirs = (partial(_seconds, each, "lazy", tokens, COUNT) for each in (counting, silent))
    _row(f"a step, of {len(tokens)} of one JSON answer", mine, theirs, BAR)
    for name, xargs in (("eager", None), ("lazy, never fired", _LAZILY)):
        at_end, silently = (partial(_ends, each, xargs) for each in (counting, silent))
        _row(f"the end of a request, {name}, processor time", at_end, silently, None)
    for each in (counting, silent):
        each.clear_backend()


def _settings(*, metrics: bool) -> dict[str, Any]:
    return {"lazy_grammar": {"metrics": metrics}}


def _ends(manager_: Any, xargs: dict[str, Any] | None) -> float:
    """Microseconds per request, of this thread's processor time."""
    batch = Batch(manager_, "lazy", {"json": SCHEMA}, COUNT, xargs)
    batch.fill()
    grammars = [request.structured_output_request.grammar for request in batch.requests.values()]
    begin = time.thread_time()
    for grammar in grammars:
        grammar.finish()
    return (time.thread_time() - begin) / COUNT * 1e6


def _row(name: str, mine: Any, theirs: Any, bar: float | None) -> None:
    counted, plain, ratio = pairs(mine, theirs, ROUNDS)
    judged = "" if bar is None else f" ({verdict(ratio.value, bar)})"
    show(name, f"{counted} / {plain} / **{ratio}**{judged}")
