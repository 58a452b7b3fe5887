"""First token of a lazy request whose schema takes long to compile, beside the same prompt unconstrained, on a real server."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from scripts.lib.bench.stats import median, pairs, show, verdict
from tests.serving.models import demo_model
from tests.serving.servers import MODEL, Flags, Pool, lazy
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine

BAR = 1.05
_STRINGS = 1
PAIRS = 30
SERVER = Flags(
    args=("--guided-decoding-backend", "lazy", "--no-enable-prefix-caching"),
    dtype="float32",
    env=(("VLLM_LOGGING_LEVEL", "DEBUG"),),
)
PROMPT = "Tell me about the river Rhine, its towns and its history, in a few sentences. " * 8


_SETTLES = 2.0
"""Seconds after a lazy request, so that its compile does not run into the next one's prompt."""


def slow_schema(tag: int) -> dict[str, Any]:
    """A schema never seen that takes about a second to compile: strings of bounded length."""
    inner = {
        f"k{tag}_{i}": {"type": "string", "minLength": 1 + i, "maxLength": 100 + 4 * tag + i} for i in range(_STRINGS)
    }
    return {"type": "object", "properties": inner}


def run() -> None:
    """Print the table."""
    pool = Pool(Path(tempfile.mkdtemp(prefix="lazy-grammar-bench-")), print)
    try:
        server = pool.get(SERVER)
        tags = itertools.count()
        for _ in range(3):
            _first(server, None)
        mine, free, ratio = pairs(lambda: _first(server, slow_schema(next(tags))), lambda: _first(server, None), PAIRS)
    finally:
        pool.keep_only(())
    print("\nFirst token of a lazy request with a schema never seen, beside the same prompt unconstrained, ms")
    print("| | |\n| --- | --- |")
    show("lazy / unconstrained / ratio", f"{mine} / {free} / **{ratio}** ({verdict(ratio.value, BAR)})")
    show("compile of such a schema alone, in one thread, ms", str(median([_compile_ms(next(tags)) for _ in range(5)])))


def _compile_ms(tag: int) -> float:
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    engine = XgrammarEngine.for_tokenizer(tokenizer, len(tokenizer), max_threads=1)
    begin = time.perf_counter()
    engine.compile(GrammarKey("json", json.dumps(slow_schema(tag))))
    return (time.perf_counter() - begin) * 1e3


def _first(server: Any, schema: dict[str, Any] | None) -> float:
    """Milliseconds to the first text of a streamed answer; a lazy one is read to its end, so that its compile never overlaps the next."""
    extra = {} if schema is None else lazy({"json": schema}, "word:<answer>", grammar_start="after")
    begin = time.perf_counter()
    stream = server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=2,
        temperature=0,
        stream=True,
        extra_body=extra,
    )
    first = None
    for event in stream:
        if first is None and event.choices and event.choices[0].delta.content:
            first = (time.perf_counter() - begin) * 1e3
    assert first is not None, json.dumps(extra)[:100]
    if schema is not None:
        time.sleep(_SETTLES)
    return first
