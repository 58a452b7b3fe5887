"""The gate, rule by rule, and against the slow model of the spec."""

from __future__ import annotations

import threading
import time

import pytest

from vllm_lazy_grammar.core.gate import Awaiting, Fired, Gate
from vllm_lazy_grammar.core.transcript import Fed
from vllm_lazy_grammar.core.triggers import Trigger, Triggers, TriggerSpec
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.errors import InternalError, PatternTimeoutError


class Bench:
    """A gate that is fed bytes: each distinct piece is one token, in the order of their first use."""

    def __init__(self, *triggers, pieces=(), context=b"", timeout_ms=5.0, **options):
        self.vocabulary = Vocabulary(list(pieces) + [bytes([byte]) for byte in range(256)], len(pieces) + 256)
        self.pieces = list(self.vocabulary.pieces)
        spec = TriggerSpec.parse({"grammar_triggers": list(triggers), **options})
        self.triggers = Triggers.compile(spec, self.vocabulary, stop_ids=())
        self.gate = Gate(self.triggers, self.vocabulary, context=context, timeout_ms=timeout_ms)

    def read(self, *pieces):
        """Observe them; what the last one gave."""
        return [self.gate.observe(self.pieces.index(piece)) for piece in pieces][-1]

    def letters(self, data):
        """Observe one token for each byte until it fires; how many were read, and the last observation."""
        for count, byte in enumerate(data, 1):
            if isinstance(seen := self.read(bytes([byte])), Fired):
                return count, seen
        return len(data), seen


def bench(*triggers, **options):
    return Bench(*triggers, pieces=options.pop("pieces", ()), **options)


def fed(observation):
    """What a firing feeds: each token's bytes, and whether it is whole."""
    assert isinstance(observation, Fired)
    return [(one.data, one.whole) for one in observation.replay]


# Rule 1: against the accumulated text.


def test_a_trigger_split_over_three_tokens_fires_on_the_last():
    b = bench("word:<tool_call>", pieces=[b"<tool", b"_ca", b"ll>"])
    assert b.read(b"<tool", b"_ca") == Awaiting()
    assert fed(b.read(b"ll>")) == [(b"<tool", True), (b"_ca", True), (b"ll>", True)]


def test_an_eleven_byte_word_in_single_bytes_behind_a_split_character_fires_on_its_last_byte():
    b = bench("word:<tool_call>")
    count, seen = b.letters("€".encode() + b"<tool_call>")
    assert count == 3 + 11
    assert fed(seen) == [(bytes([byte]), True) for byte in b"<tool_call>"]


# Rule 2: trigger tokens.


@pytest.mark.parametrize("other", ["word:a<t>", "pattern:a<t>", "pattern:a<[t]>"])
def test_a_trigger_token_comes_first_and_discards_the_buffer(other):
    b = bench(other, "token:<t>", pieces=[b"<t>"])
    b.read(b"a")
    seen = b.read(b"<t>")
    assert seen.trigger == Trigger("token", "<t>")
    assert fed(seen) == [(b"<t>", True)]


def test_pieces_that_spell_a_trigger_token_do_not_fire_it():
    b = bench("token:<t>", pieces=[b"<t>", b"<t"])
    assert b.read(b"<t", b">") == Awaiting()


def test_a_refused_trigger_token_stays_in_the_buffer_and_the_words_are_tried_on_it():
    b = bench("token:<t>", "word:a<t", pieces=[b"<t>"])
    b.read(b"a", b"<t>")
    seen = b.gate.refuse()
    assert seen.trigger == Trigger("word", "a<t")
    assert fed(seen) == [(b"a", True), (b"<t>", True)]
    assert b.gate.refuse() == Awaiting()
    assert b.gate.buffer == b"a<t>"


def test_a_trigger_token_is_tried_again_where_it_comes_again():
    b = bench("token:<t>", pieces=[b"<t>"])
    b.read(b"<t>")
    b.gate.refuse()
    assert isinstance(b.read(b"<t>"), Fired)


