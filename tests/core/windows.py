"""Draft windows as vLLM's manager runs them: validate, fill and accept by turns, roll back, then the verified tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from vllm_lazy_grammar.core.journal import Phase
from vllm_lazy_grammar.core.rows import is_allowed
from vllm_lazy_grammar.errors import LazyGrammarError

PADDING = -1

_CHOICE = st.integers(0, 10**6)


@dataclass(frozen=True)
class Window:
    """What chance decides in one step of the engine.

    Attributes:
        proposed: one number per draft: follow the row (3 of 4), any token of the pool, or padding.
        scheduled: how many of the validated drafts are scheduled, at most; the rest is padded.
        verified: how many of the scheduled drafts the model agrees with, at most.
        sampled: which token it samples behind them.
    """

    proposed: tuple[int, ...]
    scheduled: int
    verified: int
    sampled: int


WINDOWS = st.lists(
    st.builds(Window, st.lists(_CHOICE, max_size=6).map(tuple), st.integers(0, 6), st.integers(0, 6), _CHOICE),
    min_size=1,
    max_size=6,
)


def told(session):
    """What a session says of itself without joining a compile."""
    events = [(e.kind, e.token, e.trigger) for e in session.trace.events]
    return session.phase, session.buffer, session.num_offered, session.must_call, events, session.is_terminated()


@dataclass
class Run:
    """One request, window by window, held against fresh sessions that saw only what was accepted.

    Attributes:
        make: a new session of the same request.
        pool: tokens worth offering.
        release: lets a held compile go on and waits for it; None where it was there from the start.
        held_for: calls after which it is released.
        budget: tokens in all; None where no budget is kept.
        drafts: the grammar's own, which are scheduled behind the others; None where it drafts nothing.
        at_once: how many windows with drafts were filled at once so far.
    """

    make: object
    pool: list[int]
    release: object = None
    held_for: int = 0
    budget: int | None = None
    history: list[int] = field(default_factory=list)
    drafts: object = None
    at_once: int = 0

    def __post_init__(self):
        self.session = self.make()
        self.session.drafts = self.drafts

    def run(self, windows):
        """All windows, or until a verified token ends the request with an error, as it would without drafts."""
        for window in windows:
            if not self.step(window):
                return

    def step(self, window):
        """One window; false where the request has ended."""
        self.tick()
        validated = self.validate(self.propose(window))
        scheduled = validated[: window.scheduled]
        padded = scheduled + [PADDING] * (len(validated) - len(scheduled))
        rows = self.fill(padded)
        return self.accept(self.verify(scheduled, rows, window))

    def tick(self):
        """One call more; the compile is done after `held_for` of them, or where it must be."""
        self.held_for -= 1
        if self.release is not None and (self.held_for <= 0 or self.session.phase is Phase.PENDING):
            self.release()
            self.release = None

    def fresh(self, *more):
        """A session that saw only what was accepted, and `more`."""
        session = self.make()
        for token in (*self.history, *more):
            assert session.accept(token)
        return session

    def row(self, session, ahead=0):
        """The row of a session that stands `ahead` tokens behind what was accepted."""
        row = np.zeros(session._row_words, np.int32)
        masks = session.fill(row, None if self.budget is None else self.budget - len(self.history) - ahead)
        return masks, row

    def follow(self, row, choice):
        """A token of the pool that the row allows; the first that it allows at all where there is none."""
        allowed = [t for t in self.pool if is_allowed(row, t, self.session._size)]
        if allowed:
            return allowed[choice % len(allowed)]
        return next((t for t in range(self.session._size) if is_allowed(row, t, self.session._size)), self.pool[0])

    def propose(self, window):
        """Drafts: most follow the grammar, some do not, some are padding."""
        probe, drafts = self.fresh(), []
        for number in window.proposed:
            kind, choice = number % 8, number // 8
            if kind == 7:
                drafts.append(PADDING)
            elif kind == 6 or probe.phase is Phase.PENDING:
                drafts.append(self.pool[choice % len(self.pool)])
            else:
                drafts.append(self.follow(self.row(probe, len(drafts))[1], choice))
                if not accepted(probe, drafts[-1]):
                    break
        return drafts

    def validate(self, drafts):
        """As vLLM: without the padding; moves nothing."""
        stripped = drafts[: drafts.index(PADDING)] if PADDING in drafts else drafts
        before = told(self.session)
        validated = self.session.validate(stripped)
        if before[0] is not Phase.PENDING:
            assert told(self.session) == before
        assert validated == stripped[: len(validated)]
        if self.release is None:
            assert validated == validated_slowly(self.fresh(), stripped)
        return self.add_drafts(validated)

    def add_drafts(self, validated):
        """With the grammar's own behind them: each would be validated too, and nothing has moved."""
        before = told(self.session)
        drafts = [*validated, *self.session.draft(8 - len(validated), validated)]
        assert told(self.session) == before
        assert self.session.validate(drafts) == drafts
        return drafts

    def fill(self, scheduled):
        """The rows of a window, at once where that can be and by turns, each that of a fresh session; the session is where it was."""
        known = scheduled[: scheduled.index(PADDING)] if PADDING in scheduled else scheduled
        is_first = len(self.history) % 2 == 0
        found = self.filled_at_once(known) if is_first else None
        rows = self.filled_by_turns(scheduled)
        found = found if is_first else self.filled_at_once(known)
        if found is not None:
            self.at_once += bool(known)
            np.testing.assert_array_equal(found, rows)
        other = self.pool[sum(scheduled, len(self.history)) % len(self.pool)]
        found = self.filled_at_once([*known, other])
        if found is not None:
            np.testing.assert_array_equal(found[-1], self.row(self.fresh(*known, other), len(known) + 1)[1])
        self.compare()
        return rows

    def filled_at_once(self, drafts):
        """The rows of a window, without moving the session; None where that can not be."""
        before = told(self.session)
        rows = np.full((len(drafts) + 1, self.session._row_words), 0x55555555, np.int32)
        remaining = None if self.budget is None else self.budget - len(self.history)
        filled = self.session.fill_window(rows, drafts, remaining)
        assert told(self.session) == before
        return rows if filled else None

    def filled_by_turns(self, scheduled):
        """The rows of a window as vLLM asks for them, each that of a fresh session."""
        rows, advanced, padded = [], 0, False
        for i, token in enumerate((*scheduled, None)):
            self.tick()
            if padded:
                continue
            masks, row = self.row(self.session, i)
            kept_masks, kept = self.row(self.fresh(*scheduled[:i]), i)
            assert masks == kept_masks
            np.testing.assert_array_equal(row, kept)
            rows.append(row)
            padded = token == PADDING
            if token is not None and not padded:
                assert not self.session.is_terminated()
                assert self.session.accept(token)
                advanced += 1
        self.tick()
        self.session.rollback(advanced)
        self.compare()
        return rows

    def verify(self, scheduled, rows, window):
        """What the model sampled: drafts that it agrees with, and one token more."""
        verified = []
        for token, row in zip(scheduled, rows, strict=False):
            if len(verified) >= window.verified or not is_allowed(row, token, self.session._size):
                break
            verified.append(token)
        return [*verified, self.follow(rows[len(verified)], window.sampled)]

    def accept(self, verified):
        """The verified tokens; false where one ends the request, which it does without drafts too."""
        for token in verified:
            self.tick()
            twin = self.fresh()
            took = accepted(self.session, token)
            assert took == accepted(twin, token)
            if not took:
                return False
            self.history.append(token)
            if self.budget is not None and len(self.history) >= self.budget:
                return False
        self.compare()
        return True

    def compare(self):
        """The session is the one that saw only what was accepted."""
        self.tick()
        fresh = self.fresh()
        if self.session.phase is Phase.PENDING or fresh.phase is Phase.PENDING:
            assert self.release is None
        masks, row = self.row(self.session)
        kept_masks, kept = self.row(fresh)
        assert masks == kept_masks
        np.testing.assert_array_equal(row, kept)
        assert told(self.session) == told(fresh)
        assert self.session.blocks_stop() == fresh.blocks_stop()
        assert self.session.num_history_steps == fresh.num_history_steps


def accepted(session, token):
    """Whether a token is accepted; false too where it ends the request with an error."""
    try:
        return session.accept(token)
    except LazyGrammarError:
        return False


def validated_slowly(session, tokens):
    """What `validate` says, on a session that belongs to the caller, one token after the other."""
    kept = []
    for token in tokens:
        masked_stop = token in session._stops and not session._walk.ends(token)
        if session.is_terminated() or masked_stop or not accepted(session, token):
            break
        kept.append(token)
    return kept
