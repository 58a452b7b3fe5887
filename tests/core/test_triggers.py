"""What a request may ask for, what is refused, and what the compiled form exposes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lazy_grammar.core.triggers import Forcible, Trigger, Triggers, TriggerSpec
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.errors import RequestError

VOCABULARY = Vocabulary([b"a", b"<t>", b"</s>", b"7"], 6, added={"<t>": 1, "</s>": 2}, special_ids=[2], eos_ids=[2])
STOP_ID = 2


def parse(*triggers, **options):
    return TriggerSpec.parse({"grammar_triggers": list(triggers), **options})


def compiled(*triggers, **options):
    return Triggers.compile(parse(*triggers), VOCABULARY, stop_ids={STOP_ID}, **options)


def refused(call, *args, **kwargs):
    with pytest.raises(RequestError) as caught:
        call(*args, **kwargs)
    return caught.value


# Forms.


@pytest.mark.parametrize(
    "written", ["token:151657", "token:<tool_call>", "word:<tool_call>", r"pattern:\s(<function=)", "pattern_full:a:b"]
)
def test_a_trigger_prints_as_it_is_written(written):
    (trigger,) = parse(written).triggers
    assert str(trigger) == written
    assert trigger == Trigger(*written.split(":", 1))


def test_two_triggers_are_equal_by_kind_and_source():
    assert Trigger("word", "a") == Trigger("word", "a")
    assert len({Trigger("word", "a"), Trigger("word", "b"), Trigger("pattern", "a"), Trigger("word", "a")}) == 3


@pytest.mark.parametrize(
    ("written", "trigger"),
    [
        ({"type": "word", "value": "<t>"}, Trigger("word", "<t>")),
        ({"type": 1, "value": "<t>"}, Trigger("word", "<t>")),
        ({"type": 2, "value": "a+"}, Trigger("pattern", "a+")),
        ({"type": 3.0, "value": "a+"}, Trigger("pattern_full", "a+")),
        ({"type": 0, "value": "<t>", "token": 7}, Trigger("token", "7")),
        ({"type": "token", "value": "<t>"}, Trigger("token", "<t>")),
    ],
)
def test_an_object_of_llama_cpp_is_taken_as_json_text_in_a_list_of_them_and_in_one_text(written, trigger):
    assert parse(json.dumps(written)).triggers == (trigger,)
    assert parse(written).triggers == (trigger,)
    one_text = json.dumps([written, "word:b"])
    assert TriggerSpec.parse({"grammar_triggers": one_text}).triggers == (trigger, Trigger("word", "b"))


def test_of_a_repeated_trigger_one_is_kept_where_it_came_first():
    assert [str(trigger) for trigger in parse("word:b", "word:a", "word:b").triggers] == ["word:b", "word:a"]


@pytest.mark.parametrize(
    "item",
    ["<t>", "words:a", "Word:a", ":a", 7, ["word:a"], "word:", "token:", "pattern:", "pattern_full:", "word:\ud800",
     '{"type": "word"', '{"type": 4, "value": "a"}', '{"type": true, "value": "a"}', '{"type": "word"}', '{"type": [], "value": "a"}',
     '{"type": "word", "value": ""}', '{"type": "word", "value": "a", "at_start": true}', '{"type": 0, "token": "7"}', "{" * 100_000],
)  # fmt: skip
def test_what_is_no_trigger_is_refused_by_its_place_in_the_list(item):
    error = refused(parse, "word:a", item)
    assert error.field == "vllm_xargs.grammar_triggers[1]"


@pytest.mark.parametrize("value", [7, "[", '[{"type": 9}]', {"type": "word", "value": "a"}, "<t>"])
def test_what_is_no_list_of_triggers_is_refused(value):
    assert refused(TriggerSpec.parse, {"grammar_triggers": value}).field.startswith("vllm_xargs.grammar_triggers")


@pytest.mark.parametrize("value", [[], (), "[]", " [ ] "])
def test_a_lazy_request_with_no_trigger_is_refused(value):
    assert "never start" in refused(TriggerSpec.parse, {"grammar_triggers": value}).reason


# Options.


def test_the_defaults_are_those_of_the_spec():
    spec = parse("word:a")
    assert (spec.start, spec.on_reject) == ("trigger", "forbid")
    assert (spec.mandatory, spec.rearm, spec.force_after, spec.max_activations) == (False, False, None, None)


@pytest.mark.parametrize(("value", "means"), [(1, True), (0, False), (1.0, True), ("1", True), ("true", True), ("True", True), ("false", False), ("0", False), (True, True), (None, False)])  # fmt: skip
def test_a_boolean_is_0_or_1_or_true_or_false(value, means):
    assert parse("word:a", grammar_rearm=value).rearm is means


@pytest.mark.parametrize("value", [2, -1, 0.5, "yes", "", [1], float("nan")])
def test_anything_else_is_no_boolean(value):
    error = refused(parse, "word:a", grammar_rearm=value)
    assert (error.field, error.value) == ("vllm_xargs.grammar_rearm", value)


@pytest.mark.parametrize("value", [16, 16.0, "16"])
def test_a_number_may_arrive_as_float_or_digits(value):
    assert parse("word:a", grammar_rearm=1, grammar_max_activations=value).max_activations == 16
    assert parse("word:a", grammar_mandatory=1, grammar_force_after=value).force_after == 16


@pytest.mark.parametrize("value", [0, -1, 1.5, "x", "", "1" * 5000, True, [3], float("inf"), float("nan")])
def test_anything_else_is_no_number_of_activations(value):
    error = refused(parse, "word:a", grammar_rearm=1, grammar_max_activations=value)
    assert error.field == "vllm_xargs.grammar_max_activations"


def test_forcing_at_once_is_a_number_too():
    assert parse("word:a", grammar_mandatory=1, grammar_force_after=0).force_after == 0


@pytest.mark.parametrize("key", ["grammar_start", "grammar_on_reject"])
def test_a_word_that_is_none_of_the_choices_is_refused_with_the_choices(key):
    error = refused(parse, "word:a", **{key: "never"})
    assert error.field == f"vllm_xargs.{key}"
    assert "this is one of" in error.reason


def test_a_key_of_ours_that_does_not_exist_is_refused_with_what_was_meant():
    error = refused(parse, "word:a", grammar_trigers=1)
    assert error.field == "vllm_xargs.grammar_trigers"
    assert "grammar_triggers?" in error.reason


def test_keys_of_others_are_ignored_and_none_of_ours_is_no_lazy_request():
    assert TriggerSpec.parse({"speed": 3, "grammar": "root"}) is None
    assert parse("word:a", speed=3) == parse("word:a")


def test_options_without_triggers_are_refused():
    assert refused(TriggerSpec.parse, {"grammar_rearm": 1}).field == "vllm_xargs.grammar_rearm"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"grammar_max_activations": 2}, "grammar_max_activations"),
        ({"grammar_max_activations": 2, "grammar_rearm": 0}, "grammar_max_activations"),
        ({"grammar_force_after": 2}, "grammar_force_after"),
        ({"grammar_force_after": 2, "grammar_mandatory": "false"}, "grammar_force_after"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, field):
    assert refused(parse, "word:a", **options).field == f"vllm_xargs.{field}"


def test_forcing_needs_a_text_so_only_patterns_are_refused():
    options = {"grammar_mandatory": 1, "grammar_force_after": 5}
    assert refused(parse, "pattern:a+", "pattern_full:b+", **options).field == "vllm_xargs.grammar_force_after"
    assert parse("pattern:a+", "token:7", **options).force_after == 5


_texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
_specs = st.builds(
    TriggerSpec,
    triggers=st.lists(
        st.builds(Trigger, st.sampled_from(["token", "word", "pattern", "pattern_full"]), _texts), max_size=3
    ).map(lambda found: (Trigger("word", "a"), *found)),
    start=st.sampled_from(["trigger", "after"]),
    mandatory=st.just(True),
    force_after=st.none() | st.integers(0, 99),
    rearm=st.just(True),
    max_activations=st.none() | st.integers(1, 99),
    on_reject=st.sampled_from(["forbid", "disarm", "error"]),
)


@given(_specs)
def test_what_a_spec_writes_parses_to_it(spec):
    written = spec.as_xargs()
    assert TriggerSpec.parse(written) == spec
    assert TriggerSpec.parse(json.loads(json.dumps(written))) == spec


def test_defaults_are_not_written():
    assert parse("word:a", grammar_rearm=1).as_xargs() == {"grammar_triggers": ["word:a"], "grammar_rearm": 1}


# What needs the vocabulary.


def test_a_token_is_named_by_its_id_or_by_a_text_that_is_one_token():
    assert compiled("token:1").token_ids == {1}
    assert compiled("token:<t>").token_ids == {1}


def test_digits_are_always_an_id_even_where_a_token_spells_them():
    assert refused(compiled, "token:7").reason == "the vocabulary has the ids 0 to 5"
    assert compiled("token:0000000000000000000003").token_ids == {3}


@pytest.mark.parametrize(
    "written", ["token:<tool", "token:6", "token:99999999999999999999999", "token:-1", "token:2", "token:</s>"]
)
def test_a_token_that_is_not_one_that_does_not_exist_or_that_ends_the_turn_is_refused(written):
    error = refused(compiled, "word:a", written)
    assert (error.field, error.value) == ("vllm_xargs.grammar_triggers[1]", written)


def test_of_two_names_of_one_token_the_first_counts():
    triggers = compiled("token:<t>", "token:1")
    assert dict(triggers.tokens) == {1: 0}


@pytest.mark.parametrize(
    ("written", "says"),
    [("pattern:(", "does not compile: missing )"), ("pattern:a**", "multiple repeat"), ("pattern:a*", "empty text"), ("pattern:^", "empty text"),
     ("pattern:(?!a)", "empty text"), ("pattern_full:a?", "empty text"), ("pattern:^a?$", "empty text"), (r"pattern:[\s\S]*?", "empty text")],
)  # fmt: skip
def test_a_pattern_that_does_not_compile_or_matches_the_empty_text_is_refused(written, says):
    error = refused(compiled, "word:a", written)
    assert error.field == "vllm_xargs.grammar_triggers[1]"
    assert says in error.reason


@pytest.mark.parametrize(
    "source",
    ["(" * 2000 + "a" + ")" * 2000, "(?:" * 65 + "a" + ")" * 65, "a" * 2001, "(?:(?:a{1000}){1000}){1000}", "a{99999}", "(?x)" + "(a#)\n" * 70,
     "((((a{1,9}){1,99}){1,99}){1,129}){1,129}"],
)  # fmt: skip
def test_a_pattern_too_long_too_deep_or_too_large_is_refused_before_it_is_compiled(source):
    assert any(word in refused(compiled, f"pattern:{source}").reason for word in ("characters", "deep", "large"))


def test_the_limits_of_patterns_can_be_set():
    assert "10 characters" in refused(compiled, "pattern:" + "b" * 11 + "+", max_pattern_length=10).reason
    assert "1 deep" in refused(compiled, "pattern:((b))", max_depth=1).reason
    assert compiled("pattern:" + "(" * 64 + "b[c]" + ")" * 64).has_patterns


@pytest.mark.parametrize("source", ["a(?R)?b", "(a)(?1)", "(?<n>a)(?&n)", "(?P<n>a)(?P>n)", "(?r)ab", "(?V1)[a--b]"])
def test_patterns_that_call_themselves_search_backwards_or_need_v1_are_refused(source):
    assert "not supported" in refused(compiled, f"pattern:{source}").reason


def test_too_many_triggers_patterns_or_bytes_of_words_are_refused():
    assert refused(parse, *(f"word:{i}" for i in range(1025))).field == "vllm_xargs.grammar_triggers"
    assert refused(compiled, *(f"pattern:a+{i}" for i in range(129))).reason == "at most 128 patterns are taken"
    assert "32768 bytes" in refused(compiled, "word:" + "a" * 32768).reason


# What is exposed.


def test_words_and_literals_behind_a_look_behind_need_no_pattern_engine():
    triggers = compiled(
        "word:<a", "pattern:(?<![`\"'])<tool_call>", r"pattern:(?<=^|\n)\[T\]", r"pattern:[\s\S]*?(<u>)", "token:1"
    )
    assert triggers.literals.texts == (b"<a", b"<tool_call>", b"[T]", b"<u>")
    assert triggers.literal_triggers == (0, 1, 2, 3)
    assert not triggers.has_patterns
    assert not triggers.units


@pytest.mark.parametrize(
    "source", ["<t>+", "(?i)<t>", "(?<=a+)<t>", r"(?<=\b)<t>", "<t>(?=x)", "a|b", r"[\s\S]*?<t>", "(a)(b)", "^a", "a$", r"\d", "(?<!a(b))c", "a{2}"]
)  # fmt: skip
def test_every_other_pattern_stays_a_pattern(source):
    triggers = compiled(f"pattern:{source}")
    assert triggers.has_patterns
    assert triggers.literals.texts == ()


@pytest.mark.parametrize(
    ("source", "text"),
    [(r"\<f\=", b"<f="), (r"a\.b", b"a.b"), (r"\x3ct>", b"<t>"), ("\\u003ct>", b"<t>"), (r"\n\t", b"\n\t"), ("(?:<t>)", b"<t>"), ("(?<n><t>)", b"<t>"), ("é", "é".encode())],
)  # fmt: skip
def test_escapes_in_a_literal_pattern_are_what_they_stand_for(source, text):
    assert compiled(f"pattern:{source}").literals.texts == (text,)


def test_whether_a_literal_counts_is_decided_by_the_text_before_it():
    triggers = compiled("word:x", "pattern:(?<![`é])<t>", r"pattern:(?<=^|\n)<u>")
    before = [b"", b"a", b"`", "é".encode(), b"a\n", b"\xff"]
    assert [triggers.lookbehind_holds(0, text) for text in before] == [True] * 6
    assert [triggers.lookbehind_holds(1, text) for text in before] == [True, True, False, False, True, True]
    assert [triggers.lookbehind_holds(2, text) for text in before] == [True, False, False, False, True, False]
    cut = ("é" * 99).encode()[-triggers.lookbehind :]
    assert not triggers.lookbehind_holds(2, cut)


def test_only_words_and_tokens_can_be_forced():
    triggers = compiled("pattern:a+", "word:<tool", "token:<t>", "pattern:lit")
    assert triggers.forcible == (Forcible(1, b"<tool", None), Forcible(2, b"<t>", 1))


def test_without_a_look_behind_nothing_before_a_literal_is_needed():
    assert compiled("word:a", "pattern:b").lookbehind == 0


def test_plain_patterns_are_searched_for_together_and_open_ended_ones_alone():
    triggers = compiled(
        r"pattern:\s(<a)", r"pattern:b[\s\S]*c", r"pattern:<c>\s*x", "pattern:^d$", "pattern:(?i)e", r"pattern:(f)\1"
    )
    groups = [[probe.trigger for probe in unit.probes] for unit in triggers.units]
    assert groups == [[0, 2], [1], [3], [4], [5]]
