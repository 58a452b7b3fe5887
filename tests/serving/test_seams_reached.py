"""Each replacement of `plugin.table()` is called in a running server: a plugin of the tests' own wraps them and writes down who is.

A seam that a server can not reach, or that holds no code, is listed here with where its effect is shown instead.
"""

from __future__ import annotations

import pytest

from tests.serving.asking import ASK_PERSON, PERSON, chat, complete, is_person, respond, streamed
from tests.serving.servers import MODEL, TIGHT, WITNESS, lazy

CONFIG = "vllm.config.structured_outputs:"
NAMES = {
    CONFIG + "StructuredOutputsBackend",
    CONFIG + "StructuredOutputsConfig.__dataclass_fields__[backend].type",
}
"""Literals, not code: without them the server below would not have taken `backend: lazy`."""

OFFLINE = {"vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin.beam_search"}
"""Shown by `test_offline.py`: a server does not have it."""


@pytest.mark.server(TIGHT)
def test_every_replacement_is_reached_in_a_running_server(server):
    body = lazy({"json": PERSON})
    assert is_person(chat(server, ASK_PERSON, body).text)
    assert is_person(streamed(server, ASK_PERSON, body).text)
    assert is_person(complete(server, ASK_PERSON, body).text)
    assert is_person(respond(server, ASK_PERSON, body))
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "Say hi."}]}
    assert server.client.post("/messages", body=body, cast_to=object)
    for ask in (chat, complete):
        ask(server, "Say hi.", {"use_beam_search": True}, max_tokens=2)
    reached = {path.name for path in WITNESS.iterdir()}
    table = set((WITNESS / "all.txt").read_text().splitlines())
    assert table - reached == NAMES | OFFLINE
    assert "backend='lazy'" in server.log()
