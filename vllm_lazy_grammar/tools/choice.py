"""A request's tools and `tool_choice`, in a family's format: when a call begins, and a grammar in which every call obeys its tool's schema.

Invariants:
- Every call that the grammar takes has the name of a tool that may be called, and arguments that obey this tool's schema.
- A tool that can not be served is a RequestError that names it; equal requests give equal results, so that a grammar is compiled once.
- Nothing here knows a serving engine: tools are plain JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import regex

from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.triggers import Trigger, TriggerSpec
from vllm_lazy_grammar.errors import RequestError
from vllm_lazy_grammar.tools import formats
from vllm_lazy_grammar.tools.arguments import arguments, escaped, fill
from vllm_lazy_grammar.tools.schemas import Unwritable

if TYPE_CHECKING:
    from vllm_lazy_grammar.tools.formats import Format
    from vllm_lazy_grammar.tools.presets import Preset

Mode = Literal["auto", "required", "named", "none"]

MAX_TOOLS = 1024
MAX_CALLS = 16
FORCE_AFTER = 128

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_UNQUOTED = "(?<![`\"'])"
_PATTERN_SIZE = 1500
_NOTHING = GrammarKey("grammar", r'root ::= "\x00"')
"""A grammar that takes no opener."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called.

    Args:
        name: as the request has it.
        parameters: the JSON schema of its arguments, an object; as JSON text, so that tools are values.
    """

    name: str
    parameters: str

    @property
    def schema(self) -> dict[str, Any]:
        """The parameters, read."""
        found: dict[str, Any] = json.loads(self.parameters)
        return found


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `tool_choice` says.

    Args:
        mode: whether a call may, must or must not come; ``named``: of the one tool in `names`.
        names: the tools that may be called; None: all.
    """

    mode: Mode = "auto"
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class CallSettings:
    """What an operator can set about calls.

    Args:
        max_calls: calls an answer may hold where the request allows several.
        force_after: tokens of prose before a call that must come; the adapter lowers it to half of the budget.
        any_whitespace: whether arguments may be written with whitespace of any kind, not only as the family was trained.
        guard_none: whether ``none`` masks what opens a call.
    """

    max_calls: int = MAX_CALLS
    force_after: int = FORCE_AFTER
    any_whitespace: bool = False
    guard_none: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """What the engine needs for a request with tools.

    Args:
        triggers: when a call begins, and the options of the gate.
        grammar: what a call is, from the trigger on, its end included.
        markers: texts of control tokens, as far as the tokenizer has them as tokens.
        context: the end-of-turn marker behind which the prompt is context; empty where none is needed.
    """

    triggers: TriggerSpec
    grammar: GrammarKey
    markers: tuple[str, ...]
    context: str = ""


def read_tools(tools: Iterable[Any], field: str = "tools") -> tuple[Tool, ...]:
    """The function tools of a request: ``{"type": "function", "function": {...}}``, or flat as in `/v1/responses`.

    Raises:
        RequestError: a tool without a name, two of one name, parameters that are no object's schema, or too many tools.
    """
    found: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        read = _read_tool(tool, f"{field}[{index}]")
        if read.name in found:
            raise RequestError(f"{field}[{index}]", read.name, f"two tools have the name {read.name!r}")
        found[read.name] = read
    if len(found) > MAX_TOOLS:
        raise RequestError(
            field,
            len(found),
            f"at most {MAX_TOOLS} tools are taken, the first one too many is {list(found)[MAX_TOOLS]!r}",
        )
    return tuple(found.values())


