"""A trigger pattern, checked and compiled: how it is tried, and which shortcuts are exact for it.

Invariants:
- A compiled pattern finds what the pattern as written finds: the same start, the same groups.
- Length, depth and written-out size are limited before the engine compiles anything, so compiling takes milliseconds and never recurses far.
- Nothing changes after compilation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import regex

from vllm_lazy_grammar.core.pattern_text import (
    BOUNDARIES,
    Atom,
    Shape,
    leads_anywhere,
    leads_in_line,
    literal_of,
    shape_of,
    split_behind,
)
from vllm_lazy_grammar.errors import RequestError

Engine = Any
"""A compiled pattern of the `regex` package, which has no types."""

Lead = Literal["", "line", "all"]

MAX_SIZE = 10_000
"""Atoms of a pattern once its counted repetitions are written out; the engine takes about 20 ms to compile so many."""

SHORT = 40
"""Characters below which a tame pattern is tried without a time limit: asking for one costs more than the search."""

_EMPTY_TIMEOUT_S = 0.05
_TAME_WAYS = 64_000


class Limits(NamedTuple):
    """What a pattern may be: characters, and groups within groups."""

    length: int = 2000
    depth: int = 64


@dataclass(frozen=True, slots=True)
class LiteralPattern:
    """A pattern that is one text behind simple look-behinds.

    Args:
        text: the literal's bytes.
        behind: the look-behinds compiled, matched at the end of the text before the literal; None where there are none.
        reach: characters before the literal that they look at.
    """

    text: bytes
    behind: Engine | None
    reach: int


@dataclass(frozen=True, slots=True)
class Pattern:
    r"""One compiled pattern.

    Args:
        source: as written.
        engine: compiled; group numbers are those of the source.
        body: what was compiled, as text.
        whole: tried against the whole text.
        anywhere: searched for (after `whole`, where both are set).
        lead: what it began with and was taken off: ``[\s\S]*?`` (all), ``.*?`` (line). Its match then starts where the search began, or with the line.
        partial: the engine's partial matching is exact for it: what can not match from a position now never will.
        reach: characters before a position that it looks at; None where there is no bound.
        tame: a short text can not make it run away.
        mergeable: several of these may be searched for at once, as alternatives.
        literal: what it is where it is only a literal.
    """

    source: str
    engine: Engine
    body: str
    whole: bool
    anywhere: bool
    lead: Lead
    partial: bool
    reach: int | None
    tame: bool
    mergeable: bool
    literal: LiteralPattern | None


class _Form(NamedTuple):
    """How a pattern is tried, and the atoms that are left to compile."""

    atoms: tuple[Atom, ...]
    whole: bool
    anywhere: bool
    lead: Lead


def compile_pattern(source: str, *, full: bool, limits: Limits, field: str, value: object) -> Pattern:
    """Check and compile.

    Args:
        source: the pattern.
        full: it must match the whole text (`pattern_full`).
        limits: what it may be.
        field: the field that an error names.
        value: the value that an error shows.

    Raises:
        RequestError: it is too long, too deep, too large, not supported, does not compile, or matches the empty text.
    """
    if len(source) > limits.length:
        raise RequestError(field, value, f"a pattern may have {limits.length} characters, this one has {len(source)}")
    shape = shape_of(source)
    if reason := _objection(shape, limits):
        raise RequestError(field, value, reason)
    form = _form(shape, full=full)
    body = _body(form, shape)
    engine = _engine(body, field, value)
    _refuse_empty(engine, field, value)
    return _assemble(source, form, body, engine)


def _objection(shape: Shape, limits: Limits) -> str:
    if shape.depth > limits.depth:
        return f"groups may be nested {limits.depth} deep, here they are {shape.depth}"
    if shape.size > MAX_SIZE:
        return f"the pattern is too large: {shape.size} atoms once repetitions are written out, at most {MAX_SIZE}"
    return shape.refused


def _form(shape: Shape, *, full: bool) -> _Form:
    """Take off a lazy lead where that changes nothing but the cost; decide between the whole text and a search."""
    atoms = shape.atoms
    caret = bool(atoms) and atoms[0].kind == "caret"
    closed = bool(atoms) and atoms[-1].kind == "dollar"
    whole = full or (caret and closed)
    if not (shape.odd or shape.flagged or shape.bars):
        inner = atoms[1:] if caret else atoms
        if leads_anywhere(inner):
            return _Form(
                inner[2:] + ((Atom("escape", r"\Z"),) if whole else ()), whole=False, anywhere=True, lead="all"
            )
        if leads_in_line(inner) and not caret and not whole:
            return _Form(inner[2:], whole=False, anywhere=True, lead="line")
    searched = not full and not (whole and not shape.bars and not shape.odd and not shape.flagged)
    return _Form(atoms, whole=whole, anywhere=searched, lead="")


def _body(form: _Form, shape: Shape) -> str:
    texts = [atom.text if shape.odd else BOUNDARIES.get(atom.text, atom.text) for atom in form.atoms]
    if form.atoms and form.atoms[-1].kind == "dollar":
        texts[-1] = r"\Z"
    return "".join(texts)


def _engine(body: str, field: str, value: object) -> Engine:
    try:
        return regex.compile(body, cache_pattern=False)
    except regex.error as error:
        raise RequestError(field, value, f"the pattern does not compile: {error}") from error
    except (RecursionError, OverflowError, ValueError) as error:
        raise RequestError(field, value, f"the pattern does not compile: {type(error).__name__}: {error}") from error


def _refuse_empty(engine: Engine, field: str, value: object) -> None:
    try:
        empty = engine.fullmatch("", timeout=_EMPTY_TIMEOUT_S)
    except TimeoutError as error:
        raise RequestError(field, value, "the pattern runs too long on the empty text") from error
    if empty:
        raise RequestError(field, value, "the pattern matches the empty text, so it would fire at once")


def _is_exact(shape: Shape) -> bool:
    """Whether partial matching misses no position.

    It is not told that more text may come by a negated test for the end, nor (in `regex`) by a lazy repetition before a look-behind.
    """
    return not (shape.odd or (shape.inner_end and shape.negative) or (shape.lazy and shape.looks_behind))


def _is_tame(shape: Shape) -> bool:
    """Whether the ways to match from one position in a short text are few: each repetition has as many as characters, each choice two."""
    if shape.looped or shape.references or shape.odd:
        return False
    ways: int = SHORT**shape.repeats << shape.choices
    return ways <= _TAME_WAYS


def _assemble(source: str, form: _Form, body: str, engine: Engine) -> Pattern:
    shape = shape_of("".join(atom.text for atom in form.atoms))
    exact = _is_exact(shape)
    tame = _is_tame(shape)
    plain = not (shape.flagged or shape.wide or shape.references or form.whole)
    return Pattern(
        source=source,
        engine=engine,
        body=body,
        whole=form.whole,
        anywhere=form.anywhere,
        lead=form.lead,
        partial=exact,
        reach=shape.behind,
        tame=tame,
        mergeable=exact and tame and plain and shape.behind is not None,
        literal=_literal(shape, form),
    )


def _literal(shape: Shape, form: _Form) -> LiteralPattern | None:
    if form.whole or shape.flagged or shape.odd:
        return None
    behinds, rest = split_behind(form.atoms)
    text = literal_of(rest)
    # Behind a lead the match starts earlier than the literal, unless a group says where the replay starts.
    if text is None or (form.lead and not _captures(rest[0])):
        return None
    behind = regex.compile("".join(atom.text for atom in behinds), cache_pattern=False) if behinds else None
    return LiteralPattern(text.encode(), behind, len(behinds))


def _captures(atom: Atom) -> bool:
    return atom.kind == "open" and atom.text != "(?:"
