"""The network read from xgrammar's printed automata takes what xgrammar's own matcher takes, byte for byte."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.tools.cases import servable
from tests.tools.presets_of import extra_tokens
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.rows import is_allowed
from vllm_lazy_grammar.core.stacks import DEAD, Stacks
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.engines import xgrammar_network
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.errors import GrammarError
from vllm_lazy_grammar.tools.choice import Wanted, choose, read_tools
from vllm_lazy_grammar.tools.presets import catalogue

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
RULES = 'root ::= "a" ("b" r){200,300} | r\nr ::= "a" ("c" | "d")* "\\x01"'
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
PLAIN = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["n"]}
PLAIN_TOOL = {"type": "function", "function": {"name": "f", "parameters": PLAIN}}
"""For families whose strings xgrammar can not constrain."""

LIKELY = b'"{}[],:0123456789abc()<>/t\\'


@pytest.fixture(scope="module")
def engine():
    pieces = [bytes((byte,)) for byte in range(256)]
    return XgrammarEngine(Vocabulary([*pieces, b""], 257), max_threads=1)


def takes_the_same(grammar, walks, steps, seed=3):
    """Walk both at random; at each place the bytes and the named tokens that follow are the same, and whether it may end."""
    network = grammar.network()
    assert network is not None
    rng, row = np.random.default_rng(seed), grammar.new_row()
    for _ in range(walks):
        stacks, matcher = Stacks(network), grammar.matcher()
        stand = stacks.start
        for _ in range(steps):
            taken = [byte for byte in range(256) if stacks.step(stand, byte) != DEAD]
            assert taken == list(matcher.next_bytes(grammar.new_row()))
            assert stacks.complete[stand] == matcher.is_completed()
            matcher.fill(row)
            named = [token for token in grammar.named if stacks.by_name(stand, token) != DEAD]
            assert named == [token for token in grammar.named if is_allowed(row, token, grammar.ids.vocabulary.size)]
            if named and (not taken or rng.random() < 0.5):
                token = int(rng.choice(named))
                assert matcher.accept(token)
                stand = stacks.by_name(stand, token)
                continue
            if not taken:
                break
            byte = int(rng.choice([byte for byte in taken if byte in LIKELY] or taken))
            assert matcher.accept_bytes(bytes((byte,)))
            stand = stacks.step(stand, byte)


@pytest.mark.parametrize("name", KEYS)
def test_the_network_takes_the_bytes_that_the_matcher_takes(engine, name):
    takes_the_same(engine.compile(KEYS[name]), walks=4, steps=40)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(catalogue().families))
def test_the_network_of_each_family_takes_what_the_matcher_takes(family):
    tool = PLAIN_TOOL if family == "minimax_m3" else TOOL
    tools = servable(family, [tool, {"type": "function", "function": {"name": "g"}}])
    preset = catalogue().families[family]
    texts = dict.fromkeys([*preset.markers, *preset.needs, *extra_tokens(family)])
    added = {text: 257 + place for place, text in enumerate(texts)}
    pieces = [*(bytes((byte,)) for byte in range(256)), b"", *(text.encode() for text in added)]
    vocabulary = Vocabulary(pieces, len(pieces), special_ids=added.values(), added=added)
    choice = choose(read_tools(tools), Wanted(), preset, is_token=added.__contains__)
    takes_the_same(XgrammarEngine(vocabulary, max_threads=1).compile(choice.grammar), walks=2, steps=50)


@pytest.mark.shared
@pytest.mark.long
@pytest.mark.timeout(2_000)
def test_the_networks_of_real_schemas_take_what_the_matcher_takes(shared, engine):
    compared = 0
    for file in sorted((shared / "data" / "maskbench").glob("*.json")):
        key = GrammarKey("json", json.dumps(json.loads(file.read_text(encoding="utf-8"))["schema"]))
        try:
            grammar = engine.compile(key)
        except GrammarError:
            continue
        takes_the_same(grammar, walks=2, steps=60)
        compared += 1
    assert compared > 380


def test_every_byte_is_read_as_it_is_printed(engine):
    text = "".join(f"\\x{byte:02x}" for byte in range(1, 128))
    grammar = engine.compile(
        GrammarKey(
            "grammar",
            f'root ::= "{text}" [\\x01-\\x7f] ' + " ".join(f"[\\u{code:04x}]" for code in range(0x80, 0x400, 7)),
        )
    )
    takes_the_same(grammar, walks=1, steps=300)


@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        (RULES, "Rule(", "Rules("),
        ("a schema", "Eps->", "EOS->"),
        (RULES, "Repeat(rule=", "Repeat(rules="),
        (RULES, "'->", "'=>"),
        (RULES, "Rule 1:", "Rule 2:"),
        (RULES, "num_states=", "states="),
        (RULES, "])\n", "]\n"),
        (RULES, "'a'", "'ab'"),
        (RULES, "'a'", "'\\q'"),
        (RULES, "root, FSM", "other, FSM"),
    ],
)
def test_what_is_printed_otherwise_is_not_read(engine, monkeypatch, source, old, new):
    grammar = engine.compile(KEYS.get(source) or GrammarKey("grammar", source))
    printed = xgrammar_network.testing._print_grammar_fsms(grammar._compiled.grammar)
    assert grammar.network() is not None
    assert old in printed
    monkeypatch.setattr(xgrammar_network.testing, "_print_grammar_fsms", lambda _: printed.replace(old, new))
    assert grammar.network() is None


@pytest.mark.parametrize("option", ["lazy", "max_tokens=5", "capture", 'stop="z"'])
def test_a_rule_with_an_option_is_not_read(engine, option):
    rules = f'start: a "b"\na[{option}]: /[a-y]*/\n'
    assert engine.compile(GrammarKey("grammar", rules)).network() is None


def test_a_version_that_is_not_known_is_not_read(engine, monkeypatch):
    monkeypatch.setattr(xgrammar_network, "_VERSIONS", frozenset())
    assert engine.compile(KEYS["a schema"]).network() is None


def test_a_grammar_of_thousands_of_rules_is_read(engine):
    properties = {f"p{n}": {"type": "string", "maxLength": 150} for n in range(120)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    takes_the_same(engine.compile(GrammarKey("json", json.dumps(schema))), walks=1, steps=40)
