"""The slow twins of the rows while awaiting: the gate and the grammar are asked about each token of the vocabulary on its own."""

from __future__ import annotations

import functools

from vllm_lazy_grammar.core.blanks import START
from vllm_lazy_grammar.core.gate import Fired
from vllm_lazy_grammar.core.journal import Phase, Position
from vllm_lazy_grammar.core.matcher import NO_MATCHER


def takes(inside, replay):
    """Whether the grammar takes the replay, fed from a new start."""
    at = inside.start(Position(Phase.AWAITING, NO_MATCHER, steps=0, blanks=START))
    for fed in replay:
        at = inside.take_fed(at, fed)
        if at is None:
            return False
    return True


def observe(gate, inside, token):
    """Offer one token as a session does; whether the gate fired, and whether some replay was taken."""
    outcome = gate.observe(token)
    fired = isinstance(outcome, Fired)
    while isinstance(outcome, Fired):
        if takes(inside, outcome.replay):
            return fired, True
        outcome = gate.refuse()
    return fired, False


def refused(gate, inside, vocabulary, *, literals_only=False):
    """The tokens on which the gate would fire and every replay is refused.

    `literals_only`: leave out those on which only a pattern matches, for which `forbid` acts like `disarm`.
    """
    found = set()
    for token in range(vocabulary.size):
        fired, taken = observe(gate.fork(), inside, token)
        if fired and not taken and (not literals_only or _by_literal(gate.fork(), token)):
            found.add(token)
    return found


def _by_literal(gate, token):
    outcome = gate.observe(token)
    while isinstance(outcome, Fired):
        index = gate.triggers.spec.triggers.index(outcome.trigger)
        if outcome.trigger.kind == "token" or index in gate.triggers.literal_triggers:
            return True
        outcome = gate.refuse()
    return False


@functools.cache
def lacking(text):
    """The possible ways to finish a half character at the end of the text: None where there is none to finish."""
    for size in (1, 2, 3):
        half = text[len(text) - size :]
        if len(half) == size and half[0] >= 0xC0:
            finishes = {character.encode()[size:] for character in _CHARACTERS if character.encode().startswith(half)}
            return {finish for finish in finishes if finish} or None
    return None


_CHARACTERS = "".join(map(chr, [*range(0x80, 0xD800), *range(0xE000, 0x10000)]))


def leads(text, words, piece, *, tails):
    """Whether the piece goes on towards one of the words from the end of the text, as (standing, yes) for each standing in order."""
    starts = [
        start for start in range(len(text)) if any(w.startswith(text[start:]) and w != text[start:] for w in words)
    ]
    for start in starts:
        yield _on(text[start:] + piece, words, tails=tails)
    finishes = lacking(text[-3:])
    if finishes is not None:
        yield any(
            finish.startswith(piece)
            or (piece.startswith(finish) and (piece == finish or _on(piece[len(finish) :], words, tails=tails)))
            for finish in finishes
        )
    yield _on(piece, words, tails=tails)


def _on(written, words, *, tails):
    return any(word.startswith(written) or (tails and written.startswith(word)) for word in words)


def forced(gate, inside, vocabulary, stop_ids, *, there):
    """The tokens that lead into a trigger: of the first standing from which any does."""
    words = [way.data for way in gate.triggers.forcible if way.token is None]
    out = (refused(gate, inside, vocabulary, literals_only=True) if there else set()) | set(stop_ids)
    columns = {
        token: list(leads(gate.buffer, words, vocabulary.piece(token), tails=there))
        for token in range(vocabulary.size)
        if vocabulary.piece(token) and token not in out
    }
    tokens = gate.triggers.token_ids - out
    for standing in zip(*columns.values(), strict=True):
        ways = {token for token, yes in zip(columns, standing, strict=True) if yes}
        if ways:
            return ways | tokens
    return tokens
