"""The xgrammar engine: compile, and its errors as ours. Only the modules whose names begin with `xgrammar` import it.

Invariants:
- No matcher terminates, and no text takes a special token (see `xgrammar_vocabulary`).
- Every error of xgrammar becomes a GrammarError that names field and source, in `_translated` and nowhere else.
"""

from __future__ import annotations

import re
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import xgrammar as xgr

from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.readings import most_ways
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.engines import limits, schemas, sources
from vllm_lazy_grammar.engines.spelling import spelled
from vllm_lazy_grammar.engines.xgrammar_matcher import SLOW_NS, XgrammarMatcher
from vllm_lazy_grammar.engines.xgrammar_network import network
from vllm_lazy_grammar.engines.xgrammar_vocabulary import Ids, vocabulary
from vllm_lazy_grammar.errors import GrammarError, LazyGrammarError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vllm_lazy_grammar.core.matcher import Row
    from vllm_lazy_grammar.core.network import Network

_PLACE = re.compile(r"^\s*\[[\d:]+\] \S+:\d+: (?:Check failed: .*? is false: )?", re.DOTALL)
_SPACED_COMMA = re.compile(r'^(basic_(?:array_items|object_properties)\w* ::= \(\(")(?:, )', re.MULTILINE)
_SPELLED_NUL = r"\u0000"
_REASON_LENGTH = 300
_PROBED = 32
_WAYS = 1_000
"""Ways to read one byte, at most. Counted: 74 for ``(a|b)*a(a|b){20}``, 796 for ``[\\s\\S]{0,200}`` twice; 1,221 for ``((a+)+)+b``,
whose bytes take 150 times what those of ``a*`` take, and 7,682 for ``(a{1,129}){1,129}``.
"""
_PATTERNS = 8
"""Patterns inside a schema whose ways are counted: those that nest quantifiers, the first of them."""
_TRIED_BYTES = 1 << 14
_BYTES_PER_MS = 500
"""Characters of source that compile for single bytes in a millisecond: 404 schemas take 7 ms in the median, 21 ms at most up to 10 kB."""
_COUNTED = frozenset({"regex", "grammar"})
"""Kinds whose own text may be read in many ways."""


@contextmanager
def _translated(key: GrammarKey) -> Iterator[None]:
    try:
        yield
    except LazyGrammarError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        reason = " ".join((_PLACE.sub("", str(error)) or str(error)).split())
        raise GrammarError(limits.field_of(key), key.source, reason[:_REASON_LENGTH]) from error


@dataclass(frozen=True, slots=True)
class _Call:
    """How xgrammar reads a source: the names of what parses it and of what compiles it, and what both are given.

    A parsed grammar is not compiled: on its way through xgrammar's cache it would lose what follows a NUL.
    """

    parse: str
    compile: str
    source: str
    options: dict[str, Any] = field(default_factory=dict)

    def parsed(self) -> xgr.Grammar:
        """The grammar, without a vocabulary."""
        return getattr(xgr.Grammar, self.parse)(self.source, **self.options)

    def compiled(self, compiler: xgr.GrammarCompiler) -> xgr.CompiledGrammar:
        """The grammar, for the compiler's vocabulary."""
        return getattr(compiler, self.compile)(self.source, **self.options)


def _call(key: GrammarKey) -> _Call:
    """How a key is read; what xgrammar raises meanwhile is not translated."""
    if key.kind in ("json", "json_object"):
        schema = key.source if key.kind == "json" else '{"type": "object"}'
        strict = {"strict_mode": not key.undeclared}
        return (
            _tight(schema, strict) if key.compact else _Call("from_json_schema", "compile_json_schema", schema, strict)
        )
    if key.kind == "regex":
        return _Call("from_regex", "compile_regex", key.source)
    if key.kind == "structural_tag":
        tag = sources.structural_tag(key)
        tag = schemas.opened_in_tag(tag) if key.undeclared else tag
        return _Call("from_structural_tag", "compile_structural_tag", spelled(tag, _rules))
    if key.kind == "choice":
        return _Call("from_ebnf", "compile_grammar", sources.choice_rules(key))
    if sources.is_lark(key.source):
        return _Call("from_lark", "compile_lark", key.source)
    return _Call("from_ebnf", "compile_grammar", key.source)


def _rules(schema: str, separators: tuple[str, str]) -> str:
    """The rules of a schema's values with these separators and no other whitespace, as text."""
    return str(xgr.Grammar.from_json_schema(schema, any_whitespace=False, separators=separators))


