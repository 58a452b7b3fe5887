"""The vocabulary of a tokenizer, and what xgrammar is told of it.

Invariants:
- xgrammar never sees a special token's text, nor a stop id of a request: so no matcher terminates, and no text takes a special token.
- A row is as wide as the model's vocabulary; ids without bytes, special tokens and padding have no bit (save a token that the grammar names by its id).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import xgrammar as xgr

from vllm_lazy_grammar.core.vocabulary import WORD_BITS, Vocabulary
from vllm_lazy_grammar.engines.single_bytes import SingleBytes
from vllm_lazy_grammar.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_lazy_grammar.core.matcher import Row

_NEVER_TEXT = b"\xff"
"""Begins the piece of a special token that a grammar may name by id: no character begins with it."""


class Ids:
    """What xgrammar is told of a vocabulary, and what has to be put right in its rows.

    Args:
        vocabulary: ours.
        by_id: special tokens can be named by id: xgrammar is given pieces that no text spells; else it is not told of them at all.
    """

    def __init__(self, vocabulary: Vocabulary, *, by_id: bool) -> None:
        self.vocabulary = vocabulary
        self.empty = frozenset(token for token, piece in enumerate(vocabulary.pieces) if not piece)
        self.refused = self.empty | vocabulary.special_ids
        never = sorted(self.empty if by_id else self.refused)
        if not never:
            raise SettingsError("tokenizer", vocabulary, "needs one id that is never text: a special token or padding")
        self.stop = never[-1]
        self.stop_place = divmod(self.stop, WORD_BITS)
        self.has_partial_word = bool(vocabulary.size % WORD_BITS)
        pieces = list(vocabulary.pieces)
        for token in vocabulary.special_ids:
            pieces[token] = _NEVER_TEXT + pieces[token] if by_id else b""
        self.info = xgr.TokenizerInfo(pieces, vocab_size=vocabulary.size, stop_token_ids=[self.stop])

    @cached_property
    def clears(self) -> tuple[tuple[int, np.int32], ...]:
        """Words of a row and what to keep of them: xgrammar sets its stop id where a text may end, and bits behind the last id."""
        row = self._row(range(self.vocabulary.size), but=(self.stop,))
        return tuple((int(word), row[word]) for word in np.flatnonzero(row != -1))

    def keeps(self, refused: Iterable[int]) -> Row:
        """A row of all ids but these."""
        return self._row(range(self.vocabulary.size), but=refused)

    def _row(self, ids: range, *, but: Iterable[int]) -> Row:
        bits = np.zeros(self.vocabulary.row_words * WORD_BITS, dtype=np.uint8)
        bits[ids.start : ids.stop] = 1
        bits[list(but)] = 0
        return np.packbits(bits, bitorder="little").view(np.int32)

    @cached_property
    def single_bytes(self) -> SingleBytes:
        """The ids whose piece is one byte."""
        found = {
            piece[0]: token
            for token, piece in enumerate(self.vocabulary.pieces)
            if len(piece) == 1 and token not in self.refused
        }
        return SingleBytes(found)


def vocabulary(tokenizer: Any, size: int) -> Vocabulary:
    """The vocabulary of a tokenizer as vLLM has it, as wide as the model's `size`.

    SettingsError where xgrammar does not know the kind of tokenizer.
    """
    if getattr(type(tokenizer), "IS_MISTRAL_TOKENIZER", False):
        return _mistral_vocabulary(tokenizer, size)
    try:
        init = getattr(tokenizer, "init_xgrammar", None)  # plamo3 brings its own
        info = init()[0] if callable(init) else xgr.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    except ValueError as error:
        raise SettingsError("tokenizer", type(tokenizer).__name__, str(error)) from error
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token for token, text in added.items() if text.special}
    return Vocabulary(
        info.decoded_vocab,
        size,
        special_ids=special.union(getattr(tokenizer, "all_special_ids", ())),
        added={text.content: token for token, text in added.items()},
        eos_ids=info.stop_token_ids,
    )


def _mistral_vocabulary(tokenizer: Any, size: int) -> Vocabulary:
    """Tekken tells the bytes of a token; vLLM's backend takes its texts, where halves of characters are lost."""
    names = tokenizer.vocab
    if tokenizer.is_tekken:
        pieces = [tokenizer.tokenizer.id_to_byte_piece(token) for token in range(len(names))]
    else:
        info = xgr.TokenizerInfo(
            names, xgr.VocabType.BYTE_FALLBACK, stop_token_ids=[tokenizer.eos_token_id], add_prefix_space=True
        )
        pieces = info.decoded_vocab
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return Vocabulary(pieces, size, special_ids=special.values(), added=special, eos_ids=(tokenizer.eos_token_id,))
