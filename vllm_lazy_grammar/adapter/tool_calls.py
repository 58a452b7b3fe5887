"""Requests with tools, at the front end: what a family's preset makes of them is written into the request.

Invariants:
- A request that can not be served is refused before anything of it is changed; one without tools is never changed.
- Whatever is written could have been sent by a client: a structured output and options in ``vllm_xargs``.
- A tool's parameters are tried once per family and schema, however many requests have it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.parser.abstract_parser import structured_outputs_to_format
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers.utils import get_function_tools

from vllm_lazy_grammar.adapter.refusals import options_of_ours
from vllm_lazy_grammar.adapter.request import CONTEXT, COUNTED, MARKERS, TRACE
from vllm_lazy_grammar.engines import xgrammar
from vllm_lazy_grammar.errors import RequestError
from vllm_lazy_grammar.tools import choice
from vllm_lazy_grammar.tools.choice import CallSettings, Tool, Wanted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_lazy_grammar.adapter.frontend import FrontEnd
    from vllm_lazy_grammar.core.matcher import GrammarKey
    from vllm_lazy_grammar.core.triggers import TriggerSpec
    from vllm_lazy_grammar.core.vocabulary import Vocabulary
    from vllm_lazy_grammar.settings import Settings
    from vllm_lazy_grammar.tools.presets import Preset

_MB = 1 << 20
_BUDGETS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class WrittenHere(StructuredOutputsParams):
    """A structured output that was written here, so that a request which is rendered again is left alone. A class, since vLLM copies by fields."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says about tools.

    Args:
        tools: those that the model is shown.
        wanted: its ``tool_choice``.
        parallel: its ``parallel_tool_calls``.
        format: the structural tag of its ``response_format``, as JSON text, where calls are free to come; empty where there is none.
    """

    tools: tuple[Tool, ...]
    wanted: Wanted
    parallel: bool
    format: str = ""

    @property
    def nbytes(self) -> int:
        """About what it holds."""
        return sum(len(tool.name) + len(tool.parameters) for tool in self.tools) + len(self.format)


@dataclass(frozen=True, slots=True)
class Made:
    """What is written into a request.

    Args:
        key: the grammar.
        spec: when it begins; None: at once, in place of the answer.
        extra: further options.
    """

    key: GrammarKey
    spec: TriggerSpec | None
    extra: Mapping[str, Any]


_kept: ContextVar[tuple[Any, Made | None] | None] = ContextVar("lazy_grammar_tools", default=None)


class ToolCalls:
    """What a server does for requests with tools. Thread-safe by one lock.

    Args:
        preset: the family's.
        front_end: remembers what was judged.
        vocabulary: tells which texts are tokens.
    """

    def __init__(self, preset: Preset, front_end: FrontEnd, vocabulary: Vocabulary) -> None:
        self.preset = preset
        self._front_end = front_end
        self._vocabulary = vocabulary
        self._settings = _call_settings(front_end.settings)
        self._made: OrderedDict[Asked, Made | None] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def made(self, request: Any) -> Made | None:
        """What to write into a request; None where nothing is: it has no tools, or is vLLM's business. May take long where tools are new.

        Raises:
            RequestError: a tool or a choice that can not be served; names it.
        """
        kept = _kept.get()
        if kept is not None and kept[0] is request:
            return kept[1]
        asked = self._read(request)
        if asked is None:
            return None
        made = self._remembered(asked)
        if made is None:
            return None
        self._front_end.vouch(made.key)
        return replace(made, spec=_within_budget(made.spec, request))

    def keep(self, request: Any, made: Made | None) -> None:
        """Note what another thread made of a request, for the task that goes on with it."""
        _kept.set((request, made))

    def _read(self, request: Any) -> Asked | None:
        """None where nothing of ours is to be written."""
        if not request.tools or is_written(request):
            return None
        tools = choice.read_tools(_function(tool) for tool in get_function_tools(request.tools))
        wanted = choice.read_choice(_plain_choice(request.tool_choice), tools)
        options = {name: value for name, value in options_of_ours(request.vllm_xargs).items() if name != TRACE}
        structured = request.extract_structured_outputs()
        if wanted.mode == "none" and (options or structured is not None):
            return None
        for name, value in options.items():
            raise RequestError(
                f"vllm_xargs.{name}", value, "calls of tools have triggers of their own: set tool_choice to none"
            )
        parallel = request.parallel_tool_calls is not False
        if wanted.mode != "auto" or structured is None:
            return Asked(tools, wanted, parallel)
        beside = None if self.preset.trigger.context else structured_outputs_to_format(structured)
        return None if beside is None else Asked(tools, wanted, parallel, _as_text(beside))

    def _remembered(self, asked: Asked) -> Made | None:
        with self._lock:
            if asked in self._made:
                self._made.move_to_end(asked)
                return self._made[asked]
        made = self._make(asked)
        with self._lock:
            if asked not in self._made:
                self._made[asked] = made
                self._held += _size(asked, made)
            while self._held > self._front_end.settings.tool_cache_mb * _MB and len(self._made) > 1:
                self._held -= _size(*self._made.popitem(last=False))
        return made

    def _make(self, asked: Asked) -> Made | None:
        preset, wanted = self.preset, asked.wanted
        if wanted.mode != "none":
            for tool in choice.callable_tools(asked.tools, wanted):
                self._front_end.once(("tool", preset, tool), partial(self._try, tool))
        chosen = choice.choose(
            asked.tools, wanted, preset, is_token=self._is_token, parallel=asked.parallel, settings=self._settings
        )
        if chosen is None:
            return None
        extra: dict[str, Any] = {COUNTED: f"tools_{'or_format' if asked.format else wanted.mode}"}
        extra |= {MARKERS: list(chosen.markers)} if chosen.markers else {}
        if not asked.format:
            context = {CONTEXT: chosen.context} if chosen.context else {}
            return Made(chosen.grammar, chosen.triggers, {**extra, **context})
        calls = self._settings.max_calls if asked.parallel else 1
        return Made(choice.beside(asked.format, chosen.grammar, calls), None, extra)

    def _try(self, tool: Tool) -> None:
        """RequestError that names the tool where its parameters can not be compiled."""
        alone = choice.choose((tool,), Wanted(), self.preset, is_token=self._is_token, settings=self._settings)
        assert alone is not None  # noqa: S101 -- there is a tool, and auto lets it be called
        try:
            xgrammar.check(alone.grammar)
        except RequestError as error:
            reason = f"the parameters of tool {tool.name!r} can not be served: {error.reason}"
            raise RequestError("tools", tool.name, reason) from error

    def _is_token(self, text: str) -> bool:
        return self._vocabulary.token_of(text) is not None


def is_written(request: Any) -> bool:
    """Whether this was done to the request before: some requests are rendered twice."""
    return isinstance(request.structured_outputs, WrittenHere)


def write(request: Any, made: Made) -> None:
    """Put it into the request, in place, where vLLM's own constraints on the answer would stand."""
    request.structured_outputs = WrittenHere(**{made.key.kind: made.key.source})
    if hasattr(request, "response_format"):
        request.response_format = None
    else:
        request.text = None
    if getattr(request, "_grammar_from_parser", False):
        request._grammar_from_parser = False  # noqa: SLF001 -- a grammar of vLLM's parser that ours replaces
    options = {} if made.spec is None else made.spec.as_xargs()
    request.vllm_xargs = {**(request.vllm_xargs or {}), **options, **made.extra}


