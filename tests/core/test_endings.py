"""Endings: fewest tokens to the end and the tokens that keep it near, against brute force on grammars that a person can check."""

from __future__ import annotations

import gc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import Workshop, feed, ids
from vllm_lazy_grammar.core import stacks
from vllm_lazy_grammar.core.byte_trie import ByteTrie
from vllm_lazy_grammar.core.endings import NEVER, Endings
from vllm_lazy_grammar.core.leading import EndingsStore, far
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.network import FAR, Call, Network, Repeat, Span, State
from vllm_lazy_grammar.core.pieces import Pieces
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.testing import allowed_ids, small_vocabulary

TEXTS = (b"a", b"b", b"c", b"ab", b"abc", b"bc", b"ca", b"cab")


def spans(text, target):
    return [Span(byte, byte, target) for byte in text]


def nested():
    """S ::= "a" S "b" | "c": as many b as a, and a c between them."""
    rule = [
        State(spans=[*spans(b"a", 1), *spans(b"c", 3)]),
        State(calls=[Call(0, 2)]),
        State(spans=spans(b"b", 3)),
        State(final=True),
    ]
    return Network(rule, 0)


def repeated(lower, upper):
    """( "a" | "bc" ){lower,upper} "c"."""
    rule = [
        State(repeat=Repeat(3, 1, lower, upper)),
        State(spans=spans(b"c", 2)),
        State(final=True),
        State(spans=[*spans(b"a", 5), *spans(b"b", 4)]),
        State(spans=spans(b"c", 5)),
        State(final=True),
    ]
    return Network(rule, 0)


def endings(network, texts=TEXTS, excluded=()):
    vocabulary = Vocabulary([*texts, b""], len(texts) + 1)
    return Endings(network, Pieces(ByteTrie(vocabulary), frozenset(excluded)), vocabulary.row_words)


def takes(network, text):
    """Whether a text, byte by byte, is a sentence: plain recursion over the states, without stacks or tables."""
    ends = _through(network, network.start, text)
    return "" in ends or b"" in ends


def _through(network, number, text, depth=0):
    """What may be left of a text once the rule that `number` is in has ended."""
    if depth > 40:
        return set()
    state, left = network.states[number], set()
    if state.final:
        left.add(text)
    for span in state.spans:
        if text and span.low <= text[0] <= span.high:
            left |= _through(network, span.target, text[1:], depth + 1)
    for target in () if state.repeat else state.jumps:
        left |= _through(network, target, text, depth + 1)
    for call in () if state.repeat else state.calls:
        for rest in _through(network, call.start, text, depth + 1):
            left |= _through(network, call.target, rest, depth + 1)
    if state.repeat:
        left |= _repeated(network, state.repeat, text, depth)
    return left


def _repeated(network, repeat, text, depth):
    left, now = set(), {text}
    for count in range(1 + (repeat.upper if repeat.upper is not None else 8)):
        if count >= repeat.lower:
            left |= {rest for t in now for rest in _through(network, repeat.target, t, depth + 1)}
        now = {rest for t in now for rest in _through(network, repeat.start, t, depth + 1)}
    return left


def brute(network, before, texts=TEXTS, most=4):
    """Fewest tokens behind `before` that make a sentence, by trying them all; None where `most` do not suffice."""
    level = {before}
    for count in range(most + 1):
        if any(takes(network, text) for text in level):
            return count
        level = {text + piece for text in level for piece in texts}
    return None


