"""One grammar twice, in one piece and taken apart, walked side by side."""

from __future__ import annotations

import numpy as np

from vllm_lazy_grammar.core.byte_trie import ByteTrie
from vllm_lazy_grammar.core.compiles import GrammarStore
from vllm_lazy_grammar.core.dispatch import Dispatcher, DispatchGrammar
from vllm_lazy_grammar.core.prewarm import Worker
from vllm_lazy_grammar.core.rows import RowCache, allowed_ids


class Pair:
    """A grammar in one piece and taken apart, for one vocabulary."""

    def __init__(self, key, vocabulary, engine, plan):
        self.vocabulary = vocabulary
        self.store = GrammarStore(
            engine,
            Worker(0),
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
    """Both say the same of where they stand; the tokens that are allowed there.

    xgrammar's row may lack a token that its matcher takes (seen in 0.2.8, inside a text that several ways share): the matcher decides.
    """
    rows = row_of(whole, vocabulary), row_of(apart, vocabulary)
    lacking = {token for token in set(rows[0]) ^ set(rows[1]) if not takes(whole, token) or not takes(apart, token)}
    assert not lacking, [(vocabulary.piece(t), t in rows[0]) for t in sorted(lacking)[:10]]
    assert whole.is_completed() == apart.is_completed()
    assert whole.steps == apart.steps
    return rows[0]


class Walker:
    """Two matchers that do everything together."""

    def __init__(self, pair, rng):
        self.pair, self.rng = pair, rng
        self.whole, self.apart = pair.whole.matcher(), pair.apart.matcher()
        self.places = [0]

    def allowed(self):
        return same(self.whole, self.apart, self.pair.vocabulary)

    def back(self, steps):
        """Take some steps back, as far as there are any; where the text stands then."""
        steps = min(steps, len(self.places) - 1)
        self.whole.rollback(steps)
        self.apart.rollback(steps)
        del self.places[len(self.places) - steps :]
        return self.places[-1]

    def fork(self):
        self.whole, self.apart = self.whole.fork(), self.apart.fork()

    def take(self, token):
        assert self.whole.accept(token)
        assert self.apart.accept(token)
        return self._at(self.pair.vocabulary.piece(token))

    def take_bytes(self, data):
        assert self.whole.accept_bytes(data)
        assert self.apart.accept_bytes(data)
        return self._at(data)

    def _at(self, data):
        self.places.append(self.places[-1] + len(data))
        return self.places[-1]

    def follow(self, text):
        """Walk a text in tokens drawn at random, with steps back, forks and whole pieces of bytes."""
        rng, at = self.rng, 0
        while at < len(text):
            fits = [t for t in self.allowed() if text.startswith(self.pair.vocabulary.piece(t), at)]
            act = rng.random()
            if act < 0.1:
                at = self.back(rng.randint(1, 5))
            elif act < 0.15:
                self.fork()
            elif act < 0.3 or not fits:
                at = self.take_bytes(text[at : at + rng.randint(1, 20)])
            else:
                at = self.take(rng.choice([*fits, max(fits, key=lambda t: len(self.pair.vocabulary.piece(t)))]))
        self.allowed()

    def stray(self, steps):
        """Walk anywhere."""
        vocabulary = self.pair.vocabulary
        for _ in range(steps):
            allowed = self.allowed()
            refused = self.rng.randrange(vocabulary.size)
            assert refused in allowed or not self.apart.accept(refused) or self.whole.accept(refused)
            if not allowed:
                break
            self.take(self.rng.choice(allowed))
