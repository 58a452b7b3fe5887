"""What is counted of requests, compiles and caches: each metric by name, what a request adds to them, and a tally of their values.

Knows no metrics library. Whoever publishes is told of each value that changes.

Invariants:
- Labels are bounded: each metric names all values of its one label, and nothing that a request says becomes one.
- A request is counted once, when it is over; nothing is counted row by row but plain numbers of its own trace.
- `Tally.add` waits for nobody, and may be called anywhere: by a finalizer in the middle of another call, too.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from vllm_lazy_grammar.core.triggers import KINDS as TRIGGERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vllm_lazy_grammar.core.trace import Trace

PREFIX = "lazy_grammar_"

EAGER, LAZY = "eager", "lazy"
TOOLS = ("tools_auto", "tools_required", "tools_named", "tools_none", "tools_or_format")
"""Requests whose grammar was made from their tools; the last: free to call a tool or to answer in its ``response_format``."""

REQUEST_KINDS = (EAGER, LAZY, *TOOLS)
COMPILERS = ("xgrammar", "llguidance", "glrmask", "other", "none")
"""What compiled a grammar; ``none``: nothing did, it is not done or failed."""

PLACES = ("step", "part", "endings", "queue")
"""What waited, for what: a step for the grammar of a trigger that fired, a step for the part of a tool's grammar, a step for how a grammar
ends, and an eager request, outside the batch, for its grammar."""

CACHES = ("grammars", "rows", "endings")

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_INFINITE = float("inf")


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric, as it is published; equal to itself alone.

    Args:
        name: as it is asked for.
        type: a counter only grows; a gauge is how it stands; a histogram counts observations by their size.
        unit: what one is.
        help: what it means.
        label: the name of its label; empty where it has none.
        values: all that the label can be.
        buckets: upper bounds of a histogram's buckets, the last is infinite.
    """

    name: str
    type: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()

    def series(self) -> Iterator[Series]:
        """Every series that there can be."""
        for value in self.values:
            if self.type == "histogram":
                yield Series(self, value, SUM)
            for bound in self.buckets or (None,):
                yield Series(self, value, bound)


Part = float | Literal["sum"] | None
SUM: Literal["sum"] = "sum"


class Series(NamedTuple):
    """One number that is published.

    Args:
        metric: whose.
        value: of the label; empty where there is none.
        part: of a histogram, the sum or a bucket's upper bound; else None.
    """

    metric: Metric
    value: str
    part: Part


def _counter(name: str, unit: str, help_text: str, label: str = "", values: tuple[str, ...] = ("",)) -> Metric:
    return Metric(f"{PREFIX}{name}_total", "counter", unit, help_text, label, values)


def _seconds(name: str, help_text: str, label: str, values: tuple[str, ...]) -> Metric:
    return Metric(f"{PREFIX}{name}_seconds", "histogram", "seconds", help_text, label, values, (*_SECONDS, _INFINITE))


REQUESTS = _counter("requests", "requests", "Requests with a grammar that are over, by kind.", "kind", REQUEST_KINDS)
COMPILED_BY = _counter(
    "compiler_requests", "requests", "The same requests by what compiled their grammar.", "compiler", COMPILERS
)
ARMED = _counter("armed", "times", "Gates that began to wait for a trigger: once per lazy request, and at each re-arm.")
FIRED = _counter("fired", "times", "Triggers that fired, by kind.", "trigger", TRIGGERS)
NEVER_FIRED = _counter(
    "never_fired", "requests", "Requests that ended before any trigger of theirs fired, by kind.", "kind", REQUEST_KINDS
)
DISARMED = _counter("disarmed", "times", "Triggers that appeared, but the grammar refused what followed them.")
TAIL_ROWS = _counter("refused_tail_rows", "rows", "Mask rows that left out tokens behind which a trigger's grammar would refuse.")  # fmt: skip
FORCED = _counter("forced_requests", "requests", "Requests that had a mask which left only the way into a trigger.")
LED_OUT = _counter("led_out_requests", "requests", "Requests whose masks were narrowed so that they end within their budget.")  # fmt: skip
BUDGET_MISSED = _counter(
    "budget_missed",
    "requests",
    "Requests that could not be led to their end: too little was left, or the grammar's endings are not known.",
    "reason",
    ("too_short", "unknown"),
)
ENDED = _counter(
    "ended_requests",
    "requests",
    "Requests that the engine ended because of their grammar, by who has to act.",
    "blame",
    ("client", "server"),
)
COMPILE_SECONDS = _seconds("compile", "How long compiles took: of a grammar, or of one part of a tool set's.", "compiler", COMPILERS)  # fmt: skip
WAIT_SECONDS = _seconds("wait", "How long something waited for the worker, by what waited; nothing where nobody did.", "where", PLACES)  # fmt: skip
MASK_SECONDS = _counter("mask_seconds", "seconds", "Time in which the engine's steps made mask rows.")
MASK_ROWS = _counter("mask_rows", "rows", "Mask rows that were made, those behind drafts included.")
CACHE_BYTES = Metric(
    f"{PREFIX}cache_bytes", "gauge", "bytes", "Memory that is kept for later requests, by cache.", "cache", CACHES
)
CACHE_HITS = _counter("cache_hits", "look-ups", "Look-ups that found what they wanted.", "cache", CACHES)
CACHE_MISSES = _counter("cache_misses", "look-ups", "Look-ups that did not.", "cache", CACHES)
DRAFTED = _counter("draft_tokens", "tokens", "Draft tokens that grammars offered.")
ACCEPTED = _counter("accepted_draft_tokens", "tokens", "Those of them that the model wrote.")

