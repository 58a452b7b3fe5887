"""Mask rows: making, changing and reading them, keeping one for a position, and a shared cache of them.

Invariants:
- A row that masks nothing is -1 throughout; a row that masks anything has no bit at ids without bytes that this module could have set.
- A cached row is a private copy, so nobody's later change reaches it.
- `RowCache` never holds more bytes than its limit; its one lock is never held while a row is copied.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from vllm_lazy_grammar.core.compiled import compiled
from vllm_lazy_grammar.core.vocabulary import WORD_BITS

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from numpy.typing import NDArray

    from vllm_lazy_grammar.core.matcher import Row
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

ALL: Final = -1
"""A word that allows all of its ids."""

_FEW = 8
_ENTRY_BYTES = 512


def ones(words: int) -> Row:
    """A row that masks nothing."""
    return np.full(words, ALL, np.int32)


def zeros(words: int) -> Row:
    """A row that masks everything."""
    return np.zeros(words, np.int32)


def copy_row(out: Row, row: Row) -> None:
    """Write `row` over `out`, both of the same length."""
    np.copyto(out, row)


def row_of(ids: Iterable[int], size: int) -> Row:
    """A row that allows exactly these ids; those that a vocabulary of `size` does not have are left out."""
    row = zeros(-(-size // WORD_BITS))
    IdSet(ids, size).allow(row)
    return row


def stop_row(ids: Iterable[int], size: int) -> Row:
    """The row of a position where the turn can only end: exactly the stop ids."""
    return row_of(ids, size)


@lru_cache(maxsize=4)
def open_row(vocabulary: Vocabulary) -> Row:
    """The row to start from where something has to be masked: every id that has bytes, so padding is masked already. Read-only, shared."""
    row = zeros(vocabulary.row_words)
    has_bytes = np.fromiter((bool(piece) for piece in vocabulary.pieces), np.bool_, vocabulary.size)
    packed = np.packbits(has_bytes, bitorder="little")
    row.view(np.uint8)[: len(packed)] = packed
    row.setflags(write=False)
    return row


class IdSet:
    """Ids as words and bits, worked out once, so that changing them in a row costs about a microsecond; immutable.

    Args:
        ids: token ids; those that do not exist are left out.
        size: the vocabulary's size.
    """

    __slots__ = ("_bits", "_few", "_keep", "_words", "ids")

    def __init__(self, ids: Iterable[int], size: int) -> None:
        self.ids = frozenset(token for token in ids if 0 <= token < size)
        by_word: dict[int, int] = {}
        for token in self.ids:
            by_word[token // WORD_BITS] = by_word.get(token // WORD_BITS, 0) | 1 << token % WORD_BITS
        self._words = np.fromiter(by_word, np.intp, len(by_word))
        self._bits = np.fromiter(by_word.values(), np.uint32, len(by_word)).view(np.int32)
        self._keep = ~self._bits
        self._few = tuple(zip(by_word, self._bits, self._keep, strict=True)) if len(by_word) <= _FEW else ()

    def __len__(self) -> int:
        return len(self.ids)

    def allow(self, row: Row) -> None:
        """Set the bits of these ids."""
        if self._few:
            for word, bits, _ in self._few:
                row[word] |= bits
        else:
            row[self._words] |= self._bits

    def mask(self, row: Row) -> None:
        """Clear the bits of these ids."""
        if self._few:
            for word, _, keep in self._few:
                row[word] &= keep
        else:
            row[self._words] &= self._keep


def is_allowed(row: Row, token: int, size: int) -> bool:
    """Whether the row allows this id; false for ids that do not exist."""
    return 0 <= token < size and bool(int(row[token // WORD_BITS]) >> token % WORD_BITS & 1)


def allowed_ids(row: Row, size: int) -> NDArray[np.intp]:
    """The allowed ids in ascending order."""
    bits = np.unpackbits(row.view(np.uint8), bitorder="little", count=size)
    return np.flatnonzero(bits)


def masked_ids(row: Row, size: int) -> NDArray[np.intp]:
    """The masked ids in ascending order."""
    return allowed_ids(~row, size)


def count_allowed(row: Row, size: int) -> int:
    """How many ids the row allows."""
    return int(_count(row, size, size))


def masks_anything(row: Row) -> bool:
    """Whether the row is anything but -1 throughout."""
    return bool(_masks(row))


def only_allowed(row: Row, size: int) -> int | None:
    """The single id that the row allows; None where it allows none or several."""
    token = int(_only(row, size))
    return None if token < 0 else token


def apply_row(logits: NDArray[np.float32], row: Row, size: int) -> None:
    """Write ``-inf`` where the row's bit is unset, over the first ``min(len(logits), size)`` entries; all others stay as they are.

    Args:
        logits: float32, one entry per id, changed in place.
        row: at least ``ceil(size / 32)`` words.
        size: the vocabulary's size.
    """
    _apply(logits, row, min(len(logits), size))


def warm() -> None:
    """Compile, or load from numba's cache, all compiled functions of this module, so that no request's step does."""
    writable, frozen = ones(2), ones(2)
    frozen.setflags(write=False)
    for row in (writable, frozen):
        apply_row(np.zeros(3, np.float32), row, 40)
        count_allowed(row, 40)
        masks_anything(row)
        only_allowed(row, 40)


@compiled
def _apply(logits: NDArray[np.float32], row: Row, size: int) -> None:
    for word in range((size + 31) // 32):
        bits = row[word]
        if bits == -1:
            continue
        start, end = word * 32, min(word * 32 + 32, size)
        if bits == 0:
            logits[start:end] = -np.inf
            continue
        for token in range(start, end):
            if not bits >> (token - start) & 1:
                logits[token] = -np.inf


@compiled
def _count(row: Row, size: int, enough: int) -> int:
    count = 0
    for word in range((size + 31) // 32):
        bits = row[word]
        if bits == 0:
            continue
        for place in range(min(32, size - word * 32)):
            count += bits >> place & 1
        if count > enough:
            break
    return count


@compiled
def _masks(row: Row) -> bool:
    for word in row:  # noqa: SIM110 - compiled code has no all() over generators
        if word != -1:
            return True
    return False


@compiled
def _only(row: Row, size: int) -> int:
    found = -1
    for word in range((size + 31) // 32):
        bits = row[word]
        if bits == 0:
            continue
        for place in range(min(32, size - word * 32)):
            if bits >> place & 1:
                if found >= 0:
                    return -1
                found = word * 32 + place
    return found


class RowSlot:
    """The row of one session's position, kept until the position moves. Used by one thread at a time.

    Attributes:
        is_kept: whether there is a row now.
    """

    __slots__ = ("_masks", "_row", "is_kept")

    def __init__(self) -> None:
        self._row: Row | None = None
        self._masks = False
        self.is_kept = False

    def drop(self) -> None:
        """The position moves: from now on there is no row."""
        self.is_kept = False

    def keep(self, row: Row, *, masks: bool) -> None:
        """Remember a copy of the position's row, and whether it masks anything; a row that masks nothing is not copied."""
        self._masks, self.is_kept = masks, True
        if masks:
            self._row = row.copy() if self._row is None or len(self._row) != len(row) else self._row
            np.copyto(self._row, row)

    def copy_to(self, out: Row) -> bool | None:
        """Write the position's row over `out` and return whether it masks anything; None, and nothing written, where no row is kept."""
        if not self.is_kept:
            return None
        if self._masks and self._row is not None:
            np.copyto(out, self._row)
        else:
            out.fill(ALL)
        return self._masks


