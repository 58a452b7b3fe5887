"""The xgrammar engine: every kind of source, errors as ours, tokens by id, tokenizers, and what would stall it."""

from __future__ import annotations

import itertools
import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.engines import limits, sources, xgrammar, xgrammar_matcher
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.errors import GrammarError, SettingsError
from vllm_lazy_grammar.testing import SMALL_CALL, SMALL_END, SMALL_SIZE, allowed_ids, small_vocabulary

ENGINE = XgrammarEngine(small_vocabulary())
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a", "b"]})
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<t>", "content": {"type": "json_schema", "json_schema": {}}, "end": "c"},
}
OLD_TAG = {"structures": [{"begin": "<t>", "schema": {"type": "integer"}, "end": "c"}], "triggers": ["<t"]}
BY_ID = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": {"type": "token", "token": SMALL_CALL},
        "content": {"type": "json_schema", "json_schema": {"type": "string"}},
        "end": "c",
    },
}


def matcher(kind, source, *, compact=False):
    return ENGINE.compile(GrammarKey(kind, source, compact)).matcher()


def takes(kind, source, text, *, compact=False):
    """Whether a text is a complete sentence of a grammar."""
    at = matcher(kind, source, compact=compact)
    return at.accept_bytes(text.encode()) and at.is_completed()


def mask(at):
    row = np.zeros(2, dtype=np.int32)
    at.fill(row)
    return allowed_ids(row)


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("json", SCHEMA, '{"a": 1, "b": [1, {"c": null}]}', '{"a": "x", "b": 1}'),
        ("json_object", "", '{"a": [1]}', "[1]"),
        ("regex", "a{2}[b-d]", "aac", "aa"),
        ("choice", json.dumps(["a\n", 'b"']), 'b"', "b"),
        ("grammar", 'root ::= "a" root "b" | "c"', "aacbb", "aacb"),
        ("grammar", 'start: "a" start "b" | "c"', "acb", "ac"),
        ("structural_tag", json.dumps(TAG), "<t>[1]c", "<t>[1]"),
        ("structural_tag", json.dumps(OLD_TAG), "prose <t>12c", "prose <t>12"),
    ],
)
def test_every_kind_of_source_is_served(kind, source, good, bad):
    assert takes(kind, source, good)
    assert not takes(kind, source, bad)


@pytest.mark.parametrize(("kind", "source"), [("json", SCHEMA), ("json_object", "")])
def test_compact_json_holds_no_whitespace_between_elements_not_even_where_the_schema_says_nothing(kind, source):
    tight, loose = '{"a":1,"b":[1,{"c":1,"d":2}]}', '{"a":1,"b":[1, {"c":1,"d":2}]}'
    assert takes(kind, source, tight, compact=True)
    assert not takes(kind, source, loose, compact=True)
    assert takes(kind, source, loose)


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("json", '{"type": "nope"}', 'Unsupported type "nope"'),
        ("json", '{"$ref": "#"}', "allows nothing, not even the empty text"),
        ("regex", "a(", "The parenthesis is not closed."),
        ("grammar", 'root ::= "a"\nroot ::= "b"', 'Rule "root" is defined multiple times'),
        ("grammar", "root ::= nope", 'Rule "nope" is not defined'),
        ("grammar", "root ::= root", "allows nothing"),
        ("grammar", 'start: "a"\nstart: "b"', "duplicate rule or terminal 'start'"),
        ("structural_tag", "{}", "Structural tag must have a format field"),
        ("structural_tag", "5", "."),
    ],
)
def test_an_error_of_the_engine_names_field_and_value_and_no_place_in_its_code(kind, source, reason):
    for refuse in (ENGINE.compile, xgrammar.check):
        with pytest.raises(GrammarError, match=f"^structured_outputs.{kind}: ") as refused:
            refuse(GrammarKey(kind, source))
        assert reason in str(refused.value)
        assert "/project" not in str(refused.value)
        assert refused.value.value == source


