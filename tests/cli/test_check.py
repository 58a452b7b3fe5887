"""`check`: the real session on the real engine, token by token, and its exit status."""

from __future__ import annotations

import json

import pytest

from vllm_lazy_grammar.core.story import read

pytestmark = pytest.mark.slow

STARS = json.dumps({"type": "object", "properties": {"stars": {"type": "integer"}}, "required": ["stars"]})
GATED = ("--json", STARS, "-t", "word:<answer>", "--start", "after")
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
]  # fmt: skip


def rows(result):
    """The table's rows: number, byte, id, and the rest as it is."""
    lines = (line.split(maxsplit=3) for line in result.output.splitlines())
    return [line for line in lines if len(line) > 2 and line[0].isdigit()]


def test_an_accepted_answer_shows_where_the_trigger_fired_and_what_was_replayed(command, model):
    result = command("check", model, *GATED, 'So: <answer>{"stars": 3}</s>')
    assert result.exit_code == 0
    assert "word:<answer> fires, the grammar begins at byte 12, nothing to replay" in result.output
    for state in ("awaiting", "inside", "finished", "ended"):
        assert state in result.output
    assert result.output.rstrip().endswith("accepted")


def test_a_refused_token_shows_what_would_have_been_allowed_there(command, model):
    result = command("check", model, *GATED, 'So: <answer>{"stars": "many"}')
    assert result.exit_code == 1
    assert """'"': the grammar does not allow it here""" in result.output
    allowed = next(line for line in result.output.splitlines() if line.startswith("allowed there"))
    assert "'7'" in allowed
    assert "'-'" in allowed
    assert "'a'" not in allowed


def test_the_trigger_is_replayed_where_the_grammar_begins_with_it(command, model):
    result = command("check", model, "--regex", "<answer>[0-9]+", "-t", "word:<answer>", "a <answer>12")
    assert result.exit_code == 0
    assert "begins at byte 2, replayed '<answer>'" in result.output
    assert "may end" in result.output


def test_an_answer_that_stops_within_the_grammar_is_refused_unless_it_may_be_partial(command, model):
    text = '<answer>{"stars"'
    refused = command("check", model, *GATED, text)
    assert refused.exit_code == 1
    assert "at the end: the answer may not end here" in refused.output
    assert command("check", model, *GATED, "--partial", text).exit_code == 0


def test_a_call_that_is_owed_keeps_the_answer_from_ending(command, model):
    result = command("check", model, *GATED, "--mandatory", "No.</s>")
    assert result.exit_code == 1
    assert "the turn may not end here, a trigger has to fire first" in result.output
    assert command("check", model, *GATED, "No.</s>").exit_code == 0


def test_nothing_comes_behind_the_end_of_the_turn(command, model):
    result = command("check", model, *GATED, "No.</s>No")
    assert result.exit_code == 1
    assert "the turn has ended before it" in result.output


def test_a_grammar_that_compiles_late_is_pending_for_a_token(command, model):
    late = command("check", model, *GATED, "--late", 'So: <answer>{"stars": 3}')
    assert late.exit_code == 0
    assert "pending" in late.output
    assert "ms for the compile" in late.output
    assert "pending" not in command("check", model, *GATED, 'So: <answer>{"stars": 3}').output
    assert command("check", model, "--json", STARS, "--late", '{"stars": 3}').exit_code == 0


def test_a_trigger_that_did_not_fire_shows_its_nearest_miss(command, model):
    result = command("check", model, *GATED, 'Answer <answr>{"stars": 3}')
    assert result.exit_code == 0
    assert "did not fire: word:<answer>: '<answ' at byte 7: 5 of 8 bytes of it appeared, then came 'r>" in result.output


def test_recorded_ids_are_taken_as_they_are(command, model, tmp_path):
    text = command("check", model, *GATED, 'So: <answer>{"stars": 3}')
    ids = [int(row[2]) for row in rows(text)]
    assert command("check", model, *GATED, "--ids", json.dumps(ids)).output == text.output
    (tmp_path / "ids").write_text(" ".join(map(str, ids)))
    assert command("check", model, *GATED, "--ids", tmp_path / "ids").exit_code == 0
    outside = command("check", model, *GATED, "--ids", "5 9999")
    assert outside.exit_code == 1
    assert "the model has no such token" in outside.output


