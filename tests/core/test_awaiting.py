from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles import awaiting_twin as twin
from vllm_lazy_grammar.core import refusals, rows
from vllm_lazy_grammar.core.awaiting import AwaitingRows
from vllm_lazy_grammar.core.byte_trie import ByteTrie
from vllm_lazy_grammar.core.compiles import GrammarStore
from vllm_lazy_grammar.core.control import ControlTokens
from vllm_lazy_grammar.core.gate import Awaiting, Gate
from vllm_lazy_grammar.core.inside import Inside
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.prewarm import Worker
from vllm_lazy_grammar.core.refusals import Refusals
from vllm_lazy_grammar.core.rows import RowCache
from vllm_lazy_grammar.core.trial import taken_texts
from vllm_lazy_grammar.core.triggers import Trigger, Triggers, TriggerSpec
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.errors import PatternTimeoutError
from vllm_lazy_grammar.testing import FakeEngine

MODEST = settings(derandomize=True, deadline=None, max_examples=80)
END = "<|end|>"


def vocabulary_of(*texts, special=(END,)):
    """The texts in order, then special tokens; two ids of padding."""
    pieces = [text if isinstance(text, bytes) else text.encode() for text in texts]
    added = {text: len(pieces) + place for place, text in enumerate(special)}
    pieces += [text.encode() for text in special]
    return Vocabulary(pieces, len(pieces) + 2, special_ids=added.values(), added=added)


def triggers_of(texts):
    return tuple(Trigger(*text.split(":", 1)) for text in texts)


class Request:
    """One awaiting request over the fake engine."""

    def __init__(self, vocabulary, triggers, grammar, *, cache=None, held=False, context=b"", **options):
        self.vocabulary, self.stops = vocabulary, frozenset({vocabulary.added[END]})
        self.cache = RowCache(1 << 20) if cache is None else cache
        self.engine = FakeEngine(vocabulary)
        self.worker = Worker(1 if held else 0)
        if held:
            self.engine.hold()
        store = GrammarStore(self.engine, self.worker, self.cache, vocabulary.row_words, limit_bytes=1 << 20, top_k=0)
        self.compile = store.get(GrammarKey("regex", grammar))
        spec = TriggerSpec(triggers_of(triggers), **options)
        self.triggers = Triggers.compile(spec, vocabulary, stop_ids=self.stops)
        words = [trigger.source for trigger in spec.triggers]
        control = ControlTokens(vocabulary, (), "\n".join((grammar, *words)))
        self.inside = Inside(vocabulary, self.compile, control, None, self.stops, self.cache)
        self.gate = Gate(self.triggers, vocabulary, context=context)
        self.trie = ByteTrie(vocabulary)
        self.rows = AwaitingRows(vocabulary, self.trie, self.cache, self.triggers, self.inside, self.compile)

    def __repr__(self):
        triggers = [str(trigger) for trigger in self.triggers.spec.triggers]
        return f"Request({self.vocabulary.pieces}, {triggers}, {self.triggers.spec.start}, {self.compile.key.source!r})"

    def read(self, *texts):
        for text in texts:
            token = text if isinstance(text, int) else self.vocabulary.token_of(text)
            assert isinstance(self.gate.observe(token), Awaiting)
        return self

    def masked(self, *, must_call=False):
        """Texts of the masked tokens but padding; None where nothing is masked."""
        row = np.full(self.vocabulary.row_words, 7, np.int32)
        if not self.rows.fill(self.gate, row, must_call=must_call):
            assert row.tolist() == [7] * len(row)
            return None
        return [self._text(t) for t in rows.masked_ids(row, self.vocabulary.size) if self.vocabulary.piece(t)]

    def allowed(self):
        """Texts of the allowed tokens while a call is owed."""
        row = np.full(self.vocabulary.row_words, 7, np.int32)
        assert self.rows.fill(self.gate, row, must_call=True)
        return [self._text(token) for token in rows.allowed_ids(row, self.vocabulary.size)]

    def _text(self, token):
        return self.vocabulary.piece(token).decode("utf-8", "surrogateescape")


