"""What a session needs of a grammar, whatever engine stands behind it.

Invariants:
- A matcher knows bytes and token ids, never stop ids: whether a turn may end is the session's business, so a matcher never terminates.
- A refused token or refused bytes change nothing.
- One successful `accept` or `accept_bytes` of at least one byte is one step, however many bytes it took; `rollback` counts steps.
- A compiled grammar is immutable and shared; a matcher belongs to one thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from vllm_lazy_grammar.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = NDArray[np.int32]
"""One mask row: ``ceil(vocab_size / 32)`` int32 words; bit ``t % 32`` of word ``t // 32`` is set where token ``t`` is allowed."""

Rows = NDArray[np.int32]
"""Mask rows of positions that follow each other: contiguous, one row each."""

CERTAIN_LIMIT = 256
"""Bytes of certain text that are looked for unless fewer are wanted."""

GrammarKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True)
class GrammarKey:
    """What to compile; equal keys are compiled once.

    Args:
        kind: as vLLM's structured output options, lower case.
        source: the schema as JSON text, the regex, the EBNF or Lark text, the choices as a JSON list, the structural tag as JSON text;
            empty for ``json_object``.
        compact: no whitespace between JSON elements at all (vLLM's ``disable_any_whitespace``).
        undeclared: properties and items that a schema does not declare are allowed, as JSON Schema says; else they are refused.
    """

    kind: GrammarKind
    source: str
    compact: bool = False
    undeclared: bool = False


class Matcher(Protocol):
    """A position in a grammar."""

    @property
    def steps(self) -> int:
        """Steps accepted and not rolled back."""

    def accept(self, token: int) -> bool:
        """Advance by one whole token, by its id. False, and nothing changed, where the grammar refuses it or the id has no bytes."""

    def accept_bytes(self, data: bytes) -> bool:
        """Advance by bytes (they may end inside a UTF-8 character); one step. Empty bytes: true, and no step."""

    def fill(self, row: Row) -> bool:
        """Write the mask of the next token into `row`: every bit is written, bits of ids without bytes, of special tokens and of padding are zero.

        Stop ids are not treated apart (special ones are therefore zero). A special token that the grammar names by its id, not by its text, has
        its bit where it may stand, and `accept` takes it. Returns whether anything is masked.
        """

    def rollback(self, steps: int) -> None:
        """Take back the last `steps` steps. ValueError, and nothing changed, where there are fewer."""

    def fork(self) -> Self:
        """An independent matcher at the same position (its own history may be forgotten: only later steps need to roll back)."""

    def is_completed(self) -> bool:
        """Whether what was accepted so far is a complete sentence of the grammar; more may be legal."""

    def certain(self, limit: int = CERTAIN_LIMIT) -> bytes:
        """The bytes that must come next whatever is sampled, at most `limit` of them; empty where there is a choice, or where it may end."""

    def next_bytes(self, row: Row) -> bytes:
        """Each byte that may come next, ascending; empty too where a token named by id may. `row` is overwritten."""


class LooksAhead(Matcher, Protocol):
    """A matcher that has methods of its own for several tokens, which answer as the functions `taken` and `fill_ahead` below. None has to."""

    def taken(self, tokens: Sequence[int]) -> int:
        """See the function `taken`."""

    def fill_ahead(self, tokens: Sequence[int], rows: Rows) -> list[bool]:
        """See the function `fill_ahead`."""


def taken(matcher: Matcher, tokens: Sequence[int]) -> int:
    """How many of these tokens would be accepted, up to the first that is not; moves nothing in the end, whatever is raised."""
    steps, count = matcher.steps, 0
    try:
        for token in tokens:
            if not matcher.accept(token):
                break
            count += 1
    finally:
        matcher.rollback(matcher.steps - steps)
    return count


def fill_ahead(matcher: Matcher, tokens: Sequence[int], rows: Rows) -> list[bool]:
    """Write the mask of this position and of that behind each token; moves nothing in the end, whatever is raised.

    Args:
        matcher: where to begin.
        tokens: ids, in order.
        rows: one more than there are tokens. What is in those behind a refused token afterwards is undefined.

    Returns:
        For each row, whether the text may be complete there: up to a refused token, and to before a row that masks nothing.
    """
    steps = matcher.steps
    complete: list[bool] = []
    try:
        for i, row in enumerate(rows):
            if not matcher.fill(row):
                break
            complete.append(matcher.is_completed())
            if i == len(tokens) or not matcher.accept(tokens[i]):
                break
    finally:
        matcher.rollback(matcher.steps - steps)
    return complete


def certain_by_steps(matcher: Matcher, row: Row, limit: int) -> bytes:
    """`Matcher.certain`, one byte after the other on a copy; `row` is overwritten."""
    walker, text = matcher.fork(), bytearray()
    while len(text) < limit and not walker.is_completed():
        nexts = walker.next_bytes(row)
        if len(nexts) != 1 or not walker.accept_bytes(nexts):
            break
        text += nexts
    return bytes(text)


class CompiledGrammar(Protocol):
    """A grammar compiled for one vocabulary; immutable, shared between requests and threads."""

    @property
    def key(self) -> GrammarKey:
        """What it was compiled from."""

    origin: str
    """The engine that compiled it, and why that one where another would have come first: a part of a log line."""

    @property
    def nbytes(self) -> int:
        """Memory it holds, in bytes, as far as the engine tells."""

    def matcher(self) -> Matcher:
        """A new matcher at the start."""


class Engine(Protocol):
    """Compiles grammars for one vocabulary. Thread-safe."""

    def compile(self, key: GrammarKey) -> CompiledGrammar:
        """Compile; may take seconds. GrammarError where it can not be."""


class NoMatcher:
    """Stands where a session has no matcher (awaiting, or the grammar still compiles); whoever asks it anything made a mistake."""

    steps = 0

    def _refuse(self, *_: object) -> NoReturn:
        raise InternalError("a grammar that awaits its trigger was asked to move")

    accept = accept_bytes = fill = rollback = is_completed = certain = next_bytes = _refuse

    def fork(self) -> Self:
        """Itself: it has no state."""
        return self


NO_MATCHER: Matcher = NoMatcher()
