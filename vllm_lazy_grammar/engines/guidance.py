"""The one importer of llguidance: vocabulary, compile, matcher, and its errors as ours.

What it expresses: JSON schemas (honestly: it names what it can not), regular expressions, choices, Lark. Not EBNF, since it splits text into the
longest lexemes before it parses, which is another language; and no structural tags, since it loses a special end token.

Invariants:
- No tokenization is forced: a row allows every way to split a text into tokens (``no_forcing``; else it would allow one).
- It never sees a special token's text: no text takes a special token, and none can be named.
- Each byte has an id, beyond the model's where the vocabulary has none: so bytes can be offered, and every grammar has a next token.
- A matcher that llguidance has given up is a GrammarError at the call where that happened.
"""

from __future__ import annotations

import json
import re
import threading
from typing import TYPE_CHECKING, Any, Self

import llguidance
import numpy as np

from vllm_lazy_grammar.core.matcher import CERTAIN_LIMIT, certain_by_steps
from vllm_lazy_grammar.core.vocabulary import WORD_BITS, Vocabulary
from vllm_lazy_grammar.engines import limits, schemas, sources
from vllm_lazy_grammar.engines.single_bytes import SingleBytes
from vllm_lazy_grammar.errors import GrammarError, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_lazy_grammar.core.matcher import GrammarKey, Row
    from vllm_lazy_grammar.core.network import Network

NAME = "llguidance"

_HEAD = '%llguidance {"no_forcing": true}\n'
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_NOTHING = "NoExtension"
"""In llguidance's error where no token may come and the text may not end."""
_REASON_LENGTH = 300
_NO_ROW = np.empty(0, np.int32)
"""`next_bytes` needs none: the matcher has a row of its own."""
_WALKED = frozenset({"regex", "grammar"})
"""Kinds that llguidance may give up on the way: ``(a{1,129}){1,129}`` after some hundred bytes, each of which took 8 ms at most."""
_WALK = 256
_BASE_BYTES = 64 << 10
_BYTES_PER_CHARACTER = 64
"""llguidance does not tell what a grammar holds: 340 schemas were seen to add 69 MB to a process where this says 102."""


class _Tokens:
    """What llguidance asks of a tokenizer. It is never asked to split text, since nothing is forced."""

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: list[bytes], eos: int) -> None:
        self.tokens, self.eos_token_id = tokens, eos

    def __call__(self, text: bytes) -> list[int]:
        raise InternalError(f"llguidance asks for the tokens of {text!r}")


class _Ids:
    """The vocabulary as llguidance knows it: the model's ids, then one for each byte that none of them is, then its end."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.refused = frozenset(t for t, piece in enumerate(vocabulary.pieces) if not piece) | vocabulary.special_ids
        pieces = [b"" if t in vocabulary.special_ids else piece for t, piece in enumerate(vocabulary.pieces)]
        byte_ids = {piece[0]: t for t, piece in enumerate(pieces) if len(piece) == 1}
        for byte in range(256):
            if byte not in byte_ids:
                byte_ids[byte] = len(pieces)
                pieces.append(bytes((byte,)))
        self.end = max(self.refused, default=len(pieces))
        if self.end == len(pieces):
            pieces.append(b"")
        self.of_byte = [byte_ids[byte] for byte in range(256)]
        self.single_bytes = SingleBytes(byte_ids)
        self.words = -(-len(pieces) // WORD_BITS)
        self.tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(pieces, self.end)), n_vocab=len(pieces), eos_token=self.end
        )
        self.clears = self._clears()

    def _clears(self) -> tuple[tuple[int, np.int32], ...]:
        """Words of a row and what to keep of them: without the end, and without what is beyond the model's ids."""
        bits = np.zeros(self.vocabulary.row_words * WORD_BITS, dtype=np.uint8)
        bits[: self.vocabulary.size] = 1
        if self.end < self.vocabulary.size:
            bits[self.end] = 0
        row = np.packbits(bits, bitorder="little").view(np.int32)
        return tuple((int(word), row[word]) for word in np.flatnonzero(row != -1))