T1 = ("<", "function", "<function", "=", "=get", "=list", "=g", ">", "a", "`", "<function=list", "<function=g")
GET = "<function=get>a*"


# -- forbid --


def test_t1_a_token_that_completes_a_trigger_with_a_refused_tail_is_masked():
    request = Request(vocabulary_of(*T1), ["word:<function="], GET).read("<function")
    assert request.masked() == ["=list", "<function=list"]


def test_far_from_a_trigger_only_tokens_that_hold_a_whole_trigger_and_a_refused_tail_are_masked():
    assert Request(vocabulary_of(*T1), ["word:<function="], GET).read("a").masked() == ["<function=list"]


def test_where_no_token_holds_a_whole_trigger_plus_a_refused_tail_there_is_nothing_to_mask():
    request = Request(vocabulary_of("<", "function", "=", "=get", "list"), ["word:<function="], GET)
    assert request.masked() is None


@pytest.mark.parametrize("on_reject", ["disarm", "error"])
def test_only_forbid_masks_refused_tails(on_reject):
    request = Request(vocabulary_of(*T1), ["word:<function="], GET, on_reject=on_reject).read("<function")
    assert request.masked() is None


def test_a_row_that_masks_a_refused_tail_masks_padding_and_leaves_stop_ids():
    request = Request(vocabulary_of(*T1), ["word:<function="], GET).read("<function")
    row = rows.ones(1)
    assert request.rows.fill(request.gate, row, must_call=False)
    assert row.tolist() == [0b1_1011_1101_1111]


def test_stop_ids_are_masked_where_a_call_is_owed():
    request = Request(vocabulary_of(*T1), ["word:<function="], GET, mandatory=True).read("a")
    assert request.masked(must_call=True) == ["<function=list", END]


def test_a_token_is_masked_only_if_every_matchs_replay_is_refused():
    texts = ("<", "a", "<a", "{", "<a{", "a{")
    both = ["word:<a", "word:{"]
    assert Request(vocabulary_of(*texts), both, "<a").masked() == ["{", "<a{", "a{"]
    assert Request(vocabulary_of(*texts), both, "<a|\\{").masked() is None
    assert Request(vocabulary_of(*texts), both, "<a{b").masked() == ["{", "a{"]


def test_a_trigger_token_is_masked_where_the_grammar_refuses_its_piece():
    vocabulary = vocabulary_of("a", "<a>", special=(END, "<call>"))
    call = vocabulary.added["<call>"]
    assert Request(vocabulary, [f"token:{call}"], "<a>").masked() == ["<call>"]
    assert Request(vocabulary, [f"token:{call}"], "<call>a").masked() is None
    assert Request(vocabulary, [f"token:{call}"], "<a>", start="after").masked() is None


def test_a_control_token_whose_text_holds_a_trigger_is_judged_as_the_session_feeds_it():
    vocabulary = vocabulary_of("a", "<call>", special=(END, "<call>"))
    assert Request(vocabulary, ["word:<call>"], "<call>a").masked() is None
    assert Request(vocabulary, ["word:<call>"], "<b>a").masked() == ["<call>", "<call>"]


def test_a_control_token_is_refused_where_only_free_text_of_the_grammar_would_take_it():
    vocabulary = vocabulary_of("a", "<call>", special=(END, "<call>"))
    request = Request(vocabulary, ["word:<call>"], "[a-z<>]*")
    row = rows.ones(1)
    assert request.rows.fill(request.gate, row, must_call=False)
    assert rows.masked_ids(row, vocabulary.size).tolist() == [3, 4, 5]


def test_a_stop_id_is_never_masked_where_the_turn_may_end_whatever_its_text_holds():
    assert Request(vocabulary_of("<|x", "a"), ["word:<|"], "<[|]a").masked() == ["<|x"]


def test_a_trigger_begun_by_several_tokens_is_replayed_from_where_it_begins():
    request = Request(vocabulary_of("a", "b", "x"), ["word:aab", "word:ab"], "ab").read("a", "a")
    assert request.masked() is None
    request = Request(vocabulary_of("a", "b", "x"), ["word:aab", "word:ab"], "b").read("a", "a")
    assert request.masked() == ["b"]


