"""The text before another call of the same block, and the tokens that go over it from a call's own grammar into the table of openings.

Invariants:
- What is worked out depends on the table and the vocabulary alone; it is immutable.
- A token in no list here lies within the call's grammar wherever it is allowed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from vllm_lazy_grammar.core.rows import IdSet, allowed_ids, zeros

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm_lazy_grammar.core.byte_trie import ByteTrie
    from vllm_lazy_grammar.core.openings import Openings
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

MARK = b"\x01"
"""Behind the text before another call."""


class Crossing:
    """The tokens that may go over the text before another call; worked out once for a grammar.

    Args:
        openings: the table.
        again: the texts.
        trie: the vocabulary's pieces.

    Attributes:
        watched: tokens with which such a text may end, in or at their end.
        ways: ends of such a text, with the token that is just this end where there is one, and the tokens that go on behind it in the table.
        others: tokens that have to be tried: those that hold a whole such text and more, or an end of it, an opening and more.
    """

    def __init__(self, openings: Openings, again: Sequence[bytes], trie: ByteTrie) -> None:
        vocabulary = trie.vocabulary
        self._again = again
        self.ways: list[tuple[bytes, int | None, IdSet]] = []
        watched: set[int] = set()
        others = {token for text in again for token in _holding(vocabulary, text) if not _ends(vocabulary, token, text)}
        watched.update(token for text in again for token in _holding(vocabulary, text))
        begun: set[bytes] = set()
        for text, states in zip(again, openings.again, strict=True):
            for place, state in enumerate(states):
                end = text[place:]
                if end in begun:
                    continue
                begun.add(end)
                beyond = self._beyond(openings, trie, end, state, watched)
                if beyond:
                    self.ways.append((end, vocabulary.text_id(end), IdSet(beyond, vocabulary.size)))
                others.update(self._far(openings, trie, state))
                others.update(_marked(vocabulary, end + MARK))
        self.watched, self.others = frozenset(watched | others), sorted(others)

    @staticmethod
    def _beyond(openings: Openings, trie: ByteTrie, end: bytes, state: int, watched: set[int]) -> list[int]:
        row = zeros(trie.row_words)
        trie.survivors(openings.table, state, row)
        whole = [
            t for t in allowed_ids(row, trie.vocabulary.size).tolist() if len(trie.vocabulary.piece(t)) >= len(end)
        ]
        watched.update(whole)
        return [t for t in whole if len(trie.vocabulary.piece(t)) > len(end)]

    @staticmethod
    def _far(openings: Openings, trie: ByteTrie, state: int) -> Iterator[int]:
        for node, _ in trie.entered(openings.table, openings.is_end, state).tolist():
            yield from trie.tokens_below(node)

    def cuts(self, data: bytes) -> list[int]:
        """Where in `data` the text before another call may have ended, as far as `data` tells."""
        return [
            size
            for size in range(1, len(data) + 1)
            if any(text.endswith(data[:size]) or data[:size].endswith(text) for text in self._again)
        ]


@lru_cache(64)
def _holding(vocabulary: Vocabulary, text: bytes) -> frozenset[int]:
    """The tokens that hold a text, not at their beginning; no special ones."""
    return frozenset(
        token
        for token, piece in enumerate(vocabulary.pieces)
        if piece.find(text, 1) > 0 and token not in vocabulary.special_ids
    )


@lru_cache(256)
def _marked(vocabulary: Vocabulary, text: bytes) -> frozenset[int]:
    """The tokens that begin with a text that ends in the mark; no special ones."""
    having = _holding(vocabulary, MARK)
    return frozenset(token for token in having if vocabulary.piece(token).startswith(text))


def _ends(vocabulary: Vocabulary, token: int, text: bytes) -> bool:
    """Whether a token that holds a text holds it at its end alone."""
    piece = vocabulary.piece(token)
    return piece.find(text, 1) == len(piece) - len(text)
