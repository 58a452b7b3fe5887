"""Choices compile on the engine that serves them, within its limits."""

from __future__ import annotations

import pytest

from tests.core.kit import Workshop
from tests.tools.cases import ANY, choice_for, drawn, preset_of, tokens_of, vocabulary_of
from tests.tools.rendering import answer_text
from tests.tools.test_round_trips import FAMILIES
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.tools.choice import read_tools

pytestmark = pytest.mark.slow

BLANK = b"\n"
BOUND = 20
TWO = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}},
            "required": ["a", "b"],
        },
    },
}

FREE = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_compiles_and_follows_every_family(family):
    known = vocabulary_of(family)
    vocabulary = Vocabulary([*known.pieces, b""], known.size + 1, special_ids=known.special_ids, added=known.added)
    tools, case = next(found for seed in range(20) if (found := drawn(family, seed)))
    engine = XgrammarEngine(vocabulary, max_threads=1)
    matcher = engine.compile(choice_for(family, tools).grammar).matcher()
    text = case.text[len(case.before) :].encode()
    complete = [matcher.is_completed() for byte in text if matcher.accept_bytes(bytes([byte]))]
    assert any(complete)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_that_says_nothing_of_its_arguments_is_served(family):
    known = vocabulary_of(family)
    vocabulary = Vocabulary([*known.pieces, b""], known.size + 1, special_ids=known.special_ids, added=known.added)
    assert XgrammarEngine(vocabulary, max_threads=1).compile(choice_for(family, [FREE]).grammar).nbytes > 0


@pytest.mark.parametrize("family", ["hermes", "granite", "mistral", "glm47"])
def test_w1_blanks_in_a_tool_call_are_bounded_where_any_are_allowed(family):
    known = vocabulary_of(family)
    vocabulary = Vocabulary(
        [*known.pieces, b""], known.size + 1, special_ids=known.special_ids, added=known.added, eos_ids=(known.size,)
    )
    shop = Workshop(vocabulary=vocabulary, engine=XgrammarEngine(vocabulary, max_threads=1), prewarm=0, bound=BOUND)
    choice = choice_for(family, [TWO], settings=ANY)
    schemas = {tool.name: tool.schema for tool in read_tools([TWO])}
    text = answer_text(preset_of(family), [("f", {"a": 1, "b": [2, 3]})], schemas)
    longest = 0
    for cut in range(len(text)):
        session = shop.session(choice.grammar.source, kind="structural_tag", blanks="mixed", stops={known.size})
        assert all(map(session.accept, tokens_of(known, text[:cut])))
        run = 0
        while run <= BOUND and session.is_allowed(*BLANK) and session.accept(*BLANK):
            run += 1
        assert run <= BOUND, text[:cut]
        longest = max(longest, run)
    assert longest == BOUND
