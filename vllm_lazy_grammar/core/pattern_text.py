"""Reading a trigger pattern's text, before any engine sees it: its atoms, how deep and large it is, what it depends on.

Invariants:
- Joining the atoms' texts gives the pattern back.
- What is not understood is called odd, never guessed; an odd pattern is searched without any shortcut.
- Reading takes time in proportion to the pattern, and no recursion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import regex

_ATOM = regex.compile(
    r"""
    (?P<comment>\(\?\#[^)]*\))
  | (?P<flags>\(\?(?:[abefimprswxuL-]|V[01])+\))
  | (?P<named>\(\?P=\w+\))
  | (?P<open>\((?:\?(?:P?<\w+>|<[=!]|[:=!>|]|(?:[abefimprswxuL-]|V[01])+:)|\?|\*)?)
  | (?P<close>\))
  | (?P<set>\[\^?\]?+(?:\[:\^?\w+:\]|\\.|[^\]\\])*+\])
  | (?P<escape>\\(?:[pPN]\{[^}]*\}|[gL]<[^>]*>|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[1-9][0-9]*|.))
  | (?P<repeat>(?:[*+?]|\{(?:[0-9]+(?:,[0-9]*)?|,[0-9]+)\})[?+]?)
  | (?P<fuzzy>\{\s*[0-9idse][^}]*\})
  | (?P<bar>\|) | (?P<caret>\^) | (?P<dollar>\$) | (?P<dot>\.)
  | (?P<char>.)
    """,
    regex.VERBOSE | regex.DOTALL,
)
_SURROGATES, _END_OF_UNICODE = range(0xD800, 0xE000), 0x110000
_COUNT = regex.compile(r"[0-9]{1,9}")
_PLAIN_FLAGS = frozenset("aimsu-")
_ODD_ESCAPES = frozenset("XRGKL")
_LITERAL_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_LITERAL_CHARS_NOT = frozenset("{}[]()")
_ANYTHING = frozenset({r"[\s\S]", r"[\S\s]", r"[\d\D]", r"[\D\d]", r"[\w\W]", r"[\W\w]"})
_WIDE = regex.compile(r"\.|\[\^.*|\[.*\\[SDWP].*|\\[SDWP].*", regex.DOTALL)
_END_TESTS = frozenset({"$", r"\Z", r"\z"})
_BEHIND = ("(?<=", "(?<!")
_RECURSION = regex.compile(r"R|[0-9]|&|P>")

BOUNDARIES = {
    r"\b": r"(?:(?<=\w)(?!\w)|(?<!\w)(?=\w))",
    r"\B": r"(?:(?<=\w)(?=\w)|(?<!\w)(?!\w))",
    r"\m": r"(?:(?<!\w)(?=\w))",
    r"\M": r"(?:(?<=\w)(?!\w))",
}
"""Word boundaries as look-arounds: partial matching is told when those would need text that is not there yet."""


class Atom(NamedTuple):
    """One piece of a pattern: what sort, and its text."""

    kind: str
    text: str


def atoms_of(source: str) -> tuple[Atom, ...]:
    """The pattern cut into atoms."""
    return tuple(Atom(found.lastgroup or "", found.group()) for found in _ATOM.finditer(source))


@dataclass(slots=True)
class Shape:
    """What a pattern's text says about it.

    Attributes:
        depth: the deepest nesting of groups.
        size: atoms once counted repetitions are written out; what compiling it costs.
        repeats: quantifiers.
        choices: alternatives beyond the first, in all groups.
        looped: a whole group or a back reference repeats, so matching may run away.
        odd: something is in it that is not understood here.
        flagged: flags that hold for the whole pattern.
        references: it refers back to its groups, by number or name.
        wide: it repeats something that matches nearly everything, so it may stay open for long.
        bars: alternatives outside all groups.
        negative: a negative look-around.
        lazy: a lazy quantifier.
        looks_behind: a look-behind, or a word boundary, which is one.
        inner_end: tests for the end of the text, elsewhere than in the last atom.
        behind: characters that its look-behinds see at most; None where there is no bound.
        refused: why no request may use it; empty where it may.
    """

    atoms: tuple[Atom, ...]
    depth: int = 0
    size: int = 0
    repeats: int = 0
    choices: int = 0
    looped: bool = False
    odd: bool = False
    flagged: bool = False
    references: bool = False
    wide: bool = False
    bars: bool = False
    negative: bool = False
    lazy: bool = False
    looks_behind: bool = False
    inner_end: bool = False
    behind: int | None = 0
    refused: str = ""


@dataclass(slots=True)
class _Level:
    """An open group: whether a look-behind is around it, the size of what was read, and of the last item in it."""

    behind: bool
    size: int = 0
    last: int = 0


@dataclass(slots=True)
class _Reader:
    """Walks the atoms once."""

    shape: Shape
    levels: list[_Level] = field(default_factory=lambda: [_Level(behind=False)])

    def read(self) -> Shape:
        """The shape, complete."""
        before = Atom("", "")
        for index, atom in enumerate(self.shape.atoms):
            if atom.kind == "comment":
                continue
            if atom.kind in ("open", "close"):
                self._nest(atom, index)
            else:
                self._item(atom, before, index)
            before = atom
        self.shape.size = sum(level.size + level.last for level in self.levels)
        return self.shape

    def _nest(self, atom: Atom, index: int) -> None:
        if atom.kind == "open":
            self._open(atom.text)
            if atom.text == "(?" and _RECURSION.match(
                "".join(after.text for after in self.shape.atoms[index + 1 :][:2])
            ):
                self.shape.refused = "patterns that call themselves are not supported"
        elif len(self.levels) > 1:
            inner = self.levels.pop()
            self._add(max(inner.size + inner.last, 1))

    def _add(self, size: int) -> None:
        level = self.levels[-1]
        level.size, level.last = level.size + level.last, size
        if level.behind and self.shape.behind is not None:
            self.shape.behind += 1

    def _open(self, text: str) -> None:
        self.shape.negative |= text in ("(?!", "(?<!")
        self.shape.looks_behind |= text in _BEHIND
        self.shape.odd |= text in ("(?", "(*")
        if text.endswith(":") and len(text) > len("(?:"):
            self._flags(text[2:-1])
        self.levels.append(_Level(behind=text in _BEHIND or self.levels[-1].behind))
        self.shape.depth = max(self.shape.depth, len(self.levels) - 1)

    def _flags(self, flags: str) -> None:
        self.shape.odd |= not _PLAIN_FLAGS.issuperset(flags)
        if "r" in flags or "V1" in flags:
            self.shape.refused = "searching backwards and the set syntax of V1 are not supported"

    def _item(self, atom: Atom, before: Atom, index: int) -> None:
        if atom.kind in ("repeat", "fuzzy"):
            self._repeat(atom, before)
        elif atom.kind == "flags":
            self.shape.flagged = True
            self._flags(atom.text[2:-1])
        else:
            self._single(atom)
            self.shape.choices += atom.kind == "bar"
            self.shape.bars |= atom.kind == "bar" and len(self.levels) == 1
            self.shape.inner_end |= atom.text in _END_TESTS and index < len(self.shape.atoms) - 1
            self._add(1)

    def _single(self, atom: Atom) -> None:
        refers = atom.kind == "named" or (atom.kind == "escape" and atom.text[1] in "123456789g")
        self.shape.references |= refers
        self.shape.looks_behind |= atom.text in BOUNDARIES
        self.shape.odd |= atom.kind == "escape" and atom.text[1] in _ODD_ESCAPES
        if refers and self.levels[-1].behind:
            self.shape.behind = None

    def _repeat(self, atom: Atom, before: Atom) -> None:
        level, shape = self.levels[-1], self.shape
        shape.repeats += 1
        shape.lazy |= len(atom.text) > 1 and atom.text.endswith("?")
        shape.odd |= atom.kind == "fuzzy"
        optional = atom.text[0] == "?"
        shape.looped |= not optional and before.kind in ("close", "named", "repeat")
        shape.wide |= not optional and _WIDE.fullmatch(before.text) is not None
        if level.behind and not optional:
            shape.behind = None
        level.last *= _largest(atom.text)


def _largest(text: str) -> int:
    return max(1, *map(int, _COUNT.findall(text)), 1)


def shape_of(source: str) -> Shape:
    """Read a pattern."""
    shape = _Reader(Shape(atoms_of(source))).read()
    if shape.odd:
        # Parentheses and counts may hide in what was not understood: these are bounds whatever they belong to.
        shape.depth, shape.behind = max(shape.depth, source.count("(")), None
        counts = [_largest(atom.text) for atom in shape.atoms if atom.kind in ("repeat", "fuzzy")]
        shape.size = max(shape.size, len(shape.atoms) * prod(counts))
    return shape


def leads_anywhere(atoms: tuple[Atom, ...]) -> bool:
    r"""Whether they begin with ``[\s\S]*?`` or the like: any text, as little as possible."""
    return len(atoms) > 1 and atoms[0].text in _ANYTHING and atoms[1].text == "*?"


def leads_in_line(atoms: tuple[Atom, ...]) -> bool:
    """Whether they begin with ``.*?``: any text of one line, as little as possible."""
    return len(atoms) > 1 and atoms[0].kind == "dot" and atoms[1].text == "*?"


def _character(atom: Atom) -> str | None:
    """The one character that an atom stands for; None where it is not just one."""
    if atom.kind == "char":
        return None if atom.text in _LITERAL_CHARS_NOT else atom.text
    if atom.kind != "escape":
        return None
    name = atom.text[1]
    if name in "xuU" and len(atom.text) > len(r"\x"):
        code = int("0x" + atom.text[2:], 0)
        return chr(code) if code < _END_OF_UNICODE and code not in _SURROGATES else None
    if not name.isascii() or not name.isalnum():
        return name
    return _LITERAL_ESCAPES.get(name)


def literal_of(atoms: tuple[Atom, ...]) -> str | None:
    """The text they spell, where they spell just one; None otherwise. One group around all of it is allowed."""
    if len(atoms) > 1 and atoms[-1].kind == "close" and atoms[0].kind == "open" and _is_plain_group(atoms[0].text):
        atoms = atoms[1:-1]
    found = [_character(atom) for atom in atoms]
    return "".join(filter(None, found)) if found and None not in found else None


def _is_plain_group(text: str) -> bool:
    return text in ("(", "(?:") or (text.endswith(">") and text != "(?>")


def split_behind(atoms: tuple[Atom, ...]) -> tuple[tuple[Atom, ...], tuple[Atom, ...]]:
    """The simple look-behinds that they begin with, and the rest; simple: no groups, no repetition, no tests but ``^``."""
    at = 0
    while at < len(atoms) and atoms[at].text in _BEHIND:
        end = next((i for i in range(at, len(atoms)) if atoms[i].kind == "close"), len(atoms) - 1)
        if not all(_is_simple(atom) for atom in atoms[at + 1 : end]):
            break
        at = end + 1
    return atoms[:at], atoms[at:]


def _is_simple(atom: Atom) -> bool:
    if atom.kind == "char":
        return atom.text != "{"
    if atom.kind == "escape":
        return not atom.text[1].isalnum() or atom.text[1] in "sSdDwWntrfvxuU"
    return atom.kind in ("set", "bar", "dot", "caret")
