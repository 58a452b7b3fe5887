"""When the demo fails, on answers made up here: no server."""

from __future__ import annotations

import json

import pytest

from scripts.lib.demo import MARKER, Answer, complaints

GOOD = {"product": "lamp", "sentiment": "positive", "stars": 5, "reasons": ["bright"]}
FIRED = Answer(f"Fine. {MARKER}{json.dumps(GOOD)}", "stop")
SILENT = Answer("Fine.", "stop")


def test_the_demo_fails_where_no_lazy_answer_fires():
    assert complaints([SILENT, SILENT]) == [f"no lazy answer wrote {MARKER}, so no grammar held anything"]


def test_it_passes_where_some_fire_and_obey():
    assert complaints([SILENT, FIRED]) == []


@pytest.mark.parametrize(("finish", "broken"), [("stop", 1), ("length", 0)])
def test_it_fails_where_an_answer_that_ended_by_itself_does_not_obey(finish, broken):
    assert len(complaints([FIRED, Answer(f"{MARKER}{{}}", finish)])) == broken
