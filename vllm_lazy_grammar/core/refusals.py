"""Which tokens would fire the gate only to have every replay refused by the grammar: what `forbid` masks while awaiting.

A token can fire by a literal only if the literal ends in it. The byte trie says which tokens those are; from a literal already begun, only the
tokens that go on with it are looked at besides those that hold a whole one. What the grammar takes of each is asked first in bytes, all
tokens at once and prefix by prefix, so that the hundreds of tokens that begin with ``{`` cost a few steps of the matcher; what it takes in
bytes is then asked exactly as the session will feed it.

Invariants:
- The answer is the gate's and the grammar's: observing each token and refusing its replays one by one gives the same. Patterns besides
  literals are the one exception: see `Refusals.find`.
- What is cached is a function of its key: the state of the literals, the tokens that a replay could reach, and what look-behinds say.
- No compile is joined, and neither the live matcher nor, after a call, the gate is moved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_lazy_grammar.core.rows import IdSet, allowed_ids, masked_ids, ones, row_of, zeros
from vllm_lazy_grammar.core.transcript import Fed
from vllm_lazy_grammar.core.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vllm_lazy_grammar.core.byte_trie import ByteTrie
    from vllm_lazy_grammar.core.gate import Gate
    from vllm_lazy_grammar.core.inside import Inside
    from vllm_lazy_grammar.core.matcher import GrammarKey
    from vllm_lazy_grammar.core.rows import RowCache
    from vllm_lazy_grammar.core.triggers import Triggers
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

_KEPT = 16
"""Verdicts that one request keeps for itself."""

_WINDOW = 256
"""Bytes of the text in which a pattern's replay may begin, where a pattern may save a token from being masked."""

_TRIED = 64
"""Tokens that are tried on the gate, at one position, because a pattern may save them."""

_Site = tuple[int, int]
"""A literal that would end in a token: its index, and where it begins, counted from the end of the text so far."""


class _Plan(NamedTuple):
    """From one state of the literals: the tokens that could fire, by which literals, and for which of those a look-behind is asked now."""

    sites: Mapping[int, tuple[_Site, ...]]
    asks: tuple[_Site, ...]


class _Key(NamedTuple):
    """What a verdict depends on: the literals' state, the tokens under the literal that is begun, what look-behinds say of `_Plan.asks`."""

    state: int
    tail: tuple[Fed, ...]
    holds: tuple[bool, ...]


class _Match(NamedTuple):
    """A match on a token: where its replay begins, counted from the end of the text; the site, where only the token's own bytes will tell its look-behind."""

    at: int
    unsure: _Site | None


class _Open(NamedTuple):
    """Matches on one token that count or not: those whose replay is taken, those whose is not, and whether some match counts and is refused anyway."""

    taken: tuple[_Site, ...]
    refused: tuple[_Site, ...]
    sure: bool


class _Verdict(NamedTuple):
    """The tokens that are refused wherever the key is the same, and those for which look-behinds must be asked each time."""

    refused: IdSet
    open: Mapping[int, _Open]


