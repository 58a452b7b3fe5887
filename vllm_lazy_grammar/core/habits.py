"""What earlier drafts taught about how this model writes: its blanks, and where it splits tokens otherwise than the tokenizer.

Shared by the requests of one engine, on the scheduler's thread. It changes what is proposed, never what is written.

Invariants:
- Little is kept: a style for each kind of grammar, and a small number for each token that was drafted.
- What was learnt is unlearnt by as much evidence to the contrary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_lazy_grammar.core.blank_style import BlankStyle
from vllm_lazy_grammar.core.vocabulary import spelled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_lazy_grammar.core.vocabulary import Vocabulary

_SURE = 4
"""Evidence for or against a token is counted up to so much."""


class Habits:
    """Learns from drafts and what was written in their place.

    Args:
        vocabulary: the model's.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._styles: dict[str, BlankStyle] = {}
        self._whole: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def style(self, kind: str) -> BlankStyle:
        """Where a new answer begins: with the blanks of the last answer of its kind."""
        known = self._styles.get(kind)
        return BlankStyle() if known is None else BlankStyle(known.colon, known.item, known.indent)

    def saw(self, kind: str, style: BlankStyle) -> None:
        """The blanks that an answer uses; the object is kept."""
        self._styles[kind] = style

    def written(self, tokens: Sequence[int], *, open_end: bool) -> list[int]:
        """The tokens as this model writes them.

        Args:
            tokens: as the tokenizer writes them.
            open_end: whether what follows is not known: the last token is left out where it mostly becomes a part of a longer one.
        """
        found: list[int] = []
        for token in tokens:
            found += self._split(token) if self._whole.get(token, 0) < 0 else [token]
        if open_end and found and self._last.get(found[-1], 0) < 0:
            found.pop()
        return found

    def _split(self, token: int) -> list[int]:
        first = self._first[token]
        piece = self._vocabulary.piece
        return [first, *spelled(self._vocabulary, piece(token)[len(piece(first)) :])]

    def judge(self, drafts: Sequence[int], written: Sequence[int], tried: int) -> int:
        """Learn from drafts and what the model wrote in their place; how many were written as drafted.

        Args:
            drafts: as they were offered.
            written: what the model wrote.
            tried: how many of the drafts the model was given; of the others nothing is learnt.
        """
        for count, (draft, token) in enumerate(zip(drafts[:tried], written, strict=False)):
            is_last = count == len(drafts) - 1
            if draft == token:
                self._note(self._whole, draft, 1)
                if is_last:
                    self._note(self._last, draft, 1)
                continue
            self._differs(draft, token, is_last=is_last)
            return count
        return min(tried, len(written))

    def _differs(self, draft: int, token: int, *, is_last: bool) -> None:
        piece, other = self._vocabulary.piece(draft), self._vocabulary.piece(token)
        if not piece or not other:
            return
        if piece.startswith(other):
            self._note(self._whole, draft, -1)
            self._first[draft] = token
        elif other.startswith(piece):
            self._note(self._whole, token, 1)
            if is_last:
                self._note(self._last, draft, -1)

    @staticmethod
    def _note(counts: dict[int, int], token: int, change: int) -> None:
        counts[token] = max(-_SURE, min(_SURE, counts.get(token, 0) + change))
