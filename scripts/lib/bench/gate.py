"""The flat gate: what one observed token costs, early and late in a long answer, beside one fill of xgrammar inside a JSON string."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.lib.bench.stats import median, show, verdict
from vllm_lazy_grammar.core.gate import Gate
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.triggers import Triggers, TriggerSpec

if TYPE_CHECKING:
    from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine

PROSE = (
    'The quick brown fox jumps over the lazy dog; 12 boxes, 3 crates (and a <b>bold</b> "quote") were left. '
    "Nobody knew why: it was raining, `code` was written, and {braces} came up as well.\n"
)
LENGTHS = (1_000, 100_000)
WINDOW = 500


def run(engine: XgrammarEngine, tokenizer: Any) -> None:
    """Print the table."""
    prose = tokenizer.encode(PROSE * 20, add_special_tokens=False)
    tokens = (prose * (max(LENGTHS) // len(prose) + 2))[: max(LENGTHS) + WINDOW]
    fill = _fill_in_string(engine)
    print("\nFlat gate: us per observed token of prose; one xgrammar fill inside a JSON string: " + f"{fill:.2f} us")
    print("| triggers | at 1,000 tokens, at 100,000, growth; of one fill |\n| --- | --- |")
    words = [f"word:<function={i}" for i in range(200)]
    patterns = [rf"pattern:\s(<tool{i}>)[a-z]+\(" for i in range(20)]
    for name, triggers, bar in (("200 words", words, 0.3), ("200 words, 20 patterns", words + patterns, 1.0)):
        early, late = _costs(engine, triggers, tokens)
        growth, share = late / early, late / fill
        show(
            name,
            f"{early:.2f} / {late:.2f} / {growth:.2f} ({verdict(growth, 1.1)}); **{share:.2f}** ({verdict(share, bar)})",
        )


def _costs(engine: XgrammarEngine, triggers: list[str], tokens: list[int]) -> tuple[float, float]:
    """Microseconds per token in windows that begin at each of LENGTHS, the medians of five runs."""
    spec = TriggerSpec.parse({"grammar_triggers": triggers})
    assert spec is not None
    compiled = Triggers.compile(spec, engine.vocabulary, stop_ids=())
    runs: list[list[float]] = []
    for _ in range(5):
        gate, found, at = Gate(compiled, engine.vocabulary), [], 0
        for length in LENGTHS:
            for token in tokens[at:length]:
                gate.observe(token)
            begin = time.perf_counter()
            for token in tokens[length : length + WINDOW]:
                gate.observe(token)
            found.append((time.perf_counter() - begin) / WINDOW * 1e6)
            at = length + WINDOW
        runs.append(found)
    return median([r[0] for r in runs]).value, median([r[1] for r in runs]).value


def _fill_in_string(engine: XgrammarEngine) -> float:
    """Microseconds of one fill of xgrammar's own matcher inside a JSON string."""
    import xgrammar as xgr

    grammar = engine.compile(GrammarKey("json", '{"type": "string"}'))
    matcher = xgr.GrammarMatcher(grammar._compiled, override_stop_tokens=[grammar.ids.stop])
    matcher.accept_string('"a')
    row = np.zeros((1, engine.vocabulary.row_words), np.int32)
    found = []
    for _ in range(2000):
        begin = time.perf_counter()
        matcher.fill_next_token_bitmask(row)
        found.append((time.perf_counter() - begin) * 1e6)
    return median(found).value