def test_after_a_refused_grammar_the_engine_serves_the_next():
    with pytest.raises(GrammarError):
        matcher("grammar", 'root ::= "a"\nroot ::= "b"')
    assert takes("grammar", 'root ::= "a"', "a")


def test_a_counted_repetition_in_a_pattern_is_served_though_the_engines_cache_can_not_take_it():
    assert takes("json", '{"type": "string", "pattern": "^a{1,12}$"}', '"aaa"')


def test_a_grammar_that_is_certain_of_its_text_for_ever_gives_a_part_of_it():
    assert matcher("grammar", 'root ::= "a" root').certain() == b"a" * 256


@pytest.mark.parametrize("spelled", ["$ref", "\\u0024ref", "$r\\u0065f"])
@pytest.mark.parametrize("kind", ["json", "structural_tag"])
def test_a_schema_that_is_certain_of_itself_for_ever_is_never_searched_without_a_bound(kind, spelled):
    schema = '{"type": "object", "properties": {"a": {"REF": "#"}}, "required": ["a"]}'.replace("REF", spelled)
    tag = f'{{"type": "structural_tag", "format": {{"type": "json_schema", "json_schema": {schema}}}}}'
    assert not sources.is_finite(GrammarKey(kind, schema if kind == "json" else tag))


def test_the_two_ways_to_what_is_certain_agree():
    texts = ['"abc" [1-2]', '"é" | "è"', '"ab" "c"?', '"a\\u0000b"', '"日本" | "日曜"', '"a" Token(25) "b"']
    for rules in texts:
        grammar = ENGINE.compile(GrammarKey("grammar", f"root ::= {rules}"))
        stepped = grammar.matcher().certain()
        grammar.finite = True
        assert grammar.matcher().certain() == stepped


def test_a_special_token_that_a_grammar_names_by_its_id_is_allowed_there_and_nowhere_else():
    at = matcher("structural_tag", json.dumps(BY_ID))
    assert mask(at) == [SMALL_CALL]
    assert at.accept(SMALL_CALL)
    assert at.accept_bytes(b'"<call')
    assert SMALL_CALL not in mask(at)
    assert not at.accept(SMALL_CALL)
    assert at.steps == 2
    assert at.accept_bytes(b'>"c')


def test_a_special_token_is_not_taken_by_free_text_of_a_grammar_that_names_another():
    at = matcher("grammar", f"root ::= [^x]* | Token({SMALL_CALL})")
    assert SMALL_CALL in mask(at)
    assert SMALL_END not in mask(at)
    assert not at.accept(SMALL_END)


def test_a_vocabulary_without_an_id_that_is_never_text_is_the_operators_to_change():
    with pytest.raises(SettingsError, match=r"^tokenizer: needs one id that is never text"):
        XgrammarEngine(Vocabulary([b"a", b"b"], 2))


def test_a_row_that_would_be_all_ones_still_masks_what_is_never_text():
    engine = XgrammarEngine(Vocabulary([b"a", b"b"], 32, special_ids=(31,), added={"<s>": 31}))
    at = engine.compile(GrammarKey("regex", "[^x]*")).matcher()
    row = np.zeros(1, dtype=np.int32)
    assert at.fill(row) is True
    assert allowed_ids(row) == [0, 1]


def test_a_tokenizer_with_as_many_ids_as_words_hold_bits_has_no_padding_to_clear():
    engine = XgrammarEngine(Vocabulary([b"a"] * 63 + [b"<s>"], 64, special_ids=(63,), added={"<s>": 63}))
    at = engine.compile(GrammarKey("regex", "a?")).matcher()
    assert mask(at) == list(range(63))


# What a grammar may cost


def slow_clock(step_ns):
    """A clock on which every look costs half a step."""
    now = iter(range(0, 1 << 60, step_ns))
    return lambda: next(now)


def walk(at, row, steps):
    for _ in range(steps):
        at.accept(0)
        at.fill(row)


def test_a_step_that_takes_the_wall_long_once_is_not_held_against_a_grammar():
    at = matcher("regex", "a*")
    at._clock = slow_clock(xgrammar_matcher.SLOW_NS * 100)
    assert at.accept(0)
    assert at._clock is xgrammar_matcher.time.thread_time_ns


