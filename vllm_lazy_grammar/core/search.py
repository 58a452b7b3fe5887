"""Trying patterns on a text that grows: what matches now, and from where a match could still begin.

Invariants:
- The engine is given the text from where a match could still begin, plus what look-behinds see; never the whole text, unless a pattern asks for it.
- Positions that leave this module are bytes; characters exist only inside a window.
- A search that runs too long raises PatternTimeoutError; nothing is noted for it.
"""

from __future__ import annotations

import time
from codecs import utf_8_decode
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm_lazy_grammar.core.patterns import SHORT
from vllm_lazy_grammar.errors import PatternTimeoutError

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.patterns import Engine, Pattern
    from vllm_lazy_grammar.core.transcript import Fact, Transcript

_ASCII_END = 0x80
_TAIL = 3
_MIN_TIMEOUT_S = 1e-4
_BASE = -2
_OPEN = -1


class Match(NamedTuple):
    """A trigger matched.

    Args:
        trigger: its index in the list of triggers.
        at: byte where the replay starts.
        resume: byte behind the first character of the match: the search goes on from here where this match is refused.
    """

    trigger: int
    at: int
    resume: int


@dataclass(frozen=True, slots=True)
class Probe:
    """One pattern of a unit; `trigger` is its index in the list."""

    trigger: int
    pattern: Pattern


@dataclass(frozen=True, slots=True)
class Unit:
    """Patterns that are tried together.

    Args:
        fact: under which its state is noted: from where it is open; of a whole one, that it can never match any more.
        first: the lowest trigger index in it.
        probes: in list order.
        quick: all of them as alternatives; None where there is one.
        whole: tried against the whole text.
        timed: always with a time limit, however short the text.
    """

    fact: Fact
    first: int
    probes: tuple[Probe, ...]
    quick: Engine | None
    whole: bool
    timed: bool

    @property
    def source(self) -> str:
        """The patterns as an error names them."""
        return " | ".join(probe.pattern.source for probe in self.probes)


def unit_fact(index: int) -> Fact:
    """Under which the state of a unit is noted."""
    return (_OPEN, index)


def resume_fact(trigger: int) -> Fact:
    """Under which it is noted from where the search for a trigger goes on after a refusal."""
    return (_BASE, trigger)


def text_end(data: bytearray, end: int) -> int:
    """Where the text of ``data[:end]`` ends: before a last character that is not complete yet."""
    if not end or data[end - 1] < _ASCII_END:
        return end
    tail = bytes(data[max(0, end - _TAIL) : end])
    return end - len(tail) + utf_8_decode(tail, "surrogateescape", False)[1]  # noqa: FBT003 - the codec takes no keyword


class Window:
    """Bytes from `base` on as text; each byte that is not valid UTF-8 is one lone surrogate."""

    __slots__ = ("_ascii", "_data", "base", "end", "text")

    def __init__(self, data: bytearray, base: int) -> None:
        self._data = bytes(data[base:])
        self.text, used = utf_8_decode(self._data, "surrogateescape", False)  # noqa: FBT003 - the codec takes no keyword
        self.base = base
        self.end = base + used
        self._ascii = used == len(self.text)

    def char(self, at: int) -> int:
        """The character that begins at byte `at`."""
        if self._ascii:
            return at - self.base
        return len(utf_8_decode(self._data[: at - self.base], "surrogateescape", True)[0])  # noqa: FBT003 - as above

    def byte(self, char: int) -> int:
        """Where the character begins."""
        if self._ascii:
            return self.base + char
        return self.base + len(self.text[:char].encode("utf-8", "surrogateescape"))