def _call_settings(settings: Settings) -> CallSettings:
    return CallSettings(
        max_calls=settings.max_tool_calls,
        force_after=settings.force_after,
        any_whitespace=settings.tool_argument_spelling == "any",
        guard_none=settings.mask_opener_on_none,
    )


def _function(tool: Any) -> dict[str, Any]:
    function = getattr(tool, "function", tool)
    return {"name": function.name, "parameters": function.parameters}


def _plain_choice(value: Any) -> Any:
    """As plain values; a custom tool is a function to the model, and so it is here."""
    plain = value.model_dump() if hasattr(value, "model_dump") else value
    return {**plain, "type": "function"} if isinstance(plain, dict) and plain.get("type") == "custom" else plain


def _as_text(beside: Any) -> str:
    found: str = beside.model_dump_json(exclude_none=True)
    return found


def _within_budget(spec: TriggerSpec | None, request: Any) -> TriggerSpec | None:
    limits = (vars(request).get(name) for name in _BUDGETS)  # read as fields: one is deprecated, and says so each time
    budget = next((limit for limit in limits if limit is not None), None)
    if spec is None or spec.force_after is None or budget is None:
        return spec
    return replace(spec, force_after=min(spec.force_after, budget // 2))


def _size(asked: Asked, made: Made | None) -> int:
    return asked.nbytes + (0 if made is None else len(made.key.source))
