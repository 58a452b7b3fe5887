"""The byte trie: a row over one literal position, beside simulating each token in the same compiled code, and beside a fill of xgrammar."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from scripts.lib.bench.gate import _fill_in_string
from scripts.lib.bench.stats import median, show, verdict
from vllm_lazy_grammar.core.byte_trie import DEAD, ByteTrie
from vllm_lazy_grammar.core.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine

LITERAL = b'<tool_call>\n{"name": "get_weather", "arguments": '


@compiled
def _each(
    table: NDArray[np.int32], state: int, data: NDArray[np.uint8], ends: NDArray[np.int64], row: NDArray[np.int32]
) -> None:
    row[:] = 0
    begin = 0
    for token in range(len(ends)):
        at = state
        for i in range(begin, ends[token]):
            at = table[at, data[i]]
            if at < 0:
                break
        if at >= 0 and ends[token] > begin:
            row[token // 32] |= np.int32(1) << (token % 32)
        begin = ends[token]


def run(engine: XgrammarEngine) -> None:
    """Print the table."""
    trie, vocabulary = ByteTrie(engine.vocabulary), engine.vocabulary
    table = np.full((len(LITERAL) + 1, 256), DEAD, np.int32)
    for i, byte in enumerate(LITERAL):
        table[i, byte] = i + 1
    pieces = [b"" if t in vocabulary.special_ids else vocabulary.piece(t) for t in range(vocabulary.size)]
    data = np.frombuffer(b"".join(pieces), np.uint8)
    ends = np.cumsum([len(p) for p in pieces], dtype=np.int64)
    row, slow = (np.zeros(vocabulary.row_words, np.int32) for _ in range(2))
    walk = _times(lambda: trie.survivors(table, 0, row))
    each = _times(lambda: _each(table, 0, data, ends, slow))
    np.testing.assert_array_equal(row, slow)
    fill = _fill_in_string(engine)
    print(f"\nByte trie: a row over one literal position, {vocabulary.size} ids, us")
    print("| | |\n| --- | --- |")
    show(
        "cold walk / each token simulated",
        f"{walk:.2f} / {each:.1f} = **{walk / each:.4f}** ({verdict(walk / each, 0.1)})",
    )
    show(
        "cold walk / xgrammar fills in a string",
        f"{walk:.2f} / {fill:.2f} = **{walk / fill:.2f}** ({verdict(walk / fill, 5)})",
    )


def _times(work: object) -> float:
    assert callable(work)
    work()
    found = []
    for _ in range(300):
        begin = time.perf_counter()
        work()
        found.append((time.perf_counter() - begin) * 1e6)
    return median(found).value
