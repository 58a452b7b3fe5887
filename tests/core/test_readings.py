"""How many ways a grammar has to read a text, on networks small enough to count by hand."""

from __future__ import annotations

import pytest

from vllm_lazy_grammar.core.network import Call, Network, Span, State
from vllm_lazy_grammar.core.readings import Readings, most_ways

A = ord("a")


def plain():
    """One rule: any number of `a`."""
    return Network([State(spans=[Span(A, A, 0)], final=True)], 0)


def doubled():
    """Two rules: any number of `a`-runs, each any number of `a`, as in ``(a+)+``."""
    outer = State(calls=[Call(1, 2)])
    inner = State(spans=[Span(A, A, 3)])
    return Network([outer, inner, State(jumps=[0], final=True), State(spans=[Span(A, A, 3)], final=True)], 0)


def test_a_text_with_one_reading_needs_no_ways():
    assert most_ways(plain(), 100) == 0


def test_a_text_whose_parts_can_be_cut_anywhere_needs_more_ways_with_every_byte():
    readings = Readings(doubled(), 1_000)
    counts = []
    for _ in range(6):
        readings.step(A)
        counts.append(readings.most)
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


def test_counting_ends_at_the_bound():
    assert 5 < most_ways(doubled(), 5) < 20


@pytest.mark.parametrize("bound", [10, 1_000])
def test_the_count_is_the_same_every_time(bound):
    assert most_ways(doubled(), bound) == most_ways(doubled(), bound)


def test_only_bytes_that_may_come_next_are_named():
    network = Network([State(spans=[Span(A, A + 2, 1)]), State(final=True)], 0)
    readings = Readings(network, 10)
    assert readings.bytes_next() == [A, A + 2]
    readings.step(A + 1)
    assert readings.bytes_next() == []
