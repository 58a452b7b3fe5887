"""Which engine for which grammar.

xgrammar comes first: its grammars show their own states, so that endings within a budget can be planned exactly, it has structural tags, and its
rows are cheap in the median. Where it can not express a grammar, or only by dropping something of it, the next engine that can takes it.

Invariants:
- A compiled grammar belongs to one engine, so a request stays with one from its first mask to its last; `origin` says with which, and why.
- An operator's choice of an engine holds for every grammar but structural tags, which xgrammar alone has.
- What no engine can express is a GrammarError that says what each could not; or, relaxed, what was dropped is told by name.
- The front end's check and the engine decide alike: both ask `_first`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.engines import limits, schemas, xgrammar
from vllm_lazy_grammar.errors import GrammarError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_lazy_grammar.core.matcher import CompiledGrammar, Engine, GrammarKey
    from vllm_lazy_grammar.core.network import Network
    from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

AUTO = "auto"
XGRAMMAR, GUIDANCE, GLRMASK = "xgrammar", "llguidance", "glrmask"
ORDER = (XGRAMMAR, GUIDANCE, GLRMASK)
"""The engines, the preferred first."""

_OPEN_ORDER = (GUIDANCE, XGRAMMAR, GLRMASK)
"""The same where undeclared properties are allowed: there xgrammar compiles for seconds, and obeys fewer schemas. Endings are planned all the same,
with xgrammar's states (see `TakesStates`)."""

_OWN_KINDS = {"structural_tag": XGRAMMAR}
"""Kinds that one engine alone has."""
_JSON = ("json", "json_object")
_REASON_LENGTH = 160
_BYTES = Vocabulary([bytes((byte,)) for byte in range(256)], 257)


@dataclass(frozen=True, slots=True)
class Choice:
    """What an operator chose.

    Args:
        engine: ``auto``, or the engine that every grammar goes to.
        relax: what no engine can express is dropped, and told by name, instead of refused.
    """

    engine: str = AUTO
    relax: bool = False

    def require(self) -> None:
        """SettingsError where the engine is not installed."""
        if self.engine not in (AUTO, *_installed()):
            reason = f"is not installed: `pip install 'vllm-lazy-grammar[{self.engine}]'`"
            raise SettingsError("additional_config.lazy_grammar.engine", self.engine, reason)

    def engines(self, key: GrammarKey) -> tuple[str, ...]:
        """The engines that a grammar may go to, the preferred first."""
        if key.kind in _OWN_KINDS:
            return (_OWN_KINDS[key.kind],)
        if self.engine != AUTO:
            return (self.engine,)
        order = _OPEN_ORDER if key.kind == "json" and key.undeclared else ORDER
        return tuple(name for name in order if name in _installed())


@cache
def _installed() -> tuple[str, ...]:
    return tuple(name for name in ORDER if find_spec(name) is not None)


@runtime_checkable
class Lossy(Protocol):
    """A compiled grammar that knows what its engine dropped of the source, by name."""

    dropped: Sequence[str]


class Make(Protocol[T_co]):
    """Makes something of a grammar with one engine."""

    def __call__(self, engine: str, *, relaxed: bool) -> T_co:
        """GrammarError where the engine can not express it; `relaxed`: what of it the engine drops, it may drop."""


def _first(key: GrammarKey, choice: Choice, make: Make[T]) -> tuple[T, str]:
    """What the first engine that can express a grammar makes of it, and what is to be told of that choice.

    GrammarError where none can; the first engine's reason comes first.
    """
    limits.check(key)
    refusals: list[tuple[str, GrammarError]] = []
    for relaxed in (False, True) if choice.relax else (False,):
        for engine in choice.engines(key):
            try:
                if not relaxed:
                    _refuse_dropped(engine, key)
                made = make(engine, relaxed=relaxed)
            except GrammarError as error:
                refusals.append((engine, error))
            else:
                dropped = (made.dropped if isinstance(made, Lossy) else _dropped(engine, key)) if relaxed else ()
                return made, _told(engine, dropped, refusals)
    raise _refused_by_all(key, refusals)


def _told(engine: str, dropped: Sequence[str], refusals: list[tuple[str, GrammarError]]) -> str:
    parts = [engine]
    if dropped:
        parts.append(f"relaxed, without {', '.join(dropped)}")
    if refusals:
        parts.append("since " + "; ".join(f"{name}: {error.reason[:_REASON_LENGTH]}" for name, error in refusals))
    return ", ".join(parts)


