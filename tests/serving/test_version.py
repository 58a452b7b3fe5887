"""The servers run the vLLM that is meant to be tested: the installed one, or the one that is laid over it."""

from __future__ import annotations

import http.client
import json
import os
from importlib.metadata import version

import pytest

from tests.serving.servers import WISHES

pytestmark = pytest.mark.server(WISHES)


def test_the_server_runs_the_vllm_that_is_meant(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/version")
    served = json.loads(connection.getresponse().read())["version"]
    connection.close()
    meant = os.environ.get("LAZY_GRAMMAR_VLLM_VERSION") or version("vllm")
    assert served.partition("+")[0] == meant.partition("+")[0]
