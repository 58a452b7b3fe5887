"""The way into a trigger: which tokens go on towards a word from where the text stands, once `force_after` or the budget asks for it.

The words are a trie of bytes; where the text stands in it is the longest end of the text that begins a word. The byte trie walks it and
answers with the tokens that stay on it to their last byte. A character that is half written is finished first.

Invariants:
- Every allowed token brings the text closer to the end of some word, ends one, or finishes a character: where the vocabulary can write the
  bytes of the words, forcing can not go on for ever.
- What was read in the context counts for half a character, never for a word.
"""

from __future__ import annotations

from codecs import utf_8_decode
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from vllm_lazy_grammar.core.byte_trie import DEAD
from vllm_lazy_grammar.core.literals import LiteralAutomaton
from vllm_lazy_grammar.core.rows import IdSet, allowed_ids

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
_FAR = 1 << 30
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

    @property
    def needs_from_start(self) -> int:
        """Fewest tokens that spell a whole word; more than any budget where the vocabulary can not."""
        return int(self._needs[0])

    @cached_property
    def _needs(self) -> NDArray[np.int32]:
        """Fewest tokens to the end of a word, for each state."""
        needs = np.full(len(self._tables[False]), _FAR, np.int32)
        states = len(self._words.hits)
        needs[:states][self._words.hits] = needs[self._done] = 0
        for state in sorted(range(states), key=lambda state: -int(self._words.depth[state])):
            if needs[state]:
                needs[state] = min((1 + int(needs[behind]) for behind in self._one_token_on(state)), default=_FAR)
        for lacking, state in self._lacking.items():
            needs[state] = needs[0] + lacking
        for lead, state in self._narrow.items():
            needs[state] = needs[0] + _length(lead) - 1
        return needs

    def _one_token_on(self, state: int) -> Iterator[int]:
        """The states of the words that one token leads to from here."""
        table, nodes = self._tables[False], [(state, b"")]
        while nodes:
            node, text = nodes.pop()
            for byte in np.flatnonzero(table[node] >= 0).tolist():
                behind, longer = int(table[node, byte]), text + bytes((byte,))
                if 0 < behind < self._done:
                    nodes.append((behind, longer))
                    if self._trie.vocabulary.id_of(longer) is not None:
                        yield behind

    def _within(self, state: int, row: Row, limit: int, *, tails: bool) -> None:
        """Keep the tokens behind which at most `limit` tokens end a word; all of them where that is none."""
        vocabulary, table = self._trie.vocabulary, self._tables[tails]
        kept = []
        for token in allowed_ids(row, vocabulary.size).tolist():
            behind = state
            for byte in vocabulary.piece(token):
                behind = int(table[behind, byte])
            if self._needs[behind] <= limit:
                kept.append(token)
        if kept:
            row.fill(0)
            IdSet(kept, vocabulary.size).allow(row)

    def rows(self, gate: Gate, row: Row, *, tails: bool, within: int | None = None) -> Iterator[None]:
        """Write the row of the tokens that go on from where the text stands; once for each place that it can be said to stand at.

        The longest begun word comes first, then shorter ones, then half a character, then the start of every word; whoever iterates
        stops at the first row that will do.

        Args:
            gate: awaiting; where the text stands.
            row: written anew before each step of the iteration; control tokens are taken by their text.
            tails: allow a whole word and more in one token.
            within: only tokens with which a word takes at most so many, the next one included; any where there is none.
        """
        for state in self._standings(gate):
            self._trie.survivors(self._tables[tails], state, row, control=True)
            if within is not None:
                self._within(state, row, within - 1, tails=tails)
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