class RowCache:
    """Rows by what determines them, shared between sessions; the least recently used goes first. Thread-safe.

    A thread that asks while another puts sees the cache before or after, never between: all decisions are made under the one lock.
    A row is copied outside it, which is safe because stored rows are never changed, only dropped; whoever holds one keeps it alive.

    Args:
        limit_bytes: bound on the bytes held, a fixed cost per entry counted; a row that alone is larger is not kept.

    Attributes:
        hits: how often a row that was asked for was there.
        misses: how often it was not.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._rows: OrderedDict[Hashable, Row] = OrderedDict()
        self._nbytes = 0
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._nbytes

    def get(self, key: Hashable, out: Row) -> bool:
        """Copy the row of this key over `out`; false, and nothing written, where it is not there."""
        with self._lock:
            row = self._rows.get(key)
            if row is None:
                self.misses += 1
                return False
            self.hits += 1
            self._rows.move_to_end(key)
        if len(row):
            np.copyto(out, row)
        else:
            out.fill(ALL)
        return True

    def put(self, key: Hashable, row: Row) -> None:
        """Keep a copy of this row; one that masks nothing is kept without its words."""
        kept = row.copy() if masks_anything(row) else row[:0].copy()
        cost = kept.nbytes + _ENTRY_BYTES
        if cost > self.limit_bytes:
            return
        with self._lock:
            self._drop(key)
            self._rows[key] = kept
            self._nbytes += cost
            while self._nbytes > self.limit_bytes:
                self._drop(next(iter(self._rows)))

    def clear(self) -> None:
        """Forget all rows."""
        with self._lock:
            self._rows.clear()
            self._nbytes = 0

    def _drop(self, key: Hashable) -> None:
        row = self._rows.pop(key, None)
        if row is not None:
            self._nbytes -= row.nbytes + _ENTRY_BYTES
