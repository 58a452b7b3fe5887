"""No endless blanks: bounds each run of whitespace between JSON elements, on every engine alike.

A grammar-side bound makes every mask dearer (the engine's state grows); here a run is counted beside the grammar, outside strings, and the
tokens that would exceed it are cleared with one AND of a row that is computed once per vocabulary and run length.

Invariants:
- A run inside a JSON string is never counted.
- The state is a function of the text alone: it never depends on whether a row was asked for.
- No run is longer than the bound: behind one that meets it no blank may come, so it need not be told from a longer one.
- In mixed text (a structural tag) only where the grammar refuses a plain letter-like byte is it JSON; free text is never bounded.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from vllm_lazy_grammar.core.compiled import compiled
from vllm_lazy_grammar.core.rows import IdSet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vllm_lazy_grammar.core.matcher import Matcher, Row
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

OUTSIDE, STRING, ESCAPE = 0, 1, 2
PROBE = b"~"
"""A byte that JSON never takes outside a string: where the grammar takes it, the text is free or in a string."""

_LAID_KEPT = 16
"""Sets of ids that are never text, for which rows are kept."""

BlankMode = Literal["json", "mixed"]


class BlankState(NamedTuple):
    """Where the text stands: `lexer` is OUTSIDE, STRING or ESCAPE; `run` blanks end it (0 inside strings)."""

    lexer: int
    run: int


START = BlankState(OUTSIDE, 0)


@compiled
def _scan(data: NDArray[np.uint8], begin: int, end: int, state: int) -> tuple[int, int, int, int]:
    """(end state, blanks that begin the piece, blanks that end it, longest run but the beginning one)."""
    leading, run, longest = -1, 0, 0
    for i in range(begin, end):
        byte = data[i]
        if state == OUTSIDE and (byte == 32 or byte == 10 or byte == 9 or byte == 13):  # noqa: PLR1714, PLR2004 -- JSON's blanks, in numba
            run += 1
            continue
        if leading < 0:
            leading = run
        elif run > longest:
            longest = run
        run = 0
        if byte == 34 and state != ESCAPE:  # noqa: PLR2004 -- the quotation mark
            state = STRING if state == OUTSIDE else OUTSIDE
        elif state == STRING and byte == 92:  # noqa: PLR2004 -- the backslash
            state = ESCAPE
        elif state == ESCAPE:
            state = STRING
    if leading < 0:
        leading = run
    elif run > longest:
        longest = run
    return state, leading, run, longest


@compiled
def _scan_all(data: NDArray[np.uint8], ends: NDArray[np.int64], out: NDArray[np.int32]) -> None:
    """Fill `out[state, :, token]` with what `_scan` says of each piece."""
    for state in range(3):
        begin = 0
        for token in range(len(ends)):
            out[state, 0, token], out[state, 1, token], out[state, 2, token], out[state, 3, token] = _scan(
                data, begin, ends[token], state
            )
            begin = ends[token]


def warm() -> None:
    """Compile, or load from numba's cache, all compiled functions of this module, so that no request's step does."""
    advance(START, b" ")
    _tables([b"a"])


def advance(state: BlankState, data: bytes) -> BlankState:
    """The state behind `data`, byte by byte (for what is not a whole token)."""
    end, leading, trailing, _ = _scan(np.frombuffer(data, np.uint8), 0, len(data), state.lexer)
    return BlankState(end, state.run + trailing if leading == len(data) else trailing)


class BlankBound:
    """The bound for one vocabulary; shared and immutable but for rows that are computed once.

    Args:
        vocabulary: whose pieces are scanned.
        bound: blanks allowed in one run.

    Attributes:
        size: the vocabulary's size.
        after: `after[lexer][token][run]` is the state behind a whole token of JSON; None where the token would exceed the bound.
    """

    def __init__(self, vocabulary: Vocabulary, bound: int) -> None:
        self.bound = bound
        self.size, self._words = vocabulary.size, vocabulary.row_words
        pieces = [vocabulary.piece(t) for t in range(vocabulary.size)]
        self._quoted = frozenset(t for t, p in enumerate(pieces) if b'"' in p)
        self._table = _tables(pieces)
        self._probe = vocabulary.token_of(PROBE.decode())
        self._states = tuple(tuple(BlankState(lexer, run) for run in range(bound + 1)) for lexer in range(3))
        lengths = np.fromiter(map(len, pieces), np.int32, len(pieces))
        self.after = tuple(self._afters(lexer, lengths) for lexer in range(3))
        self._rows: dict[BlankState, Row | None] = {}
        self.without = lru_cache(_LAID_KEPT)(partial(LaidRows, self))

    def _afters(self, lexer: int, lengths: NDArray[np.int32]) -> list[tuple[BlankState | None, ...]]:
        """For each token the states behind it by run; tokens that do the same share one tuple."""
        fields = np.vstack((self._table[lexer], self._table[lexer, 2] == lengths))
        kinds, kind_of = np.unique(fields, axis=1, return_inverse=True)
        runs = range(self.bound + 1 if lexer == OUTSIDE else 1)
        shared = [tuple(self._behind(lexer, run, kind) for run in runs) for kind in kinds.T.tolist()]
        return [shared[kind] for kind in kind_of.ravel().tolist()]

    def _behind(self, lexer: int, run: int, kind: Sequence[int]) -> BlankState | None:
        end, leading, trailing, longest, is_blank = kind
        if longest > self.bound or (lexer == OUTSIDE and run + leading > self.bound):
            return None
        return self._states[end][trailing + run if lexer == OUTSIDE and is_blank else trailing]

    def step(self, state: BlankState, token: int, matcher: Matcher, mode: BlankMode) -> BlankState | None:
        """The state behind a whole token; None where the token would exceed the bound.

        Args:
            state: where the text stands.
            token: the next id.
            matcher: stands before the token; asked only where the text may be free, and left as it was.
            mode: "mixed" where the grammar has free text around its JSON.
        """
        lexer, run = state
        after = self.after[lexer][token][run]
        if mode == "mixed" and lexer == OUTSIDE and (after is None or token in self._quoted) and _is_free(matcher):
            return START
        return after

    def advance(self, state: BlankState, data: bytes) -> BlankState:
        """The state behind bytes that are no whole token. They are not bounded themselves: a run that exceeds the bound is told as one that meets it."""
        lexer, run = advance(state, data)
        return self._states[lexer][min(run, self.bound)]

    def row(self, state: BlankState) -> Row | None:
        """The row of what may come in JSON, to be ANDed into a grammar's; None where it would clear nothing. Shared: not to be changed."""
        if state not in self._rows:
            self._rows[state] = self._make_row(state)
        return self._rows[state]

    def is_free(self, state: BlankState, row: Row, matcher: Matcher) -> bool:
        """Whether the grammar's row, at a position outside strings, is that of free text, which is not bounded."""
        return state.lexer == OUTSIDE and self._row_is_free(row, matcher)

    def _row_is_free(self, row: Row, matcher: Matcher) -> bool:
        if self._probe is None:
            return _is_free(matcher)
        return bool(row[self._probe >> 5] >> (self._probe & 31) & 1)

    def _make_row(self, state: BlankState) -> Row | None:
        lexer, run = state
        bad = self._table[lexer, 3] > self.bound
        if lexer == OUTSIDE:
            bad |= self._table[lexer, 1] + run > self.bound
        if not bad.any():
            return None
        bits = np.ones(self._words * 32, np.uint8)
        bits[: self.size] = ~bad
        return np.packbits(bits, bitorder="little").view(np.int32)


