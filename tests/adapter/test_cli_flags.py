"""The old flag in its present form; the parser here is argparse's own, vLLM's is in test_plugin.py."""

from __future__ import annotations

import argparse
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lazy_grammar.adapter.cli_flags import adding_flags, parsing, reading_file, rewritten
from vllm_lazy_grammar.errors import SettingsError

DOTTED = "--structured-outputs-config.backend=lazy"
JSON = "--structured-outputs-config"


@pytest.mark.parametrize(
    "given_arguments",
    [
        ["serve", "m", "--guided-decoding-backend", "lazy", "--port", "80"],
        ["serve", "m", "--guided_decoding_backend=lazy", "--port", "80"],
        ["--guided-decoding-backend=lazy", "serve", "m", "--port", "80"],
    ],
)
def test_the_flag_becomes_the_present_one(given_arguments):
    assert rewritten(given_arguments) == ["serve", "m", "--port", "80", DOTTED]


def test_the_last_of_two_flags_counts_as_with_any_other_flag():
    assert rewritten(["--guided-decoding-backend", "xgrammar", "--guided-decoding-backend", "lazy"]) == [DOTTED]


@pytest.mark.parametrize("form", [[JSON], ["--structured_outputs_config"]])
def test_the_flag_joins_the_json_form(form):
    args = rewritten(
        ["serve", *form, '{"disable_any_whitespace": true}', "--guided-decoding-backend", "lazy", "-tp", "2"]
    )
    assert args[:2] == ["serve", form[0]]
    assert json.loads(args[2]) == {"disable_any_whitespace": True, "backend": "lazy"}
    assert args[3:] == ["-tp", "2"]


def test_the_flag_joins_the_json_form_written_with_an_equals_sign():
    (arg,) = rewritten(["--guided-decoding-backend=lazy", JSON + '={"enable_in_reasoning": true}'])
    assert arg.startswith(JSON + "=")
    assert json.loads(arg.removeprefix(JSON + "=")) == {"enable_in_reasoning": True, "backend": "lazy"}


def test_naming_the_same_backend_twice_is_no_conflict():
    args = rewritten([JSON, '{"backend": "lazy"}', "--guided-decoding-backend", "lazy"])
    assert json.loads(args[1]) == {"backend": "lazy"}


def test_naming_two_backends_is_refused_with_both_names():
    with pytest.raises(SettingsError, match=r"'xgrammar'.*'lazy'"):
        rewritten([JSON, '{"backend": "xgrammar"}', "--guided-decoding-backend", "lazy"])


@pytest.mark.parametrize("broken", ["{", "[1]", '"lazy"'])
def test_a_json_form_that_is_no_object_is_left_for_the_parser_to_refuse(broken):
    assert rewritten([JSON, broken, "--guided-decoding-backend=lazy"]) == [JSON, broken, DOTTED]


def test_a_flag_without_a_value_is_left_for_the_parser_to_refuse():
    assert rewritten(["serve", "--guided-decoding-backend"]) == ["serve", "--guided-decoding-backend"]


@given(
    st.lists(
        st.sampled_from(
            ["serve", "m", JSON, '{"backend": "xgrammar"}', "--port", "80", JSON + ".backend", "lazy", "--guided"]
        )
    )
)
def test_arguments_without_the_flag_reach_the_parser_as_given(arguments):
    assert rewritten(arguments) == arguments


class Parser(argparse.ArgumentParser):
    def load_config_file(self, file_path):
        return ["--port", "80", "--guided-decoding-backend", "lazy"]


def parser():
    made = adding_flags(lambda p: p)(Parser(prog="p"))
    made.add_argument("--structured-outputs-config.backend", dest="backend")
    return made


def test_the_parser_parses_the_rewritten_arguments():
    assert parsing(Parser.parse_args)(parser(), ["--guided-decoding-backend", "lazy"]).backend == "lazy"


def test_without_arguments_the_command_line_is_read(monkeypatch):
    monkeypatch.setattr("sys.argv", ["p", "--guided-decoding-backend", "lazy"])
    assert parsing(Parser.parse_args)(parser()).backend == "lazy"


def test_the_flag_leaves_no_name_of_its_own_behind():
    assert vars(parsing(Parser.parse_args)(parser(), [])) == {"backend": None}


def test_the_help_shows_the_flag():
    text = parser().format_help()
    assert "--guided-decoding-backend BACKEND" in text
    assert "LazyGrammar" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--guided-deco", "lazy"], "must be written in full"),
        (["--guided-decoding-backend"], "expected one argument"),
        (
            ["--structured-outputs-config", '{"backend": "xgrammar"}', "--guided-decoding-backend", "lazy"],
            "another backend",
        ),
    ],
)
def test_a_command_line_that_can_not_be_served_ends_with_usage_and_reason(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parsing(Parser.parse_args)(parser(), arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_yaml_file_may_hold_the_old_name():
    assert reading_file(Parser.load_config_file)(parser(), "x.yaml") == ["--port", "80", DOTTED]
