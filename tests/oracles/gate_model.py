"""The gate of the spec, as slowly and plainly as it can be written: everything is decoded and searched from scratch at each token.

Invariants:
- It shares no code with the gate: not the decoding, not the automaton, not the reading of patterns.
- Stepping back is a copy kept from before.
"""

from __future__ import annotations

import codecs
from copy import deepcopy
from dataclasses import dataclass, field

import regex

LEADS = (r"[\s\S]*?", ".*?")


@dataclass
class Text:
    """Characters, and the byte where each begins; one entry more for the end."""

    chars: str
    at: list[int]


def decode(data: bytes) -> Text:
    """One character at a time; a byte that can not be one is a lone surrogate; stops before a last character that may still be completed."""
    chars, at, here = "", [0], 0
    while here < len(data):
        size = next((n for n in (1, 2, 3, 4) if _is_character(data[here : here + n])), 0)
        if not size and _may_grow(data[here:]):
            break
        chars += data[here : here + size].decode() if size else chr(0xDC00 + data[here])
        here += size or 1
        at.append(here)
    return Text(chars, at)


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def _may_grow(data: bytes) -> bool:
    try:
        return not codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False


@dataclass(frozen=True)
class Hit:
    """A trigger, where the replay starts, and the character from which its search goes on where it is refused (with what was known)."""

    trigger: int
    at: int
    resume: int


@dataclass
class State:
    """What stepping back restores."""

    data: bytes = b""
    context: int = 0
    tokens: list[tuple[int, int, int]] = field(default_factory=list)
    refused: set[tuple[int, int]] = field(default_factory=set)
    resume: dict[int, int] = field(default_factory=dict)
    fired: Hit | None = None


class GateModel:
    """`triggers` are pairs of kind and source, a token's source being its id."""

    def __init__(self, triggers, pieces, *, context=b"", after=False):
        self.triggers, self.pieces, self.after = triggers, pieces, after
        self.now = State()
        self.past = []
        self.open(context)

    def open(self, context):
        self.now = State(data=context, context=len(context))
        while context and (hit := self.first(words=False)):
            self.rule_out(hit)

    def observe(self, token):
        self.past.append(deepcopy(self.now))
        begin = len(self.now.data)
        self.now.data += self.pieces[token]
        self.now.tokens.append((token, begin, len(self.now.data)))
        return self.settle()

    def refuse(self):
        self.rule_out(self.now.fired)
        return self.settle()

    def undo(self):
        self.now = self.past.pop()

    def rearm(self):
        self.past.append(deepcopy(self.now))
        self.open(b"")

    def rule_out(self, hit):
        self.now.refused.add((hit.trigger, hit.at))
        self.now.resume[hit.trigger] = hit.resume

    def settle(self):
        """None while awaiting; else the trigger's index and what is replayed."""
        self.now.fired = self.token_hit() or self.first(words=True)
        if self.now.fired is None:
            return None
        return self.now.fired.trigger, self.replay(self.now.fired)

    def replay(self, hit):
        if self.triggers[hit.trigger][0] == "token":
            token, begin, end = self.now.tokens[-1]
            return [] if self.after else [(token, self.now.data[begin:end], True)]
        start = max(hit.at, self.now.context)
        cut = [(token, self.now.data[max(begin, start) : end], begin >= start) for token, begin, end in self.now.tokens]
        return [fed for fed in cut if fed[1]]

    def token_hit(self):
        token, begin, _ = self.now.tokens[-1]
        for index, (kind, source) in enumerate(self.triggers):
            if kind == "token" and int(source) == token:
                return None if (index, begin) in self.now.refused else Hit(index, begin, 0)
        return None

    def first(self, *, words):
        for index, (kind, source) in enumerate(self.triggers):
            hits = ()
            if kind == "word" and words:
                hits = self.word_hits(index, source.encode())
            elif kind == "pattern":
                hits = self.pattern_hits(index, source)
            elif kind == "pattern_full":
                hits = self.full_hits(index, source)
            for hit in hits:
                if (index, hit.at) not in self.now.refused:
                    return hit
                self.now.resume[index] = hit.resume
        return None

    def word_hits(self, index, word):
        at = self.now.data.find(word, self.now.context)
        while at >= 0:
            yield Hit(index, at + len(word) if self.after else at, 0)
            at = self.now.data.find(word, at + 1)

    def pattern_hits(self, index, source):
        text = decode(self.now.data)
        if source.startswith("^") and source.endswith("$"):
            yield from self.full_hits(index, source)
        lead = next((lead for lead in (*LEADS, "^" + LEADS[0]) if source.startswith(lead)), "")
        yield from self.searched(index, source, "" if has_bars(source) else lead, text, whole=False)

    def full_hits(self, index, source):
        text = decode(self.now.data)
        for lead in (LEADS[0], "^" + LEADS[0]):
            if source.startswith(lead) and not has_bars(source):
                yield from self.searched(index, source, lead, text, whole=True)
                return
        if found := regex.compile(to_the_end(source)).fullmatch(text.chars):
            yield self.hit(index, found, text, found.start())

    def searched(self, index, source, lead, text, *, whole):
        """Leftmost first. What follows a lazy lead is what is searched for; the match starts where the lead would have begun."""
        pattern = regex.compile(
            to_the_end(source.removeprefix(lead) + ("$" if whole and not source.endswith("$") else ""))
        )
        here = self.now.resume.get(index, 0)
        while here <= len(text.chars) and (found := leftmost(pattern, text.chars, here)):
            start, resume = found.start(), self.now.resume.get(index, 0)
            if lead == ".*?":
                start = max(resume, text.chars.rfind("\n", 0, start) + 1)
            elif lead:
                start = resume
            yield self.hit(index, found, text, start)
            here = found.start() + 1

    def hit(self, index, found, text, start):
        groups = [found.start(group) for group in range(1, 1 + len(found.groups())) if found.group(group)]
        char = found.end() if self.after else groups[0] if groups else start
        return Hit(index, text.at[char], min(found.start() + 1, len(text.chars)))


def leftmost(pattern, chars, here):
    """`search` lets a leading ``[\\s\\S]`` match nothing at the very end, where `fullmatch` asks the same."""
    return pattern.fullmatch(chars, here) if here == len(chars) else pattern.search(chars, here)


def to_the_end(source: str) -> str:
    """A final ``$`` that is not escaped is the very end."""
    slashes = len(source) - 1 - len(source[:-1].rstrip("\\"))
    return source[:-1] + r"\Z" if source.endswith("$") and not slashes % 2 else source


def has_bars(source: str) -> bool:
    """Whether alternatives stand outside all groups; enough for patterns without ``|`` in a set."""
    plain = regex.sub(r"\\.", "", source)
    return any(char == "|" and plain[:i].count("(") == plain[:i].count(")") for i, char in enumerate(plain))