# Rule 3: list order, then leftmost.


def test_the_first_in_the_list_wins_whatever_its_position():
    b = bench("word:bb", "word:aa", pieces=[b"aa bb"])
    assert b.read(b"aa bb").trigger == Trigger("word", "bb")


def test_words_and_patterns_are_one_list():
    b = bench("pattern:b.", "word:aa", "pattern:a+", pieces=[b"aa bb"])
    assert b.read(b"aa bb").trigger.source == "b."
    assert b.gate.refuse().trigger.source == "aa"
    assert b.gate.refuse().trigger.source == "a+"


@pytest.mark.parametrize("trigger", ["word:ab", "pattern:ab", "pattern:a(?:b)"])
def test_within_one_trigger_the_leftmost_match_wins(trigger):
    b = bench(trigger, pieces=[b"xab ab"])
    assert fed(b.read(b"xab ab")) == [(b"ab ab", False)]


# Rule 4: `^` and `$`.


def test_a_closed_pattern_is_tried_against_the_whole_buffer_before_it_is_searched_for():
    b = bench("pattern:^a|(a)(b)$", pieces=[b"xab"])
    assert fed(b.read(b"xab")) == [(b"ab", False)]
    whole = bench("pattern:^(?:a|a(b))$", pieces=[b"ab"])
    assert fed(whole.read(b"ab")) == [(b"b", False)]


def test_a_caret_is_the_start_of_the_answer():
    assert isinstance(bench("pattern:^ab+").letters(b"ab")[1], Fired)
    assert bench("pattern:^ab+").letters(b"xab")[1] == Awaiting()


def test_a_final_dollar_is_the_very_end_and_not_before_a_last_newline():
    b = bench("pattern:a[bc]$", pieces=[b"ab\n", b"ac"])
    assert b.read(b"ab\n") == Awaiting()
    assert fed(b.read(b"ac")) == [(b"ac", True)]


def test_an_escaped_final_dollar_is_a_dollar():
    b = bench(r"pattern:a[b]\$")
    assert b.letters(b"ab$")[0] == 3


def test_after_a_re_arm_a_caret_is_just_behind_the_call():
    b = bench("pattern:^x+", context=b"p")
    assert b.letters(b"x")[1] == Awaiting()
    token = bench("word:<t>", "pattern:^x+")
    token.letters(b"<t>")
    token.gate.rearm()
    assert fed(token.read(b"x")) == [(b"x", True)]


# Rule 5: groups.


@pytest.mark.parametrize(
    ("pattern", "start"),
    [
        ("a(b)c", b"bc"),
        ("a()(b)c", b"bc"),
        ("(x)?a(c|bc)", b"bc"),
        ("a(?:b)c", b"abc"),
        ("a()bc", b"abc"),
        ("(?<=(a))bc", b"abc"),
    ],
)
def test_the_replay_starts_at_the_first_group_that_matched_something(pattern, start):
    b = bench("pattern:zz+", f"pattern:{pattern}", "pattern:yy+", pieces=[b"abc"])
    assert b"".join(data for data, _ in fed(b.read(b"abc"))) == start


@pytest.mark.parametrize("kind", ["pattern", "pattern_full"])
def test_group_numbers_do_not_change_by_what_is_wrapped_around(kind):
    b = bench("pattern:zz+", f"{kind}:" + r"(a|b)c\1", "pattern:yy+", pieces=[b"bcb"])
    assert fed(b.read(b"bcb")) == [(b"bcb", True)]


# Rule 6: what is replayed.


def test_the_token_that_straddles_the_start_keeps_its_id_and_loses_the_bytes_before_it():
    b = bench("word:<t>", pieces=[b"prose <", b"t>{"])
    b.read(b"prose <")
    seen = b.read(b"t>{")
    assert seen.replay == (Fed(0, b"<", whole=False), Fed(1, b"t>{", whole=True))


