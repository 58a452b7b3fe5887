"""What was asked (TriggerSpec) and its compiled form (Triggers): where does a match start?

Invariants:
- A spec that exists is consistent: options that contradict each other are refused when it is made.
- Compiled triggers are immutable and shared between requests; everything that can be refused is refused when they are compiled.
- Words, and patterns that are one literal behind look-behinds, are never given to the regex engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self, cast, get_args

import regex

from vllm_lazy_grammar.core.literals import LiteralAutomaton
from vllm_lazy_grammar.core.patterns import Limits, Pattern, compile_pattern
from vllm_lazy_grammar.core.search import Probe, Unit, unit_fact
from vllm_lazy_grammar.core.xargs import PREFIX, read_bool, read_int, read_json, read_word
from vllm_lazy_grammar.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

TriggerKind = Literal["token", "word", "pattern", "pattern_full"]
Start = Literal["trigger", "after"]
OnReject = Literal["forbid", "disarm", "error"]

KINDS: tuple[TriggerKind, ...] = get_args(TriggerKind)
"""In the order of llama.cpp's integers: 0 is a token."""

KEYS = (
    "grammar_triggers",
    "grammar_start",
    "grammar_mandatory",
    "grammar_force_after",
    "grammar_rearm",
    "grammar_max_activations",
    "grammar_on_reject",
)
"""What is read from `vllm_xargs`."""

MAX_TRIGGERS = 1024
MAX_PATTERNS = 128
MAX_STATES = 32_768
"""States of the literal automaton: 32 MB of tables."""

_FIELD = PREFIX + KEYS[0]
_KEYS_OF_OBJECT = frozenset({"type", "value", "token"})
_FORMS = "token:ID, token:TEXT, word:TEXT, pattern:REGEX or pattern_full:REGEX"
_ID_DIGITS = 9
_UTF8_WIDEST = 4


class Pieces(Protocol):
    """What is needed of a vocabulary."""

    @property
    def size(self) -> int:
        """Entries of the model's output."""

    def piece(self, token: int) -> bytes:
        """The bytes of an id; empty where it has none."""

    def token_of(self, text: str) -> int | None:
        """The id whose text is exactly this."""

    def __contains__(self, token: object) -> bool: ...


@dataclass(frozen=True, slots=True)
class Trigger:
    """One trigger; equal by kind and source, prints as it is written in a request."""

    kind: TriggerKind
    source: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.source}"


