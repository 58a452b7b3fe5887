"""Records one request, token by token, for whoever asks why its grammar did or did not fire.

It is told what happens; it moves nothing and decides nothing. What a request's steps pay is here, what is made of it later in `story`.

Invariants:
- The session says where it stands: a step that was taken back is overwritten by the one that came in its place, so drafts leave no trace of
  their own but what is noted with the token that the model wrote.
- A row depends on the tokens before it alone, so one that was filled while drafts were tried belongs to whichever token follows them.
- At most `MAX_STEPS` tokens are recorded; how many were not is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from vllm_lazy_grammar.core.rows import count_allowed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_lazy_grammar.core.journal import State
    from vllm_lazy_grammar.core.matcher import Row
    from vllm_lazy_grammar.core.session import Session
    from vllm_lazy_grammar.core.trace import Event

MAX_STEPS = 1 << 15
"""Tokens of one answer that are recorded, about 200 bytes each."""

Draft = Literal["", "proposer", "grammar"]


class Fill(NamedTuple):
    """One row.

    Args:
        left: tokens that it allows.
        seconds: what making it took.
        waited: of those, how long it waited for the compile.
    """

    left: int
    seconds: float
    waited: float


class Step(NamedTuple):
    """One token of the answer.

    Args:
        token: the id.
        state: where the session stood behind it.
        fill: the row it was sampled from; None where none was asked for.
        draft: who had drafted it; empty where nobody had.
        instead_of: the draft in whose place it was written.
    """

    token: int
    state: State
    fill: Fill | None
    draft: Draft = ""
    instead_of: int | None = None


class _Drafts(NamedTuple):
    """Drafts on offer: where they begin, the proposer's, and the grammar's behind them."""

    start: int
    tokens: tuple[int, ...]
    ahead: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded of one answer.

    Args:
        steps: the tokens that the session took, in order.
        events: what the gate did.
        left_out: tokens behind those in `steps`.
        refused: the token that ended the request; None where none did.
        drafts_offered: drafts that were offered, the proposer's and the grammar's.
        compile_seconds: how long the compile took; None where it is not done.
    """

    steps: tuple[Step, ...]
    events: tuple[Event, ...]
    left_out: int
    refused: int | None
    drafts_offered: int
    compile_seconds: float | None


class Recorder:
    """Of one session; used on that session's thread.

    Args:
        session: which.
        limit: tokens that are recorded at most.
    """

    def __init__(self, session: Session, limit: int = MAX_STEPS) -> None:
        self._session, self._limit = session, limit
        self._steps: list[Step] = []
        self._fills: dict[int, Fill] = {}
        self._drafts = _Drafts(0, (), 0)
        self._offered = 0
        self._refused: int | None = None

    def filled(self, row: Row, seconds: float, waited: float) -> None:
        """The next position has this row; making it took so long, waiting for the compile included."""
        left = count_allowed(row, self._session.size)
        self._fills[self._session.num_offered] = Fill(left, seconds, waited)

    def drafted(self, ahead: Sequence[int], ours: Sequence[int]) -> None:
        """These are the next tokens that will be tried: the proposer's, as far as the grammar took them, and the grammar's own behind them.

        Told again at the same place, the later word counts.
        """
        start = self._session.num_offered
        if start == self._drafts.start:
            self._offered -= len(self._drafts.tokens)
        self._drafts = _Drafts(start, (*ahead, *ours), len(ahead))
        self._offered += len(self._drafts.tokens)

    def took(self, token: int) -> None:
        """The session has taken this token."""
        at = self._session.num_offered - 1
        old = self._steps[at] if at < len(self._steps) else None
        if old is not None and old.token != token:
            del self._steps[at + 1 :]
            self._fills = {place: fill for place, fill in self._fills.items() if place <= at}
        fill = self._fills.pop(at, None if old is None else old.fill)
        if at < self._limit:
            self._steps[at : at + 1] = [Step(token, self._session.state, fill, *self._draft(at, token))]

    def _draft(self, at: int, token: int) -> tuple[Draft, int | None]:
        start, tokens, ahead = self._drafts
        place = at - start
        if not 0 <= place < len(tokens) or tuple(s.token for s in self._steps[start:at]) != tokens[:place]:
            return "", None
        if tokens[place] != token:
            return "", tokens[place]
        return ("proposer" if place < ahead else "grammar"), None

    def refused(self, token: int) -> None:
        """The session has refused this token, which ends the request."""
        self._refused = token

    def recorded(self, compile_seconds: float | None) -> Recorded:
        """What there is to tell; shares nothing that still changes."""
        offered = self._session.num_offered
        steps = tuple(self._steps[:offered])
        events = tuple(self._session.trace.events)
        return Recorded(steps, events, offered - len(steps), self._refused, self._offered, compile_seconds)
