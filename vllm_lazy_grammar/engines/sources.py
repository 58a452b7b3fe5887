"""What a grammar source means before an engine reads it: choices as rules, Lark told from EBNF, tokens named by id.

Invariants:
- A choice's rules accept exactly the choices, byte for byte, whatever characters are in them.
- Lark and EBNF are told apart as vLLM does, so a grammar means the same on every backend.
- `names_tokens` may say yes without need; it never says no where a token is named in plain text.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from vllm_lazy_grammar.engines.limits import field_of
from vllm_lazy_grammar.errors import GrammarError

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.matcher import GrammarKey

_COMMENT = re.compile(r"(#|//).*$", re.MULTILINE)
_ESCAPES = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
_SPACE, _DELETE = 0x20, 0x7F
_TOKEN = re.compile(
    r'Token\s*\(|TokenTagDispatch|<\[|"(?:token|exclude_token|any_tokens|token_triggered_tags|token_dispatch)"'
)
_EDGE = re.compile(r"(?<!Exclude)Token\(([\d, ]+)\)|^ *\((\d+), \w+\),$", re.MULTILINE)

_PARTS = re.compile(r"\\.|.", re.DOTALL)
_ESCAPED_CLASSES = {
    rf"\{letter}": f"[{'^' if letter.isupper() else ''}{inside}]"
    for letters, inside in (("dD", "0-9"), ("wW", "0-9A-Za-z_"), ("sS", r" \t\n\r\f\v"))
    for letter in letters
}
_IN_RUST = {
    **{
        (inside, text): escaped
        for inside in (False, True)
        for text, escaped in (("/", r"\/"), ("\n", r"\n"), ("\r", r"\r"))
    },
    **{(True, mark): rf"\{mark}" for mark in "[&~"},
}
"""(in a class, what is written) -> what is written in Rust, where a class in a class, ``&&`` and ``~~`` mean something."""

_FINITE = frozenset({"regex", "choice", "json_object"})
"""Kinds whose certain text has an end, as JSON schemas have it that do not refer to each other."""
_REFERS = ("$ref", r"\u00")
"""In a schema: what may refer to itself, and an escape that may spell it."""
_RECURSIVE = (*_REFERS, '"grammar"', "ebnf", "lark")
"""The same in a structural tag."""


def is_lark(text: str) -> bool:
    """Whether a grammar is Lark rather than EBNF: no rule of it, comments aside, is defined with ``::=``."""
    return bool(text) and "::=" not in _COMMENT.sub("", text)


def _escaped(character: str) -> str:
    code = ord(character)
    if character in _ESCAPES:
        return _ESCAPES[character]
    return f"\\u{code:04x}" if code < _SPACE or code == _DELETE else character


def choice_rules(key: GrammarKey) -> str:
    """The EBNF of a choice. GrammarError where its source is not a JSON list of strings, or empty."""
    return "root ::= " + " | ".join(f'"{"".join(map(_escaped, choice))}"' for choice in choices(key))


def structural_tag(key: GrammarKey) -> str:
    """A structural tag in its present form: the old one (`structures` and `triggers`) is rewritten.

    GrammarError where the old form lacks something.
    """
    tag = json.loads(key.source)
    if not isinstance(tag, dict) or "structures" not in tag:
        return key.source
    try:
        tags = [
            {
                "type": "tag",
                "begin": item["begin"],
                "content": {"type": "json_schema", "json_schema": item["schema"]},
                "end": item["end"],
            }
            for item in tag["structures"]
        ]
        triggers = tag["triggers"]
    except (KeyError, TypeError) as error:
        reason = (
            f"a structure needs `begin`, `schema` and `end`, and beside them stand `triggers`: {error!r} is missing"
        )
        raise GrammarError(field_of(key), key.source, reason) from error
    return json.dumps(
        {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}
    )


def rust_expression(source: str) -> str:
    r"""A regular expression as the engines that are written in Rust read it, to stand between slashes in Lark.

    Its classes are ASCII's, as in JSON Schema and xgrammar; a slash and a line's end are escaped.
    """
    parts, in_class = [], False
    for part in _PARTS.findall(source):
        parts.append(_ESCAPED_CLASSES.get(part) or _IN_RUST.get((in_class, part), part))
        in_class = part != "]" and (in_class or part == "[")
    return f"(?:{''.join(parts)})"


def literal_expression(text: str) -> str:
    """A regular expression that matches exactly this text. ValueError where it holds half of a character."""
    text.encode()
    return "".join(part if part.isalnum() and part.isascii() else f"\\x{{{ord(part):x}}}" for part in text)


def choices(key: GrammarKey) -> list[str]:
    """The texts of a choice. GrammarError where its source is not a JSON list of strings, or empty."""
    found = json.loads(key.source)
    if not isinstance(found, list) or not found or not all(isinstance(choice, str) for choice in found):
        raise GrammarError(field_of(key), key.source, "must be a list of strings, at least one")
    return found


def names_tokens(key: GrammarKey) -> bool:
    """Whether a source may name tokens by id rather than by text."""
    return key.kind in ("grammar", "structural_tag") and _TOKEN.search(key.source) is not None


def named_tokens(rules: str) -> frozenset[int]:
    """The token ids that rules, as the engine prints them, ask for by id."""
    numbers = (number for match in _EDGE.finditer(rules) for number in (match[1] or match[2]).split(","))
    return frozenset(map(int, numbers))


def is_finite(key: GrammarKey) -> bool:
    """Whether certain text has an end: where rules can not refer to themselves without a choice."""
    if key.kind == "structural_tag":
        return not any(word in key.source for word in _RECURSIVE)
    return key.kind in _FINITE or (key.kind == "json" and not any(word in key.source for word in _REFERS))
