"""Which tokens would fire the gate only to have every replay refused by the grammar: what `forbid` masks while awaiting.

A token can fire by a literal only if the literal ends in it. The byte trie says which tokens those are; from a literal already begun, only the
tokens that go on with it are looked at besides those that hold a whole one. What the grammar takes of each is asked first in bytes, all
tokens at once and prefix by prefix, so that the hundreds of tokens that begin with ``{`` cost a few steps of the matcher; what it takes in
bytes is then asked exactly as the session will feed it.

Invariants:
- The answer is the gate's and the grammar's: observing each token and refusing its replays one by one gives the same.
- The live matcher is never touched, and no compile is joined.
- What is cached is a function of its key: the state of the literals, the tokens that a replay could reach, and what look-behinds say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_lazy_grammar.core.blanks import START
from vllm_lazy_grammar.core.gate import Fired
from vllm_lazy_grammar.core.journal import Phase, Position
from vllm_lazy_grammar.core.matcher import NO_MATCHER
from vllm_lazy_grammar.core.rows import IdSet, allowed_ids, masked_ids, ones, row_of, zeros
from vllm_lazy_grammar.core.transcript import Fed
from vllm_lazy_grammar.errors import PatternTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vllm_lazy_grammar.core.byte_trie import ByteTrie
    from vllm_lazy_grammar.core.gate import Gate
    from vllm_lazy_grammar.core.inside import Inside
    from vllm_lazy_grammar.core.matcher import GrammarKey, Matcher
    from vllm_lazy_grammar.core.rows import RowCache
    from vllm_lazy_grammar.core.triggers import Triggers
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

_KEPT = 16
"""Verdicts that one request keeps for itself."""

_BEFORE = Position(Phase.AWAITING, NO_MATCHER, steps=0, blanks=START)


class Verdict(NamedTuple):
    """What is refused at a position.

    Args:
        refused: refused wherever the key is the same.
        open: refused or not, as patterns and look-behinds inside the token decide; to be tried each time.
    """

    refused: IdSet
    open: tuple[int, ...]


_NOTHING = Verdict(IdSet((), 0), ())


class _Site(NamedTuple):
    """A literal that would end in a token: which one, and where it begins, counted from the end of the text."""

    literal: int
    start: int


class _Key(NamedTuple):
    """What a verdict depends on: the literals' state, the tokens under the literal that is begun, what look-behinds say of `_Plan.asks`."""

    state: int
    tail: tuple[Fed, ...]
    holds: tuple[bool, ...]


class _Plan(NamedTuple):
    """From one state of the literals: the tokens that could fire, by which literals, and for which of those a look-behind is asked now."""

    sites: Mapping[int, tuple[_Site, ...]]
    asks: tuple[_Site, ...]


class _Case(NamedTuple):
    """A match on a token: what the grammar would be fed, and whether the match is sure to count."""

    replay: tuple[Fed, ...]
    sure: bool

    @property
    def data(self) -> bytes:
        """The replay's bytes."""
        return b"".join([fed.data for fed in self.replay])