def test_a_token_that_goes_on_with_a_begun_trigger_for_several_bytes_is_found():
    request = Request(vocabulary_of("<fun", "ction=list", "ction=get", "ction"), ["word:<function="], GET).read("<fun")
    assert request.masked() == ["ction=list"]


def test_behind_a_trigger_only_what_follows_the_whole_match_counts_with_start_after():
    request = Request(vocabulary_of("<t>", "<t>a", "<t>b"), ["word:<t>"], "a+", start="after")
    assert request.masked() == ["<t>b"]


def test_a_literal_behind_a_lookbehind_is_decided_by_the_text_already_there():
    pattern = ["pattern:(?<!`)<function="]
    assert Request(vocabulary_of(*T1), pattern, GET).read("<function").masked() == ["=list", "<function=list"]
    assert Request(vocabulary_of(*T1), pattern, GET).read("`", "<function").masked() == ["<function=list"]
    assert Request(vocabulary_of(*T1), pattern, GET).read("`").masked() is None


def test_a_lookbehind_that_the_token_itself_decides_is_tried_each_time():
    request = Request(vocabulary_of("`<t>b", "a<t>b", "<t>b", "`"), ["pattern:(?<!`)<t>"], "<t>a")
    assert request.masked() == ["a<t>b", "<t>b"]
    assert request.read("`").masked() == ["a<t>b"]


def test_for_patterns_forbid_is_disarm():
    assert Request(vocabulary_of("x", "xx"), ["pattern:x+"], "a").masked() is None


def test_a_token_that_only_a_pattern_fires_on_is_not_masked_beside_a_literal_that_may_count():
    triggers = ["pattern:(?<=^|b)\\{", "pattern:({a)"]
    request = Request(vocabulary_of("a{a", "b{a", "a"), triggers, "x")
    assert request.masked() == ["b{a"]


def test_a_pattern_whose_replay_is_taken_saves_a_token_whose_words_replay_is_refused():
    texts = ("{b", "a", "ab", "b")
    request = Request(vocabulary_of(*texts), ["word:{", "pattern:a.?\\{"], "ab?\\{b")
    assert request.masked() == ["{b"]
    assert request.read("a").masked() is None
    assert request.read("b").masked() is None
    assert request.read("b").masked() == ["{b"]


@pytest.mark.parametrize("limit", ["_TRIED", "_WINDOW"])
def test_how_far_patterns_are_looked_at_is_bounded_and_what_is_beyond_stays_masked(monkeypatch, limit):
    request = Request(vocabulary_of("{b", "a"), ["word:{", "pattern:a.?\\{"], "a\\{b").read("a")
    assert request.masked() is None
    monkeypatch.setattr(refusals, limit, 0)
    assert request.masked() == ["{b"]


def test_a_pattern_may_save_a_token_where_a_literal_that_does_not_count_begins():
    triggers = ["pattern:(?<!`)<t>", "word:>b", "pattern:<t.b"]
    request = Request(vocabulary_of("<t>b", "`"), triggers, "<t>b|<t>c").read("`")
    assert request.masked() is None
    assert Request(vocabulary_of("<t>b", "`"), triggers, "<t>c").read("`").masked() == ["<t>b"]


def test_a_token_on_which_a_pattern_runs_too_long_is_not_masked_and_no_error_is_raised():
    vocabulary = vocabulary_of("{x" + "a" * 60 + "!b", "{b")
    slow = Request(vocabulary, ["word:{", "pattern:x(a|aa)+$"], "b")
    with pytest.raises(PatternTimeoutError):
        twin.observe(slow.gate, slow.inside, 0)
    assert Request(vocabulary, ["word:{", "pattern:x(a|aa)+$"], "b").masked() == ["{b"]
    assert len(Request(vocabulary, ["word:{"], "b").masked()) == 2


def test_a_literal_that_begins_in_the_context_is_replayed_from_the_end_of_the_context():
    vocabulary, pattern = vocabulary_of("a", "b", "c"), ["pattern:(?<!`)<abc"]
    assert Request(vocabulary, pattern, "abc", context=b"x<").read("a", "b").masked() is None
    assert Request(vocabulary, pattern, "<abc", context=b"x<").read("a", "b").masked() == ["c"]


