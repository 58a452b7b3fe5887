"""One grammar twice: in one piece and taken apart; walked side by side."""

from __future__ import annotations

import random

import numpy as np

from tests.tools import instances, walking
from tests.tools.cases import choice_for, closers, preset_of, servable
from vllm_lazy_grammar.core.byte_trie import ByteTrie
from vllm_lazy_grammar.core.compiles import GrammarStore
from vllm_lazy_grammar.core.dispatch import Dispatcher, DispatchGrammar
from vllm_lazy_grammar.core.prewarm import Worker
from vllm_lazy_grammar.core.rows import RowCache, allowed_ids
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.tools.choice import CallSettings
from vllm_lazy_grammar.tools.parts import plan_of

LONGEST = 9
SPECIAL = "<special>"


def tools_for(family, seed, least=2):
    """Tools of a family with names of their own, at least so many; None where it can not write so many."""
    found = {}
    for draw in range(seed, seed + 40):
        for tool in servable(family, instances.tools_and_calls(draw, awkward=draw % 2 == 1)[0]):
            found.setdefault(tool["function"]["name"], tool)
        if len(found) >= least:
            return list(found.values())
    return None


def texts_of(family, choice, seed, count=2):
    """Texts of a grammar."""
    rng = random.Random(seed)  # noqa: S311 -- the same in every run
    found = (walking.random_call(choice, rng, closers(preset_of(family))) for _ in range(4 * count))
    return [text for text in found if text is not None][:count]


def vocabulary_with(texts, rng, pieces=250):
    """All bytes, and pieces of the texts: tokens that go over whatever there is to go over."""
    kept = [bytes((byte,)) for byte in range(256)]
    whole = b"".join(texts)
    for _ in range(pieces if whole else 0):
        begin = rng.randrange(len(whole))
        kept.append(whole[begin : begin + rng.randint(2, LONGEST)])
    kept += [rng.choice(kept) + rng.choice(kept) for _ in range(20)]
    return Vocabulary([*kept, SPECIAL.encode(), b""], len(kept) + 40, special_ids=[len(kept)], added={SPECIAL: len(kept)})


class Pair:
    """A grammar in one piece and taken apart, for one vocabulary."""

    def __init__(self, key, vocabulary, engine=None, plan=plan_of, threads=0):
        self.vocabulary = vocabulary
        engine = XgrammarEngine(vocabulary, max_threads=1) if engine is None else engine
        self.worker = Worker(threads)
        self.store = GrammarStore(
            engine,
            self.worker,
            RowCache(1 << 20),
            vocabulary.row_words,
            limit_bytes=1 << 24,
            top_k=0,
            dispatcher=Dispatcher(ByteTrie(vocabulary), plan),
        )
        self.hold = self.store.get(key)
        self.apart = self.hold.result()
        self.whole = engine.compile(key)

    @property
    def is_apart(self):
        return isinstance(self.apart, DispatchGrammar)

    def matchers(self):
        return self.whole.matcher(), self.apart.matcher()


def row_of(matcher, vocabulary, before=0x55555555):
    row = np.full(vocabulary.row_words, before, np.int32)
    matcher.fill(row)
    return allowed_ids(row, vocabulary.size).tolist()


def takes(matcher, token):
    """Whether a matcher takes a token; it is left where it was."""
    taken = matcher.accept(token)
    matcher.rollback(taken)
    return taken


def same(whole, apart, vocabulary):
    """Whether both say the same of where they stand.

    xgrammar's row may lack a token that its matcher takes (seen in 0.2.8, in the middle of a text that several ways share): the matcher decides.
    """
    rows = row_of(whole, vocabulary), row_of(apart, vocabulary)
    lacking = {token for token in set(rows[0]) ^ set(rows[1]) if not takes(whole, token) or not takes(apart, token)}
    assert not lacking, [(vocabulary.piece(t), t in rows[0]) for t in sorted(lacking)[:10]]
    assert whole.is_completed() == apart.is_completed()
    assert whole.steps == apart.steps
    return rows[0]


def walk(pair, text, rng, strays=6):
    """Walk a text in tokens drawn at random, with steps back and forks, then stray from it; both say the same at every step."""
    vocabulary = pair.vocabulary
    whole, apart = pair.matchers()
    places, at = [0], 0
    while True:
        allowed = same(whole, apart, vocabulary)
        if at >= len(text):
            break
        fits = [t for t in allowed if text.startswith(vocabulary.piece(t), at)]
        assert fits, text[at : at + 20]
        act = rng.random()
        if act < 0.1 and len(places) > 1:
            back = rng.randint(1, min(5, len(places) - 1))
            whole.rollback(back)
            apart.rollback(back)
            del places[-back:]
            at = places[-1]
            continue
        if act < 0.15:
            whole, apart = whole.fork(), apart.fork()
        if act < 0.3:
            data = text[at : at + rng.randint(1, 20)]
            assert whole.accept_bytes(data) and apart.accept_bytes(data)
            at += len(data)
        else:
            token = rng.choice([*fits, max(fits, key=lambda t: len(vocabulary.piece(t)))])
            assert whole.accept(token) and apart.accept(token)
            at += len(vocabulary.piece(token))
        places.append(at)
    back = rng.randint(0, len(places) - 1)
    whole.rollback(back)
    apart.rollback(back)
    for _ in range(strays):
        allowed = same(whole, apart, vocabulary)
        refused = rng.randrange(vocabulary.size)
        if refused not in allowed:
            assert not apart.accept(refused)
        if not allowed:
            break
        token = rng.choice(allowed)
        assert whole.accept(token) and apart.accept(token)


ANY = CallSettings(any_whitespace=True)


def choice_and_texts(family, seed, **options):
    """A choice between at least two tools, and texts of its grammar."""
    tools = tools_for(family, seed)
    if tools is None:
        return None
    choice = choice_for(family, tools, **options)
    return choice, texts_of(family, choice, seed)