class GuidanceMatcher:
    """A position in a grammar compiled by llguidance; implements `Matcher`.

    Args:
        matcher: llguidance's; its own.
        grammar: what it was compiled from.
        lengths: tokens, as llguidance counts them, of each step so far.
    """

    __slots__ = ("_buffer", "_grammar", "_ids", "_lengths", "_matcher", "_place", "_refused", "_words")

    def __init__(self, matcher: Any, grammar: GuidanceGrammar, lengths: Sequence[int] = ()) -> None:
        self._matcher, self._grammar, self._ids = matcher, grammar, grammar.ids
        self._refused, self._words = grammar.ids.refused, grammar.ids.vocabulary.row_words
        self._lengths = list(lengths)
        self._buffer: Row | None = None
        self._place = 0

    @property
    def steps(self) -> int:
        """Steps accepted and not rolled back."""
        return len(self._lengths)

    def accept(self, token: int) -> bool:
        """Advance by one whole token; False, and nothing changed, where it is refused. GrammarError where llguidance gives up."""
        if token in self._refused or not 0 <= token < self._ids.vocabulary.size:
            return False
        return self._take([token])

    def accept_bytes(self, data: bytes) -> bool:
        """Advance by bytes, as one step; empty bytes are no step. GrammarError where llguidance gives up."""
        return not data or self._take([self._ids.of_byte[byte] for byte in data])

    def _take(self, tokens: list[int]) -> bool:
        taken = self._matcher.try_consume_tokens(tokens)
        if taken == len(tokens):
            self._lengths.append(taken)
            return True
        self._grammar.refuse_given_up(self._matcher)
        if taken:
            self._take_back(taken)
        return False

    def _take_back(self, tokens: int) -> None:
        if not self._matcher.rollback(tokens):
            raise InternalError(f"llguidance can not take back {tokens} tokens: {self._matcher.get_error()}")

    def fill(self, row: Row) -> bool:
        """Write the mask of the next token; always True, since an id that is never text is masked. GrammarError where llguidance gives up."""
        row[:] = self._filled()[: self._words]
        for at, keep in self._ids.clears:
            row[at] &= keep
        return True

    def _filled(self) -> Row:
        """All ids of llguidance's, the end among them."""
        if self._buffer is None:
            self._buffer = np.zeros(self._ids.words, dtype=np.int32)
            self._place = self._buffer.ctypes.data
        self._matcher.unsafe_compute_mask_ptr(self._place, self._buffer.nbytes)
        self._grammar.refuse_given_up(self._matcher)
        return self._buffer

    def rollback(self, steps: int) -> None:
        """Take back the last steps; ValueError where there are fewer."""
        if not 0 <= steps <= self.steps:
            raise ValueError(f"can not take back {steps} steps of {self.steps}")
        if steps:
            self._take_back(sum(self._lengths[-steps:]))
            del self._lengths[-steps:]

    def fork(self) -> Self:
        """An independent matcher at the same position, history included."""
        return type(self)(self._matcher.deep_copy(), self._grammar, self._lengths)

    def is_completed(self) -> bool:
        """Whether what was accepted so far is a complete sentence."""
        return bool(self._matcher.is_accepting())

    def certain(self, limit: int = CERTAIN_LIMIT) -> bytes:
        """The bytes that must come next, at most `limit` of them."""
        return certain_by_steps(self, _NO_ROW, limit)

    def next_bytes(self, row: Row | None) -> bytes:  # noqa: ARG002 -- the protocol: the row is not needed
        """Each byte that may come next, ascending."""
        return self._ids.single_bytes.allowed(self._filled())


class GuidanceGrammar:
    """A grammar compiled for one vocabulary; implements `CompiledGrammar`. Thread-safe.

    Args:
        key: what it was compiled from.
        matcher: llguidance's at the start, which is copied and never moved.
        ids: the vocabulary as llguidance knows it.
    """

    def __init__(self, key: GrammarKey, matcher: Any, ids: _Ids) -> None:
        self.key, self.ids = key, ids
        self.origin = NAME
        self.dropped: tuple[str, ...] = tuple(matcher.get_grammar_warnings())
        self.states: Callable[[], Network | None] = _no_states
        self._matcher = matcher
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """An estimate: llguidance does not tell."""
        return _BASE_BYTES + _BYTES_PER_CHARACTER * len(self.key.source)

    def network(self) -> Network | None:
        """Its states as another engine sees them, where whoever chose this engine gave `states`; else None."""
        return self.states()

    def matcher(self) -> GuidanceMatcher:
        """A new matcher at the start."""
        with self._lock:
            return GuidanceMatcher(self._matcher.deep_copy(), self)

    def refuse_given_up(self, matcher: Any) -> None:
        """GrammarError where llguidance has given up this matcher."""
        if matcher.is_error():
            error = matcher.get_error().partition("<state>")[0]
            reason = "allows nothing here" if _NOTHING in error else f"llguidance gives it up: {error}"
            raise _refused(self.key, reason)


