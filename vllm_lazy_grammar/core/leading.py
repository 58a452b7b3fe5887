"""Leading out: near the end of a request's budget its rows lose the tokens behind which the grammar could no longer be completed.

The text since the grammar began hangs on the position as a chain, newest part first; what was read of it is kept, so a look costs what came since.
How near the end is, is looked at rarely while it is far: each time another eighth of the distance is gone.

Invariants:
- A row is a function of position and budget; nothing is looked at above `FIRST` tokens, and nothing is changed above `far(shortest)` of them.
- Rows only lose bits, and never the last ones: where a budget can not be kept the row is left as it was, and the trace says so.
"""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np

from vllm_lazy_grammar.core.endings import Endings
from vllm_lazy_grammar.core.pieces import Pieces
from vllm_lazy_grammar.core.rows import IdSet, is_allowed, open_row
from vllm_lazy_grammar.core.shortest import TooMuchError

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.byte_trie import ByteTrie
    from vllm_lazy_grammar.core.compiles import Compile
    from vllm_lazy_grammar.core.inside import Inside
    from vllm_lazy_grammar.core.journal import Position, Text
    from vllm_lazy_grammar.core.matcher import CompiledGrammar, Matcher, Row
    from vllm_lazy_grammar.core.network import Network
    from vllm_lazy_grammar.core.trace import Trace
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

FIRST = 1024
"""Tokens left above which nothing is looked at."""


def far(shortest: int) -> int:
    """Tokens left above which rows are those without a budget."""
    return 4 * shortest + 64


@runtime_checkable
class HasNetwork(Protocol):
    """A compiled grammar that can show its states."""

    def network(self) -> Network | None:
        """The grammar as a network; None where it can not be shown."""


class EndingsStore:
    """The endings of all grammars of one engine, each worked out once. Thread-safe.

    Args:
        vocabulary: the model's.
        trie: its pieces.
    """

    def __init__(self, vocabulary: Vocabulary, trie: ByteTrie) -> None:
        self.vocabulary, self._trie = vocabulary, trie
        self._pieces: dict[frozenset[int], Pieces] = {}
        self._found: WeakKeyDictionary[CompiledGrammar, dict[frozenset[int], Endings | None]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def get(self, grammar: CompiledGrammar, never: frozenset[int]) -> Endings | None:
        """The endings of a grammar where the ids in `never` are not text; None where they can not be found out."""
        with self._lock:
            known = self._found.setdefault(grammar, {})
            if never not in known:
                known[never] = self._made(grammar, never)
            return known[never]

    def _made(self, grammar: CompiledGrammar, never: frozenset[int]) -> Endings | None:
        network = grammar.network() if isinstance(grammar, HasNetwork) else None
        if network is None:
            return None
        pieces = self._pieces.get(never)
        if pieces is None:
            pieces = self._pieces[never] = Pieces(self._trie, never)
        try:
            endings = Endings(network, pieces, self.vocabulary.row_words)
            endings.needs(endings.start)
        except TooMuchError:
            return None
        return endings


class LeadingOut:
    """One request's way out.

    Args:
        store: the endings of its grammar.
        inside: what the grammar takes, and the stop ids.
        compile_: the grammar; joined by whoever asks for a row before this does.
        trace: told where the budget can not be kept.
    """

    def __init__(self, store: EndingsStore, inside: Inside, compile_: Compile, trace: Trace) -> None:
        self._store, self._inside, self._compile, self._trace = store, inside, compile_, trace
        self._never = inside.control.ids | inside.stop_ids
        self._kept = 1 if inside.stop_ids else 0
        self._single = {token: IdSet([token], inside.vocabulary.size) for token in inside.control.spelled}
        self._matcher: Matcher | None = None
        self._look_at = FIRST
        self._marks: dict[int, tuple[Text, int]] = {}

    def fork(self) -> Self:
        """The same for another session at the same position."""
        twin = copy.copy(self)
        twin._marks = {}  # noqa: SLF001 -- our own twin
        twin._matcher = None  # noqa: SLF001 -- our own twin
        return twin

    def shortest(self) -> int | None:
        """Tokens of the grammar's shortest text, the stop id included; None where that is not known. Joins the compile."""
        if self._compile.future.exception() is not None:
            return None
        endings = self._endings()
        return None if endings is None else endings.needs(endings.start) + self._kept

    def _endings(self) -> Endings | None:
        return self._store.get(self._compile.result(), self._never)

    def lead(self, at: Position, row: Row, remaining: int, *, masks: bool) -> bool:
        """Clear what would not fit into the budget.

        Args:
            at: inside the grammar.
            row: the position's row.
            remaining: tokens that may still be sampled, the next one included.
            masks: whether the row masks anything.

        Returns:
            Whether the row masks anything now.
        """
        if at.matcher is not self._matcher:
            self._matcher, self._look_at = at.matcher, FIRST
            self._marks.clear()
        if remaining > self._look_at:
            return masks
        try:
            return self._led(at, row, remaining, masks=masks)
        except TooMuchError:
            self._trace.budget_lost = True
            return masks

    def _led(self, at: Position, row: Row, remaining: int, *, masks: bool) -> bool:
        endings = self._endings()
        if endings is None:
            self._trace.budget_lost = True
            return masks
        stand = self._stand(endings, at)
        needs = endings.needs(stand) + self._kept
        if needs > remaining:
            self._unfit(at, needs)
            return masks
        distance = remaining - far(needs)
        if distance > 0:
            self._look_at = remaining - max(1, distance // 8)
            return masks
        self._look_at = max(self._look_at, remaining)
        return self._cleared(endings, stand, row, remaining - 1 - self._kept, masks=masks)

    def _unfit(self, at: Position, needs: int) -> None:
        if at.text is None or self._trace.needed is None:
            self._trace.needed = needs

    def _cleared(self, endings: Endings, stand: int, row: Row, limit: int, *, masks: bool) -> bool:
        if not masks:
            np.copyto(row, open_row(self._store.vocabulary))
        cleared = endings.mask(stand, row, limit)
        for token, single in self._single.items():
            if is_allowed(row, token, self._store.vocabulary.size) and token not in self._inside.stop_ids:
                behind = endings.advance(stand, token, self._inside.vocabulary.piece(token))
                if endings.needs(behind) > limit:
                    single.mask(row)
                    cleared = True
        if not masks and not cleared:
            row.fill(-1)
        return masks or cleared

    def _stand(self, endings: Endings, at: Position) -> int:
        """The stand behind a position's text: read from the last place that was read before."""
        parts: list[int | bytes] = []
        text, depth = at.text, at.steps
        while text is not None and self._mark(text, depth) is None:
            text, part = text
            parts.append(part)
            depth -= 1
        known = None if text is None else self._mark(text, depth)
        stand = endings.start if known is None else known
        for part in reversed(parts):
            stand = endings.advance(
                stand, part, part if isinstance(part, bytes) else self._inside.vocabulary.piece(part)
            )
        if at.text is not None:
            self._marks[at.steps] = (at.text, stand)
        return stand

    def _mark(self, text: Text, depth: int) -> int | None:
        """The stand behind a text that was read before; None where it was not."""
        mark = self._marks.get(depth)
        return mark[1] if mark is not None and mark[0] is text else None
