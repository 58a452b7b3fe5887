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


def chosen(*, first, other):
    """`a`, `b` or `c`; behind `b` the ambiguous rules of `doubled`, behind the others nothing."""
    start = State(spans=[Span(A, A, 1), Span(A + 1, A + 1, other), Span(A + 2, A + 2, 1)])
    inner = doubled().states
    moved = [
        State(
            [span._replace(target=span.target + 3) for span in state.spans],
            [Call(call.start + 3, call.target + 3) for call in state.calls],
            [target + 3 for target in state.jumps],
            final=state.final,
        )
        for state in inner
    ]
    return Network([start, State(final=True), State(calls=[Call(3, 1)]), *moved], first)


def test_what_is_ambiguous_behind_an_alternative_that_no_walk_chooses_is_found():
    assert most_ways(chosen(first=0, other=2), 20) > 20
    assert most_ways(chosen(first=0, other=1), 20) == 0


def test_of_the_bytes_that_may_come_next_the_busiest_is_the_one_that_most_readings_take():
    state = State(spans=[Span(A, A + 9, 1), Span(A + 4, A + 6, 2), Span(A + 6, A + 20, 3)])
    readings = Readings(Network([state, State(final=True), State(final=True), State(final=True)], 0), 10)
    assert readings.busiest() == A + 6


def test_a_walk_follows_the_byte_that_keeps_most_readings_alive():
    start = State(calls=[Call(1, 2)], spans=[Span(A - 1, A - 1, 4), Span(A + 1, A + 1, 4)])
    runs = [State(spans=[Span(A, A, 3)]), State(jumps=[0], final=True), State(spans=[Span(A, A, 3)], final=True)]
    network = Network([start, *runs, State(final=True)], 0)  # (a+)+ with an end by what lies on both sides of `a`
    assert most_ways(network, 20) > 20


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
