"""tools and tool_choice -> triggers and grammar."""

from __future__ import annotations

import json

import pytest

from tests.tools import walking
from tests.tools.cases import ANY, choice_for, preset_of, tokens_of, vocabulary_of
from tests.tools.rendering import answer_text
from vllm_lazy_grammar.core.triggers import Trigger, Triggers
from vllm_lazy_grammar.errors import RequestError
from vllm_lazy_grammar.tools.choice import MAX_TOOLS, CallSettings, Wanted, beside, choose, read_choice, read_tools
from vllm_lazy_grammar.tools.presets import catalogue

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}


def tool(name, parameters=None):
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("get", CITY), tool("get_weather", CITY), tool('a.b-c"é', CITY)]


def takes(choice, text):
    matcher = walking.matcher(choice.grammar)
    return matcher.accept_string(text) and matcher.is_completed()


def begins(choice, text):
    return walking.matcher(choice.grammar).accept_string(text)


def call(name, arguments):
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n</tool_call>'


GOOD = '{"city": "Paris", "days": 3}'


# -- auto, required, named, none, allowed -----------------------------------------------------------------------------


def test_auto_lets_prose_pass_and_waits_anew_behind_each_call():
    spec = choice_for("hermes", TOOLS).triggers
    assert (spec.mandatory, spec.rearm, spec.max_activations, spec.on_reject) == (False, True, 16, "forbid")


@pytest.mark.parametrize("wanted", [Wanted("required"), Wanted("named", ("get",))])
def test_required_and_named_must_call_after_bounded_prose(wanted):
    spec = choice_for("hermes", TOOLS, wanted).triggers
    assert spec.mandatory
    assert spec.force_after == 128
    assert choice_for("hermes", TOOLS, wanted, settings=CallSettings(force_after=0)).triggers.force_after == 0


def test_named_allows_that_function_only():
    choice = choice_for("hermes", TOOLS, Wanted("named", ("get",)))
    assert takes(choice, call("get", GOOD))
    assert not begins(choice, '<tool_call>\n{"name": "get_')


def test_without_parallel_calls_one_is_all():
    assert choice_for("hermes", TOOLS, parallel=False).triggers.max_activations == 1
    listed = choice_for("jamba", TOOLS, parallel=False)
    one = f'<tool_calls>[{{"name": "get", "arguments": {GOOD}}}'
    assert takes(listed, one + "]</tool_calls>")
    assert not begins(listed, one + ", ")


def test_a_list_of_calls_is_bounded_too():
    choice = choice_for("jamba", TOOLS, settings=CallSettings(max_calls=2))
    entry = f'{{"name": "get", "arguments": {GOOD}}}'
    assert takes(choice, f"<tool_calls>[{entry}, {entry}]</tool_calls>")
    assert not begins(choice, f"<tool_calls>[{entry}, {entry},")


def test_none_masks_the_opener_and_nothing_else():
    choice = choice_for("hermes", TOOLS, Wanted("none"))
    assert choice.triggers.on_reject == "forbid"
    assert not choice.triggers.mandatory
    assert not begins(choice, "<tool_call>")
    assert choice_for("hermes", TOOLS, Wanted("none"), settings=CallSettings(guard_none=False)) is None


def test_allowed_tools_are_as_auto_or_required_over_those_tools():
    tools = read_tools(TOOLS)
    value = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "get"}}]},
    }
    wanted = read_choice(value, tools)
    assert wanted == Wanted("required", ("get",))
    flat = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}
    assert read_choice(flat, tools) == Wanted("auto", ("get_weather",))
    assert not begins(choice_for("hermes", TOOLS, wanted), '<tool_call>\n{"name": "get_')


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, Wanted("auto")),
        ("required", Wanted("required")),
        ({"type": "function", "function": {"name": "get"}}, Wanted("named", ("get",))),
        ({"type": "function", "name": "get"}, Wanted("named", ("get",))),
    ],
)
def test_tool_choice_is_read_in_the_shapes_of_both_apis(value, wanted):
    assert read_choice(value, read_tools(TOOLS)) == wanted


@pytest.mark.parametrize(
    "value", ["sometimes", 3, {"type": "mcp"}, {"type": "function"}, {"type": "allowed_tools", "mode": "never"}]
)
def test_a_tool_choice_that_says_nothing_known_is_refused(value):
    with pytest.raises(RequestError, match="tool_choice"):
        read_choice(value, read_tools(TOOLS))


def test_a_choice_of_a_tool_that_is_not_there_names_it():
    with pytest.raises(RequestError, match="get_time"):
        read_choice({"type": "function", "function": {"name": "get_time"}}, read_tools(TOOLS))
    with pytest.raises(RequestError, match="no tool to call"):
        read_choice("required", ())


