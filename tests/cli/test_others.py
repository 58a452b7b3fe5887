"""`presets`, `presets test`, `doctor` and the summary that `trace` prints."""

from __future__ import annotations

import json

import pytest

import vllm_lazy_grammar
from vllm_lazy_grammar._seams import Exists, Parameters, Seam, Table, Target
from vllm_lazy_grammar.tools.presets import catalogue, configs_folder

pytestmark = pytest.mark.slow

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}  # fmt: skip
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_every_family_is_listed_with_the_parsers_that_it_serves(command):
    result = command("presets")
    assert result.exit_code == 0
    for name, preset in catalogue().families.items():
        line = next(line for line in result.output.splitlines() if line.split()[:1] == [name])
        assert all(parser in line for parser in preset.parsers)
    assert all(parser in result.output for parser in catalogue().unserved)


@pytest.fixture
def preset(tmp_path):
    """A preset of a user's own."""
    own = (configs_folder() / "hermes.toml").read_text().replace('family = "hermes"', 'family = "mine"')
    (tmp_path / "mine.toml").write_text(own)
    return tmp_path / "mine.toml"


def samples(preset, *given):
    lines = [json.dumps({"tools": [TOOL], **sample}) for sample in given]
    preset.with_suffix(".jsonl").write_text("\n".join(lines))


def test_a_preset_of_yours_is_held_against_the_samples_beside_it(command, preset):
    samples(
        preset,
        {"text": "Let me see. " + CALL},
        {"text": f"{CALL}\n{CALL}", "calls": 2},
        {"text": "No call: tool_call is only a word here.", "calls": 0},
        {"text": CALL.replace("add", "sub"), "accepted": False},
        {"raw_output": CALL, "id": "as a recording has it"},
    )
    result = command("presets", "test", preset)
    assert result.exit_code == 0, result.output
    assert "5 of 5 samples are as they must be" in result.output


def test_a_sample_that_comes_out_otherwise_is_told_and_status_1(command, preset):
    samples(preset, {"text": CALL.replace("add", "sub")}, {"text": CALL, "accepted": False}, {"text": "No call."})
    result = command("presets", "test", preset)
    assert result.exit_code == 1
    assert "the grammar does not allow it here" in result.output
    assert "accepted, and must be refused" in result.output
    assert "the grammar began 0 times, and must 1 times" in result.output
    assert "0 of 3 samples" in result.output


def test_with_a_models_tokens_and_samples_elsewhere(command, preset, model, tmp_path):
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": CALL, "tools": [TOOL]}))
    result = command("presets", "test", preset, "--samples", tmp_path / "other.jsonl", "--tokenizer", model)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(("line", "named"), [
    ("{", "no JSON"), ("[]", "JSON object"), ('{"text": "a"}', "list of tools"), ("", "no sample"),
    ('{"text": "a", "tools": [], "call": 1}', "call"), ('{"text": "a", "tools": [], "calls": true}', "whole number"),
    ('{"text": "a", "tools": [{}]}', "tools"),
])  # fmt: skip
def test_samples_that_can_not_be_used_are_wrong_input(command, preset, line, named):
    preset.with_suffix(".jsonl").write_text(line)
    result = command("presets", "test", preset)
    assert result.exit_code == 2
    assert named in result.output


def test_a_preset_that_can_not_be_used_is_wrong_input(command, tmp_path):
    (tmp_path / "bad.toml").write_text("family = 3")
    assert "bad.toml" in command("presets", "test", tmp_path / "bad.toml").output
    assert command("presets", "test", tmp_path / "none.toml").exit_code == 2


# -- doctor -----------------------------------------------------------------------------------------------------------


def test_the_doctor_tells_of_a_seam_that_does_not_hold_what_it_found(monkeypatch, command):
    there, gone = Target("json.decoder", "JSONDecoder.decode"), Target("json.decoder", "JSONDecoder.decoded")
    seams = [
        Seam(there, lambda current: current, why="reads", until="never", checks=(Parameters(there, ("self", "s")),)),
        Seam(gone, lambda current: current, why="was here", until="never", checks=(Exists(gone),)),
    ]
    table = Table(seams, version=lambda: "json 1", tested="", ways_out=())
    monkeypatch.setattr(vllm_lazy_grammar, "seams", table.states)
    monkeypatch.setattr(vllm_lazy_grammar, "vllm_version", lambda: "vLLM 9.9")
    result = command("doctor", "--additional-config", '{"lazy_grammar": {"threads": 3}}')
    assert result.exit_code == 1
    assert "vLLM 9.9" in result.output
    assert "holds  json.decoder:JSONDecoder.decode: reads" in result.output
    assert "does not hold  json.decoder:JSONDecoder.decoded: was here" in result.output
    assert "found: json.decoder:JSONDecoder.decoded: there is no 'decoded'" in result.output
    assert "threads = 3  (set)" in result.output
    assert "prewarm = True\n" in result.output
    assert not table.installed


def test_the_doctor_says_that_vllm_is_missing(monkeypatch, command):
    def missing():
        raise ImportError("No module named 'vllm'")

    monkeypatch.setattr(vllm_lazy_grammar, "seams", missing)
    result = command("doctor")
    assert result.exit_code == 1
    assert "vLLM can not be imported: No module named 'vllm'" in result.output
    assert "xgrammar: " in result.output


@pytest.mark.parametrize("config", ["{", '{"lazy_grammar": {"thread": 3}}'])
def test_settings_that_can_not_be_used_are_wrong_input(command, config):
    result = command("doctor", "--additional-config", config)
    assert result.exit_code == 2
    assert "additional" in result.output


@pytest.mark.vllm
def test_with_the_vllm_that_is_installed_every_seam_holds(monkeypatch, command):
    from tests.quiet import import_vllm

    import_vllm()
    result = command("doctor")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("vLLM 0.")
    assert "does not hold" not in result.output
    from vllm_lazy_grammar.plugin import table

    assert result.output.count("  holds  ") == len(table().targets)


# -- trace ------------------------------------------------------------------------------------------------------------


def test_a_trace_is_summed_up_in_a_few_lines(command, model, tmp_path):
    saved = tmp_path / "trace-1.jsonl"
    command(
        "check",
        model,
        "--regex",
        "[0-9]",
        "-t",
        "word:=",
        "-t",
        "word:<answer>",
        "--start",
        "after",
        "<ans =7",
        "--save",
        saved,
    )
    for named in (saved, tmp_path):
        result = command("trace", named)
        assert result.exit_code == 0
        assert "fired at token" in result.output
        assert "word:= fires, the grammar begins at byte 6" in result.output
        assert "did not fire: word:<answer>: '<ans' at byte 0: 4 of 8 bytes" in result.output


def test_what_is_no_trace_is_wrong_input(command, tmp_path):
    (tmp_path / "x.jsonl").write_text("{}")
    for named in (tmp_path / "x.jsonl", tmp_path / "none", tmp_path):
        assert command("trace", named).exit_code == 2
