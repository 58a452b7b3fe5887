"""The one importer of glrmask (the extra ``glrmask``): vocabulary, compile, matcher, and its errors as ours.

What it expresses: JSON schemas in one spelling (``", "`` and ``": "``, no other whitespace), regular expressions, choices, Lark. Not compact JSON;
not a schema with `format`, which it treats as a remark; not EBNF and no structural tags.

Invariants:
- It never sees a special token: no text takes one, and none can be named.
- glrmask can not take back, and a refusal ends its state: a token is looked up in the mask before it is given, bytes are tried on a copy.
- Taking back starts from the last state that was kept and gives again what followed: at most `_KEEP_EVERY` steps, or all from the start.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

import glrmask
import numpy as np

from vllm_lazy_grammar.core.matcher import CERTAIN_LIMIT, certain_by_steps
from vllm_lazy_grammar.core.vocabulary import WORD_BITS
from vllm_lazy_grammar.engines import limits, schemas, sources
from vllm_lazy_grammar.engines.single_bytes import SingleBytes
from vllm_lazy_grammar.errors import GrammarError, InternalError, LazyGrammarError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_lazy_grammar.core.matcher import GrammarKey, Row
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

NAME = "glrmask"

_KEEP_EVERY = 256
"""Steps after which a state is kept. A copy costs about 300 us, giving a token again about 1 us."""
_KEPT = 16
_REASON_LENGTH = 300
_PANIC = "PanicException"


class _Ids:
    """The vocabulary as glrmask knows it: ids with bytes that are no special tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        pieces = {t: p for t, p in enumerate(vocabulary.pieces) if p and t not in vocabulary.special_ids}
        self.theirs = glrmask.Vocab.from_id_to_bytes(pieces)
        self.single_bytes = SingleBytes({piece[0]: t for t, piece in pieces.items() if len(piece) == 1})


class GlrmaskMatcher:
    """A position in a grammar compiled by glrmask; implements `Matcher`.

    Args:
        state: glrmask's; its own.
        grammar: what it was compiled from.
        given: what each step so far took: a token, or bytes.
    """

    __slots__ = ("_given", "_grammar", "_kept", "_scratch", "_state")

    def __init__(self, state: Any, grammar: GlrmaskGrammar, given: Sequence[int | bytes] = ()) -> None:
        self._state, self._grammar = state, grammar
        self._given = list(given)
        self._kept: list[tuple[int, Any]] = []
        self._scratch: Row | None = None

    @property
    def steps(self) -> int:
        """Steps accepted and not rolled back."""
        return len(self._given)

    def _mask(self) -> Row:
        if self._scratch is None:
            self._scratch = self._grammar.new_row()
        self._state.fill_mask(self._scratch)
        return self._scratch

    def accept(self, token: int) -> bool:
        """Advance by one whole token; False, and nothing changed, where it is refused."""
        if not 0 <= token < self._grammar.ids.vocabulary.size:
            return False
        if not self._mask()[token // WORD_BITS] >> (token % WORD_BITS) & 1:
            return False
        if self.steps % _KEEP_EVERY == _KEEP_EVERY - 1:
            self._keep(self._state.copy())
        self._give(token)
        self._given.append(token)
        return True

    def _give(self, what: int | bytes) -> None:
        state = self._state
        taken = state.commit_bytes(what) if isinstance(what, bytes) else state.commit_token(what)
        if not taken:
            raise InternalError(f"glrmask refuses {what!r}, which its mask allows")

    def _keep(self, state: Any) -> None:
        self._kept.append((self.steps, state))
        del self._kept[:-_KEPT]

    def accept_bytes(self, data: bytes) -> bool:
        """Advance by bytes, as one step; empty bytes are no step."""
        if not data:
            return True
        tried = self._state.copy()
        if not tried.commit_bytes(data):
            return False
        self._keep(self._state)
        self._state = tried
        self._given.append(bytes(data))
        return True

    def fill(self, row: Row) -> bool:
        """Write the mask of the next token; always True, since an id that is never text is masked."""
        self._state.fill_mask(row)
        return True

    def rollback(self, steps: int) -> None:
        """Take back the last steps; ValueError where there are fewer."""
        if not 0 <= steps <= self.steps:
            raise ValueError(f"can not take back {steps} steps of {self.steps}")
        if not steps:
            return
        del self._given[len(self._given) - steps :]
        while self._kept and self._kept[-1][0] > self.steps:
            self._kept.pop()
        begin = 0
        if self._kept and self._kept[-1][0] == self.steps:
            begin, self._state = self._kept.pop()
        elif self._kept:
            begin, kept = self._kept[-1]
            self._state = kept.copy()
        else:
            self._state = self._grammar.new_state()
        for what in self._given[begin:]:
            self._give(what)

    def fork(self) -> Self:
        """An independent matcher at the same position, history included."""
        return type(self)(self._state.copy(), self._grammar, self._given)

    def is_completed(self) -> bool:
        """Whether what was accepted so far is a complete sentence."""
        return bool(self._state.is_accepting())

    def certain(self, limit: int = CERTAIN_LIMIT) -> bytes:
        """The bytes that must come next, at most `limit` of them."""
        return certain_by_steps(self, self._grammar.new_row(), limit)

    def next_bytes(self, row: Row) -> bytes:
        """Each byte that may come next, ascending. `row` is overwritten."""
        self.fill(row)
        known = self._grammar.ids.single_bytes
        others = bytes(byte for byte in known.others if self._state.copy().commit_bytes(bytes((byte,))))
        return bytes(sorted(known.allowed(row) + others))


class GlrmaskGrammar:
    """A grammar compiled for one vocabulary; implements `CompiledGrammar`. Thread-safe.

    Args:
        key: what it was compiled from.
        constraint: glrmask's.
        ids: the vocabulary as glrmask knows it.
    """

    def __init__(self, key: GrammarKey, constraint: Any, ids: _Ids) -> None:
        self.key, self.ids = key, ids
        self.origin = NAME
        self.dropped = _dropped(key)
        self._constraint = constraint
        self.nbytes = len(constraint.save())

    def matcher(self) -> GlrmaskMatcher:
        """A new matcher at the start."""
        return GlrmaskMatcher(self.new_state(), self)

    def new_state(self) -> Any:
        """Glrmask's state at the start."""
        return self._constraint.start()

    def new_row(self) -> Row:
        """An empty row of this vocabulary's width."""
        return np.zeros(self.ids.vocabulary.row_words, dtype=np.int32)


def _refused(key: GrammarKey, reason: str) -> GrammarError:
    return GrammarError(limits.field_of(key), key.source, " ".join(reason.split())[:_REASON_LENGTH])


class _Translated:
    """What glrmask raises inside is a GrammarError, its panics included (which are no Exception, and have no name to import)."""

    def __init__(self, key: GrammarKey) -> None:
        self._key = key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, LazyGrammarError):
            return
        if isinstance(error, ValueError | RuntimeError | TypeError):
            raise _refused(self._key, str(error)) from error
        if type(error).__name__ == _PANIC:
            raise _refused(self._key, f"glrmask fails on it: {error}") from error


