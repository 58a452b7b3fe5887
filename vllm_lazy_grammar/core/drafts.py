"""Drafts from the grammar: the text that is certain, or likely, to come next, as the tokens that the model would write it with.

A draft is a proposal: the model verifies it, so a wrong one costs time and nothing else.

Invariants:
- Nothing is offered that the grammar refuses, and nothing moves: the matcher is where it was.
- Tokens that were accepted are never changed; a draft goes on from them.
- No search is longer than what was asked for: neither in bytes nor in rows.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vllm_lazy_grammar.core.blank_style import BlankStyle
from vllm_lazy_grammar.core.vocabulary import spelled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm_lazy_grammar.core.journal import Position, Text
    from vllm_lazy_grammar.core.matcher import GrammarKey, Matcher
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


@lru_cache(256)
def required_keys(key: GrammarKey) -> tuple[bytes, ...]:
    """The keys that some object of a schema or a structural tag must have, as JSON writes them, in the order of the source."""
    if key.kind not in ("json", "structural_tag"):
        return ()
    return tuple(
        dict.fromkeys(json.dumps(name, ensure_ascii=False).encode()[1:-1] for name in _required(json.loads(key.source)))
    )


def _required(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for item in node:
            yield from _required(item)
    if not isinstance(node, dict):
        return
    properties, required = node.get("properties"), node.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        yield from (name for name in properties if name in required)
    for value in node.values():
        yield from _required(value)


class Drafts:
    """What one request's grammar knows of the text to come.

    Args:
        vocabulary: the model's.
        joiner: makes tokens of text.
        keys: keys that are likely where several are possible, most likely first; as JSON writes them.

    Attributes:
        offered: tokens that were judged.
        accepted: how many of them the model wrote.
    """

    def __init__(self, vocabulary: Vocabulary, joiner: Joiner, keys: Sequence[bytes] = ()) -> None:
        self._vocabulary, self._joiner, self._keys = vocabulary, joiner, keys
        self._read: tuple[Matcher, int, Text | None, BlankStyle] | None = None
        self._row = np.empty(vocabulary.row_words, np.int32)
        self.offered = self.accepted = 0
        self._reached = 0

    @property
    def worth(self) -> bool:
        """Whether drafts are accepted often enough to go on."""
        return self._reached < TRIED or self.accepted >= WORTH * self._reached

    def judge(self, offered: int, accepted: int, *, reached: bool) -> None:
        """Tell what became of some tokens; `reached`: whether all drafts before them were accepted."""
        self.offered += offered
        self.accepted += accepted
        self._reached += offered if reached else 0

    def tokens(self, at: Position, limit: int) -> list[int]:
        """At most `limit` tokens that are likely to come next, inside the grammar; each the grammar takes."""
        room = limit * _BYTES_PER_TOKEN
        text = self.text(at, room)
        if not text:
            return []
        return list(self._joiner.join(self._tail(at), text)[:limit])

    def text(self, at: Position, limit: int) -> bytes:
        """The bytes that are certain or likely to come next, about `limit` of them at most."""
        style, matcher, found = self._style(at), at.matcher, bytearray()
        steps = matcher.steps
        try:
            while len(found) < limit and not matcher.is_completed():
                more = matcher.certain(limit - len(found)) or self._likely(matcher, style)
                if not more or not matcher.accept_bytes(more):
                    break
                style.read(more)
                found += more
        finally:
            matcher.rollback(matcher.steps - steps)
        return bytes(found)

    def _likely(self, matcher: Matcher, style: BlankStyle) -> bytes:
        if style.in_string:
            return b"" if style.key is None else self._key(matcher, bytes(style.key))
        nexts = matcher.next_bytes(self._row)
        solid = nexts.translate(None, _BLANKS)
        return style.blanks(solid[0]) + solid if len(solid) == 1 else b""

    def _key(self, matcher: Matcher, begun: bytes) -> bytes:
        """The rest of the first likely key that the grammar takes here."""
        for key in self._keys:
            rest = key[len(begun) :] + b'"'
            if key.startswith(begun) and matcher.accept_bytes(rest):
                matcher.rollback(1)
                return rest
        return b""

    def follow(self, at: Position) -> None:
        """Read what was accepted since the last time; `at` is inside the grammar."""
        self._read = at.matcher, at.steps, at.text, self._style(at)

    def _style(self, at: Position) -> BlankStyle:
        """The style of the text so far: read on from where `follow` stopped, where that is on the way here."""
        known = self._read if self._read is not None and self._read[0] is at.matcher else None
        parts: list[bytes] = []
        text, depth = at.text, at.steps
        while text is not None and not (known is not None and depth == known[1] and text is known[2]):
            text, part = text
            parts.append(self._bytes(part))
            depth -= 1
        style = BlankStyle() if known is None or text is None else known[3].copy()
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
