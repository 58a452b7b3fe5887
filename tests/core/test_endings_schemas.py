"""Endings over real schemas and a real vocabulary: every answer is complete and valid wherever the shortest one fits.

What is not is named here, each with its reason, and told in docs/endings.md.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from tests.core.kit import Workshop
from tests.oracles import vocabularies
from vllm_lazy_grammar.core.endings import warm
from vllm_lazy_grammar.core.leading import far
from vllm_lazy_grammar.core.rows import allowed_ids
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.errors import GrammarError

pytestmark = [pytest.mark.shared, pytest.mark.long, pytest.mark.timeout(3_000)]

SCHEMAS = 300

APPROXIMATED = {}
"""Schemas of which xgrammar takes more than they allow, as it warns itself -> what it warns of."""

BEGUN_TOO_LONG = frozenset()
"""Far from the end a text was begun that is longer than what is left: docs/endings.md, "What can still be cut"."""

NOT_PLANNED = frozenset()
"""Schemas whose endings take too many places to work out."""


@dataclass
class Answer:
    """One answer and how it came about.

    Args:
        budget: tokens it may have.
        needs: tokens of the shortest answer, the stop id included; None where that is not known.
        text: what was written.
        how: ``complete``, ``unfit`` (the shortest one is longer than the budget), ``cut`` or ``not planned``.
        same: rows that were those of a session without a budget.
        far: how many of the rows stood far from the end.
    """

    budget: int
    needs: int | None = None
    text: bytes = b""
    how: str = ""
    same: int = 0
    far: int = 0
    changed: int = 0


@pytest.fixture(scope="module")
def shop():
    warm()
    vocabulary = vocabularies.qwen3()
    shop = Workshop(vocabulary=vocabulary, engine=XgrammarEngine(vocabulary), prewarm=0)
    yield shop
    shop.close()


@pytest.fixture(scope="module")
def enders(shop):
    """Of a string's thousands of tokens one that ends it is taken now and then, so that answers get anywhere."""
    return [token for token, piece in enumerate(shop.vocabulary.pieces) if piece in (b'"', b'",', b'"}')]


def pair(shop, source):
    """A session with a budget, and one without."""
    return [
        shop.session(source, kind="json", blanks="json", budget=budget, stops=shop.vocabulary.eos_ids)
        for budget in (True, False)
    ]


def answered(shop, enders, source, rng):
    """An answer of random tokens among the allowed ones, to the end of the turn or of the budget."""
    session, free = pair(shop, source)
    answer = Answer(int(rng.integers(10, 201)))
    session.look_ahead()
    answer.needs = session.owes(1)
    rows = [np.empty(shop.vocabulary.row_words, np.int32) for _ in range(2)]
    for left in range(answer.budget, 0, -1):
        session.fill(rows[0], left)
        free.fill(rows[1])
        check_far(session, rows, left, answer)
        token = drawn(allowed_ids(rows[0], shop.vocabulary.size), enders, rng)
        assert session.accept(token)
        assert free.accept(token)
        if session.is_terminated():
            break
        answer.text += shop.vocabulary.piece(token)
    answer.how = outcome(session, answer)
    return answer


def drawn(allowed, enders, rng):
    ends = np.intersect1d(enders, allowed)
    return int(rng.choice(ends if len(allowed) > 1_000 and len(ends) and rng.random() < 0.3 else allowed))


def check_far(session, rows, left, answer):
    """A row that lost tokens stands near the end; how near is asked only then, so that asking changes nothing."""
    if np.array_equal(*rows):
        answer.same += 1
        answer.far += left > far(answer.needs or 0)
        return
    leading = session._leading
    endings = leading._endings(left)
    assert left <= far(endings.needs(leading._stand(endings, session._walk.at)) + 1)
    answer.changed += 1


def outcome(session, answer):
    if session.trace.budget_lost:
        return "not planned"
    if session.is_terminated():
        return "complete"
    return "unfit" if answer.needs > answer.budget else "cut"


def is_valid(schema, text):
    value = json.loads(text, strict=False)  # xgrammar takes control characters where a schema's own pattern does
    return jsonschema.validators.validator_for(schema)(schema).is_valid(value)


def test_probe(shared, shop, enders):
    out = open("/work/scratch/ab_schemas.jsonl", "w")
    compiled = 0
    for file in sorted((shared / "data" / "maskbench").glob("*.json")):
        schema = json.loads(file.read_text(encoding="utf-8"))["schema"]
        rng = np.random.default_rng(zlib.crc32(file.stem.encode()))
        try:
            answer = answered(shop, enders, json.dumps(schema), rng)
        except GrammarError as e:
            print(json.dumps({"stem": file.stem, "how": "error", "why": str(e)[:300]}), file=out, flush=True)
            continue
        compiled += 1
        valid = is_valid(schema, answer.text) if answer.how == "complete" else None
        d = {"stem": file.stem, "how": answer.how, "valid": valid, "needs": answer.needs, "budget": answer.budget, "same": answer.same, "far": answer.far, "changed": answer.changed, "text": answer.text.decode("utf-8", "replace")}
        print(json.dumps(d), file=out, flush=True)
        if compiled == SCHEMAS:
            break
