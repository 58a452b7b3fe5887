"""How one request's session is put together from what all requests of one engine share.

Invariants:
- Everything shared is immutable or has its own lock; a session gets references, never copies.
- Whoever asks, the engine or a person at the command line, gets the session from here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from vllm_lazy_grammar.core.awaiting import AwaitingRows
from vllm_lazy_grammar.core.control import ControlTokens, looks_like_marker
from vllm_lazy_grammar.core.gate import Gate
from vllm_lazy_grammar.core.inside import Blanks, Inside
from vllm_lazy_grammar.core.session import Session
from vllm_lazy_grammar.core.triggers import Triggers

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.blanks import BlankBound
    from vllm_lazy_grammar.core.byte_trie import ByteTrie
    from vllm_lazy_grammar.core.compiles import Compile
    from vllm_lazy_grammar.core.drafts import Drafts
    from vllm_lazy_grammar.core.leading import EndingsStore
    from vllm_lazy_grammar.core.matcher import GrammarKey
    from vllm_lazy_grammar.core.rows import RowCache
    from vllm_lazy_grammar.core.triggers import TriggerSpec
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

_BLANK_MODES: dict[str, Any] = {"json": "json", "json_object": "json", "structural_tag": "mixed"}


class Asked(Protocol):
    """What one request asks for."""

    @property
    def key(self) -> GrammarKey:
        """The grammar."""

    @property
    def spec(self) -> TriggerSpec | None:
        """Triggers and options; None for an eager grammar."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends the turn."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of added tokens that are control tokens besides those that are special."""

    @property
    def context(self) -> bytes:
        """The end of the prompt, as far as the gate sees it."""


class Assembly:
    """Makes sessions.

    Args:
        vocabulary: the model's.
        trie: its pieces.
        rows: shared cache of mask rows.
        bound: on whitespace between JSON elements.
        endings: how grammars end; None where budgets are not kept.
        timeout_ms: how long trigger patterns may take for one token.
    """

    def __init__(  # noqa: PLR0913 -- what is shared by all sessions meets here once
        self,
        vocabulary: Vocabulary,
        trie: ByteTrie,
        rows: RowCache,
        bound: BlankBound,
        *,
        endings: EndingsStore | None = None,
        timeout_ms: float = 5.0,
    ) -> None:
        self.vocabulary, self._trie, self._rows, self._bound = vocabulary, trie, rows, bound
        self._endings, self._timeout_ms = endings, timeout_ms
        self._markers = vocabulary.named(t for t in vocabulary.added if looks_like_marker(t))
        self.triggers = lru_cache(256)(self._compile)

    def _compile(self, spec: TriggerSpec, stop_ids: frozenset[int]) -> Triggers:
        """The triggers of a spec, compiled. RequestError where one can not be served."""
        return Triggers.compile(spec, self.vocabulary, stop_ids=stop_ids)

    def session(self, asked: Asked, compile_: Compile, drafts: Drafts | None = None) -> Session:
        """A session at its start. RequestError where a trigger can not be served."""
        key, spec = asked.key, asked.spec
        mode = _BLANK_MODES.get(key.kind)
        blanks = None if mode is None or key.compact else Blanks(self._bound, mode)
        inside = Inside(self.vocabulary, compile_, self._control(asked), blanks, asked.stop_ids, self._rows)
        if spec is None:
            return Session(inside, compile_, endings=self._endings, drafts=drafts)
        triggers = self.triggers(spec, asked.stop_ids)
        gate = Gate(triggers, self.vocabulary, context=asked.context, timeout_ms=self._timeout_ms)
        awaiting = AwaitingRows(self.vocabulary, self._trie, self._rows, triggers, inside, compile_)
        return Session(inside, compile_, spec, gate, awaiting, endings=self._endings, drafts=drafts)

    def _control(self, asked: Asked) -> ControlTokens:
        words = [] if asked.spec is None else [t.source for t in asked.spec.triggers]
        named = self._markers | self.vocabulary.named((*words, *asked.markers))
        return ControlTokens(self.vocabulary, named, "\n".join((asked.key.source, *words)))
