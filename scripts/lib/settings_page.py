"""docs/settings.md, made from the code that reads what it lists: an operator's settings, and what a request may say.

Invariants:
- All that can be set has a line, and nothing else has; `tests/test_docs.py` holds the file against what is made here.
- What a line says is the docstring's, its default and its values the code's.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import typing
from dataclasses import fields
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_lazy_grammar.adapter import request
from vllm_lazy_grammar.core.counts import TOOLS
from vllm_lazy_grammar.core.request_args import LazyGrammar
from vllm_lazy_grammar.core.triggers import KEYS, TriggerSpec
from vllm_lazy_grammar.settings import Settings

if TYPE_CHECKING:
    from types import ModuleType

PAGE = Path(__file__).resolve().parents[2] / "docs/settings.md"

_MORE = {
    "tool-calls.md": ("force_after", "max_tool_calls", "mask_opener_on_none", "unknown_tool_parser", "presets_dir"),
    "engines.md": ("engine", "undeclared_properties", "relax"),
    "endings.md": ("budget",),
    "drafts.md": ("drafts",),
    "tracing.md": ("trace_dir", "grammar_trace"),
    "metrics.md": ("metrics", "grammar_counted_as"),
    "triggers.md": ("grammar_triggers", "grammar_on_reject"),
}
"""Pages that say more of a setting or an option."""

_WRITTEN = {
    request.MARKERS: "a list of texts",
    request.CONTEXT: "a text",
    request.TRACE: "`0`, `1`",
    request.COUNTED: f"none, {', '.join(f'`{kind}`' for kind in TOOLS)}",
}
"""Values of the options that are not read by `TriggerSpec`."""

_TEXT = """# Settings

This page is written by `scripts/docs` from the code; change the docstrings there.

## Of the server

Under `--additional-config '{{"lazy_grammar": {{...}}}}'`, or one by one as `--additional-config.lazy_grammar.prewarm_top_k 64`. The defaults need no thought. A wrong key or value
stops the server at start, by name. `vllm-lazy-grammar doctor --additional-config '...'` shows those in force.

| setting | default | values | what |
| --- | --- | --- | --- |
{settings}

vLLM's own `--structured-outputs-config.disable_any_whitespace true` (compact JSON), `enable_in_reasoning` and `reasoning_parser` keep their meaning.

## Of a request

### What holds: `structured_outputs`

One of these, as in vLLM; `response_format` and `tools` say it too.

| field | what |
| --- | --- |
{kinds}

### Request options

In `vllm_xargs`; offline in `SamplingParams.extra_args`. `LazyGrammar` writes them, with names that lack the `grammar_`. An unknown name and a wrong value are a status 400 that
names both.

| option | values, default first | what |
| --- | --- | --- |
{options}
"""


def page() -> str:
    """The page's whole text."""
    return _TEXT.format(settings=_settings(), kinds=_kinds(), options=_options())


def described(documented: type) -> dict[str, str]:
    """What a class's docstring says of each of its arguments, in order."""
    _, _, rest = (inspect.getdoc(documented) or "").partition("Args:\n")
    section = re.split(r"^\S", rest, maxsplit=1, flags=re.MULTILINE)[0]
    parts = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def constants(module: ModuleType) -> dict[str, str]:
    """What stands under each constant of a module, by the constant's value."""
    body = ast.parse(inspect.getsource(module)).body
    return {
        str(getattr(module, target.id)): text
        for assigned, below in pairwise(body)
        if isinstance(assigned, ast.Assign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        for target, text in [(assigned.targets[0], below.value.value)]
        if isinstance(target, ast.Name) and isinstance(text, str)
    }


def _settings() -> str:
    says = described(Settings)
    return "\n".join(
        _row(
            f"`{each.name}`", _default(each.default), _values(each.metadata["help"]), _more(each.name, says[each.name])
        )
        for each in fields(Settings)
    )


def _kinds() -> str:
    says = described(LazyGrammar)
    kinds = takewhile(lambda name: name != "triggers", (each.name for each in fields(LazyGrammar)))
    return "\n".join(_row(f"`{kind}`", _plain(says[kind])) for kind in kinds)


def _options() -> str:
    says, hints = described(LazyGrammar), typing.get_type_hints(TriggerSpec)
    rows = [
        _row(f"`{key}`", _of_type(hints[each.name]), _more(key, says[each.name]))
        for key, each in zip(KEYS, fields(TriggerSpec), strict=True)
    ]
    below = constants(request)
    return "\n".join([*rows, *(_row(f"`{key}`", values, _more(key, below[key])) for key, values in _WRITTEN.items())])


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(value: object) -> str:
    return "none" if value == "" else f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _values(text: str) -> str:
    """Words as code, anything else as it is."""
    words = text.removeprefix("one of ")
    return text if words == text else ", ".join(f"`{word}`" for word in words.split(", "))


def _of_type(hint: Any) -> str:
    if hint is bool:
        return "`0`, `1`"
    if words := [word for word in typing.get_args(hint) if isinstance(word, str)]:
        return ", ".join(f"`{word}`" for word in words)
    return "none, a whole number" if int in typing.get_args(hint) else "a list of triggers"


def _more(name: str, text: str) -> str:
    where = next((page for page, names in _MORE.items() if name in names), None)
    return _plain(text) if where is None else f"{_plain(text)} [More]({where})"


def _plain(text: str) -> str:
    """A docstring's text as one sentence of a page."""
    line = " ".join(text.split()).replace("``", "`").removeprefix("In `vllm_xargs`: ").rstrip(".")
    return f"{line[0].upper()}{line[1:]}." if line[0].isalpha() else f"{line}."


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(f"written: {PAGE}")
