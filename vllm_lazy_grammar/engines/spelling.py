r"""Expands the ``spelling`` of ``json_schema`` nodes in structural tags (see ``tools/formats.py``) into grammars for xgrammar.

Invariants:
- A node without ``spelling`` is left as it is; the rest of the tag is not looked at.
- The expanded grammar takes exactly the values that the schema takes, written with the given separators and no other whitespace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import xgrammar

_KEY = "spelling"
_LOOKAHEAD = re.compile(r" \(=\(\[ \\n\\r\\t\]\* \[,\}\\\]:\]\)\)$", re.MULTILINE)
_PYTHON_LITERALS = {'"true"': '"True"', '"false"': '"False"', '"null"': '"None"'}
_LITERAL = re.compile(r'(?<![\\"])"(?:true|false|null)"(?!")')
_ESCAPE_RULE = re.compile(r"^basic_escape ::= .*$", re.MULTILINE)
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


def expand(tag: Any) -> Any:
    """A copy of a structural tag (or of a part of one) in which no node has a ``spelling``.

    Raises:
        RuntimeError: xgrammar can not convert a schema (its own error, to be translated by the caller).
    """
    if isinstance(tag, list):
        return [expand(item) for item in tag]
    if not isinstance(tag, Mapping):
        return tag
    if tag.get("type") != "json_schema":
        return {key: expand(value) for key, value in tag.items()}
    if _KEY not in tag:
        return tag
    return {"type": "grammar", "grammar": spelled_grammar(tag["json_schema"], tag[_KEY])}


def spelled_grammar(schema: object, spelling: Mapping[str, str]) -> str:
    """The EBNF text of a schema's values, spelled so."""
    separators = (spelling["item"], spelling["key"])
    grammar = str(
        xgrammar.Grammar.from_json_schema(
            json.dumps(schema, ensure_ascii=False), any_whitespace=False, separators=separators
        )
    )
    # What stands behind a value is known only to the tag around it.
    grammar = _LOOKAHEAD.sub("", grammar)
    return _python(grammar) if spelling.get("literals") == "python" else grammar


def _python(grammar: str) -> str:
    """JSON's literals and strings become Python's: names, either quote, and no escape that Python reads otherwise."""
    grammar = _LITERAL.sub(lambda found: _PYTHON_LITERALS[found.group()], grammar)
    grammar = _ESCAPE_RULE.sub(lambda _: _PYTHON_ESCAPE, grammar)
    return _STRING_RULE.sub(lambda _: _PYTHON_STRING, grammar)
