"""Awaiting or fired: watches free text for triggers, and says what the grammar must be fed when one matches.

Invariants:
- The gate fires on the first token at which some trigger matches what was read, and on the first such trigger in the list.
- Only `undo`, `refuse` and `rearm` bring a fired gate back; `undo` restores text, search positions and refused starts exactly.
- A call that raises leaves the gate as it was.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from vllm_lazy_grammar.core.search import Look, Match, resume_fact
from vllm_lazy_grammar.core.transcript import Fed, Transcript
from vllm_lazy_grammar.errors import InternalError, PatternTimeoutError

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.triggers import Pieces, Trigger, Triggers


@dataclass(frozen=True, slots=True)
class Awaiting:
    """No trigger matches: the model is free."""


@dataclass(frozen=True, slots=True)
class Fired:
    """A trigger matched.

    Args:
        trigger: which.
        replay: what the grammar must be fed now, in order.
    """

    trigger: Trigger
    replay: tuple[Fed, ...]


Observation = Awaiting | Fired

AWAITING = Awaiting()


@dataclass(slots=True)
class _Epoch:
    """Between two re-arms: what was read, and the match that ended it."""

    transcript: Transcript
    fired: Match | None = None
    shared: bool = False

    def copy(self) -> _Epoch:
        """An independent copy, not shared."""
        return _Epoch(self.transcript.copy(), self.fired)


class Gate:
    """One request's gate.

    Args:
        triggers: what to wait for; shared.
        vocabulary: gives tokens their bytes; shared.
        context: the end of the prompt, as far as a trigger needs it: seen by patterns and ``^``, never replayed.
        timeout_ms: CPU milliseconds that the patterns may take for one token; for the context, once.

    Attributes:
        scanned: characters given to the pattern engine so far; steps back do not lower it.

    Raises:
        PatternTimeoutError: a pattern took too long on the context.
    """

    __slots__ = ("_now", "_past", "_timeout_s", "_triggers", "_vocabulary", "scanned")

    def __init__(
        self, triggers: Triggers, vocabulary: Pieces, *, context: bytes = b"", timeout_ms: float = 5.0
    ) -> None:
        self._triggers = triggers
        self._vocabulary = vocabulary
        self._timeout_s = timeout_ms / 1000
        self.scanned = 0
        self._past: list[_Epoch] = []
        self._now = self._open(context)

    def _open(self, context: bytes) -> _Epoch:
        """Eyes open. What matches within the context alone belongs to the prompt: its start is never tried."""
        state, _ = self._triggers.literals.scan(0, context)
        epoch = self._now = _Epoch(Transcript(context, state))
        look = self._look()
        while context and (match := self._patterns(None, look)) is not None:
            self._rule_out(match)
        return epoch

    @property
    def triggers(self) -> Triggers:
        """What it waits for."""
        return self._triggers

    @property
    def awaiting(self) -> bool:
        """No trigger has fired since the start or the last re-arm."""
        return self._now.fired is None

    @property
    def observed(self) -> int:
        """Tokens observed since the start or the last re-arm, the one that fired included."""
        return len(self._now.transcript)

    @property
    def rearmed(self) -> int:
        """How often it was re-armed."""
        return len(self._past)

    @property
    def buffer(self) -> bytes:
        """The bytes observed, without the context; empty once fired."""
        transcript = self._now.transcript
        return bytes(transcript.data[transcript.context :]) if self.awaiting else b""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Start and end in `buffer` of each token observed; empty once fired."""
        return self._now.transcript.spans() if self.awaiting else ()

    @property
    def length(self) -> int:
        """``len(buffer)``, without copying it; 0 once fired."""
        transcript = self._now.transcript
        return transcript.end - transcript.context if self.awaiting else 0

    @property
    def literal_state(self) -> int:
        """The literal automaton's state behind context and buffer; the root once fired."""
        return self._now.transcript.state if self.awaiting else 0

    def tail(self, size: int) -> tuple[Fed, ...]:
        """The tokens that cover the last `size` bytes of the buffer, the first one cut; empty once fired."""
        transcript = self._now.transcript
        return transcript.fed(max(transcript.context, transcript.end - size)) if self.awaiting else ()

    def before(self, size: int) -> bytes:
        """The last `size` bytes of context and buffer, which is what look-behinds see; empty once fired."""
        transcript = self._now.transcript
        return bytes(transcript.data[max(0, transcript.end - size) :]) if self.awaiting else b""

    def observe(self, token: int) -> Observation:
        """Read one more token.

        Raises:
            InternalError: the gate has fired.
            PatternTimeoutError: a pattern took too long.
        """
        if not self.awaiting:
            raise InternalError(f"a gate that has fired was asked to observe token {token}")
        transcript = self._now.transcript
        transcript.push(token, self._vocabulary.piece(token))
        try:
            return self._settle(self._first())
        except PatternTimeoutError:
            transcript.pop()
            raise

    def refuse(self) -> Observation:
        """The grammar refused the replay: that start is never tried again for that trigger.

        Returns:
            The next match on the same token; or awaiting, with the token in the buffer.

        Raises:
            InternalError: the gate has not fired.
            PatternTimeoutError: a pattern took too long.
        """
        self._rule_out(self._fired("refuse a replay"))
        return self._settle(self._first())

    def undo(self) -> None:
        """Take back the last observed token with all that it caused.

        Raises:
            InternalError: nothing was observed since the start or the last re-arm.
        """
        if not self.observed:
            raise InternalError("there is no observed token to take back")
        self._now.transcript.pop()
        self._now.fired = None

    def rearm(self) -> None:
        """Wait anew with an empty buffer, just behind what the grammar took.

        Raises:
            InternalError: the gate has not fired.
        """
        self._fired("re-arm")
        self._past.append(self._now)
        self._now = self._open(b"")

    def undo_rearm(self) -> None:
        """Take back the last re-arm: fired again, as before it.

        Raises:
            InternalError: there is none, or tokens were observed since.
        """
        if not self._past or self.observed:
            raise InternalError(
                f"can not take back a re-arm: {len(self._past)} of them, {self.observed} tokens observed since"
            )
        epoch = self._past.pop()
        self._now = epoch.copy() if epoch.shared else epoch

    def fork(self) -> Self:
        """An independent gate at the same position, history included; costs in proportion to the buffer: to look ahead, `observe` and `undo` cost less."""
        for epoch in self._past:
            epoch.shared = True
        other = copy(self)
        other._past, other._now = self._past.copy(), self._now.copy()  # noqa: SLF001 - a copy of our own
        return other

    def _fired(self, action: str) -> Match:
        if self._now.fired is None:
            raise InternalError(f"can not {action}: the gate has not fired")
        return self._now.fired

    def _rule_out(self, match: Match) -> None:
        transcript = self._now.transcript
        transcript.note((match.trigger, match.at), 1)
        transcript.note(resume_fact(match.trigger), match.resume)

    def _settle(self, match: Match | None) -> Observation:
        self._now.fired = match
        if match is None:
            return AWAITING
        return Fired(self._triggers.spec.triggers[match.trigger], self._replay(match))

    def _replay(self, match: Match) -> tuple[Fed, ...]:
        transcript = self._now.transcript
        if self._triggers.spec.triggers[match.trigger].kind != "token":
            return transcript.fed(max(match.at, transcript.context))
        if self._triggers.after:
            return ()
        return (Fed(transcript.token, bytes(transcript.data[transcript.begin :]), whole=True),)

    def _first(self) -> Match | None:
        """The first match in list order on the last token that was not refused."""
        if self._triggers.tokens and (match := self._token()) is not None:
            return match
        best = self._literal()
        return self._patterns(best, self._look()) if self._triggers.units else best

    def _token(self) -> Match | None:
        transcript = self._now.transcript
        trigger = self._triggers.tokens.get(transcript.token)
        if trigger is None or transcript.facts.get((trigger, transcript.begin)) is not None:
            return None
        return Match(trigger, transcript.begin, transcript.end)

    def _literal(self) -> Match | None:
        """The first literal in list order that ends in the last token; its leftmost end."""
        transcript, literals = self._now.transcript, self._triggers.literals
        begin = transcript.begin
        transcript.states[-1], ends = literals.scan(transcript.states[-2], transcript.data[begin:])
        if not ends:
            return None
        pairs = ((literal, begin + consumed) for consumed, state in ends for literal in literals.outputs[state])
        found = filter(None, (self._ending(literal, end) for literal, end in pairs))
        return min(found, key=lambda match: match.trigger, default=None)

    def _ending(self, literal: int, end: int) -> Match | None:
        """The match of a literal that ends at byte `end`, where there is one."""
        transcript, triggers = self._now.transcript, self._triggers
        start = end - len(triggers.literals.texts[literal])
        trigger = triggers.literal_triggers[literal]
        at = end if triggers.after else start
        if transcript.facts.get((trigger, at)) is not None:
            return None
        if triggers.spec.triggers[trigger].kind == "word" and start < transcript.context:
            return None
        before = bytes(transcript.data[max(0, start - triggers.lookbehind) : start])
        return Match(trigger, at, end) if triggers.lookbehind_holds(literal, before) else None

    def _look(self) -> Look:
        triggers = self._triggers
        return Look(self._now.transcript, after=triggers.after, margin=triggers.margin, timeout_s=self._timeout_s)

    def _patterns(self, best: Match | None, look: Look) -> Match | None:
        """`best`, or a pattern's match that stands before it in the list."""
        scanned = look.scanned
        for unit in self._triggers.units:
            if best is not None and unit.first > best.trigger:
                continue
            found = look.unit(unit)
            if found is not None and (best is None or found.trigger < best.trigger):
                best = found
        self.scanned += look.scanned - scanned
        return best