class GlrmaskEngine:
    """Compiles grammars for one vocabulary with glrmask; implements `Engine`. Thread-safe.

    Args:
        vocabulary: as wide as the model's.
        relaxed: `format` of a schema is left out.
    """

    def __init__(self, vocabulary: Vocabulary, *, relaxed: bool = False) -> None:
        self.vocabulary = vocabulary
        self._relaxed = relaxed
        self._ids = _Ids(vocabulary)

    def compile(self, key: GrammarKey) -> GlrmaskGrammar:
        """Compile; may take seconds; other threads run meanwhile. GrammarError where it can not be, or where it allows nothing."""
        limits.check(key)
        with _Translated(key):
            grammar = GlrmaskGrammar(key, _read(key, relaxed=self._relaxed).compile(self._ids.theirs), self._ids)
        start = grammar.matcher()
        if not start.is_completed() and not start.next_bytes(grammar.new_row()):
            raise _refused(key, "allows nothing, not even the empty text")
        return grammar


def _read(key: GrammarKey, *, relaxed: bool) -> glrmask.Grammar:
    """A grammar as glrmask reads it. GrammarError where glrmask can not express it."""
    if key.kind in ("json", "json_object"):
        return glrmask.Grammar.from_json_schema(json.dumps(_schema(key, relaxed=relaxed)))
    if key.kind == "regex":
        return glrmask.Grammar.from_lark(f"start: /{sources.rust_expression(key.source)}/")
    if key.kind == "choice":
        texts = map(sources.literal_expression, sources.choices(key))
        return glrmask.Grammar.from_lark(f"start: /{'|'.join(texts)}/")
    if key.kind == "structural_tag":
        raise _refused(key, "glrmask has no structural tags")
    if not sources.is_lark(key.source):
        raise _refused(key, "glrmask has no EBNF")
    if sources.names_tokens(key):
        raise _refused(key, "glrmask is given no grammar that names tokens by id")
    return glrmask.Grammar.from_lark(key.source)


def _dropped(key: GrammarKey) -> tuple[str, ...]:
    """What of a schema glrmask drops, by name."""
    if key.kind != "json":
        return ()
    return tuple({f"format {part['format']!r}": None for part in schemas.inside(schemas.read(key)) if "format" in part})


def _schema(key: GrammarKey, *, relaxed: bool) -> Any:
    if key.compact:
        raise _refused(key, 'glrmask spells JSON with ", " and ": ", and whitespace is disabled')
    schema = schemas.read(key)
    if not isinstance(schema, dict):
        raise _refused(key, "must be a schema that is an object")
    if not relaxed and _dropped(key):
        raise _refused(key, "glrmask takes `format` for a remark")
    return schema if key.undeclared else schemas.closed(key, schema)
