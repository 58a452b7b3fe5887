"""No endless blanks: bounds each run of whitespace between JSON elements, on every engine alike.

A grammar-side bound makes every mask dearer (the engine's state grows); here a run is counted beside the grammar, outside strings, and the
tokens that would exceed it are cleared with one AND of a row that is computed once per vocabulary and run length.

Invariants:
- A run inside a JSON string is never counted.
- The state is a function of the text alone: it never depends on whether a row was asked for.
- In mixed text (a structural tag) only where the grammar refuses a plain letter-like byte is it JSON; free text is never bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from vllm_lazy_grammar.core.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vllm_lazy_grammar.core.matcher import Matcher, Row
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

OUTSIDE, STRING, ESCAPE = 0, 1, 2
PROBE = b"~"
"""A byte that JSON never takes outside a string: where the grammar takes it, the text is free or in a string."""

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


def advance(state: BlankState, data: bytes) -> BlankState:
    """The state behind `data`, byte by byte (for what is not a whole token)."""
    end, leading, trailing, _ = _scan(np.frombuffer(data, np.uint8), 0, len(data), state.lexer)
    return BlankState(end, state.run + trailing if leading == len(data) else trailing)


class BlankBound:
    """The bound for one vocabulary; shared and immutable but for rows that are computed once.

    Args:
        vocabulary: whose pieces are scanned.
        bound: blanks allowed in one run.
    """

    def __init__(self, vocabulary: Vocabulary, bound: int) -> None:
        self.bound = bound
        self._size, self._words = vocabulary.size, vocabulary.row_words
        pieces = [vocabulary.piece(t) for t in range(vocabulary.size)]
        self._lengths = [len(p) for p in pieces]
        self._quoted = frozenset(t for t, p in enumerate(pieces) if b'"' in p)
        self._table = _tables(pieces)
        self._ends, self._leading, self._trailing, self._inner = (self._lists(i) for i in range(4))
        self._probe = vocabulary.token_of(PROBE.decode())
        self._states = tuple(tuple(BlankState(lexer, run) for run in range(bound + 1)) for lexer in range(3))
        self._rows: dict[BlankState, Row | None] = {}

    def _lists(self, field: int) -> tuple[list[int], ...]:
        """One field of the table as lists: indexing a list costs a third of indexing an array."""
        return tuple(self._table[state, field].tolist() for state in range(3))

    def step(self, state: BlankState, token: int, matcher: Matcher, mode: BlankMode) -> BlankState | None:
        """The state behind a whole token; None where the token would exceed the bound.

        Args:
            state: where the text stands.
            token: the next id.
            matcher: stands before the token; asked only where the text may be free, and left as it was.
            mode: "mixed" where the grammar has free text around its JSON.
        """
        lexer, run = state
        exceeds = self._inner[lexer][token] > self.bound or (
            lexer == OUTSIDE and run + self._leading[lexer][token] > self.bound
        )
        if mode == "mixed" and lexer == OUTSIDE and (exceeds or token in self._quoted) and _is_free(matcher):
            return START
        if exceeds:
            return None
        trailing = self._trailing[lexer][token]
        if lexer == OUTSIDE and trailing == self._lengths[token]:
            trailing += run
        return self._states[self._ends[lexer][token]][trailing]

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
        bits[: self._size] = ~bad
        return np.packbits(bits, bitorder="little").view(np.int32)


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