def test_a_word_that_begins_in_the_context_does_not_count():
    request = Request(vocabulary_of("t>b", "<t>b", "a"), ["word:<t>"], "<t>a", context=b"x<")
    assert request.masked() == ["<t>b"]


def test_until_the_grammar_is_compiled_forbid_acts_as_disarm_and_joins_nothing():
    request = Request(vocabulary_of(*T1), ["word:<function="], GET, held=True).read("<function")
    assert request.masked() is None
    request.engine.release()
    request.compile.result()
    assert request.masked() == ["=list", "<function=list"]
    request.worker.close()


def test_a_grammar_that_can_not_be_compiled_masks_nothing():
    request = Request(vocabulary_of(*T1), ["word:<function="], "(", mandatory=True, force_after=0)
    assert request.allowed() == ["<", "<function"]


def test_requests_with_equal_triggers_and_grammar_share_their_rows():
    cache, vocabulary = RowCache(1 << 20), vocabulary_of(*T1)
    first = Request(vocabulary, ["word:<function="], GET, cache=cache).read("<function")
    masked, held = first.masked(), len(cache)
    second = Request(vocabulary, ["word:<function="], GET, cache=cache).read("<function")
    second.inside.start = None
    assert second.masked() == masked
    assert len(cache) == held
    other = Request(vocabulary, ["word:<function="], "<function=list>", cache=cache).read("<function")
    assert other.masked() == ["=get", "=g", "<function=g"]


def test_requests_that_share_rows_differ_where_their_look_behinds_do():
    cache, vocabulary, pattern = RowCache(1 << 20), vocabulary_of(*T1), ["pattern:(?<!`)<function="]
    for _ in range(2):
        fires = Request(vocabulary, pattern, GET, cache=cache).read("<function")
        quoted = Request(vocabulary, pattern, GET, cache=cache).read("`", "<function")
        assert (fires.masked(), quoted.masked()) == (["=list", "<function=list"], ["<function=list"])


def test_the_gate_is_where_it_was_after_every_call():
    request = Request(vocabulary_of(*T1), ["word:<function=", "pattern:x+y"], GET).read("a", "<function")
    before = (request.gate.buffer, request.gate.spans, request.gate.literal_state)
    request.masked()
    assert (request.gate.buffer, request.gate.spans, request.gate.literal_state) == before


def test_texts_are_offered_prefix_by_prefix_and_nothing_behind_a_refused_one():
    offered = []

    class Counting:
        def __init__(self, matcher):
            self.matcher = matcher

        def accept_bytes(self, data):
            offered.append(data)
            return self.matcher.accept_bytes(data)

        def rollback(self, steps):
            self.matcher.rollback(steps)

    matcher = FakeEngine(vocabulary_of("a")).compile(GrammarKey("regex", "ab*c")).matcher()
    assert taken_texts(Counting(matcher), [b"abc", b"b1", b"ab", b"b2", b"b", b"ad1", b"ad2"]) == {b"ab", b"abc"}
    assert b"".join(offered) == b"abcdb"
    assert matcher.steps == 0


PIECES = st.lists(
    st.sampled_from([*"ab<>{`", "<a", "<a>", "{a", "b{", "é", b"\xc3", b"\xa9"]), min_size=1, max_size=3
).map(lambda parts: b"".join(part if isinstance(part, bytes) else part.encode() for part in parts))
GRAMMARS = st.sampled_from(["<a>b*", "\\{a*b?", "(?:<a>|<ab)[ab{]*", "a+b", "a*", "<call>a", "\xc3\xa9a", "`?<a"])
WORDS = st.sampled_from(["word:<a", "word:<a>", "word:{", "word:ab", "word:é", "word:b<", "word:<call>", "word:aa"])
TOKENS = st.integers(0, 11).map("token:{}".format)
BEHINDS = st.sampled_from(["pattern:(?<!`)<a", "pattern:(?<=^|b)\\{", "pattern:(?<![a`])a<", "pattern:({a)"])
PATTERNS = st.sampled_from(["pattern:(a)b+", "pattern:`[<{]", "pattern_full:a.*b", "pattern:a.?\\{"])
ANY = st.lists(WORDS | TOKENS | BEHINDS | PATTERNS, min_size=1, max_size=4)