def _no_states() -> None:
    """None: llguidance does not show its own."""


def _refused(key: GrammarKey, reason: str) -> GrammarError:
    return GrammarError(limits.field_of(key), key.source, " ".join(reason.split())[:_REASON_LENGTH])


class GuidanceEngine:
    """Compiles grammars for one vocabulary with llguidance; implements `Engine`. Thread-safe.

    Args:
        vocabulary: as wide as the model's.
        relaxed: what llguidance does not implement of a schema is left out.
    """

    def __init__(self, vocabulary: Vocabulary, *, relaxed: bool = False) -> None:
        self.vocabulary = vocabulary
        self._relaxed = relaxed
        self._ids = _Ids(vocabulary)

    def compile(self, key: GrammarKey) -> GuidanceGrammar:
        """Compile; other threads run meanwhile. GrammarError where it can not be, or where it allows nothing."""
        limits.check(key)
        matcher = llguidance.LLMatcher(self._ids.tokenizer, _HEAD + _rules(key, relaxed=self._relaxed), log_level=0)
        if matcher.is_error():
            raise _refused(key, _reason(matcher.get_error()))
        grammar = GuidanceGrammar(key, matcher, self._ids)
        grammar.matcher().next_bytes(None)  # refuses what allows nothing
        if key.kind in _WALKED:
            _walk(grammar)
        return grammar


def _walk(grammar: GuidanceGrammar) -> None:
    """GrammarError where llguidance gives the grammar up within some hundred bytes, on two walks through it: better now than in an answer."""
    for leaning in (min, max):
        matcher = grammar.matcher()
        for _ in range(_WALK):
            nexts = matcher.next_bytes(None)
            if not nexts:
                break
            matcher.accept_bytes(bytes((leaning(nexts),)))


def _reason(error: str) -> str:
    """Llguidance's error without the source that it quotes."""
    lines = [line for line in error.splitlines() if not _is_quoted(line)]
    return _PLACE.sub("", " ".join(lines)) or error


def _is_quoted(line: str) -> bool:
    begin = line.strip().partition("|")[0].strip()
    return begin.isdecimal() or line.strip().startswith(("|", "^"))


def _rules(key: GrammarKey, *, relaxed: bool) -> str:
    """A grammar as llguidance's Lark. GrammarError where llguidance can not express it."""
    if key.kind in ("json", "json_object"):
        return f"start: %json {_schema(key, relaxed=relaxed)}"
    if key.kind == "regex":
        return f"start: /{sources.rust_expression(key.source)}/"
    if key.kind == "choice":
        try:
            return f"start: /{'|'.join(map(sources.literal_expression, sources.choices(key)))}/"
        except UnicodeEncodeError as error:
            raise _refused(key, f"half of a character can not be written: {error}") from error
    if key.kind == "structural_tag":
        raise _refused(key, "llguidance is given no structural tags: it loses their special tokens")
    if not sources.is_lark(key.source):
        raise _refused(key, "llguidance is given no EBNF: it takes the longest lexemes, where EBNF takes any")
    if sources.names_tokens(key):
        raise _refused(key, "llguidance is given no grammar that names tokens by id")
    return key.source


def _schema(key: GrammarKey, *, relaxed: bool) -> str:
    schema = schemas.read(key)
    if not isinstance(schema, dict):
        raise _refused(key, "must be a schema that is an object")
    if not key.undeclared:
        schema = schemas.closed(key, schema)
    spelling = {"item_separator": ",", "key_separator": ":", "whitespace_flexible": not key.compact}
    return json.dumps({**schema, "x-guidance": {**spelling, "lenient": relaxed}})
