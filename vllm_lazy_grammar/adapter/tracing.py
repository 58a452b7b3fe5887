"""Requests whose story is written down: which, how vLLM's calls reach the recorder, and where the file goes.

Invariants:
- A request that is not traced has the same grammar object as without this module: tracing costs it one look at None when it begins.
- The engine's thread takes notes; the story is made and written on another.
- A fault of the notes ends the notes, never the request.
"""

from __future__ import annotations

import datetime as dt
import time
import weakref
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_lazy_grammar.adapter.grammar import FAULTS, LazyGrammar
from vllm_lazy_grammar.adapter.log import logger
from vllm_lazy_grammar.core.recorder import Recorder
from vllm_lazy_grammar.core.story import Told, tell, write
from vllm_lazy_grammar.core.trace_files import Bounds, TraceFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_lazy_grammar.adapter.backend import Hold
    from vllm_lazy_grammar.adapter.grammar import RowsOf
    from vllm_lazy_grammar.adapter.request import GrammarRequest
    from vllm_lazy_grammar.core.matcher import Row
    from vllm_lazy_grammar.core.recorder import Recorded
    from vllm_lazy_grammar.core.session import Session
    from vllm_lazy_grammar.core.triggers import Triggers
    from vllm_lazy_grammar.core.vocabulary import Vocabulary
    from vllm_lazy_grammar.settings import Settings

_MB = 1 << 20
_WHOLE = 1 << 32


class Tracing:
    """What one engine writes down.

    Args:
        settings: the operator's; `trace_dir` is set.
        vocabulary: the model's.
    """

    def __init__(self, settings: Settings, vocabulary: Vocabulary) -> None:
        self._settings, self._vocabulary = settings, vocabulary
        bounds = Bounds(settings.trace_files, settings.trace_mb * _MB)
        self.files = TraceFiles(Path(settings.trace_dir), bounds, _failed)

    def wants(self, request: GrammarRequest) -> bool:
        """Whether a request is traced: it asks for it, or is one of the share that the operator wants to see."""
        return request.traced or zlib.crc32(request.request_id.encode()) < self._settings.trace_rate * _WHOLE

    def grammar(
        self, request: GrammarRequest, session: Session, hold: Hold, rows_of: RowsOf, triggers: Triggers | None
    ) -> TracedGrammar:
        """The grammar of a request that is traced."""
        notes = Notes(Recorder(session), session, request, hold, triggers)
        return TracedGrammar(request, session, hold, rows_of, notes, self._write)

    def _write(self, notes: Notes) -> None:
        """Hand the story over to the writing thread."""
        now = dt.datetime.now(dt.UTC)
        told, recorded = notes.told(now, self._vocabulary, prompt=self._settings.trace_prompt), notes.recorded()
        name = now.strftime("%Y%m%dT%H%M%S.%f")
        if not self.files.add(notes.request.request_id, name, lambda: write(tell(told, recorded))):
            dropped = self.files.dropped
            if dropped.bit_count() == 1:  # told at the first, the second, the fourth, ...: they come in bursts
                logger.warning("Too many traces wait to be written: %d were dropped so far", dropped)

    def close(self) -> None:
        """Write what waits."""
        self.files.close()


@dataclass(slots=True)
class Notes:
    """What is noted of one request.

    Args:
        recorder: of its session.
        session: the session.
        request: what was asked.
        hold: on the compile.
        triggers: compiled; None for an eager request.
        unseen: tokens of the answer before those that the session was offered.
    """

    recorder: Recorder
    session: Session
    request: GrammarRequest
    hold: Hold
    triggers: Triggers | None
    unseen: int = 0

    def told(self, now: dt.datetime, vocabulary: Vocabulary, *, prompt: bool) -> Told:
        """What the story needs besides what was recorded."""
        request = self.request
        return Told(
            request.request_id,
            now.isoformat(),
            request.key,
            self.triggers,
            vocabulary,
            self.session.trace,
            tuple(_first(request.output, self.unseen)),
            tuple(request.prompt) if prompt else None,
        )

    def recorded(self) -> Recorded:
        """What was recorded."""
        return self.recorder.recorded(self.hold.seconds)


class TracedGrammar(LazyGrammar):
    """One request's grammar, whose story is told when the request is over, or the grammar goes.

    Args:
        request: what it asks for.
        session: does the work.
        hold: on the compile.
        rows_of: the numpy view of vLLM's shared mask tensor.
        notes: what is noted.
        write: has them written.
    """

    def __init__(  # noqa: PLR0913, PLR0917 -- a grammar's parts, and the notes
        self,
        request: GrammarRequest,
        session: Session,
        hold: Hold,
        rows_of: RowsOf,
        notes: Notes,
        write: Callable[[Notes], None],
    ) -> None:
        super().__init__(request, session, hold, rows_of)
        self._notes: Notes | None = notes
        self._story = weakref.finalize(self, _end, notes, write)
        self._story.atexit = False

    def _note(self, take: Callable[[Notes], object]) -> None:
        if self._notes is None:
            return
        try:
            take(self._notes)
        except FAULTS as error:
            self._notes = None
            self._story.detach()
            logger.error("Request %s goes on without its trace: %s: %s", self.request_id, type(error).__name__, error)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance, and note each token."""
        if not tokens:
            return super().accept_tokens(request_id, tokens)
        for place, token in enumerate(tokens):
            if not super().accept_tokens(request_id, [token]):
                self._unused = len(tokens) - place
                self._note(lambda notes, token=token: notes.recorder.refused(token))  # type: ignore[misc]  # a default
                return False
            self._note(lambda notes, token=token: notes.recorder.took(token))  # type: ignore[misc]  # a default
        return True

    def fill_row(self, row: Row, spent: int, *, keep: bool) -> None:
        """Write the mask, and note what it left and cost."""
        trace, begin = self.session.trace, time.perf_counter()
        joined = trace.joined_seconds
        super().fill_row(row, spent, keep=keep)
        seconds, waited = time.perf_counter() - begin, trace.joined_seconds - joined
        self._note(partial(_filled, row=row, seconds=seconds, waited=waited, spent=spent))

    def _fill_at_once(self, *_: object) -> bool:
        """No: what each row costs and leaves is noted as it is made."""
        return False

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Judge the proposer's drafts, and note those that will be tried."""
        kept = super().validate_tokens(tokens)
        self._note(lambda notes: notes.recorder.drafted(kept, ()))
        return kept

    def draft(self, room: int, ahead: list[int]) -> list[int]:
        """Draft, and note it."""
        found = super().draft(room, ahead)
        self._note(lambda notes: notes.recorder.drafted(ahead, found))
        return found

    def finish(self) -> None:
        """The request is over: its story is told."""
        super().finish()
        self._story()


def _filled(notes: Notes, *, row: Row, seconds: float, waited: float, spent: int) -> None:
    notes.recorder.filled(row, seconds, waited)
    if spent >= 0:  # else it is a row that nobody samples by
        notes.unseen = max(0, spent - notes.session.num_offered)


def _end(notes: Notes, write: Callable[[Notes], None]) -> None:
    try:
        write(notes)
    except FAULTS as error:
        _failed(error)


def _failed(error: BaseException) -> None:
    logger.error("A trace could not be written: %s: %s", type(error).__name__, error)


def _first(tokens: Sequence[int], count: int) -> list[int]:
    return [tokens[place] for place in range(min(count, len(tokens)))]