def test_tokens_without_bytes_are_not_replayed():
    b = bench("word:ab", pieces=[b""])
    b.read(b"a", b"")
    assert fed(b.read(b"b")) == [(b"a", True), (b"b", True)]


def test_a_half_character_behind_a_match_is_replayed():
    b = bench("word:<t>", pieces=[b"<t>\xe2"])
    assert fed(b.read(b"<t>\xe2")) == [(b"<t>\xe2", True)]


# Rule 7: text.


def test_an_incomplete_last_character_is_not_text_yet():
    b = bench("pattern:[é€]", pieces=[])
    count, seen = b.letters("x€".encode())
    assert count == 4
    assert fed(seen) == [(b"\xe2", True), (b"\x82", True), (b"\xac", True)]


@pytest.mark.parametrize("trigger", ["word:<t>", "pattern:<t>", "pattern:<[t]>", r"pattern_full:[\s\S]*(<[t]>)"])
def test_a_byte_that_is_never_valid_neither_stops_what_follows_nor_shifts_it(trigger):
    b = bench(trigger, pieces=[b"a\xff\xc3", b"\x80<", b"t>"])
    b.read(b"a\xff\xc3", b"\x80<")
    assert fed(b.read(b"t>")) == [(b"<", False), (b"t>", True)]


# Rule 8: look-around.


def test_a_negative_look_ahead_sees_only_what_has_been_generated():
    assert bench("pattern:>>>(?!all)").letters(b">>>all") == (
        3,
        Fired(Trigger("pattern", ">>>(?!all)"), (Fed(62, b">", whole=True),) * 3),
    )


@pytest.mark.parametrize(("text", "fires"), [(b">>>all\n", 0), (b">>>get_weather", 4), (b">>>alx", 6), (b">>>allx", 7)])
def test_a_positive_ending_fires_once_it_is_decided(text, fires):
    b = bench(r"pattern:>>>(?=[^a]|a[^l]|al[^l]|all[^\n])")
    count, seen = b.letters(text)
    assert (count if isinstance(seen, Fired) else 0) == fires


@pytest.mark.parametrize("quote", [b"`", b'"', b"'"])
def test_a_marker_directly_behind_a_quotation_mark_is_prose(quote):
    b = bench("""pattern:(?<![`"'])<t>""", pieces=[b"<", b"t>"])
    assert b.read(quote, b"<", b"t>") == Awaiting()
    assert fed(b.read(b"<", b"t>")) == [(b"<", True), (b"t>", True)]


def test_a_look_behind_sees_the_text_before_an_open_match():
    b = bench(r"pattern:(?<=xy)\s+(<t>)", pieces=[])
    assert fed(b.letters(b"xy   <t>")[1]) == [(b"<", True), (b"t", True), (b">", True)]
    assert bench(r"pattern:(?<=xy)\s+(<t>)").letters(b"zy   <t>")[1] == Awaiting()


# Rule 9: context.


def test_context_is_seen_by_patterns_and_the_caret_and_never_replayed():
    b = bench(r"pattern:^<\|start\|>assistant(?: to=\w+)?<c>", pieces=[b" to=f", b"<c>"], context=b"<|start|>assistant")
    b.read(b" to=f")
    assert fed(b.read(b"<c>")) == [(b" to=f", True), (b"<c>", True)]


def test_context_is_part_of_the_whole_text_of_a_full_pattern():
    assert isinstance(bench("pattern_full:xya", context=b"xy").read(b"a"), Fired)
    assert bench("pattern_full:a", context=b"xy").read(b"a") == Awaiting()


def test_a_word_does_not_begin_in_the_context_and_a_literal_pattern_may():
    assert bench("word:xa", context=b"x").read(b"a") == Awaiting()
    assert fed(bench("pattern:xa", context=b"x").read(b"a")) == [(b"a", True)]


