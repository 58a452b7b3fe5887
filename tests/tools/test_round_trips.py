"""Grammar and stock parser agree, family by family: what one writes, the other reads."""

from __future__ import annotations

import random

import jsonschema
import pytest

from tests.serving.models import demo_model
from tests.tools import faults, reading, stock, walking
from tests.tools.cases import choice_for, closers, drawn, placed, preset_of, tokens_of, vocabulary_of, with_types
from tests.tools.rendering import answer_text
from vllm_lazy_grammar.tools.choice import read_tools
from vllm_lazy_grammar.tools.presets import catalogue

pytestmark = pytest.mark.slow

FAMILIES = sorted(name for name, preset in catalogue().families.items() if preset.parsers)
SERVED = [(name, parser) for name in FAMILIES for parser in catalogue().families[name].parsers]
OTHERS = [pair for pair in SERVED if pair[0] != "harmony"]
SEEDS = range(16)
FEW = range(6)
LEAST = 3
"""Random calls of a family that are read back, at least."""


def tokenizer_of(family):
    """A small one; gpt-oss's own, whose parser knows no other."""
    return stock.harmony_tokenizer() if family == "harmony" else stock.small_tokenizer(family)


def rng(seed):
    return random.Random(seed)  # noqa: S311 - the same in every run


def parsed_here(parser):
    if parser not in stock.registered():
        pytest.skip(f"this vLLM has no parser {parser}")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_grammar_takes_every_call_that_is_written_as_the_family_writes(family):
    vocabulary = vocabulary_of(family)
    seen = 0
    for seed in FEW:
        if (found := drawn(family, seed)) is None:
            continue
        tools, case = found
        walk = walking.follow(choice_for(family, tools), vocabulary, tokens_of(vocabulary, case.text))
        assert walk.refused is None, case.text
        assert walk.starts[0] == len(case.before.encode()), case.text
        seen += 1
    assert seen > len(FEW) // 2


@pytest.mark.parametrize("family", FAMILIES)
def test_random_walks_through_the_grammar_end_in_calls_it_takes(family):
    ended = 0
    for seed in FEW:
        if (found := drawn(family, seed)) is None:
            continue
        choice = choice_for(family, found[0])
        text = walking.random_call(choice, rng(seed), closers(preset_of(family)))
        if text is None:
            continue
        ended += 1
        assert not random_matcher_refuses(choice, text)
    assert ended > len(FEW) // 3


def random_matcher_refuses(choice, text):
    matcher = walking.matcher(choice.grammar)
    return not (matcher.accept_string(text) and matcher.is_completed())


@pytest.mark.vllm
@pytest.mark.parametrize(("family", "parser"), SERVED)
def test_the_stock_parser_gives_back_what_was_called_whole_and_streamed(family, parser):
    parsed_here(parser)
    check_written(family, parser, tokenizer_of(family), SEEDS)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.shared
@pytest.mark.parametrize(("family", "parser"), OTHERS)
def test_the_same_with_the_tokenizer_of_qwen3(family, parser):
    parsed_here(parser)
    check_written(family, parser, stock.qwen3_tokenizer(family), range(20, 26))


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize(("family", "parser"), OTHERS)
def test_the_same_with_the_tokenizer_of_the_demo_model(family, parser):
    parsed_here(parser)
    check_written(family, parser, stock.loaded_tokenizer(str(demo_model()), family), range(30, 36))


def check_written(family, parser, tokenizer, seeds):
    whole = streamed = 0
    for seed in seeds:
        if (found := drawn(family, seed)) is None:
            continue
        tools, case = found
        told = with_types(tools)
        if faults.whole_is_read(family, case):
            assert stock.whole(parser, tokenizer, told, case.text)[1] == case.calls, case.text
            whole += 1
        if faults.streamed_is_read(family, case):
            assert stock.streamed(parser, tokenizer, told, case.text)[1] == case.calls, case.text
            streamed += 1
    assert whole
    assert streamed or faults.STREAMED.get(family) is faults.never