class Refusals:
    """The refused tokens of one request.

    Args:
        vocabulary: the model's.
        trie: its pieces.
        triggers: what the gate waits for.
        inside: how the grammar takes a replay.
        key: the grammar's.
        rows: shared cache; what is refused depends on the triggers and the grammar only.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what an answer depends on
        self,
        vocabulary: Vocabulary,
        trie: ByteTrie,
        triggers: Triggers,
        inside: Inside,
        key: GrammarKey,
        rows: RowCache,
    ) -> None:
        self._vocabulary, self._trie, self._triggers, self._inside, self._rows = (
            vocabulary,
            trie,
            triggers,
            inside,
            rows,
        )
        self._shared = (triggers.spec, key)
        self._words = [triggers.spec.triggers[trigger].kind == "word" for trigger in triggers.literal_triggers]
        exact = (*triggers.literal_triggers, *triggers.tokens.values())
        self._exact = frozenset(triggers.spec.triggers[trigger] for trigger in exact)
        self._verdicts: dict[_Key, Verdict] = {}
        self._plans: dict[int, _Plan] = {}
        self._whole: tuple[int, ...] | None = None
        self._first: Position | None = None

    def find(self, gate: Gate) -> IdSet:
        """The tokens that are refused where the gate stands, awaiting. The grammar must be compiled; `gate` is moved and put back."""
        key = self._key(gate)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._keep(key, self._known(key) or self._work_out(gate, key))
        if not verdict.open:
            return verdict.refused
        found = [token for token in verdict.open if self._is_refused(gate, token)]
        return IdSet([*found, *verdict.refused.ids], self._vocabulary.size) if found else verdict.refused

    # -- what is known ------------------------------------------------------------------------------------------------

    def _key(self, gate: Gate) -> _Key:
        state = gate.literal_state
        tail = gate.tail(int(self._triggers.literals.depth[state])) if state else ()
        if not self._triggers.lookbehind:
            return _Key(state, tail, ())
        return _Key(state, tail, tuple(self._holds(gate, site) for site in self._plan(state).asks))

    def _holds(self, gate: Gate, site: _Site) -> bool:
        text = gate.before(self._triggers.lookbehind - site.start)
        return self._triggers.lookbehind_holds(site.literal, text[: len(text) + site.start])

    def _keep(self, key: _Key, verdict: Verdict) -> Verdict:
        if len(self._verdicts) >= _KEPT:
            self._verdicts.clear()
            self._plans.clear()
        self._verdicts[key] = verdict
        return verdict

    def _known(self, key: _Key) -> Verdict | None:
        row = ones(self._vocabulary.row_words)
        if not self._rows.get(("refused", self._shared, key), row):
            return None
        ids = masked_ids(row, self._vocabulary.size)
        return Verdict(IdSet(ids.tolist(), self._vocabulary.size), ()) if len(ids) else _NOTHING

    # -- which tokens could fire --------------------------------------------------------------------------------------

    def _plan(self, state: int) -> _Plan:
        plan = self._plans.get(state)
        if plan is None:
            sites = {token: self._sites(state, token) for token in self._candidates(state)}
            behind = {s for found in sites.values() for s in found if s.start <= 0 and not self._words[s.literal]}
            plan = self._plans[state] = _Plan(sites, tuple(sorted(behind)) if self._triggers.lookbehind else ())
        return plan

    def _candidates(self, state: int) -> Iterable[int]:
        found = {*self._whole_literals(), *self._triggers.token_ids}
        literals = self._triggers.literals
        if state:
            found.update(self._trie.hitting(literals.table, literals.hits, state, beyond=0).tolist())
        return sorted(found)

    def _whole_literals(self) -> tuple[int, ...]:
        """The tokens that hold a whole literal; the same for all requests with these literals."""
        if self._whole is None:
            literals, size = self._triggers.literals, self._vocabulary.size
            key, row = ("holds a literal", literals.texts), zeros(self._vocabulary.row_words)
            if self._rows.get(key, row):
                ids = allowed_ids(row, size).tolist()
            else:
                ids = self._trie.hitting(literals.table, literals.hits, 0).tolist()
                self._rows.put(key, row_of(ids, size))
            self._whole = tuple(ids)
        return self._whole

    def _sites(self, state: int, token: int) -> tuple[_Site, ...]:
        literals = self._triggers.literals
        _, ends = literals.scan(state, self._vocabulary.piece(token))
        return tuple(
            _Site(literal, end - len(literals.texts[literal])) for end, at in ends for literal in literals.outputs[at]
        )

    # -- what the grammar refuses -------------------------------------------------------------------------------------

    def _work_out(self, gate: Gate, key: _Key) -> Verdict:
        cases = {token: tuple(self._cases(gate, key, token)) for token in self._plan(key.state).sites}
        possible = taken_texts(self._start().matcher, {case.data for found in cases.values() for case in found})
        refused: list[int] = []
        undecided: list[int] = []
        for token, found in cases.items():
            accepted = [case.data in possible and self._takes(case.replay) for case in found]
            sure = [case.sure for case in found]
            if not found or all(accepted) or any(map(_both, accepted, sure)):
                continue
            (refused if all(sure) and not self._triggers.has_patterns else undecided).append(token)
        verdict = Verdict(IdSet(refused, self._vocabulary.size), tuple(undecided)) if refused or undecided else _NOTHING
        if not undecided:
            self._publish(key, verdict.refused)
        return verdict

    def _publish(self, key: _Key, refused: IdSet) -> None:
        row = ones(self._vocabulary.row_words)
        refused.mask(row)
        self._rows.put(("refused", self._shared, key), row)

    def _cases(self, gate: Gate, key: _Key, token: int) -> Iterator[_Case]:
        """The matches on a token that count, or may: a literal that begins inside the token is judged by a look-behind that sees the token."""
        plan, piece = self._plan(key.state), self._vocabulary.piece(token)
        if token in self._triggers.token_ids:
            yield _Case(() if self._triggers.after else (Fed(token, piece, whole=True),), sure=True)
        for site in plan.sites[token]:
            word = self._words[site.literal]
            if word and -site.start > gate.length:
                continue
            if site in plan.asks and not key.holds[plan.asks.index(site)]:
                continue
            sure = word or site.start <= 0 or not self._triggers.lookbehind
            yield _Case(self._replay(key.tail, site, token, piece), sure)

    def _replay(self, tail: tuple[Fed, ...], site: _Site, token: int, piece: bytes) -> tuple[Fed, ...]:
        at = site.start + (len(self._triggers.literals.texts[site.literal]) if self._triggers.after else 0)
        last = Fed(token, piece[max(at, 0) :], whole=at <= 0)
        return (*_cut(tail, -at), last) if last.data else ()

    def _start(self) -> Position:
        """A position of our own at the grammar's start."""
        if self._first is None:
            self._first = self._inside.start(_BEFORE)._replace(trail=None)
        return self._first

    def _takes(self, replay: tuple[Fed, ...]) -> bool:
        """Whether the grammar takes all of it, as a session would feed it."""
        start = self._start()
        at: Position | None = start
        for fed in replay:
            at = self._inside.take_fed(at, fed) if at is not None else None
        start.matcher.rollback(start.matcher.steps - start.steps)
        return at is not None

    def _is_refused(self, gate: Gate, token: int) -> bool:
        """By trying: whether the gate fires on the token, not by patterns alone, and the grammar refuses every match.

        Where a pattern runs too long the answer is no: the error is the real token's, if it ever comes.
        """
        try:
            outcome = gate.observe(token)
        except PatternTimeoutError:
            return False
        refused = False
        try:
            while isinstance(outcome, Fired):
                if self._takes(outcome.replay):
                    return False
                refused |= outcome.trigger in self._exact
                outcome = gate.refuse()
        except PatternTimeoutError:
            return False
        finally:
            gate.undo()
        return refused


