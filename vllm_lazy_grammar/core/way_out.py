"""The shortest legal way from where a session stands to where its turn may end: through a trigger where a call is owed.

Invariants:
- The session that was given is not moved: everything is tried on copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_lazy_grammar.core.completion import GaveUp, NoWay, Way, completion
from vllm_lazy_grammar.core.vocabulary import spelled

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.completion import Outcome
    from vllm_lazy_grammar.core.session import Session
    from vllm_lazy_grammar.core.triggers import Forcible


def way_out(session: Session, max_bytes: int) -> Outcome:
    """The shortest legal way to where the turn may end; empty where it already may."""
    if session.stop_legal():
        return Way((), b"", shortest=True)
    twin = session.fork()
    return _led_in(twin, max_bytes) if twin.must_call else completion(_Stand(twin), twin.vocabulary, max_bytes)


def _led_in(session: Session, max_bytes: int) -> Outcome:
    """The best of the ways through each trigger of an awaiting session."""
    found = [_through(session.fork(), way, max_bytes) for way in session.forcible]
    ways = [way for way in found if isinstance(way, Way)]
    if ways:
        return min(ways, key=lambda way: (len(way.tokens), len(way.text)))
    return next((other for other in found if isinstance(other, GaveUp)), NoWay())


def _through(twin: Session, forcible: Forcible, max_bytes: int) -> Outcome:
    vocabulary = twin.vocabulary
    tokens = spelled(vocabulary, forcible.data) if forcible.token is None else [forcible.token]
    text = b"".join(map(vocabulary.piece, tokens))
    if len(text) > max_bytes or twin.validate(tokens) != tokens or not all(map(twin.accept, tokens)) or twin.must_call:
        return NoWay()
    rest = completion(_Stand(twin), vocabulary, max_bytes - len(text))
    return Way((*tokens, *rest.tokens), text + rest.text, shortest=False) if isinstance(rest, Way) else rest


class _Stand:
    """A session as the search for a way out walks it; it belongs to the search."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.accept, self.fill, self.rollback = session.accept, session.fill, session.rollback

    def is_completed(self) -> bool:
        """Whether the turn may end here."""
        return self._session.stop_legal()

    def fork(self) -> _Stand:
        """An independent one."""
        return _Stand(self._session.fork())