def _refused_by_all(key: GrammarKey, refusals: list[tuple[str, GrammarError]]) -> GrammarError:
    reasons = dict.fromkeys(error.reason for _, error in refusals)
    if len(reasons) == 1:
        return refusals[0][1]
    told = "; ".join(
        f"{name}: {error.reason}" if i or name != XGRAMMAR else error.reason for i, (name, error) in enumerate(refusals)
    )
    return GrammarError(limits.field_of(key), key.source, told)


def _dropped(engine: str, key: GrammarKey) -> list[str]:
    """What of a schema this engine drops without a word, by keyword."""
    return schemas.dropped_by_xgrammar(schemas.read(key)) if engine == XGRAMMAR and key.kind == "json" else []


def _refuse_dropped(engine: str, key: GrammarKey) -> None:
    dropped = _dropped(engine, key)
    if dropped:
        raise GrammarError(limits.field_of(key), key.source, f"{engine} can not express {', '.join(dropped)}")


def _guidance(vocabulary: Vocabulary, *, relaxed: bool) -> Engine:
    from vllm_lazy_grammar.engines.guidance import GuidanceEngine  # noqa: PLC0415 -- loaded where it is needed

    return GuidanceEngine(vocabulary, relaxed=relaxed)


def _glrmask(vocabulary: Vocabulary, *, relaxed: bool) -> Engine:
    from vllm_lazy_grammar.engines.glrmask import GlrmaskEngine  # noqa: PLC0415 -- an extra

    return GlrmaskEngine(vocabulary, relaxed=relaxed)


_OTHERS = {GUIDANCE: _guidance, GLRMASK: _glrmask}


@runtime_checkable
class TakesStates(Protocol):
    """A compiled grammar that can not show its own states, and shows those that it is given."""

    states: Callable[[], Network | None]


class PolicyEngine:
    """Compiles each grammar with the engine that the policy chooses; implements `Engine`. Thread-safe.

    An engine other than xgrammar is opened with the first grammar that it takes.

    Args:
        first: xgrammar's engine, opened already.
        choice: what the operator chose.
        tell: called with a line for the log where a grammar does not go to the engine that comes first.
    """

    def __init__(self, first: XgrammarEngine, choice: Choice, tell: Callable[[str], None]) -> None:
        choice.require()
        self.vocabulary = first.vocabulary
        self._choice, self._first_engine, self._tell = choice, first, tell
        self._lock = threading.Lock()
        self._others: dict[tuple[str, bool], Engine] = {}

    def compile(self, key: GrammarKey) -> CompiledGrammar:
        """Compile; may take seconds. GrammarError where no engine that may take it can express it."""
        grammar, told = _first(key, self._choice, partial(self._compiled, key))
        if told != grammar.origin:
            self._tell(f"A grammar ({limits.field_of(key)}) goes to {told}")
        grammar.origin = told
        if key.kind in _JSON and isinstance(grammar, TakesStates):
            grammar.states = partial(xgrammar.states, key)
        return grammar

    def _compiled(self, key: GrammarKey, engine: str, *, relaxed: bool) -> CompiledGrammar:
        return self._engine(engine, relaxed=relaxed).compile(key)

    def _engine(self, name: str, *, relaxed: bool) -> Engine:
        if name == XGRAMMAR:
            return self._first_engine
        with self._lock:
            if (name, relaxed) not in self._others:
                self._others[name, relaxed] = _OTHERS[name](self.vocabulary, relaxed=relaxed)
            return self._others[name, relaxed]


@cache
def _byte_engine(name: str, *, relaxed: bool) -> Engine:
    return _OTHERS[name](_BYTES, relaxed=relaxed)


def check(key: GrammarKey, choice: Choice) -> str:
    """What the front end can say of a grammar without the model's vocabulary: the engine that takes it. GrammarError where none can."""

    def checked(engine: str, *, relaxed: bool) -> str:
        if engine == XGRAMMAR:
            xgrammar.check(key)
        else:
            _byte_engine(engine, relaxed=relaxed).compile(key)
        return engine if not relaxed else f"{engine}, relaxed"

    return _first(key, choice, checked)[0]


def can_take(key: GrammarKey, data: bytes, choice: Choice, *, budget_ms: float) -> bool | None:
    """Whether a grammar could ever take `data` from its start; None where finding out would take longer than `budget_ms`. GrammarError as `check`."""

    def taken(engine: str, *, relaxed: bool) -> bool | None:
        if engine == XGRAMMAR:
            return xgrammar.can_take(key, data, budget_ms=budget_ms)
        return _byte_engine(engine, relaxed=relaxed).compile(key).matcher().accept_bytes(data)

    return _first(key, choice, taken)[0]
