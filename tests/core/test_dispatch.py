"""Calls chosen by their openings, each compiled alone: by hand, and beside the one piece."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.dispatching import Pair, Walker, row_of
from tests.core.kit import VOCABULARY, Workshop, ids
from vllm_lazy_grammar.core.crossing import MARK
from vllm_lazy_grammar.core.dispatch import Call, DispatchGrammar, Plan
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.openings import AmbiguousError, Digits, Openings
from vllm_lazy_grammar.errors import GrammarError
from vllm_lazy_grammar.testing import SMALL_CALL, SMALL_EMPTY, FakeEngine, small_vocabulary

OPENS = ("<t>", "<t>\n")
AGAIN = (",", " ,")
CLOSES = (">", "\n>")
BODIES = {"a": r"\{(b|c)*\}", "ab": r'"[12]*"', "b": r"1|2c?", "bc": r'\{("a":[12](:"b":1)?)?\}'}


def regex(source):
    return GrammarKey("regex", source)


def plan_for(names, most=1, shared=""):
    """A plan, and the one piece that it is of."""
    ends = "|".join(CLOSES)
    more = "|".join(between + shared + MARK.decode() for between in AGAIN)
    calls = tuple(
        Call(
            ((f"{shared}{name}:".encode(),),),
            regex(f"({BODIES[name]})({ends})"),
            None if most == 1 else regex(f"({BODIES[name]})({ends}|{more})"),
        )
        for name in names
    )
    one = "|".join(f"{shared}{name}:({BODIES[name]})" for name in names)
    repeated = "" if most == 1 else f"(({'|'.join(AGAIN)})({one})){{0,{most - 1}}}"
    again = () if most == 1 else tuple((between + shared).encode() for between in AGAIN)
    plan = Plan(tuple(o.encode() for o in OPENS), calls, again, shared.encode() if again else b"", most)
    return plan, regex(f"({'|'.join(OPENS)})({one}){repeated}({ends})")


def shop_for(plan, key, **options):
    return Workshop(plan=lambda asked: plan if asked == key else None, **options)


WORDS = ["<t>", "\n", "a:", "ab:", "b:", "bc:", "{", "}", '"', "1", "2", "c", "b", ",", " ", ">", '"a":1', "a", ":"]
PAIRS = {}


def pair_for(names, most, shared):
    place = names, most, shared
    if place not in PAIRS:
        plan, key = plan_for(names, most, shared)
        PAIRS[place] = Pair(
            key, small_vocabulary(), FakeEngine(small_vocabulary()), lambda asked: plan if asked == key else None
        )
        assert PAIRS[place].is_apart
    return PAIRS[place]


@settings(max_examples=25)
@given(
    names=st.sampled_from([("a", "ab"), ("b", "bc", "a"), ("a", "ab", "b", "bc")]),
    most=st.sampled_from([1, 2, 3]),
    shared=st.sampled_from(["", '{"']),
    seed=st.integers(0, 1 << 20),
)
def test_at_every_step_it_is_what_it_is_in_one_piece(names, most, shared, seed):
    rng = random.Random(seed)  # noqa: S311 -- the same in every run
    walker = Walker(pair_for(names, most, shared), rng)
    for _ in range(15):
        allowed, act = walker.allowed(), rng.random()
        if act < 0.15:
            walker.back(rng.randint(1, 6))
        elif act < 0.2:
            walker.fork()
        elif act < 0.35:
            data = "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4))).encode()
            taken = walker.whole.accept_bytes(data)
            assert walker.apart.accept_bytes(data) == taken
            if taken:
                walker.places.append(walker.places[-1] + len(data))
        elif allowed:
            walker.take(rng.choice(allowed))
        else:
            walker.back(4)
    assert walker.whole.certain().startswith(walker.apart.certain())


def test_a_token_that_goes_over_everything_is_one_step():
    plan, key = plan_for(("a", "b"), most=3)
    whole = b"<t>a:{b},b:1,a:{}>"
    vocabulary = small_vocabulary()
    long = type(vocabulary)([*vocabulary.pieces[:27], whole, whole[:8], whole[5:12], b",b:"], 40, special_ids=(25, 26))
    pair = Pair(key, long, FakeEngine(long), lambda asked: plan if asked == key else None)
    walker = Walker(pair, random.Random(0))  # noqa: S311 -- nothing is drawn
    assert walker.allowed() == [16, 17, 27, 28]
    walker.take(27)
    assert walker.apart.steps == 1
    assert walker.apart.is_completed()
    walker.back(1)
    walker.take(28)
    assert 30 in walker.allowed()
    walker.take(30)
    walker.allowed()
    walker.back(1)
    walker.allowed()


def test_special_tokens_empty_ones_and_ids_outside_are_refused_everywhere():
    plan, key = plan_for(("a", "b"))
    matcher = shop_for(plan, key).store.get(key).result().matcher()
    for step in (b"", b"<t>", b"a:", b"{"):
        assert matcher.accept_bytes(step)
        assert not any(matcher.accept(token) for token in (SMALL_CALL, SMALL_EMPTY, -1, 39, 1 << 20))
    with pytest.raises(ValueError, match="can not take back"):
        matcher.rollback(matcher.steps + 1)


# -- parts ------------------------------------------------------------------------------------------------------------


def test_a_set_with_one_call_changed_compiles_one_part():
    plans = {key: plan for plan, key in (plan_for(("a", "ab", "b")), plan_for(("a", "ab", "bc")))}
    shop = Workshop(plan=plans.get)
    counts = []
    for key in plans:
        grammar = shop.store.get(key).result()
        for name in ("a", "ab", "b", "bc"):
            matcher = grammar.matcher()
            if matcher.accept_bytes(f"<t>{name}:".encode()):
                row_of(matcher, VOCABULARY)
        counts.append(len(shop.engine.compiled))
    assert counts == [3, 4]


@pytest.fixture
def held():
    """A set of two calls whose engine compiles when it is let go, on one thread."""
    plan, key = plan_for(("a", "b"))
    made = shop_for(plan, key, threads=1, held=True, prewarm=0)
    yield made, key, plan
    made.close()


def test_the_openings_are_there_before_any_part(held):
    shop, key, _ = held
    grammar = shop.store.get(key).join()
    matcher = grammar.matcher()
    assert row_of(matcher, VOCABULARY) == ids("<t>", "<")
    assert matcher.accept_bytes(b"<t>")
    assert row_of(matcher, VOCABULARY) == sorted([*ids("a", "b", "\n"), 23])
    assert matcher.certain() == b""
    assert matcher.accept_bytes(b"b")
    assert matcher.certain() == b":"
    assert matcher.accept_bytes(b":")
    assert not matcher.is_completed()
    assert matcher.would_wait(ids("1")[0])
    assert (matcher.certain(), matcher.next_bytes(np.zeros(2, np.int32))) == (b"", b"")
    shop.engine.release()
    assert row_of(matcher, VOCABULARY) == ids("1", "2")
    assert not matcher.would_wait(ids("1")[0])


def test_a_wait_is_told_with_the_part_that_was_waited_for(held):
    shop, key, plan = held
    matcher = shop.store.get(key).join().matcher()
    assert matcher.accept_bytes(b"<t>b:")
    assert shop.waits == []
    shop.engine.release()
    row_of(matcher, VOCABULARY)
    row_of(matcher, VOCABULARY)
    assert {waited for waited, _ in shop.waits} <= {plan.calls[1].last}
    assert len(shop.waits) < 2


def test_a_draft_into_a_part_that_is_not_there_is_refused_and_nothing_waits(held):
    shop, key, _ = held
    session = shop.session(key.source)
    shop.store.get(key).join()
    out = np.zeros(VOCABULARY.row_words, np.int32)
    session.fill(out)
    drafts = ids("<t>", "b", ":", "1")
    assert session.validate(drafts) == drafts[:3]
    shop.engine.release()
    for part in list(shop.store._table.values()):
        part.finish()
    assert session.validate(drafts) == drafts


def _waited_for(shop):
    while any(not compile_.ready for compile_ in list(shop.store._table.values())):
        for compile_ in list(shop.store._table.values()):
            compile_.future.result()


def test_parts_are_compiled_ahead_the_longest_first_and_the_one_that_is_left_before_them():
    plan, key = plan_for(("a", "ab", "b", "bc"))
    shop = shop_for(plan, key, threads=1, prewarm=0)
    with shop.worker.held():
        compile_ = shop.store.get(key)
        matcher = compile_.join().matcher()
        assert matcher.accept_bytes(b"<t>b")
        assert matcher.accept_bytes(b":")
    _waited_for(shop)
    by_size = sorted((call.last for call in plan.calls), key=lambda part: len(part.source), reverse=True)
    left = plan.calls[2].last
    assert shop.engine.compiled == [left, *(part for part in by_size if part != left)]
    shop.close()


def test_nothing_is_compiled_ahead_without_threads():
    plan, key = plan_for(("a", "ab", "b"))
    shop = shop_for(plan, key)
    matcher = shop.store.get(key).result().matcher()
    row_of(matcher, VOCABULARY)
    assert shop.engine.compiled == []
    assert matcher.accept_bytes(b"<t>b:")
    row_of(matcher, VOCABULARY)
    assert shop.engine.compiled == [plan.calls[2].last]


def test_parts_that_nobody_waits_for_any_more_never_start(held):
    shop, key, plan = held
    compile_ = shop.store.get(key)
    grammar = compile_.join()
    assert shop.engine.waiting.wait(10)
    grammar.want(plan.calls[0].last)
    grammar.want(plan.calls[1].last)
    begun = list(shop.engine.compiled)
    compile_.release()
    shop.engine.release()
    shop.worker.close()
    assert shop.engine.compiled == begun
    assert len(begun) == 1


def test_whoever_comes_back_has_the_parts_compiled_after_all(held):
    shop, key, plan = held
    compile_ = shop.store.get(key)
    compile_.join()
    assert shop.engine.waiting.wait(10)
    compile_.release()
    again = shop.store.get(key)
    shop.engine.release()
    for call in plan.calls:
        again.result().join(call.last)
    assert set(shop.engine.compiled) == {call.last for call in plan.calls}


def test_a_grammar_that_goes_gives_its_parts_back():
    plan, key = plan_for(("a", "b"))
    shop = shop_for(plan, key)
    shop.store._limit = 0
    compile_ = shop.store.get(key)
    matcher = compile_.result().matcher()
    matcher.accept_bytes(b"<t>a:{")
    assert len(shop.store) == 2
    compile_.release()
    del matcher, compile_
    gc.collect()
    shop.store.get(GrammarKey("regex", "z")).release()  # what was collected is given back with the store's next call
    assert len(shop.store) == 0


def test_what_it_holds_is_counted_with_its_parts():
    plan, key = plan_for(("a", "b"))
    shop = shop_for(plan, key)
    grammar = shop.store.get(key).result()
    before = grammar.nbytes
    assert before >= grammar.openings.table.nbytes
    part = grammar.join(plan.calls[0].last)
    assert grammar.nbytes == before + part.nbytes


def test_a_part_that_can_not_be_compiled_fails_the_call_that_needs_it():
    plan, key = plan_for(("a", "b"))
    broken = Plan(plan.opens, (plan.calls[0], Call(plan.calls[1].openings, regex("("))))
    grammar = shop_for(broken, key).store.get(key).result()
    matcher = grammar.matcher()
    assert matcher.accept_bytes(b"<t>a:{")
    matcher = grammar.matcher()
    assert matcher.accept_bytes(b"<t>b:")
    with pytest.raises(GrammarError):
        row_of(matcher, VOCABULARY)
    matcher = grammar.matcher()
    with pytest.raises(GrammarError):
        matcher.accept_bytes(b"<t>b:{")
    assert matcher.steps == 0
    assert matcher.accept_bytes(b"<t>a:{")  # what failed has changed nothing


def test_what_can_not_be_told_apart_by_its_openings_stays_in_one_piece():
    plan, key = plan_for(("a", "b"))
    again = Plan(plan.opens, (plan.calls[0], Call(((b"a:{",),), plan.calls[1].last)))
    assert isinstance(shop_for(plan, key).store.get(key).result(), DispatchGrammar)
    assert not isinstance(shop_for(again, key).store.get(key).result(), DispatchGrammar)


def test_a_session_goes_through_calls_and_back_as_with_the_one_piece():
    plan, key = plan_for(("a", "ab", "b"), most=2)
    apart, whole = shop_for(plan, key), Workshop()
    options = {"rearm": True, "mandatory": True, "budget": False}
    sessions = [shop.session(key.source, "word:<t>", **options) for shop in (apart, whole)]
    rows = [np.zeros(VOCABULARY.row_words, np.int32) for _ in sessions]
    written = ids(
        "c",
        "<t>",
        "a",
        ":",
        "{",
        "b",
        "}",
        ",",
        "b",
        ":",
        "1",
        ">",
        "c",
        "<",
        "t",
        ">",
        "\n",
        "ab",
        ":",
        '"',
        "1",
        '"',
        "\n",
        ">",
        "c",
    )
    for token in written:
        masks = [session.fill(row) for session, row in zip(sessions, rows, strict=True)]
        assert masks[0] == masks[1]
        assert (rows[0] == rows[1]).all()
        assert [session.accept(token) for session in sessions] == [True, True]
        assert sessions[0].phase == sessions[1].phase
    for session in sessions:
        session.rollback(17)
    for session, row in zip(sessions, rows, strict=True):
        session.fill(row)
    assert (rows[0] == rows[1]).all()


# -- openings ---------------------------------------------------------------------------------------------------------


def read(openings, text):
    state = openings.start
    for byte in text:
        state = int(openings.table[state, byte])
        if state < 0:
            return None
    return openings.ends[state], openings.only[state]


def test_numbers_are_one_to_so_many_digits():
    openings = Openings([b"o"], [[(b"a", Digits(2), b"x")], [(b"a", Digits(2), b"y")], [(b"b",)]])
    assert read(openings, b"oa1x") == (0, 0)
    assert read(openings, b"oa12y") == (1, 1)
    assert read(openings, b"oa12") == (-1, -1)
    assert read(openings, b"ob") == (2, 2)
    assert read(openings, b"oa123") is read(openings, b"oax") is None


def test_texts_that_begin_alike_come_first_and_the_openings_behind_each():
    openings = Openings([b"", b"<", b"<\n"], [[(b"\nx",)], [(b"y",)]])
    assert {read(openings, lead + b"\nx") for lead in (b"", b"<")} == {(0, 0)}
    assert read(openings, b"<\n\nx") == (0, 0)
    assert {read(openings, lead + b"y") for lead in (b"", b"<", b"<\n")} == {(1, 1)}
    assert read(openings, b"<x") is None
    chain = Openings([b"<", b"<-", b"<--"], [[(b"-x",)], [(b"+",)], [(b"-->",)]])
    assert {read(chain, lead + b"-x") for lead in (b"<", b"<-", b"<--")} == {(0, 0)}
    assert {read(chain, lead + b"-->") for lead in (b"<", b"<-", b"<--")} == {(2, 2)}
    assert read(chain, b"<----->") is read(chain, b"<---->x") is None


@pytest.mark.parametrize(
    ("opens", "openings"),
    [
        ([b""], [[(b"a",)], [(b"ab",)]]),
        ([b""], [[(b"ab",)], [(b"a",)]]),
        ([b""], [[(b"a",)], [(b"a",)]]),
        ([b""], [[()]]),
        ([b""], [[(Digits(2), b"x")], [(b"1y",)]]),
        ([b"", b"a"], [[(b"ab",)], [(b"b",), (b"c",)]]),
    ],
)
def test_a_text_at_two_places_is_ambiguous(opens, openings):
    with pytest.raises(AmbiguousError):
        Openings(opens, openings)
