"""Sets of tools taken apart are what they are in one piece: family by family, token by token."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from tests.core.dispatching import Walker
from tests.core.kit import Workshop
from tests.tools.apart import choice_and_texts, pair_of, tools_for, vocabulary_with
from tests.tools.cases import choice_for
from vllm_lazy_grammar.core.byte_trie import ByteTrie
from vllm_lazy_grammar.core.endings import Endings
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.openings import Digits
from vllm_lazy_grammar.core.pieces import Pieces
from vllm_lazy_grammar.core.rows import allowed_ids, is_allowed
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.tools import formats
from vllm_lazy_grammar.tools.choice import Wanted, beside
from vllm_lazy_grammar.tools.parts import plan_of
from vllm_lazy_grammar.tools.presets import catalogue

FAMILIES = sorted(catalogue().families)


def rng(seed):
    return random.Random(seed)  # noqa: S311 - the same in every run


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_taken_apart_a_set_of_tools_takes_the_tokens_that_it_takes_in_one_piece(family):
    walked = 0
    for seed in range(4):
        found = choice_and_texts(family, seed, parallel=seed % 2 == 0)
        if found is None:
            continue
        choice, texts = found
        pair = pair_of(choice.grammar, vocabulary_with(texts, rng(seed)))
        for text in texts if pair.is_apart else ():
            walker = Walker(pair, rng(seed))
            walker.follow(text)
            walker.back(walker.rng.randrange(len(walker.places)))
            walker.stray(6)
            walked += 1
    assert walked > 1


BEGINS_AS_THE_END = {"olmo3"}
"""Families where what separates calls begins what closes the block."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_s_sets_are_taken_apart(family):
    tools = [tool for tool in tools_for(family, 0) if tool["function"]["name"].isidentifier()]
    names = [tool["function"]["name"] for tool in tools]
    plan = plan_of(choice_for(family, tools, parallel=family not in BEGINS_AS_THE_END).grammar)
    assert plan is not None
    assert len(plan.calls) == len(names)
    for name, call in zip(names, plan.calls, strict=True):
        assert all(any(name.encode() in atom for atom in way if isinstance(atom, bytes)) for way in call.openings)


@pytest.mark.parametrize("family", ["hermes", "granite", "qwen3_coder", "kimi_k2"])
def test_a_tool_s_part_does_not_depend_on_the_other_tools(family):
    first, second = tools_for(family, 0, 3)[:2], tools_for(family, 9, 3)
    second = [tool for tool in second if tool["function"]["name"] != first[0]["function"]["name"]]
    plans = [plan_of(choice_for(family, [first[0], *others]).grammar) for others in (first[1:], second)]
    assert plans[0].calls[0] == plans[1].calls[0]


def test_calls_with_a_number_are_taken_apart():
    plan = plan_of(choice_for("kimi_k2", tools_for("kimi_k2", 0)).grammar)
    assert all(Digits(3) in way for call in plan.calls for way in call.openings)


def _tag(node):
    return GrammarKey("structural_tag", formats.structural_tag(node))


def _call(name, value=None):
    return formats.sequence([formats.text(name), value or formats.json_value({"type": "object"}, None)])


AB = formats.either([_call("a:"), _call("b:")])


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(_call("a:"), id="one call"),
        pytest.param(formats.texts(["a", "b"]), id="texts alone"),
        pytest.param(formats.either([_call("a:"), formats.free_text(["x"])]), id="a call beside free text"),
        pytest.param(formats.either([_call("a:"), _call("b\x01")]), id="the mark itself"),
        pytest.param(formats.sequence([AB, formats.regex("x*")]), id="an end that is no text"),
        pytest.param(formats.sequence([AB, formats.repeat(AB, 0, 3)]), id="nothing between calls"),
        pytest.param(
            formats.sequence([AB, formats.repeat(formats.sequence([formats.text(","), AB]), 1, 3)]), id="two at least"
        ),
        pytest.param(
            formats.sequence([AB, formats.repeat(formats.sequence([formats.text(","), AB]), 0, 3), formats.text(",]")]),
            id="an end that begins as what is between calls",
        ),
    ],
)
def test_another_form_stays_in_one_piece(node):
    assert plan_of(_tag(node)) is None


