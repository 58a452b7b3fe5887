"""The real seams, in this process: what is bound, what it does to vLLM's configuration and command line, and that it goes away again."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

import vllm_lazy_grammar
from tests.quiet import import_vllm
from vllm_lazy_grammar import LazyGrammar, SeamError, plugin

pytestmark = pytest.mark.vllm

OTHERS = ["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"]


@pytest.fixture(autouse=True)
def _only_ours(monkeypatch):
    """VLLM loads no plugin by itself here, and ours is gone at the end."""
    import_vllm()
    import vllm.plugins

    monkeypatch.setattr(vllm.plugins, "plugins_loaded", True)
    plugin.unregister()
    yield
    plugin.unregister()


@pytest.fixture
def registered():
    vllm_lazy_grammar.register()


def config_class():
    from vllm.config import StructuredOutputsConfig

    return StructuredOutputsConfig


def parsed(*arguments):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return parser.parse_args(["--model", "m", *arguments]).structured_outputs_config


def bound():
    return {str(s.target): s.target.read() for s in plugin.table()._seams}


def test_every_name_is_rebound_and_unregister_restores_all_of_them():
    before = bound()
    vllm_lazy_grammar.register()
    during = bound()
    assert [name for name in before if before[name] is during[name]] == []
    vllm_lazy_grammar.unregister()
    assert bound() == before


def test_registering_twice_is_once(registered):
    once = bound()
    vllm_lazy_grammar.register()
    assert bound() == once


def test_every_seam_says_why_and_until_when():
    assert all(s.why and s.until for s in plugin.table()._seams)


def test_the_facts_are_the_same_whether_registered_or_not_and_nothing_is_missing():
    before = plugin.facts()
    vllm_lazy_grammar.register()
    assert plugin.facts() == before
    assert [line for line in before if "missing" in line or line.endswith(": no")] == []


def test_a_vllm_that_does_not_fit_is_refused_with_version_and_ways_out_and_nothing_is_bound(monkeypatch):
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.version import __version__

    monkeypatch.setattr(FlexibleArgumentParser, "load_config_file", lambda self, path: [])
    before = bound()
    with pytest.raises(SeamError) as caught:
        vllm_lazy_grammar.register()
    text = str(caught.value)
    for part in (__version__, "0.32.0 and 0.33.0", "(self, file_path)", "(self, path)", "VLLM_PLUGINS"):
        assert part in text
    assert bound() == before


def test_unregister_refuses_where_somebody_rebound_a_name_since(registered, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    with monkeypatch.context() as patch:
        patch.setattr(EngineArgs, "create_engine_config", lambda self: None)
        with pytest.raises(SeamError, match="create_engine_config"):
            vllm_lazy_grammar.unregister()


def test_without_the_plugin_lazy_is_no_backend():
    with pytest.raises(ValueError, match="'auto', 'xgrammar', 'guidance', 'outlines' or 'lm-format-enforcer'"):
        config_class()(backend="lazy")


def test_the_configuration_takes_lazy_and_disable_any_whitespace_with_it(registered):
    config = config_class()(backend="lazy", disable_any_whitespace=True)
    assert (config.backend, config.disable_any_whitespace) == ("lazy", True)
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301  (our own bytes)


def test_the_engines_configuration_takes_it_as_a_dict(registered):
    from pydantic import TypeAdapter
    from vllm.config import VllmConfig

    config = TypeAdapter(VllmConfig).validate_python({"structured_outputs_config": {"backend": "lazy"}})
    assert config.structured_outputs_config.backend == "lazy"
    assert pickle.loads(pickle.dumps(config)).structured_outputs_config.backend == "lazy"  # noqa: S301  (our own bytes)


@pytest.mark.parametrize("backend", OTHERS)
def test_what_the_configuration_says_about_other_backends_is_unchanged(backend):
    def outcome():
        try:
            return repr(config_class()(backend=backend, disable_any_whitespace=True))
        except ValueError as e:
            return str(e)

    before = outcome()
    vllm_lazy_grammar.register()
    assert outcome() == before


def test_a_name_that_is_no_backend_stays_refused(registered):
    with pytest.raises(ValueError, match="'lm-format-enforcer' or 'lazy'"):
        config_class()(backend="lacy")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--guided-decoding-backend", "lazy"],
        ["--guided_decoding_backend=lazy"],
        ["--structured-outputs-config.backend", "lazy"],
        ["--structured-outputs-config", '{"backend": "lazy"}'],
    ],
)
def test_every_form_of_the_flag_names_the_backend(registered, arguments):
    assert parsed(*arguments).backend == "lazy"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--structured-outputs-config.disable_any_whitespace", "true", "--guided-decoding-backend", "lazy"],
        ["--structured-outputs-config", '{"disable_any_whitespace": true}', "--guided-decoding-backend", "lazy"],
        ["--structured-outputs-config", '{"disable_any_whitespace": true, "backend": "lazy"}'],
    ],
)
def test_disable_any_whitespace_is_taken_with_it(registered, arguments):
    config = parsed(*arguments)
    assert (config.backend, config.disable_any_whitespace) == ("lazy", True)


def test_the_old_flag_names_vllms_own_backends_too(registered):
    assert parsed("--guided-decoding-backend", "guidance").backend == "guidance"


def test_an_unknown_backend_is_a_usage_error(registered, capsys):
    with pytest.raises(SystemExit):
        parsed("--guided-decoding-backend", "lacy")
    assert "lacy" in capsys.readouterr().err


def test_the_command_line_of_vllm_serve_reaches_the_configuration(monkeypatch, tmp_path):
    from vllm.entrypoints.cli import main as cli
    from vllm.entrypoints.cli.serve import ServeSubcommand

    taken = []
    monkeypatch.setattr("vllm.plugins.plugins_loaded", False)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setattr("vllm.plugins.load_plugins_by_group", lambda group: {"lazy_grammar": plugin.register})
    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(taken.append))
    file = tmp_path / "server.yaml"
    file.write_text("guided-decoding-backend: lazy\n")
    for arguments in (["--guided-decoding-backend", "lazy"], ["--config", str(file)]):
        monkeypatch.setattr(sys, "argv", ["vllm", "serve", "m", *arguments])
        cli.main()
    assert [args.structured_outputs_config.backend for args in taken] == ["lazy", "lazy"]


def test_the_help_shows_the_flag(registered):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert "--guided-decoding-backend BACKEND" in AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).format_help()


def test_the_engine_gets_a_subclass_of_vllms_manager(registered):
    from vllm.v1.engine import core
    from vllm.v1.structured_output import StructuredOutputManager

    assert issubclass(core.StructuredOutputManager, StructuredOutputManager)
    assert core.StructuredOutputManager is not StructuredOutputManager


def test_sampling_params_hold_what_a_client_would_send():
    grammar = LazyGrammar(regex="[0-9]+", triggers=["word:="], start="after")
    params = vllm_lazy_grammar.sampling_params(grammar, max_tokens=5, extra_args={"theirs": 1})
    assert params.structured_outputs.regex == "[0-9]+"
    assert params.extra_args == {"theirs": 1, **grammar.extra_args()}
    assert params.max_tokens == 5


def test_every_name_that_is_rebound_stands_in_the_page_for_vllms_maintainers():
    page = (Path(__file__).parents[1] / "docs/upstream.md").read_text("utf-8")
    for name in bound():
        module, _, path = name.partition(":")
        assert f"{module}:{path}`" in page or (f"`{module}`" in page and f"`{path}`" in page), name
    assert f"rebinds {len(bound())} names" in page