@dataclass(frozen=True, slots=True)
class TriggerSpec:
    """What a request asks for; names and meanings as in `vllm_xargs`, without ``grammar_``.

    Raises:
        RequestError: there is no trigger, or options contradict each other.
    """

    triggers: tuple[Trigger, ...]
    start: Start = "trigger"
    mandatory: bool = False
    force_after: int | None = None
    rearm: bool = False
    max_activations: int | None = None
    on_reject: OnReject = "forbid"

    def __post_init__(self) -> None:
        if not self.triggers:
            raise RequestError(_FIELD, [], "a lazy grammar without a trigger could never start")
        if len(self.triggers) > MAX_TRIGGERS:
            raise RequestError(_FIELD, len(self.triggers), f"at most {MAX_TRIGGERS} triggers are taken")
        object.__setattr__(self, "triggers", tuple(dict.fromkeys(self.triggers)))
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        if self.max_activations is not None and not self.rearm:
            raise RequestError(PREFIX + "grammar_max_activations", self.max_activations, "this needs grammar_rearm")
        if self.force_after is None:
            return
        field = PREFIX + "grammar_force_after"
        if not self.mandatory:
            raise RequestError(field, self.force_after, "this needs grammar_mandatory")
        if not any(trigger.kind in ("token", "word") for trigger in self.triggers):
            raise RequestError(
                field, self.force_after, "this needs a word or token trigger: no text is known that a pattern takes"
            )

    @classmethod
    def parse(cls, xargs: Mapping[str, object]) -> TriggerSpec | None:
        """Read a request's `vllm_xargs`; None where it has no key of ours.

        Raises:
            RequestError: an unknown key that begins with ``grammar_``, or a value that can not be served.
        """
        mine = [key for key in xargs if key.startswith("grammar_")]
        if not mine:
            return None
        for key in mine:
            _refuse_unknown(key, xargs[key])
        if xargs.get(KEYS[0]) is None:
            raise RequestError(PREFIX + mine[0], xargs[mine[0]], "this needs grammar_triggers")
        return cls(
            triggers=tuple(_read_triggers(xargs[KEYS[0]])),
            start=cast("Start", read_word(xargs, "grammar_start", get_args(Start))),
            mandatory=read_bool(xargs, "grammar_mandatory"),
            force_after=read_int(xargs, "grammar_force_after", 0),
            rearm=read_bool(xargs, "grammar_rearm"),
            max_activations=read_int(xargs, "grammar_max_activations", 1),
            on_reject=cast("OnReject", read_word(xargs, "grammar_on_reject", get_args(OnReject))),
        )

    def as_xargs(self) -> dict[str, str | int | list[str]]:
        """The `vllm_xargs` that parse to this; defaults are left out."""
        values: dict[str, str | int | list[str]] = {KEYS[0]: [str(trigger) for trigger in self.triggers]}
        for key in KEYS[1:]:
            name = key.removeprefix("grammar_")
            value = getattr(self, name)
            if value != getattr(type(self)(self.triggers), name):
                values[key] = int(value) if isinstance(value, bool) else value
        return values


def _refuse_unknown(key: str, value: object) -> None:
    if key in KEYS:
        return
    near = get_close_matches(key, KEYS, 1)
    hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(KEYS)}"
    raise RequestError(PREFIX + key, value, "there is no such option" + hint)


def _read_triggers(value: object) -> Iterable[Trigger]:
    if isinstance(value, str):
        value = read_json(_FIELD, value) if value.lstrip().startswith("[") else [value]
    if not isinstance(value, list | tuple):
        raise RequestError(_FIELD, value, f"this is a list of strings: {_FORMS}")
    return (_read_trigger(item, f"{_FIELD}[{index}]") for index, item in enumerate(value))


def _read_trigger(item: object, field: str) -> Trigger:
    if isinstance(item, str) and item.lstrip().startswith("{"):
        item = read_json(field, item)
    if isinstance(item, Mapping):
        return _from_object(item, field)
    if not isinstance(item, str):
        raise RequestError(field, item, f"a trigger is a string: {_FORMS}")
    kind, colon, source = item.partition(":")
    if not colon or kind not in KINDS:
        raise RequestError(field, item, f"unknown kind of trigger; written are {_FORMS}")
    return _checked(kind, source, field, item)


def _from_object(item: Mapping[object, object], field: str) -> Trigger:
    """A trigger as llama.cpp writes it; of a token its id counts, where it is given."""
    kind = item.get("type")
    if isinstance(kind, int | float) and not isinstance(kind, bool) and kind in range(len(KINDS)):
        kind = KINDS[int(kind)]
    if not isinstance(kind, str) or kind not in KINDS:
        raise RequestError(field, item, f"type is one of {', '.join(KINDS)}, or llama.cpp's integer for it")
    if not _KEYS_OF_OBJECT.issuperset(cast("Mapping[str, object]", item)):
        raise RequestError(field, item, "a trigger object has type, value and, for a token, token")
    source = item.get("value")
    if kind == "token" and isinstance(token := item.get("token"), int) and not isinstance(token, bool):
        source = str(token)
    if not isinstance(source, str):
        raise RequestError(field, item, "value is a string")
    return _checked(kind, source, field, item)


