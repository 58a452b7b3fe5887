"""Choices compile on the engine that serves them, within its limits."""

from __future__ import annotations

import pytest

from tests.tools.cases import choice_for, drawn, vocabulary_of
from tests.tools.test_round_trips import FAMILIES
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine

pytestmark = pytest.mark.slow

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
