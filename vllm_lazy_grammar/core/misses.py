"""The nearest miss of a trigger that did not fire: what of it appeared, where, and why that did not count.

Looks at an answer after the fact, never while it is written; searches are bounded in time and characters.

Invariants:
- Bytes are counted from the start of the answer, reasoning included.
- What is said was there: a miss names text of the answer, or says that nothing of the trigger appeared.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

from vllm_lazy_grammar.core.patterns import Limits, compile_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm_lazy_grammar.core.patterns import Pattern
    from vllm_lazy_grammar.core.triggers import Trigger, Triggers
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

Region = Literal["reasoning", "observed", "held"]
"""Who read a token: nobody, since it belongs to the reasoning; the gate; or the grammar, while the gate was closed."""

_BEHIND = 16
_STARTS = 4096
"""Characters of an answer, its last ones, at which the beginning of a pattern's match is looked for."""
_LONGEST = 512
_TIMEOUT_S = 0.2
_FEWEST = 2
"""Characters of a pattern's match that are worth telling."""


class Seen(NamedTuple):
    """One token of the answer: its bytes, who read it, and which triggers' firings on it the grammar refused."""

    token: int
    piece: bytes
    region: Region
    refused: frozenset[str] = frozenset()


class Miss(NamedTuple):
    """How near a trigger came.

    Args:
        trigger: as written.
        text: what of it appeared; empty where nothing did.
        byte: where that stands; None where nothing appeared.
        why: why it did not fire.
    """

    trigger: str
    text: str
    byte: int | None
    why: str


