"""A lazy grammar as a Python user writes it, and what is sent for it.

Invariants:
- What is built here is what a client may write by hand; nothing else is sent.
- What the server would refuse without looking at its vocabulary is refused here, with the same error.
"""

from __future__ import annotations

import json as jsonlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from vllm_lazy_grammar.core.triggers import Trigger, TriggerSpec
from vllm_lazy_grammar.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, kw_only=True, slots=True)
class LazyGrammar:
    r"""A grammar that waits for a trigger; exactly one of the first six, and at least one trigger.

    Args:
        json: a JSON schema, as a dict or as text.
        json_object: any JSON object.
        regex: a regular expression.
        choice: one of these texts.
        grammar: EBNF or Lark text.
        structural_tag: a structural tag of xgrammar's, as a dict or as text.
        triggers: what starts the grammar: ``word:TEXT`` or ``pattern:REGEX``, searched in the text so far, over tokens; ``pattern_full:REGEX``, which
            takes the whole text so far; ``token:ID`` or ``token:TEXT``, an id and never its spelling; or `Trigger` objects.
        start: ``trigger`` feeds the grammar from the trigger on (a pattern: from its first group that matched), ``after`` begins it behind the trigger.
        mandatory: the turn may not end before a trigger fired; near the end of the budget only the way into a trigger is left.
        force_after: with `mandatory`: after so many tokens only what leads into a trigger is allowed.
        rearm: when the grammar is finished, free text is allowed again and the triggers wait anew.
        max_activations: with `rearm`, how often the grammar may be completed before only stopping is left.
        on_reject: a trigger appears and the grammar refuses what follows: ``forbid`` masks such tokens beforehand, ``disarm`` takes it for prose and
            keeps waiting, ``error`` ends the request with an error (status 400, or the error event of a stream).

    Raises:
        RequestError: as above; or an option has a value that the server would refuse.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    triggers: Sequence[str | Trigger]
    start: Literal["trigger", "after"] = "trigger"
    mandatory: bool = False
    force_after: int | None = None
    rearm: bool = False
    max_activations: int | None = None
    on_reject: Literal["forbid", "disarm", "error"] = "forbid"

    def __post_init__(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise RequestError("structured_outputs", given, f"exactly one of {', '.join(_KINDS)} is needed")
        if isinstance(self.triggers, str):
            raise RequestError("vllm_xargs.grammar_triggers", self.triggers, "must be a list of triggers")
        self._spec()

    def _spec(self) -> TriggerSpec:
        given: dict[str, Any] = {"grammar_triggers": [str(t) for t in self.triggers]}
        given |= {f"grammar_{option.name}": getattr(self, option.name) for option in fields(self)[len(_KINDS) + 1 :]}
        spec = TriggerSpec.parse(given)
        assert spec is not None  # noqa: S101 -- there are keys
        return spec

    def structured_outputs(self) -> dict[str, Any]:
        """The constraint, as vLLM's ``structured_outputs`` takes it."""
        tag = self.structural_tag
        wanted = {
            "json": self.json,
            "json_object": self.json_object or None,
            "regex": self.regex,
            "choice": None if self.choice is None else list(self.choice),
            "grammar": self.grammar,
            "structural_tag": jsonlib.dumps(tag) if isinstance(tag, dict) else tag,
        }
        return {kind: value for kind, value in wanted.items() if value is not None}

    def extra_args(self) -> dict[str, Any]:
        """The triggers and those options that are not at their default: ``vllm_xargs`` of a request, ``extra_args`` of SamplingParams."""
        return dict(self._spec().as_xargs())

    def extra_body(self) -> dict[str, Any]:
        """What the OpenAI client takes as ``extra_body``, for chat completions, completions and responses."""
        return {"structured_outputs": self.structured_outputs(), "vllm_xargs": self.extra_args()}
