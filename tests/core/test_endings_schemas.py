"""Endings over real schemas and a real vocabulary: every answer is complete wherever the shortest one fits."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from tests.core.kit import Workshop
from tests.oracles import vocabularies
from vllm_lazy_grammar.core.endings import warm
from vllm_lazy_grammar.core.rows import allowed_ids
from vllm_lazy_grammar.engines.policy import Choice, PolicyEngine
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.errors import GrammarError

pytestmark = [pytest.mark.shared, pytest.mark.long, pytest.mark.timeout(3_000)]

SCHEMAS = 300


@pytest.fixture(scope="module")
def shop():
    warm()
    vocabulary = vocabularies.qwen3()
    shop = Workshop(vocabulary=vocabulary, engine=XgrammarEngine(vocabulary), prewarm=0)
    yield shop
    shop.close()


def sampled(shop, source, budget, rng):
    """(the session, the text) after random tokens among the allowed ones, to the end of the turn or of the budget.

    Of a string's thousands of tokens one that ends it is taken now and then, so that answers get anywhere.
    """
    session = shop.session(source, kind="json", blanks="json", budget=True, stops=shop.vocabulary.eos_ids)
    enders = [token for token, piece in enumerate(shop.vocabulary.pieces) if piece in (b'"', b'",', b'"}')]
    row, text = np.empty(shop.vocabulary.row_words, np.int32), b""
    for used in range(budget):
        session.fill(row, budget - used)
        allowed = allowed_ids(row, shop.vocabulary.size)
        ends = np.intersect1d(enders, allowed)
        token = int(rng.choice(ends if len(allowed) > 1_000 and len(ends) and rng.random() < 0.3 else allowed))
        assert session.accept(token)
        if session.is_terminated():
            break
        text += shop.vocabulary.piece(token)
    return session, text


def test_every_answer_is_complete_where_the_shortest_one_fits(shared, shop):
    rng = np.random.default_rng(1)
    files = sorted((shared / "data" / "maskbench").glob("*.json"))
    complete = unfit = 0
    lost, cut = [], []
    for file in files[:SCHEMAS]:
        source = json.dumps(json.loads(file.read_text(encoding="utf-8"))["schema"])
        try:
            session, text = sampled(shop, source, int(rng.integers(10, 200)), rng)
        except GrammarError:
            continue
        if session.trace.budget_lost:
            lost.append(file.stem)
        elif session.is_terminated():
            json.loads(text, strict=False)  # xgrammar takes control characters where a schema's own pattern does
            complete += 1
        elif session.trace.needed is not None:
            unfit += 1
        else:
            cut.append(file.stem)
    assert not cut
    assert len(lost) <= SCHEMAS // 50, lost
    assert complete > SCHEMAS // 2 > unfit


def test_an_engine_without_states_of_its_own_ends_its_answers_too(shared, shop):
    """llguidance, led by xgrammar's states: where the two differ in a schema the end may be lost, and is told so."""
    vocabulary = shop.vocabulary
    engine = PolicyEngine(shop.engine, Choice("llguidance"), lambda _: None)
    other = Workshop(vocabulary=vocabulary, engine=engine, prewarm=0)
    ends = Counter()
    rng = np.random.default_rng(1)
    for file in sorted((shared / "data" / "maskbench").glob("*.json"))[: SCHEMAS // 3]:
        source = json.dumps(json.loads(file.read_text(encoding="utf-8"))["schema"])
        try:
            session, text = sampled(other, source, int(rng.integers(10, 200)), rng)
        except GrammarError:
            continue
        trace = session.trace
        ends[
            "lost"
            if trace.budget_lost
            else "complete"
            if session.is_terminated()
            else "unfit"
            if trace.needed is not None
            else "cut"
        ] += 1
        if session.is_terminated():
            json.loads(text)
    other.close()
    assert ends["cut"] == 0, ends
    assert ends["lost"] <= SCHEMAS // 50, ends
    assert ends["complete"] > SCHEMAS // 6, ends
