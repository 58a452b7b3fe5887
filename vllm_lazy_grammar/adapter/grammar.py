"""vLLM's view of one request's session.

Invariants:
- Nothing a session raises reaches the engine: the first fault ends that request alone, at the next token it is offered. Until then its
  rows mask nothing.
- Why a request is ended is told to its client, by `told`, and to the log, in one line with the request's id, field and value.
- A fault that a draft led to is forgotten when the draft is taken back: nobody has sampled it.
- A draft that is refused is no fault; for a sampled one that is, the log line says which request, field and value, and what else reproduces it.
- Each row that vLLM asks for within a step is one token later than the one before: that is what of the budget is left there.
- When the request is over, or vLLM drops the grammar (aborted), one debug line tells what the gate did and the compile loses a holder.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from vllm_lazy_grammar.adapter.faults import Fault, fault_of, fault_of_refusal
from vllm_lazy_grammar.adapter.log import logger
from vllm_lazy_grammar.adapter.request import NO_BUDGET
from vllm_lazy_grammar.core.leading import FIRST
from vllm_lazy_grammar.core.rows import ALL, copy_row, row_of
from vllm_lazy_grammar.core.vocabulary import WORD_BITS
from vllm_lazy_grammar.errors import LazyGrammarError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray
    from vllm.v1.request import Request

    from vllm_lazy_grammar.adapter.backend import Hold
    from vllm_lazy_grammar.adapter.faults import Fault
    from vllm_lazy_grammar.adapter.request import GrammarRequest
    from vllm_lazy_grammar.core.matcher import Row
    from vllm_lazy_grammar.core.session import Session
    from vllm_lazy_grammar.core.trace import Trace

FAULTS = (
    LazyGrammarError, ArithmeticError, AssertionError, AttributeError, BufferError, LookupError, MemoryError, OSError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip
"""Whatever a session or an engine below it may raise: one request's fault must not end the engine and all others with it."""


