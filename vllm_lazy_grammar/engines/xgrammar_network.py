"""xgrammar's compiled grammar as a network: read from how it prints the automaton of each rule.

The text grows with the grammar. (What it serializes repeats all edges for each rule, and grows with the square.)

Invariants:
- What is not understood (a kind of edge, an option of a rule, a form of printing, a version) is answered with None, never guessed: every
  character of the text is accounted for.
- Reading is Python in short steps, so that other threads run between.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

import xgrammar as xgr
from xgrammar import testing

from vllm_lazy_grammar.core.network import Call, Named, Network, Repeat, Span, State

if TYPE_CHECKING:
    from collections.abc import Iterator

_VERSIONS = frozenset({"v16", "v18"})
"""Versions of what xgrammar serializes (0.2.8's and 0.2.9's) whose grammars were found to mean what is read here."""

_ROOT = "root"
_DEFINED = re.compile(r"^[^\s\[]+ ::= ", re.MULTILINE)
"""A rule without options; those with options have them in brackets behind the name."""

_RULE = re.compile(r"Rule (\d+): (\S+), FSM: CompactFSM\(num_states=(\d+), start=(\d+), end=\[([\d, ]*)\], edges=\[\n")
_STATE = re.compile(r"(\d+): \[(.*)\]\n")
_CLOSED = "])\n"
_BYTE = r"(\\x[0-9a-f]{2}|\\?.)"
_EDGE = re.compile(rf"(?:'{_BYTE}'|\[{_BYTE}-{_BYTE}\]|(\w+)(?:\(([^()]*)\))?)->(\d+)(?:, |$)", re.DOTALL)
_REPEAT = re.compile(r"rule=(\d+), min=(\d+), max=(-1|\d+)")
_ESCAPED = {"0": 0, "a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "e": 27}
_LITERAL = "\"'?\\"


class _UnknownError(Exception):
    """The text has something that is not understood."""


def network(grammar: xgr.Grammar) -> Network | None:
    """The network of a compiled grammar; None where it has parts that are not understood."""
    if xgr.get_serialization_version() not in _VERSIONS:
        return None
    try:
        return _Reading(testing._print_grammar_fsms(grammar)).network(len(_DEFINED.findall(str(grammar))))  # noqa: SLF001 -- nothing else shows each edge once
    except _UnknownError:
        return None


class _Reading:
    """The states in a text of rules.

    Args:
        text: as xgrammar prints it.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._starts: list[int] = []
        self._root = -1
        self._finals: set[int] = set()
        self._states: list[State] = []
        self._read: set[int] = set()
        self._calls: list[tuple[State, int, int]] = []
        self._repeats: list[tuple[State, int, int, int, int | None]] = []

    def network(self, rules: int) -> Network:
        """The network, if the text has so many rules; _UnknownError where the text is not understood."""
        place = 0
        while place < len(self._text):
            place = self._rule(place)
        if self._root < 0 or len(self._starts) != rules:
            raise _UnknownError
        starts = self._starts
        for state, rule, target in self._calls:
            state.calls.append(Call(_at(starts, rule), target))
        for state, rule, target, lower, upper in self._repeats:
            alone = State(repeat=Repeat(_at(starts, rule), target, lower, upper))
            state.jumps.append(len(self._states))
            self._states.append(alone)
        for number in self._finals:
            self._states[number].final = True
        return Network(self._states, starts[self._root])

    def _rule(self, place: int) -> int:
        head = _RULE.match(self._text, place)
        if head is None or int(head[1]) != len(self._starts):
            raise _UnknownError
        if head[2] == _ROOT:
            self._root = len(self._starts)
        self._states = self._states or [State() for _ in range(int(head[3]))]
        self._starts.append(self._known(head[4]))
        self._finals.update(self._known(number) for number in head[5].split(", ") if number)
        place = head.end()
        while (line := _STATE.match(self._text, place)) is not None:
            self._state(self._known(line[1]), line[2])
            place = line.end()
        if not self._text.startswith(_CLOSED, place):
            raise _UnknownError
        return place + len(_CLOSED)

    def _known(self, number: str) -> int:
        if int(number) >= len(self._states):
            raise _UnknownError
        return int(number)

    def _state(self, number: int, edges: str) -> None:
        if number in self._read:
            raise _UnknownError  # rules have no states in common
        self._read.add(number)
        state = self._states[number]
        for single, low, high, kind, inside, target in _edges(edges):
            behind = self._known(target)
            if single:
                state.spans.append(Span(_byte(single), _byte(single), behind))
            elif low:
                state.spans.append(Span(_byte(low), _byte(high), behind))
            else:
                self._lead(state, kind, inside, behind)

    def _lead(self, state: State, kind: str, inside: str | None, target: int) -> None:
        """Add an edge that is not a byte's."""
        if kind == "Eps" and inside is None:
            state.jumps.append(target)
        elif kind == "Rule" and inside:
            self._calls.append((state, _number(inside), target))
        elif kind == "Repeat" and inside and (numbers := _REPEAT.fullmatch(inside)):
            rule, lower, upper = map(int, numbers.groups())
            self._repeats.append((state, rule, target, lower, None if upper < 0 else upper))
        elif kind == "Token" and inside:
            state.named.append(Named(frozenset(map(_number, inside.split(", "))), target))
        else:
            raise _UnknownError


def _edges(line: str) -> Iterator[tuple[str, ...]]:
    """The parts of each edge of a line."""
    place = 0
    for edge in _EDGE.finditer(line):
        if edge.start() != place:
            raise _UnknownError
        place = edge.end()
        yield edge.groups()
    if place != len(line):
        raise _UnknownError


def _number(text: str) -> int:
    if not text.isdecimal():
        raise _UnknownError
    return int(text)


def _at(starts: list[int], rule: int) -> int:
    if rule >= len(starts):
        raise _UnknownError
    return starts[rule]


@lru_cache(512)
def _byte(text: str) -> int:
    """The byte that is written so."""
    if text.startswith("\\x"):
        return int("0" + text[1:], base=0)
    if len(text) == 1 and text.isascii() and text.isprintable():
        return ord(text)
    if text[-1] in _LITERAL:
        return ord(text[-1])
    if text[-1] in _ESCAPED and len(text) > 1:
        return _ESCAPED[text[-1]]
    raise _UnknownError
