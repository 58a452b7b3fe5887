r"""Takes a structural tag that chooses between calls apart: the literal openings, and behind each a grammar of its own.

The form that is taken apart is that of `choice`: one of some texts, one of several calls, the same again behind a separator up to a number of
times, one of some texts. Everything else stays in one piece.

Invariants:
- What a part takes behind its opening is what the tag takes there; a part depends on its own call and on what is around calls, never on the
  other calls, so that sets of tools share them. (The beginning that openings share is cut behind the last sign that names do not have.)
- Nothing is changed in what is given.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from vllm_lazy_grammar.core.crossing import MARK
from vllm_lazy_grammar.core.dispatch import Call, Plan
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.openings import Digits, Opening
from vllm_lazy_grammar.tools import formats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_lazy_grammar.tools.formats import Format

_MARK = MARK.decode()
_DIGITS = re.compile(r"\[0-9\]\{1,(\d)\}")
_NAMED = re.compile(r"[\w.-]*\Z")
"""What may be a tool's name at the end of a text."""
_FEWEST = 2
"""Calls that are worth a choice."""


class _OtherFormError(Exception):
    """The tag is not of the form that is taken apart."""


class _Block(NamedTuple):
    """The parts of a tag that has the form: see the module's text."""

    opens: tuple[str, ...]
    calls: Sequence[Format]
    separators: tuple[str, ...]
    most: int | None
    closes: tuple[str, ...]


@lru_cache(64)
def plan_of(key: GrammarKey) -> Plan | None:
    """How a grammar is taken apart; None where it has to stay in one piece."""
    if key.kind != "structural_tag" or _MARK in key.source or json.dumps(_MARK)[1:-1] in key.source:
        return None
    try:
        tag = json.loads(key.source)
        plan = _plan(_block(tag["format"]))
    except (_OtherFormError, KeyError, TypeError, ValueError):
        return None
    return replace(plan, calls=tuple(map(_undeclared, plan.calls))) if key.undeclared else plan


def _undeclared(call: Call) -> Call:
    """The same, with properties allowed that its schemas do not declare."""
    more = None if call.more is None else replace(call.more, undeclared=True)
    return replace(call, last=replace(call.last, undeclared=True), more=more)


def _plan(block: _Block) -> Plan:
    taken = [_taken(call, closed=all(block.closes)) for call in block.calls]
    shared = _shared([opening for openings, _ in taken for opening in openings]) if block.separators else ""
    again = tuple(separator + shared for separator in block.separators)
    if not all(again) or _clash(again, block.closes) or not all(_ends_itself(rest) for _, rest in taken if again):
        raise _OtherFormError
    calls = [
        Call(tuple(openings), _part(rest, block.closes, ()), _more(rest, block.closes, again))
        for openings, rest in taken
    ]
    return Plan(
        tuple(text.encode() for text in block.opens),
        tuple(calls),
        tuple(text.encode() for text in again),
        shared.encode(),
        block.most,
    )


def _clash(again: Sequence[str], closes: Sequence[str]) -> bool:
    """Whether a text before another call begins something else that may stand there."""
    return any(other != text and other.startswith(text) for text in again for other in (*again, *closes))


def _ends_itself(rest: Format) -> bool:
    """Whether what stands behind an opening ends in a text, or in JSON, which says itself where it ends."""
    if rest == formats.EMPTY:
        return True
    last = _elements(rest)[-1]
    options = last["elements"] if last["type"] == "or" else [last]
    return all(any(map(_is_solid, _elements(option)[-1:])) for option in options)


def _more(rest: Format, closes: Sequence[str], again: Sequence[str]) -> GrammarKey | None:
    return _part(rest, closes, again) if again else None


def _part(rest: Format, closes: Sequence[str], again: Sequence[str]) -> GrammarKey:
    ends = formats.texts([*closes, *(text + _MARK for text in again)])
    return GrammarKey("structural_tag", formats.structural_tag(formats.sequence([rest, ends])))


# -- the form ---------------------------------------------------------------------------------------------------------


def _block(node: Format) -> _Block:
    parts = _elements(node)
    opens = _texts(parts[0]) if parts else None
    parts = parts[1:] if opens else parts
    if not parts or parts[0]["type"] != "or" or len(parts[0]["elements"]) < _FEWEST:
        raise _OtherFormError
    calls, rest = parts[0], parts[1:]
    separators: tuple[str, ...] = ()
    most: int | None = 1
    if rest and rest[0]["type"] == "repeat":
        separators, most = _repeated(rest[0], calls)
        rest = rest[1:]
    closes = _texts(rest[0]) if rest else ("",)
    if closes is None or len(rest) > 1:
        raise _OtherFormError
    return _Block(opens or ("",), calls["elements"], separators, most, closes)


