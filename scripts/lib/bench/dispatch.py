"""Tools compiled one by one beside the set in one piece: until the row behind a tool's opening is there, sets never seen and with one tool changed."""

from __future__ import annotations

import json
import os
import random
import time
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.lib.bench.stats import pairs, show
from vllm_lazy_grammar.core.byte_trie import ByteTrie
from vllm_lazy_grammar.core.compiles import GrammarStore
from vllm_lazy_grammar.core.dispatch import Dispatcher, DispatchGrammar
from vllm_lazy_grammar.core.prewarm import Worker
from vllm_lazy_grammar.core.rows import RowCache
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.tools.choice import Wanted, choose, read_tools
from vllm_lazy_grammar.tools.parts import plan_of
from vllm_lazy_grammar.tools.presets import catalogue

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_lazy_grammar.core.matcher import GrammarKey
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

SIZES = (1, 20, 100, 300)
PAIRS = {1: 15, 20: 11, 100: 7, 300: 5}
_THREADS = 8
_MB = 1 << 20
_TYPES = ("string", "integer", "number", "boolean")


def _own_tools() -> list[dict[str, Any]]:
    """Where there are no others: a few arguments each, no two alike."""
    found = []
    for place in range(400):
        keys = [f"argument_{place}_{i}" for i in range(1 + place % 7)]
        properties = {key: {"type": _TYPES[(place + i) % len(_TYPES)]} for i, key in enumerate(keys)}
        parameters = {"type": "object", "properties": properties, "required": keys[:2], "additionalProperties": False}
        found.append({"name": f"do_{place}", "parameters": parameters})
    return found


class _Side:
    """One way to compile sets, with everything that it keeps from one set to the next."""

    def __init__(self, vocabulary: Vocabulary, trie: ByteTrie, *, apart: bool) -> None:
        self.vocabulary = vocabulary
        engine = XgrammarEngine(vocabulary, max_threads=max(1, min(8, (os.cpu_count() or 1) // 2)))
        self.worker = Worker(_THREADS)
        self.store = GrammarStore(
            engine,
            self.worker,
            RowCache(64 * _MB),
            vocabulary.row_words,
            limit_bytes=512 * _MB,
            top_k=0,
            dispatcher=Dispatcher(trie, plan_of) if apart else None,
        )

    def ready(self, key: GrammarKey, opening: bytes) -> float:
        """Milliseconds from the set to the row behind a tool's opening; the first token of the text is there before."""
        row = np.empty(self.vocabulary.row_words, np.int32)
        begin = time.perf_counter()
        compile_ = self.store.get(key)
        matcher = compile_.result().matcher()
        matcher.fill(row)
        for byte in opening:
            assert matcher.accept_bytes(bytes((byte,)))
        matcher.fill(row)
        spent = (time.perf_counter() - begin) * 1e3
        self.rest(compile_)
        return spent

    def rest(self, compile_: Any) -> None:
        """Wait for whatever is compiled ahead, and give the set back."""
        grammar = compile_.result()
        if isinstance(grammar, DispatchGrammar):
            for call in grammar.plan.calls:
                grammar.join(call.last if call.more is None else call.more)
        compile_.release()


class _Sets:
    """Sets of tools, and the opening of one of them."""

    def __init__(self, tools: list[dict[str, Any]], vocabulary: Vocabulary) -> None:
        self._tools, self._is_token = tools, vocabulary.added.__contains__
        self._preset = catalogue().families["hermes"]
        self._fresh = count()

    def drawn(self, size: int, rng: random.Random) -> list[dict[str, Any]]:
        """So many tools, whose names and arguments nobody has seen."""
        return [self.renamed(tool) for tool in rng.sample(self._tools, size)]

    def renamed(self, tool: dict[str, Any]) -> dict[str, Any]:
        """A tool with a name and an argument of its own."""
        number = next(self._fresh)
        parameters = tool["parameters"]
        more = {**parameters.get("properties", {}), f"note_{number}": {"type": "string"}}
        return {"name": f"{tool['name']}_{number}", "parameters": {**parameters, "properties": more}}

    def key(self, tools: list[dict[str, Any]], called: int) -> tuple[GrammarKey, bytes]:
        """The grammar of a set, and how a call of one of them opens."""
        choice = choose(read_tools(tools), Wanted(), self._preset, is_token=self._is_token)
        assert choice is not None
        opening = f'<tool_call>\n{{"name": {json.dumps(tools[called]["name"])}, "arguments": '
        return choice.grammar, opening.encode()


def run(vocabulary: Vocabulary, data: Path) -> None:
    """Print the table."""
    tools = json.loads(data.read_text("utf-8")) if data.is_file() else _own_tools()
    sets, trie = _Sets(tools, vocabulary), ByteTrie(vocabulary)
    apart, whole = (_Side(vocabulary, trie, apart=way) for way in (True, False))
    for side in (apart, whole):
        side.ready(*sets.key(sets.drawn(2, random.Random(0)), 1))  # noqa: S311 -- the same in every run
    print(f"\nTools one by one / in one piece: until the row behind a tool's opening, {vocabulary.size} ids, ms")
    print("| tools | never seen | one of them changed, and called |\n| --- | --- | --- |")
    for size in SIZES:
        show(str(size), f"{_cold(sets, apart, whole, size)} | {_changed(sets, apart, whole, size)}")
    for side in (apart, whole):
        side.worker.close()


def _both(apart: _Side, whole: _Side, asked: Any, size: int) -> str:
    """`asked` draws a set for a side; each side gets sets of its own, drawn alike."""
    draws = {side: random.Random(size) for side in (apart, whole)}  # noqa: S311 -- the same in every run
    ours, theirs, ratio = pairs(
        lambda: apart.ready(*asked(apart, draws[apart])), lambda: whole.ready(*asked(whole, draws[whole])), PAIRS[size]
    )
    return f"{ours} / {theirs} = **{ratio}**"


def _cold(sets: _Sets, apart: _Side, whole: _Side, size: int) -> str:
    def asked(_: _Side, rng: random.Random) -> tuple[GrammarKey, bytes]:
        return sets.key(sets.drawn(size, rng), rng.randrange(size))

    return _both(apart, whole, asked, size)


def _changed(sets: _Sets, apart: _Side, whole: _Side, size: int) -> str:
    known: dict[_Side, list[dict[str, Any]]] = {}
    for side in (apart, whole):
        known[side] = sets.drawn(size, random.Random(size))  # noqa: S311 -- the same in every run
        side.ready(*sets.key(known[side], 0))

    def asked(side: _Side, rng: random.Random) -> tuple[GrammarKey, bytes]:
        place = rng.randrange(size)
        known[side][place] = sets.renamed(known[side][place])
        return sets.key(known[side], place)

    return _both(apart, whole, asked, size)
