"""Rejected drafts: a step with 8 drafts, all of them legal and none accepted, beside vLLM's xgrammar backend; in one process, without a model."""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from scripts.lib.bench.managers import Batch, manager, tokens_of
from scripts.lib.bench.stats import pairs, show, verdict
from scripts.lib.bench.steps import SCHEMA, VALUE

if TYPE_CHECKING:
    from pathlib import Path

DRAFTS = 8
BAR = 1.0
ROUNDS = 20
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3}


def run(name: str, model: Path) -> None:
    """Print the table for a model's vocabulary."""
    ours, theirs = (manager(model, backend, speculative_config=NGRAM) for backend in ("lazy", "xgrammar"))
    tokens = tokens_of(ours.tokenizer, VALUE)
    print(f"\nRejected drafts: {DRAFTS} a step, {name}, us per request and step")
    print("| requests | ours, vLLM's xgrammar backend, ratio |\n| --- | --- |")
    for count in (1, 32):
        rounds = ROUNDS if count == 1 else ROUNDS // 2
        mine, stock, ratio = pairs(
            partial(_seconds, ours, "lazy", tokens, count), partial(_seconds, theirs, "xgrammar", tokens, count), rounds
        )
        show(str(count), f"{mine} / {stock} / **{ratio}** ({verdict(ratio.value, BAR)})")
    mine, full, ratio = pairs(
        partial(_seconds, ours, "lazy", tokens, 1, proposed=0), partial(_seconds, ours, "lazy", tokens, 1), ROUNDS
    )
    show("1, the drafts being the grammar's own, beside the proposer's", f"{mine} / {full} / **{ratio}**")


def _seconds(manager_: Any, backend: str, tokens: list[int], count: int, proposed: int = DRAFTS) -> float:
    """Microseconds per request and step."""
    batch = Batch(manager_, backend, {"json": SCHEMA}, count)
    steps = len(tokens) - DRAFTS
    gc.disable()
    begin = time.perf_counter()
    for at in range(steps):
        drafts = tokens[at : at + proposed]
        scheduled = {name: manager_.validate_tokens(batch.requests[name], list(drafts)) for name in batch.ids}
        manager_.grammar_bitmask(batch.requests, batch.ids, scheduled)
        for request in batch.requests.values():
            request.append_output_token_ids([tokens[at]])
            if not manager_.accept_tokens(request, [tokens[at]]):
                raise RuntimeError(f"token {tokens[at]} was refused")
    spent = time.perf_counter() - begin
    gc.enable()
    return spent / steps / count * 1e6
