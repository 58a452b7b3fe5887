"""Answers with calls, and what a family makes of them."""

from __future__ import annotations

import re

from tests.tools import instances, rendering, walking
from tests.tools.faults import Case
from vllm_lazy_grammar.errors import RequestError
from vllm_lazy_grammar.tools.choice import CallSettings, Wanted, choose, read_tools
from vllm_lazy_grammar.tools.presets import catalogue
from vllm_lazy_grammar.tools.schemas import inlined

ONE_CALL = {"internlm", "gigachat3"}
"""Families whose parser reads one call of an answer."""

LEADS = {"harmony": ("", "<|start|>assistant")}
"""Family -> what its format has before a first call, and before another."""


def placed(family, text):
    """A call where it can stand: what ends a message of gpt-oss, or begins another, has one before it."""
    message = "<|channel|>analysis<|message|>Hm."
    if family != "harmony" or not text.startswith(("<|end|>", "<|start|>")):
        return text
    return message + ("" if text.startswith("<|end|>") else "<|end|>") + text


def preset_of(family):
    return catalogue().families[family]


def vocabulary_of(family):
    preset = preset_of(family)
    return walking.byte_vocabulary([*preset.markers, *preset.needs])


def choice_for(family, tools, wanted=None, **options):
    vocabulary = vocabulary_of(family)
    return choose(
        read_tools(tools), wanted or Wanted(), preset_of(family), is_token=vocabulary.added.__contains__, **options
    )


def servable(family, tools):
    """The tools that the family can write; the others are refused, by name."""
    kept = []
    for tool in tools:
        try:
            choice_for(family, [tool])
        except RequestError as error:
            if tool["function"]["name"] not in str(error):
                raise
        else:
            kept.append(tool)
    return kept


def with_types(tools):
    """The tools as the adapter hands them to a family's parser: with references resolved."""
    found = []
    for tool in tools:
        function = dict(tool["function"])
        if "parameters" in function:
            function["parameters"] = inlined(function["parameters"], function["parameters"])
        found.append({**tool, "function": function})
    return found


def tokens_of(vocabulary, text):
    """Markers by their tokens, the rest by bytes."""
    markers = sorted(vocabulary.added, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, markers)) + ")", text) if markers else [text]
    return [
        token for part in parts for token in ([vocabulary.added[part]] if part in vocabulary.added else part.encode())
    ]


def drawn(family, seed):
    """Tools, a choice and an answer of the family; None where it can write none of the tools."""
    preset = preset_of(family)
    tools, calls = instances.tools_and_calls(seed, awkward=seed % 2 == 1)
    tools = servable(family, tools)
    names = {tool["function"]["name"] for tool in tools}
    calls = [call for call in calls if call[0] in names][: 1 if family in ONE_CALL else None]
    if not calls:
        return None
    free = not preset.trigger.anchored
    before = "Let me see.\n" if free and seed % 3 == 0 else ""
    before, between = LEADS.get(family, (before, "\n"))
    behind = " Done." if free and preset.block.blocks == "many" and seed % 4 == 0 else ""
    schemas = {tool.name: tool.schema for tool in read_tools(tools)}
    text = rendering.answer_text(preset, calls, schemas, before, between, behind)
    return tools, Case(calls, text, before)


def closers(preset):
    """What might end something of the family; markers only where free text can not hold them."""
    found = ['"', "'", "}", "]", ")", "\n", "</", "]<]minimax[>[</"]
    if preset.arguments.style == "json" or preset.arguments.strings == "python":
        return found
    return [
        *found,
        *filter(None, preset.block.close),
        *preset.arguments.until[:1],
        "\n" + preset.arguments.until[0] if preset.arguments.until else "\n",
    ]


ANY = CallSettings(any_whitespace=True)