NETWORKS = {
    "nested": nested(),
    "two or three": repeated(2, 3),
    "two or more": repeated(2, None),
    "none or more": repeated(0, None),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("before", [b"", b"a", b"aa", b"ab", b"bc", b"bca", b"b", b"aab"])
def test_the_fewest_tokens_are_those_that_trying_them_all_finds(name, before):
    network = NETWORKS[name]
    found = endings(network)
    needs = found.needs(found.advance(found.start, before, before))
    expected = brute(network, before)
    assert needs == expected if expected is not None else needs > 4


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_row_keeps_exactly_the_tokens_behind_which_the_rest_fits(name, limit):
    network = NETWORKS[name]
    found = endings(network)
    row = np.full(1, -1, np.int32)
    found.mask(found.start, row, limit)
    for token, piece in enumerate(TEXTS):
        behind = found.advance(found.start, token, piece)
        if behind >= 0:
            fits = brute(network, piece, most=limit) is not None
            assert (token in allowed_ids(row)) == fits, piece


def test_a_token_may_begin_in_one_rule_and_end_in_another():
    found = endings(nested(), (b"a", b"b", b"c", b"acb"))
    assert found.needs(found.advance(found.start, b"a", b"a")) == 1 + 1  # c, b: the token acb is of no use behind a
    assert found.needs(found.advance(found.start, b"", b"")) == 1  # c
    found = endings(nested(), (b"a", b"b", b"c", b"cb", b"cbb"))
    assert found.needs(found.advance(found.start, b"aa", b"aa")) == 1


def test_what_no_token_spells_has_no_way():
    found = endings(nested(), (b"a", b"b"))
    assert found.needs(found.start) >= NEVER


def test_a_token_that_is_never_text_is_not_counted_on():
    assert endings(nested(), excluded=()).needs(0) == 1
    only = endings(nested(), (b"c", b"ac", b"b"), excluded=(0,))
    assert only.needs(only.start) == 2  # ac, b


@st.composite
def networks(draw):
    """Two rules of a few states each; the first may call the second, and the second itself."""
    states = []
    for rule in (0, 1):
        base = 4 * rule
        for place in range(3):
            targets = st.integers(base + place + 1, base + 3)
            state = State(
                spans=[Span(b, b, draw(targets)) for b in draw(st.lists(st.sampled_from(b"abc"), max_size=2))]
            )
            if draw(st.booleans()):
                state.calls.append(Call(4, draw(targets)))
            states.append(state)
        states.append(State(final=True))
    states[4].spans.append(Span(ord("c"), ord("c"), 7))
    states[4].calls.clear()  # a rule that begins with itself: no engine of ours makes one
    return Network(states, 0)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(networks(), st.lists(st.sampled_from(TEXTS[:4]), max_size=2))
def test_on_random_networks_the_numbers_are_those_of_brute_force(network, parts):
    found = endings(network, TEXTS[:5])
    before = b"".join(parts)
    stand = found.advance(found.start, before, before)
    expected = brute(network, before, TEXTS[:5], most=3)
    needs = found.needs(stand)
    assert needs == expected if expected is not None else needs > 3


def test_states_without_an_end_are_far_from_it():
    network = Network([State(spans=[Span(97, 97, 0)])], 0)
    assert network.shortest == [FAR]


# -- sessions ----------------------------------------------------------------------------------------------------------

BRACES = 'root ::= "{" root "}" | "a"'


@pytest.fixture(scope="module")
def shop():
    vocabulary = small_vocabulary()
    shop = Workshop(engine=XgrammarEngine(vocabulary, max_threads=1))
    yield shop
    shop.close()


def make(shop, source, *triggers, kind="grammar", **options):
    return shop.session(source, *triggers, kind=kind, budget=True, **options)


def texts_left(shop, session, remaining):
    row = np.zeros(shop.vocabulary.row_words, np.int32)
    session.fill(row, remaining)
    return {shop.vocabulary.piece(t).decode("utf-8", "replace") for t in allowed_ids(row)}


def test_a_brace_is_masked_as_soon_as_its_closing_would_not_fit(shop):
    session = make(shop, BRACES)
    assert "{" in texts_left(shop, session, 4)  # { a } end
    assert texts_left(shop, session, 3) == {"a"}


def test_where_it_may_end_the_last_token_is_the_stop_id(shop):
    session = make(shop, "[12]+", kind="regex")
    assert feed(session, "1")
    assert {"1", "<end>"} <= texts_left(shop, session, 2)
    assert texts_left(shop, session, 1) == {"<end>"}


def test_every_budget_that_the_shortest_text_fits_in_ends_with_a_complete_text(shop):
    for budget in range(2, 12):
        session, rng = make(shop, BRACES), np.random.default_rng(budget)
        row = np.zeros(shop.vocabulary.row_words, np.int32)
        for used in range(budget):
            session.fill(row, budget - used)
            allowed = allowed_ids(row)
            deeper = ids("{")[0]
            assert session.accept(deeper if deeper in allowed else int(rng.choice(allowed)))
            if session.is_terminated():
                break
        assert session.is_terminated()


def test_far_from_the_end_rows_are_those_without_a_budget(shop):
    session, plain = make(shop, BRACES), make(shop, BRACES)
    assert feed(session, "{")
    assert feed(plain, "{")
    assert texts_left(shop, session, far(3) + 1) == texts_left(shop, plain, None)


def test_a_budget_that_does_not_fit_leaves_the_row_and_is_told(shop):
    session, plain = make(shop, BRACES), make(shop, BRACES)
    assert texts_left(shop, session, 1) == texts_left(shop, plain, None)
    assert session.trace.needed == 2


def test_taking_tokens_back_gives_back_their_budget(shop):
    session = make(shop, BRACES)
    assert texts_left(shop, session, 5) == {"{", "a"}
    assert feed(session, "{")
    assert texts_left(shop, session, 4) == {"a"}
    session.rollback(1)
    assert texts_left(shop, session, 5) == {"{", "a"}


def test_a_call_that_is_owed_is_begun_while_its_shortest_text_fits(shop):
    for budget in (9, 10, 30):
        session = make(shop, 'root ::= "<t>" "{" "1" "}"', "word:<t>", mandatory=1, on_reject="disarm")
        row = np.zeros(shop.vocabulary.row_words, np.int32)
        prose = ids("b")[0]
        for used in range(budget):
            session.fill(row, budget - used)
            allowed = allowed_ids(row)
            assert session.accept(prose if prose in allowed else allowed[-1])
            if session.is_terminated():
                break
        assert session.is_terminated()
        assert session.trace.events[0].kind == "fired"


def test_an_owed_call_leaves_prose_free_while_there_is_time(shop):
    session = make(shop, 'root ::= "<t>" "1"', "word:<t>", mandatory=1, on_reject="disarm")
    assert "b" in texts_left(shop, session, 40)
    assert "b" not in texts_left(shop, session, 5)


def test_no_call_is_begun_that_would_not_fit_any_more(shop):
    session = make(shop, 'root ::= "<t>" "1" "2" "1" "2"', "word:<t>", on_reject="disarm")
    assert "<t>" in texts_left(shop, session, 4)  # <t> 12 12 end
    assert "<t>" not in texts_left(shop, session, 3)
    assert {"b", "<end>"} <= texts_left(shop, session, 3)


def test_a_call_behind_a_call_is_not_begun_either_where_it_would_not_fit(shop):
    session = make(shop, 'root ::= "<t>" [12]+', "word:<t>", on_reject="disarm", rearm=1)
    assert feed(session, "<t>", "1")
    assert "<t>" in texts_left(shop, session, 20)
    left = texts_left(shop, session, 2)
    assert {"b", "1", "<end>"} <= left
    assert "<t>" not in left


def test_a_trigger_that_is_owed_is_written_with_as_many_tokens_as_there_is_time_for(shop):
    session = make(shop, 'root ::= "<t>" "1"', "word:<t>", mandatory=1, on_reject="disarm")
    assert texts_left(shop, session, 6) == {"<", "<t>"}  # < t > 1 end, and one to spare
    assert texts_left(shop, session, 5) == {"<t>"}


def test_the_last_token_behind_a_call_that_was_owed_is_the_stop_id(shop):
    session = make(shop, 'root ::= "<t>" "1"', "word:<t>", mandatory=1, on_reject="disarm", rearm=1)
    assert feed(session, "<t>", "1", "b")
    assert {"b", "<end>"} <= texts_left(shop, session, 2)
    assert texts_left(shop, session, 1) == {"<end>"}
    free = make(shop, 'root ::= "<t>" "1"', "word:<t>", on_reject="disarm", rearm=1)
    assert feed(free, "<t>", "1", "b")
    assert "b" in texts_left(shop, free, 1)


def test_a_stop_id_is_cleared_where_the_answer_shall_go_on_and_anything_else_is_legal(shop):
    session, row = make(shop, "1?", kind="regex"), np.zeros(shop.vocabulary.row_words, np.int32)
    for text, left in (("", {"1"}), ("1", {"<end>"})):
        assert feed(session, *text)
        session.fill(row)
        session.go_on(row)
        assert {shop.vocabulary.piece(t).decode() for t in allowed_ids(row)} == left


def test_what_reasoning_may_take_is_what_the_shortest_way_leaves(shop):
    eager, owed = make(shop, BRACES), make(shop, BRACES, "word:<t>", mandatory=1, start="after")
    free = make(shop, BRACES, "word:<t>", start="after")
    assert (eager.owes(9), free.owes(9), eager.owes(5000)) == (2, None, None)
    assert owed.owes(9) > 2


def test_endings_are_worked_out_by_the_worker_and_a_step_waits_for_them_only_near_the_end():
    shop = Workshop(engine=XgrammarEngine(small_vocabulary(), max_threads=1), threads=1, prewarm=0)
    try:
        session = make(shop, BRACES)
        session.fill(np.zeros(shop.vocabulary.row_words, np.int32))
        with shop.worker.held():
            assert "{" in texts_left(shop, session, 3)
            waited = session.trace.endings_seconds
            assert waited > 0
            assert "{" in texts_left(shop, session, 300)
            assert session.trace.endings_seconds == waited
        while not session._near_end.leading._prepared().ready:
            session._near_end.leading._prepared().wait(1)
        assert texts_left(shop, session, 3) == {"a"}
    finally:
        shop.close()


@pytest.mark.parametrize(("missing", "complete"), [((0x04, 0xC0), True), ((0x41,), False)])
def test_a_vocabulary_may_lack_bytes_that_no_text_has(missing, complete):
    vocabulary = Vocabulary([bytes((byte,)) for byte in range(256) if byte not in missing], 256)
    assert Pieces(ByteTrie(vocabulary), frozenset()).complete is complete


def test_a_trigger_that_is_longer_than_what_the_grammar_reads_of_it_is_counted_whole(shop):
    for budget in range(9, 14):  # { a b c : 1 2 end, and one to spare
        session = make(
            shop,
            'root ::= ":" "1" "2"',
            "pattern:abc(:)",
            "word:{abc:",
            mandatory=1,
            on_reject="disarm",
            start="trigger",
        )
        row, prose = np.zeros(shop.vocabulary.row_words, np.int32), ids("}")[0]
        for used in range(budget):
            session.fill(row, budget - used)
            found = allowed_ids(row)
            assert session.accept(prose if prose in found else min(found, key=lambda t: len(shop.vocabulary.piece(t))))
            if session.is_terminated():
                break
        assert session.is_terminated(), budget


def test_a_token_across_a_trigger_and_a_longer_text_is_not_taken_where_there_is_no_time_for_it(shop):
    session = make(shop, 'root ::= "c" "1" "2" "1" "2" "1" "2" | "}"', "word:ab", mandatory=1, start="after")
    assert "abc" in texts_left(shop, session, 40)
    assert "abc" not in texts_left(shop, session, 4)
    assert texts_left(shop, session, 4) & {"ab", "a"}


def test_a_text_that_is_far_longer_than_the_shortest_is_begun_far_from_the_end_and_told(shop):
    session = make(shop, "a|b(ca){200}", kind="regex")
    assert "b" in texts_left(shop, session, 100)
    assert feed(session, "b")
    texts_left(shop, session, 90)
    assert session.trace.needed == 401
    assert "401 tokens were needed" in session.trace.describe_budget()


def test_where_no_ends_are_kept_any_more_the_next_request_begins_anew(shop, monkeypatch):
    session = make(shop, BRACES)
    texts_left(shop, session, 5)
    monkeypatch.setattr(stacks, "STANDS", 0)
    assert feed(session, *"{" * 280)
    texts_left(shop, session, 100)
    assert session.trace.budget_lost
    monkeypatch.undo()
    assert texts_left(shop, make(shop, BRACES), 3) == {"a"}


def test_what_takes_too_much_is_not_tried_again_at_every_step(shop, monkeypatch):
    session, tries = make(shop, BRACES), []
    texts_left(shop, session, 5)
    monkeypatch.setattr(stacks, "STANDS", 0)
    assert feed(session, *"{" * 280)
    for remaining in (100, 99, 98):
        texts_left(shop, session, remaining)
        monkeypatch.setattr(Endings, "advance", lambda *_: tries.append(1) or 0)
    assert session.trace.budget_lost
    assert tries == []


def grammars(count):
    return [f'root ::= "{"".join("ab"[number >> bit & 1] for bit in range(9))}" [a-c]*' for number in range(count)]


def near_its_end(shop, source):
    session = make(shop, source)
    texts_left(shop, session, 12)
    return session


@pytest.mark.slow
def test_the_endings_of_all_grammars_together_are_bounded(shop):
    store = EndingsStore(shop.vocabulary, shop.trie, limit_bytes=1 << 21)
    made = [shop.engine.compile(GrammarKey("grammar", each)) for each in grammars(60)]
    kept = []
    for grammar in made:
        endings = store.get(grammar, frozenset()).get()
        endings.costs(endings.start)
        kept.append(endings.nbytes)
    assert sum(kept) > 1 << 22
    assert store.nbytes <= (1 << 21) + max(kept)
    assert store.get(made[-1], frozenset()).get() is endings


@pytest.mark.slow
def test_nothing_of_a_grammar_remains_once_its_requests_are_over_and_it_is_dropped():
    vocabulary = small_vocabulary()
    shop = Workshop(engine=XgrammarEngine(vocabulary, max_threads=1), kept=0)
    one_more, *sources = grammars(301)
    near_its_end(shop, one_more)._compile.release()
    gc.collect()
    before = ours()
    for source in sources:
        near_its_end(shop, source)._compile.release()
    gc.collect()
    assert not shop.store
    assert not shop.endings.nbytes
    assert shop.rows.nbytes <= shop.rows.limit_bytes
    grown = {
        name: count - before[name] for name, count in ours().items() if count > before[name] + BOUNDED.get(name, 0)
    }
    assert not grown
    shop.close()


BOUNDED = {"GrammarKey": 300}  # in the rows' cache, which is bounded in bytes


def ours():
    """How many objects there are of each of our classes."""
    return Counter(
        type(each).__name__ for each in gc.get_objects() if str(type(each).__module__).startswith("vllm_lazy_grammar")
    )


def test_a_row_in_which_stop_ids_are_cleared_masks_padding(shop):
    session, row = make(shop, BRACES, "word:<t>", start="after"), np.zeros(shop.vocabulary.row_words, np.int32)
    session.fill(row)
    session.go_on(row)
    assert max(allowed_ids(row)) < shop.vocabulary.size
    assert all(shop.vocabulary.piece(token) for token in allowed_ids(row))


@pytest.mark.parametrize("excluded", [(), (0x41,)])
def test_an_id_that_ends_the_turn_may_be_a_character(excluded):
    vocabulary = Vocabulary([bytes((byte,)) for byte in range(256)], 256)
    assert Pieces(ByteTrie(vocabulary), frozenset(excluded)).complete