def _checked(kind: str, source: str, field: str, item: object) -> Trigger:
    if not source:
        raise RequestError(field, item, f"an empty {kind} trigger would match everywhere")
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise RequestError(field, item, f"the text is not valid Unicode: {error.reason}") from error
    return Trigger(cast("TriggerKind", kind), source)


class Forcible(NamedTuple):
    """A text that makes a trigger fire: what `grammar_force_after` leads into.

    Args:
        trigger: its index in the list.
        data: the word, or the token's piece.
        token: the id, where only that id fires it.
    """

    trigger: int
    data: bytes
    token: int | None


class Triggers:
    """Compiled triggers; immutable, shared.

    Attributes:
        spec: what was asked.
        tokens: trigger tokens -> the trigger's index in ``spec.triggers``; the first in the list where two name the same id.
        token_ids: the trigger tokens.
        literals: all words, and the patterns that are one literal behind look-behinds.
        literal_triggers: per literal the trigger's index.
        lookbehind: the most bytes of the text before a literal that decide whether it counts; 0 where no literal looks back.
        has_patterns: there are patterns besides literals.
        units: those patterns, in groups that are searched for together.
        margin: bytes before a position that those patterns look at; None where there is no bound.
        after: the grammar begins behind a match.
        forcible: the texts that make a word or token trigger fire.
    """

    __slots__ = (
        "_behinds",
        "after",
        "forcible",
        "has_patterns",
        "literal_triggers",
        "literals",
        "lookbehind",
        "margin",
        "spec",
        "token_ids",
        "tokens",
        "units",
    )

    def __init__(
        self, spec: TriggerSpec, tokens: Mapping[int, int], patterns: Mapping[int, Pattern], vocabulary: Pieces
    ) -> None:
        self.spec = spec
        self.after = spec.start == "after"
        self.tokens = MappingProxyType(dict(tokens))
        self.token_ids = frozenset(tokens)
        self._set_literals(patterns)
        probes = [Probe(index, pattern) for index, pattern in patterns.items() if pattern.literal is None]
        self.has_patterns = bool(probes)
        self.units = _units(probes)
        self.margin = _margin([probe.pattern.reach for probe in probes])
        words = [(index, t.source.encode()) for index, t in enumerate(spec.triggers) if t.kind == "word"]
        self.forcible = (
            *(Forcible(index, text, None) for index, text in words),
            *(Forcible(index, vocabulary.piece(token), token) for token, index in tokens.items()),
        )

    def _set_literals(self, patterns: Mapping[int, Pattern]) -> None:
        texts, indices, behinds, reaches = [], [], [], [0]
        for index, trigger in enumerate(self.spec.triggers):
            literal = patterns[index].literal if index in patterns else None
            if trigger.kind == "word":
                texts.append(trigger.source.encode())
            elif literal is not None:
                texts.append(literal.text)
                reaches.append(_margin([literal.reach]) or 0 if literal.behind else 0)
            else:
                continue
            indices.append(index)
            behinds.append(literal.behind if literal else None)
        self.literals = LiteralAutomaton(texts)
        self.literal_triggers = tuple(indices)
        self.lookbehind = max(reaches)
        self._behinds = tuple(behinds)

    @classmethod
    def compile(
        cls,
        spec: TriggerSpec,
        vocabulary: Pieces,
        *,
        stop_ids: Collection[int],
        max_pattern_length: int = Limits().length,
        max_depth: int = Limits().depth,
    ) -> Self:
        """Compile for one vocabulary.

        Raises:
            RequestError: a token text that is not one token, an id outside the vocabulary or a stop id; a pattern that does not compile,
                matches the empty text or exceeds a limit; more text than the automaton takes.
        """
        tokens: dict[int, int] = {}
        patterns: dict[int, Pattern] = {}
        limits = Limits(max_pattern_length, max_depth)
        _refuse_bulk(spec.triggers)
        for index, trigger in enumerate(spec.triggers):
            field = f"{_FIELD}[{index}]"
            if trigger.kind == "token":
                tokens.setdefault(_token(trigger, vocabulary, stop_ids, field), index)
            elif trigger.kind != "word":
                full = trigger.kind == "pattern_full"
                patterns[index] = compile_pattern(
                    trigger.source, full=full, limits=limits, field=field, value=str(trigger)
                )
        return cls(spec, tokens, patterns, vocabulary)

    @property
    def nbytes(self) -> int:
        """Memory of the tables, in bytes."""
        return self.literals.nbytes

    def lookbehind_holds(self, literal: int, before: bytes) -> bool:
        """Whether the literal counts where the text before it ends with `before`: its last `lookbehind` bytes, or all of it where it is shorter."""
        behind = self._behinds[literal]
        if behind is None:
            return True
        text = before.decode("utf-8", "surrogateescape")
        return behind.match(text, len(text)) is not None


