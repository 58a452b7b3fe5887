"""Takes tokens through a session as the server would, a row before each, and says where it came to.

Invariants:
- A token is refused where its row masks it: that is what the server would never sample.
- What the session raises where the server would end the request is a refusal here.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_lazy_grammar.core.journal import Phase
from vllm_lazy_grammar.core.recorder import Recorder
from vllm_lazy_grammar.core.rows import allowed_ids, is_allowed
from vllm_lazy_grammar.core.story import Told, tell
from vllm_lazy_grammar.errors import LazyGrammarError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_lazy_grammar.cli.workbench import Question, Workbench
    from vllm_lazy_grammar.core.compiles import Compile
    from vllm_lazy_grammar.core.matcher import Row
    from vllm_lazy_grammar.core.session import Session
    from vllm_lazy_grammar.core.story import Line


@dataclass(frozen=True, slots=True)
class Refusal:
    """Where an answer was not taken any further.

    Args:
        place: the token's place in the answer; behind the last one where the answer may not end.
        token: the token; None at the end.
        why: what the session says.
        allowed: the ids that were allowed there instead.
    """

    place: int
    token: int | None
    why: str
    allowed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of an answer: its story, and where it was refused; None where it was accepted."""

    story: list[Line]
    refusal: Refusal | None
    activations: int


class Follower:
    """Follows one answer.

    Args:
        bench: makes the session.
        question: what is asked for.
        late: the compile is held until a row needs it, as where it takes long.

    Raises:
        RequestError: the question can not be served.
    """

    def __init__(self, bench: Workbench, question: Question, *, late: bool = False) -> None:
        self._bench, self._question = bench, question
        self._held: AbstractContextManager[object] = bench.worker.held() if late else nullcontext()
        self._held.__enter__()
        self._is_held = True
        self._compile: Compile = bench.store.get(question.key)
        try:
            if not late:
                self._compile.result()
            self._session: Session = bench.assembly.session(question, self._compile)
        except LazyGrammarError:
            self._release()
            raise
        self._recorder = Recorder(self._session)

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._held.__exit__(None, None, None)

    def follow(self, tokens: Sequence[int], *, partial: bool = False) -> Verdict:
        """Take the tokens in order, as far as they are allowed.

        Args:
            tokens: the answer.
            partial: the answer need not be complete.
        """
        try:
            refusal = self._refused(tokens) or (None if partial else self._refused_end(len(tokens)))
        finally:
            self._release()
        session = self._session
        fired = sum(event.kind == "fired" for event in session.trace.events)
        return Verdict(self._story(), refusal, fired)

    def _refused(self, tokens: Sequence[int]) -> Refusal | None:
        for place, token in enumerate(tokens):
            try:
                refusal = self._step(place, token)
            except LazyGrammarError as error:
                refusal = Refusal(place, token, str(error), ())
            if refusal is not None:
                self._recorder.refused(token)
                return refusal
        return None

    def _step(self, place: int, token: int) -> Refusal | None:
        session = self._session
        if session.is_terminated():
            return Refusal(place, token, "the turn has ended before it", ())
        row = self._row()
        if not is_allowed(row, token, session.size) or not session.accept(token):
            return Refusal(place, token, self._why(token), self._allowed(row))
        self._recorder.took(token)
        return None

    def _row(self) -> Row:
        if self._session.phase is Phase.PENDING:
            self._release()
        session = self._session
        row = np.empty(self._bench.vocabulary.row_words, np.int32)
        joined, begin = session.trace.joined_seconds, time.perf_counter()
        session.fill(row)
        self._recorder.filled(row, time.perf_counter() - begin, session.trace.joined_seconds - joined)
        return row

    def _allowed(self, row: Row) -> tuple[int, ...]:
        return tuple(map(int, allowed_ids(row, self._session.size)))

    def _why(self, token: int) -> str:
        session = self._session
        if token not in self._bench.vocabulary:
            return "the model has no such token"
        if token in self._question.stop_ids:
            return "the turn may not end here" + (", a trigger has to fire first" if session.must_call else "")
        if session.phase is Phase.AWAITING:
            return "a trigger would fire on it, and the grammar refuses what follows (grammar_on_reject: forbid)"
        return "the grammar does not allow it here"

    def _refused_end(self, place: int) -> Refusal | None:
        session = self._session
        try:
            row = self._row()
            if session.is_terminated() or session.stop_legal():
                return None
        except LazyGrammarError as error:
            return Refusal(place, None, str(error), ())
        why = "the answer may not end here" + (", a trigger has to fire first" if session.must_call else "")
        return Refusal(place, None, why, self._allowed(row))

    def _story(self) -> list[Line]:
        question, vocabulary = self._question, self._bench.vocabulary
        spec = question.spec
        triggers = None if spec is None else self._bench.assembly.triggers(spec, question.stop_ids)
        told = Told("-", "-", question.key, triggers, vocabulary, self._session.trace)
        return tell(told, self._recorder.recorded(self._compile.seconds))