def test_the_width_of_the_output_is_the_models(command, model, tmp_path):
    saved = tmp_path / "x.jsonl"
    command("check", model, *GATED, "a", "--save", saved)
    assert read(saved)[0]["vocabulary"] == 320
    command("check", model, *GATED, "a", "--save", saved, "--vocab-size", 352)
    assert read(saved)[0]["vocabulary"] == 352
    assert command("check", model, *GATED, "a", "--save", tmp_path / "no" / "x.jsonl").exit_code == 2


def test_a_preset_with_tools(command, model, tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    args = ("--preset", "hermes", "--tools", tmp_path / "tools.json")
    result = command("check", model, *args, "Let me see. " + call)
    assert result.exit_code == 0
    assert "token:<tool_call> fires" in result.output
    assert command("check", model, *args, "Let me see. " + call.replace("add", "sub")).exit_code == 1
    assert command("check", model, *args, "--tool-choice", "required", "No.</s>").exit_code == 1
    assert command("check", model, *args, "--tool-choice", "none", call).exit_code == 1


def test_options_mean_what_they_mean_in_a_request(command, model):
    twice = ("check", model, "--regex", "<answer>[0-9]", "-t", "word:<answer>")
    text = "<answer>1, <answer>2"
    assert command(*twice, text).exit_code == 1
    rearmed = command(*twice, "--rearm", text)
    assert rearmed.exit_code == 0
    assert rearmed.output.count("word:<answer> fires") == 2
    assert command(*twice, "--rearm", "--max-activations", 1, text).exit_code == 1


REFUSED_REPLAY = ("--regex", "x<answer>", "-t", "word:<answer>", "<answer>!")


@pytest.mark.parametrize(("on_reject", "status", "told"), [
    ("forbid", 1, "a trigger would fire on it, and the grammar refuses what follows"),
    ("disarm", 0, "appears, and the grammar refuses '<answer>' at byte 0: prose"),
    ("error", 1, "grammar_on_reject=error: the grammar refuses"),
])  # fmt: skip
def test_what_becomes_of_a_refused_replay(command, model, on_reject, status, told):
    result = command("check", model, *REFUSED_REPLAY, "--on-reject", on_reject)
    assert result.exit_code == status
    assert told in result.output


@pytest.mark.parametrize(("args", "named"), [
    ((), "grammar"),
    (("--regex", "a", "--json-object", "a"), "exactly one"),
    (("--regex", "(", "a"), "structured_outputs.regex"),
    (("--regex", "a"), "give the answer once"),
    (("--regex", "a", "a", "--ids", "1"), "give the answer once"),
    (("--regex", "a", "--ids", "one"), "--ids"),
    (("--json", '{"type": ', "a"), "--json"),
    (("--json", "nowhere.json", "a"), "--json"),
    (("--regex", "a", "-t", "wort:a", "a"), "grammar_triggers[0]"),
    (("--regex", "a", "-t", "token:no such", "a"), "grammar_triggers[0]"),
    (("--regex", "a", "--rearm", "a"), "this needs grammar_triggers"),
    (("--regex", "a", "-t", "word:a", "--start", "before", "a"), "grammar_start"),
    (("--preset", "hermes", "a"), "--tools"),
    (("--preset", "nobody", "--tools", "[]", "a"), "nobody"),
    (("--preset", "hermes", "--tools", "{}", "a"), "list of tools"),
    (("--regex", "a", "--tools", "[]", "a"), "--preset"),
    (("--regex", "a", "a", "--no-such-option"), "No such option"),
])  # fmt: skip
def test_wrong_input_is_one_line_that_names_it_and_status_2(command, model, args, named):
    result = command("check", model, *args)
    assert result.exit_code == 2
    assert named in result.output


def test_a_folder_without_a_tokenizer_is_wrong_input(command, tmp_path):
    assert "there is no such folder" in command("check", tmp_path / "none", "--regex", "a", "a").output
    empty = command("check", tmp_path, "--regex", "a", "a")
    assert empty.exit_code == 2
    assert "no tokenizer can be made of it" in empty.output


def test_the_answer_is_text_and_no_markup(command, model, tmp_path):
    saved = tmp_path / "x.jsonl"
    result = command("check", model, "--regex", "a", "-t", "word:[red]x", "[red]", "--save", saved)
    assert "did not fire: word:[red]x: '[red]' at byte 0" in result.output


@pytest.mark.shared
def test_a_tokenizer_of_a_large_vocabulary(command, shared):
    result = command("check", shared / "data" / "qwen3", *GATED, 'So: <answer>{"stars": 3}<|im_end|>')
    assert result.exit_code == 0
    assert """replayed '{"'""" in result.output