def _refuse_bulk(triggers: Sequence[Trigger]) -> None:
    patterns = sum(trigger.kind in ("pattern", "pattern_full") for trigger in triggers)
    if patterns > MAX_PATTERNS:
        raise RequestError(_FIELD, patterns, f"at most {MAX_PATTERNS} patterns are taken")
    size = sum(len(trigger.source.encode()) for trigger in triggers if trigger.kind == "word")
    if size >= MAX_STATES:
        raise RequestError(_FIELD, size, f"words may have {MAX_STATES} bytes together")


def _no_token(source: str, vocabulary: Pieces) -> str:
    sign, digits = source[:1], source[1:]
    if sign in "+-" and digits.isascii() and digits.isdigit():
        return f"this is no id: the vocabulary has the ids 0 to {vocabulary.size - 1}"
    return "this text is not exactly one token; word: takes any text"


def _token(trigger: Trigger, vocabulary: Pieces, stop_ids: Collection[int], field: str) -> int:
    if trigger.source.isascii() and trigger.source.isdigit():
        token = int(trigger.source[-_ID_DIGITS:]) if not trigger.source[:-_ID_DIGITS].strip("0") else vocabulary.size
        if token not in vocabulary:
            raise RequestError(field, str(trigger), f"the vocabulary has the ids 0 to {vocabulary.size - 1}")
    elif (found := vocabulary.token_of(trigger.source)) is None:
        raise RequestError(field, str(trigger), _no_token(trigger.source, vocabulary))
    else:
        token = found
    if token in stop_ids:
        raise RequestError(field, str(trigger), f"token {token} ends the turn, so nothing could follow it")
    return token


def _margin(reaches: list[int | None]) -> int | None:
    """Bytes that hold so many characters and one more, wherever they are cut; None where there is no bound."""
    known = [reach for reach in reaches if reach is not None]
    if len(known) < len(reaches):
        return None
    return _UTF8_WIDEST * (max(known, default=0) + 2)


def _units(probes: list[Probe]) -> tuple[Unit, ...]:
    """Patterns that may be searched for at once together, the others alone; in list order, whole texts before searches."""
    merged = [probe for probe in probes if probe.pattern.mergeable]
    alone = [probe for probe in probes if not probe.pattern.mergeable]
    groups = [(merged, False)] if merged else []
    groups += [([probe], True) for probe in alone if probe.pattern.whole]
    groups += [([probe], False) for probe in alone if probe.pattern.anywhere]
    groups.sort(key=lambda group: (group[0][0].trigger, not group[1]))
    return tuple(_unit(index, group, whole=whole) for index, (group, whole) in enumerate(groups))


def _unit(index: int, probes: list[Probe], *, whole: bool) -> Unit:
    quick = None
    if len(probes) > 1:
        quick = regex.compile("|".join(f"(?:{probe.pattern.body})" for probe in probes), cache_pattern=False)
    return Unit(
        fact=unit_fact(index),
        first=probes[0].trigger,
        probes=tuple(probes),
        quick=quick,
        whole=whole,
        timed=not all(probe.pattern.tame for probe in probes),
    )
