"""Presets: complete, consistent, and refused with file, key and value where they are not."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError

import pytest

from tests.tools import stock, walking
from tests.tools.test_recorded import DOCUMENT
from vllm_lazy_grammar.errors import SettingsError
from vllm_lazy_grammar.tools.choice import Wanted, choose, read_tools
from vllm_lazy_grammar.tools.presets import catalogue, configs_folder, read_preset

NAMES_0_32 = [
    "apertus",
    "cohere_command3",
    "cohere_command4",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v41",
    "dots",
    "ernie45",
    "functiongemma",
    "gemma4",
    "gigachat3",
    "glm45",
    "glm47",
    "granite",
    "granite-20b-fc",
    "granite4",
    "hermes",
    "hf",
    "hunyuan_a13b",
    "hy_v3",
    "hy_v4",
    "inkling",
    "internlm",
    "jamba",
    "k2_horizon",
    "kimi_k2",
    "kimi_k3",
    "lfm2",
    "ling3",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "longcat",
    "mimo",
    "minicpm5",
    "minimax_m2",
    "minimax_m3",
    "mistral",
    "muse_glimmer",
    "olmo3",
    "openai",
    "phi4_mini_json",
    "plamo3",
    "poolside_v1",
    "pythonic",
    "qwen3_coder",
    "qwen3_json",
    "qwen3_xml",
    "seed_oss",
    "step3",
    "step3p5",
    "xlam",
]
NAMES_0_33 = [*NAMES_0_32, "beam", "muse", "musespark1x", "step5"]
"""What `ToolParserManager.list_registered()` prints."""

MINIMAL = """
family = "mine"
parsers = ["mine"]
sources = ["the model card"]
[trigger]
openers = ["<call>"]
[block]
open = ["<call>"]
close = ["</call>"]
[call]
forms = ['{"name": "{name}", "arguments": {arguments}}']
name = "json"
"""


@pytest.mark.parametrize("name", NAMES_0_33)
def test_every_parser_that_vllm_registers_is_served_or_listed_with_the_reason(name):
    found = catalogue()
    assert (name in found.parsers) != (name in found.unserved)
    assert name in found.parsers or found.unserved[name]


@pytest.mark.vllm
def test_the_list_of_parsers_is_that_of_the_installed_vllm():
    assert sorted(stock.registered()) in (sorted(NAMES_0_32), sorted(NAMES_0_33))


def test_every_preset_names_its_sources():
    for preset in catalogue().families.values():
        assert all(len(source) > 10 for source in preset.sources), preset.family


def test_the_page_about_families_lists_each_with_its_parsers_and_faults():
    page = DOCUMENT.read_text("utf-8")
    for name, preset in catalogue().families.items():
        (row,) = re.findall(rf"^\| {re.escape(name)} \| .*$", page, re.MULTILINE)
        assert all(f"`{parser}`" in row for parser in preset.parsers)
        assert all(fault in row for fault in preset.faults)
    assert all(f"| `{name}` | {why} |" in page for name, why in catalogue().unserved.items())


def test_a_preset_can_not_be_changed():
    with pytest.raises(FrozenInstanceError):
        catalogue().families["hermes"].family = "other"


def test_an_opening_begins_with_what_opens_it():
    for preset in catalogue().families.values():
        for opener in preset.trigger.openers:
            heads = [opened + form for opened in preset.block.open for form in preset.call.forms]
            assert any(head.startswith(opener) for head in heads), (preset.family, opener)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (('family = "mine"', "family = 3"), "mine.toml: family"),
        (('sources = ["the model card"]', ""), "mine.toml: sources"),
        (('openers = ["<call>"]', ""), "mine.toml: trigger.openers"),
        (('openers = ["<call>"]', "openers = [1]"), "mine.toml: trigger.openers"),
        (('openers = ["<call>"]', 'opener = "<call>"'), "mine.toml: trigger.opener"),
        (('openers = ["<call>"]', 'patterns = ["(<call>)"]'), "mine.toml: trigger.force"),
        (('openers = ["<call>"]', 'patterns = ["(<call>"]\nforce = "<call>"'), "mine.toml: trigger.patterns"),
        (('name = "json"', 'name = "yaml"'), "mine.toml: call.name"),
        (("{arguments}", "{values}"), "mine.toml: call.forms"),
        (('name = "json"', '[arguments]\nstyle = "pairs"\npair = "{key}"'), "mine.toml: arguments.pair"),
        (('name = "json"', '[arguments]\nstyle = "pairs"\npair = "{key}={value};"'), "mine.toml: arguments.until"),
        (("[block]", "[blocks]"), "mine.toml: blocks"),
        (("[block]", "[block"), "mine.toml"),
    ],
)
def test_a_file_that_can_not_be_used_is_refused_with_file_and_key(change, named):
    with pytest.raises(SettingsError) as caught:
        read_preset("mine.toml", MINIMAL.replace(*change))
    assert caught.value.field == named


def test_a_users_file_adds_a_family_without_code(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MINIMAL)
    found = catalogue().with_file(path)
    assert found.for_parser("mine", lambda _: False).block.close == ("</call>",)
    assert found.for_parser("hermes", lambda _: False).family == "hermes"


def test_a_users_file_takes_over_the_parsers_that_it_names(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MINIMAL.replace('parsers = ["mine"]', 'parsers = ["hermes", "hf"]'))
    found = catalogue().with_file(path)
    assert found.for_parser("hermes", lambda _: False).family == "mine"
    assert found.for_parser("qwen3_json", lambda _: False).family == "hermes"
    assert "hf" not in found.unserved


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"nowhere\.toml"):
        catalogue().with_file(tmp_path / "nowhere.toml")


def test_a_parser_without_a_preset_is_refused_with_the_reason_and_the_list_of_others():
    with pytest.raises(SettingsError, match=r"response template.*hermes"):
        catalogue().for_parser("hf", lambda _: False)
    with pytest.raises(SettingsError, match="no preset serves this parser"):
        catalogue().for_parser("nobody", lambda _: False)


def test_of_two_formats_of_one_parser_the_tokenizer_decides():
    assert catalogue().for_parser("mistral", {"[ARGS]"}.__contains__).family == "mistral"
    assert catalogue().for_parser("mistral", lambda _: False).family == "mistral_v3"


def test_the_example_in_the_readme_is_a_preset():
    text = (configs_folder() / "README.md").read_text("utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    preset = read_preset("README.md", example)
    parameters = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
    tools = read_tools([{"type": "function", "function": {"name": "get", "parameters": parameters}}])
    grammar = choose(tools, Wanted(), preset, is_token=preset.markers.__contains__).grammar
    for text, whole in (
        ('<call>get {"days": 3}</call>', True),
        ('<call> get {"days": 3}</call>', True),
        ('<call>get {"days": "x"}</call>', False),
        ('<call>got {"days": 3}</call>', False),
    ):
        matcher = walking.matcher(grammar)
        assert (matcher.accept_string(text) and matcher.is_completed()) == whole, text
