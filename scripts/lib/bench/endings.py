"""Endings: what a grammar's first look costs, ahead on the worker and on the step's thread, beside xgrammar's compile and fill of the same schemas."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from scripts.lib.bench.stats import show
from vllm_lazy_grammar.core.byte_trie import ByteTrie
from vllm_lazy_grammar.core.endings import NEVER, Endings, warm
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.pieces import Pieces
from vllm_lazy_grammar.core.shortest import TooMuchError
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.errors import GrammarError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from vllm_lazy_grammar.core.vocabulary import Vocabulary

LOOKS = 12
"""Places looked at in each answer."""

Times = dict[str, list[float]]


def run(folder: Path, vocabulary: Vocabulary) -> None:
    """Print the table for all schemas of a folder."""
    warm()
    engine = XgrammarEngine(vocabulary)
    pieces = Pieces(ByteTrie(vocabulary), frozenset(vocabulary.eos_ids))
    times: Times = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    rng = np.random.default_rng(1)
    for file in sorted(folder.glob("*.json")):
        key = GrammarKey("json", json.dumps(json.loads(file.read_text(encoding="utf-8"))["schema"]))
        try:
            counts[_measured(engine, pieces, key, times, rng)] += 1
        except GrammarError:
            counts["no grammar"] += 1
    print(f"\nEndings of the schemas in {folder}, {vocabulary.size} ids, ms of the thread: {dict(counts)}")
    print("| | p50 / p90 / p99 / max |\n| --- | --- |")
    for name, found in times.items():
        show(f"{name} ({len(found)})", " / ".join(f"{np.percentile(found, q):.3g}" for q in (50, 90, 99, 100)))


def _timed(times: Times, name: str, work: Callable[[], Any], clock: Callable[[], float] = time.thread_time) -> Any:
    """What `work` answers, and what it took of this thread's time; xgrammar compiles in threads of its own, so there it is wall time."""
    begin = clock()
    try:
        return work()
    finally:
        times[name].append((clock() - begin) * 1e3)


def _measured(engine: XgrammarEngine, pieces: Pieces, key: GrammarKey, times: Times, rng: np.random.Generator) -> str:
    grammar = _timed(times, "xgrammar compiles, wall time", lambda: engine.compile(key), time.perf_counter)
    matcher, row = grammar.matcher(), grammar.new_row()
    _timed(times, "xgrammar fills its first row", lambda: matcher.fill(row))
    network = _timed(times, "reading the network", grammar.network)
    if network is None:
        return "no network"
    try:
        endings = _timed(times, "preparing", lambda: _prepared(network, pieces, grammar.ids.vocabulary.row_words))
        _look(endings, endings.start, times, "first look")
        _later(endings, grammar.ids.vocabulary, times, rng)
    except TooMuchError:
        return "too much"
    return "measured"


def _prepared(network: Any, pieces: Pieces, row_words: int) -> Endings:
    endings = Endings(network, pieces, row_words)
    endings.prepare()
    return endings


def _look(endings: Endings, stand: int, times: Times, name: str) -> Any:
    return _timed(times, name, lambda: (endings.needs(stand), endings.costs(stand))[1])


def _later(endings: Endings, vocabulary: Vocabulary, times: Times, rng: np.random.Generator) -> None:
    """Look along an answer of random tokens; in a string one that ends it is taken now and then, so that answers get anywhere."""
    enders = np.array([token for token, piece in enumerate(vocabulary.pieces) if piece in (b'"', b'",', b'"}')])
    stand = endings.start
    for _ in range(LOOKS):
        after = endings.costs(stand).after
        allowed = np.flatnonzero((after >= 0) & (after < NEVER))
        if not len(allowed):
            return
        ends = np.intersect1d(enders, allowed)
        token = int(rng.choice(ends if len(allowed) > 1_000 and len(ends) and rng.random() < 0.3 else allowed))
        stand = _timed(times, "reading a token", partial(endings.advance, stand, token, vocabulary.piece(token)))
        _look(endings, stand, times, "later look")