class LazyGrammar(StructuredOutputGrammar):
    """One request's grammar.

    Args:
        request: what it asks for.
        session: does the work.
        hold: on the compile; released when this object goes.
        rows_of: the numpy view of vLLM's shared mask tensor.

    Attributes:
        spent: tokens of the answer before the next row. Set before each step; where nobody does there is no budget.
        is_asked_to_begin: `validate_tokens` is asked what the answer could begin with, not about drafts.
    """

    def __init__(self, request: GrammarRequest, session: Session, hold: Hold, rows_of: RowsOf) -> None:
        self.request_id = request.request_id
        self.session = session
        self._rows_of = rows_of
        self.fault: BaseException | None = None
        self._failed_at = self._unused = 0
        self._refusal = ""
        self._drafted: _Drafted | None = None
        self._budget, self._min_tokens = request.budget, request.min_tokens
        self._is_told = False
        self._reasoning: Reasoning | None = None
        self.spent = -NO_BUDGET
        self.is_asked_to_begin = False
        self._finalizer = weakref.finalize(self, _finished, request.request_id, session.trace, hold)
        self._finalizer.atexit = False

    def told(self, request: Request) -> str:
        """Why the request is ended, as its output's `stop_reason` tells it; asked for once, when a sampled token was refused."""
        fault = self._why(request)
        self.session.trace.error = fault.message
        logger.error("Request %s is ended by its grammar: %s%s", self.request_id, fault.message, self._refusal)
        return fault.as_stop_reason()

    def _why(self, request: Request) -> Fault:
        fault = self._fault_of_refusal(request) if self.fault is None else None
        if fault is None:
            assert self.fault is not None  # noqa: S101 -- or the rows could be made
            fault = fault_of(self.fault, request)
        return fault

    def _fault_of_refusal(self, request: Request) -> Fault | None:
        """The fault behind a refused token, by the row that it was sampled under; None where making that row fails."""
        spent = request.num_output_tokens - self._unused
        row, ample = np.empty((2, -(-self.session.size // WORD_BITS)), np.int32)
        self.fill_row(row, spent, keep=False)
        self.fill_row(ample, -NO_BUDGET, keep=False)
        if self.fault is not None:
            return None
        return fault_of_refusal(request, request.output_token_ids[:spent], row, ample, self.session.size)

    def finish(self) -> None:
        """The request is over: tell what the gate did, once, and give the compile back. Otherwise this happens when the object goes."""
        self._finalizer()

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:  # noqa: ARG002 -- vLLM's signature
        """Advance by tokens that were sampled, or are being tried while masks are filled; false ends the request."""
        if self.fault is not None:
            return False
        try:
            for place, token in enumerate(tokens):
                if not self.session.accept(token):
                    self._unused = len(tokens) - place
                    self._refused(token)
                    return False
        except FAULTS as error:
            self._fail(error)
            return False
        return True

    def _refused(self, token: int) -> None:
        at, phase = self.session.num_offered, self.session.phase.value
        self._refusal = f"; token {token} was offered at output token {at} ({phase}) although its mask refuses it"

    def _fail(self, error: BaseException) -> None:
        self.fault, self._failed_at = error, self.session.num_offered

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The longest acceptable prefix of `tokens`; moves nothing."""
        if self.fault is not None:
            return []
        try:
            if self.is_asked_to_begin and len(tokens) == 1 and self.session.opens(tokens[0]):
                return tokens
            return self.session.validate(tokens)
        except FAULTS as error:
            self._fail(error)
            return []

    def draft(self, room: int, ahead: list[int]) -> list[int]:
        """What the grammar knows of the text behind the drafts `ahead`, at most `room` tokens; moves nothing."""
        session = self.session
        if self.fault is not None:
            return []
        try:
            found = session.draft(room, ahead)
        except FAULTS as error:
            session.drafts = None
            logger.error("Request %s goes on without drafts: %s: %s", self.request_id, type(error).__name__, error)
            return []
        self._drafted = _Drafted(ahead, found, len(found)) if found else None
        return found

    def schedules(self, count: int) -> None:
        """So many drafts are in this step: vLLM leaves out those for which a batch has no room, and all where a request was preempted."""
        if self._drafted is not None:
            tried = min(self._drafted.tried, count - len(self._drafted.ahead))
            self._drafted = self._drafted._replace(tried=tried) if tried > 0 else None

    def judge_drafts(self, sampled: list[int]) -> None:
        """Tell what became of the last drafts: `sampled` is what the model wrote in their place."""
        if self._drafted is None or self.session.drafts is None:
            return
        (ahead, ours, tried), self._drafted = self._drafted, None
        reached = sampled[: len(ahead)] == ahead
        self.session.drafts.judge(ours, sampled[len(ahead) :] if reached else None, tried)
        trace = self.session.trace
        trace.drafts_offered, trace.drafts_accepted = self.session.drafts.offered, self.session.drafts.accepted

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted tokens."""
        self.session.rollback(num_tokens)
        if self.fault is not None and self.session.num_offered < self._failed_at:
            self.fault = None

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Write the mask of the next position into row `batch_index`."""
        spent = self.spent
        self.spent = spent + 1
        self.fill_row(self._rows_of(bitmask)[batch_index], spent, keep=True)

    def fill_row(self, row: Row, spent: int, *, keep: bool) -> None:
        """Write the mask of the next position.

        Args:
            row: where to.
            spent: tokens that the answer has so far.
            keep: another call at that position may come.
        """
        if self.fault is None:
            try:
                self.session.fill(row, self._budget - spent, keep=keep)
                if 0 <= spent < self._min_tokens:
                    self.session.go_on(row)
            except FAULTS as error:
                self._fail(error)
            else:
                if self.session.trace.needed is not None and not self._is_told:
                    self._tell_budget(spent)
                return
        row.fill(ALL)

    def fill_window(self, rows: NDArray[np.int32], drafts: Sequence[int], spent: int) -> None:
        """Write the rows of one step, as vLLM's own loop over fill, accept and rollback would.

        Args:
            rows: one more than there are drafts.
            drafts: ids, padded with -1 perhaps.
            spent: tokens that the answer has so far.
        """
        known = drafts[: drafts.index(-1)] if -1 in drafts else drafts
        held = rows[: len(known) + 1]
        taken = 0 if self._fill_at_once(held, known, spent) else self._fill_by_turns(held, known, spent)
        for i in range(len(held), len(rows)):
            rows[i].fill(ALL)
            self._fill_free(rows[i], spent + i)
        if taken:
            self.rollback(taken)

    def _fill_at_once(self, rows: NDArray[np.int32], drafts: Sequence[int], spent: int) -> bool:
        session = self.session
        if self.fault is not None or (session.trace.needed is not None and not self._is_told):
            return False
        try:
            filled = session.fill_window(rows, drafts, self._budget - spent)
            for i in range(max(0, -spent), min(self._min_tokens - spent, len(rows)) if filled else 0):
                session.go_on(rows[i])
        except FAULTS:
            return False  # it comes again by turns, where it is told behind which draft
        if filled and session.trace.needed is not None:
            self._tell_budget(spent)
        return filled

    def _fill_by_turns(self, rows: NDArray[np.int32], drafts: Sequence[int], spent: int) -> int:
        """Returns how many drafts are accepted now, to be taken back. Behind one that is refused the rows are those before it."""
        for i, row in enumerate(rows):
            if self.session.is_terminated():
                row.fill(ALL)
            else:
                self.fill_row(row, spent + i, keep=False)
            if i == len(drafts):
                break
            if (
                self.fault is not None
                or self.session.is_terminated()
                or not self.accept_tokens(self.request_id, [drafts[i]])
            ):
                rows[i + 1 :] = row
                return i
        return len(drafts)

    def _tell_budget(self, spent: int) -> None:
        self._is_told = True
        logger.info(
            "Request %s: the shortest text that its grammar allows needs %d tokens and %d are left (max_tokens, or the model's context): it may be cut.",
            self.request_id,
            self.session.trace.needed,
            self._budget - spent,
        )

    def fill_free(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """A row that vLLM left free, inside reasoning: stop ids are masked while a call is owed; near the end, the reasoning has to end."""
        spent = self.spent
        self.spent = spent + 1
        self._fill_free(self._rows_of(bitmask)[batch_index], spent)

    def _fill_free(self, row: Row, spent: int) -> None:
        if self.fault is not None or self.session.is_terminated():
            return
        try:
            if self._reasoning is not None and self._must_stop_reasoning(self._budget - spent):
                copy_row(row, row_of([self._reasoning.next_of_end(spent)], len(row) * WORD_BITS))
                self.session.trace.led_out = True
            elif self.session.must_call or 0 <= spent < self._min_tokens:
                self.session.mask_stops(row)
        except FAULTS as error:
            self._fail(error)

    def _must_stop_reasoning(self, left: int) -> bool:
        assert self._reasoning is not None  # noqa: S101 -- asked only where it is known
        owed = self.session.owes(left)
        return owed is not None and left <= len(self._reasoning.end) + owed <= self._budget

    @property
    def is_near_end(self) -> bool:
        """Whether so little of the budget is left that it is looked at."""
        return self._budget - self.spent <= FIRST

    def reasons(self, reasoning: Reasoning | None) -> None:
        """How the reasoning of this step goes on; None where it is over, or nobody knows how it ends."""
        self._reasoning = reasoning

    def is_terminated(self) -> bool:
        """Whether a stop id was accepted where the turn may end."""
        return self.session.is_terminated()

    def reset(self) -> None:
        """Back to the start."""
        if self.fault is None:
            self.session.reset()


class _Drafted(NamedTuple):
    """The last drafts: those of the proposer, ours behind them, and how many of ours the model was given."""

    ahead: list[int]
    ours: list[int]
    tried: int


class Reasoning(NamedTuple):
    """Reasoning that goes on in this step.

    Args:
        end: the tokens that end it, at least one.
        text: the answer so far, and the drafts behind it.
    """

    end: Sequence[int]
    text: Sequence[int]

    def next_of_end(self, place: int) -> int:
        """The token of the end that goes on from the first `place` tokens of the text, where its last ones may begin it already."""
        written = list(self.text[:place])
        begun = (n for n in range(len(self.end) - 1, 0, -1) if written[-n:] == list(self.end[:n]))
        return self.end[next(begun, 0)]


class RowsOf:
    """The numpy view of the mask tensor; made once per tensor, since vLLM reuses one for all steps."""

    def __init__(self) -> None:
        self._tensor: torch.Tensor | None = None
        self._view: NDArray[np.int32]

    def __call__(self, tensor: torch.Tensor) -> NDArray[np.int32]:
        """The rows of `tensor`, sharing its memory."""
        if tensor is not self._tensor:
            self._tensor, self._view = tensor, tensor.numpy()
        return self._view


def _finished(request_id: str, trace: Trace, hold: Hold) -> None:
    logger.debug(
        "Request %s finished: %s%s%s; compile %s%s, %s",
        request_id,
        trace.describe(),
        trace.describe_budget(),
        _what_was_drafted(trace),
        "not done" if hold.seconds is None else f"{hold.seconds * 1e3:.1f} ms",
        f" by {hold.origin}" if hold.origin else "",
        _who_waited(trace),
    )
    hold.over(trace)


def _what_was_drafted(trace: Trace) -> str:
    if not trace.drafts_offered:
        return ""
    return f"; drafts of the grammar: {trace.drafts_offered} offered, {trace.drafts_accepted} accepted"


def _who_waited(trace: Trace) -> str:
    if trace.eager:
        return "outside the batch"
    waited = trace.joined_seconds * 1e3
    return f"the engine waited {waited:.1f} ms for it" if waited else "nobody waited for it"
