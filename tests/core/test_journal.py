"""The journal gives back what was recorded, last first."""

from __future__ import annotations

from vllm_lazy_grammar.core.blanks import START
from vllm_lazy_grammar.core.journal import GateMoves, Journal, Phase, Position
from vllm_lazy_grammar.core.matcher import NO_MATCHER


def test_entries_come_back_last_first_whatever_each_cost():
    journal = Journal()
    free = Position(Phase.AWAITING, NO_MATCHER, 0, START)
    held = free._replace(phase=Phase.INSIDE)
    journal.record(free, GateMoves.OBSERVED)
    journal.record(held, GateMoves.NONE)
    assert len(journal) == 2
    assert journal.undo() == (held, GateMoves.NONE)
    assert journal.undo() == (free, GateMoves.OBSERVED)
    assert len(journal) == 0


def test_a_position_that_did_not_change_is_stored_by_reference():
    journal = Journal()
    free = Position(Phase.AWAITING, NO_MATCHER, 0, START)
    for _ in range(3):
        journal.record(free, GateMoves.OBSERVED)
    assert all(journal.undo()[0] is free for _ in range(3))