def test_what_is_no_structural_tag_stays_in_one_piece():
    key = _tag(AB)
    assert plan_of(key) is not None
    assert plan_of(GrammarKey("json", '{"type": "object"}')) is None
    assert plan_of(GrammarKey("structural_tag", "[1]")) is None
    assert plan_of(beside(json.dumps(formats.free_text([])), key, 2)) is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hermes", "granite", "qwen3_coder", "kimi_k2", "pythonic", "jamba"])
def test_how_a_text_ends_is_known_as_in_one_piece(family):
    choice, texts = choice_and_texts(family, 0)
    vocabulary = vocabulary_with(texts, rng(0))
    pair = pair_of(choice.grammar, vocabulary)
    pieces = Pieces(ByteTrie(vocabulary), vocabulary.special_ids)
    both = [Endings(made.network(), pieces, vocabulary.row_words) for made in (pair.whole, pair.apart)]
    draw = rng(1)
    for text in texts:
        stands, at = [endings.start for endings in both], 0
        while at < min(len(text), 300):
            whole, apart = [endings.costs(stand).after for endings, stand in zip(both, stands, strict=True)]
            assert (whole == apart).all()
            assert both[0].needs(stands[0]) == both[1].needs(stands[1])
            fits = [t for t in range(vocabulary.size - 40) if text.startswith(vocabulary.piece(t), at)]
            token = draw.choice(fits)
            piece = vocabulary.piece(token)
            stands = [endings.advance(stand, token, piece) for endings, stand in zip(both, stands, strict=True)]
            at += len(piece)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_coder", "pythonic", "minicpm5"])
def test_a_request_with_a_budget_has_the_rows_that_it_has_in_one_piece(family):
    """Families whose calls open with words: this vocabulary has no tokens for markers."""
    choice, texts = choice_and_texts(family, 0, wanted=Wanted("required"))
    vocabulary = vocabulary_with(texts, rng(0))
    end = vocabulary.size - 40  # the special token
    shops = [
        Workshop(vocabulary=vocabulary, engine=XgrammarEngine(vocabulary, max_threads=1), plan=plan)
        for plan in (None, plan_of)
    ]
    sessions = [
        shop.session(
            choice.grammar.source,
            *(f"word:{trigger.source}" for trigger in choice.triggers.triggers if trigger.kind == "word"),
            *(f"pattern:{trigger.source}" for trigger in choice.triggers.triggers if trigger.kind == "pattern"),
            kind="structural_tag",
            stops={end},
            blanks="mixed",
            budget=True,
            mandatory=True,
            rearm=True,
        )
        for shop in shops
    ]
    rows = [np.zeros(vocabulary.row_words, np.int32) for _ in sessions]
    draw, left = rng(3), 200
    while left and not sessions[0].is_terminated():
        masks = [session.fill(row, left) for session, row in zip(sessions, rows, strict=True)]
        assert masks[0] == masks[1]
        allowed = allowed_ids(rows[1], vocabulary.size).tolist()
        assert set(allowed_ids(rows[0], vocabulary.size).tolist()) <= set(allowed)
        for token in allowed:
            if not is_allowed(rows[0], token, vocabulary.size):  # xgrammar's row lacked it, as `same` says
                assert sessions[0].accept(token)
                sessions[0].rollback(1)
        token = draw.choice(allowed)
        assert [session.accept(token) for session in sessions] == [True, True]
        assert sessions[0].phase == sessions[1].phase
        left -= 1
    assert sessions[1].is_terminated() == sessions[0].is_terminated()
    assert sessions[1].trace.events[0].kind == "fired"


def test_whether_undeclared_properties_are_allowed_goes_with_every_part():
    key = replace(choice_for("hermes", tools_for("hermes", 0)).grammar, undeclared=True)
    keys = [part for call in plan_of(key).calls for part in (call.last, call.more)]
    assert all(part.undeclared for part in keys if part is not None)
