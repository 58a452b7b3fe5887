"""What was typed, as a question to a session: the grammar, the triggers, and the tokens of the answer.

Invariants:
- Options mean what they mean in a request, and are read by the same code.
- What can not be served is an error that names the option; nothing typed is ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_lazy_grammar.cli.workbench import Question
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.triggers import TriggerSpec
from vllm_lazy_grammar.errors import RequestError, SettingsError
from vllm_lazy_grammar.tools.choice import choose, read_choice, read_tools
from vllm_lazy_grammar.tools.presets import Preset, catalogue, read_preset

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_lazy_grammar.cli.workbench import Model
    from vllm_lazy_grammar.core.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Grammars:
    """The options that name a grammar; exactly one is given."""

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    structural_tag: str | None = None
    preset: str | None = None

    def given(self) -> list[str]:
        """The names of those that are."""
        return [name for name in self.__slots__ if getattr(self, name)]

    def key(self, *, compact: bool) -> GrammarKey:
        """The grammar, where it is no preset's."""
        if self.json:
            return GrammarKey("json", json.dumps(read_json("--json", self.json)), compact)
        if self.json_object:
            return GrammarKey("json_object", "", compact)
        if self.regex:
            return GrammarKey("regex", self.regex)
        if self.choice:
            return GrammarKey("choice", json.dumps(self.choice))
        if self.structural_tag:
            return GrammarKey("structural_tag", json.dumps(read_json("--structural-tag", self.structural_tag)))
        return GrammarKey("grammar", text_or_file(self.grammar or ""))


@dataclass(frozen=True, slots=True)
class Calls:
    """The options that go with a preset."""

    tools: str | None
    tool_choice: str
    parallel: bool = True


def question(  # noqa: PLR0913 -- all that can be typed meets here once
    grammars: Grammars, calls: Calls, xargs: Mapping[str, Any], model: Model, *, compact: bool, context: str
) -> Question:
    """What is asked of a session.

    Args:
        grammars: which grammar.
        calls: which tools, with a preset.
        xargs: triggers and options as in ``vllm_xargs``; those that were not given are None or false.
        model: tells its tokens.
        compact: no whitespace between JSON elements.
        context: the end of the prompt, as far as patterns shall see it.
    """
    given = grammars.given()
    if len(given) != 1:
        raise RequestError("grammar", given, "give exactly one of --json, --regex, --choice, ... or --preset")
    asked = {name: value for name, value in xargs.items() if value not in (None, False, [])}
    if grammars.preset is not None:
        return _calling(grammars.preset, calls, asked, model, context)
    if calls.tools is not None:
        raise RequestError("--tools", calls.tools, "this needs --preset: tools are written in some family's format")
    spec = TriggerSpec.parse(asked)
    return Question(grammars.key(compact=compact), spec, model.stop_ids, context=context.encode())


def _calling(name: str, calls: Calls, asked: Mapping[str, Any], model: Model, context: str) -> Question:
    for option, value in asked.items():
        raise RequestError(option, value, "calls of tools have triggers of their own: leave this out with --preset")
    if calls.tools is None:
        raise RequestError("--tools", None, "--preset needs the tools that may be called")
    tools = read_json("--tools", calls.tools)
    known = model.vocabulary
    return called(preset_of(name, known), tools, _choice(calls.tool_choice), known, model.stop_ids, calls, context)


def called(  # noqa: PLR0913, PLR0917 -- what a call depends on
    preset: Preset,
    tools: Any,
    tool_choice: Any,
    vocabulary: Vocabulary,
    stop_ids: frozenset[int],
    calls: Calls = Calls(None, "auto"),
    context: str = "",
) -> Question:
    """The question that a request with tools asks."""
    if not isinstance(tools, list):
        raise RequestError("tools", tools, "this is a list of tools, as in a request")
    read = read_tools(tools)
    chosen = choose(
        read,
        read_choice(tool_choice, read),
        preset,
        is_token=lambda text: vocabulary.token_of(text) is not None,
        parallel=calls.parallel,
    )
    if chosen is None:
        raise RequestError("tools", tools, "there is no tool to call")
    return Question(chosen.grammar, chosen.triggers, stop_ids, chosen.markers, context.encode())


def preset_of(name: str, vocabulary: Vocabulary) -> Preset:
    """A preset by its family's name, by a parser's, or from a file of yours."""
    known = catalogue()
    if name in known.families:
        return known.families[name]
    if name.endswith(".toml"):
        return preset_in(Path(name))
    return known.for_parser(name, lambda text: vocabulary.token_of(text) is not None)


def preset_in(path: Path) -> Preset:
    """The preset in a file. SettingsError where it can not be used."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(str(path), str(path), f"this preset can not be read: {error}") from error
    preset = read_preset(str(path), text)
    return catalogue().with_file(path).families[preset.family]


def _choice(value: str) -> Any:
    return read_json("--tool-choice", value) if value.lstrip().startswith("{") else value


def read_json(option: str, value: str) -> Any:
    """JSON that was typed, or that stands in a file of this name."""
    typed = value.lstrip().startswith(("{", "[", "true", "false"))
    text = value if typed else _file(option, value)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(option, value, f"this is no JSON: {error}") from error


def text_or_file(value: str) -> str:
    """A text that was typed, or that stands in a file of this name."""
    if "\n" not in value and Path(value).is_file():
        return _file("--grammar", value)
    return value


def _file(option: str, name: str) -> str:
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise RequestError(option, name, f"this is neither typed JSON nor a file that can be read: {error}") from error


def read_answer(text: str | None, file: Path | None, ids: str | None, encode: Callable[[str], list[int]]) -> list[int]:
    """The answer's tokens: of a text, of a file's text, or recorded ids."""
    if sum(given is not None for given in (text, file, ids)) != 1:
        raise RequestError("TEXT", text, "give the answer once: as TEXT, --file or --ids")
    if ids is not None:
        return _ids(ids)
    return encode(_file("--file", str(file)) if file is not None else text or "")


def _ids(value: str) -> list[int]:
    text = _file("--ids", value) if Path(value).is_file() else value
    words: Sequence[str] = text.replace("[", " ").replace("]", " ").replace(",", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise RequestError("--ids", value, f"these are token ids, or a file of them: {error}") from error
