"""Follows an answer, token by token, through a request's triggers and grammar; and writes random calls by walking the grammar.

Stands in for the session with the parts that matter here: the gate, a matcher per activation, re-arming.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import xgrammar

from vllm_lazy_grammar.core.gate import Fired, Gate
from vllm_lazy_grammar.core.triggers import Triggers
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.engines.spelling import spelled

BYTES = [bytes([b]) for b in range(256)]


@functools.cache
def _compiler():
    info = xgrammar.TokenizerInfo(BYTES, xgrammar.VocabType.RAW, stop_token_ids=[], add_prefix_space=False)
    return xgrammar.GrammarCompiler(info, max_threads=1)


def convert(schema, separators):
    return str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=False, separators=separators))


@functools.lru_cache(512)
def compiled(key):
    if key.kind == "grammar":
        return _compiler().compile_grammar(key.source)
    return _compiler().compile_structural_tag(spelled(key.source, convert))


def matcher(key):
    return xgrammar.GrammarMatcher(compiled(key), terminate_without_stop_token=False)


def byte_vocabulary(markers=()):
    """Every byte a token, and the markers as special tokens behind them."""
    added = {text: 256 + i for i, text in enumerate(dict.fromkeys(markers))}
    pieces = BYTES + [text.encode() for text in added]
    return Vocabulary(pieces, len(pieces), special_ids=added.values(), added=added)


@dataclass(frozen=True)
class Walk:
    """What became of an answer.

    Args:
        starts: byte at which each activation began.
        refused: byte at which the grammar refused, None where it did not.
        complete: whether the last activation is complete.
        inside: whether the answer ends inside the grammar.
    """

    starts: list
    refused: int | None
    complete: bool
    inside: bool


def follow(choice, vocabulary, tokens, context=b""):
    """Take each token as a session would."""
    gate = Gate(Triggers.compile(choice.triggers, vocabulary, stop_ids=()), vocabulary, context=context)
    starts, at, inside = [], 0, None
    for token in tokens:
        piece = vocabulary.piece(token)
        if inside is not None and not inside.accept_string(piece):
            if not inside.is_completed():
                return Walk(starts, at, complete=False, inside=True)
            inside = None
            gate.rearm()
        elif inside is not None:
            at += len(piece)
            continue
        inside = _observe(gate, choice, token, at + len(piece), starts)
        at += len(piece)
    return Walk(starts, None, complete=inside is not None and inside.is_completed(), inside=inside is not None)


def _observe(gate, choice, token, end, starts):
    outcome = gate.observe(token)
    while isinstance(outcome, Fired):
        replay = b"".join(fed.data for fed in outcome.replay)
        inside = matcher(choice.grammar)
        if inside.accept_string(replay):
            starts.append(end - len(replay))
            return inside
        outcome = gate.refuse()
    return None


WORDS = ["a", "b c", "7", "é", "日本", "x_y", ", ", "Ω", "n", "://", " "]


def random_call(choice, rng: random.Random, closers, most=3000):
    """A complete text of the grammar: words where they fit, now and then what might close something, else any byte."""
    inside = matcher(choice.grammar)
    out = b""
    while not inside.is_completed() or rng.random() < 0.3:
        if len(out) > most:
            return None
        piece = _next(inside, rng, closers)
        if piece is None:
            return out if inside.is_completed() else None
        out += piece
    return out


def _next(inside, rng, closers):
    certain = _certain(inside)
    if certain and inside.accept_string(certain):
        return certain.encode()
    tries = [rng.choice(closers), rng.choice(WORDS)] if rng.random() < 0.6 else [rng.choice(WORDS), rng.choice(closers)]
    for text in tries:
        if inside.accept_string(text):
            return text.encode()
    bitmask = xgrammar.allocate_token_bitmask(1, 256)
    inside.fill_next_token_bitmask(bitmask)
    row = bitmask[0]
    allowed = [b for b in range(256) if int(row[b // 32]) >> (b % 32) & 1]
    if not allowed:
        return None
    if b"0"[0] in allowed:  # no exponents: readers write such numbers otherwise
        allowed = [b for b in allowed if b not in b"eE"]
    byte = rng.choice(allowed)
    assert inside.accept_token(byte)
    return bytes([byte])


def _certain(inside):
    try:
        return inside.find_jump_forward_string()
    except UnicodeDecodeError:  # inside a character
        return ""
