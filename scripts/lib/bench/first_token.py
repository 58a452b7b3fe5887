"""First token of a lazy request whose schema takes long to compile, beside the same prompt unconstrained, on a real server."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.lib.bench.stats import median, pairs, show, verdict
from tests.serving.servers import MODEL, Flags, Pool, lazy

BAR = 1.05
PAIRS = 30
SERVER = Flags(
    args=("--guided-decoding-backend", "lazy", "--no-enable-prefix-caching"),
    dtype="float32",
    env=(("VLLM_LOGGING_LEVEL", "DEBUG"),),
)
PROMPT = "Tell me about the river Rhine, its towns and its history, in a few sentences. " * 8


def slow_schema(tag: int, width: int) -> dict[str, Any]:
    """A schema never seen that takes about a second to compile: many optional properties with bounded strings."""
    inner = {f"k{tag}_{i}": {"type": "string", "pattern": f"^[a-z{i % 10}]{{1,{20 + i}}}$"} for i in range(width)}
    return {"type": "object", "properties": inner}


def run() -> None:
    """Print the table."""
    pool = Pool(Path(tempfile.mkdtemp(prefix="lazy-grammar-bench-")), print)
    try:
        server = pool.get(SERVER)
        tags = itertools.count()
        for _ in range(3):
            _first(server, None)
        mine, free, ratio = pairs(
            lambda: _first(server, slow_schema(next(tags), 40)), lambda: _first(server, None), PAIRS
        )
        compiled = [float(ms) for ms in re.findall(r"compile ([0-9.]+) ms", server.log())]
    finally:
        pool.keep_only(())
    print("\nFirst token of a lazy request with a schema never seen, beside the same prompt unconstrained, ms")
    print("| | |\n| --- | --- |")
    show("lazy / unconstrained / ratio", f"{mine} / {free} / **{ratio}** ({verdict(ratio.value, BAR)})")
    show("compile of such a schema, ms", f"{median(compiled)} ({len(compiled)} seen)")


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
    return first
