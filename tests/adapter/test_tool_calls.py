"""What is written into requests with tools: vLLM's own request classes and parser classes, our presets, xgrammar's real check."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from types import SimpleNamespace

import pytest

from tests.quiet import import_quietly, import_vllm
from tests.tools.stock import registered, small_tokenizer
from vllm_lazy_grammar import SettingsError
from vllm_lazy_grammar.settings import Settings
from vllm_lazy_grammar.tools.presets import catalogue

pytestmark = pytest.mark.vllm

DAYS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["days"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
MODEL = "a-model"


def tool(name="get_weather", parameters=DAYS, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


BOTH = [tool(), tool("get", EMPTY)]


class ModelConfig:
    model = MODEL
    is_diffusion = False

    def get_vocab_size(self):
        return 1000


@pytest.fixture(autouse=True)
def _vllm():
    import_vllm()


@pytest.fixture
def parsers():
    return import_quietly("vllm_lazy_grammar.adapter.tool_parsers")


@pytest.fixture
def frontend(monkeypatch):
    module = import_quietly("vllm_lazy_grammar.adapter.frontend")
    monkeypatch.setattr(module, "_front_ends", {})
    return module


@pytest.fixture
def checks(monkeypatch):
    """What the engine was asked to judge."""
    engine = import_quietly("vllm_lazy_grammar.engines.xgrammar")
    seen, real = [], engine.check
    monkeypatch.setattr(engine, "check", lambda key: (seen.append(key), real(key))[1])
    return seen


@pytest.fixture
def serving(parsers, frontend):
    """A parser class as a server has it, for `name` and these settings."""
    kept = []

    def make(name="hermes", family=None, reasoning=None, **settings):
        from vllm.parser.parser_manager import ParserManager

        model = ModelConfig()
        config = SimpleNamespace(backend="lazy", disable_any_whitespace=False)
        front_end = frontend._keep(Settings(**settings), model, config)
        kept.append(model)
        stock = ParserManager.get_parser(
            tool_parser_name=name, reasoning_parser_name=reasoning, enable_auto_tools=True, is_harmony=name == "openai"
        )
        make.front_end = front_end
        return parsers.with_calls(stock, name, front_end, small_tokenizer(family or name))

    return make


def chat(choice="auto", tools=BOTH, **options):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    asked = {} if tools is None else {"tools": tools, "tool_choice": choice}
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], **asked, **options)


def respond(choice="auto", tools=None, **options):
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    flat = [{"type": "function", **each["function"]} for each in BOTH] if tools is None else tools
    return ResponsesRequest(model="m", input="x", tools=flat, tool_choice=choice, **options)


def adjusted(parser, request, family="hermes"):
    parser(small_tokenizer(family), request.tools).adjust_request(request)
    return request


def named(name):
    return {"type": "function", "function": {"name": name}}


def options(request):
    found = {key.removeprefix("grammar_"): value for key, value in (request.vllm_xargs or {}).items()}
    found.pop("counted_as", None)
    return found


def tag(request):
    return json.loads(request.structured_outputs.structural_tag)["format"]


def refused(match=None):
    from vllm.exceptions import VLLMValidationError

    return pytest.raises(VLLMValidationError, match=match)


# -- the table of the specification ----------------------------------------------------------------------------------


def test_under_auto_prose_is_free_and_every_call_is_held_whether_the_tool_is_strict_or_not(serving):
    parser = serving()
    plain, strict = adjusted(parser, chat()), adjusted(parser, chat(tools=[tool(strict=True), tool("get", EMPTY)]))
    assert plain.structured_outputs == strict.structured_outputs
    assert options(plain) == options(strict)
    assert options(plain)["rearm"] == 1
    assert options(plain)["max_activations"] == 16
    assert options(plain)["triggers"][0] == "token:<tool_call>"
    assert not {"mandatory", "force_after"} & options(plain).keys()


@pytest.mark.parametrize("choice", ["required", named("get")])
def test_required_and_named_owe_a_call_after_so_much_prose(serving, choice):
    request = adjusted(serving(), chat(choice))
    assert options(request)["mandatory"] == 1
    assert options(request)["force_after"] == 128


@pytest.mark.parametrize(
    ("limits", "expected"),
    [({"max_tokens": 100}, 50), ({"max_completion_tokens": 60, "max_tokens": 400}, 30), ({"max_tokens": 900}, 128)],
)
def test_the_prose_before_a_call_is_half_of_the_budget_at_most(serving, limits, expected):
    assert options(adjusted(serving(), chat("required", **limits)))["force_after"] == expected


def test_the_prose_before_a_call_is_the_operators_to_set_and_zero_asks_for_the_call_at_once(serving):
    assert options(adjusted(serving(force_after=0), chat("required", max_tokens=100)))["force_after"] == 0


def test_a_named_function_is_the_only_one_that_can_be_called(serving):
    assert "get_weather" not in adjusted(serving(), chat(named("get"))).structured_outputs.structural_tag
    assert "get_weather" in adjusted(serving(), chat("required")).structured_outputs.structural_tag


@pytest.mark.parametrize("choice", ["auto", "required", named("get")])
def test_without_parallel_calls_there_is_one(serving, choice):
    assert options(adjusted(serving(), chat(choice, parallel_tool_calls=False)))["max_activations"] == 1


def test_the_number_of_calls_is_the_operators_to_set(serving):
    assert options(adjusted(serving(max_tool_calls=3), chat()))["max_activations"] == 3


def test_under_none_the_opener_leads_nowhere(serving):
    request = adjusted(serving(), chat("none"))
    assert request.structured_outputs.grammar == r'root ::= "\x00"'
    assert options(request)["triggers"][0] == "token:<tool_call>"
    assert "mandatory" not in options(request)


def test_under_none_nothing_is_written_where_the_operator_says_so(serving):
    request, before = chat("none"), chat("none")
    assert adjusted(serving(mask_opener_on_none=False), request).structured_outputs is None
    assert request.vllm_xargs == before.vllm_xargs


def test_under_none_a_format_of_the_answer_stands_alone(serving):
    request = adjusted(serving(), chat("none", response_format=FORMAT))
    assert request.response_format is not None
    assert request.structured_outputs is None
    assert request.vllm_xargs is None


def test_under_none_a_tool_that_could_not_be_called_is_no_mistake(serving):
    broken = tool("broken", {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}})
    assert adjusted(serving(), chat("none", [broken])).structured_outputs.grammar
    assert adjusted(serving("qwen3_coder"), chat("none", [tool("a<b")]), "qwen3_coder").structured_outputs.grammar


def test_under_auto_a_format_is_an_alternative_to_calls_and_there_is_no_other_prose(serving):
    request = adjusted(serving(), chat(response_format=FORMAT))
    assert tag(request)["type"] == "or"
    calls, answer = tag(request)["elements"]
    assert answer["json_schema"] == SCHEMA
    assert "get_weather" in json.dumps(calls)
    assert request.response_format is None
    assert options(request) == {"markers": ["<tool_call>", "</tool_call>"]}


@pytest.mark.parametrize("choice", ["required", named("get")])
def test_a_call_that_must_come_takes_the_place_of_a_format(serving, choice):
    request = adjusted(serving(), chat(choice, response_format=FORMAT))
    assert request.response_format is None
    assert "json_schema" in json.dumps(tag(request))
    assert SCHEMA["properties"] != tag(request).get("json_schema")
    assert options(request)["mandatory"] == 1


def test_a_request_without_tools_is_not_changed(serving):
    request, before = chat(tools=None), chat(tools=None)
    adjusted(serving(), request)
    assert request.model_dump(exclude={"request_id"}) == before.model_dump(exclude={"request_id"})


def test_an_adjusted_request_can_be_adjusted_again(serving):
    parser = serving()
    request = adjusted(parser, chat("required"))
    written = request.structured_outputs, request.vllm_xargs
    adjusted(parser, request)
    assert (request.structured_outputs, request.vllm_xargs) == written


def test_triggers_of_the_clients_own_and_calls_exclude_each_other(serving):
    own = {"structured_outputs": {"regex": "[0-9]"}, "vllm_xargs": {"grammar_triggers": ["word:x"]}}
    with refused("set tool_choice to none"):
        adjusted(serving(), chat(**own))
    request = adjusted(serving(), chat("none", **own))
    assert request.structured_outputs.regex == "[0-9]"
    assert request.vllm_xargs == own["vllm_xargs"]


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        ({"choice": "auto"}, "tools_auto"),
        ({"choice": "required"}, "tools_required"),
        ({"choice": named("get_weather")}, "tools_named"),
        ({"choice": "none"}, "tools_none"),
        ({"choice": "auto", "response_format": {"type": "json_object"}}, "tools_or_format"),
    ],
)
def test_the_kind_that_is_counted_is_written_down(serving, wanted, kind):
    assert adjusted(serving(), chat(**wanted)).vllm_xargs["grammar_counted_as"] == kind


def test_other_arguments_in_vllm_xargs_are_kept(serving):
    assert adjusted(serving(), chat(vllm_xargs={"wishes": [1]})).vllm_xargs["wishes"] == [1]


def test_a_request_with_tools_may_ask_for_a_trace(serving):
    assert adjusted(serving(), chat(vllm_xargs={"grammar_trace": 1})).vllm_xargs["grammar_trace"] == 1


# -- responses -------------------------------------------------------------------------------------------------------


def test_responses_are_served_as_chats_are(serving):
    parser = serving()
    response, same = (
        adjusted(parser, respond("required", max_output_tokens=100)),
        adjusted(parser, chat("required", max_tokens=100)),
    )
    assert response.structured_outputs == same.structured_outputs
    assert response.vllm_xargs == same.vllm_xargs
    assert response.text is None


def test_allowed_tools_are_those_that_can_be_called(serving):
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get"}]}
    request = adjusted(serving(), respond(allowed))
    assert "get_weather" not in request.structured_outputs.structural_tag
    assert options(request)["mandatory"] == 1


def test_calls_are_found_under_allowed_tools(serving):
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get"}]}
    parser, request = serving(), respond(allowed)
    text = 'So: <tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
    made = parser(small_tokenizer("hermes"), request.tools)
    _, content, calls = made.parse(text, request, enable_auto_tools=True)
    assert ([(call.name, call.arguments) for call in calls], content) == ([("get", "{}")], "So: ")


def test_a_custom_tool_and_a_namespace_are_functions_as_the_model_is_shown_them(serving):
    space = {
        "type": "namespace",
        "name": "home",
        "description": "",
        "tools": [{"type": "function", "name": "lamp", "parameters": EMPTY}],
    }
    request = adjusted(serving(), respond(tools=[{"type": "custom", "name": "shell"}, space]))
    written = request.structured_outputs.structural_tag
    assert "shell" in written
    assert "home__lamp" in written


def test_a_hosted_tool_can_not_be_chosen(serving):
    flat = [{"type": "function", **BOTH[0]["function"]}, {"type": "web_search_preview"}]
    with refused("only functions and allowed_tools can be chosen here"):
        adjusted(serving(), respond({"type": "web_search_preview"}, tools=flat))


# -- mistakes --------------------------------------------------------------------------------------------------------

BROKEN = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
NOWHERE = {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([tool(), tool("bad_one", BROKEN)], "'bad_one'"),
        ([tool("bad_one", NOWHERE)], "'bad_one'"),
        ([tool("bad_one", {"type": "array"})], "'bad_one'"),
        ([tool("twice"), tool("twice")], "'twice'"),
        ([tool(" ")], r"tools\[0\].function.name"),
        ([tool(f"t{i}", EMPTY) for i in range(2000)], "'t1024'"),
    ],
)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_mistake_in_a_tool_is_a_clients_error_that_names_it_and_the_request_is_as_it_was(
    serving, tools, says, choice
):
    request = chat(choice, tools)
    before = request.model_dump()
    with refused(says):
        adjusted(serving(), request)
    assert request.model_dump() == before


def test_a_tool_is_judged_once_for_all_requests_that_have_it(serving, checks):
    parser = serving()
    adjusted(parser, chat())
    assert len(checks) == 2
    adjusted(parser, chat("required", [tool("third", EMPTY), *BOTH]))
    assert len(checks) == 3
    adjusted(parser, chat(named("third"), [tool("third", EMPTY), *BOTH]))
    assert len(checks) == 3


def test_a_tool_that_was_refused_is_judged_again(serving, checks):
    parser = serving()
    for _ in range(2):
        with refused("'bad_one'"):
            adjusted(parser, chat(tools=[tool("bad_one", BROKEN)]))
    assert len(checks) == 2


def test_memory_of_requests_is_bounded_in_bytes(serving):
    parser = serving(tool_cache_mb=1)
    wide = {"type": "object", "properties": {"x" * 300_000: {"type": "integer"}}}
    for i in range(6):
        adjusted(parser, chat(tools=[tool(f"t{i}", wide)]))
    assert parser.lazy_calls._held <= 1 << 20
    assert len(parser.lazy_calls._made) == 1


def test_tools_are_judged_off_the_event_loop_before_anything_is_rendered(serving, frontend, checks, monkeypatch):
    parser, threads, judged = serving(), [], []
    make = parser.lazy_calls._remembered
    monkeypatch.setattr(
        parser.lazy_calls, "_remembered", lambda asked: (threads.append(threading.current_thread()), make(asked))[1]
    )
    server = SimpleNamespace(
        model_config=next(iter(frontend._front_ends.values()))._model_config(),
        online_renderer=SimpleNamespace(parser=parser),
        renderer=SimpleNamespace(tokenizer=small_tokenizer("hermes")),
    )
    request = chat("required")

    async def current(self, request):
        judged.append(len(checks))
        adjusted(parser, request)
        return "rendered"

    async def served():
        monkeypatch.setattr(frontend, "judge_off_loop", nothing)
        return await frontend.rendering(current)(server, request)

    async def nothing(*args):
        pass

    assert asyncio.run(served()) == "rendered"
    assert judged == [2]
    (thread,) = threads
    assert thread is not threading.main_thread()
    assert options(request)["mandatory"] == 1


def test_a_grammar_that_was_made_here_is_judged_by_us_alone(serving, checks):
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    request, seen = adjusted(serving(), chat("required")), []
    params = SamplingParams(structured_outputs=request.structured_outputs, extra_args=request.vllm_xargs)
    serving.front_end.check(params, small_tokenizer("hermes"), seen.append)
    assert not seen
    assert params.structured_outputs._backend == "lazy"
    other = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]"))
    serving.front_end.check(other, small_tokenizer("hermes"), seen.append)
    assert len(seen) == 1


# -- parser classes --------------------------------------------------------------------------------------------------


def served_parsers():
    return sorted(catalogue().parsers)


@pytest.mark.parametrize("name", served_parsers())
@pytest.mark.parametrize("choice", ["auto", "required", named("get_weather"), "none"])
def test_every_parser_with_a_preset_gets_its_grammar(serving, name, choice):
    if name not in registered():
        pytest.skip("this vLLM has no such parser")
    family = catalogue().parsers[name][0].family
    parser = serving(name, family)
    request = chat(choice)
    parser(small_tokenizer(family), request.tools).adjust_request(request)
    assert request.structured_outputs is not None
    assert ("mandatory" in options(request)) == (choice in ("required", named("get_weather")))
    assert parser(small_tokenizer(family), request.tools)._tool_parser.supports_required_and_named is False


def test_a_parser_without_a_preset_is_refused_with_those_that_have_one(parsers, frontend):
    front_end = frontend._keep(Settings(), ModelConfig(), None)
    with pytest.raises(SettingsError, match=r"--tool-call-parser.*qwen3_coder.*unknown_tool_parser"):
        parsers.with_calls(object, "nobodys", front_end, small_tokenizer("hermes"))


def test_or_left_as_vllm_has_it_with_one_warning(parsers, frontend, monkeypatch):
    front_end, warned = frontend._keep(Settings(unknown_tool_parser="leave"), ModelConfig(), None), []
    monkeypatch.setattr(parsers.logger, "warning", lambda *args: warned.append(args[0] % args[1:]))
    for _ in range(3):
        assert parsers.with_calls(object, "nobodys", front_end, small_tokenizer("hermes")) is object
    (line,) = warned
    assert "nobodys" in line


def test_a_folder_of_presets_serves_a_parser_of_the_operators_own(parsers, frontend, tmp_path):
    (tmp_path / "mine.toml").write_text(
        'family = "mine"\nparsers = ["my_parser"]\nsources = ["me"]\n[trigger]\nopeners = ["<call>"]\n'
        '[block]\nopen = ["<call>"]\nclose = ["</call>"]\n[call]\nforms = ["{name} {arguments}"]\n'
    )
    assert parsers.families(str(tmp_path)).parsers["my_parser"][0].family == "mine"
    assert parsers.families(str(tmp_path)).parsers["hermes"]


def test_a_folder_without_presets_is_a_mistake(parsers, tmp_path):
    with pytest.raises(SettingsError, match="presets_dir"):
        parsers.families(str(tmp_path / "nothing"))


def test_only_a_server_of_our_backend_gets_another_class(parsers, frontend):
    from vllm.parser.parser_manager import ParserManager

    stock = inspect.unwrap(ParserManager.get_parser.__func__)  # another test may have registered the plugin
    get = parsers.getting_parser(stock)
    model = ModelConfig()
    frontend._keep(Settings(), model, None)
    named_args = {"tool_parser_name": "hermes", "enable_auto_tools": True, "tokenizer": small_tokenizer("hermes")}
    assert not hasattr(get(ParserManager, model_name="another", **named_args), "lazy_calls")
    assert not hasattr(
        get(ParserManager, model_name=MODEL, **{**named_args, "enable_auto_tools": False}) or object, "lazy_calls"
    )
    assert not hasattr(get(ParserManager, model_name=MODEL, **{**named_args, "tokenizer": None}), "lazy_calls")
    found = get(ParserManager, model_name=MODEL, **named_args)
    assert found.lazy_calls.preset.family == "hermes"
    assert found.always_adjust_request


def test_parsers_see_the_types_behind_references(serving):
    parameters = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    request = chat(tools=[tool("count", parameters)])
    made = serving("qwen3_coder")(small_tokenizer("qwen3_coder"), request.tools)
    text = "<tool_call>\n<function=count>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    _, _, calls = made.parse(text, request, enable_auto_tools=True)
    assert [json.loads(call.arguments) for call in calls] == [{"n": 3}]
    assert request.tools[0].function.parameters == parameters