def test_a_grammar_whose_steps_take_this_thread_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(xgrammar_matcher.time, "thread_time_ns", slow_clock(xgrammar_matcher.SLOW_NS * 3))
    at = matcher_without_probe("regex", "a*")
    at._clock = xgrammar_matcher.time.thread_time_ns
    row = np.zeros(2, dtype=np.int32)
    with pytest.raises(GrammarError, match=r"^structured_outputs\.regex: is too ambiguous: one step takes"):
        walk(at, row, 10)


def matcher_without_probe(kind, source):
    key = GrammarKey(kind, source)
    ids = ENGINE._plain.ids
    return xgrammar.XgrammarGrammar(key, ENGINE._plain.compile(xgrammar._call(key)), ids).matcher()


AMBIGUOUS = [
    "a{1,129}" * 30,
    "(a{1,129}){1,129}",
    "([a-z]{1,129}){1,129}",
    "((a+)+)+b",
    "(((a*)*)*)*",
    "(a|aa|[ab]+)*" * 20,
]
PLAIN = [
    r"(\w+\s*)+",
    r"[a-z]{1,63}(\.[a-z]{1,63}){1,127}",
    "(a|b)*a" + "(a|b)" * 20,
    "(a|aa)*",
    "a{1,129}b{1,129}",
    r"(\d+,?)*",
    r"(.+,?)+",
    "a?" * 128,
]


@pytest.mark.parametrize("expression", AMBIGUOUS)
def test_an_expression_that_reads_one_text_in_very_many_ways_is_refused_by_the_front_end(expression):
    with pytest.raises(GrammarError, match="too ambiguous"):
        xgrammar.check(GrammarKey("regex", expression))


SUM = 'expr ::= term ("+" term)*\nterm ::= "(" expr ")" | [0-9]{} | "foo"\n'
AMBIGUOUS_RULES = [  # what repeats can be cut anywhere, and the walks by the least and the greatest byte do not come there
    SUM.format("*") + 'root ::= expr{2,5} ";"',
    SUM.format("+") + 'root ::= expr{2,5} ";"',
    'root ::= "a" | "b" y | "c"\ny ::= (z z)* "!"\nz ::= [0-9]*',
]
PLAIN_RULES = [SUM.format(run) + f"root ::= {root}" for run in "*+" for root in ("expr", '"[" (expr ("," expr)*)? "]"')]


@pytest.mark.parametrize("rules", AMBIGUOUS_RULES)
def test_rules_that_read_one_text_in_very_many_ways_are_refused_by_the_front_end(rules):
    with pytest.raises(GrammarError, match=r"^structured_outputs\.grammar: is too ambiguous: .* more than 1000 ways"):
        xgrammar.check(GrammarKey("grammar", rules))


@pytest.mark.parametrize("rules", PLAIN_RULES)
def test_rules_that_read_one_text_in_few_ways_pass(rules):
    xgrammar.check(GrammarKey("grammar", rules))


@pytest.mark.parametrize("expression", PLAIN)
def test_an_expression_as_people_write_them_passes(expression):
    xgrammar.check(GrammarKey("regex", expression))


@pytest.mark.parametrize("kind", ["json", "structural_tag"])
def test_an_ambiguous_pattern_inside_a_schema_is_refused_and_named(kind):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^((a+)+)+b$"}}}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    key = GrammarKey(kind, json.dumps(schema if kind == "json" else tag))
    with pytest.raises(GrammarError, match=rf"^structured_outputs\.{kind}: is too ambiguous: .*\(\(a\+\)\+\)\+b"):
        xgrammar.check(key)
    xgrammar.check(GrammarKey(kind, key.source.replace("((a+)+)+b", "(a+,)+b")))


def test_the_verdict_does_not_look_at_a_clock(monkeypatch):
    def forbidden():
        raise AssertionError("a clock was read")

    monkeypatch.setattr(xgrammar.time, "thread_time_ns", forbidden)
    with pytest.raises(GrammarError, match="more than 1000 ways"):
        xgrammar.check(GrammarKey("regex", "((a+)+)+b"))
    xgrammar.check(GrammarKey("regex", "(a+,)+b"))