def _both(accepted: bool, sure: bool) -> bool:  # noqa: FBT001 - mapped over two lists
    return accepted and sure


def _cut(tail: tuple[Fed, ...], size: int) -> Iterator[Fed]:
    """The last `size` bytes of a tail."""
    skip = sum(len(fed.data) for fed in tail) - size
    for fed in tail:
        if skip < len(fed.data):
            yield fed if skip <= 0 else Fed(fed.token, fed.data[skip:], whole=False)
        skip -= len(fed.data)


def taken_texts(matcher: Matcher, texts: Iterable[bytes]) -> set[bytes]:
    """Those of `texts` that the matcher takes from where it stands; it is left there.

    In sorted order texts that begin alike follow each other, so each distinct prefix is offered once, and nothing behind a refused one.
    """
    taken: set[bytes] = set()
    written, refused = b"", None
    for text in sorted(texts):
        if refused is not None and text.startswith(refused):
            continue
        kept = _shared_prefix(written, text)
        matcher.rollback(len(written) - kept)
        refused = _write(matcher, text, kept)
        written = text if refused is None else refused[:-1]
        if refused is None:
            taken.add(text)
    matcher.rollback(len(written))
    return taken


def _write(matcher: Matcher, text: bytes, kept: int) -> bytes | None:
    """Offer the bytes behind `kept`, each as a step; the prefix that is refused, or None."""
    for end in range(kept, len(text)):
        if not matcher.accept_bytes(text[end : end + 1]):
            return text[: end + 1]
    return None


def _shared_prefix(a: bytes, b: bytes) -> int:
    size = min(len(a), len(b))
    return next((k for k in range(size) if a[k] != b[k]), size)
