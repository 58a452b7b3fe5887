"""The families that are served, and a user's preset held against sample outputs.

A sample is a JSON object on a line of its own:

    {"text": "Let me see. <tool_call>...", "tools": [...], "calls": 1, "accepted": true, "tool_choice": "auto"}

`calls` says how often the grammar must begin (default 1; 0: prose that must not), `accepted` whether the text is one that it must take
(default) or refuse. `raw_output` will do for `text`, as recorded outputs name it.

Invariants:
- A sample goes through the session as an answer does; each byte is a token, and the preset's marks are, unless a tokenizer is given.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_lazy_grammar.cli.asked import called
from vllm_lazy_grammar.cli.follow import Follower
from vllm_lazy_grammar.cli.workbench import Workbench, byte_vocabulary
from vllm_lazy_grammar.errors import RequestError
from vllm_lazy_grammar.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vllm_lazy_grammar.cli.follow import Refusal
    from vllm_lazy_grammar.cli.workbench import Model
    from vllm_lazy_grammar.core.vocabulary import Vocabulary
    from vllm_lazy_grammar.tools.presets import Preset


class Sample(NamedTuple):
    """One output, and what must become of it."""

    text: str
    tools: list[Any]
    calls: int
    accepted: bool
    tool_choice: Any
    context: str


class Result(NamedTuple):
    """What became of one: an empty `fault` where it is as it must be."""

    fault: str
    calls: int
    refusal: Refusal | None


_KEYS = frozenset({"text", "raw_output", "tools", "calls", "accepted", "tool_choice", "context"})


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file. RequestError where it can not be read, or a line is none."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("--samples", str(path), f"these samples can not be read: {error}") from error
    found = [_sample(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise RequestError("--samples", str(path), "there is no sample in it")
    return found


def _sample(line: str, where: str) -> Sample:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise RequestError(where, line, f"this is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise RequestError(where, given, "a sample is a JSON object")
    text = given.get("text", given.get("raw_output"))
    if not isinstance(text, str) or not isinstance(given.get("tools"), list):
        raise RequestError(where, given, "a sample has a text and a list of tools")
    if "raw_output" not in given and (unknown := given.keys() - _KEYS):
        raise RequestError(where, sorted(unknown), f"there are no such keys; there are {', '.join(sorted(_KEYS))}")
    calls, accepted = given.get("calls", 1), given.get("accepted", True)
    if not isinstance(calls, int) or isinstance(calls, bool) or not isinstance(accepted, bool):
        raise RequestError(where, given, "calls is a whole number, accepted is true or false")
    return Sample(text, given["tools"], calls, accepted, given.get("tool_choice", "auto"), given.get("context", ""))


class Trial:
    """Holds a preset against samples.

    Args:
        preset: the preset.
        model: writes the texts; None: each byte, and each mark of the preset, is a token.
    """

    def __init__(self, preset: Preset, model: Model | None) -> None:
        self._preset, self._model = preset, model
        self._vocabulary: Vocabulary = (
            byte_vocabulary([*preset.markers, *preset.needs]) if model is None else model.vocabulary
        )
        self._bench = Workbench(self._vocabulary, Settings())

    def _tokens(self, text: str) -> Iterator[int]:
        added = self._vocabulary.added
        marks = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
        for part in re.split(f"({marks})", text) if marks else [text]:
            yield from [added[part]] if part in added else part.encode()

    def judge(self, sample: Sample) -> Result:
        """What becomes of a sample. RequestError where its tools can not be served."""
        stops = frozenset() if self._model is None else self._model.stop_ids
        question = called(
            self._preset, sample.tools, sample.tool_choice, self._vocabulary, stops, context=sample.context
        )  # fmt: skip
        tokens = list(self._tokens(sample.text)) if self._model is None else self._model.tokens(sample.text)
        verdict = Follower(self._bench, question).follow(tokens)
        return Result(_fault(sample, verdict.activations, verdict.refusal), verdict.activations, verdict.refusal)


def _fault(sample: Sample, calls: int, refusal: Refusal | None) -> str:
    if sample.accepted and refusal is not None:
        return f"refused at token {refusal.place}: {refusal.why}"
    if not sample.accepted and refusal is None:
        return "accepted, and must be refused"
    if sample.accepted and calls != sample.calls:
        return f"the grammar began {calls} times, and must {sample.calls} times"
    return ""
