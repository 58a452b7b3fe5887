"""vLLM's parsers of answers, made to ask for lazy tool calls; how an answer is parsed stays theirs.

Invariants:
- A server whose backend is not ours, or that has no tool parser, gets the very class that vLLM chose.
- A parser without a preset is refused when the server starts, or left as it is with one warning, as the operator set it.
- The calls that come back are found by the family's own parser, whatever ``tool_choice`` says.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_lazy_grammar.adapter.client_errors import as_client_errors
from vllm_lazy_grammar.adapter.frontend import front_end_of_name
from vllm_lazy_grammar.adapter.log import logger
from vllm_lazy_grammar.adapter.tool_calls import ToolCalls, is_written, write
from vllm_lazy_grammar.errors import SettingsError
from vllm_lazy_grammar.tools.presets import catalogue
from vllm_lazy_grammar.tools.schemas import inlined

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.parser.abstract_parser import Parser
    from vllm.parser.abstract_parser import Parser as _Base

    from vllm_lazy_grammar.adapter.frontend import FrontEnd
    from vllm_lazy_grammar.tools.presets import Catalogue, Preset
else:
    _Base = object

HARMONY = "openai"
"""The parser of gpt-oss, which vLLM takes whatever the command line says."""

_ALLOWED = "allowed_tools"


class ServesTools(_Base):
    """What is added to a parser class of vLLM's, in front of it."""

    lazy_calls: ToolCalls
    always_adjust_request = True
    _stock_adjusts_always = False
    _ours = False

    def __init__(self, tokenizer: Any, tools: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, resolved(tools), *args, **kwargs)
        tool_parser = getattr(self, "_tool_parser", None)
        if tool_parser is not None:  # the family's own format, so its own parser reads it
            tool_parser.supports_required_and_named = False
        self._known: tuple[Any, Any] | None = None

    def adjust_request(self, request: Any) -> Any:
        """Write the grammar of the calls into the request, in place: what is returned here is dropped by vLLM."""
        if is_written(request):
            return request
        with as_client_errors():
            made = self.lazy_calls.made(request)
        self._ours = made is not None
        if made is not None:
            write(request, made)  # parsers that find a structural tag make no grammar of their own
        if self._stock_would_adjust(request):
            request = super().adjust_request(request)
        if made is not None:
            write(request, made)  # and whatever one made all the same is ours to replace
        return request

    def _stock_would_adjust(self, request: Any) -> bool:
        cls = type(self)
        always = self._stock_adjusts_always or _is_mistral(self) or cls.reasoning_parser_cls is not None
        return always or request.tool_choice != "none"

    def _apply_structural_tag(self, request: Any) -> Any:
        """VLLM's own constraint on calls, where ours does not stand in its place."""
        return request if self._ours else super()._apply_structural_tag(request)

    def parse(self, model_output: str, request: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, which is told what it knows: it looks for no calls under ``allowed_tools``, and follows no reference in a schema."""
        return super().parse(model_output, self._as_known(request), *args, **kwargs)

    def parse_delta(self, delta_text: str, delta_token_ids: list[int], request: Any, *args: Any, **kwargs: Any) -> Any:
        """The same, for a streamed answer."""
        return super().parse_delta(delta_text, delta_token_ids, self._as_known(request), *args, **kwargs)

    def _as_known(self, request: Any) -> Any:
        if self._known is None or self._known[0] is not request:
            self._known = request, _known(request, forced_is_bare=is_written(request) and _is_mistral(self))
        return self._known[1]


def _is_mistral(parser: Any) -> bool:
    return getattr(type(parser).tool_parser_cls, "IS_MISTRAL_TOOL_PARSER", False)


def _known(request: Any, *, forced_is_bare: bool) -> Any:
    """The request as vLLM's parsers understand it; the same object where they do anyway.

    Args:
        request: the client's.
        forced_is_bare: the parser takes the first text of a forced call for the call itself, though it may be prose here.
    """
    tools = resolved(request.tools)
    changes = {} if tools is request.tools else {"tools": tools}
    if getattr(request.tool_choice, "type", None) == _ALLOWED:
        changes["tool_choice"] = request.tool_choice.mode
    if forced_is_bare and request.tool_choice != "none":
        changes["tool_choice"] = "auto"
    return request.model_copy(update=changes) if changes else request


def getting_parser(current: Callable[..., Any]) -> Callable[..., Any]:
    """``ParserManager.get_parser`` whose classes ask for lazy calls, where the model is served by our backend."""
    signature = inspect.signature(current)

    @functools.wraps(current)
    def get_parser(cls: Any, *args: Any, **kwargs: Any) -> Any:
        parser = current(cls, *args, **kwargs)
        given = signature.bind(cls, *args, **kwargs)
        given.apply_defaults()
        front_end = front_end_of_name(given.arguments["model_name"])
        if parser is None or front_end is None:
            return parser
        harmony = given.arguments["is_harmony"]
        name = HARMONY if harmony else given.arguments["tool_parser_name"]
        if not harmony and parser.tool_parser_cls is None:
            return parser
        return with_calls(parser, name, front_end, given.arguments["tokenizer"])

    return get_parser


def with_calls(parser: type[Parser], name: str, front_end: FrontEnd, tokenizer: Any) -> type[Parser]:
    """The parser class that asks for lazy calls; the same class where there is no tokenizer, or no preset and the operator lets it be.

    Raises:
        SettingsError: no preset serves `name`, or a preset file can not be used.
    """
    if tokenizer is None:
        return parser
    vocabulary = front_end.vocabulary(tokenizer)
    preset = _preset(name, front_end, lambda text: vocabulary.token_of(text) is not None)
    if preset is None:
        return parser
    calls = ToolCalls(preset, front_end, vocabulary)
    own = {"lazy_calls": calls, "_stock_adjusts_always": parser.always_adjust_request}
    return type(f"Lazy{parser.__name__.lstrip('_')}", (ServesTools, parser), own)


def resolved(tools: Any) -> Any:
    """Tools whose parameters need no reference looked up: parsers that turn texts into values read the types there, and follow none."""
    found = [_resolved(tool) for tool in tools or ()]
    return tools if all(new is old for new, old in zip(found, tools or (), strict=True)) else found


def _resolved(tool: Any) -> Any:
    function = getattr(tool, "function", tool)
    parameters = getattr(function, "parameters", None)
    if not parameters or "$ref" not in str(parameters):
        return tool
    read = function.model_copy(update={"parameters": inlined(parameters, parameters)})
    return read if function is tool else tool.model_copy(update={"function": read})


def _preset(name: str, front_end: FrontEnd, is_token: Callable[[str], bool]) -> Preset | None:
    settings = front_end.settings
    known = families(settings.presets_dir)
    try:
        return known.for_parser(name, is_token)
    except SettingsError as error:
        if settings.unknown_tool_parser == "refuse":
            reason = f"{error.reason}; or set lazy_grammar.unknown_tool_parser to leave, and its calls are vLLM's own"
            raise SettingsError("--tool-call-parser", name, reason) from error
        front_end.once(("left", name), functools.partial(_warn_left, name, error.reason))
        return None


def _warn_left(name: str, reason: str) -> None:
    logger.warning("Tool calls are left as vLLM has them: --tool-call-parser %s: %s", name, reason)


@functools.cache
def families(folder: str) -> Catalogue:
    """The package's families, and those of a folder of the operator's. SettingsError where a file can not be used."""
    found = catalogue()
    if not folder:
        return found
    files = sorted(Path(folder).glob("*.toml"))
    if not files:
        raise SettingsError("additional_config.lazy_grammar.presets_dir", folder, "there is no preset file (*.toml)")
    for path in files:
        found = found.with_file(path)
    return found
