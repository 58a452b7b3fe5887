"""The gate equals the slow model of the spec, after any steps forward and back."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.oracles.gate_model import GateModel
from vllm_lazy_grammar.core.gate import Awaiting, Gate
from vllm_lazy_grammar.core.triggers import Trigger, Triggers, TriggerSpec
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.errors import RequestError

PIECES = [b"a", b"b", b"ab", b"<", b"<a", b"b<", b" ", b"\n", b"a b", b"\xc3", b"\xa9", b"\xc3\xa9", b"\xff", b"", b"`<ab", b"A", b"a\nb", b"\xe2\x82", b"\xac", b"ba<ab>"]  # fmt: skip
ATOMS = ["a", "b", "<", "é", ".", r"\s", r"\b", r"\B", "[ab]", "[^a]", "^", "$", r"\w", r"\Z", "ab"]
OPENERS = ["(", "(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"]
LEADS = ["", "", "", r"[\s\S]*?", ".*?", r"^[\s\S]*?", "(?i)", "^", "(?<!`)", r"(?<=^|\s)"]

_repeats = st.sampled_from(["", "", "", "*", "+", "?", "{1,2}", "*?", "*+"])
_atoms = st.tuples(st.sampled_from(ATOMS), _repeats).map("".join)
_inner = st.recursive(
    _atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(st.sampled_from(OPENERS), inner, st.just(")"), _repeats).map("".join),
        st.tuples(st.just("(?:"), inner, st.just("|"), inner, st.just(")")).map("".join),
    ),
    max_leaves=5,
)
_sources = st.tuples(st.sampled_from(LEADS), _inner, st.sampled_from(["", "", "$"])).map("".join)
_words = st.text("ab<é \n", min_size=1, max_size=4)
_triggers = st.one_of(
    st.tuples(st.just("word"), _words),
    st.tuples(st.just("pattern"), _sources),
    st.tuples(
        st.just("pattern"), st.tuples(st.sampled_from(["", "(?<!`)", "(?<=b)"]), _words.filter(str.strip)).map("".join)
    ),
    st.tuples(st.just("pattern_full"), _sources),
    st.tuples(st.just("token"), st.integers(0, len(PIECES) - 1).map(str)),
)
_steps = st.lists(st.integers(-8, len(PIECES) - 1), max_size=25)


def shown(triggers, observation):
    if isinstance(observation, Awaiting):
        return None
    return triggers.index((observation.trigger.kind, observation.trigger.source)), [
        tuple(one) for one in observation.replay
    ]


def step(number, gate, model, history):
    """One step in both: what each gave. A negative number takes something back or refuses it, where there is something."""
    if number >= 0 and gate.awaiting:
        history.append(Gate.undo)
        return gate.observe(number), model.observe(number)
    if not gate.awaiting and number % 3:
        return gate.refuse(), model.refuse()
    if not gate.awaiting and number % 2:
        history.append(Gate.undo_rearm)
        gate.rearm()
        model.rearm()
    elif history:
        history.pop()(gate)
        model.undo()
    return None


@pytest.mark.slow
@given(
    st.lists(_triggers, min_size=1, max_size=4, unique=True),
    _steps,
    st.sampled_from([b"", b"", b"a", b"<ab "]),
    st.sampled_from(["trigger", "after"]),
)
@example([("pattern", r"^a.*?(?<=<)b")], [0, 6, 3, 1], b"", "trigger")
@example([("pattern", r"[\s\S]")], [9, 6, -1, -1], b"", "trigger")
@example([("pattern", r"(?>[a-z<].|[a-z<]+)+")], [8, -1, 19], b"", "after")
@example([("pattern", "[ab]{1,2}<?"), ("pattern", "ab[<]b")], [2, -1, 3], b"", "after")
@example([("pattern", "ab[<]b"), ("pattern", "[b]")], [2, -1, 3, 1], b"", "trigger")
@example([("pattern", ".*?<")], [3, -1, 3], b"", "trigger")
@example([("pattern", r"^a|a(b)$")], [2, -1], b"", "trigger")
@example([("pattern", r"a(?!$)b")], [0, 1], b"", "trigger")
@example([("pattern", r"<\Ba")], [3, 0, 0], b"", "trigger")
@settings(max_examples=500)
def test_the_gate_equals_the_slow_model_after_any_steps(triggers, steps, context, start):
    vocabulary = Vocabulary(PIECES, len(PIECES))
    spec = TriggerSpec(tuple(Trigger(*one) for one in triggers), start=start)
    try:
        compiled = Triggers.compile(spec, vocabulary, stop_ids=())
    except RequestError:
        return
    gate = Gate(compiled, vocabulary, context=context, timeout_ms=1000)
    model, history = GateModel(triggers, PIECES, context=context, after=start == "after"), []
    for number in steps:
        if (both := step(number, gate, model, history)) is not None:
            assert shown(triggers, both[0]) == both[1]
        assert gate.buffer == (b"" if model.now.fired else model.now.data[model.now.context :])
