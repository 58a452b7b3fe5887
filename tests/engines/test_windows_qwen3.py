"""Nothing is lost in a draft window: on xgrammar and Qwen3's vocabulary, over JSON, regular expressions and tool calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import Workshop
from tests.core.windows import WINDOWS, Run
from tests.oracles import vocabularies
from vllm_lazy_grammar.core.drafts import Drafts, LongestJoiner
from vllm_lazy_grammar.core.habits import Habits
from vllm_lazy_grammar.core.likely import likely
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.vocabulary import spelled
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine

pytestmark = [pytest.mark.shared, pytest.mark.slow]

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
)
CALL = (
    'root ::= "<tool_call>\\n{\\"name\\": \\"get\\", \\"arguments\\": " arguments "}\\n</tool_call>"\n'
    'arguments ::= "{" ("\\"days\\": " [0-9]+)? "}"'
)
KINDS = {
    "json": (SCHEMA, (), {"kind": "json", "blanks": "json"}),
    "regex": ("(?:ab|abc)+ [0-9]{1,3}", (), {}),
    "call": (CALL, ("word:<tool_call>",), {"kind": "grammar", "rearm": 1}),
    "one call": (CALL, ("word:<tool_call>",), {"kind": "grammar", "mandatory": 1, "force_after": 4}),
    "after": (SCHEMA, ("word:</think>",), {"kind": "json", "blanks": "json", "start": "after"}),
    "fence": (SCHEMA, ("pattern:```json\\n({)",), {"kind": "json", "blanks": "json", "on_reject": "disarm"}),
}
TEXT = (
    '<tool_call>\n{"name": "get", "arguments": {"days": 12}}\n</tool_call><|im_end|>\n\n</think> ```json\n{"city": "Aix",\t"unit":"C"}```'
    " abcab 7 Well, so it is: "
)
NOISE = (0, 1, 262, 1000, 151_643, 151_645, 151_657, 151_668, 151_800, 151_935)


@pytest.fixture(scope="module")
def vocabulary():
    return vocabularies.qwen3()


@pytest.fixture(scope="module")
def engine(vocabulary):
    return XgrammarEngine(vocabulary, max_threads=1)


@pytest.fixture(scope="module")
def shop(vocabulary, engine):
    return Workshop(vocabulary=vocabulary, engine=engine)


def pool(vocabulary):
    """Ids of some text that the grammars know, in long and short tokens, the special ones, padding."""
    found = set(NOISE)
    for begin in range(len(TEXT)):
        found.update(spelled(vocabulary, TEXT[begin : begin + 6].encode()))
    return sorted(found)


def check(shop, kind, examples, budgets):
    source, triggers, _ = KINDS[kind]
    tokens, habits = pool(shop.vocabulary), Habits(shop.vocabulary)
    guesses, at_once = likely(GrammarKey("json", SCHEMA)), []

    @settings(max_examples=examples)
    @given(WINDOWS, budgets)
    def leaves_no_trace(windows, budget):
        def make():
            stops, options = shop.vocabulary.eos_ids, {"kind": "regex", **KINDS[kind][2]}
            return shop.session(source, *triggers, stops=stops, budget=budget is not None, **options)

        drafts = Drafts(shop.vocabulary, LongestJoiner(shop.vocabulary), guesses, habits, "json")
        run = Run(make, tokens, budget=budget, drafts=drafts)
        run.run(windows)
        at_once.append(run.at_once)

    leaves_no_trace()
    return sum(at_once)


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_leaves_no_trace(shop, kind):
    at_once = check(shop, kind, 15, st.one_of(st.none(), st.integers(1, 40)))
    assert at_once >= 5 or KINDS[kind][1]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_windows_leave_no_trace(shop, kind):
    check(shop, kind, 150, st.one_of(st.none(), st.integers(1, 200)))
