"""The network read from xgrammar's serialized grammar takes what xgrammar's own matcher takes, byte for byte."""

from __future__ import annotations

import json

import numpy as np
import pytest

from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.stacks import DEAD, Stacks
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.engines import xgrammar_network
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "long": {"type": "string", "minLength": 2, "maxLength": 500},
        "kind": {"enum": ["a", "ab", 7]},
        "when": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[a-c]{2,3}$"},
        "more": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind"],
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<t>"],
        "tags": [
            {"begin": "<t>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</t>"}
        ],
    },
}
KEYS = {
    "a schema": GrammarKey("json", json.dumps(SCHEMA)),
    "any object": GrammarKey("json_object", ""),
    "a regex": GrammarKey("regex", r"a(b|c)*\d{2,5}é[^x]"),
    "rules": GrammarKey("grammar", 'root ::= "(" root ")" | [0-9]+ ("," root)?'),
    "a choice": GrammarKey("choice", '["alpha", "alpine", "b"]'),
    "a tag": GrammarKey("structural_tag", json.dumps(TAG)),
}
LIKELY = b'"{}[],:0123456789abc()<>/t\\'


@pytest.fixture(scope="module")
def engine():
    pieces = [bytes((byte,)) for byte in range(256)]
    return XgrammarEngine(Vocabulary([*pieces, b""], 257), max_threads=1)


@pytest.mark.parametrize("name", KEYS)
def test_the_network_takes_the_bytes_that_the_matcher_takes(engine, name):
    grammar = engine.compile(KEYS[name])
    network = grammar.network()
    assert network is not None
    rng = np.random.default_rng(3)
    for _ in range(4):
        stacks, matcher = Stacks(network), grammar.matcher()
        stand = stacks.start
        for _ in range(40):
            taken = [byte for byte in range(256) if stacks.step(stand, byte) != DEAD]
            assert taken == list(matcher.next_bytes(grammar.new_row()))
            assert stacks.complete[stand] == matcher.is_completed()
            if not taken:
                break
            likely = [byte for byte in taken if byte in LIKELY] or taken
            byte = int(rng.choice(likely))
            assert matcher.accept_bytes(bytes((byte,)))
            stand = stacks.step(stand, byte)


def test_a_grammar_too_large_to_serialize_has_no_network(engine, monkeypatch):
    monkeypatch.setattr(xgrammar_network, "_LARGEST", 10)
    assert engine.compile(KEYS["a schema"]).network() is None


def test_a_version_that_is_not_known_is_not_read(engine, monkeypatch):
    monkeypatch.setattr(xgrammar_network, "_VERSION", "v0")
    assert engine.compile(KEYS["a schema"]).network() is None


def test_an_edge_of_an_unknown_kind_is_not_read(engine, monkeypatch):
    monkeypatch.setattr(xgrammar_network, "_RULE", -99)
    assert engine.compile(KEYS["rules"]).network() is None
