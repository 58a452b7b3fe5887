"""The automaton of literals against `bytes.find`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lazy_grammar.core.literals import LiteralAutomaton

_bytes = st.binary(max_size=30).map(lambda data: bytes(b"abc"[byte % 3] for byte in data))
_texts = st.lists(_bytes.filter(bool).map(lambda text: text[:5]), max_size=5)


def ends(automaton, data):
    """All ``(end, literal)`` found in `data`."""
    _, found = automaton.scan(0, data)
    return sorted((at, literal) for at, state in found for literal in automaton.outputs[state])


def test_literals_that_overlap_and_contain_each_other_are_all_found():
    automaton = LiteralAutomaton([b"ab", b"b", b"bab", b"ab"])
    assert ends(automaton, b"abab") == [(2, 0), (2, 1), (2, 3), (4, 0), (4, 1), (4, 2), (4, 3)]


@given(_texts, _bytes)
def test_it_finds_what_looking_at_every_position_finds(texts, data):
    naive = [(end, i) for end in range(len(data) + 1) for i, text in enumerate(texts) if data[:end].endswith(text)]
    assert ends(LiteralAutomaton(texts), data) == sorted(naive)


@given(_texts, _bytes, _bytes)
def test_the_state_depends_on_the_bytes_and_not_on_how_they_were_cut(texts, left, right):
    automaton = LiteralAutomaton(texts)
    state, _ = automaton.scan(0, left)
    assert automaton.scan(state, right)[0] == automaton.scan(0, left + right)[0]


@given(_texts, _bytes)
def test_a_state_remembers_the_longest_end_that_begins_a_literal(texts, data):
    automaton = LiteralAutomaton(texts)
    state, _ = automaton.scan(0, data)
    beginnings = [
        size for size in range(len(data) + 1) if any(text.startswith(data[len(data) - size :]) for text in texts)
    ]
    assert automaton.depth[state] == max(beginnings, default=0)


def test_the_table_is_complete_and_the_root_is_state_0():
    automaton = LiteralAutomaton([b"ab", b"ac"])
    assert automaton.table.shape == (4, 256)
    assert automaton.table.dtype == np.int32
    assert np.count_nonzero(automaton.table[0]) == 1
    assert automaton.hits.tolist() == [bool(found) for found in automaton.outputs]


def test_without_literals_there_is_only_the_root():
    automaton = LiteralAutomaton([])
    assert automaton.scan(0, b"anything") == (0, [])


def test_an_empty_literal_is_refused():
    with pytest.raises(ValueError, match="empty"):
        LiteralAutomaton([b"a", b""])


@pytest.mark.parametrize("name", ["table", "depth", "hits"])
def test_nothing_changes_after_construction(name):
    with pytest.raises(ValueError, match="read-only"):
        getattr(LiteralAutomaton([b"a"]), name)[0] = 1