DEEPEST = {
    "groups": ("regex", "(" * limits.GROUP_DEPTH + "a" + ")" * limits.GROUP_DEPTH),
    "rules": ("grammar", "root ::= " + "(" * limits.GROUP_DEPTH + '"a"' + ")" * limits.GROUP_DEPTH),
    "arrays": ("json", '{"items": ' * (limits.JSON_DEPTH - 1) + "{}" + "}" * (limits.JSON_DEPTH - 1)),
    "objects": (
        "json",
        '{"type": "object", "properties": {"a": ' * (limits.JSON_DEPTH // 2 - 1)
        + '{"type": "integer"}'
        + "}}" * (limits.JSON_DEPTH // 2 - 1),
    ),
    "left recursion": ("grammar", 'root ::= root "a" | "b"'),
    "hidden left recursion": ("grammar", 'root ::= x "a" | "b"\nx ::= y\ny ::= root | ""'),
    "a star of nothing": ("grammar", 'root ::= (""*)* "a"'),
    "references in a ring": ("json", '{"type": "array", "items": {"$ref": "#"}}'),
    "references that double": (
        "json",
        json.dumps(
            {
                "$ref": "#/$defs/0",
                "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(20)} | {"20": {}},
            }
        ),
    ),
    "a long enumeration": ("json", json.dumps({"enum": [f"value {i}" for i in range(2_000)]})),
    "many choices": ("choice", json.dumps([f"choice {i}" for i in range(2_000)])),
}


@pytest.mark.parametrize("name", DEEPEST)
def test_what_the_limits_let_pass_is_compiled_on_a_thread_with_a_small_stack(name):
    key, outcome = GrammarKey(*DEEPEST[name]), []
    before = threading.stack_size(512 << 10)
    try:
        worker = threading.Thread(target=lambda: outcome.append(ENGINE.compile(key).nbytes))
        worker.start()
    finally:
        threading.stack_size(before)
    worker.join(60)
    assert len(outcome) == 1
    assert outcome[0] > 0


# The front end


@pytest.mark.parametrize(
    ("kind", "source", "data", "answer"),
    [
        ("regex", "<t>[ab]", b"<t>", True),
        ("regex", "<t>[ab]", b"<u", False),
        ("grammar", 'root ::= "<t>"', b"<t>x", False),
        ("json_object", "", b" {", False),
        ("json_object", "", b"{\n", True),
        ("choice", json.dumps(["a\0b"]), b"a\0", True),
    ],
)
def test_whether_a_grammar_can_take_a_text_from_its_start_is_tried_on_single_bytes(kind, source, data, answer):
    assert xgrammar.can_take(GrammarKey(kind, source), data, budget_ms=20) is answer


def test_a_source_too_long_for_the_budget_is_not_tried():
    key = GrammarKey("choice", json.dumps([f"choice {i}" for i in range(2_000)]))
    assert xgrammar.can_take(key, b"no", budget_ms=20) is None
    assert xgrammar.can_take(key, b"no", budget_ms=2_000) is False
    assert xgrammar.can_take(GrammarKey("regex", "a"), b"a", budget_ms=0) is None


def test_a_source_that_is_too_long_to_be_tried_is_still_read():
    choices = [f"choice {i}" for i in range(2_000)]
    xgrammar.check(GrammarKey("choice", json.dumps(choices)))
    with pytest.raises(GrammarError, match="list of strings"):
        xgrammar.check(GrammarKey("choice", json.dumps([*choices, 1])))


# Tokenizers


def byte_level_tokenizer():
    ids = {"a": 0, "b": 1, "Ġa": 2, "Ã": 3, "©": 4, "Ċ": 5}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")  # noqa: S106 -- no password


def test_a_byte_level_tokenizer_gives_bytes_special_tokens_and_padding():
    vocabulary = xgrammar.vocabulary(byte_level_tokenizer(), 12)
    assert vocabulary.pieces == (
        b"a",
        b"b",
        b" a",
        b"\xc3",
        b"\xa9",
        b"\n",
        b"<end>",
        b"<tool_call>",
        b"",
        b"",
        b"",
        b"",
    )
    assert vocabulary.special_ids == {6}
    assert vocabulary.eos_ids == {6}
    assert vocabulary.added == {"<end>": 6, "<tool_call>": 7}


def test_a_models_vocabulary_smaller_than_the_tokenizers_cuts_it():
    vocabulary = xgrammar.vocabulary(byte_level_tokenizer(), 7)
    assert vocabulary.size == 7
    assert vocabulary.token_of("<tool_call>") is None


def test_an_engine_for_a_tokenizer_has_rows_as_wide_as_the_model():
    engine = XgrammarEngine.for_tokenizer(byte_level_tokenizer(), 100)
    row = np.full(4, -1, dtype=np.int32)
    engine.compile(GrammarKey("regex", "[^x]+")).matcher().fill(row)
    assert allowed_ids(row) == [0, 1, 2, 3, 5, 7]


def test_a_tokenizer_that_the_engine_does_not_know_is_the_operators_to_change():
    with pytest.raises(SettingsError, match=r"^tokenizer: "):
        xgrammar.vocabulary(SimpleNamespace(get_vocab=lambda: {"a": 0}), 1)


class Tekken:
    """The part of vLLM's Mistral tokenizer that is asked."""

    IS_MISTRAL_TOKENIZER = True
    is_tekken = True
    eos_token_id = 1
    all_special_ids = (0, 1)
    all_special_tokens = ("<s>", "</s>")

    def __init__(self):
        self.vocab = ["<s>", "</s>", "a", "<?>"]
        pieces = [b"", b"", b"a", b"\xc3"]
        self.tokenizer = SimpleNamespace(id_to_byte_piece=pieces.__getitem__)


def test_a_tekken_tokenizer_gives_the_bytes_that_its_texts_lose():
    vocabulary = xgrammar.vocabulary(Tekken(), 6)
    assert vocabulary.pieces == (b"<s>", b"</s>", b"a", b"\xc3", b"", b"")
    assert vocabulary.special_ids == {0, 1}
    assert vocabulary.eos_ids == {1}


class SentencePieceMistral(Tekken):
    is_tekken = False

    def __init__(self):
        self.vocab = ["<s>", "</s>", "▁a", "<0x0A>"]


def test_a_sentencepiece_mistral_tokenizer_gives_spaces_and_bytes():
    assert xgrammar.vocabulary(SentencePieceMistral(), 5).pieces == (b"<s>", b"</s>", b" a", b"\n", b"")


def test_a_tokenizer_that_brings_its_own_description_is_asked_for_it():
    info = xgrammar.xgr.TokenizerInfo([b"a", b"</s>"], stop_token_ids=[1])
    tokenizer = SimpleNamespace(init_xgrammar=lambda: (info, None), all_special_ids=[1])
    vocabulary = xgrammar.vocabulary(tokenizer, SMALL_SIZE)
    assert vocabulary.pieces[:3] == (b"a", b"</s>", b"")
    assert vocabulary.special_ids == {1}


@pytest.mark.parametrize("step", ["accept", "accept_bytes"])
def test_a_step_that_is_refused_as_too_slow_changed_nothing(monkeypatch, step):
    at = matcher("regex", "ab")
    slow = GrammarError("structured_outputs.regex", "ab", "one step takes 99 ms")
    given = ENGINE.vocabulary.token_of("a") if step == "accept" else b"a"

    def charge(self, spent):
        raise slow

    with monkeypatch.context() as patch:
        patch.setattr(type(at), "_charge", charge)
        at._clock = itertools.count(step=10**12).__next__
        with pytest.raises(GrammarError) as caught:
            getattr(at, step)(given)
    assert caught.value is slow
    at._clock = time.perf_counter_ns
    assert at.steps == 0
    assert getattr(at, step)(given)
    assert at.steps == 1