def test_what_matches_within_the_context_alone_belongs_to_the_prompt():
    b = bench("pattern:x[yz]", "word:xy", context=b"xyxz")
    assert b.read(b"a") == Awaiting()
    assert isinstance(b.letters(b"xy")[1], Fired)


# Rule 10: fired.


def test_after_firing_buffer_and_spans_are_empty():
    b = bench("word:ab")
    b.read(b"x", b"a")
    assert (b.gate.buffer, b.gate.spans, b.gate.awaiting) == (b"xa", ((0, 1), (1, 2)), True)
    b.read(b"b")
    assert (b.gate.buffer, b.gate.spans, b.gate.awaiting) == (b"", (), False)
    assert (b.gate.length, b.gate.literal_state, b.gate.tail(2), b.gate.before(2)) == (0, 0, (), b"")


def test_observing_on_a_fired_gate_is_an_error_of_ours_and_changes_nothing():
    b = bench("word:ab")
    b.read(b"a", b"b")
    with pytest.raises(InternalError, match="token 97"):
        b.read(b"a")
    assert (b.gate.observed, b.gate.awaiting) == (2, False)


@pytest.mark.parametrize("call", ["refuse", "rearm"])
def test_refusing_and_re_arming_need_a_fired_gate(call):
    b = bench("word:ab")
    with pytest.raises(InternalError):
        getattr(b.gate, call)()


def test_an_undo_without_an_observed_token_is_an_error_of_ours():
    with pytest.raises(InternalError):
        bench("word:ab").gate.undo()


# Where the grammar begins behind the match.


def test_after_replays_the_bytes_behind_the_whole_match():
    b = bench("word:</think>", pieces=[b"</thi", b"nk>\n{"], grammar_start="after")
    b.read(b"</thi")
    assert fed(b.read(b"nk>\n{")) == [(b"\n{", False)]


def test_after_replays_whole_tokens_behind_a_match_whose_look_ahead_took_longer():
    b = bench("pattern:>>(?=ab)", pieces=[b"ab"], grammar_start="after")
    b.read(b">", b">")
    assert fed(b.read(b"ab")) == [(b"ab", True)]


def test_after_replays_nothing_of_a_trigger_token():
    b = bench("token:<t>", pieces=[b"<t>"], grammar_start="after")
    assert fed(b.read(b"<t>")) == []


# Refused replays.


def test_a_refused_word_is_never_tried_again_and_a_later_one_fires():
    b = bench("word:<function=", pieces=[b"<function", b"=list", b" prose", b"=get"])
    b.read(b"<function")
    assert isinstance(b.read(b"=list"), Fired)
    assert b.gate.refuse() == Awaiting()
    assert b.gate.buffer == b"<function=list"
    assert b.read(b" prose", b"<function") == Awaiting()
    assert fed(b.read(b"=get")) == [(b"<function", True), (b"=get", True)]


@pytest.mark.parametrize(
    "trigger", [r"pattern:\s*(<f=)", r"pattern:[\s\S]*?(<f=)[a-z]*", r"pattern_full:[\s\S]*?(<f=)[\s\S]*"]
)
def test_after_a_refused_start_what_more_text_costs_does_not_grow(trigger):
    b = bench(trigger, pieces=[b"  <f=a", b" more prose"])
    b.read(b"  <f=a")
    b.gate.refuse()
    scanned = []
    for _ in range(50):
        before = b.gate.scanned
        assert b.read(b" more prose") == Awaiting()
        scanned.append(b.gate.scanned - before)
    assert scanned[-1] <= scanned[1]
    assert fed(b.read(b"  <f=a")) == [(b"<f=a", False)]


def test_all_matches_on_one_token_are_tried_in_list_order():
    b = bench("word:ab", "pattern:a.", pieces=[b"ab ab ac"])
    starts = [fed(b.read(b"ab ab ac"))[0][0]]
    while isinstance(seen := b.gate.refuse(), Fired):
        starts.append(fed(seen)[0][0])
    assert starts == [b"ab ab ac", b"ab ac", b"ab ab ac", b"ab ac", b"ac"]


