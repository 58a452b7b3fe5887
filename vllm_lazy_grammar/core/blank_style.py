"""Where an answer stands in JSON and how it sets its blanks, read from what it has written: for guesses only.

Invariants:
- Nothing here decides what is legal; where the text is no JSON the guess is worth nothing, and harmless.
- Reading in pieces is reading at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

_BLANKS = b" \n\t\r"
_QUOTE, _BACKSLASH, _COLON, _COMMA, _NEWLINE = b'"\\:,\n'
_OBJECT = ord("{")
_OPENS, _CLOSES = b"{[", b"}]"


@dataclass(slots=True)
class BlankStyle:
    """Where a text stands in JSON, and the blanks that it used so far.

    Args:
        colon: blanks behind a colon; None before the first one.
        item: blanks behind a comma that ends no line; None before the first one.
        indent: what a line is indented by for each level; None where the text is not broken into lines.
        key: the string that is being written, where it stands as a key; None elsewhere.
        in_string: whether a string is open.
        path: for each object and list that is open, the key that was written last in it; None in lists and before the first.
    """

    colon: bytes | None = None
    item: bytes | None = None
    indent: bytes | None = None
    key: bytearray | None = None
    in_string: bool = False
    path: list[bytes | None] = field(default_factory=list)
    _escaped: bool = False
    _open: bytes = b""
    _last: int = 0
    _run: bytes = b""

    def copy(self) -> Self:
        """An independent copy."""
        key = None if self.key is None else self.key[:]
        place = self._escaped, self._open, self._last, self._run
        return type(self)(self.colon, self.item, self.indent, key, self.in_string, self.path[:], *place)

    def read(self, data: bytes) -> None:
        """Go on reading."""
        for byte in data:
            if self.in_string:
                self._inside(byte)
            elif byte in _BLANKS:
                self._run += bytes((byte,))
            else:
                self._solid(byte)

    def _inside(self, byte: int) -> None:
        if self._escaped:
            self._escaped = False
        elif byte == _BACKSLASH:
            self._escaped = True
        elif byte == _QUOTE:
            if self.key is not None:
                self.path[-1] = bytes(self.key)
            self.in_string, self.key = False, None
            return
        if self.key is not None:
            self.key.append(byte)

    def _solid(self, byte: int) -> None:
        self._learn(byte)
        if byte == _QUOTE:
            self.in_string = True
            self.key = bytearray() if self._last in b"{," and self._open[-1:] == b"{" else None
        elif byte in _OPENS:
            self._open += bytes((byte,))
            self.path.append(None)
        elif byte in _CLOSES and self._open:
            self._open = self._open[:-1]
            self.path.pop()
        self._last, self._run = byte, b""

    def _learn(self, following: int) -> None:
        if self._last == _COLON:
            self.colon = self._run
        elif _NEWLINE in self._run and following not in _CLOSES:
            line = self._run[self._run.rindex(b"\n") + 1 :]
            self.indent = line[: len(line) // max(1, len(self._open))]
        elif self._last == _COMMA:
            self.item = self._run
        elif self._last in _OPENS and following not in _CLOSES and len(self._open) == 1:
            self.indent = None

    def blanks(self, following: int) -> bytes | None:
        """The blanks that are still missing before a byte outside strings; None where a line was begun otherwise than those before."""
        wanted = self._wanted(following)
        if wanted.startswith(self._run):
            return wanted[len(self._run) :]
        return None if _NEWLINE in self._run else b""

    def _wanted(self, following: int) -> bytes:
        if self._last == _COLON:
            return self._first(self.colon, self.item, None if self.indent is None else b" ")
        breaks = self._last == _COMMA or (self._last in _OPENS) != (following in _CLOSES)
        if self.indent is not None and breaks:
            return b"\n" + self.indent * (len(self._open) - (following in _CLOSES))
        return self._first(self.item, self.colon) if self._last == _COMMA else b""

    @staticmethod
    def _first(*seen: bytes | None) -> bytes:
        """What was seen; whoever sets a blank behind colons sets one behind commas, and the other way round."""
        return next((run for run in seen if run is not None), b"")
