"""Text as tokens, joined on to the tokens that are there as the model's tokenizer would join it.

Invariants:
- The tokens returned spell the text, and nothing before it; where the tokenizer would merge across the border, the part behind it is spelled alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from vllm_lazy_grammar.core.vocabulary import spelled

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

_START = b"\n"
"""Stands before a text that nothing stands before: a tokenizer may set a blank before its first word."""


class TokenizerJoiner:
    """Joins as a tokenizer does. Thread-safe.

    Args:
        tokenizer: vLLM's: has ``encode(text, add_special_tokens=False)``.
        vocabulary: the bytes of its ids.
    """

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._encode = tokenizer.encode if backend is None else backend.encode
        self._vocabulary = vocabulary
        self.join = lru_cache(4096)(self._join)

    def _join(self, before: bytes, text: bytes) -> tuple[int, ...]:
        """The tokens of `text` behind `before`; a character that begins or ends outside it is left out."""
        head = (before or _START).decode(errors="ignore")
        whole = head + text.decode(errors="ignore")
        encoded = self._encode(whole, add_special_tokens=False)
        tokens: list[int] = getattr(encoded, "ids", encoded)
        border = len(head.encode())
        pieces = [self._vocabulary.piece(token) for token in tokens]
        spells = b"".join(pieces)
        if spells != whole.encode():
            if spells != b" " + whole.encode():
                return tuple(spelled(self._vocabulary, text))
            border += 1
        return tuple(self._behind(border, tokens, pieces))

    def _behind(self, border: int, tokens: list[int], pieces: list[bytes]) -> list[int]:
        end, found = 0, []
        for token, piece in zip(tokens, pieces, strict=True):
            begin, end = end, end + len(piece)
            if begin >= border:
                found.append(token)
            elif end > border:
                found += spelled(self._vocabulary, piece[border - begin :])
        return found