def _read_tool(tool: Any, field: str) -> Tool:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(field, tool, "a tool is a function with a name and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise RequestError(f"{field}.function.name", name, "a tool needs a name")
    parameters = function.get("parameters")
    where = f"{field}.function.parameters"
    if parameters is None or parameters == {}:
        parameters = _NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise RequestError(where, parameters, f"the parameters of tool {name!r} are no JSON schema")
    if parameters.get("type", "object") not in ("object", ["object"]):
        raise RequestError(where, parameters, f"the parameters of tool {name!r} must be the schema of an object")
    try:
        return Tool(name, json.dumps({"type": "object", **parameters}, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(where, name, f"the parameters of tool {name!r} are no JSON: {error}") from error


def read_choice(value: object, tools: Sequence[Tool], field: str = "tool_choice") -> Wanted:
    """What `tool_choice` asks for: a word, a named function, or `allowed_tools`, of either API's shape.

    Raises:
        RequestError: it is none of these, or names a tool that the request does not have.
    """
    if value is None or value in ("auto", "required", "none"):
        wanted = Wanted("auto" if value is None else value)
    elif not isinstance(value, Mapping):
        raise RequestError(field, value, "must be auto, required, none, a function or allowed_tools")
    elif value.get("type") == "allowed_tools":
        wanted = _read_allowed(value.get("allowed_tools", value), field)
    elif value.get("type") == "function":
        wanted = Wanted("named", (_name_of(value, field),))
    else:
        raise RequestError(field, value, "only functions and allowed_tools can be chosen here")
    known = {tool.name for tool in tools}
    for name in wanted.names or ():
        if name not in known:
            raise RequestError(field, name, f"the request has no tool of the name {name!r}")
    if wanted.mode in ("required", "named") and not (known if wanted.names is None else wanted.names):
        raise RequestError(field, value, "a call is required, but there is no tool to call")
    return wanted


def _read_allowed(allowed: Any, field: str) -> Wanted:
    mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required"):
        raise RequestError(field, allowed, "the mode of allowed_tools is auto or required")
    return Wanted(mode, tuple(_name_of(tool, field) for tool in allowed.get("tools", ())))


def _name_of(value: Any, field: str) -> str:
    function = value.get("function", value) if isinstance(value, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(field, value, "names no function")
    return name


def choose(  # noqa: PLR0913  (what a call depends on)
    tools: Sequence[Tool],
    wanted: Wanted,
    preset: Preset,
    *,
    is_token: Callable[[str], bool],
    parallel: bool = True,
    settings: CallSettings = CallSettings(),
) -> Choice | None:
    """What the engine needs for these tools; None where nothing is to be done: no tool may be called, and none be kept from it.

    Args:
        tools: of the request.
        wanted: its `tool_choice`.
        preset: the family.
        is_token: whether a text is exactly one token of the model.
        parallel: its `parallel_tool_calls`.
        settings: the operator's.

    Raises:
        RequestError: a tool that this family can not write; names the tool.
    """
    named = callable_tools(tools, wanted)
    if not named:
        return None
    if wanted.mode == "none":
        return _forbidden(tools, preset, is_token) if settings.guard_none else None
    calls = settings.max_calls if parallel else 1
    preset = _unguarded(preset, is_token)
    grammar = GrammarKey("structural_tag", formats.structural_tag(_block(named, preset, calls, settings)))
    spec = _triggers(named, wanted, preset, is_token, calls, settings)
    return Choice(spec, grammar, preset.markers, preset.trigger.context)


def _unguarded(preset: Preset, is_token: Callable[[str], bool]) -> Preset:
    """The preset without its guard of JSON strings where the call's marks are tokens: a control token is never taken in a string."""
    rules = preset.arguments
    if rules.style != "json" or not rules.until or not all(map(is_token, preset.markers)):
        return preset
    return replace(preset, arguments=replace(rules, until=()))


def callable_tools(tools: Sequence[Tool], wanted: Wanted) -> list[Tool]:
    """Those that may be called."""
    return [tool for tool in tools if wanted.names is None or tool.name in wanted.names]


def beside(other: str, calls: GrammarKey, most: int) -> GrammarKey:
    """The grammar of an answer that is either calls or something else, and no other prose.

    Args:
        other: a structural tag's node, as JSON text.
        calls: the structural tag of one block of calls.
        most: blocks that an answer may hold.
    """
    block = json.loads(calls.source)["format"]
    more = formats.repeat(formats.sequence([formats.texts(["\n", ""]), block]), 0, most - 1)
    answer = formats.either([formats.sequence([block, more]), json.loads(other)])
    return GrammarKey("structural_tag", formats.structural_tag(answer))


def _forbidden(tools: Sequence[Tool], preset: Preset, is_token: Callable[[str], bool]) -> Choice:
    written = [tool for tool in tools if _is_writable(tool, preset)]
    triggers = _openers(preset, is_token, mandatory=False) + _patterns(written, preset)
    return Choice(TriggerSpec(tuple(triggers)), _NOTHING, preset.markers, preset.trigger.context)


# -- triggers ---------------------------------------------------------------------------------------------------------


def _triggers(  # noqa: PLR0913, PLR0917  (what a call depends on)
    tools: Sequence[Tool],
    wanted: Wanted,
    preset: Preset,
    is_token: Callable[[str], bool],
    calls: int,
    settings: CallSettings,
) -> TriggerSpec:
    mandatory = wanted.mode in ("required", "named")
    triggers = _openers(preset, is_token, mandatory=mandatory) + _patterns(tools, preset)
    if mandatory:
        triggers += [Trigger("word", word) for word in _forced(tools, preset)]
    return TriggerSpec(
        tuple(triggers),
        mandatory=mandatory,
        force_after=None if not mandatory else 0 if preset.trigger.anchored else settings.force_after,
        rearm=True,
        max_activations=1 if preset.block.blocks == "one" else calls,
    )


def _openers(preset: Preset, is_token: Callable[[str], bool], *, mandatory: bool) -> list[Trigger]:
    """The token of each opener, and its text where it is not quoted. Where a call must come, a quoted one begins it as well."""
    found: list[Trigger] = []
    for opener in preset.trigger.openers:
        token = is_token(opener)
        if token:
            found.append(Trigger("token", opener))
        if preset.trigger.quoted or (mandatory and not token):
            found.append(Trigger("word", opener))
        else:
            found.append(Trigger("pattern", _UNQUOTED + regex.escape(opener)))
    return found


def _forced(tools: Sequence[Tool], preset: Preset) -> list[str]:
    found: list[str] = []
    for template in preset.trigger.force:
        names = [_spelled(tool, preset) for tool in tools] if "{name}" in template else [""]
        found += [template.replace("{name}", name) for name in names]
    return found[: MAX_TOOLS // 2]


def _patterns(tools: Sequence[Tool], preset: Preset) -> list[Trigger]:
    found: list[Trigger] = []
    for pattern in preset.trigger.patterns:
        if "{names}" not in pattern:
            found.append(Trigger("pattern", pattern))
            continue
        found += [Trigger("pattern", pattern.replace("{names}", names)) for names in _name_groups(tools, preset)]
    return found


def _name_groups(tools: Sequence[Tool], preset: Preset) -> list[str]:
    """All names as alternatives, in groups of bounded length; longer names first, since one may begin another."""
    groups: list[str] = []
    current: list[str] = []
    for name in sorted((regex.escape(_spelled(tool, preset)) for tool in tools), key=len, reverse=True):
        if current and sum(map(len, current)) + len(name) > _PATTERN_SIZE:
            groups.append(f"(?:{'|'.join(current)})")
            current = []
        current.append(name)
    return [*groups, f"(?:{'|'.join(current)})"]


# -- grammar ----------------------------------------------------------------------------------------------------------


def _block(tools: Sequence[Tool], preset: Preset, calls: int, settings: CallSettings) -> Format:
    rules = preset.block
    call = formats.either([_call(tool, preset, settings) for tool in tools])
    more = formats.EMPTY
    if rules.separator and calls > 1:
        more = formats.repeat(formats.sequence([formats.texts(rules.separator), call]), 0, calls - 1)
    return formats.sequence([formats.texts(rules.open), call, more, formats.texts(rules.close)])


def _call(tool: Tool, preset: Preset, settings: CallSettings) -> Format:
    schema = tool.schema
    places = {"name": formats.text(_spelled(tool, preset)), "index": formats.regex("[0-9]{1,3}")}
    try:
        written = arguments(preset.arguments, schema, any_whitespace=settings.any_whitespace)
    except Unwritable as error:
        raise RequestError(
            "tools", tool.name, f"the parameters of tool {tool.name!r} can not be served: {error}"
        ) from error
    if preset.call.empty and written == formats.EMPTY:
        return fill(preset.call.empty, places)
    options = [_formed(preset.call.forms, places, written)]
    if preset.call.empty and not schema.get("required"):
        options.append(fill(preset.call.empty, places))
    return formats.either(options)


def _is_writable(tool: Tool, preset: Preset) -> bool:
    return regex.fullmatch(preset.call.name_pattern, tool.name, regex.DOTALL) is not None


def _formed(forms: Sequence[str], places: Mapping[str, Format], written: Format) -> Format:
    """Any of the forms. Where they end alike the arguments are there once: they are what costs."""
    heads, tails = zip(*(form.split("{arguments}", 1) for form in forms), strict=True)
    if len(set(tails)) > 1:
        return formats.either([fill(form, {**places, "arguments": written}) for form in forms])
    return formats.sequence([formats.either([fill(head, places) for head in heads]), written, fill(tails[0], places)])


def _spelled(tool: Tool, preset: Preset) -> str:
    if not _is_writable(tool, preset):
        raise RequestError(
            "tools", tool.name, f"the name of tool {tool.name!r} can not be written in the format {preset.family!r}"
        )
    if preset.call.name == "json":
        return json.dumps(tool.name, ensure_ascii=False)[1:-1]
    if preset.call.name == "xml":
        return escaped(tool.name)
    return tool.name