@pytest.mark.vllm
@pytest.mark.parametrize(("family", "parser"), SERVED)
def test_random_calls_of_the_grammar_come_back_with_their_names_and_arguments(family, parser):
    parsed_here(parser)
    preset, tokenizer = preset_of(family), tokenizer_of(family)
    read = []
    for seed in SEEDS:
        if (found := drawn(family, seed)) is None:
            continue
        tools = found[0]
        text = walking.random_call(choice_for(family, tools), rng(seed), closers(preset))
        if text is not None:
            read.append(check_walked(family, parser, tokenizer, tools, placed(family, text.decode())))
    assert sum(whole for whole, _ in read) >= LEAST
    assert any(streamed for _, streamed in read) or faults.STREAMED.get(family) is faults.never


def check_walked(family, parser, tokenizer, tools, text):
    """Whether the stock parser was asked for the whole answer, and for the streamed one; where it was, it gave back what was written."""
    preset, schemas = preset_of(family), {tool.name: tool.schema for tool in read_tools(tools)}
    calls = stock.whole(parser, tokenizer, with_types(tools), text)[1]
    written = reading.json_calls(preset, text) if preset.arguments.style == "json" else calls
    if not faults.whole_is_read(family, faults.Case(written, text, "", schemas)):
        return False, False
    assert calls, text
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name])
    reading.check(preset, schemas, text, calls)
    if not faults.streamed_is_read(family, faults.Case(calls, text, "", schemas)):
        return True, False
    assert stock.streamed(parser, tokenizer, with_types(tools), text)[1] == calls, text
    return True, True


@pytest.mark.vllm
@pytest.mark.parametrize("family", sorted(faults.WHOLE | faults.STREAMED))
def test_a_fault_of_a_stock_parser_that_a_preset_names_is_still_there(family):
    preset = preset_of(family)
    parsed_here(preset.parsers[0])
    assert preset.faults
    tokenizer, lost = stock.small_tokenizer(family), 0
    for seed in range(60):
        if (found := drawn(family, seed)) is None:
            continue
        tools, case = found
        if not faults.streamed_is_read(family, case):
            lost += stock.streamed(preset.parsers[0], tokenizer, with_types(tools), case.text)[1] != case.calls
        if lost:
            return
    repaired = family in faults.REPAIRED and faults.LATER in stock.registered()
    assert repaired, f"{family}: every call came back; has the fault been repaired?"


def one_call(family, arguments, parameters, calls=1, behind=""):
    """What the stock parser makes of calls with these arguments."""
    preset, tools = (
        preset_of(family),
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": parameters}}}],
    )
    schemas = {tool.name: tool.schema for tool in read_tools(tools)}
    text = answer_text(preset, [("f", arguments)] * calls, schemas, "", "\n", behind)
    (parser,) = [name for name in preset.parsers if name in stock.registered()][:1]
    return stock.whole(parser, tokenizer_of(family), with_types(tools), text)


TEXT = {"a": {"type": "string"}}


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("family", "arguments", "parameters"),
    [
        ("dots", {"a": "null"}, TEXT),
        ("gemma4", {"a": {"n": 3}}, {"a": {"type": "object"}}),
        ("lfm2", {"a-b": "x"}, {"a-b": {"type": "string"}}),
        ("minicpm5", {"a": "<b>x</b>"}, TEXT),
        ("minicpm5", {"a": "this &lt; that"}, TEXT),
        ("minicpm5", {"a": "3"}, {"a": {}}),
        ("muse", {"a": "3"}, TEXT),
    ],
)
def test_a_value_that_a_preset_says_is_not_read_comes_back_as_another(family, arguments, parameters):
    assert one_call(family, {"a": "x"}, TEXT)[1] == [("f", {"a": "x"})]
    assert one_call(family, arguments, parameters)[1] != [("f", arguments)]


@pytest.mark.vllm
def test_gigachat_reads_one_call_and_minimax_m3_drops_what_stands_behind_as_their_presets_say():
    assert len(one_call("gigachat3", {"a": "x"}, TEXT, calls=2)[1]) <= 1
    content, calls = one_call("minimax_m3", {"a": "x"}, TEXT, behind=" Done.")
    assert (calls, "Done" in (content or "")) == ([("f", {"a": "x"})], False)
