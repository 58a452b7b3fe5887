r"""Expands the ``spelling`` of ``json_schema`` nodes in structural tags (see ``tools/formats.py``) into grammars for xgrammar.

Invariants:
- A node without ``spelling`` is left as it is; the rest of the tag is not looked at.
- The expanded grammar takes exactly the values that the schema takes, written with the given separators and no other whitespace.
- Nothing here imports xgrammar: the caller converts schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Convert = Callable[[str, tuple[str, str]], str]
"""A schema as JSON text, and the separators of items and of keys -> xgrammar's EBNF text, without other whitespace."""

_KEY = "spelling"
_NUL = "\\u0000"
_LOOKAHEAD = re.compile(r" \(=\(\[ \\n\\r\\t\]\* \[,\}\\\]:\]\)\)$", re.MULTILINE)
_ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
"""How xgrammar prints a character. It reads as many digits as follow, also those that the next characters are."""
_FIRST_WRITTEN = 0x7F
_PYTHON_LITERALS = {'"true"': '"True"', '"false"': '"False"', '"null"': '"None"'}
_LITERAL = re.compile(r'(?<![\\"])"(?:true|false|null)"(?!")')
_EXPONENT = "[eE] basic_number_4 basic_number_digits{1, -1}"
_FINITE = "[eE] basic_number_4 basic_number_digits{1, 2}"
_ESCAPE_RULE = re.compile(r"^basic_escape ::= .*$", re.MULTILINE)
_SUB_RULE = re.compile(r"^basic_string_sub ::= .*$", re.MULTILINE)
_STRING_RULE = re.compile(r"^basic_string ::= .*$", re.MULTILINE)
_PYTHON_ESCAPE = (
    r'basic_escape ::= (([\"\\bfnrt]) | ("u" [0-9A-Ca-cEeFf] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9])'
    r' | ("u" [Dd] [0-7] [A-Fa-f0-9] [A-Fa-f0-9]))'
)
_PYTHON_STRING = (
    r'basic_string ::= (("\"" basic_string_sub) | ("\x27" single_string_sub))'
    "\n"
    r'single_string_sub ::= (("\x27") | ([^\0-\x1f\x27\\\r\n] single_string_sub) | ("\\" single_escape single_string_sub))'
    "\n"
    r'single_escape ::= ((basic_escape) | ("\x27"))'
)


def spelled(source: str, convert: Convert) -> str:
    """A structural tag's text in which no node has a ``spelling``: expanded where there is one, else as it was.

    Raises whatever `convert` raises.
    """
    if f'"{_KEY}"' not in source:
        return source
    return json.dumps(expand(json.loads(source), convert), ensure_ascii=False)


def expand(tag: Any, convert: Convert) -> Any:
    """A copy of a structural tag (or of a part of one) in which no node has a ``spelling``.

    Raises whatever `convert` raises.
    """
    if isinstance(tag, list):
        return [expand(item, convert) for item in tag]
    if not isinstance(tag, Mapping):
        return tag
    if tag.get("type") != "json_schema":
        return {key: expand(value, convert) for key, value in tag.items()}
    if _KEY not in tag:
        return tag
    if _NUL in json.dumps(tag["json_schema"]):  # rules as text end there
        return {key: value for key, value in tag.items() if key != _KEY}
    return {"type": "grammar", "grammar": spelled_grammar(tag["json_schema"], tag[_KEY], convert)}


def spelled_grammar(schema: object, spelling: Mapping[str, Any], convert: Convert) -> str:
    """The EBNF text of a schema's values, spelled so; ``excludes`` are texts that do not occur in free strings."""
    grammar = convert(json.dumps(schema, ensure_ascii=False), (spelling["item"], spelling["key"]))
    # What stands behind a value is known only to the tag around it.
    grammar = _ESCAPED.sub(_written, _LOOKAHEAD.sub("", grammar))
    # Readers turn 1e999 into an infinity, which is no JSON any more.
    grammar = grammar.replace(_EXPONENT, _FINITE)
    if spelling.get("excludes"):
        rules = "\n".join(_excluding(spelling["excludes"]))
        grammar = _SUB_RULE.sub(lambda _: rules, grammar)
    return _python(grammar) if spelling.get("literals") == "python" else grammar


def _written(found: re.Match[str]) -> str:
    """The character itself, beyond ASCII's printable ones."""
    backslashes, *codes = found.groups()
    code = int(next(filter(None, codes)), 16)
    return backslashes + chr(code) if code >= _FIRST_WRITTEN else found.group()


def _excluding(markers: Sequence[str]) -> list[str]:
    """The rules of the rest of a JSON string in which no marker occurs: one rule for each beginning of a marker that was read."""
    begun = sorted({marker[:n] for marker in markers for n in range(len(marker))}, key=len)
    names = {text: f"basic_string_sub_after_{i}" if i else "basic_string_sub" for i, text in enumerate(begun)}
    letters = sorted({letter for marker in markers for letter in marker} - set('"\\'))
    return [f"{names[text]} ::= {_rest_of_string(text, names, letters, markers)}" for text in begun]


def _rest_of_string(text: str, names: Mapping[str, str], letters: Sequence[str], markers: Sequence[str]) -> str:
    start = names[""]
    onward: dict[str, list[str]] = {}
    closed = []
    for letter in letters:
        read = text + letter
        if any(read.endswith(marker) for marker in markers):
            closed.append(letter)
            continue
        target = next(names[read[i:]] for i in range(len(read) + 1) if read[i:] in names)
        if target != start:
            onward.setdefault(target, []).append(letter)
    special = [*closed, *(letter for group in onward.values() for letter in group)]
    options = [r'"\""', rf"[^\0-\x1f\"\\\r\n{_class(special)}] {start}", rf'"\\" basic_escape {start}']
    options += [f"[{_class(group)}] {target}" for target, group in onward.items()]
    return " | ".join(f"({option})" for option in options)


def _class(letters: Sequence[str]) -> str:
    """As the inside of a character class."""
    return "".join(f"\\u{ord(letter):04x}" for letter in letters)


def _python(grammar: str) -> str:
    """JSON's literals and strings become Python's: names, either quote, and no escape that Python reads otherwise."""
    grammar = _LITERAL.sub(lambda found: _PYTHON_LITERALS[found.group()], grammar)
    grammar = _ESCAPE_RULE.sub(lambda _: _PYTHON_ESCAPE, grammar)
    return _STRING_RULE.sub(lambda _: _PYTHON_STRING, grammar)
