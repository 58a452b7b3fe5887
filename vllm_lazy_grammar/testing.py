"""A fake engine and a vocabulary that a person can check by eye; public, and held to the same contract tests as the real engines.

Invariants:
- A fake grammar is a regular expression over bytes: what was written is legal exactly where the `regex` package says that it fully matches,
  or could once more is written.
- A fake matcher's whole state is the bytes written and where each step began, so every call is answered from the start, without a cache.
- A held engine compiles nothing until it is released, and says when a compile is waiting.
"""

from __future__ import annotations

import copy
import json
import threading
from typing import TYPE_CHECKING, Self

import numpy as np
import regex

from vllm_lazy_grammar.core.matcher import CERTAIN_LIMIT, fill_ahead, taken
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.errors import GrammarError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_lazy_grammar.core.matcher import GrammarKey, Row, Rows

_JSON_OBJECT = r'\{(?:"[a-z]*":[0-9]+(?:,"[a-z]*":[0-9]+)*)?\}'

SMALL_TEXTS = (
    "a",
    "b",
    "c",
    "ab",
    "abc",
    "bc",
    "{",
    "}",
    '"',
    ":",
    ",",
    "1",
    "2",
    "12",
    " ",
    "\n",
    "<t>",
    "<",
    "t",
    ">",
    "é",
)
"""Texts of the first ids of `small_vocabulary`, in order: ``a`` is 0, ``é`` is 20."""

SMALL_HALF_FIRST = 21
"""The id of the byte C3: the first half of ``é``."""

SMALL_HALF_SECOND = 22
"""The id of the byte A9: the second half of ``é``."""

SMALL_TWIN = 23
"""A second id whose bytes are ``a``."""

SMALL_EMPTY = 24
"""An id inside the tokenizer's vocabulary that has no bytes."""

SMALL_CALL = 25
"""The special token ``<call>``."""

SMALL_END = 26
"""The special token ``<end>``, which ends a turn."""

SMALL_SIZE = 40
"""The model's vocabulary: ids 27 to 39 are padding."""


def small_vocabulary() -> Vocabulary:
    """A vocabulary of 27 ids and 13 of padding: letters, JSON's marks, half characters, a duplicate, an empty piece, two special tokens."""
    pieces = [*(text.encode() for text in SMALL_TEXTS), b"\xc3", b"\xa9", b"a", b"", b"<call>", b"<end>"]
    return Vocabulary(
        pieces,
        SMALL_SIZE,
        special_ids=(SMALL_CALL, SMALL_END),
        added={"<call>": SMALL_CALL, "<end>": SMALL_END},
        eos_ids=(SMALL_END,),
    )


def allowed_ids(row: Row) -> list[int]:
    """The ids whose bit is set in a row, ascending."""
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


