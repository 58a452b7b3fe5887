"""Steps per answer: the demo model on real servers, the same requests without drafts, with ngram, with the grammar's, with both; greedy, float32.

A step is what the model runs once for a request: tokens written, less drafts that were accepted. One call is asked for, at once
(`force_after` 0, no parallel calls): what the model says before and behind it is free text, of which no grammar knows anything.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.serving.models import SHARED
from tests.serving.servers import LAZY, MODEL, Flags, Server, tool_flags

COUNT = 100
AT_ONCE = 8
MAX_TOKENS = 128
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
OURS = {
    "method": "custom_class",
    "model": "vllm_lazy_grammar.adapter.proposer.GrammarProposer",
    "num_speculative_tokens": 8,
}
_COUNTERS = {
    "written": "vllm:generation_tokens_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
_TOLD = re.compile(r"drafts of the grammar: (\d+) offered, (\d+) accepted")


@dataclass(frozen=True)
class Mode:
    """A way of drafting: vLLM's speculative config, and whether the grammar drafts too."""

    name: str
    speculative: dict[str, Any] | None = None
    grammar: bool = False

    def flags(self) -> Flags:
        """The server."""
        speculative = () if self.speculative is None else ("--speculative-config", json.dumps(self.speculative))
        ours = ("--additional-config", json.dumps({"lazy_grammar": {"drafts": self.grammar, "force_after": 0}}))
        debug = (("VLLM_LOGGING_LEVEL", "DEBUG"),)
        return Flags(args=(*LAZY.args, *tool_flags("hermes"), *speculative, *ours), dtype="float32", env=debug)


MODES = (
    Mode("none"),
    Mode("ngram", NGRAM),
    Mode("ngram + grammar", NGRAM, grammar=True),
    Mode("grammar", OURS, grammar=True),
)


def tool_requests(count: int = COUNT) -> list[dict[str, Any]]:
    """Calls of one tool each, the first of them by name."""
    tools = sorted(json.loads((SHARED / "data/tools.json").read_text()), key=lambda tool: tool["name"])
    return [_tool_request(tool) for tool in tools[:count]]


def _tool_request(tool: dict[str, Any]) -> dict[str, Any]:
    example: Any = tool["examples"][0] if tool["examples"] else {}
    function = {"name": tool["name"], "parameters": tool["parameters"], "strict": True}
    return {
        "messages": [
            {"role": "user", "content": f"Call {tool['name']} with {json.dumps(example, ensure_ascii=False)[:600]}"}
        ],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "extra_body": {"return_token_ids": True},
    }


def json_requests(count: int = COUNT) -> list[dict[str, Any]]:
    """Answers that obey a schema, the first of them by name."""
    files = sorted((SHARED / "data/maskbench").glob("*.json"))
    return [_json_request(json.loads(file.read_text())) for file in files[:count]]


def _json_request(case: dict[str, Any]) -> dict[str, Any]:
    example: Any = next((test["data"] for test in case["tests"] if test["valid"]), {})
    return {
        "messages": [
            {"role": "user", "content": f"Answer with this as JSON: {json.dumps(example, ensure_ascii=False)[:600]}"}
        ],
        "extra_body": {"return_token_ids": True, "structured_outputs": {"json": case["schema"]}},
    }


async def ask(server: Server, requests: list[dict[str, Any]]) -> list[dict[str, Any] | str]:
    """The answers in order: with prompt and tokens, or the error of one that is refused."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(client: Any, request: dict[str, Any]) -> dict[str, Any] | str:
        async with gate:
            try:
                answer = await client.chat.completions.create(
                    model=MODEL, temperature=0, max_tokens=MAX_TOKENS, **request
                )
            except Exception as error:  # noqa: BLE001 -- a refused schema is counted, whatever the client makes of it
                return str(error)
            return dict(answer.model_dump())

    async with server.async_client() as client:
        return await asyncio.gather(*(one(client, request) for request in requests))


def counters(server: Server) -> dict[str, float]:
    """The counters of vLLM by our names; 0 where there is none."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric))
        for name, metric in _COUNTERS.items()
    }


def measured(server: Server, requests: list[dict[str, Any]]) -> tuple[dict[str, float], list[dict[str, Any] | str]]:
    """What the counters grew by, seconds besides, and the answers."""
    before, begin, told = counters(server), time.perf_counter(), len(server.log())
    answers = asyncio.run(ask(server, requests))
    grown = {name: value - before[name] for name, value in counters(server).items()}
    ours = [tuple(map(int, found)) for found in _TOLD.findall(server.log()[told:])]
    seconds = time.perf_counter() - begin
    return {
        **grown,
        "seconds": seconds,
        "answers": sum(not isinstance(answer, str) for answer in answers),
        "ours": float(sum(offered for offered, _ in ours)),
        "ours accepted": float(sum(accepted for _, accepted in ours)),
    }, answers


def run(folder: Path | None = None, modes: tuple[Mode, ...] = MODES, count: int = COUNT) -> None:
    """Print the table for `count` requests of each kind; what was answered is kept in `folder`."""
    kept = Path(tempfile.mkdtemp()) if folder is None else folder
    print(
        f"\nSteps per answer: {count} tool calls and {count} JSON answers of the demo model, greedy, float32, {AT_ONCE} at once; answers in {kept}"
    )
    print(
        "| drafts | requests | steps per answer | tokens per answer | accepted of drafted | accepted of the grammar's | tokens per second | same answers |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    first: dict[str, Any] = {}
    for mode in modes:
        server = Server.start(mode.flags(), kept / f"{mode.name}.log")
        try:
            for kind, requests in (("tool calls", tool_requests(count)), ("JSON", json_requests(count))):
                grown, answers = measured(server, requests)
                (kept / f"{mode.name}-{kind}.json").write_text(json.dumps(answers))
                _show(mode, kind, grown, answers, first.setdefault(kind, answers))
        finally:
            server.stop()


def _show(mode: Mode, kind: str, grown: dict[str, float], answers: list[Any], first: list[Any]) -> None:
    count = max(1.0, grown["answers"])
    same = sum(_said(a) == _said(b) for a, b in zip(answers, first, strict=True))
    steps = (grown["written"] - grown["accepted"]) / count
    print(
        f"| {mode.name} | {kind} | **{steps:.1f}** | {grown['written'] / count:.1f} | {_share(grown['accepted'], grown['drafted'])} | "
        f"{_share(grown['ours accepted'], grown['ours'])} | {grown['written'] / grown['seconds']:.0f} | {same} of {len(answers)} |",
        flush=True,
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.2f} ({part:.0f} of {whole:.0f})" if whole else "-"


def _said(answer: dict[str, Any] | str) -> Any:
    return answer if isinstance(answer, str) else answer["choices"][0]["token_ids"]
