"""The tokens that are one byte long: from their bits in a row it is read which bytes may come next.

Invariants:
- Nothing changes after construction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_lazy_grammar.core.vocabulary import WORD_BITS

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.matcher import Row

_NO_TEXT = bytes((0xC0, 0xC1, *range(0xF5, 0x100)))
"""Bytes that no character has in UTF-8: no grammar takes them."""


class SingleBytes:
    """Where in a row the bits of the one-byte tokens stand.

    Args:
        ids: byte -> an id whose piece is this byte alone.

    Attributes:
        values: the bytes that have such an id, ascending, as uint8.
        words: the word of each one's bit.
        shifts: the bit in that word.
        others: the bytes that have none, but those that no character has.
    """

    def __init__(self, ids: dict[int, int]) -> None:
        known = sorted(ids)
        tokens = np.array([ids[byte] for byte in known], dtype=np.int32)
        self.values = np.array(known, dtype=np.uint8)
        self.words = tokens // WORD_BITS
        self.shifts = tokens % WORD_BITS
        self.others = bytes(byte for byte in range(256) if byte not in ids and byte not in _NO_TEXT)

    def allowed(self, row: Row) -> bytes:
        """The bytes whose token has its bit in a row, ascending."""
        may = (row[self.words] >> self.shifts) & 1
        found: bytes = self.values[may != 0].tobytes()
        return found
