"""A position in a grammar compiled by xgrammar.

Invariants:
- No id of a request stops the matcher: it is told to stop on one that nothing can sample, and never given it.
- A step that takes long is charged by this thread's own time, so a busy machine is not held against a grammar.
- What xgrammar answers is put right here: steps are counted, empty bytes are no step, and rows lose what is not the grammar's.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING, Self

import numpy as np

from vllm_lazy_grammar.core.matcher import CERTAIN_LIMIT, certain_by_steps, fill_ahead
from vllm_lazy_grammar.core.vocabulary import WORD_BITS
from vllm_lazy_grammar.errors import GrammarError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xgrammar as xgr
    from numpy.typing import NDArray

    from vllm_lazy_grammar.core.matcher import Row, Rows
    from vllm_lazy_grammar.engines.xgrammar import XgrammarGrammar

SLOW_NS = 50_000_000
"""A step that takes a thread longer is charged to its grammar."""

ALLOWED_NS = 500_000_000
"""What may be charged altogether before a grammar is given up: every other request waits meanwhile."""


@lru_cache(64)
def _chain(length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A tree of drafts that is a chain, as xgrammar takes it: each node's child, and its sibling."""
    return np.array([*range(1, length), -1], np.int64), np.full(length, -1, np.int64)


def _has(row: Row, token: int) -> bool:
    return bool(row[token // WORD_BITS] >> (token % WORD_BITS) & 1)


class XgrammarMatcher:
    """A position in a grammar compiled by xgrammar; implements `Matcher` and `LooksAhead`.

    Args:
        matcher: xgrammar's, told to stop on an id that nothing can sample.
        grammar: what it was compiled from, and how its rows are put right.
    """

    __slots__ = ("_clock", "_complete", "_grammar", "_matcher", "_overdrawn", "_refused", "_size", "_steps", "_stop")

    def __init__(self, matcher: xgr.GrammarMatcher, grammar: XgrammarGrammar) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._refused = grammar.refused
        self._size = grammar.ids.vocabulary.size
        self._steps = 0
        self._clock = time.perf_counter_ns
        self._overdrawn = 0
        self._stop = grammar.ids.stop_place
        self._complete: bool | None = None  # what a fill told of this position, so that nobody has to ask again

    @property
    def steps(self) -> int:
        """Steps accepted and not rolled back."""
        return self._steps

    def accept(self, token: int) -> bool:
        """Advance by one whole token; False, and nothing changed, where it is refused. GrammarError where steps take too long."""
        if token in self._refused or not 0 <= token < self._size:
            return False
        start = self._clock()
        taken: bool = self._matcher.accept_token(token)
        self._steps += taken
        self._complete = None
        if self._clock() - start > SLOW_NS:
            self._charge_step(self._clock() - start, taken)
        return taken

    def accept_bytes(self, data: bytes) -> bool:
        """Advance by bytes, as one step; empty bytes are no step. GrammarError where steps take too long."""
        if not data:
            return True
        start = self._clock()
        taken: bool = self._matcher.accept_string(data)
        self._steps += taken
        self._complete = None
        if self._clock() - start > SLOW_NS:
            self._charge_step(self._clock() - start, taken)
        return taken

    def fill(self, row: Row) -> bool:
        """Write the mask of the next token; always True, since an id that is never text is masked. GrammarError where steps take too long."""
        start = self._clock()
        if not self._matcher.fill_next_token_bitmask(row):
            row.fill(-1)
        if self._clock() - start > SLOW_NS:
            self._charge(self._clock() - start)
        word, shift = self._stop
        complete = self._complete = bool(row[word] >> shift & 1)
        if complete or self._grammar.ids.has_partial_word:
            for at, keep in self._grammar.ids.clears:
                row[at] &= keep
        if self._grammar.keep is not None:
            row &= self._grammar.keep
        return True

    def taken(self, tokens: Sequence[int]) -> int:
        """How many of these tokens would be accepted, up to the first that is not. GrammarError where they take too long."""
        start, count = self._clock(), 0
        accept, refused, size = self._matcher.accept_token, self._refused, self._size
        for token in tokens:
            if token in refused or not 0 <= token < size or not accept(token):
                break
            count += 1
        if count:
            self._matcher.rollback(count)
        self._charge_several(self._clock() - start, len(tokens))
        return count

    def fill_ahead(self, tokens: Sequence[int], rows: Rows) -> list[bool]:
        """Write the mask of this position and of that behind each token, in one call. GrammarError where they take too long."""
        if tokens and (min(tokens) < 0 or max(tokens) >= self._size or not self._refused.isdisjoint(tokens)):
            return fill_ahead(self, tokens, rows)
        start = self._clock()
        children, siblings = _chain(len(rows))
        self._matcher.traverse_draft_tree(children, siblings, np.array((0, *tokens), np.int64), rows)
        self._charge_several(self._clock() - start, len(rows))
        cell, reached = rows.item, 1
        for i, token in enumerate(tokens):
            if not cell(i, token // WORD_BITS) >> token % WORD_BITS & 1:
                break
            reached += 1
        word, shift = self._stop
        complete = [bool(bits >> shift & 1) for bits in rows[:reached, word].tolist()]
        if self._grammar.ids.has_partial_word or any(complete):
            for at, keep in self._grammar.ids.clears:
                rows[:, at] &= keep
        if self._grammar.keep is not None:
            rows &= self._grammar.keep
        return complete

    def _charge_step(self, spent: int, steps: int) -> None:
        """Charge an accepted step, or none; where steps take too long it is taken back before that is raised."""
        try:
            self._charge(spent)
        except GrammarError:
            self.rollback(steps)
            raise

    def _charge_several(self, spent: int, calls: int) -> None:
        if spent > SLOW_NS * calls:
            self._charge(spent - SLOW_NS * (calls - 1))

    def _charge(self, spent: int) -> None:
        """A call took long. By the clock on the wall that may be another's doing: from the next one on this thread's own time counts."""
        if self._clock is not time.thread_time_ns:
            self._clock = time.thread_time_ns
            return
        self._overdrawn += spent - SLOW_NS
        if self._overdrawn > ALLOWED_NS:
            self._grammar.refuse_as_slow(spent)

    def rollback(self, steps: int) -> None:
        """Take back the last steps; ValueError where there are fewer."""
        if not 0 <= steps <= self._steps:
            raise ValueError(f"can not take back {steps} steps of {self._steps}")
        self._matcher.rollback(steps)
        self._steps -= steps
        self._complete = None

    def fork(self) -> Self:
        """An independent matcher at the same position, history included."""
        other = type(self)(self._matcher.fork(), self._grammar)
        other._steps, other._clock, other._overdrawn = self._steps, self._clock, self._overdrawn  # noqa: SLF001 -- its own class
        return other

    def is_completed(self) -> bool:
        """Whether what was accepted so far is a complete sentence."""
        if self._complete is None:
            self._complete = bool(self._matcher.is_completed())
        return self._complete

    def certain(self, limit: int = CERTAIN_LIMIT) -> bytes:
        """The bytes that must come next, at most `limit` of them.

        xgrammar's own search knows no bound and never returns from a grammar that is certain of its text for ever.
        """
        if not self._grammar.finite:
            return certain_by_steps(self, self._grammar.new_row(), limit)
        try:
            text: str = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError as half:  # it ends inside a character, which is no text to xgrammar
            return half.object[:limit]
        return text.encode()[:limit]

    def next_bytes(self, row: Row) -> bytes:
        """Each byte that may come next, ascending; empty too where a token named by id may. `row` is overwritten."""
        self.fill(row)
        if any(_has(row, token) for token in self._grammar.named):
            return b""
        known = self._grammar.ids.single_bytes
        found = known.allowed(row)
        return (
            bytes(sorted(found + bytes(byte for byte in known.others if self._takes(byte)))) if known.others else found
        )

    def _takes(self, byte: int) -> bool:
        taken: bool = self._matcher.accept_string(bytes((byte,)))
        if taken:
            self._matcher.rollback(1)
        return taken
