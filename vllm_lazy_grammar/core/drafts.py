"""Drafts from the grammar: the text that is certain, or likely, to come next, as the tokens that the model would write it with.

A draft is a proposal: the model verifies it, so a wrong one costs time and nothing else.

Invariants:
- Nothing is offered that the grammar refuses, and nothing moves: the matcher is where it was.
- Tokens that were accepted are never changed; a draft goes on from them.
- No search is longer than what was asked for: neither in bytes nor in rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from vllm_lazy_grammar.core.vocabulary import spelled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_lazy_grammar.core.blank_style import BlankStyle
    from vllm_lazy_grammar.core.habits import Habits
    from vllm_lazy_grammar.core.journal import Position, Text
    from vllm_lazy_grammar.core.likely import Likely, Path
    from vllm_lazy_grammar.core.matcher import Matcher
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

_BLANKS = b" \n\t\r"
_BYTES_PER_TOKEN = 8
_TAIL = 8
"""Tokens before a draft that say how it joins on."""

TRIED = 16
"""Tokens of drafts that are judged before a source may switch itself off."""

WORTH = 0.5
"""The share of them that must have been accepted."""


class Joiner(Protocol):
    """Writes text as tokens, as the model's tokenizer would."""

    def join(self, before: bytes, text: bytes) -> Sequence[int]:
        """The tokens of `text` behind `before`, which stays as it is; may stop early, and may be empty."""


class LongestJoiner:
    """The longest tokens that fit: for vocabularies without a tokenizer at hand.

    Args:
        vocabulary: the model's.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def join(self, before: bytes, text: bytes) -> list[int]:  # noqa: ARG002 -- the protocol
        """The tokens of `text`; empty where the vocabulary can not spell it."""
        return spelled(self._vocabulary, text)


class Drafts:
    """What one request's grammar knows of the text to come.

    Args:
        vocabulary: the model's.
        joiner: makes tokens of text.
        likely: what the grammar's source says of choices.
        habits: what earlier drafts taught; shared.
        kind: the kind of grammar, whose blanks are learnt together.

    Attributes:
        offered: tokens that were judged.
        accepted: how many of them the model wrote.
    """

    def __init__(self, vocabulary: Vocabulary, joiner: Joiner, likely: Likely, habits: Habits, kind: str) -> None:
        self._vocabulary, self._joiner, self._likely = vocabulary, joiner, likely
        self._habits, self._kind = habits, kind
        self._read: tuple[Matcher, int, Text | None, BlankStyle] | None = None
        self._row = np.empty(vocabulary.row_words, np.int32)
        self.offered = self.accepted = 0
        self._reached = 0

    @property
    def worth(self) -> bool:
        """Whether drafts are accepted often enough to go on."""
        return self._reached < TRIED or self.accepted >= WORTH * self._reached

    def judge(self, drafts: Sequence[int], written: Sequence[int] | None, tried: int | None = None) -> None:
        """Tell what became of drafts.

        Args:
            drafts: as they were offered.
            written: what the model wrote in their place; None where it had gone another way before them.
            tried: how many of them the model was given; None: all.
        """
        tried = len(drafts) if tried is None else tried
        self.offered += tried
        if written is not None:
            self._reached += tried
            self.accepted += self._habits.judge(drafts, written, tried)

    def tokens(self, at: Position, limit: int) -> list[int]:
        """At most `limit` tokens that are likely to come next, inside the grammar."""
        room = limit * _BYTES_PER_TOKEN
        text = self.text(at, room)
        open_end = len(text) < room
        if open_end:
            text = text.rstrip(b" ")  # a blank before a choice belongs to the word that is chosen
        if not text:
            return []
        return self._habits.written(self._joiner.join(self._tail(at), text), open_end=open_end)[:limit]

    def text(self, at: Position, limit: int) -> bytes:
        """The bytes that are certain or likely to come next, about `limit` of them at most."""
        style, matcher, found = self._style(at), at.matcher, bytearray(self._tail(at))
        steps, begin = matcher.steps, len(found)
        try:
            while len(found) - begin < limit and not matcher.is_completed():
                more = matcher.certain(limit - len(found) + begin) or self._guess(matcher, style, found)
                if not more or not matcher.accept_bytes(more):
                    break
                style.read(more)
                found += more
        finally:
            matcher.rollback(matcher.steps - steps)
        return bytes(found[begin:])

    def _guess(self, matcher: Matcher, style: BlankStyle, text: bytearray) -> bytes:
        if style.in_string:
            return b"" if style.key is None else self._key(matcher, bytes(style.key), tuple(style.path[:-1]))
        nexts = matcher.next_bytes(self._row)
        forked = self._likely.fork(bytes(text), nexts)
        solid = nexts.translate(None, _BLANKS)
        blanks = style.blanks(solid[0]) if len(solid) == 1 else None
        return forked or (b"" if blanks is None else blanks + solid)

    def _key(self, matcher: Matcher, begun: bytes, path: Path) -> bytes:
        """The rest of the first likely key that the grammar takes here."""
        for key in self._likely.keys(path):
            rest = key[len(begun) :] + b'"'
            if key.startswith(begun) and matcher.accept_bytes(rest):
                matcher.rollback(1)
                return rest
        return b""

    def follow(self, at: Position) -> None:
        """Read what was accepted since the last time; `at` is inside the grammar."""
        style = self._style(at)
        self._read = at.matcher, at.steps, at.text, style
        if style.colon is not None:
            self._habits.saw(self._kind, style)

    def _style(self, at: Position) -> BlankStyle:
        """The style of the text so far: read on from where `follow` stopped, where that is on the way here."""
        known = self._read if self._read is not None and self._read[0] is at.matcher else None
        parts: list[bytes] = []
        text, depth = at.text, at.steps
        while text is not None and not (known is not None and depth == known[1] and text is known[2]):
            text, part = text
            parts.append(self._bytes(part))
            depth -= 1
        style = self._habits.style(self._kind) if known is None or text is None else known[3].copy()
        style.read(b"".join(reversed(parts)))
        return style

    def _tail(self, at: Position) -> bytes:
        parts: list[bytes] = []
        text = at.text
        while text is not None and len(parts) < _TAIL:
            text, part = text
            parts.append(self._bytes(part))
        return b"".join(reversed(parts))

    def _bytes(self, part: int | bytes) -> bytes:
        return part if isinstance(part, bytes) else self._vocabulary.piece(part)