class LaidRows:
    """The rows of a bound without ids that are never text, so that both cost one AND; shared by all requests with the same such ids.

    Args:
        bound: whose rows.
        never: the ids.
    """

    def __init__(self, bound: BlankBound, never: frozenset[int]) -> None:
        self.bound, self._never = bound, IdSet(never, bound.size) if never else None
        self._rows: dict[BlankState, Row | None] = {}

    def clear(self, state: BlankState, row: Row) -> None:
        """Clear in a grammar's row what may not come in JSON at `state`."""
        try:
            laid = self._rows[state]
        except KeyError:
            laid = self._rows[state] = self._make(state)
        if laid is not None:
            np.bitwise_and(row, laid, row)
        elif self._never is not None:
            self._never.mask(row)

    def _make(self, state: BlankState) -> Row | None:
        """None where the bound clears nothing: the few ids alone are cleared faster."""
        base = self.bound.row(state)
        if base is None:
            return None
        if self._never is None:
            return base
        row = base.copy()
        self._never.mask(row)
        return row


def _tables(pieces: Sequence[bytes]) -> NDArray[np.int32]:
    data = np.frombuffer(b"".join(pieces) or b"\0", np.uint8)
    ends = np.cumsum([len(p) for p in pieces], dtype=np.int64)
    out = np.zeros((3, 4, len(pieces)), np.int32)
    _scan_all(data, ends, out)
    return out


def _is_free(matcher: Matcher) -> bool:
    if not matcher.accept_bytes(PROBE):
        return False
    matcher.rollback(1)
    return True
