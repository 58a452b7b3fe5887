"""How an answer sets its blanks in JSON, read from what it has written: for guesses only.

Invariants:
- Nothing here decides what is legal; where the text is no JSON the guess is worth nothing, and harmless.
- Reading in pieces is reading at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

_BLANKS = b" \n\t\r"
_QUOTE, _BACKSLASH, _COLON, _COMMA, _NEWLINE = b'"\\:,\n'
_OPENS, _CLOSES = b"{[", b"}]"


@dataclass(slots=True)
class BlankStyle:
    """Where a text stands in JSON, and the blanks that it used so far.

    Args:
        colon: blanks behind a colon.
        item: blanks behind a comma that ends no line.
        indent: what a line is indented by for each level; None where the text is not broken into lines.
        key: the string that is being written, where it stands as a key may; None elsewhere.
        in_string: whether a string is open.
    """

    colon: bytes = b""
    item: bytes = b""
    indent: bytes | None = None
    key: bytearray | None = None
    in_string: bool = False
    _escaped: bool = False
    _depth: int = 0
    _last: int = 0
    _run: bytes = b""

    def copy(self) -> Self:
        """An independent copy."""
        return replace(self, key=None if self.key is None else self.key[:])

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
            self.in_string, self.key = False, None
            return
        if self.key is not None:
            self.key.append(byte)

    def _solid(self, byte: int) -> None:
        self._learn(byte)
        if byte == _QUOTE:
            self.in_string = True
            self.key = bytearray() if self._last in b"{," else None
        self._depth += (byte in _OPENS) - (byte in _CLOSES)
        self._last, self._run = byte, b""

    def _learn(self, following: int) -> None:
        if self._last == _COLON:
            self.colon = self._run
        elif _NEWLINE in self._run and following not in _CLOSES:
            self.indent = self._run[self._run.rindex(b"\n") + 1 :][: self._width()]
        elif self._last == _COMMA:
            self.item = self._run

    def _width(self) -> int:
        line = len(self._run) - self._run.rindex(b"\n") - 1
        return line // self._depth if self._depth > 0 else line

    def blanks(self, following: int) -> bytes:
        """The blanks that are still missing before a byte outside strings."""
        wanted = self._wanted(following)
        return wanted[len(self._run) :] if wanted.startswith(self._run) else b""

    def _wanted(self, following: int) -> bytes:
        if self._last == _COLON:
            return self.colon
        breaks = self._last == _COMMA or (self._last in _OPENS) != (following in _CLOSES)
        if self.indent is not None and breaks:
            return b"\n" + self.indent * (self._depth - (following in _CLOSES))
        return self.item if self._last == _COMMA else b""
