"""Reading and compiling patterns: what is read from the text agrees with the engine, and compiling is never dangerous."""

from __future__ import annotations

import contextlib
import time

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lazy_grammar.core.pattern_text import BOUNDARIES, atoms_of, shape_of
from vllm_lazy_grammar.core.patterns import Limits, compile_pattern
from vllm_lazy_grammar.errors import RequestError

PARTS = [*"ab()[]{}|*+?^$.\\-:=!<>,19 #", "(?:", "(?<!", "(?P<n>", "(?i)", "(?x)", "[[:alpha:]]", "{2,3}", "{e<=1}", "(?(1)a|b)", "{1000}", r"\p{L}", r"\1", r"\K", "(*FAIL)", "(?R)", "(?V1)", "(?#)"]  # fmt: skip
_junk = st.lists(st.sampled_from(PARTS), min_size=1, max_size=12).map("".join)


def compiled(source, *, full=False):
    return compile_pattern(source, full=full, limits=Limits(), field="field", value=source)


@given(_junk)
def test_the_atoms_joined_are_the_pattern(source):
    assert "".join(atom.text for atom in atoms_of(source)) == source


@given(_junk)
@settings(max_examples=300)
def test_whatever_is_written_compiles_or_is_refused_in_little_time(source):
    started = time.thread_time()
    with contextlib.suppress(RequestError):
        compiled(source)
    assert time.thread_time() - started < 0.5


@pytest.mark.parametrize("boundary", list(BOUNDARIES))
@pytest.mark.parametrize("flags", ["", "(?a)"])
@given(st.text("ab é_1-\n", max_size=6))
def test_a_word_boundary_and_what_stands_for_it_hold_at_the_same_places(boundary, flags, text):
    places = [
        [found.start() for found in regex.finditer(flags + one, text)] for one in (boundary, BOUNDARIES[boundary])
    ]
    assert places[0] == places[1]


@pytest.mark.parametrize(
    ("source", "size"),
    [
        ("abc", 3),
        ("a{5}b", 6),
        ("(?:ab){10}", 20),
        ("(?:a{3}b){4,9}", 36),
        ("(a(?#c){7})", 7),
        ("[abc]{3}", 3),
        (r"\p{L}{2}", 2),
        ("()", 1),
    ],
)
def test_the_size_is_that_of_the_written_out_repetitions(source, size):
    assert shape_of(source).size == size


@pytest.mark.parametrize(
    ("source", "reach"),
    [
        ("ab", 0),
        ("(?<=ab)c", 2),
        ("(?<!a|[bc])d", 3),
        ("(?<=a*)b", None),
        ("(?<=a?)b", 1),
        (r"(a)(?<=\1)b", None),
        ("(?<=(?<=a)b)c", 3),
        (r"\Ka", None),
    ],
)
def test_how_far_it_looks_back_is_bounded_from_above(source, reach):
    assert shape_of(source).behind == reach


@pytest.mark.parametrize(
    "source", [r"a\X", r"\Ga", r"a\K", r"\Ra", "ab{e<=1}", "(a)(?(1)b|c)", "(?x)a b", "(?w)a", "(*FAIL)|a", "(?b)a"]
)
def test_what_is_not_understood_is_odd_and_takes_no_shortcut(source):
    shape = shape_of(source)
    assert shape.odd
    pattern = compiled(source)
    assert (pattern.partial, pattern.tame, pattern.mergeable, pattern.literal, pattern.lead) == (
        False,
        False,
        False,
        None,
        "",
    )


@pytest.mark.parametrize(
    "source", ["<tool_call>\\s*{", 'a{"b"', "[(?R]x", r"\(?R", r"a\{e}", "(?i:a)b", "[[:alpha:]]]", "[]a]b", "[^]a]b"]
)
def test_what_only_looks_odd_is_not(source):
    shape = shape_of(source)
    assert not shape.odd
    assert not shape.refused


@pytest.mark.parametrize(
    ("source", "tame"), [(r"\s(<a)", True), (r"a*b*c*", True), (r"a*b*c*d*", False), ("(a|aa)+", False), ("(?:a)?b", True), (r"(a)\1", False), ("(?:a{2}){2}", False), ("(?:a|a)" * 15, True), ("(?:a|a)" * 16, False)]
)  # fmt: skip
def test_only_what_can_not_run_away_in_a_short_text_goes_without_a_time_limit(source, tame):
    assert compiled(source + "x").tame is tame


@pytest.mark.parametrize("source", [r"^a.*?(?<=<)b", r"a.*?\bb", "a(?!$)b"])
def test_where_partial_matching_would_miss_a_position_it_is_not_used(source):
    assert not compiled(source).partial


@pytest.mark.parametrize(
    ("source", "full", "lead"),
    [(r"[\s\S]*?ab", False, "all"), (r"^[\w\W]*?ab", False, "all"), (r"[\s\S]*?ab", True, "all"), (r"^[\s\S]*?ab$", False, "all"), (".*?ab", False, "line"),
     ("^.*?ab", False, ""), (".*?ab", True, ""), (r"[\s\S]*?a|b", False, ""), (r"[\s\S]*ab", False, ""), (r"(?s).*?ab", False, ""), (r"(?:[\s\S]*?)ab", False, "")],
)  # fmt: skip
def test_a_lazy_lead_is_taken_off_where_only_the_cost_changes(source, full, lead):
    assert compiled(source, full=full).lead == lead


@pytest.mark.parametrize(
    ("source", "full", "ways"),
    [("ab", False, (False, True)), ("ab", True, (True, False)), ("^ab$", False, (True, False)), ("^a|b$", False, (True, True)), ("(?m)^ab$", False, (False, True)), (r"^ab\$", False, (False, True))],
)  # fmt: skip
def test_a_pattern_is_tried_against_the_whole_text_searched_for_or_both(source, full, ways):
    pattern = compiled(source, full=full)
    assert (pattern.whole, pattern.anywhere) == ways


def test_what_runs_too_long_on_the_empty_text_is_refused():
    with pytest.raises(RequestError, match="too long on the empty text"):
        compiled("(?:(?!a)|(?!b))" * 40 + "(?<=b)")
