"""Starts that are refused: the server ends with an error that names the setting, before it loads a model."""

from __future__ import annotations

import dataclasses

import pytest

from tests.serving.servers import LAZY, Server, ServerError

pytestmark = pytest.mark.server()


def refused_start(tmp_path, flags):
    with pytest.raises(ServerError) as caught:
        Server.start(flags, tmp_path / "server.log")
    return str(caught.value)


def test_a_wrong_setting_ends_the_start_with_its_name_and_value(tmp_path):
    flags = dataclasses.replace(LAZY, args=(*LAZY.args, "--additional-config", '{"lazy_grammar": {"prewarm_topk": 3}}'))
    error = refused_start(tmp_path, flags)
    assert "additional_config.lazy_grammar.prewarm_topk" in error
    assert "(got 3)" in error


def test_the_rust_front_end_ends_the_start(tmp_path):
    env = (("VLLM_USE_RUST_FRONTEND", "1"), ("VLLM_RUST_FRONTEND_PATH", "/bin/true"))
    assert "VLLM_USE_RUST_FRONTEND" in refused_start(tmp_path, dataclasses.replace(LAZY, env=env))


def test_a_backend_that_there_is_not_is_a_usage_error(tmp_path):
    flags = dataclasses.replace(LAZY, args=("--guided-decoding-backend", "lacy"))
    assert "Input should be" in refused_start(tmp_path, flags)
