"""Families of tool-call formats, read from TOML files: those of the package's ``configs/``, and a user's own.

Invariants:
- A preset that exists is complete and consistent; presets are immutable.
- A file that can not be used is a SettingsError that names file, key and value; nothing in it is ignored.
- No two families of one catalogue have the same name or serve the same parser, save where a user's file replaces one of ours.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import regex

from vllm_lazy_grammar.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Strings = tuple[str, ...]
Style = Literal["json", "pairs", "nested", "minimax_m3_xml", "cohere_xml"]

CALL_PLACES = frozenset({"name", "arguments", "index"})
PAIR_PLACES = frozenset({"key", "value", "type"})
PLACE = regex.compile(r"\{(name|arguments|index|key|value|type|names)\}")

_ABSENT = "unserved.toml"


def _one_of(*values: str, default: str) -> Any:
    return field(default=default, metadata={"values": values})


@dataclass(frozen=True, slots=True)
class TriggerRules:
    """When a call begins.

    Args:
        openers: texts that open a call; a token of this text, and the text itself unless it is quoted.
        patterns: regular expressions besides; ``{names}`` stands for any of the tools' names.
        force: texts that lead into a call where one must come; ``{name}`` stands for each tool's name. Default: the openers.
        quoted: whether an opener directly behind a quotation mark or a backtick opens a call too.
        anchored: the family's parser finds a call only at the start of the answer, so a call that must come comes first.
        context: the end-of-turn marker behind which the prompt belongs to what the patterns see; empty where none does.
    """

    openers: Strings = ()
    patterns: Strings = ()
    force: Strings = ()
    quoted: bool = False
    anchored: bool = False
    context: str = ""


@dataclass(frozen=True, slots=True)
class BlockRules:
    """What surrounds calls. Of each list the first is how the family was trained; the others are taken too.

    Args:
        open: from the trigger up to the first call.
        separator: between calls of one block; empty where a block holds one call.
        close: behind the last call; the grammar is complete with it.
        blocks: whether an answer may hold ``many`` blocks or just ``one``.
    """

    open: Strings = ("",)
    separator: Strings = ()
    close: Strings = ("",)
    blocks: str = _one_of("many", "one", default="many")


@dataclass(frozen=True, slots=True)
class CallRules:
    """One call.

    Args:
        forms: templates with ``{name}``, ``{arguments}`` and, where calls are numbered, ``{index}``; the first is how the family was trained.
        name: ``raw`` as it is, ``json`` as inside a JSON string, ``xml`` with ``&`` and quotes escaped.
        name_pattern: the names that the format can carry; another is refused.
        empty: the template of a call without arguments, where it differs.
    """

    forms: Strings = ()
    name: str = _one_of("raw", "json", "xml", default="raw")
    name_pattern: str = r"[^\s].*"
    empty: str = ""


@dataclass(frozen=True, slots=True)
class ArgumentRules:
    """How arguments are written.

    Args:
        style: ``json``: one JSON object; ``pairs``: one template per argument; ``nested``: templates all the way down; others: xgrammar's.
        item: JSON's separator between members.
        colon: JSON's separator between key and value.
        pair: the template of one argument, with ``{key}``, ``{value}`` and perhaps ``{type}``.
        other: its template where the value is no string; default: `pair`.
        separator: between two arguments.
        open: before the first argument.
        close: behind the last one.
        array: of ``nested``: what opens and closes a list.
        object: of ``nested``: what opens and closes an object in an object.
        strings: ``raw``: bare text; ``plain``: bare text that does not read as JSON; ``python``: all values as Python writes them.
        string: of ``nested``: the template of a string, with ``{value}``.
        until: texts that can not occur in a bare string, the first being what ends it; of ``json``: in a string of no given length or pattern
            (each of their characters makes compiling dearer, so the shortest beginning of the call's end that no argument needs).
        trimmed: the family's parser strips bare strings.
        key: keys ``raw`` as they are, or ``xml`` with ``&`` and quotes escaped.
        key_pattern: the keys that the format can carry; others are refused.
        order: keys as ``declared``, or ``sorted``.
        integer: what ``{type}`` says of an integer.
    """

    style: str = _one_of(*get_args(Style), default="json")
    item: str = ", "
    colon: str = ": "
    pair: str = ""
    other: str = ""
    separator: str = ""
    open: str = ""
    close: str = ""
    array: Strings = ("[", "]")
    object: Strings = ("{", "}")
    strings: str = _one_of("raw", "plain", "python", default="raw")
    string: str = ""
    until: Strings = ()
    trimmed: bool = False
    key: str = _one_of("raw", "xml", default="raw")
    key_pattern: str = r"[^\s].*"
    order: str = _one_of("declared", "sorted", default="declared")
    integer: str = "integer"


@dataclass(frozen=True, slots=True)
class Preset:
    """One family.

    Args:
        family: its name.
        parsers: the names of ``--tool-call-parser`` that it serves; none where it is for use with triggers only.
        sources: where the facts are from, one sentence or address each.
        faults: what the stock parser of the family does not give back, one sentence each.
        markers: the family's control tokens: where a tokenizer has them as one token, they never occur in free text of a call.
        needs: texts that a model's tokenizer must have as tokens for this format; tells formats apart that one parser reads.
    """

    family: str
    parsers: Strings
    sources: Strings
    faults: Strings
    markers: Strings
    needs: Strings
    trigger: TriggerRules
    block: BlockRules
    call: CallRules
    arguments: ArgumentRules


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of a file, for reading with errors that name it."""

    where: str
    values: Mapping[str, Any]

    def fail(self, key: str, reason: str) -> SettingsError:
        """The error that names this key and its value."""
        return SettingsError(f"{self.where}.{key}".replace(": .", ": "), self.values.get(key), reason)

    def table(self, key: str) -> _Table:
        """The table under a key; empty where there is none."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.fail(key, "must be a table")
        return _Table(f"{self.where}.{key}".replace(": .", ": "), value)

    def strings(self, key: str) -> Strings:
        """The texts under a key, one or several."""
        value = self.values.get(key, ())
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, "must be a text or a list of texts")
        return tuple(value)

    def only(self, known: Iterable[str]) -> None:
        """Refuse every key that is not known."""
        known = list(known)
        for key in self.values:
            if key not in known:
                raise self.fail(key, f"there is no such key; there are {', '.join(known)}")

    def read(self, rules: type[T]) -> T:
        """One of the rules classes, from this table."""
        own = {f.name: f for f in fields(rules)}  # type: ignore[arg-type]  # all of them are dataclasses
        self.only(own)
        found: dict[str, Any] = {}
        for key, value in self.values.items():
            default = own[key].default
            found[key] = self.strings(key) if isinstance(default, tuple) else self._scalar(key, value, type(default))
            values = own[key].metadata.get("values")
            if values and value not in values:
                raise self.fail(key, f"must be one of {', '.join(values)}")
        return rules(**found)

    def _scalar(self, key: str, value: object, kind: type) -> object:
        if not isinstance(value, kind):
            raise self.fail(key, "must be true or false" if kind is bool else "must be a text")
        return value


def read_preset(name: str, text: str) -> Preset:
    """The preset that a file's text describes.

    Args:
        name: the file's name, for messages.
        text: TOML.

    Raises:
        SettingsError: it is not TOML, or a key or value can not be used.
    """
    try:
        root = _Table(f"{name}: ", tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(name, text, f"this is not TOML: {error}") from error
    root.only(f.name for f in fields(Preset))
    family = root.values.get("family")
    if not isinstance(family, str) or not family:
        raise root.fail("family", "a preset needs the name of its family")
    preset = Preset(
        family=family,
        parsers=root.strings("parsers"),
        sources=root.strings("sources"),
        faults=root.strings("faults"),
        markers=root.strings("markers"),
        needs=root.strings("needs"),
        trigger=root.table("trigger").read(TriggerRules),
        block=root.table("block").read(BlockRules),
        call=root.table("call").read(CallRules),
        arguments=root.table("arguments").read(ArgumentRules),
    )
    _check(root, preset)
    return preset


def _check(root: _Table, preset: Preset) -> None:
    if not preset.sources:
        raise root.fail("sources", "a preset names the public sources of its facts")
    trigger, call = root.table("trigger"), root.table("call")
    if not preset.trigger.openers and not preset.trigger.patterns:
        raise trigger.fail("openers", "a family needs an opener or a pattern")
    if not preset.trigger.openers and not preset.trigger.force:
        raise trigger.fail("force", "patterns alone do not say which text leads into a call")
    _check_patterns(trigger, "patterns", preset.trigger.patterns)
    _check_patterns(call, "name_pattern", (preset.call.name_pattern,))
    _check_patterns(root.table("arguments"), "key_pattern", (preset.arguments.key_pattern,))
    if not preset.call.forms:
        raise call.fail("forms", "a family needs the form of a call")
    for form in preset.call.forms:
        _check_places(call, "forms", form, {"name", "arguments"}, CALL_PLACES)
    if preset.call.empty:
        _check_places(call, "empty", preset.call.empty, {"name"}, CALL_PLACES - {"arguments"})
    if not preset.block.open or not preset.block.close:
        raise root.table("block").fail("open", "open and close need at least one text, which may be empty")
    _check_arguments(root.table("arguments"), preset.arguments)


def _check_arguments(table: _Table, rules: ArgumentRules) -> None:
    if rules.style in ("pairs", "nested"):
        for key in ("pair", "other"):
            if template := getattr(rules, key) or (key == "pair" and " "):
                _check_places(table, key, str(template), {"key", "value"}, PAIR_PLACES)
    if rules.style == "pairs" and rules.strings != "python" and not rules.until:
        raise table.fail("until", "bare strings need a text that ends them")
    if rules.style == "nested":
        _check_places(table, "string", rules.string, {"value"}, {"value"})
        if not rules.until or not len(rules.array) == len(rules.object) == 2:  # noqa: PLR2004  (what opens and what closes)
            raise table.fail(
                "until", "nested values need what ends a string, and what opens and closes lists and objects"
            )


def _check_patterns(table: _Table, key: str, patterns: Strings) -> None:
    for pattern in patterns:
        try:
            regex.compile(PLACE.sub("x", pattern))
        except regex.error as error:
            raise table.fail(key, f"{pattern!r} is no regular expression: {error}") from error


def _check_places(table: _Table, key: str, template: str, needed: set[str], known: Iterable[str]) -> None:
    places = PLACE.findall(template)
    for place in places:
        if place not in known:
            raise table.fail(key, f"{{{place}}} has no meaning in {template!r}")
    for place in needed:
        if place not in places:
            raise table.fail(key, f"{template!r} lacks {{{place}}}")


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Families by name and by parser.

    Args:
        families: by their names.
        parsers: by the names of ``--tool-call-parser``; where several serve one, those that need more of the tokenizer come first.
        unserved: parsers that have no preset, with the reason.
    """

    families: Mapping[str, Preset]
    parsers: Mapping[str, tuple[Preset, ...]]
    unserved: Mapping[str, str]

    def for_parser(self, name: str, is_token: Callable[[str], bool]) -> Preset:
        """The preset that serves a parser, for a tokenizer that has these tokens.

        Raises:
            SettingsError: there is none; says why, and which parsers have one.
        """
        for preset in self.parsers.get(name, ()):
            if all(is_token(text) for text in preset.needs):
                return preset
        if name in self.parsers:
            needed = ", ".join(text for preset in self.parsers[name] for text in preset.needs)
            raise SettingsError("tool-call-parser", name, f"the tokenizer has none of the tokens {needed}")
        why = self.unserved.get(name, "no preset serves this parser")
        raise SettingsError("tool-call-parser", name, f"{why}; there are presets for {', '.join(sorted(self.parsers))}")

    def with_file(self, path: Path) -> Catalogue:
        """This catalogue and a user's file, whose family replaces ours of the same name and takes over the parsers that it names.

        Raises:
            SettingsError: the file can not be read or used.
        """
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(str(path), str(path), f"this preset can not be read: {error}") from error
        preset = read_preset(str(path), text)
        taken = set(preset.parsers)
        kept = [
            replace(old, parsers=tuple(p for p in old.parsers if p not in taken))
            for old in self.families.values()
            if old.family != preset.family
        ]
        return _catalogue([*kept, preset], {k: v for k, v in self.unserved.items() if k not in taken})


def _catalogue(presets: Iterable[Preset], unserved: Mapping[str, str]) -> Catalogue:
    families: dict[str, Preset] = {}
    parsers: dict[str, list[Preset]] = {}
    for preset in presets:
        if preset.family in families:
            raise SettingsError("family", preset.family, "two presets have this name")
        families[preset.family] = preset
        for name in preset.parsers:
            others = parsers.setdefault(name, [])
            if name in unserved or any(other.needs == preset.needs for other in others):
                raise SettingsError(
                    f"{preset.family}: parsers", name, "another preset serves this parser, or it is unserved"
                )
            others.append(preset)
    ranked = {name: tuple(sorted(found, key=lambda p: -len(p.needs))) for name, found in parsers.items()}
    return Catalogue(MappingProxyType(families), MappingProxyType(ranked), MappingProxyType(dict(unserved)))


def configs_folder() -> Path:
    """Where the package's presets lie: in the package once installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.glob("*.toml")) if path.name != _ABSENT)


@cache
def catalogue() -> Catalogue:
    """The package's own families.

    Raises:
        SettingsError: a file of the package can not be used.
    """
    folder = configs_folder()
    unserved = tomllib.loads((folder / _ABSENT).read_text("utf-8"))
    return _catalogue([read_preset(path.name, path.read_text("utf-8")) for path in _files(folder)], unserved)
