"""Settings: read from additional_config, checked, described."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from vllm_lazy_grammar.errors import SettingsError
from vllm_lazy_grammar.settings import Settings


def read(given):
    return Settings.from_additional_config({"lazy_grammar": given})


@pytest.mark.parametrize("config", [{}, {"lazy_grammar": {}}, {"another_plugin": {"prewarm": 3}}, None, object()])
def test_without_settings_every_default_holds(config):
    assert Settings.from_additional_config(config) == Settings()


def test_the_defaults_are_those_of_the_documentation():
    assert dataclasses.asdict(Settings()) == {
        "prewarm": True,
        "prewarm_top_k": 512,
        "whitespace_bound": 20,
        "grammar_cache_mb": 512,
        "row_cache_mb": 256,
        "trigger_timeout_ms": 5.0,
        "frontend_check_ms": 20.0,
        "threads": 8,
        "force_after": 128,
        "budget": True,
        "drafts": True,
        "max_tool_calls": 16,
        "mask_opener_on_none": True,
        "tool_argument_spelling": "trained",
        "unknown_tool_parser": "refuse",
        "presets_dir": "",
        "dispatch": True,
        "tool_cache_mb": 16,
        "engine": "auto",
        "undeclared_properties": "refuse",
        "relax": False,
        "trace_dir": "",
        "trace_rate": 0.0,
        "trace_files": 1000,
        "trace_mb": 100,
        "trace_prompt": False,
        "metrics": True,
    }


def test_every_setting_is_documented():
    assert all(f"{f.name}: " in Settings.__doc__ for f in dataclasses.fields(Settings))


def test_what_is_given_is_taken_and_the_rest_keeps_its_default():
    assert read({"prewarm": False, "prewarm_top_k": 7}) == dataclasses.replace(
        Settings(), prewarm=False, prewarm_top_k=7
    )


def test_a_whole_number_will_do_for_milliseconds():
    settings = read({"trigger_timeout_ms": 10})
    assert settings.trigger_timeout_ms == 10.0
    assert isinstance(settings.trigger_timeout_ms, float)


def test_an_unknown_key_is_refused_with_the_list_of_known_ones():
    with pytest.raises(
        SettingsError, match=r"additional_config\.lazy_grammar\.prewarm_topk: .*prewarm_top_k.*\(got 5\)"
    ) as caught:
        read({"prewarm_topk": 5})
    assert caught.value.field == "additional_config.lazy_grammar.prewarm_topk"
    assert caught.value.value == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prewarm", 1),
        ("prewarm", "true"),
        ("prewarm_top_k", -1),
        ("prewarm_top_k", 1.5),
        ("prewarm_top_k", True),
        ("prewarm_top_k", "512"),
        ("prewarm_top_k", None),
        ("whitespace_bound", -1),
        ("grammar_cache_mb", 0),
        ("row_cache_mb", 0),
        ("trigger_timeout_ms", 0),
        ("trigger_timeout_ms", float("nan")),
        ("trigger_timeout_ms", float("inf")),
        ("frontend_check_ms", -0.5),
        ("threads", -1),
        ("threads", []),
        ("force_after", -1),
        ("max_tool_calls", 0),
        ("mask_opener_on_none", 0),
        ("tool_argument_spelling", "free"),
        ("tool_argument_spelling", True),
        ("unknown_tool_parser", "ignore"),
        ("presets_dir", 3),
        ("trace_dir", 3),
        ("trace_rate", -0.1),
        ("trace_rate", 1.01),
        ("trace_files", 0),
        ("trace_mb", 0),
        ("trace_prompt", 1),
    ],
)
def test_a_wrong_type_or_range_is_refused_with_field_and_value(name, value):
    with pytest.raises(SettingsError) as caught:
        read({name: value})
    assert caught.value.field == f"additional_config.lazy_grammar.{name}"
    assert repr(value) in str(caught.value)


def test_a_share_of_requests_to_trace_needs_a_folder_to_write_to(tmp_path):
    with pytest.raises(SettingsError, match=r"trace_rate: this needs trace_dir.*\(got 0.5\)"):
        read({"trace_rate": 0.5})
    assert read({"trace_rate": 1, "trace_dir": str(tmp_path)}).trace_rate == 1.0


@pytest.mark.parametrize("given", [[], "prewarm", 3, None, True])
def test_settings_that_are_no_object_are_refused(given):
    with pytest.raises(SettingsError, match="must be a JSON object"):
        read(given)


def test_settings_can_not_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().prewarm = False


def test_they_travel_between_processes():
    settings = read({"prewarm_top_k": 3})
    assert pickle.loads(pickle.dumps(settings)) == settings  # noqa: S301  (our own bytes)


def test_the_description_is_one_line_that_names_every_setting():
    text = Settings(prewarm_top_k=9).describe()
    assert text.startswith("prewarm=True, prewarm_top_k=9, ")
    assert "\n" not in text
    assert all(f.name + "=" in text for f in dataclasses.fields(Settings))