_NONE = IdSet((), 0)
_NOTHING = _Verdict(_NONE, {})


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
        self._vocabulary, self._trie, self._triggers, self._rows = vocabulary, trie, triggers, rows
        self._trial = Trial(inside)
        self._shared = (triggers.spec, key)
        self._words = [triggers.spec.triggers[trigger].kind == "word" for trigger in triggers.literal_triggers]
        self._lengths = [len(text) for text in triggers.literals.texts]
        self._verdicts: dict[_Key, _Verdict] = {}
        self._plans: dict[int, _Plan] = {}
        self._firing: dict[int, IdSet] = {}
        self._whole: tuple[int, ...] | None = None

    def find(self, gate: Gate) -> IdSet:
        """The tokens that are refused where the gate stands, awaiting. The grammar must be compiled; `gate` is moved and put back.

        A token on which a pattern besides the literals fires, with a replay that the grammar takes, is not among them. That is looked at
        for replays that begin in the last 256 bytes, and for at most 64 tokens at a position.
        """
        key = self._key(gate)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._keep(key, self._known(key) or self._work_out(gate, key))
        refused = verdict.refused
        if verdict.open:
            refused = self._with(refused, [t for t, found in verdict.open.items() if self._decide(gate, t, found)])
        if self._triggers.has_patterns and len(refused):
            refused = self._without(refused, self._saved(gate, refused.ids, self._plan(key.state)))
        return refused

    def firing(self, gate: Gate) -> IdSet:
        """The tokens with which a literal or token trigger would end where the gate stands, awaiting, whatever the grammar says of them."""
        state = gate.literal_state
        found = self._firing.get(state)
        if found is None:
            found = self._firing[state] = IdSet(self._plan(state).sites, self._vocabulary.size)
        return found

    def _with(self, ids: IdSet, more: list[int]) -> IdSet:
        return IdSet([*ids.ids, *more], self._vocabulary.size) if more else ids

    def _without(self, ids: IdSet, fewer: set[int]) -> IdSet:
        return IdSet(ids.ids - fewer, self._vocabulary.size) if fewer else ids

    # -- what is known ------------------------------------------------------------------------------------------------

    def _key(self, gate: Gate) -> _Key:
        state = gate.literal_state
        tail = gate.tail(int(self._triggers.literals.depth[state])) if state else ()
        if not self._triggers.lookbehind:
            return _Key(state, tail, ())
        return _Key(state, tail, tuple(self._holds(gate, site, b"") for site in self._plan(state).asks))

    def _holds(self, gate: Gate, site: _Site, piece: bytes) -> bool:
        """Whether the look-behind before a site holds; `piece` is the token's, where the site begins inside it."""
        literal, start = site
        text = gate.before(self._triggers.lookbehind + max(-start, 0)) + piece
        cut = len(text) - len(piece) + start
        return self._triggers.lookbehind_holds(literal, text[max(0, cut - self._triggers.lookbehind) : cut])

    def _keep(self, key: _Key, verdict: _Verdict) -> _Verdict:
        if len(self._verdicts) >= _KEPT:
            self._verdicts.clear()
            self._plans.clear()
        self._verdicts[key] = verdict
        return verdict

    def _known(self, key: _Key) -> _Verdict | None:
        row = ones(self._vocabulary.row_words)
        if not self._rows.get(("refused", self._shared, key), row):
            return None
        ids = masked_ids(row, self._vocabulary.size)
        return _Verdict(IdSet(ids.tolist(), self._vocabulary.size), {}) if len(ids) else _NOTHING

    # -- which tokens could fire --------------------------------------------------------------------------------------

    def _plan(self, state: int) -> _Plan:
        plan = self._plans.get(state)
        if plan is None:
            sites = {token: self._sites(state, token) for token in self._candidates(state)}
            asks: tuple[_Site, ...] = ()
            if self._triggers.lookbehind:
                now = {site for found in sites.values() for site in found if site[1] <= 0}
                asks = tuple(sorted(site for site in now if not self._words[site[0]]))
            plan = self._plans[state] = _Plan(sites, asks)
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
        outputs, lengths = self._triggers.literals.outputs, self._lengths
        _, ends = self._triggers.literals.scan(state, self._vocabulary.piece(token))
        return tuple([(literal, end - lengths[literal]) for end, at in ends for literal in outputs[at]])

    # -- what the grammar refuses -------------------------------------------------------------------------------------

    def _work_out(self, gate: Gate, key: _Key) -> _Verdict:
        matches = {token: list(self._matches(gate, key, token)) for token in self._plan(key.state).sites}
        tail = b"".join([fed.data for fed in key.tail])
        piece = self._vocabulary.piece
        texts = {token: [_text(tail, piece(token), match.at) for match in found] for token, found in matches.items()}
        possible = self._trial.taken({text for found in texts.values() for text in found})
        refused: list[int] = []
        undecided: dict[int, _Open] = {}
        for token, found in matches.items():
            taken = [
                match
                for match, text in zip(found, texts[token], strict=True)
                if text in possible and self._trial.takes(self._replay(key.tail, match.at, token))
            ]
            if len(taken) == len(found) or not all(match.unsure for match in taken):
                continue
            if any(match.unsure for match in found):
                undecided[token] = _opened(found, taken)
            else:
                refused.append(token)
        verdict = _Verdict(IdSet(refused, self._vocabulary.size), undecided)
        if not undecided:
            self._publish(key, verdict.refused)
        return verdict

    def _publish(self, key: _Key, refused: IdSet) -> None:
        row = ones(self._vocabulary.row_words)
        refused.mask(row)
        self._rows.put(("refused", self._shared, key), row)

    def _matches(self, gate: Gate, key: _Key, token: int) -> Iterator[_Match]:
        """The matches on a token that count, or may: a literal that begins inside the token is judged by a look-behind that sees the token."""
        plan, length, after = self._plan(key.state), gate.length, self._triggers.after
        if token in self._triggers.token_ids:
            yield _Match(len(self._vocabulary.piece(token)) if after else 0, None)
        for site in plan.sites[token]:
            literal, start = site
            word = self._words[literal]
            if word and -start > length:
                continue
            if site in plan.asks and not key.holds[plan.asks.index(site)]:
                continue
            unsure = not word and start > 0 and self._triggers.lookbehind
            yield _Match(start + self._lengths[literal] if after else start, site if unsure else None)

    def _replay(self, tail: tuple[Fed, ...], at: int, token: int) -> tuple[Fed, ...]:
        last = Fed(token, self._vocabulary.piece(token)[max(at, 0) :], whole=at <= 0)
        return (*_cut(tail, -at), last) if last.data else ()

    def _decide(self, gate: Gate, token: int, found: _Open) -> bool:
        """Whether a token is refused now: some match counts, and none whose replay is taken."""
        piece = self._vocabulary.piece(token)
        if any(self._holds(gate, site, piece) for site in found.taken):
            return False
        return found.sure or any(self._holds(gate, site, piece) for site in found.refused)

    # -- patterns -----------------------------------------------------------------------------------------------------

    def _saved(self, gate: Gate, refused: Iterable[int], plan: _Plan) -> set[int]:
        """The refused tokens on which a pattern fires with a replay that the grammar takes.

        Only a token behind which the grammar takes some end of the text can be one; those are tried on the gate.
        """
        text = b"".join([fed.data for fed in gate.tail(_WINDOW)])
        begun = self._trial.taken({text[at:] for at in range(len(text))})
        ends = {token: self._ends(begun, token, plan.sites[token]) for token in refused}
        possible = self._trial.taken({end for found in ends.values() for end in found})
        worth = (token for token in sorted(ends) if self._triggers.after or not possible.isdisjoint(ends[token]))
        return {token for token, _ in zip(worth, range(_TRIED), strict=False) if self._trial.takes_some(gate, token)}

    def _ends(self, begun: set[bytes], token: int, sites: Iterable[_Site]) -> set[bytes]:
        """The ends of the text with the token that the grammar may take, but those that words were refused for."""
        piece = self._vocabulary.piece(token)
        known = {start for literal, start in sites if self._words[literal]}
        return {start + piece for start in begun if -len(start) not in known} | {
            piece[at:] for at in range(len(piece)) if at not in known
        }


def _opened(found: list[_Match], taken: list[_Match]) -> _Open:
    refused = [match for match in found if match not in taken]
    return _Open(
        tuple([match.unsure for match in taken if match.unsure]),
        tuple([match.unsure for match in refused if match.unsure]),
        sure=not all(match.unsure for match in refused),
    )


def _text(tail: bytes, piece: bytes, at: int) -> bytes:
    """The text from `at` on, counted from the end of the tail, with the token's piece."""
    return piece[at:] if at >= 0 else tail[max(0, len(tail) + at) :] + piece


def _cut(tail: tuple[Fed, ...], size: int) -> Iterator[Fed]:
    """The last `size` bytes of a tail."""
    skip = sum([len(fed.data) for fed in tail]) - size
    for fed in tail:
        if skip < len(fed.data):
            yield fed if skip <= 0 else Fed(fed.token, fed.data[skip:], whole=False)
        skip -= len(fed.data)
