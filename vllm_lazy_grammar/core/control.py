"""Control tokens: ids like ``<tool_call>`` that stand for a marker, never for text that happens to be spelled the same.

Invariants:
- A control token is allowed exactly where a literal of the grammar takes its whole text, and masked where only free text would
  (inside a JSON string, say); engines differ here, so the correction is ours, for all of them.
- Deciding moves nothing: the matcher is left where it was.

How a literal is told from free text: a foil, the same text with another last byte, is offered too. Where the grammar refuses the foil, only
a literal can have taken the text. Where it takes both, they are the same free text if the masks behind them are equal.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_lazy_grammar.core.matcher import Matcher, Row
    from vllm_lazy_grammar.core.vocabulary import Vocabulary


_MARKER = re.compile(r"<[|\uff5c].*[|\uff5c]>|</?(think|tool_call|tool_response)>", re.DOTALL)


def looks_like_marker(text: str) -> bool:
    """Whether an added token's text is a marker by its form, though its tokenizer does not mark it special: ``<|...|>``, ``<tool_call>``."""
    return _MARKER.fullmatch(text) is not None


class ControlTokens:
    """The control tokens of one grammar: which ids are masked as text, and which of them its source spells.

    Args:
        vocabulary: special added tokens are control tokens.
        named: further ids that a preset or a trigger names.
        source: the grammar's source and the trigger words; a literal can only stand there.
    """

    def __init__(self, vocabulary: Vocabulary, named: Iterable[int] = (), source: str = "") -> None:
        self.ids = frozenset(vocabulary.special_ids) | frozenset(named)
        spelled = ((t, vocabulary.piece(t)) for t in sorted(self.ids))
        self.spelled = {t: piece for t, piece in spelled if piece and _occurs(piece, source)}
        self._words = vocabulary.row_words

    def allows(self, token: int, matcher: Matcher, *, in_string: bool) -> bool:
        """Whether a literal of the grammar takes the whole text of control token `token` here.

        Args:
            token: a control token.
            matcher: left as it was.
            in_string: whether the text stands in a JSON string, where whatever takes a foil is free text.
        """
        text = self.spelled.get(token)
        if text is None or not matcher.accept_bytes(text):
            return False
        matcher.rollback(1)
        foil = text[:-1] + (b"q" if text[-1:] != b"q" else b"z")
        if not matcher.accept_bytes(foil):
            return True
        matcher.rollback(1)
        return not in_string and not self._same_behind(matcher, text, foil)

    def _same_behind(self, matcher: Matcher, text: bytes, foil: bytes) -> bool:
        return bool(np.array_equal(self._behind(matcher, text), self._behind(matcher, foil)))

    def _behind(self, matcher: Matcher, data: bytes) -> Row:
        row = np.empty(self._words, np.int32)
        matcher.accept_bytes(data)
        matcher.fill(row)
        matcher.rollback(1)
        return row

    def allowed(self, matcher: Matcher, *, in_string: bool) -> list[int]:
        """The control tokens that literals take here."""
        return [t for t in self.spelled if self.allows(t, matcher, in_string=in_string)]


def _occurs(piece: bytes, source: str) -> bool:
    text = piece.decode("utf-8", "replace")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("/", "\\/")
    return text in source or escaped in source