def test_an_undo_brings_a_refused_start_back():
    b = bench("word:ab", "pattern:[a]b")
    b.read(b"a")
    b.read(b"b")
    b.gate.refuse()
    assert b.gate.refuse() == Awaiting()
    b.gate.undo()
    assert b.read(b"b").trigger == Trigger("word", "ab")


# Undo.


def test_a_rejected_draft_that_fired_leaves_the_gate_as_it_was():
    b = bench("word:<t>", r"pattern:\s+(<u>)", pieces=[b"x  <", b"t>"])
    b.read(b"x  <")
    before = (b.gate.buffer, b.gate.spans, b.gate.literal_state, b.gate.observed)
    assert isinstance(b.read(b"t>"), Fired)
    b.gate.undo()
    assert (b.gate.buffer, b.gate.spans, b.gate.literal_state, b.gate.observed) == before
    assert fed(b.letters(b"u>")[1]) == [(b"<", False), (b"u", True), (b">", True)]


def test_undo_reaches_back_to_the_start_across_re_arms():
    b = bench("word:<t>", context=b"p")
    for _ in range(2):
        b.letters(b"a<t>")
        b.gate.rearm()
    b.read(b"z")
    b.gate.undo()
    for _ in range(2):
        with pytest.raises(InternalError):
            b.gate.undo()
        b.gate.undo_rearm()
        assert not b.gate.awaiting
        b.gate.undo()
        assert b.gate.buffer == b"a<t"
        for _ in range(3):
            b.gate.undo()
    assert (b.gate.buffer, b.gate.rearmed) == (b"", 0)


def test_a_re_arm_is_not_taken_back_below_tokens_or_where_there_is_none():
    b = bench("word:<t>")
    with pytest.raises(InternalError):
        b.gate.undo_rearm()
    b.letters(b"<t>")
    b.gate.rearm()
    b.read(b"x")
    with pytest.raises(InternalError):
        b.gate.undo_rearm()


def test_a_fork_is_independent_in_its_past_too():
    b = bench("word:<t>", "pattern:<[u]>")
    b.letters(b"<t>")
    b.gate.rearm()
    fork = b.gate.fork()
    fork.undo_rearm()
    fork.undo()
    assert (fork.buffer, b.gate.buffer) == (b"<t", b"")
    b.gate.undo_rearm()
    b.gate.undo()
    b.gate.undo()
    assert (fork.buffer, b.gate.buffer) == (b"<t", b"<")


# Time and cost.


@pytest.mark.long
def test_a_runaway_pattern_is_cut_off_and_leaves_the_gate_as_it_was():
    b = bench("pattern:(a|aa)+$", "word:x", pieces=[b"a" * 60 + b"!"])
    b.read(b"b")
    started = time.thread_time()
    with pytest.raises(PatternTimeoutError, match=r"\(a\|aa\)\+\$"):
        b.read(b"a" * 60 + b"!")
    assert time.thread_time() - started < 0.015
    assert (b.gate.buffer, b.gate.observed) == (b"b", 1)
    assert isinstance(b.read(b"x"), Fired)


def test_a_runaway_pattern_is_cut_off_in_a_short_text_too():
    b = bench("pattern:(?:a|a|a|a|a|a|a|a)+$", pieces=[b"a" * 20 + b"!"])
    with pytest.raises(PatternTimeoutError):
        b.read(b"a" * 20 + b"!")


def test_a_refusal_that_runs_into_a_runaway_pattern_leaves_the_gate_fired():
    b = bench("word:a", "pattern:(a|aa)+$", pieces=[b"a" * 60 + b"!"])
    b.read(b"a" * 60 + b"!")
    for _ in range(59):
        b.gate.refuse()
    with pytest.raises(PatternTimeoutError):
        b.gate.refuse()
    assert not b.gate.awaiting
    b.gate.undo()
    assert (b.gate.buffer, b.gate.awaiting) == (b"", True)