class Misses:
    """Looks for the nearest misses in one answer.

    Args:
        triggers: what was waited for.
        vocabulary: the model's.
        seen: the answer.
    """

    def __init__(self, triggers: Triggers, vocabulary: Vocabulary, seen: Sequence[Seen]) -> None:
        self._triggers, self._vocabulary, self._seen = triggers, vocabulary, seen
        self._data = b"".join(s.piece for s in seen)
        self._ends = list(accumulate(len(s.piece) for s in seen))
        self._behinds = {index: place for place, index in enumerate(triggers.literal_triggers)}
        self._ids = {index: token for token, index in triggers.tokens.items()}

    def of_all_but(self, fired: frozenset[str]) -> list[Miss]:
        """One for each trigger that is not in `fired` (as written), in list order."""
        triggers = self._triggers.spec.triggers
        return [self._of(index, trigger) for index, trigger in enumerate(triggers) if str(trigger) not in fired]

    def _of(self, index: int, trigger: Trigger) -> Miss:
        for seen in self._seen:
            if str(trigger) in seen.refused:
                return self._refused(trigger)
        if trigger.kind == "token":
            return self._of_token(str(trigger), self._ids.get(index))
        if index in self._behinds:
            return self._of_text(
                str(trigger), self._triggers.literals.texts[self._behinds[index]], self._behinds[index]
            )
        return self._of_pattern(trigger)

    def _refused(self, trigger: Trigger) -> Miss:
        place = next(i for i, seen in enumerate(self._seen) if str(trigger) in seen.refused)
        return Miss(
            str(trigger), _text(self._seen[place].piece), self._begin(place),
            "it appeared, and the grammar refuses what follows: it was taken for prose",
        )  # fmt: skip

    # -- tokens ------------------------------------------------------------------------------------------------------

    def _of_token(self, name: str, token: int | None) -> Miss:
        if token is None:
            return Miss(name, "", None, "another trigger before it in the list names the same id")
        place = next((i for i, seen in enumerate(self._seen) if seen.token == token), None)
        piece = self._vocabulary.piece(token)
        if place is not None:
            return Miss(name, _text(piece), self._begin(place), self._of_region(place))
        at = self._data.find(piece) if piece else -1
        if at < 0:
            return self._of_text(name, piece, None)
        tokens = ", ".join(str(s.token) for s in self._seen[self._place(at) : self._place(at + len(piece) - 1) + 1])
        why = f"its text is there, written with other tokens ({tokens}); a token trigger is the id {token} alone, word: takes any spelling"
        return Miss(name, _text(piece), at, why)

    # -- words -------------------------------------------------------------------------------------------------------

    def _of_text(self, name: str, text: bytes, literal: int | None) -> Miss:
        whole = next(self._reasons(text, literal), None)
        if whole is not None:
            at, why = whole
            return Miss(name, _text(text), at, why)
        at = self._data.lower().find(text.lower()) if text else -1
        if at >= 0:
            return Miss(
                name, _text(self._data[at : at + len(text)]), at, "it is there in other letters, large or small"
            )
        return self._longest_prefix(name, text)

    def _reasons(self, text: bytes, literal: int | None) -> Iterator[tuple[int, str]]:
        """Where the whole text stands, and why that did not count."""
        at = self._data.find(text) if text else -1
        while at >= 0:
            yield at, self._why_not(at, text, literal)
            at = self._data.find(text, at + 1)

    def _why_not(self, at: int, text: bytes, literal: int | None) -> str:
        last = self._place(at + len(text) - 1)
        if self._seen[last].region != "observed":
            return self._of_region(last)
        before = self._data[max(0, at - self._triggers.lookbehind) : at]
        if literal is not None and not self._triggers.lookbehind_holds(literal, before):
            return f"it stands behind {_text(before[-4:])!r}, where the pattern does not count it"
        return "another trigger fired first"

    def _longest_prefix(self, name: str, text: bytes) -> Miss:
        fits, too_long = 0, len(text)
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            fits, too_long = (middle, too_long) if text[:middle] in self._data else (fits, middle)
        if not fits:
            return Miss(name, "", None, "nothing of it appeared")
        at = self._data.find(text[:fits])
        behind = self._data[at + fits : at + fits + _BEHIND]
        then = f"then came {_text(behind)!r}" if behind else "then the answer ended"
        return Miss(name, _text(text[:fits]), at, f"{fits} of {len(text)} bytes of it appeared, {then}")

    # -- patterns ----------------------------------------------------------------------------------------------------

    def _of_pattern(self, trigger: Trigger) -> Miss:
        full = trigger.kind == "pattern_full"
        pattern = compile_pattern(trigger.source, full=full, limits=Limits(), field="", value=str(trigger))
        text = self._data.decode("utf-8", "surrogateescape")
        try:
            return self._whole_match(trigger, pattern, text) or self._begun_match(trigger, pattern, text)
        except TimeoutError:
            return Miss(str(trigger), "", None, "its nearest miss was not found in time")

    def _whole_match(self, trigger: Trigger, pattern: Pattern, text: str) -> Miss | None:
        found = None if pattern.whole else pattern.engine.search(text, timeout=_TIMEOUT_S)
        if found is None:
            return None
        at, end = _bytes(text[: found.start()]), _bytes(text[: found.end()])
        last = self._place(max(at, end - 1))
        why = self._of_region(last) if self._seen[last].region != "observed" else "another trigger fired first"
        return Miss(str(trigger), _shown(found[0]), at, why)

    def _begun_match(self, trigger: Trigger, pattern: Pattern, text: str) -> Miss:
        starts = [0] if pattern.whole else range(max(0, len(text) - _STARTS), len(text))
        best, length = 0, 0
        for start in starts:
            found = _begins(pattern, text, start, length)
            if found > length:
                best, length = start, found
        if length < _FEWEST:
            return Miss(str(trigger), "", None, "nothing in the text begins a match")
        behind = text[best + length : best + length + _BEHIND]
        then = f"behind it came {behind!r}" if behind else "then the answer ended"
        why = f"this begins a match, and {then}"
        return Miss(str(trigger), _shown(text[best : best + length]), _bytes(text[:best]), why)

    # -- places ------------------------------------------------------------------------------------------------------

    def _place(self, byte: int) -> int:
        """The token in which a byte stands."""
        return bisect_right(self._ends, byte)

    def _begin(self, place: int) -> int:
        return self._ends[place - 1] if place else 0

    def _of_region(self, place: int) -> str:
        if self._seen[place].region == "reasoning":
            return "it stands in the reasoning, which the gate does not see"
        if self._seen[place].region == "held":
            return "it stands where the grammar already held the text, and the gate was closed"
        return "another trigger fired first"


def _begins(pattern: Pattern, text: str, start: int, length: int) -> int:
    """Characters from `start` that begin a match; 0 where they are not more than `length`. What begins a match begins it at every length below."""

    def fits(size: int) -> bool:
        matched = pattern.engine.fullmatch(text, start, start + size, partial=True, timeout=_TIMEOUT_S)
        return matched is not None

    most = min(_LONGEST, len(text) - start)
    if length >= most or not fits(length + 1):
        return 0
    low, high = length + 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _shown(text: str) -> str:
    return _text(text.encode("utf-8", "surrogateescape"))