def _repeated(node: Format, calls: Format) -> tuple[tuple[str, ...], int | None]:
    """The separators, and how many calls there may be with the first."""
    *before, last = _elements(node["content"])
    separators = _texts(before[0]) if before else ("",)
    if separators is None or len(before) > 1 or last != calls or node["min"] != 0:
        raise _OtherFormError
    return separators, None if node["max"] < 0 else node["max"] + 1


def _elements(node: Format) -> list[Format]:
    found: list[Format] = node["elements"] if node["type"] == "sequence" else [node]
    return found


def _texts(node: Format) -> tuple[str, ...] | None:
    """The texts of which a node takes one; None where it is something else."""
    if node["type"] == "const_string":
        return (node["value"],)
    if node["type"] == "optional":
        inner = _texts(node["content"])
        return None if inner is None else (*inner, "")
    if node["type"] == "or" and all(part["type"] == "const_string" for part in node["elements"]):
        return tuple(part["value"] for part in node["elements"])
    return None


# -- one call ---------------------------------------------------------------------------------------------------------


def _taken(call: Format, *, closed: bool) -> tuple[list[Opening], Format]:
    """What may open a call, and what stands behind that, which takes the empty text only where the block is `closed` by a text."""
    if call["type"] == "or":
        return _factored(call["elements"], closed=closed)
    parts = _elements(call)
    openings: list[Opening] = [()]
    used = 0
    for part in parts:
        ways = _ways(part)
        if not ways:
            break
        openings = [opening + way for opening in openings for way in ways]
        used += 1
        if len(ways) > 1:  # forms whose ends are alike: what follows is behind all of them
            break
    rest = parts[used:]
    if not used or not (closed or any(_is_solid(part) for part in rest)):
        raise _OtherFormError
    return [_joined(opening) for opening in openings], formats.sequence(rest)


def _factored(options: Sequence[Format], *, closed: bool) -> tuple[list[Opening], Format]:
    """Ways to write one call that begin with the same text."""
    parts = [_elements(option) for option in options]
    if not all(part and part[0]["type"] == "const_string" for part in parts):
        raise _OtherFormError
    opening = _common([part[0]["value"] for part in parts])
    rests = [formats.sequence([formats.text(part[0]["value"][len(opening) :]), *part[1:]]) for part in parts]
    if not opening or not (closed or all(any(_is_solid(part) for part in _elements(rest)) for rest in rests)):
        raise _OtherFormError
    return [(opening.encode(),)], formats.either(rests)


def _ways(part: Format) -> list[Opening]:
    """The openings that a part of a call is; none where it is something else."""
    if part["type"] == "const_string":
        return [(part["value"].encode(),)]
    if part["type"] == "regex":
        digits = _DIGITS.fullmatch(part["pattern"])
        return [(Digits(int(digits[1])),)] if digits else []
    if part["type"] == "sequence":
        found: list[Opening] = [()]
        for element in part["elements"]:
            found = [opening + way for opening in found for way in _ways(element)]
        return found
    if part["type"] == "or":
        each = [_ways(element) for element in part["elements"]]
        return [way for ways in each for way in ways] if all(each) else []
    return []


def _is_solid(part: Format) -> bool:
    """Whether a part never takes the empty text: a text, or a JSON value."""
    return part["type"] in ("const_string", "json_schema") and part != formats.EMPTY


def _joined(opening: Opening) -> Opening:
    """Neighbouring texts made one."""
    found: list[bytes | Digits] = []
    for atom in opening:
        if found and isinstance(atom, bytes) and isinstance(found[-1], bytes):
            found[-1] += atom
        else:
            found.append(atom)
    return tuple(found)


def _shared(openings: Sequence[Opening]) -> str:
    """The beginning that all openings share, without what may belong to names."""
    heads = [opening[0] for opening in openings]
    texts = [head.decode("utf-8", "surrogateescape") if isinstance(head, bytes) else "" for head in heads]
    return _NAMED.sub("", _common(texts))


def _common(texts: Sequence[str]) -> str:
    """What all texts begin with."""
    low, high = min(texts), max(texts)
    size = next((place for place, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low[:size]