METRICS = (
    REQUESTS,
    COMPILED_BY,
    ARMED,
    FIRED,
    NEVER_FIRED,
    DISARMED,
    TAIL_ROWS,
    FORCED,
    LED_OUT,
    BUDGET_MISSED,
    ENDED,
    COMPILE_SECONDS,
    WAIT_SECONDS,
    MASK_SECONDS,
    MASK_ROWS,
    CACHE_BYTES,
    CACHE_HITS,
    CACHE_MISSES,
    DRAFTED,
    ACCEPTED,
)
"""All that there are."""


class Change(NamedTuple):
    """What happened to a metric.

    Args:
        metric: which.
        amount: what a counter grows by, or what was observed, or how a gauge stands.
        value: of the label.
        is_whole: the amount is all that was counted so far, not what came to it.
    """

    metric: Metric
    amount: float
    value: str = ""
    is_whole: bool = False


def compiler_of(origin: str) -> str:
    """The compiler that a compiled grammar's `origin` names; ``none`` for an empty one."""
    name = origin.partition(",")[0] or "none"
    return name if name in COMPILERS else "other"


def of_request(kind: str, origin: str, trace: Trace) -> list[Change]:
    """What a request that is over adds.

    Args:
        kind: one of `REQUEST_KINDS`.
        origin: of its compiled grammar; empty where there is none.
        trace: what it did.
    """
    changes = [Change(REQUESTS, 1, kind), Change(COMPILED_BY, 1, compiler_of(origin))]
    if not trace.eager:
        changes += _of_gate(kind, trace)
    changes += [
        Change(TAIL_ROWS, trace.tail_rows),
        Change(FORCED, bool(trace.forced_rows)),
        Change(LED_OUT, trace.led_out),
        Change(BUDGET_MISSED, trace.needed is not None, "too_short"),
        Change(BUDGET_MISSED, trace.budget_lost, "unknown"),
        Change(MASK_SECONDS, trace.fill_seconds),
        Change(MASK_ROWS, trace.rows),
        Change(DRAFTED, trace.drafts_offered),
        Change(ACCEPTED, trace.drafts_accepted),
        Change(WAIT_SECONDS, trace.joined_seconds, "step"),
        Change(WAIT_SECONDS, trace.endings_seconds, "endings"),
    ]
    return [change for change in changes if change.amount]


def _of_gate(kind: str, trace: Trace) -> list[Change]:
    kinds = Counter(event.kind for event in trace.events)
    fired = [event.trigger.kind for event in trace.events if event.kind == "fired" and event.trigger is not None]
    return [
        Change(ARMED, 1 + kinds["rearmed"]),
        Change(NEVER_FIRED, not kinds["fired"], kind),
        Change(DISARMED, kinds["refused"]),
        *(Change(FIRED, count, trigger) for trigger, count in Counter(fired).items()),
    ]


class Cache(Protocol):
    """What is kept, and how often it was looked for."""

    hits: int
    misses: int

    @property
    def nbytes(self) -> int:
        """Memory held."""


def of_cache(name: str, cache: Cache) -> list[Change]:
    """How one of `CACHES` stands."""
    return [
        Change(CACHE_BYTES, cache.nbytes, name),
        Change(CACHE_HITS, cache.hits, name, is_whole=True),
        Change(CACHE_MISSES, cache.misses, name, is_whole=True),
    ]


class Tally:
    """The values of all metrics of one engine.

    Args:
        changed: called with a series and its value where one changes, by one thread at a time.
    """

    def __init__(self, changed: Callable[[Series, float], object] = lambda *_: None) -> None:
        self._changed = changed
        self.values = {series: 0.0 for metric in METRICS for series in metric.series()}
        self._waiting: deque[Sequence[Change]] = deque()
        self._lock = threading.Lock()

    def add(self, changes: Sequence[Change]) -> None:
        """Take changes in: here, or in the call of `add` that takes some in just now. Raises what `changed` raises."""
        self._waiting.append(changes)
        while self._waiting and self._lock.acquire(blocking=False):  # who holds it looks again after it let go
            try:
                while self._waiting:
                    for change in self._waiting.popleft():
                        self._take(change)
            finally:
                self._lock.release()

    def _take(self, change: Change) -> None:
        metric, amount, value, is_whole = change
        if metric.type == "histogram":
            bound = metric.buckets[bisect_left(metric.buckets, amount)]
            self._grow(Series(metric, value, bound), 1)
            self._grow(Series(metric, value, SUM), amount)
        elif metric.type == "gauge":
            self._put(Series(metric, value, None), amount)
        elif is_whole:
            series = Series(metric, value, None)
            self._put(series, max(amount, self.values[series]))  # an older count may come after a newer one
        else:
            self._grow(Series(metric, value, None), amount)

    def _grow(self, series: Series, amount: float) -> None:
        self._put(series, self.values[series] + amount)

    def _put(self, series: Series, after: float) -> None:
        if after != self.values[series]:
            self.values[series] = after
            self._changed(series, after)
