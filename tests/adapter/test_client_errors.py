"""What a reader of an engine's outputs is told where the engine ended a request; the outputs are made up here, the error bodies are vLLM's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tests.quiet import import_quietly, import_vllm

pytestmark = pytest.mark.vllm

LAZY = SimpleNamespace(structured_outputs_config=SimpleNamespace(backend="lazy"))
OTHER = SimpleNamespace(structured_outputs_config=SimpleNamespace(backend="xgrammar"))


@pytest.fixture
def client_errors():
    import_vllm()
    return import_quietly("vllm_lazy_grammar.adapter.client_errors")


def output(finish=None, stop=None):
    return SimpleNamespace(outputs=[SimpleNamespace(finish_reason=finish, stop_reason=stop)])


def ended(**fault):
    from vllm_lazy_grammar.adapter.faults import Fault

    return output("error", Fault(**fault).as_stop_reason())


def listened(client_errors, given, config=LAZY):
    """(what came before it ended, the error that ended it, whether vLLM's generator was closed)."""
    came, closed = [], []

    async def generate(self, prompt, *, request_id):
        try:
            for each in given:
                yield each
        finally:
            closed.append(request_id)

    async def listen():
        generator = client_errors.generating(generate)(SimpleNamespace(vllm_config=config), "p", request_id="r")
        try:
            async for each in generator:
                came.append(each)  # noqa: PERF401 -- what came before the error counts
        except Exception as error:  # noqa: BLE001 -- the tests say which is right
            return error

    return came, asyncio.run(listen()), closed


def body(error):
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    return create_error_response(error).error


def test_a_clients_fault_is_a_bad_request_with_its_field_and_vllms_generator_is_closed(client_errors):
    first = output()
    fault = ended(message="a.b: is wrong (got 'c')", field="a.b", value="'c'")
    came, error, closed = listened(client_errors, [first, fault, output()])
    assert (came, closed) == ([first], ["r"])
    told = body(error)
    assert (told.type, told.code, told.param) == ("BadRequestError", 400, "a.b")
    assert told.message == "a.b: is wrong (got 'c')"


def test_a_fault_of_ours_is_a_servers_error_with_the_reason(client_errors):
    _, error, _ = listened(client_errors, [ended(message="broken inside")])
    told = body(error)
    assert (told.type, told.code, told.message) == ("InternalServerError", 500, "broken inside")


@pytest.mark.parametrize("last", [output("stop", 2), output("error", None), output("stop", "###")])
def test_every_other_output_passes(client_errors, last):
    assert listened(client_errors, [output(), last])[1] is None


def test_another_backends_outputs_are_not_looked_at(client_errors):
    assert listened(client_errors, [ended(message="a", field="a")], OTHER)[1] is None
