"""The metrics on the page of a running server: with one API server, with two, in the offline `LLM`, and with the setting off."""

from __future__ import annotations

import http.client
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.asking import ASK_PERSON, PERSON, all_at_once, chat, is_person, metric
from tests.serving.calling import call, named
from tests.serving.servers import API_SERVERS_2, HERMES, TRACED, lazy
from tests.serving.test_offline import REGISTERED
from tests.serving.wishes import spell, tokens
from vllm_lazy_grammar.core.counts import METRICS

OF_THE_PROCESS = "process_resident_memory_bytes"
"""What vLLM's page loses in Prometheus' multiprocess mode."""


def page(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def page_of_someone(server, number):
    """The page of one of the API servers, and which: a connection stays with the one that logs its request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    name = f"seen-by-{number}"
    body = json.dumps({"model": "model", "prompt": "Hi", "max_tokens": 1})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", "X-Request-Id": name})
    connection.getresponse().read()
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    (who,) = re.findall(rf"\(ApiServer_(\d)\b.*Received request \S*{name}\b", server.log())
    return who, text


def counted(server):
    return samples(page(server))


def samples(text):
    """Our samples: {(name, the metric's own label): value}."""
    found = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if name.startswith("lazy_grammar_"):
                assert labels.pop("model_name") == "model"
                assert labels.pop("engine") == "0"
                found[name.removeprefix("lazy_grammar_"), *sorted(labels.values())] = value
    return found


def came(before, after, *names):
    """What came to counters of these names, where something did."""
    return {key: value - before[key] for key, value in after.items() if key[0] in names and value != before[key]}


REQUESTS = (
    "requests_total",
    "armed_total",
    "fired_total",
    "never_fired_total",
    "disarmed_total",
    "ended_requests_total",
)


@pytest.mark.server(HERMES)
def test_every_metric_is_on_the_page_beside_vllms_own(server):
    text = page(server)
    for each in METRICS:
        assert f"# HELP {each.name} {each.help}" in text
        assert f"# TYPE {each.name} {each.type}" in text
    assert "vllm:request_success_total{" in text
    assert f"\n{OF_THE_PROCESS} " in text


@pytest.mark.server(HERMES)
def test_a_lazy_request_that_fires_one_that_does_not_and_an_eager_one_are_told_apart(server):
    before = counted(server)
    body = lazy({"json": PERSON}, "word:<answer>", grammar_start="after")
    chat(server, ASK_PERSON, body, wishes="Well. <answer>")
    chat(server, ASK_PERSON, body, wishes=[*tokens("Well."), 2])
    assert is_person(chat(server, ASK_PERSON, lazy({"json": PERSON})).text)
    after = counted(server)
    assert came(before, after, *REQUESTS) == {
        ("requests_total", "lazy"): 2,
        ("requests_total", "eager"): 1,
        ("armed_total",): 2,
        ("fired_total", "word"): 1,
        ("never_fired_total", "lazy"): 1,
    }
    assert came(before, after, "compiler_requests_total") == {("compiler_requests_total", "xgrammar"): 3}
    seconds = came(before, after, "mask_seconds_total", "mask_rows_total")
    assert 0 < seconds["mask_seconds_total",] < 10
    assert seconds["mask_rows_total",] > 20


@pytest.mark.server(HERMES)
def test_an_answer_that_is_led_to_its_end_and_one_that_could_not_be(server):
    before = counted(server)
    chat(server, body=lazy({"regex": "[0-9]{1,200}"}), wishes=spell("1" * 9), max_tokens=6)
    chat(server, body=lazy({"regex": "[0-9]{200}"}), wishes=spell("1" * 9), max_tokens=6)
    after = counted(server)
    assert came(before, after, "led_out_requests_total", "budget_missed_total") == {
        ("led_out_requests_total",): 1,
        ("budget_missed_total", "too_short"): 1,
    }


@pytest.mark.server(HERMES)
def test_requests_with_tools_are_told_apart_by_their_choice(server):
    before = counted(server)
    for choice in ("auto", "required", named("get"), "none"):
        call(server, choice, wishes=[*tokens("No."), 2], max_tokens=64)
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    call(server, "auto", response_format=form, max_tokens=64)
    after = counted(server)
    kinds = ("tools_auto", "tools_required", "tools_named", "tools_none", "tools_or_format")
    assert came(before, after, "requests_total") == {("requests_total", kind): 1 for kind in kinds}
    assert came(before, after, "never_fired_total") == {("never_fired_total", kind): 1 for kind in ("tools_auto", "tools_none")}  # fmt: skip
    assert came(before, after, "forced_requests_total") == {("forced_requests_total",): 2}
    assert sum(came(before, after, "fired_total").values()) >= 2


@pytest.mark.server(HERMES)
def test_compiles_are_counted_with_their_seconds_and_a_second_request_hits_the_cache(server):
    before = counted(server)
    body = lazy({"json": {**PERSON, "title": "seen by the metrics"}})
    chat(server, ASK_PERSON, body)
    between = counted(server)
    chat(server, ASK_PERSON, body)
    after = counted(server)
    of_compile = ("compile_seconds_count", "wait_seconds_count", "cache_misses_total")
    told = came(before, between, *of_compile)
    assert told["compile_seconds_count", "xgrammar"] == told["cache_misses_total", "grammars"] == 1
    assert told["wait_seconds_count", "queue"] == 1
    assert came(before, between, "compile_seconds_sum")["compile_seconds_sum", "xgrammar"] > 0
    assert came(between, after, "compile_seconds_count", "cache_hits_total")["cache_hits_total", "grammars"] == 1
    assert ("compile_seconds_count", "xgrammar") not in came(between, after, *of_compile)
    assert min(after["cache_bytes", cache] for cache in ("grammars", "rows")) > 0


@pytest.mark.server(HERMES)
def test_nothing_that_a_client_says_becomes_a_label(server):
    body = lazy({"json": PERSON}, "word:<secret>", grammar_start="after")
    chat(server, ASK_PERSON, body, wishes="No.", max_tokens=4)
    assert "secret" not in page(server)
    with pytest.raises(Exception, match="grammar_counted_as"):
        chat(server, ASK_PERSON, lazy({"json": PERSON}, grammar_counted_as="of my own"))


@pytest.mark.server(API_SERVERS_2)
def test_two_api_servers_show_the_same_counts_and_vllms_own_are_whole(server):
    before, served, mark = counted(server), metric(server, "request_success"), len(server.log())
    body = lazy({"json": PERSON}, "word:<answer>", grammar_start="after")
    jobs = [
        lambda: chat(server, ASK_PERSON, body, wishes="Well. <answer>"),
        lambda: chat(server, ASK_PERSON, lazy({"json": PERSON})),
    ]
    for number in range(2):
        with server.only_api_server(number):
            answers = all_at_once(jobs * 3)
        assert all(is_person(said.text.partition("<answer>")[2] or said.text) for said in answers), answers
    assert set(re.findall(r"\(ApiServer_(\d)\b.*Received request", server.log()[mark:])) == {"0", "1"}
    assert metric(server, "request_success") - served == 12
    for number in range(2):
        with server.only_api_server(number):
            who, text = page_of_someone(server, number)
        assert who == str(number)
        assert came(before, samples(text), *REQUESTS) == {
            ("requests_total", "lazy"): 6, ("requests_total", "eager"): 6, ("armed_total",): 6, ("fired_total", "word"): 6
        }  # fmt: skip


@pytest.mark.server(TRACED)
def test_with_the_setting_off_the_page_is_vllms_own(server):
    assert is_person(chat(server, ASK_PERSON, lazy({"json": PERSON})).text)
    text = page(server)
    assert "lazy_grammar_" not in text
    assert "vllm:request_success_total{" in text


READ = """
    from prometheus_client import REGISTRY
    import os
    found = {
        "/".join([s.name, *(v for k, v in sorted(s.labels.items()) if k in ("kind", "trigger"))]): s.value
        for family in REGISTRY.collect() for s in family.samples if s.name.startswith("lazy_grammar_")
    }
    theirs = sum(m.value for m in llm.get_metrics() if m.name == "vllm:request_success")
    return found, theirs, os.environ["LAZY_GRAMMAR_METRICS_DIR"]
"""


@pytest.mark.server
@pytest.mark.parametrize("own_process", [pytest.param("1", marks=pytest.mark.long), "0"])
def test_the_offline_llm_has_them_in_the_default_registry_wherever_its_engine_is(offline, own_process):
    source = REGISTERED + "\ndef main():\n    llm = engine(disable_log_stats=False)\n    answers(llm)" + READ
    found, theirs, folder = offline(source, VLLM_ENABLE_V1_MULTIPROCESSING=own_process)
    assert found["lazy_grammar_requests_total/lazy"] == found["lazy_grammar_requests_total/eager"] == 2
    assert found["lazy_grammar_fired_total/word"] == 2
    assert theirs == 6
    assert not Path(folder).exists()