def test_equal_requests_give_equal_keys_so_that_they_are_compiled_once():
    assert choice_for("glm47", TOOLS[:2]) == choice_for("glm47", json.loads(json.dumps(TOOLS[:2])))


# -- arguments obey the schema ----------------------------------------------------------------------------------------


def test_c1_the_call_obeys_the_schema_without_strict():
    choice = choice_for("hermes", TOOLS)
    assert begins(choice, '<tool_call>\n{"name": "get", "arguments": {"city": "Paris", "days": 3')
    assert not begins(choice, '<tool_call>\n{"name": "get", "arguments": {"city": "Paris", "days": "')
    assert not takes(choice, call("get", '{"city": "Paris"}'))


@pytest.mark.parametrize("name", ["get", "get_weather", 'a.b-c"é'])
def test_c7_names_that_begin_each_other_or_hold_odd_characters_are_called_exactly(name):
    choice = choice_for("hermes", TOOLS)
    assert takes(choice, call(name, GOOD))
    assert not begins(choice, '<tool_call>\n{"name": "get_w"')
    assert not begins(choice, '<tool_call>\n{"name": "a.b-c"')


@pytest.mark.parametrize(
    "family", ["hermes", "qwen3_coder", "glm47", "kimi_k2", "lfm2", "deepseek_v32", "gemma4", "minimax_m2", "harmony"]
)
@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_w2_a_tool_without_parameters_takes_the_empty_object_and_the_end(family, parameters):
    preset = preset_of(family)
    choice = choice_for(family, [tool("now", parameters)])
    text = answer_text(preset, [("now", {})], {"now": {"type": "object", "properties": {}}})
    assert takes(choice, text)
    for extra in ("x", '"', "<parameter=", "1"):
        at = text.index("now") + len("now")
        closed = text[: text.rindex(preset.block.close[0])] if preset.block.close[0] else text
        assert not begins(choice, closed + extra) or len(closed) < at


def test_arguments_are_spelled_as_the_family_was_trained():
    choice = choice_for("hermes", TOOLS)
    assert takes(choice, call("get", '{"city": "a", "days": 1}'))
    assert not takes(choice, call("get", '{"city":"a","days":1}'))
    assert not takes(choice, call("get", '{"city": "a",  "days": 1}'))


def test_a_setting_allows_any_blanks():
    choice = choice_for("hermes", TOOLS, settings=ANY)
    assert takes(choice, call("get", '{"city":"a",\n "days" : 1}'))


def test_references_and_definitions_are_followed_in_every_way_of_writing():
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/point"}},
        "required": ["a"],
        "$defs": {
            "point": {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x"]},
            "n": {"type": "integer"},
        },
    }
    assert takes(choice_for("hermes", [tool("f", schema)]), call("f", '{"a": {"x": 1}}'))
    xml = choice_for("qwen3_coder", [tool("f", schema)])
    body = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert takes(xml, body.format('{"x": 1}'))
    assert not takes(xml, body.format('{"x": "1"}'))
    nested = choice_for("gemma4", [tool("f", schema)])
    assert takes(nested, "<|tool_call>call:f{a:{x:1}}<tool_call|>")


def test_a_schema_without_end_is_refused_where_a_format_writes_it_out_and_served_elsewhere():
    schema = {
        "type": "object",
        "properties": {"t": {"$ref": "#/$defs/t"}},
        "$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}},
    }
    assert takes(choice_for("hermes", [tool("f", schema)]), call("f", '{"t": {"t": {}}}'))
    with pytest.raises(RequestError, match=r"'f'.*without end"):
        choice_for("gemma4", [tool("f", schema)])


def test_optional_arguments_may_be_left_out_wherever_they_stand():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}},
    }
    choice = choice_for("lfm2", [tool("f", schema)])
    for body in ("", "a=1", "b=1", "c=1", "a=1, b=2", "a=1, c=2", "b=1, c=2", "a=1, b=2, c=3"):
        assert takes(choice, f"<|tool_call_start|>[f({body})]<|tool_call_end|>"), body
    for body in (", a=1", "a=1,", "b=1, a=2", "a=1b=2"):
        assert not takes(choice, f"<|tool_call_start|>[f({body})]<|tool_call_end|>"), body
    required = choice_for("lfm2", [tool("f", {**schema, "required": ["b"]})])
    assert takes(required, "<|tool_call_start|>[f(a=1, b=2)]<|tool_call_end|>")
    assert takes(required, "<|tool_call_start|>[f(b=2, c=3)]<|tool_call_end|>")
    assert not takes(required, "<|tool_call_start|>[f(a=1, c=3)]<|tool_call_end|>")


