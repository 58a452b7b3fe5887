"""Tokens that nobody has sampled: drafts to be trimmed or made, and the question what a token would do.

Invariants:
- The walk stands afterwards where it stood; an eager one may have taken the grammar that has come.
- Nothing here joins a compile, and no token is kept here that a step would have to wait for.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from vllm_lazy_grammar.core.dispatch_matcher import DispatchMatcher
from vllm_lazy_grammar.core.journal import Phase
from vllm_lazy_grammar.core.rows import ALL, only_allowed
from vllm_lazy_grammar.errors import LazyGrammarError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_lazy_grammar.core.compiles import Compile
    from vllm_lazy_grammar.core.drafts import Drafts
    from vllm_lazy_grammar.core.inside import Inside
    from vllm_lazy_grammar.core.masks import Masks
    from vllm_lazy_grammar.core.walk import Walk

_AWAITING, _PENDING, _INSIDE = Phase.AWAITING, Phase.PENDING, Phase.INSIDE  # an enum's members are slow to look up


class Tentative:
    """Tries tokens at the position of one request. The caller drops the row that it has kept for it.

    Args:
        walk: the position.
        masks: its rows.
        compile_: its grammar on its way.
        inside: what the grammar takes.
    """

    __slots__ = ("_compile", "_masks", "_row_words", "_size", "_stops", "_walk")

    def __init__(self, walk: Walk, masks: Masks, compile_: Compile, inside: Inside) -> None:
        self._walk, self._masks, self._compile = walk, masks, compile_
        self._stops, self._size = inside.stop_ids, inside.vocabulary.size
        self._row_words = inside.vocabulary.row_words

    def kept(self, tokens: Sequence[int]) -> list[int]:
        """The longest prefix that would be accepted; nothing behind a token that ends the turn."""
        walk, kept = self._walk, list[int]()
        offered = len(walk)
        try:
            for token in tokens:
                if walk.at.phase is Phase.TERMINATED or not self._takes(token):
                    break
                kept.append(token)
        finally:
            walk.undo(len(walk) - offered)
        return kept

    def opens(self, token: int) -> bool:
        """Whether this token alone would fire while the grammar still compiles.

        `kept` refuses such a token, since nobody may draft what a step would have to wait for; whoever asks what the request could begin
        with is answered here, from the trigger.
        """
        walk = self._walk
        if self._compile.ready or walk.at.phase is not _AWAITING or not self._accept(token):
            return False
        fired = walk.at.phase is _PENDING
        walk.undo(1)
        return fired

    def drafted(self, drafts: Drafts, limit: int, ahead: Sequence[int]) -> list[int]:
        """At most `limit` tokens that are likely to come behind those `ahead`."""
        walk, start = self._walk, len(self._walk)
        if walk.at.pending:  # what settling those raises belongs to whoever asks for the row
            return []
        if self._compile.ready:
            walk.settle()
        if walk.at.phase is _INSIDE:
            drafts.follow(walk.at)
        found: list[int] = []
        try:
            if all(map(self._takes, ahead)):
                while len(found) < limit and (more := self._next(drafts, limit - len(found))):
                    found += more
        finally:
            walk.undo(len(walk) - start)
        return found

    def _next(self, drafts: Drafts, limit: int) -> list[int]:
        """The next few drafts, which are accepted here; the caller takes them back."""
        at = self._walk.at
        if at.phase is _INSIDE and not at.matcher.is_completed():
            tokens = drafts.tokens(at, limit)
        else:
            token = self._only_token()
            tokens = [] if token is None else [token]
        return list(takewhile(self._takes, tokens))

    def _only_token(self) -> int | None:
        """Outside certain text: the one way on, to the end of the turn or into a trigger that is forced."""
        walk = self._walk
        if walk.at.phase is _AWAITING and not (walk.must_call and self._masks.is_forced(walk.gate)):
            return None
        if walk.at.phase not in (_AWAITING, _INSIDE):
            return None
        row = np.empty(self._row_words, np.int32)
        if not self._masks.fill(walk, row):
            row.fill(ALL)
        return only_allowed(row, self._size)

    def _takes(self, token: int) -> bool:
        """Accept a token, unless it would end the request with an error, or it or its trigger would wait for a compile."""
        walk = self._walk
        if token in self._stops and not walk.ends(token):
            return False
        matcher = walk.at.matcher
        if isinstance(matcher, DispatchMatcher) and matcher.would_wait(token):
            return False
        taken = self._accept(token)
        if taken and walk.at.phase is _PENDING:
            walk.undo(1)
            return False
        return taken

    def _accept(self, token: int) -> bool:
        try:
            return 0 <= token < self._size and self._walk.accept(token)
        except LazyGrammarError:
            return False
