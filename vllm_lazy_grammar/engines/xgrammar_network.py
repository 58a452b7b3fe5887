"""xgrammar's compiled grammar as a network: read from what it serializes.

Invariants:
- What is not understood (a kind of edge, an option of a rule, a version) is answered with None, never guessed.
- Nothing is serialized that would take more than `_LARGEST` bytes: xgrammar repeats all edges for each rule.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vllm_lazy_grammar.core.network import Call, Named, Network, Repeat, Span, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    import xgrammar as xgr

_EPSILON, _RULE, _REPEAT, _TOKEN = -1, -2, -4, -5
_LARGEST = 1 << 25
_PLAIN = [-1, -1, "", False, None]
"""What follows name, body, and look-ahead in a rule without options."""

_VERSION = "v16"


def network(grammar: xgr.Grammar) -> Network | None:
    """The network of a compiled grammar; None where it has parts that are not understood, or is too large."""
    printed = str(grammar)
    if printed.count("::=") * len(printed) > _LARGEST:
        return None
    text = grammar.serialize_json()
    begin = text.index('"complete_fsm":') + len('"complete_fsm":')
    fsm = text[begin : text.index(',"per_rule_fsms"', begin)]
    data = json.loads("".join(_without(text, fsm)))
    if (
        data["__VERSION__"] != _VERSION
        or data["suffix_stop_infos"]
        or any(rule[4:] != _PLAIN for rule in data["rules"])
    ):
        return None
    rules = [rule[0] for rule in data["per_rule_fsms"]]
    return _built(json.loads(fsm), rules, data["root_rule_id"])


def _without(text: str, fsm: str) -> Iterator[str]:
    """A text without the edges, which stand before every rule: what is left is small. In short steps, so that other threads run between."""
    place = 0
    while (found := text.find(fsm[:64], place)) >= 0 and text.startswith(fsm, found):
        yield text[place:found]
        yield "0"
        place = found + len(fsm)
    yield text[place:]


def _built(fsm: dict[str, Any], rules: list[list[Any]], root: int) -> Network | None:
    edges, places = fsm["edges"]["data_"], fsm["edges"]["indptr_"]
    states = [State() for _ in range(len(places) - 1)]
    starts = [rule[1] for rule in rules]
    for number, state in enumerate(states):
        for edge in edges[places[number] : places[number + 1]]:
            if not _lead(state, edge, starts, fsm["edge_aux_data"]):
                return None
    for rule in rules:
        for number in rule[2]:
            states[number].final = True
    return Network(states, starts[root])


def _lead(state: State, edge: list[int], starts: list[int], more: list[int]) -> bool:
    """Add one edge to its state; false where its kind is not known."""
    low, high, target = edge
    if low >= 0:
        state.spans.append(Span(low, high, target))
    elif low == _EPSILON:
        state.jumps.append(target)
    elif low == _RULE:
        state.calls.append(Call(starts[high], target))
    elif low == _REPEAT:
        rule, lower, upper = more[high : high + 3]
        state.repeat = Repeat(starts[rule], target, lower, None if upper < 0 else upper)
    elif low == _TOKEN:
        state.named.append(Named(frozenset(more[high + 1 : high + 1 + more[high]]), target))
    else:
        return False
    return True