def test_bare_texts_obey_what_the_schema_says_of_them():
    properties = {
        "e": {"enum": ["one", 2, None]},
        "d": {"type": "string", "format": "date"},
        "s": {"type": "string", "minLength": 2, "maxLength": 3},
    }
    choice = choice_for("glm47", [tool("f", {"type": "object", "properties": properties})])

    def with_value(key, value):
        return takes(choice, f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>")

    assert [with_value("e", v) for v in ("one", "2", "null", "3", '"one"')] == [True, True, True, False, False]
    assert [with_value("d", v) for v in ("2024-02-01", "2024-13-01", "x")] == [True, False, False]
    assert [with_value("s", v) for v in ("a", "ab", "abc", "abcd")] == [False, True, True, False]


# -- errors name the tool ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([{"type": "function", "function": {}}], "needs a name"),
        ([{"type": "function", "function": {"name": " "}}], "needs a name"),
        ([tool("twice"), tool("twice")], "'twice'"),
        ([tool("odd", {"type": "array"})], "'odd'.*schema of an object"),
        ([tool("odd", [1])], "'odd'.*no JSON schema"),
        ([tool("odd", {"type": "object", "x": float("nan")})], "'odd'.*no JSON"),
        (["get"], "a tool is a function"),
        ([tool(f"t{i}") for i in range(MAX_TOOLS + 1)], f"'t{MAX_TOOLS}'"),
    ],
)
def test_a_tool_that_can_not_be_read_is_refused_by_name(tools, said):
    with pytest.raises(RequestError, match=said):
        read_tools(tools)