def test_a_runaway_pattern_behind_the_trigger_that_fires_is_never_tried():
    b = bench("word:a", "pattern:(a|aa)+$", pieces=[b"a" * 60 + b"!"])
    assert isinstance(b.read(b"a" * 60 + b"!"), Fired)


def test_other_requests_go_on_while_a_pattern_runs_away():
    slow, other = bench("pattern:(a|aa)+$", pieces=[b"a" * 60 + b"!"], timeout_ms=200), bench(r"pattern:\s(<t>)")
    began, ended, steps = threading.Event(), threading.Event(), []

    def read_on():
        began.wait()
        while not ended.is_set():
            start = time.perf_counter()
            other.letters(b"x")
            steps.append((start, time.perf_counter()))

    thread = threading.Thread(target=read_on)
    thread.start()
    began.set()
    searched = time.perf_counter()
    with pytest.raises(PatternTimeoutError):
        slow.read(b"a" * 60 + b"!")
    over = time.perf_counter()
    ended.set()
    thread.join()
    quarter = (over - searched) / 4
    assert any(searched + quarter < start and end < over - quarter for start, end in steps)


@pytest.mark.slow
def test_the_last_thousand_of_a_hundred_thousand_tokens_cost_what_the_first_did():
    words = [f"word:<function=tool_{i}>" for i in range(139)]
    patterns = [rf"pattern:\s(<call{i}>)" for i in range(10)] + [rf"pattern:<t{i}>\s*\{{" for i in range(10)]
    b = bench(
        *words,
        *patterns,
        pieces=[b" some", b" <func", b"tion>", b" text\n", b"\xc3", b"\xa9", b" <cal", b"l x", b" <t1> ", b"  and"],
    )
    costs = []
    for _ in range(100):
        before = b.gate.scanned
        for index in range(1000):
            b.gate.observe(index % 10)
        costs.append(b.gate.scanned - before)
    assert b.gate.awaiting
    assert costs[-1] == costs[1]
    assert costs[-1] < 10_000


@pytest.mark.parametrize("lead", [r"[\s\S]*?", ".*?"])
def test_a_lazy_lead_becomes_a_search(lead):
    b = bench(f"pattern:{lead}(<[t]>)", pieces=[b" text"])
    for _ in range(200):
        b.read(b" text")
    before = b.gate.scanned
    b.read(b" text")
    assert b.gate.scanned - before < 20
    assert fed(b.letters(b"<t>")[1]) == [(b"<", True), (b"t", True), (b">", True)]


@pytest.mark.parametrize(("lead", "replayed"), [(r"[\s\S]*?", b"a\nb<t>"), (".*?", b"b<t>")])
def test_without_a_group_the_match_of_a_lazy_lead_starts_where_the_lead_did(lead, replayed):
    b = bench(f"pattern:{lead}<[t]>")
    assert b"".join(data for data, _ in fed(b.letters(b"a\nb<t>")[1])) == replayed


# What masks and cache keys are made from.


def test_the_tail_is_the_tokens_that_cover_the_last_bytes():
    b = bench("word:<tool>", pieces=[b"x<", b"to"])
    b.read(b"x<", b"to")
    assert b.gate.tail(3) == (Fed(0, b"<", whole=False), Fed(1, b"to", whole=True))
    assert b.gate.tail(0) == ()
    assert b.gate.tail(99) == (Fed(0, b"x<", whole=True), Fed(1, b"to", whole=True))
    assert (b.gate.length, b.gate.before(3)) == (4, b"<to")


def test_the_literal_state_is_that_of_context_and_buffer():
    b = bench("word:abc", "pattern:xab", context=b"x")
    b.read(b"a")
    automaton = b.triggers.literals
    assert b.gate.literal_state == automaton.scan(0, b"xa")[0]
    assert automaton.depth[b.gate.literal_state] == 2