class FakeMatcher:
    """A position in a regular expression over bytes; implements `Matcher` and `LooksAhead`.

    Args:
        pattern: the compiled expression.
        vocabulary: decides what a token id writes; special tokens are never taken by id.
    """

    def __init__(self, pattern: regex.Pattern[bytes], vocabulary: Vocabulary) -> None:
        self._pattern = pattern
        self._vocabulary = vocabulary
        self._starts: list[int] = []
        self.written = b""
        self.fills = 0

    @property
    def steps(self) -> int:
        """Steps accepted and not rolled back."""
        return len(self._starts)

    def _could(self, text: bytes) -> bool:
        return self._pattern.fullmatch(text, partial=True) is not None

    def _takes(self, token: int) -> bool:
        piece = self._vocabulary.piece(token)
        return bool(piece) and token not in self._vocabulary.special_ids and self._could(self.written + piece)

    def accept(self, token: int) -> bool:
        """Advance by one whole token; False, and nothing changed, where it is refused."""
        return self._takes(token) and self.accept_bytes(self._vocabulary.piece(token))

    def accept_bytes(self, data: bytes) -> bool:
        """Advance by bytes, as one step; empty bytes are no step."""
        if not self._could(self.written + data):
            return False
        if data:
            self._starts.append(len(self.written))
            self.written += data
        return True

    def fill(self, row: Row) -> bool:
        """Write the mask of the next token by trying every id; whether anything is masked."""
        self.fills += 1
        bits = np.zeros(row.size * 32, dtype=np.uint8)
        taken = [token for token in range(self._vocabulary.size) if self._takes(token)]
        bits[taken] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return len(taken) < self._vocabulary.size

    def rollback(self, steps: int) -> None:
        """Take back the last steps; ValueError where there are fewer."""
        if not 0 <= steps <= self.steps:
            raise ValueError(f"can not take back {steps} steps of {self.steps}")
        if steps:
            self.written = self.written[: self._starts[-steps]]
            del self._starts[-steps:]

    def fork(self) -> Self:
        """An independent matcher at the same position, history included."""
        other = copy.copy(self)
        other._starts = list(self._starts)  # noqa: SLF001 -- its own class
        return other

    def is_completed(self) -> bool:
        """Whether the expression matches exactly what was written."""
        return self._pattern.fullmatch(self.written) is not None

    def certain(self, limit: int = CERTAIN_LIMIT) -> bytes:
        """The bytes that must come next, at most `limit` of them."""
        text = self.written
        while len(text) - len(self.written) < limit and self._pattern.fullmatch(text) is None:
            nexts = self._nexts(text)
            if len(nexts) != 1:
                break
            text += nexts
        return text[len(self.written) :]

    def next_bytes(self, row: Row) -> bytes:  # noqa: ARG002 -- the protocol
        """Each byte that may come next, ascending; the row is not needed."""
        return self._nexts(self.written)

    def taken(self, tokens: Sequence[int]) -> int:
        """How many of these tokens would be accepted, up to the first that is not."""
        return taken(self, tokens)

    def fill_ahead(self, tokens: Sequence[int], rows: Rows) -> list[bool]:
        """Write the mask of this position and of that behind each token; for each row, whether the text may be complete there."""
        return fill_ahead(self, tokens, rows)

    def _nexts(self, text: bytes) -> bytes:
        return bytes(byte for byte in range(256) if self._could(text + bytes((byte,))))


class FakeGrammar:
    """A regular expression over bytes as a compiled grammar; implements `CompiledGrammar`.

    Args:
        pattern: a bytes expression; ``.`` and classes stand for one byte each.
        vocabulary: the vocabulary of its matchers.
        key: what it was compiled from.
    """

    origin = "fake"

    def __init__(self, pattern: regex.Pattern[bytes], vocabulary: Vocabulary, key: GrammarKey) -> None:
        self._pattern = pattern
        self._vocabulary = vocabulary
        self.key = key

    @property
    def nbytes(self) -> int:
        """The length of the expression: enough to count against a cache."""
        return len(self._pattern.pattern)

    def matcher(self) -> FakeMatcher:
        """A new matcher at the start."""
        return FakeMatcher(self._pattern, self._vocabulary)


def _expression(key: GrammarKey) -> str:
    if key.kind == "regex":
        return key.source
    if key.kind == "choice":
        return "|".join(regex.escape(choice, literal_spaces=True) for choice in json.loads(key.source))
    if key.kind == "json_object":
        return _JSON_OBJECT
    raise GrammarError(
        f"structured_outputs.{key.kind}", key.source, "the fake engine knows regex, choice and json_object only"
    )


class FakeEngine:
    """Compiles `regex`, `choice` and a tiny flat `json_object` (letters to digits, without blanks); implements `Engine`.

    Args:
        vocabulary: the vocabulary of its grammars.
        held: start held: every compile waits until `release`.

    Attributes:
        compiled: the keys whose compile was begun, in order.
        waiting: set once a compile waits at the gate; a test waits for it instead of sleeping.
    """

    def __init__(self, vocabulary: Vocabulary, *, held: bool = False) -> None:
        self.vocabulary = vocabulary
        self.compiled: list[GrammarKey] = []
        self.waiting = threading.Event()
        self._open = threading.Event()
        if not held:
            self._open.set()

    def hold(self) -> None:
        """From now on a compile waits until `release`."""
        self.waiting.clear()
        self._open.clear()

    def release(self) -> None:
        """Let waiting and later compiles go on."""
        self._open.set()

    def compile(self, key: GrammarKey) -> FakeGrammar:
        """Compile; GrammarError for a kind that the fake does not know or an expression that is none."""
        self.compiled.append(key)
        if not self._open.is_set():
            self.waiting.set()
            self._open.wait()
        try:
            pattern = regex.compile(_expression(key).encode())
        except (regex.error, ValueError) as error:
            raise GrammarError(f"structured_outputs.{key.kind}", key.source, str(error)) from error
        return FakeGrammar(pattern, self.vocabulary, key)