@st.composite
def requests(draw, triggers=ANY, **options):
    pieces = draw(st.lists(PIECES, min_size=12, max_size=20))
    vocabulary = vocabulary_of(*pieces, special=(END, "<call>"))
    options["start"] = draw(st.sampled_from(["trigger", "after"]))
    context = draw(st.sampled_from([b"", b"", b"<", b"a`"]))
    return Request(vocabulary, draw(triggers), draw(GRAMMARS), context=context, **options)


def read_some(request, tokens):
    """Offer tokens as a session would, until the grammar takes a replay; yields before each one."""
    yield
    for token in tokens:
        _, taken = twin.observe(request.gate, request.inside, token)
        if taken:
            request.gate.undo()
            return
        yield


@MODEST
@given(requests(), st.lists(st.integers(0, 11), max_size=6))
def test_forbid_masks_exactly_the_tokens_that_the_slow_twin_finds(request_, tokens):
    shared = Refusals(
        request_.vocabulary, request_.trie, request_.triggers, request_.inside, request_.compile.key, request_.cache
    )
    for _ in read_some(request_, tokens):
        expected = twin.refused(request_.gate, request_.inside, request_.vocabulary, literals_only=True)
        assert set(shared.find(request_.gate).ids) == expected
        fresh = Refusals(
            request_.vocabulary, request_.trie, request_.triggers, request_.inside, request_.compile.key, request_.cache
        )
        assert set(fresh.find(request_.gate).ids) == expected


# -- force_after --

FORCE = {"mandatory": True, "force_after": 0}
TOOL = ("<", "<t", "<tool>", "tool>", "to", "ol", ">", "a", "<tool>a", "<tool>b", "x<", "<a")


def test_at_the_start_any_token_that_starts_a_word_is_legal_and_nothing_else():
    request = Request(vocabulary_of(*TOOL), ["word:<tool>"], "<tool>a", **FORCE)
    assert request.allowed() == ["<", "<t", "<tool>", "<tool>a"]


def test_with_tool_already_written_only_the_rest_goes_on():
    request = Request(vocabulary_of(*TOOL), ["word:<tool>"], "<tool>a", **FORCE).read("a", "<")
    assert request.allowed() == ["tool>", "to"]
    assert request.read("to").allowed() == ["ol"]
    assert request.read("ol").allowed() == [">"]


def test_tokens_that_hold_the_rest_and_a_tail_are_legal_where_the_grammar_takes_the_tail():
    request = Request(vocabulary_of(*TOOL), ["word:<tool>"], "<tool>b", **FORCE)
    assert "<tool>b" in request.allowed()
    assert "<tool>a" not in request.allowed()


def test_while_the_grammar_is_not_there_no_tails_are_forced():
    request = Request(vocabulary_of(*TOOL), ["word:<tool>"], "<tool>a", held=True, **FORCE)
    assert request.allowed() == ["<", "<t", "<tool>"]
    request.engine.release()
    request.worker.close()


def test_trigger_tokens_are_legal_always():
    vocabulary = vocabulary_of(*TOOL, special=(END, "<call>"))
    request = Request(vocabulary, ["word:<tool>", "token:<call>"], "(?:<tool>|<call>)a", **FORCE).read("<")
    assert request.allowed() == ["tool>", "to", "<call>"]


def test_with_only_token_triggers_only_they_are_legal():
    vocabulary = vocabulary_of(*TOOL, special=(END, "<call>"))
    assert Request(vocabulary, ["token:<call>"], "<call>a", **FORCE).read("a").allowed() == ["<call>"]


