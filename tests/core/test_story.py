"""What is recorded of a session, and the story made of it: states, firings, replays, rows, drafts, nearest misses."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.kit import ENDS, VOCABULARY, ids
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.recorder import Recorder
from vllm_lazy_grammar.core.story import Told, read, tell, write
from vllm_lazy_grammar.core.triggers import Triggers, TriggerSpec
from vllm_lazy_grammar.errors import RequestError
from vllm_lazy_grammar.testing import SMALL_END


class Writer:
    """A recorded session over the small vocabulary, driven as the engine drives one."""

    def __init__(self, shop, source, *triggers, limit=1 << 15, unseen=(), **options):
        self.session = shop.session(source, *triggers, **options)
        self.recorder = Recorder(self.session, limit)
        self.key, self.unseen = GrammarKey("regex", source), tuple(unseen)
        self.triggers = None
        if triggers:
            xargs = {"grammar_triggers": list(triggers), **{f"grammar_{k}": v for k, v in options.items()}}
            self.triggers = Triggers.compile(TriggerSpec.parse(xargs), VOCABULARY, stop_ids=ENDS)

    def fill(self):
        row = np.zeros(VOCABULARY.row_words, np.int32)
        self.session.fill(row)
        self.recorder.filled(row, 0.002, 0.0)

    def write(self, *texts):
        for token in ids(*texts):
            self.fill()
            assert self.session.accept(token)
            self.recorder.took(token)
        return self

    def story(self, prompt=None):
        told = Told(
            "r1", "now", self.key, self.triggers, VOCABULARY, self.session.trace, self.unseen, prompt
        )  # fmt: skip
        return tell(told, self.recorder.recorded(0.5))

    def tokens(self):
        return self.story()[1:-1]

    def end(self):
        return self.story()[-1]["end"]


def states(writer):
    return [line["state"] for line in writer.tokens()]


def test_each_token_has_the_state_that_it_led_to(shop):
    writer = Writer(shop, "1(2|12)?", "word:{", start="after").write("a", "{", "1", "2", "<end>")
    assert states(writer) == ["awaiting", "inside", "may end", "finished", "ended"]


def test_a_token_that_fires_before_the_compile_is_there_is_pending(held):
    writer = Writer(held, "1", "word:{", start="after")
    writer.session.accept(ids("{")[0])
    writer.recorder.took(ids("{")[0])
    assert states(writer) == ["pending"]
    held.engine.release()


def test_a_firing_names_trigger_byte_and_what_was_replayed(shop):
    writer = Writer(shop, "<t>1", "word:<t>").write("é", "a", "<", "t", ">")
    fired = writer.tokens()[-1]["events"]
    assert fired == [
        {"kind": "fired", "trigger": "word:<t>", "byte": 3, "replay": "<t>", "replayed_tokens": ids("<", "t", ">")}
    ]
    assert [line["byte"] for line in writer.tokens()] == [0, 2, 3, 4, 5]


def test_a_replay_that_begins_within_a_token_is_told_by_its_bytes(shop):
    writer = Writer(shop, "bc", "word:b").write("ab")
    (fired,) = writer.tokens()[0]["events"]
    assert (fired["byte"], fired["replay"], fired["replayed_tokens"]) == (1, "b", ["b"])


def test_a_refused_replay_and_a_rearming_are_told_where_they_happened(shop):
    writer = Writer(shop, "<t>1", "word:<t>", on_reject="disarm", rearm=True).write("<t>", "1", "a")
    assert [(e["kind"], line["n"]) for line in writer.tokens() for e in line.get("events", ())] == [
        ("fired", 0),
        ("rearmed", 1),
    ]
    disarmed = Writer(shop, "2", "word:a", on_reject="disarm").write("a", "b")
    assert [e["kind"] for e in disarmed.tokens()[0]["events"]] == ["refused"]
    assert disarmed.end()["misses"][0]["why"].endswith("it was taken for prose")


def test_rows_say_how_many_tokens_they_left_and_what_they_cost(shop):
    lines = Writer(shop, "1|2", "word:{", start="after").write("{", "1").tokens()
    assert lines[0]["left"] == VOCABULARY.size
    assert lines[1]["left"] == 2
    assert lines[1]["fill_us"] == 2000.0
    assert "waited_ms" not in lines[1]


def test_tokens_that_were_tried_and_taken_back_leave_the_tokens_that_came(shop):
    writer = Writer(shop, "(1|2)*", "word:{", start="after").write("{")
    one, two = ids("1", "2")
    writer.recorder.drafted([one], [one, two])
    for token in (one, one, two):  # the engine fills a row per draft
        writer.fill()
        writer.session.accept(token)
        writer.recorder.took(token)
    writer.fill()
    writer.session.rollback(3)
    for token in (one, two):
        writer.session.accept(token)
        writer.recorder.took(token)
    lines = writer.tokens()
    assert [line["token"] for line in lines] == [*ids("{"), one, two]
    assert [line.get("draft") for line in lines] == [None, "proposer", None]
    assert lines[2]["instead_of"] == one
    assert [line["left"] for line in lines[1:]] == [4, 4]
    writer.write("1")
    assert "draft" not in writer.tokens()[3]
    assert writer.end()["drafts"]["offered"] == 3
    assert writer.end()["drafts"]["accepted"] == 1


def test_tokens_beyond_the_limit_are_counted_and_not_kept(shop):
    writer = Writer(shop, "1", "word:{", limit=2).write("a", "b", "c", "a")
    assert len(writer.tokens()) == 2
    assert writer.end()["left_out"] == 2


def test_the_prompt_is_told_only_where_it_is_handed_over(shop):
    writer = Writer(shop, "1", "word:{").write("a")
    assert "prompt" not in writer.story()[0]
    assert writer.story(prompt=tuple(ids("a", "b")))[0]["prompt"] == "ab"


def test_an_eager_request_has_states_and_no_misses(shop):
    writer = Writer(shop, "12").write("1", "2")
    assert states(writer) == ["inside", "finished"]
    assert writer.end()["misses"] == []
    assert writer.end()["summary"] == "eager"


def test_a_story_is_read_as_it_was_written(shop, tmp_path):
    story = Writer(shop, "1", "word:<t>").write("é", "<", "b").story()
    (tmp_path / "x.jsonl").write_text(write(story))
    assert read(tmp_path / "x.jsonl") == story


@pytest.mark.parametrize(
    "text", ["", "x", '{"trace": 9}\n', '{"trace": 1}\n', '{"trace": 1}\n{"a": 1}\n{"end": {}}\n', "[1]"]
)
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path, text):
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(RequestError, match=r"x\.jsonl"):
        read(tmp_path / "x.jsonl")
    with pytest.raises(RequestError, match="can not be read"):
        read(tmp_path / "none.jsonl")


# -- nearest misses ---------------------------------------------------------------------------------------------------


def miss(shop, trigger, *texts, grammar="1", others=(), **options):
    (found,) = Writer(shop, grammar, trigger, *others, **options).write(*texts).end()["misses"]
    return found


def test_the_longest_beginning_of_a_word_that_appeared_is_told_with_what_came_instead(shop):
    assert miss(shop, "word:<t>1", "a", "<", "t", ">", "b", "c") == {
        "trigger": "word:<t>1",
        "text": "<t>",
        "byte": 1,
        "why": "3 of 4 bytes of it appeared, then came 'bc'",
    }
    assert miss(shop, "word:abc", "a", "a", "b")["why"] == "2 of 3 bytes of it appeared, then the answer ended"
    assert miss(shop, "word:2", "a")["byte"] is None


def test_a_word_in_other_letters_is_the_nearest_miss(shop):
    found = miss(shop, "word:<T>", "b", "<t>")
    assert (found["text"], found["byte"], found["why"]) == ("<t>", 1, "it is there in other letters, large or small")


def test_a_marker_behind_a_quotation_mark_that_does_not_count_is_told(shop):
    found = miss(shop, 'pattern:(?<!")<t>', "a", '"', "<t>")
    assert found["byte"] == 2
    assert found["why"] == """it stands behind 'a"', where the pattern does not count it"""


def test_a_word_in_the_reasoning_is_told(shop):
    found = miss(shop, "word:<t>", "a", unseen=ids("b", "<t>"))
    assert (found["byte"], found["why"]) == (1, "it stands in the reasoning, which the gate does not see")


def test_a_word_inside_a_grammar_that_already_held_is_told(shop):
    found = miss(shop, "word:2", "{", "1", "2", grammar="12", others=["word:{"], start="after")
    assert (found["byte"], found["why"][:46]) == (2, "it stands where the grammar already held the t")


def test_a_token_triggers_text_in_other_tokens_is_told_with_them(shop):
    found = miss(shop, f"token:{ids('<t>')[0]}", "a", "<", "t", ">")
    assert found["byte"] == 1
    assert found["why"].startswith(
        f"its text is there, written with other tokens ({', '.join(map(str, ids('<', 't', '>')))})"
    )


def test_what_begins_a_patterns_match_is_told(shop):
    found = miss(shop, "pattern:<t>[0-9]+:", "a", "<t>", "1", "b")
    assert (found["text"], found["byte"], found["why"]) == ("<t>1", 1, "this begins a match, and behind it came 'b'")
    assert miss(shop, "pattern:<t>[0-9]+:", "a", "b")["byte"] is None
    assert miss(shop, "pattern_full:ab[0-9]", "a", "b", "c")["text"] == "ab"


def test_a_pattern_that_matches_where_the_gate_was_closed_is_told(shop):
    found = miss(shop, "pattern:[12]{2}", "{", "1", "2", grammar="12", others=["word:{"], start="after")
    assert (found["byte"], found["why"][:46]) == (1, "it stands where the grammar already held the t")


def test_what_fired_has_no_miss(shop):
    assert Writer(shop, "1", "word:{", start="after").write("{", "1", "<end>").end()["misses"] == []
    assert SMALL_END in ENDS
