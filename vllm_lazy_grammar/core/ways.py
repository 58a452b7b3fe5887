"""The way into a trigger: which tokens go on towards a word from where the text stands, once `force_after` is reached.

The words are a trie of bytes; where the text stands in it is the longest end of the text that begins a word. The byte trie walks it and
answers with the tokens that stay on it to their last byte. A character that is half written is finished first.

Invariants:
- Every allowed token brings the text closer to the end of some word, ends one, or finishes a character: where the vocabulary can write the
  bytes of the words, forcing can not go on for ever.
- What was read in the context counts for half a character, never for a word.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import TYPE_CHECKING, Final

import numpy as np

from vllm_lazy_grammar.core.byte_trie import DEAD
from vllm_lazy_grammar.core.literals import LiteralAutomaton

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from vllm_lazy_grammar.core.byte_trie import ByteTrie
    from vllm_lazy_grammar.core.gate import Gate
    from vllm_lazy_grammar.core.matcher import Row

_HALF: Final = (0x80, 0xBF)
_SECOND_BYTES: Final = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}
"""Lead bytes whose next byte is bound more narrowly than others."""

_THREE_BYTES, _FOUR_BYTES = 0xE0, 0xF0
LONGEST_HALF = 3
"""Bytes that a half-written character may have, and tokens that finish it."""


class WaysIn:
    """The ways into some words, for one vocabulary; immutable.

    Args:
        trie: the vocabulary's pieces.
        words: the texts to force, none empty.
    """

    def __init__(self, trie: ByteTrie, words: Sequence[bytes]) -> None:
        self._trie = trie
        self._words = LiteralAutomaton(words)
        self._reach = max(map(len, words), default=0)
        states = len(self._words.hits)
        # Behind the words' own states: one that a whole word led to, and those of a character that lacks 1, 2 or 3 bytes, or a narrow second.
        self._done = states
        self._lacking = {bytes_: states + bytes_ for bytes_ in (1, 2, 3)}
        self._narrow = {lead: states + 4 + place for place, lead in enumerate(_SECOND_BYTES)}
        exact = self._table(states + 4 + len(_SECOND_BYTES))
        self._tables = {False: exact, True: self._with_tails(exact)}

    def _table(self, states: int) -> NDArray[np.int32]:
        """The words' trie without its failure edges, and the characters that lead to its root."""
        words = self._words
        table = np.full((states, 256), DEAD, np.int32)
        deeper = words.depth[words.table] == words.depth[:, None] + 1
        table[: len(words.hits)] = np.where(deeper, words.table, DEAD)
        for lacking, state in self._lacking.items():
            _allow(table, state, _HALF, self._lacking[lacking - 1] if lacking > 1 else 0)
        for lead, state in self._narrow.items():
            _allow(table, state, _SECOND_BYTES[lead], self._lacking[_length(lead) - 2])
        return table

    def _with_tails(self, exact: NDArray[np.int32]) -> NDArray[np.int32]:
        """The same, and behind a whole word anything: the grammar decides about that."""
        table = exact.copy()
        own = table[table >= 0]
        own[own < self._done] = np.where(self._words.hits[own[own < self._done]], self._done, own[own < self._done])
        table[table >= 0] = own
        table[self._done] = self._done
        return table

    def rows(self, gate: Gate, row: Row, *, tails: bool) -> Iterator[None]:
        """Write the row of the tokens that go on from where the text stands; once for each place that it can be said to stand at.

        The longest begun word comes first, then shorter ones, then half a character, then the start of every word; whoever iterates
        stops at the first row that will do.

        Args:
            gate: awaiting; where the text stands.
            row: written anew before each step of the iteration; control tokens are taken by their text.
            tails: allow a whole word and more in one token.
        """
        for state in self._standings(gate):
            self._trie.survivors(self._tables[tails], state, row, control=True)
            yield

    def _standings(self, gate: Gate) -> Iterator[int]:
        text = b"".join([fed.data for fed in gate.tail(self._reach)])
        state, _ = self._words.scan(0, text)
        while state:
            yield state
            text = text[len(text) - int(self._words.depth[state]) + 1 :]
            state, _ = self._words.scan(0, text)
        half = half_character(gate.before(LONGEST_HALF))
        if half:
            yield self._half(half)
        yield 0

    def _half(self, half: bytes) -> int:
        narrow = self._narrow.get(half[0]) if len(half) == 1 else None
        return narrow or self._lacking[_length(half[0]) - len(half)]


def half_character(tail: bytes) -> bytes:
    """The bytes of a last character that is not complete, given the last three bytes of a text."""
    return tail[utf_8_decode(tail, "surrogateescape", False)[1] :]  # noqa: FBT003 - the codec takes no keyword


def _length(lead: int) -> int:
    return 2 + (lead >= _THREE_BYTES) + (lead >= _FOUR_BYTES)


def _allow(table: NDArray[np.int32], state: int, span: tuple[int, int], after: int) -> None:
    table[state, span[0] : span[1] + 1] = after
