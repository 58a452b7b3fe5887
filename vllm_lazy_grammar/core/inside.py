"""Inside a grammar: how a matcher takes one token, and which tokens its row allows once our rules are laid over it.

Invariants:
- A whole token goes to the matcher by its id; a fragment, and a control token that the grammar spells, by bytes. Each is one matcher step.
- What `take` refuses, the row masks, and the other way round; both leave the position they were given as it was.
- Stop ids are never text: their bits are cleared here, and set by the session where the turn may end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_lazy_grammar.core.blanks import START, STRING
from vllm_lazy_grammar.core.journal import Phase, Position
from vllm_lazy_grammar.core.rows import IdSet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_lazy_grammar.core.blanks import BlankBound, BlankMode, BlankState
    from vllm_lazy_grammar.core.compiles import Compile
    from vllm_lazy_grammar.core.control import ControlTokens
    from vllm_lazy_grammar.core.matcher import Row
    from vllm_lazy_grammar.core.rows import RowCache
    from vllm_lazy_grammar.core.transcript import Fed
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

_new = tuple.__new__

_TRAIL_LIMIT = 512
"""Bytes after which no prewarmed row is looked for."""


@dataclass(frozen=True, slots=True)
class Blanks:
    """The bound on whitespace runs, and what kind of text it is counted in."""

    bound: BlankBound
    mode: BlankMode


class Inside:
    """What one request's grammar takes and allows.

    Args:
        vocabulary: the model's.
        compile_: the grammar, compiled or on its way.
        control: its control tokens.
        blanks: the whitespace bound; None where the grammar is not JSON.
        stop_ids: ids that end the turn.
        rows: the shared cache of prewarmed rows.

    Attributes:
        correct: makes of a matcher's row, in place, that of a position for which `blanks_ahead` knows the blanks, which it is given first.
    """

    def __init__(  # noqa: PLR0913, PLR0917 -- what one request's masks depend on
        self,
        vocabulary: Vocabulary,
        compile_: Compile,
        control: ControlTokens,
        blanks: Blanks | None,
        stop_ids: frozenset[int],
        rows: RowCache,
    ) -> None:
        self.vocabulary, self.control, self.stop_ids = vocabulary, control, stop_ids
        self._compile, self._rows = compile_, rows
        # A matcher's row has no special tokens already; most requests have nothing else to clear.
        never = (control.ids | stop_ids) - vocabulary.special_ids
        self._never = IdSet(never, vocabulary.size) if never else None
        self._single = {t: IdSet([t], vocabulary.size) for t in control.spelled}
        self._control_ids = control.ids
        self._laid = None if blanks is None else blanks.bound.without(never)
        self._after = None if blanks is None or blanks.mode == "mixed" else blanks.bound.after
        self._mixed = None if blanks is None or blanks.mode == "json" else blanks.bound
        self.correct = self._mask_never if self._laid is None else self._laid.clear
        self._first_trail = b"" if compile_.prewarmed else None

    def start(self, before: Position) -> Position:
        """The position at the grammar's start; waits for its compile. `before` says what came earlier."""
        matcher = self._compile.result().matcher()
        return Position(
            Phase.INSIDE,
            matcher,
            steps=0,
            blanks=START,
            history=before.history,
            activations=before.activations,
            trail=self._first_trail,
            events=before.events,
        )

    def take(self, at: Position, token: int) -> Position | None:
        """The position behind one whole token, the matcher advanced; None, and nothing moved, where the grammar refuses it."""
        if token in self._control_ids:
            return self._take_control(at, token)
        phase, matcher, steps, blanks, history, activations, counted, _, trail, events, text = at
        if self._after is not None:
            lexer, run = blanks
            behind = self._after[lexer][token][run]
        else:
            behind = blanks if self._mixed is None else self._mixed.step(blanks, token, matcher, "mixed")
        if behind is None or not matcher.accept(token):
            return None
        if trail is not None:
            trail = self._trail(trail + self.vocabulary.piece(token))
        # As `Position(...)`, at a third of its cost: this runs for every token of every request.
        fed = (text, token)
        return _new(
            Position, (phase, matcher, steps + 1, behind, history, activations, counted, (), trail, events, fed)
        )

    def blanks_ahead(self, at: Position, tokens: Sequence[int]) -> list[BlankState] | None:
        """Where the text stands before and behind each of these ids of the vocabulary, none a stop id.

        None where the matcher alone does not tell whether they are taken: a control token is among them or may be, the text is mixed, or the
        bound on blanks is exceeded.
        """
        if self._single or self._mixed is not None or not self._control_ids.isdisjoint(tokens):
            return None
        if self._after is None:
            return [at.blanks] * (len(tokens) + 1)
        found = [at.blanks]
        for token in tokens:
            lexer, run = found[-1]
            blanks = self._after[lexer][token][run]
            if blanks is None:
                return None
            found.append(blanks)
        return found

    def _mask_never(self, _: BlankState, row: Row) -> None:
        if self._never is not None:
            self._never.mask(row)

    def _take_control(self, at: Position, token: int) -> Position | None:
        if not self.control.allows(token, at.matcher, in_string=at.blanks.lexer == STRING):
            return None
        return self._take_bytes(at, self.vocabulary.piece(token))

    def _take_bytes(self, at: Position, data: bytes) -> Position | None:
        if not data:
            return at
        if not at.matcher.accept_bytes(data):
            return None
        blanks = at.blanks if self._laid is None else self._laid.bound.advance(at.blanks, data)
        trail = at.trail if at.trail is None else self._trail(at.trail + data)
        return at._replace(steps=at.steps + 1, blanks=blanks, trail=trail, text=(at.text, data))

    def take_fed(self, at: Position, fed: Fed) -> Position | None:
        """The position behind one part of a replay: a whole token by id, a fragment by its bytes, nothing for no bytes."""
        return self.take(at, fed.token) if fed.whole and fed.data else self._take_bytes(at, fed.data)

    def _trail(self, trail: bytes) -> bytes | None:
        path = self._compile.path
        followed = len(trail) <= _TRAIL_LIMIT if path is None else path.startswith(trail)
        return trail if followed else None

    def fill(self, at: Position, row: Row) -> bool:
        """The grammar's row without what is never text, and in JSON without what would exceed the bound on blanks. Returns whether it masks anything."""
        prewarmed = at.trail is not None and self._rows.get((self._compile.key, at.trail), row)
        if not prewarmed and not at.matcher.fill(row) and self._never is None:
            return False
        if self._laid is not None and (self._mixed is None or not self._mixed.is_free(at.blanks, row, at.matcher)):
            self._laid.clear(at.blanks, row)
        elif self._never is not None:
            self._never.mask(row)
        if self._single:
            self._allow_spelled(at, row)
        return True

    def _allow_spelled(self, at: Position, row: Row) -> None:
        """Set the control tokens that literals take here; one that is a stop id only where it completes the grammar."""
        allowed = self.control.allowed(at.matcher, in_string=at.blanks.lexer == STRING)
        for token in allowed:
            if token not in self.stop_ids or self._completes(at, token):
                self._single[token].allow(row)

    def _completes(self, at: Position, token: int) -> bool:
        at.matcher.accept_bytes(self.vocabulary.piece(token))
        complete = at.matcher.is_completed()
        at.matcher.rollback(1)
        return complete

    def ends_with(self, at: Position, token: int) -> Position | None:
        """The position behind a stop id that is the grammar's own end marker; None, and nothing moved, where it is not."""
        if token not in self.control.spelled:
            return None
        after = self._take_control(at, token)
        if after is not None and not after.matcher.is_completed():
            after.matcher.rollback(1)
            return None
        return after

    def is_finished(self, at: Position) -> bool:
        """Whether the grammar is complete and takes nothing more."""
        if not at.matcher.is_completed():
            return False
        row = np.empty(self.vocabulary.row_words, np.int32)
        return self.fill(at, row) and not row.any()


def make_free(row: Row) -> bool:
    """Write the row that masks nothing; returns false, as `fill` does for it."""
    row.fill(-1)
    return False
