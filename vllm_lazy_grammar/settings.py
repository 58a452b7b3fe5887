"""The one reader of ``additional_config``: an operator's settings, checked, with defaults that need no thought.

They stand under the key ``lazy_grammar`` of vLLM's ``--additional-config``:
``--additional-config '{"lazy_grammar": {"prewarm_top_k": 64}}'``, or ``--additional-config.lazy_grammar.prewarm_top_k 64``.

Invariants:
- Settings are immutable, and equal for equal configurations in every process.
- An unknown key and a value of the wrong type or range are a SettingsError that names field and value; nothing is ignored or rounded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from vllm_lazy_grammar.errors import SettingsError

KEY = "lazy_grammar"
_FIELD = f"additional_config.{KEY}"


def _setting(default: float, least: float, help_text: str, most: float = sys.float_info.max) -> Any:
    return field(default=default, metadata={"least": least, "most": most, "help": help_text})


def _word(default: str, *others: str) -> Any:
    words = (default, *others)
    return field(default=default, metadata={"words": words, "help": f"one of {', '.join(words)}"})


def _folder() -> Any:
    return field(default="", metadata={"help": "the path of a folder, as text"})


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator can set.

    Args:
        prewarm: compute a grammar's first rows before they are needed.
        prewarm_top_k: rows to prewarm per grammar, at most.
        whitespace_bound: characters of whitespace between two JSON elements, at most; 0 forbids any.
        grammar_cache_mb: compiled grammars that no request holds are kept up to this size, in MB.
        row_cache_mb: mask rows shared between requests are kept up to this size, in MB.
        trigger_timeout_ms: how long the trigger patterns may take for one token; past it the request ends with an error.
        frontend_check_ms: how long the check "can this grammar take this trigger's text" may take; past it the check is skipped.
        threads: worker threads that compile and prewarm; more than cores, so that a few slow grammars do not hold up all others; 0 does the same work inline.
        force_after: with ``tool_choice`` required or a named function: tokens of prose before the call is led into, at most; half of ``max_tokens``
            where that is less. 0 asks for the call at once.
        budget: lead every answer to a valid end within ``max_tokens``; false leaves its end to vLLM (``length``, cut anywhere).
        max_tool_calls: calls that one answer may hold; ``parallel_tool_calls: false`` allows one.
        mask_opener_on_none: with ``tool_choice: none``, mask what would open a call.
        tool_argument_spelling: ``trained``: arguments are written with the blanks that the model's family was trained on; ``any``: with any.
        unknown_tool_parser: a ``--tool-call-parser`` without a preset: ``refuse`` the start, or ``leave`` it as vLLM has it, with one warning.
        presets_dir: a folder of preset files (``*.toml``) of your own, which come before the package's.
        drafts: with speculative decoding, what the grammar knows of the text to come is drafted behind the proposer's drafts.
        dispatch: compile each tool of a set alone, and choose between them by how a call opens; false compiles a set in one piece.
        tool_cache_mb: grammars' sources made from tools are kept up to this size, in MB.
        engine: what compiles grammars. ``auto``: xgrammar, or what can express the grammar where xgrammar can not; else the named one for all
            grammars (tool calls and structural tags stay with xgrammar). ``glrmask`` is an extra of this package.
        undeclared_properties: properties and items that a schema does not declare: ``refuse``, as vLLM does, or ``allow``, as JSON Schema says.
        relax: what no engine can express of a schema is dropped, with a warning that names it, instead of refused.
        trace_dir: a folder to which the stories of traced requests are written, one file each; none where it is empty.
        trace_rate: share of all requests that are traced unasked, 0 to 1; a request asks with ``grammar_trace``.
        trace_files: files kept in `trace_dir`, at most; the oldest go first.
        trace_mb: their size together, at most, in MB.
        trace_prompt: tell the prompt's text too.
        metrics: count requests, triggers, compiles, masks, caches and drafts on vLLM's ``/metrics``.
    """

    prewarm: bool = _setting(True, 0, "true or false")  # noqa: FBT003  (a default, named by its field)
    prewarm_top_k: int = _setting(512, 0, "a whole number, 0 or more")
    whitespace_bound: int = _setting(20, 0, "a whole number of characters, 0 or more")
    grammar_cache_mb: int = _setting(512, 1, "a whole number of MB, 1 or more")
    row_cache_mb: int = _setting(256, 1, "a whole number of MB, 1 or more")
    trigger_timeout_ms: float = _setting(5.0, 0.1, "a number of milliseconds, 0.1 or more")
    frontend_check_ms: float = _setting(20.0, 0, "a number of milliseconds, 0 or more")
    threads: int = _setting(8, 0, "a whole number of threads, 0 or more")
    force_after: int = _setting(128, 0, "a whole number of tokens, 0 or more")
    budget: bool = _setting(True, 0, "true or false")  # noqa: FBT003  (a default, named by its field)
    max_tool_calls: int = _setting(16, 1, "a whole number of calls, 1 or more")
    mask_opener_on_none: bool = _setting(True, 0, "true or false")  # noqa: FBT003  (a default, named by its field)
    tool_argument_spelling: str = _word("trained", "any")
    unknown_tool_parser: str = _word("refuse", "leave")
    presets_dir: str = _folder()
    drafts: bool = _setting(True, 0, "true or false")  # noqa: FBT003  (a default, named by its field)
    dispatch: bool = _setting(True, 0, "true or false")  # noqa: FBT003  (a default, named by its field)
    tool_cache_mb: int = _setting(16, 1, "a whole number of MB, 1 or more")
    engine: str = _word("auto", "xgrammar", "llguidance", "glrmask")
    undeclared_properties: str = _word("refuse", "allow")
    relax: bool = _setting(False, 0, "true or false")  # noqa: FBT003  (a default, named by its field)
    trace_dir: str = _folder()
    trace_rate: float = _setting(0.0, 0, "a number, 0 to 1", most=1)
    trace_files: int = _setting(1000, 1, "a whole number of files, 1 or more")
    trace_mb: int = _setting(100, 1, "a whole number of MB, 1 or more")
    trace_prompt: bool = _setting(False, 0, "true or false")  # noqa: FBT003  (a default, named by its field)
    metrics: bool = _setting(True, 0, "true or false")  # noqa: FBT003  (a default, named by its field)

    def __post_init__(self) -> None:
        if self.trace_rate and not self.trace_dir:
            raise SettingsError(f"{_FIELD}.trace_rate", self.trace_rate, "this needs trace_dir, the folder to write to")

    @classmethod
    def from_additional_config(cls, config: object) -> Self:
        """Read them from vLLM's ``additional_config``: a mapping, or something else that holds none of ours. SettingsError as above."""
        given = config.get(KEY, {}) if isinstance(config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise SettingsError(_FIELD, given, "must be a JSON object of settings")
        kinds = {f.name: (type(f.default), f.metadata) for f in fields(cls)}
        for name in given:
            if name not in kinds:
                raise SettingsError(
                    f"{_FIELD}.{name}", given[name], f"there is no such setting; there are {', '.join(kinds)}"
                )
        return cls(**{name: _checked(name, value, *kinds[name]) for name, value in given.items()})

    def describe(self) -> str:
        """One line for the log: each setting and its value."""
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))


def _checked(name: str, value: object, kind: type, metadata: Mapping[str, Any]) -> Any:
    """The value in its setting's type; a whole number will do for a float, true and false are no numbers."""
    if kind is str:
        return _checked_text(name, value, metadata)
    fits = isinstance(value, bool) if kind is bool else isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not fits or not metadata["least"] <= value <= metadata["most"]:
        raise SettingsError(f"{_FIELD}.{name}", value, f"must be {metadata['help']}")
    return kind(value)


def _checked_text(name: str, value: object, metadata: Mapping[str, Any]) -> str:
    if not isinstance(value, str) or value not in metadata.get("words", (value,)):
        raise SettingsError(f"{_FIELD}.{name}", value, f"must be {metadata['help']}")
    return value
