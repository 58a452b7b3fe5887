"""The shortest legal way to where a text may end, found by search over copies of a position.

Two searches. By tokens: level by level, every text that some tokens spell, each text once; what it finds is the shortest, and that it finds
nothing is proof. It needs as many tries as there are such texts, so where a row allows a hundred thousand tokens it is given up. By bytes:
level by level too, but of the texts of one length that allow the same next tokens only a few are kept; what it finds is legal, perhaps not
the shortest, and that it finds nothing proves nothing.

Invariants:
- The position that was given is not moved.
- A way, walked token by token, is accepted and ends where the text may end; its bytes are at most `max_bytes`.
- `NoWay` is said only where every text was tried.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from vllm_lazy_grammar.core.vocabulary import WORD_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm_lazy_grammar.core.matcher import Row
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

EFFORT = 10_000
"""Tries per search by default: some 20 ms by tokens, some 300 ms by bytes, on one core."""

_KEPT = 2
"""Texts of one length that allow the same next tokens and are followed."""

_MANY = 24
_ENDERS = b"\"}])>,:;/<'0a{[("
"""Bytes that tend to end strings, lists and tags, or stand for a digit and a letter; the likeliest first.

They are tried before all others, so of the texts that look alike those are followed that came farthest; of more than `_MANY` bytes only they are.
"""

_OTHERS = 1_000
"""Rank of the bytes that are no enders: behind all of them (`find` says -1)."""


@dataclass(frozen=True, slots=True)
class Way:
    """A legal way to where the text may end.

    Args:
        tokens: their ids, in order; empty where it may end already.
        text: their bytes.
        shortest: proven: no way has fewer tokens, and none with as many has fewer bytes.
    """

    tokens: tuple[int, ...]
    text: bytes
    shortest: bool


@dataclass(frozen=True, slots=True)
class NoWay:
    """Proven: no way in so many bytes."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Not found, and not proven either, within the effort allowed.

    Args:
        tried: texts that were tried.
    """

    tried: int


Outcome = Way | NoWay | GaveUp


class Position(Protocol):
    """Where a search begins: a matcher, or whatever else moves by tokens and may end."""

    def accept(self, token: int) -> bool:
        """Advance by one token."""

    def fill(self, row: Row) -> bool:
        """Write the mask of the next token."""

    def rollback(self, steps: int) -> None:
        """Take back the last `steps` accepted tokens."""

    def fork(self) -> Self:
        """An independent copy."""

    def is_completed(self) -> bool:
        """Whether the text may end here."""


def completion(position: Position, vocabulary: Vocabulary, max_bytes: int, *, effort: int = EFFORT) -> Outcome:
    """The way with the fewest tokens, then the fewest bytes, to where the text may end; moves nothing.

    Args:
        position: where the text stands.
        vocabulary: what its tokens spell.
        max_bytes: a way may have so many bytes.
        effort: texts to try, at most, in each of the two searches.
    """
    if position.is_completed():
        return Way((), b"", shortest=True)
    search = _Search(position.fork(), vocabulary, max_bytes, effort)
    outcome = search.by_tokens()
    return search.by_bytes() if isinstance(outcome, GaveUp) else outcome


@dataclass(frozen=True, slots=True, order=True)
class _Path:
    """Tokens and what they spell. Ordered by length in bytes, then by ids: so the first found is the same every time."""

    length: int
    tokens: tuple[int, ...]
    text: bytes

    def then(self, token: int, piece: bytes) -> _Path:
        """This path and one token more."""
        return _Path(self.length + len(piece), (*self.tokens, token), self.text + piece)


_START = _Path(0, (), b"")
_Mark = tuple[bytes, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Stand:
    """A position behind a path."""

    at: Position
    path: _Path


class _Search:
    def __init__(self, walker: Position, vocabulary: Vocabulary, max_bytes: int, effort: int) -> None:
        self._walker = walker
        self._vocabulary = vocabulary
        self._max_bytes = max_bytes
        self._effort = effort
        self._row: Row = np.zeros(vocabulary.row_words, dtype=np.int32)
        self._tried = 0

    def _go(self, path: _Path) -> bool:
        """Walk a path; where it is refused, the walker stands where it stood."""
        for done, token in enumerate(path.tokens):
            if not self._walker.accept(token):
                self._walker.rollback(done)
                return False
        return True

    def _back(self, path: _Path) -> None:
        self._walker.rollback(len(path.tokens))

    def _may_end(self, path: _Path) -> bool:
        if not self._go(path):
            return False
        ends = self._walker.is_completed()
        self._back(path)
        return ends

    def _allowed(self) -> list[int]:
        self._walker.fill(self._row)
        bits = np.unpackbits(self._row.view(np.uint8), count=self._vocabulary.size, bitorder="little")
        return np.flatnonzero(bits).tolist()  # type: ignore[no-any-return]  # numpy says Any

    def by_tokens(self) -> Outcome:
        """Every text, by the number of its tokens."""
        level = [_START]
        seen: set[_Mark] = {(b"", ())}
        while level:
            reached: list[_Path] = []
            for path in level:
                allowed = self._allowed_behind(path)
                self._tried += len(allowed)
                if self._tried > self._effort:
                    return GaveUp(self._tried)
                reached.extend(self._new(path, allowed, seen))
            ways = [path for path in reached if self._may_end(path)]
            if ways:
                best = min(ways)
                return Way(best.tokens, best.text, shortest=True)
            level = sorted(reached)
        return NoWay()

    def _allowed_behind(self, path: _Path) -> list[int]:
        self._go(path)
        allowed = self._allowed()
        self._back(path)
        return allowed

    def _new(self, path: _Path, allowed: list[int], seen: set[_Mark]) -> Iterator[_Path]:
        """The paths one token longer, not too long and not yet seen."""
        for token in allowed:
            after = path.then(token, self._vocabulary.piece(token))
            mark = self._mark(after)
            if path.length < after.length <= self._max_bytes and mark not in seen:
                seen.add(mark)
                yield after

    def _mark(self, path: _Path) -> _Mark:
        """What tells one path from another: its text, and the whole of it where a special token, which is no text, stands in it."""
        return path.text, () if self._vocabulary.special_ids.isdisjoint(path.tokens) else path.tokens

    def by_bytes(self) -> Outcome:
        """Texts by their length in bytes, a few of each kind; spelled with as few tokens as the text allows."""
        level, tried = [_Stand(self._walker, _START)], 0
        while level and level[0].path.length <= self._max_bytes:
            tried += len(level)
            if tried > self._effort:
                break
            ended = next((stand for stand in level if stand.at.is_completed()), None)
            if ended is not None:
                return self._spelled(ended.path)
            kinds: Counter[bytes] = Counter()
            level = [longer for stand in level for longer in self._longer(stand, kinds)]
        return GaveUp(tried)

    def _longer(self, stand: _Stand, kinds: Counter[bytes]) -> Iterator[_Stand]:
        """One byte further, where enough of this kind are not followed yet."""
        stand.at.fill(self._row)
        kind = hashlib.blake2b(self._row.tobytes(), digest_size=16).digest()
        kinds[kind] += 1
        if kinds[kind] > _KEPT:
            return
        for piece, token in self._likely_bytes():
            at = stand.at.fork()
            if at.accept(token):
                yield _Stand(at, stand.path.then(token, piece))

    def _likely_bytes(self) -> list[tuple[bytes, int]]:
        """The bytes that the row allows, those that tend to end something first, and of many only they."""
        row = self._row
        allowed = [
            (piece, token)
            for piece, token in _single_bytes(self._vocabulary)
            if row[token // WORD_BITS] >> (token % WORD_BITS) & 1
        ]
        return allowed if len(allowed) <= _MANY or allowed[0][0] not in _ENDERS else allowed[: len(_ENDERS)]

    def _spelled(self, path: _Path) -> Outcome:
        """The text of a path in as few tokens as there are; the path itself where those are refused."""
        tokens = _fewest_tokens(path.text, self._vocabulary)
        shorter = _Path(path.length, tokens, path.text)
        return Way(tokens if self._may_end(shorter) else path.tokens, path.text, shortest=False)


@lru_cache(4)
def _ids_of(vocabulary: Vocabulary) -> dict[bytes, int]:
    """Piece -> the lowest id that is no special token."""
    pieces = enumerate(vocabulary.pieces)
    ids = {piece: token for token, piece in reversed(list(pieces)) if piece and token not in vocabulary.special_ids}
    return dict(sorted(ids.items(), key=lambda item: item[1]))


@lru_cache(4)
def _single_bytes(vocabulary: Vocabulary) -> Sequence[tuple[bytes, int]]:
    """Tokens of one byte, in the order in which they are tried; blanks last."""
    singles = ((piece, token) for piece, token in _ids_of(vocabulary).items() if len(piece) == 1)
    return sorted(singles, key=lambda pair: (pair[0].isspace(), _ENDERS.find(pair[0]) % _OTHERS, pair[0]))


@lru_cache(4)
def _longest(vocabulary: Vocabulary) -> int:
    return max(map(len, _ids_of(vocabulary)), default=0)


def _fewest_tokens(text: bytes, vocabulary: Vocabulary) -> tuple[int, ...]:
    """A text in as few tokens as there are, the longest first among equals; every single byte of it has a token."""
    ids, longest = _ids_of(vocabulary), _longest(vocabulary)
    best: list[tuple[int, ...]] = [()]
    for start in range(len(text) - 1, -1, -1):
        ends = range(min(len(text), start + longest), start, -1)
        ways = ((ids[text[start:end]], *best[len(text) - end]) for end in ends if text[start:end] in ids)
        best.append(min(ways, key=len))
    return best[-1]