def _tight(schema: str, strict: Mapping[str, bool]) -> _Call:
    """A schema without whitespace. xgrammar puts a blank behind the commas of a value that the schema says nothing about: taken out here.

    Its rules as text end at a NUL, so a schema that spells one keeps that blank.
    """
    options = {"any_whitespace": False, "separators": (",", ":"), **strict}
    call = _Call("from_json_schema", "compile_json_schema", schema, options)
    rules = str(call.parsed())
    if _SPELLED_NUL in schema or not _SPACED_COMMA.search(rules):
        return call
    return _Call("from_ebnf", "compile_grammar", _SPACED_COMMA.sub(r"\1,", rules))


class XgrammarGrammar:
    """A grammar compiled for one vocabulary; implements `CompiledGrammar`.

    Args:
        key: what it was compiled from.
        compiled: xgrammar's.
        ids: the vocabulary as xgrammar knows it.
        named: special tokens that the grammar names by id; None where it can name none.
    """

    def __init__(
        self, key: GrammarKey, compiled: xgr.CompiledGrammar, ids: Ids, named: frozenset[int] | None = None
    ) -> None:
        self.key = key
        self.origin = "xgrammar"
        self.ids = ids
        self.refused = ids.refused - (named or frozenset())
        self.keep = None if named is None else ids.keeps(self.refused)
        self.finite = sources.is_finite(key)
        self.named = named or frozenset()
        self._compiled = compiled

    @property
    def nbytes(self) -> int:
        """Memory it holds, by xgrammar's account."""
        return int(self._compiled.memory_size_bytes)

    def network(self) -> Network | None:
        """Its states, as xgrammar serializes them; None where they can not be read."""
        return network(self._compiled.grammar)

    def matcher(self) -> XgrammarMatcher:
        """A new matcher at the start."""
        return XgrammarMatcher(xgr.GrammarMatcher(self._compiled, override_stop_tokens=[self.ids.stop]), self)

    def new_row(self) -> Row:
        """An empty row of this vocabulary's width."""
        return np.zeros(self.ids.vocabulary.row_words, dtype=np.int32)

    def refuse_as_slow(self, spent: int) -> NoReturn:
        """GrammarError: one step took `spent` nanoseconds."""
        reason = f"is too ambiguous: one step takes {spent // 1_000_000} ms, which would hold up every other request"
        raise GrammarError(limits.field_of(self.key), self.key.source, reason)


class _Compiler:
    """xgrammar's compiler for one way to see the vocabulary."""

    def __init__(self, vocabulary: Vocabulary, *, by_id: bool, cache_limit_bytes: int, max_threads: int) -> None:
        self.ids = Ids(vocabulary, by_id=by_id)
        self._cached = xgr.GrammarCompiler(self.ids.info, max_threads=max_threads, cache_limit_bytes=cache_limit_bytes)
        self._uncached = xgr.GrammarCompiler(self.ids.info, max_threads=max_threads, cache_enabled=False)

    def compile(self, call: _Call) -> xgr.CompiledGrammar:
        """Compile; what its cache of parts can not take (a counted repetition in a schema's `pattern`) without that cache."""
        try:
            return call.compiled(self._cached)
        except RuntimeError:
            return call.compiled(self._uncached)


class XgrammarEngine:
    """Compiles grammars for one vocabulary with xgrammar; implements `Engine`. Thread-safe.

    Args:
        vocabulary: as wide as the model's.
        cache_limit_bytes: what xgrammar may keep of parts that grammars share.
        max_threads: threads that one compile may use.
        timed: give up a grammar whose first steps take this thread too long.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, cache_limit_bytes: int = 512 << 20, max_threads: int = 8, timed: bool = True
    ) -> None:
        self.vocabulary = vocabulary
        self._timed = timed
        self._open = partial(_Compiler, vocabulary, cache_limit_bytes=cache_limit_bytes, max_threads=max_threads)
        self._lock = threading.Lock()
        self._plain = self._open(by_id=False)
        self._by_id: _Compiler | None = None

    @classmethod
    def for_tokenizer(
        cls, tokenizer: Any, vocab_size: int, *, cache_limit_bytes: int = 512 << 20, max_threads: int = 8
    ) -> Self:
        """The engine for a tokenizer as vLLM has it and the model's vocabulary size."""
        return cls(vocabulary(tokenizer, vocab_size), cache_limit_bytes=cache_limit_bytes, max_threads=max_threads)

    def _compiler_by_id(self) -> _Compiler:
        with self._lock:
            if self._by_id is None:
                self._by_id = self._open(by_id=True)
            return self._by_id

    def compile(self, key: GrammarKey) -> XgrammarGrammar:
        """Compile; may take seconds, or minutes for what is far from simple; other threads run meanwhile.

        GrammarError where it can not be, where it allows nothing, or where its first steps already take too long.
        """
        limits.check(key)
        by_id = sources.names_tokens(key)
        compiler = self._compiler_by_id() if by_id else self._plain
        with _translated(key):
            compiled = compiler.compile(_call(key))
            named = sources.named_tokens(str(compiled.grammar)) & self.vocabulary.special_ids if by_id else None
            grammar = XgrammarGrammar(key, compiled, compiler.ids, named)
            _refuse_empty(grammar)
            if self._timed:
                _probe(grammar)
        return grammar


