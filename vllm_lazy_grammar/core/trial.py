"""Would the grammar take it? Replays and texts tried on a matcher of our own, so that the live one is never touched.

Invariants:
- After every call the matcher stands at the grammar's start, and the gate where it was.
- What a replay is refused for in bytes it is refused for as the session feeds it; the other way round it is not so (control tokens, blanks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_lazy_grammar.core.blanks import START
from vllm_lazy_grammar.core.gate import Fired
from vllm_lazy_grammar.core.journal import Phase, Position
from vllm_lazy_grammar.core.matcher import NO_MATCHER
from vllm_lazy_grammar.errors import PatternTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_lazy_grammar.core.gate import Gate
    from vllm_lazy_grammar.core.inside import Inside
    from vllm_lazy_grammar.core.matcher import Matcher
    from vllm_lazy_grammar.core.transcript import Fed

_BEFORE = Position(Phase.AWAITING, NO_MATCHER, steps=0, blanks=START)


class Trial:
    """Tries what one request's grammar takes from its start. The grammar must be compiled before the first call.

    Args:
        inside: how a session feeds the grammar.
    """

    def __init__(self, inside: Inside) -> None:
        self._inside = inside
        self._at: Position | None = None

    def _start(self) -> Position:
        if self._at is None:
            self._at = self._inside.start(_BEFORE)._replace(trail=None)
        return self._at

    def takes(self, replay: Iterable[Fed]) -> bool:
        """Whether the grammar takes all of a replay, as a session would feed it."""
        start = self._start()
        at: Position | None = start
        for fed in replay:
            at = self._inside.take_fed(at, fed) if at is not None else None
        start.matcher.rollback(start.matcher.steps - start.steps)
        return at is not None

    def taken(self, texts: Iterable[bytes]) -> set[bytes]:
        """Those of the texts that the grammar takes in bytes."""
        return taken_texts(self._start().matcher, texts)

    def takes_some(self, gate: Gate, token: int) -> bool:
        """Whether the gate would fire on the token with a replay that the grammar takes; true too where a pattern runs too long to tell."""
        try:
            outcome = gate.observe(token)
        except PatternTimeoutError:
            return True
        try:
            while isinstance(outcome, Fired):
                if self.takes(outcome.replay):
                    return True
                outcome = gate.refuse()
        except PatternTimeoutError:
            return True
        finally:
            gate.undo()
        return False


def taken_texts(matcher: Matcher, texts: Iterable[bytes]) -> set[bytes]:
    """Those of `texts` that the matcher takes from where it stands; it is left there.

    In sorted order texts that begin alike follow each other, so each distinct prefix is offered once, and nothing behind a refused one.
    """
    taken: set[bytes] = set()
    written, refused = b"", None
    for text in sorted(texts):
        if refused is not None and text.startswith(refused):
            continue
        kept = _shared_prefix(written, text)
        if kept < len(written):
            matcher.rollback(len(written) - kept)
        refused = _write(matcher, text, kept)
        written = text if refused is None else refused[:-1]
        if refused is None:
            taken.add(text)
    matcher.rollback(len(written))
    return taken


def _write(matcher: Matcher, text: bytes, kept: int) -> bytes | None:
    """Offer the bytes behind `kept`, each as a step; the prefix that is refused, or None."""
    for end in range(kept, len(text)):
        if not matcher.accept_bytes(text[end : end + 1]):
            return text[: end + 1]
    return None


def _shared_prefix(a: bytes, b: bytes) -> int:
    if b.startswith(a):
        return len(a)
    size = min(len(a), len(b))
    return next((k for k in range(size) if a[k] != b[k]), size)