class Look:
    """All searches at one token.

    Args:
        transcript: what was read; facts are noted in it.
        after: the replay starts behind a match, not at its start.
        margin: bytes that look-behinds see at most; None where there is no bound.
        timeout_s: CPU seconds that all searches may take together.
    """

    __slots__ = ("_after", "_before", "_left", "_margin", "_transcript", "_window", "scanned")

    def __init__(self, transcript: Transcript, *, after: bool, margin: int | None, timeout_s: float) -> None:
        self._transcript = transcript
        self._after = after
        self._margin = margin
        self._left = timeout_s
        self._before = text_end(transcript.data, transcript.begin)
        self._window: Window | None = None
        self.scanned = 0

    def unit(self, unit: Unit) -> Match | None:
        """The first match in list order that was not refused before."""
        return self._whole(unit) if unit.whole else self._search(unit)

    def _whole(self, unit: Unit) -> Match | None:
        facts = self._transcript.facts
        if facts.get(unit.fact) is not None:
            return None
        probe = unit.probes[0]
        window = self._view(0)
        found = self._run(probe.pattern.engine, window, 0, unit)
        if found is None:
            if probe.pattern.partial:
                self._transcript.note(unit.fact, 1)
            return None
        match = None if found.partial else self._match(probe, found, window)
        return match if match and not self._refused(match) else None

    def _search(self, unit: Unit) -> Match | None:
        opened = self._transcript.facts.get(unit.fact)
        opened = self._before if opened is None else opened
        window = self._view(opened)
        lowest = window.end
        if unit.quick is not None:
            found = self._run(unit.quick, window, window.char(opened), unit)
            if found is None or found.partial:
                self._leave(unit, window, lowest if found is None else window.byte(found.start()))
                return None
        for probe in unit.probes:
            still = self._probe(unit, probe, window, opened)
            if isinstance(still, Match):
                return still
            lowest = min(lowest, still)
        self._leave(unit, window, lowest)
        return None

    def _leave(self, unit: Unit, window: Window, opened: int) -> None:
        self._transcript.note(unit.fact, None if opened == window.end else opened)

    def _probe(self, unit: Unit, probe: Probe, window: Window, opened: int) -> Match | int:
        """A match, or the byte from where one could still begin."""
        resume = self._transcript.facts.get(resume_fact(probe.trigger)) or 0
        opened = max(opened, resume)
        char = window.char(opened)
        while char <= len(window.text):
            found = self._run(probe.pattern.engine, window, char, unit)
            if found is None:
                return window.end if probe.pattern.partial else opened
            if found.partial:
                return window.byte(found.start())
            match = self._match(probe, found, window)
            if not self._refused(match):
                return match
            self._transcript.note(resume_fact(probe.trigger), match.resume)
            char = found.start() + 1
        return window.end

    def _refused(self, match: Match) -> bool:
        return self._transcript.facts.get((match.trigger, match.at)) is not None

    def _match(self, probe: Probe, found: Engine, window: Window) -> Match:
        start = found.start()
        resume = window.byte(min(start + 1, len(window.text)))
        if self._after:
            return Match(probe.trigger, window.byte(found.end()), resume)
        groups = range(1, len(found.regs))
        group = next((found.start(group) for group in groups if found.end(group) > found.start(group)), None)
        if group is not None:
            return Match(probe.trigger, window.byte(group), resume)
        return Match(probe.trigger, self._lead(probe, window.byte(start)), resume)

    def _lead(self, probe: Probe, start: int) -> int:
        """Where a match began whose lazy lead was taken off the pattern."""
        if not probe.pattern.lead:
            return start
        base = self._transcript.facts.get(resume_fact(probe.trigger)) or 0
        if probe.pattern.lead == "all":
            return base
        return max(base, self._transcript.data.rfind(b"\n", 0, start) + 1)

    def _view(self, opened: int) -> Window:
        base = 0 if self._margin is None else max(0, opened - self._margin)
        if self._window is None or self._window.base != base:
            self._window = Window(self._transcript.data, base)
        return self._window

    def _run(self, engine: Engine, window: Window, char: int, unit: Unit) -> Engine:
        text, partial = window.text, unit.probes[0].pattern.partial
        # At the very end the two ask the same, but there `search` lets a leading `[\s\S]` match nothing.
        attempt = engine.fullmatch if unit.whole or char == len(text) else engine.search
        self.scanned += len(text) - char
        if len(text) - char < SHORT and not unit.timed:
            return attempt(text, char, partial=partial)
        started = time.thread_time()
        try:
            return attempt(text, char, partial=partial, concurrent=True, timeout=max(self._left, _MIN_TIMEOUT_S))
        except TimeoutError as error:
            raise PatternTimeoutError(
                unit.source, "matching it took longer for one token than the setting trigger_timeout_ms allows"
            ) from error
        except (MemoryError, RuntimeError) as error:
            raise PatternTimeoutError(unit.source, f"matching it failed: {type(error).__name__}: {error}") from error
        finally:
            self._left -= time.thread_time() - started
