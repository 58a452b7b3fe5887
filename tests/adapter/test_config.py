"""`lazy` in the configuration, on stand-ins; vLLM's own configuration is in test_plugin.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal, get_args

import pytest

from vllm_lazy_grammar.adapter.config import is_lazy, standing_for, validating_config, with_lazy


def theirs(self):
    if self.backend not in ("xgrammar", "guidance"):
        raise ValueError(f"not with {self.backend}")
    return self


def test_lazy_is_added_at_the_end_and_foreign_names_stay():
    assert get_args(with_lazy(Literal["auto", "xgrammar", "theirs"])) == ("auto", "xgrammar", "theirs", "lazy")


def test_a_lazy_configuration_is_judged_as_if_it_said_xgrammar():
    config = SimpleNamespace(backend="lazy")
    assert validating_config(theirs)(config) is config
    assert config.backend == "lazy"


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_another_backend_is_judged_as_itself(backend):
    config = SimpleNamespace(backend=backend)
    assert validating_config(theirs)(config) is config


def test_what_was_refused_before_is_refused_in_the_same_words():
    with pytest.raises(ValueError, match="not with outlines"):
        validating_config(theirs)(SimpleNamespace(backend="outlines"))


def test_standing_for_changes_a_copy():
    config = SimpleNamespace(backend="lazy", disable_any_whitespace=True)
    seen = standing_for(config)
    assert (seen.backend, seen.disable_any_whitespace, config.backend) == ("xgrammar", True, "lazy")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SimpleNamespace(structured_outputs_config=SimpleNamespace(backend="lazy")), True),
        (SimpleNamespace(structured_outputs_config=SimpleNamespace(backend="auto")), False),
        (SimpleNamespace(structured_outputs_config=None), False),
        (SimpleNamespace(), False),
    ],
)
def test_whether_an_engine_is_lazy(config, expected):
    assert is_lazy(config) is expected