def _looked_at(matcher: XgrammarMatcher, row: Row) -> tuple[bytes, int]:
    """The bytes that may come next, and the nanoseconds of this thread that a row and a copy took."""
    start = time.thread_time_ns()
    nexts = matcher.next_bytes(row)
    matcher.fork()
    return nexts, time.thread_time_ns() - start


def _refuse_empty(grammar: XgrammarGrammar) -> None:
    matcher, row = grammar.matcher(), grammar.new_row()
    if not matcher.is_completed() and not matcher.next_bytes(row) and not row.any():
        raise GrammarError(limits.field_of(grammar.key), grammar.key.source, "allows nothing, not even the empty text")


def _probe(grammar: XgrammarGrammar) -> None:
    """Refuse a grammar whose first steps take this thread too long, on two walks through it: what the front end could not count."""
    for leaning in (min, max):
        matcher, row = grammar.matcher(), grammar.new_row()
        for _ in range(_PROBED):
            nexts, spent = _looked_at(matcher, row)
            if spent > SLOW_NS:  # once may be the process's own doing: a first use, a collection of garbage
                nexts, spent = _looked_at(matcher, row)
            if spent > SLOW_NS:
                grammar.refuse_as_slow(spent)
            if not nexts:
                break
            matcher.accept_bytes(bytes((leaning(nexts),)))


_BYTES = Vocabulary([bytes((byte,)) for byte in range(256)], 257)
"""Each byte, and one id that is never text: compiling for it takes a small part of a real vocabulary's time."""


@lru_cache(1)
def _byte_engine() -> XgrammarEngine:
    return XgrammarEngine(_BYTES, cache_limit_bytes=16 << 20, max_threads=1, timed=False)


def check(key: GrammarKey) -> None:
    """What the front end can say of a grammar without the model's vocabulary. GrammarError where it can not be served.

    A source of more than `_TRIED_BYTES` is only read; a shorter one is compiled for single bytes, and the ways it can be read are counted.
    No clock decides: the verdict is the same on every machine and under any load.
    """
    limits.check(key)
    with _translated(key):
        if len(key.source) > _TRIED_BYTES or sources.names_tokens(key):
            _call(key).parsed()
        elif key.kind == "json" and sources.is_finite(
            key
        ):  # its mistakes are found while it is read, in a fourth of the time
            _call(key).parsed()
            _refuse_ambiguous(key, _patterns(key))
        else:
            grammar = _byte_engine().compile(key)
            _refuse_ambiguous(key, [grammar] if key.kind in _COUNTED else _patterns(key))


def _refuse_ambiguous(key: GrammarKey, grammars: Iterable[XgrammarGrammar]) -> None:
    """GrammarError where a text can be read in too many ways. Of a schema its patterns are counted: JSON itself can be read in one way only."""
    for counted in grammars:
        states = counted.network()
        if states is not None and most_ways(states, _WAYS) > _WAYS:
            reason = f"is too ambiguous: {counted.key.source[:_REASON_LENGTH]!r} lets one byte be read in more than {_WAYS} ways"
            raise GrammarError(limits.field_of(key), key.source, reason)


def _patterns(key: GrammarKey) -> Iterator[XgrammarGrammar]:
    """The patterns of a schema that nest quantifiers, each compiled for itself; one that xgrammar takes in a schema only can not be counted."""
    for expression in islice(limits.nested_quantifiers(key), _PATTERNS):
        with suppress(GrammarError):
            yield _byte_engine().compile(GrammarKey("regex", expression))


def states(key: GrammarKey) -> Network | None:
    """The states of a grammar that another engine compiled, for planning its way out; None where xgrammar can not tell.

    What xgrammar drops of the grammar its states do not know: a way that they show may be closed.
    """
    with suppress(GrammarError):
        return _byte_engine().compile(key).network()
    return None


def can_take(key: GrammarKey, data: bytes, *, budget_ms: float) -> bool | None:
    """Whether a grammar could ever take `data` from its start; None where finding out would take longer than `budget_ms`.

    A compile can not be interrupted, so the source's length decides beforehand. GrammarError where the grammar is none.
    """
    if len(key.source) > budget_ms * _BYTES_PER_MS or sources.names_tokens(key):
        return None
    return _byte_engine().compile(key).matcher().accept_bytes(data)
