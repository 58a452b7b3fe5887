"""Speculative decoding on real servers: greedy answers with drafts are those without, token by token, whoever drafts."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serving.calling import TOOLS, named
from tests.serving.servers import LAZY, MODEL, Flags, tool_flags

AT_ONCE = 16
_PARSER = "tool_parser.py"
"""vLLM's parser writes an error for each call that `max_tokens` cuts."""
OURS = "vllm_lazy_grammar.adapter.proposer.GrammarProposer"
BASE = (*LAZY.args, *tool_flags("hermes"), "--additional-config", '{"lazy_grammar": {"force_after": 8}}')
TOPICS = ("Paris", "Rome", "Oslo", "a walk", "two cats", "the sea", "bread", "rain", "a red car", "snow")
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 20},
        "count": {"type": "integer"},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["title", "count", "kind"],
}


def drafting(**speculative):
    return Flags(args=(*BASE, "--speculative-config", json.dumps(speculative)))


def ngram(count):
    return drafting(method="ngram", num_speculative_tokens=count, prompt_lookup_min=2, prompt_lookup_max=4)


PLAIN = Flags(args=BASE)
NGRAM_8 = ngram(8)
NGRAM_3 = ngram(3)
ALONE = drafting(method="custom_class", model=OURS, num_speculative_tokens=8)


def bodies():
    """Sixty requests of six kinds: calls three ways, JSON, a regular expression, plain text."""
    for topic in TOPICS:
        prompt = f"Tell me of {topic} and what the weather is there for 3 days."
        for extra in (
            {"tools": TOOLS, "tool_choice": "auto"},
            {"tools": TOOLS, "tool_choice": "required"},
            {"tools": TOOLS, "tool_choice": named("get_weather")},
            {"structured_outputs": {"json": SCHEMA}},
            {"structured_outputs": {"regex": "(?:yes|no), because [a-z ]{10,40}\\."}},
            {},
        ):
            yield prompt, extra


def written(server, requests):
    """The token ids of each answer, many at once."""

    def one(request):
        prompt, extra = request
        known = {name: extra[name] for name in ("tools", "tool_choice") if name in extra}
        body = {"return_token_ids": True, **{name: value for name, value in extra.items() if name not in known}}
        answer = server.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=40,
            extra_body=body,
            **known,
        )
        return answer.choices[0].token_ids

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(one, requests))


def accepted(server):
    """Drafts that were accepted so far."""
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        text = answer.read().decode()
    return sum(
        float(found)
        for found in re.findall(r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)", text, re.MULTILINE)
    )


def compare(servers):
    plain, drafted = servers
    requests = list(bodies())
    without, withal = written(plain, requests), written(drafted, requests)
    differ = [request for request, a, b in zip(requests, without, withal, strict=True) if a != b]
    free = [(prompt, {}) for prompt, _ in differ]
    assert len(differ) <= 2, differ
    assert all(a != b for a, b in zip(written(plain, free), written(drafted, free), strict=True)), differ
    assert accepted(drafted) > 0
    assert [line for line in drafted.log().splitlines() if " ERROR " in line and _PARSER not in line] == []


@pytest.mark.long
@pytest.mark.server(PLAIN, NGRAM_8)
def test_greedy_answers_with_ngrams_and_the_grammars_drafts_are_those_without(servers):
    compare(servers)


@pytest.mark.long
@pytest.mark.server(PLAIN, ALONE)
def test_greedy_answers_with_the_grammars_drafts_alone_are_those_without(servers):
    compare(servers)


@pytest.mark.long
@pytest.mark.server(PLAIN, NGRAM_3)
def test_greedy_answers_with_three_drafts_are_those_without(servers):
    compare(servers)