def test_a_half_character_is_finished_first():
    half = vocabulary_of(b"\xc3", b"\xa9", b"\xa9<", b"\xa9a", "<", "<t>", b"\xe2", b"\x82", b"\xac", b"\xe0", b"\x9f")
    allowed = {
        b"\xc3": [b"\xa9", b"\xa9<", b"\x82", b"\xac", b"\x9f"],
        b"\xe2": [b"\xa9", b"\x82", b"\xac", b"\x9f"],
        b"\xe0": [b"\xa9", b"\xac"],
    }
    for first, pieces in allowed.items():
        request = Request(half, ["word:<t>"], "<t>a", **FORCE).read(half.pieces.index(first))
        assert request.allowed() == [piece.decode("utf-8", "surrogateescape") for piece in pieces]


def test_half_a_character_of_two_bytes_lacks_one():
    vocabulary = vocabulary_of(b"\xe2", b"\x82", b"\xac<", b"\x82<", b"\xac\xac", "<t>")
    request = Request(vocabulary, ["word:<t>"], "<t>a", **FORCE).read(0, 1)
    assert request.allowed() == [piece.decode("utf-8", "surrogateescape") for piece in (b"\x82", b"\xac<", b"\x82<")]


def test_a_trigger_token_whose_piece_the_grammar_refuses_is_not_forced():
    vocabulary = vocabulary_of(*TOOL, special=(END, "<call>"))
    request = Request(vocabulary, ["word:<tool>", "token:<call>"], "<tool>a", **FORCE).read("<")
    assert request.allowed() == ["tool>", "to"]


def test_a_stop_id_is_not_forced_though_its_text_leads_into_a_trigger():
    vocabulary = vocabulary_of("<", "a")
    assert Request(vocabulary, ["word:<|end|>x"], "<[|]end[|]>x", **FORCE).allowed() == ["<"]


def test_a_word_that_is_half_written_inside_a_character_goes_on_with_its_own_bytes():
    vocabulary = vocabulary_of(b"\xc3", b"\xa9", b"\xa8", "x")
    assert Request(vocabulary, ["word:éx"], "éx", **FORCE).read(0).allowed() == [
        b"\xa9".decode("utf-8", "surrogateescape")
    ]


def test_where_the_longest_begun_word_can_not_go_on_a_shorter_one_does():
    request = Request(vocabulary_of("aa", "b", "x"), ["word:aac", "word:ab"], "(?:aac|ab)x", **FORCE).read("aa")
    assert request.allowed() == ["b"]


def test_a_word_already_refused_is_begun_anew():
    request = Request(vocabulary_of("<t>", "<", "b", "a"), ["word:<t>"], "<t>a", on_reject="disarm", **FORCE).read("<")
    request.gate.undo()
    request.gate.observe(request.vocabulary.token_of("<t>"))
    request.gate.refuse()
    assert request.allowed() == ["<t>", "<"]


@pytest.mark.parametrize("observed", [0, 1, 2])
def test_force_after_counts_observed_tokens(observed):
    request = Request(vocabulary_of("<t>", "a"), ["word:<t>"], "<t>a", mandatory=True, force_after=2)
    assert request.read(*["a"] * observed).allowed() == (["<t>"] if observed == 2 else ["<t>", "a"])


def test_force_after_holds_only_where_a_call_is_owed():
    assert Request(vocabulary_of("<t>", "a"), ["word:<t>"], "<t>a", **FORCE).masked(must_call=False) is None


def test_where_no_token_leads_into_a_trigger_the_text_stays_free():
    request = Request(vocabulary_of("a", "b"), ["word:<t>"], "<t>a", **FORCE)
    assert request.allowed() == ["a", "b"]


@MODEST
@given(
    requests(st.lists(WORDS | TOKENS, min_size=1, max_size=3) | st.tuples(WORDS, PATTERNS), **FORCE),
    st.lists(st.integers(0, 11), max_size=6),
    st.booleans(),
)
def test_forcing_allows_exactly_what_the_slow_twin_finds(request_, tokens, there):
    vocabulary, row = request_.vocabulary, rows.zeros(request_.vocabulary.row_words)
    if not there:
        request_.rows._has_grammar = lambda: False
    for _ in read_some(request_, tokens):
        expected = twin.forced(request_.gate, request_.inside, vocabulary, request_.stops, there=there)
        if expected:
            assert request_.rows.fill(request_.gate, row, must_call=True)
            assert set(rows.allowed_ids(row, vocabulary.size).tolist()) == expected
