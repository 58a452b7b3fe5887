"""Token ids and their bytes: what a tokenizer and a model agree on, without either of them.

Invariants:
- Nothing changes after construction, so one vocabulary is shared by all requests and threads.
- An id exists exactly where ``0 <= id < size``, the model's size: padding exists and has no bytes, tokenizer ids at or beyond it do not exist.
- A run of whitespace is never a control token, however the tokenizer marks it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

WORD_BITS = 32
"""Bits in one word of a mask row."""

_SENTENCEPIECE_SPACE = "\u2581"


def _is_blank(text: str) -> bool:
    return not text.replace(_SENTENCEPIECE_SPACE, " ").strip()


class Vocabulary:
    """The pieces of a model's vocabulary; immutable, shared.

    Args:
        pieces: the bytes of each id, in order; shorter than `size` where the model pads, longer where the tokenizer knows more than the model.
        size: entries of the model's output, padding counted.
        special_ids: ids of added tokens marked special. A piece of theirs is the text in `added`, where it stands there.
        added: text -> id of all added tokens.
        eos_ids: ids that end a turn unless a request says otherwise.
    """

    __slots__ = ("_added_text", "_ids", "_pieces", "added", "eos_ids", "row_words", "size", "special_ids")

    def __init__(
        self,
        pieces: Sequence[bytes],
        size: int,
        *,
        special_ids: Iterable[int] = (),
        added: Mapping[str, int] = MappingProxyType({}),
        eos_ids: Iterable[int] = (),
    ) -> None:
        self.size = size
        self.row_words = -(-size // WORD_BITS)
        self.added: Mapping[str, int] = MappingProxyType(
            {text: token for text, token in added.items() if token in self}
        )
        self._added_text = {token: text.encode() for text, token in self.added.items()}
        self.special_ids = frozenset(token for token in special_ids if token in self) - self._blank_ids()
        self.eos_ids = frozenset(token for token in eos_ids if token in self)
        self._pieces = self._complete(pieces)
        self._ids = {
            piece: token for token, piece in zip(range(size - 1, -1, -1), reversed(self._pieces), strict=True) if piece
        }

    def _blank_ids(self) -> frozenset[int]:
        return frozenset(token for text, token in self.added.items() if _is_blank(text))

    def _complete(self, pieces: Sequence[bytes]) -> tuple[bytes, ...]:
        known = list(pieces[: self.size])
        known.extend([b""] * (self.size - len(known)))
        for token, text in self._added_text.items():
            if not known[token] or token in self.special_ids:
                known[token] = text
        return tuple(known)

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and 0 <= token < self.size

    def __repr__(self) -> str:
        return f"Vocabulary(size={self.size}, special={len(self.special_ids)}, added={len(self.added)})"

    @property
    def pieces(self) -> tuple[bytes, ...]:
        """The bytes of every id, `size` entries; padding is empty."""
        return self._pieces

    def piece(self, token: int) -> bytes:
        """The bytes of one id: a special token's text; empty for ids without bytes, for padding, and for ids that do not exist."""
        return self._pieces[token] if 0 <= token < self.size else b""

    def token_of(self, text: str) -> int | None:
        """The id whose text is exactly this; an added token before any other, the lowest of several; None where there is none."""
        token = self.added.get(text)
        return self._ids.get(text.encode()) if token is None else token

    def text_id(self, piece: bytes) -> int | None:
        """The lowest id with exactly these bytes that is no special token; None where there is none."""
        token = self._ids.get(piece)
        return None if token in self.special_ids else token

    def id_of(self, piece: bytes) -> int | None:
        """The lowest id with exactly these bytes; None where there is none."""
        return self._ids.get(piece)

    def named(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of the added tokens with these texts: control tokens by name. Runs of whitespace and texts that no added token has are left out."""
        return frozenset(self.added[text] for text in texts if text in self.added and not _is_blank(text))

    def control_text(self, token: int) -> bytes:
        """What a literal must spell to take this token: an added token's text, else the piece."""
        return self._added_text.get(token) or self.piece(token)


def spelled(vocabulary: Vocabulary, text: bytes) -> list[int]:
    """Ids whose pieces are `text`, the longest that fits first each time. A vocabulary without some byte spells nothing: empty."""
    tokens: list[int] = []
    at = 0
    while at < len(text):
        ends = range(len(text), at, -1)
        found = next((t for end in ends if (t := vocabulary.text_id(text[at:end])) is not None), None)
        if found is None:
            return []
        tokens.append(found)
        at += len(vocabulary.piece(found))
    return tokens