@pytest.mark.parametrize(
    ("family", "name", "parameters", "said"),
    [
        ("lfm2", "f(x)", None, r"'f\(x\)'.*'lfm2'"),
        ("pythonic", "f", {"type": "object", "properties": {"from": {"type": "string"}}}, "'f'.*'from'"),
        ("glm47", "f", {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, "'f'.*points nowhere"),
        ("glm47", "f", {"type": "object", "patternProperties": {"^x": {}}}, "'f'.*patternProperties"),
        ("glm47", "f", {"type": "object", "properties": {"a": {"const": "</arg_value>"}}}, "'f'.*</arg_value>"),
    ],
)
def test_a_tool_that_the_family_can_not_write_is_refused_by_name(family, name, parameters, said):
    with pytest.raises(RequestError, match=said):
        choice_for(family, [tool(name, parameters)])


# -- triggers ---------------------------------------------------------------------------------------------------------


def test_an_opener_that_is_a_token_fires_by_id_and_its_text_unless_quoted():
    triggers = choice_for("hermes", TOOLS).triggers.triggers
    assert triggers[0] == Trigger("token", "<tool_call>")
    assert [trigger.kind for trigger in triggers] == ["token", "pattern"]


def test_where_a_call_must_come_there_is_a_text_to_force_in_every_family():
    for family in ("hermes", "llama3_json", "pythonic", "harmony", "xlam", "phi4_mini_json", "muse"):
        preset = preset_of(family)
        choice = choose(read_tools([tool("get", CITY)]), Wanted("required"), preset, is_token=lambda _: False)
        forcible = Triggers.compile(choice.triggers, walking.byte_vocabulary(), stop_ids=()).forcible
        assert forcible, family
        if not preset.trigger.anchored:
            assert any(begins(choice, text.data.decode()) for text in forcible), family


def test_a_family_whose_parser_reads_calls_at_the_start_only_is_forced_at_once():
    assert choice_for("pythonic", [tool("get", CITY)], Wanted("required")).triggers.force_after == 0


def test_many_names_are_spread_over_patterns_of_bounded_length():
    tools = [tool(f"function_number_{i}") for i in range(400)]
    triggers = choice_for("pythonic", tools).triggers.triggers
    assert 1 < len(triggers) < 20
    vocabulary = vocabulary_of("pythonic")
    walk = walking.follow(choice_for("pythonic", tools), vocabulary, tokens_of(vocabulary, "[function_number_399()]"))
    assert walk.starts == [0]
    assert walk.complete


def test_t7_prose_call_prose_call_are_free_and_held_in_turn():
    vocabulary = vocabulary_of("hermes")
    text = f"Hm, {{ok}}. {call('get', GOOD)} then {call('get_weather', GOOD)} done"
    walk = walking.follow(choice_for("hermes", TOOLS), vocabulary, tokens_of(vocabulary, text))
    assert len(walk.starts) == 2
    assert walk.refused is None


def test_t10_functionary_tells_prose_from_a_call_by_what_follows_the_arrows():
    tools, vocabulary = [tool("get_weather", CITY)], walking.byte_vocabulary()
    choice = choose(read_tools(tools), Wanted(), preset_of("functionary_v3_2"), is_token=lambda _: False)
    prose = walking.follow(choice, vocabulary, tokens_of(vocabulary, ">>>all\nHello, all of you"))
    assert prose.starts == []
    called = walking.follow(choice, vocabulary, tokens_of(vocabulary, f">>>all\nHello\n>>>get_weather\n{GOOD}"))
    assert called.starts == [len(">>>all\nHello\n")]
    assert called.complete


QUOTED = [
    "Write `{}` to call.",
    'It says "{}" there.',
    "The marker '{}' opens it.",
    "See `{}foo`.",
    'He typed "{} and so on"',
    "Two of them: `{0}` and '{0}'.",
    'Not "{0}", and not `{0}` either.',
    "- `{}`\n- next",
    "('{}')",
    "é `{}` 日本",
]
LEADS = ["", "x ", "Well, ", "Hm.\n", "1. "]


def is_quotable(preset):
    return preset.trigger.openers and not preset.trigger.quoted


@pytest.mark.parametrize("family", sorted(name for name, each in catalogue().families.items() if is_quotable(each)))
def test_t11_a_quoted_marker_that_is_no_token_is_prose(family):
    preset, vocabulary = preset_of(family), walking.byte_vocabulary()
    choice = choose(read_tools([tool("get", CITY)]), Wanted(), preset, is_token=lambda _: False)
    for opener in preset.trigger.openers:
        texts = [lead + quoted.format(opener) + " More prose." for lead in LEADS for quoted in QUOTED]
        assert len(texts) == 50
        for text in texts:
            assert walking.follow(choice, vocabulary, tokens_of(vocabulary, text)).starts == [], text
        plain = walking.follow(choice, vocabulary, tokens_of(vocabulary, f"So: {opener}"))
        assert plain.starts == [len("So: ")]


# -- beside a format -------------------------------------------------------------------------------------------------

NUMBER = json.dumps({"type": "regex", "pattern": "[0-9]+"})


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("42", True),
        (call("get", GOOD), True),
        (call("get", GOOD) + "\n" + call("get_weather", GOOD), True),
        (call("get", GOOD) + call("get", GOOD), True),
        (call("get", GOOD) * 3, False),
        ("42" + call("get", GOOD), False),
        (call("get", GOOD) + "42", False),
        ("so " + call("get", GOOD), False),
    ],
)
def test_beside_a_format_there_are_calls_or_an_answer_in_it_and_nothing_else(text, whole):
    key = beside(NUMBER, choice_for("hermes", TOOLS).grammar, 2)
    matcher = walking.matcher(key)
    assert (matcher.accept_string(text) and matcher.is_completed()) == whole


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ('{"name": "get", "parameters": {"city": "Paris", "days": 3}}', True),
        ('{"name": "Ann", "age": 7}', True),
        ('{"name": "get", "age": 7}', True),
        ('{"name": "get", "parameters": {"city": "Paris"}}', False),
        ('{"name": "Ann", "parameters": {"city": "Paris", "days": 3}}', False),
        ("so", False),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 7, 100])
def test_a_call_and_a_format_that_both_begin_with_a_brace_are_told_apart_by_what_follows(text, whole, step):
    person = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    other = json.dumps({"type": "json_schema", "json_schema": person})
    matcher = walking.matcher(beside(other, choice_for("llama3_json", [tool("get", CITY)]).grammar, 1))
    parts = [text[i : i + step] for i in range(0, len(text), step)]
    assert (all(matcher.accept_string(part) for part in parts) and matcher.is_completed()) == whole


def test_under_none_a_name_that_the_format_can_not_carry_is_left_out():
    assert choice_for("qwen3_coder", [tool("a<b"), tool("get")], Wanted("none")) is not None


@pytest.mark.parametrize("family", ["hermes", "granite4", "ernie45"])
@pytest.mark.parametrize(("marks", "inside"), [((), False), (("<tool_call>", "</tool_call>"), True)])
def test_where_a_calls_end_is_no_token_no_string_holds_it(family, marks, inside):
    choice = choose(read_tools(TOOLS[:1]), Wanted(), preset_of(family), is_token=marks.__contains__)
    for said, fits in (("</tool_call>", inside), ("<b>to</b></td></table>", True), ("< /tool_call>", True)):
        assert takes(choice, call("get", f'{{"city": "{said}", "days": 3}}')) is fits, said
