"""What traces cost a scheduler's step: a server that writes none, one that could, and one that traces every request; in one process."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any

from scripts.lib.bench.managers import manager, tokens_of
from scripts.lib.bench.stats import pairs, show, verdict
from scripts.lib.bench.steps import VALUE, _seconds

if TYPE_CHECKING:
    from pathlib import Path

COUNT, ROUNDS, OFF_BAR = 32, 30, 1.02


def run(model: Path) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        could = {"additional_config": {"lazy_grammar": {"trace_dir": folder}}}
        every = {"additional_config": {"lazy_grammar": {"trace_dir": folder, "trace_rate": 1}}}
        without, able, tracing = (manager(model, "lazy", **config) for config in ({}, could, every))
        tokens = tokens_of(without.tokenizer, VALUE)
        print(f"\nTraces: {len(tokens)} steps of one JSON answer, {COUNT} requests, us per request and step")
        print("| server | it, beside one without trace_dir, ratio |\n| --- | --- |")
        plain = partial(_seconds, without, "lazy", tokens, COUNT)
        for name, other, bar in (("trace_dir set, no request traced", able, OFF_BAR), ("each request traced", tracing, None)):  # fmt: skip
            _row(name, partial(_seconds, other, "lazy", tokens, COUNT), plain, bar)
        for each in (without, able, tracing):
            each.clear_backend()


def _row(name: str, measured: Any, plain: Any, bar: float | None) -> None:
    mine, theirs, ratio = pairs(measured, plain, ROUNDS)
    judged = "" if bar is None else f" ({verdict(ratio.value, bar)})"
    show(name, f"{mine} / {theirs} / **{ratio}**{judged}")
